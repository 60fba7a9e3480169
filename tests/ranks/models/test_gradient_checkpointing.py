"""transformers' activation checkpoints, reentrant or not: the gradients of a step without them, in every family."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import positions, shard
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt
from hdpcomm.testing import run_threads

transformers = pytest.importorskip("transformers", minversion="5.23")

from tests.harness.families import FAMILIES, SIZE, model_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")

CU = np.cumsum([0, 13, 1, 20, 5])
IDS = torch.randint(97, (int(CU[-1]),), generator=torch.Generator().manual_seed(3))
SHARED_KV = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
}  # fmt: skip
OTHERS = {
    # Their layers keep unknown keyword arguments from their attention.
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5}),
    "nemotron": ("Nemotron", {"partial_rotary_factor": 0.5}),
    "gpt2": ("GPT2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "bamba": ("Bamba", {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
        "mamba_chunk_size": 8, "z_loss_coefficient": 0.0,
    }),
    "gemma3n": ("Gemma3nText", {
        **SHARED_KV, "intermediate_size": [48] * 4, "laurel_rank": 4, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    }),
    "gemma4": ("Gemma4Text", {**SHARED_KV, "global_head_dim": 8, "num_global_key_value_heads": 2}),
}  # fmt: skip


def new_model(family, **changes):
    if family not in OTHERS:
        return model_of(family, **changes).train()
    name, extra = OTHERS[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZE, **extra, **changes})
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def checkpoint_layers(model, reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def leave(_):
    pass


def step(models, before=leave, after=leave):
    """Gradients of each rank's model. ``before`` and ``after`` adapt(): what is done to the model."""
    adapted = []
    for model in models:
        before(model)
        adapted.append(adapt(model))
        after(model)

    def main():
        comm = hdp.init()
        cu, where = torch.as_tensor(CU), {"rank": comm.rank, "size": comm.size}
        labels = torch.cat([torch.nn.functional.pad(IDS[a + 1 : b], (0, 1), value=-100) for a, b in pairwise(CU)])
        tokens, labels = (shard(x, cu, **where) for x in (IDS, labels))
        adapted[comm.rank](tokens, positions=positions(cu, **where), cu_seqlens=cu, comm=comm, labels=labels).backward()
        return {name: p.grad for name, p in models[comm.rank].named_parameters()}

    return run_threads(main, len(models), timeout=60)


def check_equal(found, wanted):
    for mine, other in zip(found, wanted, strict=True):
        for name, gradient in other.items():
            assert (gradient is None) == (mine[name] is None), name
            assert gradient is None or torch.equal(mine[name], gradient), name


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_gradients_are_those_without(family, size):
    first = new_model(family)
    wanted = step([copy.deepcopy(first) for _ in range(size)])
    router_loss = getattr(first.config, "output_router_logits", False)
    for reentrant in (False, True) if family not in ("gemma3n", "gemma4") and not router_loss else (False,):
        found = step(
            [copy.deepcopy(first) for _ in range(size)],
            after=lambda model, reentrant=reentrant: checkpoint_layers(model, reentrant),
        )
        check_equal(found, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_may_be_set_before_and_changed_after(reentrant):
    model = new_model("stablelm")
    wanted = step([copy.deepcopy(model)])
    for change in (
        {"before": lambda m: checkpoint_layers(m, reentrant)},
        {"after": lambda m: checkpoint_layers(m, not reentrant)},
        {"after": lambda m: m.gradient_checkpointing_disable()},
    ):
        model.zero_grad(set_to_none=True)
        model.set_attn_implementation("eager")
        check_equal(step([model], **change), wanted)


def own_gradients(model):
    model(input_ids=IDS[None], labels=IDS[None], use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_shared_keys_and_values_in_reentrant_checkpoints_are_refused(family):
    """transformers' own gradients are wrong there: the keys and values have no graph."""
    first = new_model(family)
    wrong = copy.deepcopy(first)
    checkpoint_layers(wrong, True)
    wanted, found = own_gradients(copy.deepcopy(first)), own_gradients(wrong)
    assert any(not torch.allclose(found[n], wanted[n]) for n in wanted if wanted[n] is not None)
    with pytest.raises(InvalidUsage, match="shared_kv_states, and a reentrant"):
        step([copy.deepcopy(first)], after=lambda model: checkpoint_layers(model, True))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_shared_keys_and_values_without_are_exact(family, size):
    first = new_model(family)
    plain = copy.deepcopy(first)
    for begin, end in pairwise(CU):
        if end - begin > 1:
            tokens = IDS[None, begin:end]
            (plain(input_ids=tokens, labels=tokens, use_cache=False).loss * (end - begin - 1)).backward()
    found = step([copy.deepcopy(first) for _ in range(size)])
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            total = sum(each[name] for each in found)
            assert float((total - parameter.grad).norm()) <= 1e-4 * float(parameter.grad.norm()), name


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "qwen3-moe", "qwen3-next"])
def test_a_routers_loss_with_reentrant_checkpoints_is_refused(family):
    """transformers' own gradients are wrong there: the router's logits have no graph."""
    first = new_model(family)
    wrong = copy.deepcopy(first)
    checkpoint_layers(wrong, True)
    wanted, found = own_gradients(copy.deepcopy(first)), own_gradients(wrong)
    assert any(not torch.allclose(found[n], wanted[n]) for n in wanted if wanted[n] is not None)
    with pytest.raises(InvalidUsage, match="router's logits for its auxiliary loss beside its output, and a reentrant"):
        step([copy.deepcopy(first)], after=lambda model: checkpoint_layers(model, True))
    without = new_model(family, output_router_logits=False)
    plain = step([copy.deepcopy(without)])
    check_equal(step([without], after=lambda model: checkpoint_layers(model, True)), plain)


def test_layers_that_share_nothing_are_not_refused():
    first = new_model("gemma3n", num_kv_shared_layers=0)
    wanted = step([copy.deepcopy(first)])
    check_equal(step([copy.deepcopy(first)], after=lambda model: checkpoint_layers(model, True)), wanted)


def test_without_a_pack_checkpoints_are_as_they_were():
    model, plain = new_model("stablelm"), new_model("stablelm")
    adapt(model, lean=False)
    checkpoint_layers(model, True)
    model.set_attn_implementation("eager")
    check_equal([own_gradients(model)], [own_gradients(plain)])
