"""The memory of a training step against the memory model: a few short passes tell what longer steps take."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MixtralConfig, Qwen3Config

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure.memory import profile_memory
from hdpcomm.models import Llama, from_pretrained, set_recompute
from hdpcomm.models import LlamaConfig as OwnConfig
from hdpcomm.models.recompute import recomputed_layers
from hdpcomm.offload import ActivationOffload, MemoryMeter, PinnedPool
from hdpcomm.plan import ClusterSpec, CostModel, ModelSpec, Planner, SequenceFragment
from hdpcomm.plan.memory import Line, StepMemory
from hdpcomm.run.model import spec_of
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from hdpcomm.train.step.runner import StepSettings
from tests.harness.pipelines import FixedPlanner

SIZE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZE |= {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
OWN = OwnConfig(vocabulary=500, layers=4, hidden=64, heads=4, kv_heads=2, ffn=160)
MODELS = {
    "Llama here": lambda: Llama(OWN),
    "Llama": lambda: from_pretrained(LlamaConfig(vocab_size=2000, **SIZE)),
    "Qwen3": lambda: from_pretrained(Qwen3Config(vocab_size=1000, **SIZE)),
    "Gemma 3": lambda: from_pretrained(Gemma3TextConfig(vocab_size=1000, sliding_window=64, **SIZE)),
    "Mixtral": lambda: from_pretrained(MixtralConfig(vocab_size=1000, num_local_experts=4, **SIZE)),
}
LENGTHS = [350, 250, 150]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def masters_of(trainer):
    return [] if trainer.runner.masters is None else [piece.master for piece in trainer.runner.masters.pieces]


def kept_bytes(trainer):
    """Bytes of all that a trainer keeps between steps; shared storages count once."""
    gradients = trainer.runner.gradients
    tensors = [
        *trainer.model.parameters(),
        *trainer.model.buffers(),
        gradients.sums.flat,
        *masters_of(trainer),
    ]
    tensors += [t for state in trainer.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def measured_and_predicted(name, dtype, zero):
    """(measured, predicted) bytes of a step, for no, two and all layers recomputed; on one rank of several."""
    torch.set_num_threads(1)
    comm = hdp.init()
    profile = profile_memory(
        MODELS[name]().to(dtype or torch.float32), comm, adamw, tokens=256, settings=StepSettings(zero, dtype)
    )
    found = []
    for recompute in (0, 2, 4):
        model = MODELS[name]()
        set_recompute(model, recompute)
        planner = Planner(None, ClusterSpec(comm.size, 1500), "static", CostModel(1e-9, 1e-6), context_ranks=comm.size)
        trainer = Trainer(model, adamw(model.parameters()), planner, comm, zero=zero, dtype=dtype)
        for _ in range(2):
            with MemoryMeter("cpu") as meter:
                trainer.step(LENGTHS, lambda i: torch.arange(LENGTHS[i]) % 100)
        tokens = -(-sum(LENGTHS) // comm.size)
        found.append((kept_bytes(trainer) + meter.peak, profile.peak_bytes(tokens, recompute)))
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, None) for name in MODELS), *((name, torch.bfloat16) for name in ("Llama here", "Mixtral"))],
    ids=lambda value: str(value or "fp32").removeprefix("torch."),
)
def test_a_step_takes_what_the_model_says(name, dtype):
    for measured, predicted in measured_and_predicted(name, dtype, 0):
        assert predicted == pytest.approx(measured, rel=0.05)


def test_on_two_ranks_with_a_sharded_optimizer():
    for rows in run_threads(
        functools.partial(measured_and_predicted, "Llama here", torch.bfloat16, 1), 2, timeout=100.0
    ):
        for measured, predicted in rows:
            assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("vocabulary", "layers", "dtype"),
    [(500, 4, torch.float32), (500, 4, torch.bfloat16), (3000, 6, torch.float32)],
    ids=str,
)
def test_the_analytic_model_is_that_of_the_llama_here(vocabulary, layers, dtype):
    config = OwnConfig(vocabulary=vocabulary, layers=layers, hidden=64, heads=4, kv_heads=2, ffn=160)
    measured = profile_memory(Llama(config, dtype=dtype), hdp.init(), adamw, tokens=256)
    spec = ModelSpec(layers, 64, 4, 2, 160, vocabulary, dtype_bytes=dtype.itemsize)
    derived = StepMemory.of(spec, states=measured.states)
    assert derived.layer == measured.layer
    assert derived.layer_input == measured.layer_input
    for tokens in (5000, 50_000):
        for recompute in (0, layers // 2, layers):
            wanted = measured.activation_bytes(tokens, recompute)
            assert derived.activation_bytes(tokens, recompute) == pytest.approx(wanted, rel=0.05)


def test_the_model_is_left_as_it_was():
    model = Llama(OWN)
    set_recompute(model, 3)
    profile = profile_memory(model, hdp.init(), adamw, tokens=64)
    assert recomputed_layers(model) == 3
    assert model.chunk_tokens is None
    assert all(p.grad is None for p in model.parameters())
    least = profile.peak_bytes(2000, 4)
    assert profile.fewest_recomputed(profile.peak_bytes(2000), 2000) == 0
    assert profile.fewest_recomputed(least, 2000) == 4
    assert 2000 <= profile.capacity(least, 4) <= 2001
    assert profile.capacity(profile.states, 0) == 0
    with pytest.raises(InvalidUsage, match=r"2,000 tokens a rank take .* with all 4 layers recomputed, .* lower the"):
        profile.fewest_recomputed(least * 0.9, 2000)
    with pytest.raises(InvalidUsage, match="tokens is 7"):
        profile_memory(model, hdp.init(), adamw, tokens=7)


def predicted_in_slices(profile, length, slices, recompute, ratio=0.0):
    """The passes of one slice, and what is kept of all, of the last one no sums. A pass is largest where it would be
    without slices, or later in a layer, in its attention: the MLP's share of it is free by then, and the gradients of
    all keys before the slice are there as a kernel's piece and as a sum. With a ratio of 1, the keys of a layer come in
    an MLP while the sums of the one before leave; in attention there are its keys and sums, too."""
    layer, tokens = 2 * OWN.kv_heads * (OWN.hidden // OWN.heads) * 4, length // slices
    later, mlp = length - tokens, 2 * 3 * OWN.ffn * 4
    lines = {name: getattr(profile, name) for name in ("backward", "recomputed")}
    lines = {name: Line(line.fixed + 2 * later * layer, line.token - mlp) for name, line in lines.items()}
    in_attention = replace(profile, forward=Line(0.0, 0.0), logits=0.0, **lines)
    passes = [each.peak_bytes(tokens, recompute, ratio) for each in (profile, in_attention)]
    spec = replace(spec_of(OWN), dtype_bytes=4)
    assert spec.kept_values() * 4 == OWN.layers * layer
    if ratio:
        return max(passes[0] + 2 * later * layer, passes[1] + (4 * later - tokens) * layer)
    return max(passes) + (length + later) * layer * OWN.layers


@pytest.mark.parametrize("recompute", [0, 4])
@pytest.mark.parametrize(
    ("length", "slices", "ratio"),
    [(750, 3, 0.0), (750, 3, 1.0), (750, 5, 0.0), (750, 5, 1.0), (3000, 10, 0.0), (3000, 20, 1.0), (3000, 40, 0.0)],
)
def test_a_sequence_in_slices(length, slices, ratio, recompute):
    bounds = [length * k // slices for k in range(slices + 1)]

    def main():
        torch.set_num_threads(1)
        comm = hdp.init()
        profile = profile_memory(Llama(OWN), comm, adamw, tokens=256)
        model = Llama(OWN)
        set_recompute(model, recompute)
        planner = FixedPlanner(1, 1, [((0,), SequenceFragment(0, a, b)) for a, b in pairwise(bounds)], ratio=ratio)
        offload = None
        if ratio:
            offload = ActivationOffload(PinnedPool(64 << 20, device="cpu"), model, min_bytes=1)
        trainer = Trainer(model, adamw(model.parameters()), planner, comm, offload=offload)
        for _ in range(2):
            with MemoryMeter("cpu") as meter:
                trainer.step([length], lambda _: torch.arange(length) % 100)
        return kept_bytes(trainer) + meter.peak, predicted_in_slices(profile, length, slices, recompute, ratio)

    [(measured, predicted)] = run_threads(main, 1)
    assert measured == pytest.approx(predicted, rel=0.04)
