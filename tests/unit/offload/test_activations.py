"""ActivationOffload on a simulated device: bitwise equal gradients, less memory, clear errors."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.offload import ActivationOffload, MemoryMeter, PinnedPool

RATIOS = (0.0, 0.3, 0.5, 1.0)
TOKENS = 96


class Reference:
    """The reference Llama on one rank, with its loss on a pack of two sequences."""

    def __init__(self, layers: int = 5, tokens: int = TOKENS) -> None:
        self.comm = hdp.init()
        self.model = Llama(LlamaConfig(layers=layers, hidden=32, heads=4, kv_heads=2, ffn=64))
        self.tokens = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(1))
        self.bounds = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32)
        self.places = torch.cat((torch.arange(tokens // 3), torch.arange(tokens - tokens // 3)))

    def loss(self) -> torch.Tensor:
        logits = self.model(self.tokens, positions=self.places, cu_seqlens=self.bounds, comm=self.comm)
        return nn.functional.cross_entropy(logits, self.tokens.roll(-1))

    def offload(self, size: int = 4 << 20, **options: object) -> ActivationOffload:
        return ActivationOffload(PinnedPool(size, device="cpu"), self.model, min_bytes=1, **options)


def gradients(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    run().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def assert_idle(offload: ActivationOffload) -> None:
    gc.collect()
    stats = offload.stats()
    assert stats.held == 0
    assert stats.pool.in_use == 0


def under(offload: ActivationOffload, ratio: float, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def inside() -> torch.Tensor:
        with offload.micro_batch(ratio, tokens=TOKENS):
            return run()

    return inside


def test_gradients_of_the_reference_llama_are_the_same_to_the_bit() -> None:
    case = Reference()
    offload = case.offload()
    expected = gradients(case.model, case.loss)
    before = 0
    for ratio in RATIOS:
        assert_same(gradients(case.model, under(offload, ratio, case.loss)), expected)
        assert_idle(offload)
        stats = offload.stats()
        assert (stats.stored_bytes > before) == (ratio > 0)
        before = stats.stored_bytes
    assert stats.shared > 0  # the rotary tables, and what q, k and v have in common
    with offload.micro_batch():
        loss = case.loss()
    loss.backward()
    assert_idle(offload)


FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"num_key_value_heads": 2, "head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_models(family: str, checkpointed: bool) -> None:
    transformers = pytest.importorskip("transformers", minversion="4.54")
    model_class, config_class, extra = FAMILIES[family]
    sizes = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4}
    if family != "gpt2":
        sizes["intermediate_size"] = 64
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, config_class)(vocab_size=97, **sizes, **special, **extra)
    torch.manual_seed(1)
    model = getattr(transformers, model_class)(config)
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    ids = torch.randint(0, 97, (1, TOKENS), generator=torch.Generator().manual_seed(3))

    def loss() -> torch.Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    offload = ActivationOffload(PinnedPool(8 << 20, device="cpu"), model, min_bytes=1)
    assert len(offload.layers) == 5
    expected = gradients(model, loss)
    for ratio in RATIOS:
        assert_same(gradients(model, under(offload, ratio, loss)), expected)
        assert_idle(offload)
    stored = offload.stats().stored_bytes
    assert stored > 0
    if checkpointed:  # the inputs of the layers and what they share, at 0.3 + 0.5 + 1
        assert stored < 1.8 * 3 * 8 * TOKENS * 32 * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_only_the_input_of_a_checkpoint_is_offloaded(reentrant: bool) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(5))
    x = torch.randn(TOKENS, 16, requires_grad=True)

    def run() -> torch.Tensor:
        hidden = x
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        return hidden.square().sum()

    offload = ActivationOffload(PinnedPool(1 << 20, device="cpu"), layers, min_bytes=1)
    expected = gradients(layers, run)
    assert_same(gradients(layers, under(offload, 1.0, run)), expected)
    assert_idle(offload)
    # A reentrant checkpoint saves its input after the layer, so that it counts for the next one: one more stays.
    assert offload.stats().stored_bytes == (2 if reentrant else 3) * TOKENS * 16 * 4


def test_gradients_of_several_micro_batches_add_up() -> None:
    case = Reference()
    offload = case.offload()

    def one_by_one() -> torch.Tensor:
        case.loss().backward()
        return case.loss()

    expected = gradients(case.model, one_by_one)
    offloaded = under(offload, 0.5, case.loss)

    def accumulated() -> torch.Tensor:
        offloaded().backward()
        return offloaded()

    assert_same(gradients(case.model, accumulated), expected)
    case.model.zero_grad(set_to_none=True)
    first, second = offloaded(), under(offload, 1.0, case.loss)()  # both forward passes first, as in a pipeline
    first.backward()
    second.backward()
    assert_same([p.grad for p in case.model.parameters()], expected)
    del first, second
    assert_idle(offload)


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers() -> None:
    case = Reference(layers=4)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(5))
    x = torch.randn(TOKENS, 16)
    compiled = nn.ModuleList(torch.compile(block, backend="aot_eager") for block in blocks)

    def run() -> torch.Tensor:
        hidden = x
        for layer in compiled:
            hidden = layer(hidden)
        return hidden.square().sum()

    offload = ActivationOffload(PinnedPool(1 << 20, device="cpu"), compiled, min_bytes=1)
    expected = gradients(blocks, run)
    assert_same(gradients(blocks, under(offload, 0.5, run)), expected)
    assert_idle(offload)
    assert offload.stats().stored_bytes > 0
    with pytest.raises(InvalidUsage, match="compiled as a whole"):
        ActivationOffload(offload.pool, torch.compile(case.model, backend="aot_eager"))
    blocks[2].compile(backend="aot_eager")
    hidden = ActivationOffload(offload.pool, blocks, min_bytes=1)
    with pytest.raises(InvalidUsage, match=r"layer 2 .* compile\(\) method"), hidden.micro_batch(1.0):
        pass


def test_a_second_backward_pass_loads_again() -> None:
    case = Reference()
    offload = case.offload()
    expected = gradients(case.model, case.loss)
    case.model.zero_grad(set_to_none=True)
    loss = under(offload, 0.5, case.loss)()
    loss.backward(retain_graph=True)
    case.model.zero_grad(set_to_none=True)
    loss.backward()
    assert_same([p.grad for p in case.model.parameters()], expected)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    del loss
    assert_idle(offload)
    assert_same(gradients(case.model, under(offload, 1.0, case.loss)), expected)


def test_a_gradient_of_a_gradient() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))

    def run() -> torch.Tensor:
        x = torch.linspace(-1, 1, 8 * TOKENS).view(TOKENS, 8).requires_grad_()
        hidden = x
        for layer in layers:
            hidden = layer(hidden)
        return torch.autograd.grad(hidden.sum(), x, create_graph=True)[0].square().sum()

    offload = ActivationOffload(PinnedPool(1 << 20, device="cpu"), layers, min_bytes=1)
    assert_same(gradients(layers, under(offload, 0.5, run)), gradients(layers, run))
    assert_idle(offload)


class Change(nn.Module):
    """A layer that can change a tensor in place after saving it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.wrong = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x).exp()
        if self.wrong:
            out.mul_(2)
        return out.tanh()


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_change_in_place_is_found(layer: int) -> None:
    layers = nn.ModuleList(Change() for _ in range(5))
    x = torch.zeros(TOKENS, 8)

    def run() -> torch.Tensor:
        hidden = x
        for each in layers:
            hidden = each(hidden)
        return hidden.sum()

    offload = ActivationOffload(PinnedPool(1 << 20, device="cpu"), layers, min_bytes=1)
    expected = gradients(layers, run)
    layers[layer].wrong = True
    with pytest.raises(InvalidUsage, match=r"shape \(96, 8\) .* changed in place after it was saved"):
        gradients(layers, under(offload, 1.0, run))
    layers[layer].wrong = False
    assert_same(gradients(layers, under(offload, 1.0, run)), expected)
    assert_idle(offload)


def test_a_full_pool_says_so_and_the_next_step_works() -> None:
    case = Reference()
    offload = case.offload(size=128 << 10)
    expected = gradients(case.model, case.loss)
    with pytest.raises(InvalidUsage, match=r"pinned pool is full: .* layer \d of 5 at ratio 1\.000, .* of 131\.1 kB"):
        gradients(case.model, under(offload, 1.0, case.loss))
    assert_idle(offload)
    assert_same(gradients(case.model, under(offload, 0.05, case.loss)), expected)
    keeping = ActivationOffload(offload.pool, case.model, min_bytes=1, when_full="keep")
    assert_same(gradients(case.model, under(keeping, 1.0, case.loss)), expected)
    assert keeping.stats().refused_bytes > 0
    assert_idle(keeping)


def test_an_exception_in_the_middle_of_forward_leaks_nothing() -> None:
    case = Reference()
    offload = case.offload()
    expected = gradients(case.model, case.loss)

    def fail(*_: object) -> None:
        raise ValueError("the data is bad")

    hook = case.model.blocks[3].ffn.register_forward_hook(fail)
    with pytest.raises(ValueError, match="the data is bad"):
        gradients(case.model, under(offload, 1.0, case.loss))
    hook.remove()
    assert_idle(offload)
    assert_same(gradients(case.model, under(offload, 1.0, case.loss)), expected)
    loss = under(offload, 1.0, case.loss)()
    del loss  # a forward pass whose backward pass never comes
    assert_idle(offload)
    assert not case.model.blocks[0]._forward_hooks


def test_an_exception_in_the_middle_of_backward_leaks_nothing() -> None:
    case = Reference()
    offload = case.offload()
    expected = gradients(case.model, case.loss)

    def fail(*_: object) -> None:
        raise ValueError("enough")

    hook = case.model.blocks[1].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="enough"):
        gradients(case.model, under(offload, 1.0, case.loss))
    hook.remove()
    assert_idle(offload)
    assert_same(gradients(case.model, under(offload, 1.0, case.loss)), expected)


def test_only_activations_of_layers_go() -> None:
    case = Reference()
    offload = ActivationOffload(PinnedPool(1 << 20, device="cpu"), case.model, min_bytes=1 << 20)
    gradients(case.model, under(offload, 1.0, case.loss))
    assert offload.stats().stores == 0  # all are small
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
    offload = ActivationOffload(offload.pool, layers, min_bytes=1)
    x = torch.ones(TOKENS, 8)

    def run() -> torch.Tensor:
        hidden = x
        for layer in layers:
            hidden = layer(hidden)
        return (hidden.exp() * hidden).sum()  # outside: stays

    gradients(layers, under(offload, 0.5, run))
    assert offload.stats().stored_bytes == 2 * TOKENS // 2 * 8 * 4  # the inputs of two layers; no weight


class Looks(nn.Linear):
    """Saves a tensor for a result that nobody takes, then again for one that is taken."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        made.sin()
        return made.cos()


def test_what_was_saved_in_vain_is_stored_again() -> None:
    """The copy in the pool goes with the result that was dropped; a router that logs its choice does so."""
    layers = nn.ModuleList(Looks(8, 8) for _ in range(4))

    def run() -> torch.Tensor:
        x = torch.linspace(0, 1, TOKENS * 8).view(TOKENS, 8)
        for layer in layers:
            x = layer(x)
        return x.sum()

    expected = gradients(layers, run)
    offload = ActivationOffload(PinnedPool(1 << 20, device="cpu"), layers, resident_layers=0, min_bytes=1)
    assert_same(gradients(layers, under(offload, 1.0, run)), expected)
    assert_idle(offload)


def test_memory_and_pool_do_not_grow_in_200_steps() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(5))
    offload = ActivationOffload(PinnedPool(1 << 18, device="cpu"), layers, min_bytes=1)
    x = torch.ones(TOKENS, 16)

    def run() -> torch.Tensor:
        hidden = x
        for layer in layers:
            hidden = layer(hidden)
        return hidden.sum()

    peaks, pools = set(), set()
    for step in range(200):
        with MemoryMeter("cpu") as meter:
            layers.zero_grad(set_to_none=True)
            under(offload, 0.5 if step % 2 else 1.0, run)().backward()
        if step >= 4:
            peaks.add((step % 2, meter.peak))
            pools.add(offload.stats().pool.peak_in_use)
    assert len(peaks) == 2
    assert len(pools) == 1
    assert_idle(offload)
    offload.lane.engine.drain()
    offload.pool.core.stats()
    with offload.micro_batch(1.0):
        run()
    assert offload.pool.stats().peak_in_use == pools.pop()


def test_bad_arguments() -> None:
    case = Reference(layers=3)
    pool = PinnedPool(1 << 20, device="cpu")
    with pytest.raises(InvalidUsage, match=r"ratio.* is 1\.5"):
        ActivationOffload(pool, case.model, ratio=1.5)
    with pytest.raises(InvalidUsage, match="when_full is 'wait'"):
        ActivationOffload(pool, case.model, when_full="wait")
    with pytest.raises(InvalidUsage, match="resident_layers is -1"):
        ActivationOffload(pool, case.model, resident_layers=-1)
    with pytest.raises(InvalidUsage, match=r"no nn\.ModuleList"):
        ActivationOffload(pool, nn.Linear(2, 2))
    with pytest.raises(InvalidUsage, match="at least one"):
        ActivationOffload(pool, [])
    with pytest.raises(InvalidUsage, match=r"layer 1 .* lies in another one"):
        ActivationOffload(pool, [case.model.blocks[0], case.model.blocks[0].ffn])
    offload = ActivationOffload(pool, case.model)
    with pytest.raises(InvalidUsage, match="tokens is -1"), offload.micro_batch(tokens=-1):
        pass
    with offload.micro_batch(), pytest.raises(InvalidUsage, match="open already"), offload.micro_batch(0.5):
        pass
