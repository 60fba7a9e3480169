"""The reference Llama on one rank; on several, see tests/ranks/train."""

from __future__ import annotations

import math

import pytest
import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, apply_rope, rope_tables

CONFIG = LlamaConfig(vocabulary=32, layers=2, hidden=16, heads=2, kv_heads=1, ffn=24)


def logits_of(model, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(32, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return tokens, model(tokens, positions=positions, cu_seqlens=cu_seqlens, comm=None)


def test_the_seed_decides_the_weights():
    first, same, other = (torch.cat([p.flatten() for p in Llama(CONFIG, seed=s).parameters()]) for s in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    wide = Llama(CONFIG, seed=1, dtype=torch.float64)
    assert torch.equal(torch.cat([p.flatten() for p in wide.parameters()]).float(), first)
    model = Llama(CONFIG, seed=5)
    model.reset_parameters(1)
    assert torch.equal(torch.cat([p.flatten() for p in model.parameters()]), first)


def test_sequences_of_a_pack_do_not_see_each_other():
    model = Llama(CONFIG, dtype=torch.float64)
    tokens, logits = logits_of(model, [5, 1, 9])
    alone = model(tokens[6:], positions=torch.arange(9), cu_seqlens=torch.tensor([0, 9], dtype=torch.int32), comm=None)
    torch.testing.assert_close(logits[6:], alone, rtol=1e-12, atol=1e-12)


def test_no_token_sees_a_later_one():
    model = Llama(CONFIG, dtype=torch.float64)
    tokens, logits = logits_of(model, [8])
    changed = tokens.clone()
    changed[5] = (changed[5] + 1) % 32
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32)
    other = model(changed, positions=torch.arange(8), cu_seqlens=cu_seqlens, comm=None)
    assert torch.equal(logits[:5], other[:5])
    assert not torch.equal(logits[5:], other[5:])


def test_a_fresh_model_guesses_evenly():
    _, logits = logits_of(Llama(LlamaConfig()), [50])
    assert logits.shape == (50, 256)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert entropy.min() > 0.95 * math.log(256)


def test_tied_embeddings_are_one_parameter():
    tied, untied = Llama(CONFIG), Llama(LlamaConfig(**{**_values(CONFIG), "tied_embeddings": False}))
    assert tied.head.weight is tied.embedding.weight
    assert untied.num_parameters() - tied.num_parameters() == 32 * 16


def test_rope_depends_on_distances_only():
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def score(at, to):
        turned = (apply_rope(x, rope_tables(torch.tensor([p]), 8, dtype=x.dtype)) for x, p in ((q, at), (k, to)))
        return float((next(turned) * next(turned)).sum())

    assert score(7, 3) == pytest.approx(score(1_000_007, 1_000_003), rel=1e-9)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-3)


def test_rope_is_exact_at_far_positions_in_fp32():
    cos, sin = rope_tables(torch.tensor([2_000_000]), 4, dtype=torch.float32)
    wide_cos, wide_sin = rope_tables(torch.tensor([2_000_000]), 4, dtype=torch.float64)
    torch.testing.assert_close(cos.double(), wide_cos, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(sin.double(), wide_sin, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"hidden": 15}, "hidden 15 over 2 heads"),
        ({"hidden": 6}, "must be an even whole number"),
        ({"heads": 4, "kv_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0.* above 0"),
    ],
)
def test_bad_sizes(values, message):
    with pytest.raises(InvalidUsage, match=message):
        LlamaConfig(**{**_values(CONFIG), **values})


def test_bad_inputs():
    with pytest.raises(InvalidUsage, match=r"dtype is torch\.int64"):
        Llama(CONFIG, dtype=torch.int64)
    with pytest.raises(InvalidUsage, match=r"tokens \(3,\) and positions \(2,\)"):
        Llama(CONFIG)(torch.zeros(3, dtype=torch.int64), positions=torch.arange(2), cu_seqlens=[0, 3], comm=None)


def _values(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
