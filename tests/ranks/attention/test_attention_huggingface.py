"""Hugging Face models on several ranks: loss and gradients of the unsharded model, for five families."""

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import packing, positions, shard
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt
from hdpcomm.testing import run_threads

transformers = pytest.importorskip("transformers", minversion="4.54")

LENGTHS = [37, 1, 90, 12, 5]
CU = np.cumsum([0, *LENGTHS]).tolist()
TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"num_key_value_heads": 2, "sliding_window": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {"num_key_value_heads": 1, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16, "attn_logit_softcapping": 2.0,
    }),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
}  # fmt: skip


def _model(family, implementation):
    model_class, config_class, extra = FAMILIES[family]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, config_class)(**TINY, **special, **extra, attention_dropout=0.0)
    config._attn_implementation = implementation
    torch.manual_seed(1)
    model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def _tokens():
    return torch.randint(0, TINY["vocab_size"], (CU[-1],), generator=torch.Generator().manual_seed(3))


def _unsharded(family):
    """Loss per token over the sequences one by one, with transformers' own plain attention, and its gradients."""
    model, ids = _model(family, "eager"), _tokens()
    count = sum(n - 1 for n in LENGTHS)
    total = 0.0
    for start, stop in pairwise(CU):
        if stop - start > 1:
            logits = model(ids[None, start:stop], use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits.float(), ids[start + 1 : stop], reduction="sum") / count
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def unsharded():
    return {family: _unsharded(family) for family in FAMILIES}


def _loss(adapted, ids, cu, comm):
    """This rank's share of the summed loss of a pack."""
    cu = torch.tensor(cu)
    labels = torch.cat([torch.nn.functional.pad(ids[a + 1 : b], (0, 1), value=-100) for a, b in pairwise(cu.tolist())])
    where = {"rank": comm.rank, "size": comm.size}
    tokens, labels = (shard(x, cu, **where) for x in (ids, labels))
    return adapted(tokens, positions=positions(cu, **where), cu_seqlens=cu, comm=comm, labels=labels)


COUNT = sum(n - 1 for n in LENGTHS)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_the_unsharded_model(family, size, unsharded):
    models = [_model(family, "eager") for _ in range(size)]  # made in one thread: its random numbers are global

    def main():
        comm = hdp.init()
        model = models[comm.rank]
        loss = _loss(adapt(model), _tokens(), CU, comm) / COUNT
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters()}

    results = run_threads(main, size)
    want_loss, want = unsharded[family]
    assert sum(loss for loss, _ in results) == pytest.approx(want_loss, rel=1e-5)
    for name, gradient in want.items():
        got = sum(grads[name] for _, grads in results)
        assert float((got - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-9, name


MICRO_BATCHES = [[0, 2], [1, 3, 4]]
"""Sequences of LENGTHS, in packs of their own."""


def _micro_batches():
    """(tokens, cu_seqlens) of each pack."""
    ids = _tokens()
    for sequences in MICRO_BATCHES:
        yield torch.cat([ids[CU[i] : CU[i + 1]] for i in sequences]), [0, *np.cumsum([LENGTHS[i] for i in sequences])]


def _threads_backward(loss):
    """Backward on a thread that never saw a pack, as CUDA's is."""
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("order", ["at once", "late", "interleaved"])
def test_micro_batches_add_up(order, checkpointed, unsharded):
    """Several packs a step, each divided by the step's tokens; backward at once, after all, or of both together, in
    which activation checkpoints call the attention again."""
    models = [_model("llama", "eager") for _ in range(2)]

    def main():
        comm = hdp.init()
        model = models[comm.rank]
        adapted = adapt(model)
        if checkpointed:
            model.gradient_checkpointing_enable()
        losses = []
        for ids, cu in _micro_batches():
            losses.append(_loss(adapted, ids, cu, comm) / COUNT)
            if order == "at once":
                losses[-1].backward()
        if order == "late":
            for loss in reversed(losses):
                _threads_backward(loss)
        if order == "interleaved":
            _threads_backward(sum(losses))
        return sum(loss.item() for loss in losses), {name: p.grad for name, p in model.named_parameters()}

    results = run_threads(main, 2)
    want_loss, want = unsharded["llama"]
    assert sum(loss for loss, _ in results) == pytest.approx(want_loss, rel=1e-5)
    for name, gradient in want.items():
        got = sum(grads[name] for _, grads in results)
        assert float((got - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-9, name


def test_adapt_can_be_undone():
    model, ids = _model("llama", "sdpa"), _tokens()[None, :10]
    before = model(ids).logits
    adapt(model, lean=False)
    with pytest.raises(InvalidUsage, match="outside a pack"):
        model(ids)
    with packing(None, [0, 10]):
        torch.testing.assert_close(model(ids).logits, before)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, before)


def test_a_batch_of_equal_packs():
    model, ids = _model("llama", "sdpa"), _tokens()[:60].view(3, 20)
    want = model(ids).logits
    adapt(model)
    with packing(None, [0, 20]):
        torch.testing.assert_close(model(ids).logits, want)


def test_what_packs_cannot_do_is_refused():
    model, ids = _model("llama", "sdpa"), _tokens()[None, :10]
    model.config.attention_dropout = 0.1
    with pytest.raises(InvalidUsage, match=r"attention_dropout=0\.1"):
        adapt(model)
    model.config.attention_dropout = 0.0
    adapt(model)
    hidden = torch.ones_like(ids)
    hidden[0, 7:] = 0
    with packing(None, [0, 10]), pytest.raises(InvalidUsage, match="hides tokens"):
        model(ids, attention_mask=hidden)
    with packing(None, [0, 10]):
        model(ids, attention_mask=torch.ones_like(ids))
