"""Bad input: a clear error on every rank, no hang, and the next call on the same communicator works."""

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import AttentionOptions, ring_attention, shard
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options

CU = [0, 40, 52]
SIZE = 3


def _good(comm, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(52, heads, 8, dtype=dtype, generator=generator) for heads in (4, 2, 2)]
    return [shard(t, CU, rank=comm.rank, size=comm.size) for t in x]


def _errors(change, ranks=(1,), **settings):
    """The error of each rank when ``change(arguments, comm)`` spoils those of ``ranks``; a good call follows."""

    def main():
        comm = hdp.init()
        q, k, v = _good(comm)
        arguments = {"q": q, "k": k, "v": v, "cu_seqlens": CU, **settings}
        if comm.rank in ranks:
            change(arguments, comm)
        error = None
        try:
            ring_attention(
                arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), comm=comm, **with_options(**arguments)
            )
        except hdp.Error as raised:
            error = raised
        assert ring_attention(*_good(comm), comm=comm, cu_seqlens=CU).shape == q.shape
        return error

    return run_threads(main, SIZE, timeout=30)


def _set(**values):
    return lambda arguments, comm: arguments.update(values)  # noqa: ARG005


def _spoil(name, spoil):
    return lambda arguments, comm: arguments.update({name: spoil(arguments[name])})  # noqa: ARG005


BAD = {
    "not contiguous": (_spoil("q", lambda q: q.transpose(0, 1).contiguous().transpose(0, 1)), "q is not contiguous"),
    "wrong heads": (_spoil("q", lambda q: q[:, :3].contiguous()), "multiple of the heads of k and v"),
    "head_dim": (_spoil("k", lambda k: k[..., :4].contiguous()), "and the head_dim of k and the batch those of q"),
    "kv heads": (_spoil("v", lambda v: v[:, :1].contiguous()), "k and v must have one shape"),
    "no head_dim": (_spoil("v", lambda v: v[..., :0].contiguous()), "no dimension may be 0"),
    "dimensions": (_spoil("q", lambda q: q[0]), r"expected q \[tokens, heads, head_dim\]"),
    "types": (_spoil("v", lambda v: v.float()), "must have one type"),
    "integers": (_set(q=torch.zeros(4, 4, 8, dtype=torch.int64)), "must have one type"),
    "tokens": (_spoil("q", lambda q: q[1:].contiguous()), r"q has \d+ tokens; under cu_seqlens, rank 1 of 3 holds"),
    "cu_seqlens": (_set(cu_seqlens=[0, 40, 12]), "running sum"),
    "empty sequence": (_set(cu_seqlens=[0, 40, 40, 52]), r"sequence 1 of cu_seqlens is empty \(1 of 3 are\)"),
    "nothing but empty": (_set(cu_seqlens=[0, 0, 0]), r"sequence 0 of cu_seqlens is empty \(2 of 2 are\)"),
    "sequences": (_set(cu_seqlens_k=[0, 52]), "cu_seqlens has 2 sequences, cu_seqlens_k 1"),
    "others' option": (
        _set(send="kv"),
        r"ring_attention was given options with send='kv', which it does not have; .* \(ring_attention has variant,",
    ),
    "options": (_set(options="ring"), "ring_attention: options is 'ring', expected AttentionOptions"),
    "window": (_set(window=0), "window, the keys that a query sees, itself included, is 0, expected a whole number"),
    "window pair": (_set(window=(-2, 0)), r"window=\(-2, 0\); expected \(left, right\)"),
    "scale": (_set(scale=float("nan")), "expected a finite number"),
    "softcap": (_set(softcap=-1.0), r"softcap \(0: none\) is -1.0, expected a finite number"),
    "sinks": (_set(sinks=torch.zeros(3)), "one floating-point score per head"),
    "variant": (_set(variant="star"), "no variant 'star'; expected auto or one of ring, gather, ulysses, hybrid"),
    "ulysses": (_set(variant="ulysses"), "cannot share 4 heads with 2 kv_heads among 3 ranks"),
    "hybrid": (_set(variant="hybrid"), "finds no head group"),
    "backend": (_set(backend="magic"), "no attention backend 'magic'; expected auto or one of cpu, flash"),
    "backend here": (_set(backend="flash"), "cannot do this: it computes on CUDA devices.*use cpu or reference"),
    "no softcap": (_set(backend="cpu", softcap=1.0), "no softcap; use reference"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_one_rank_are_an_error_on_all(name):
    change, message = BAD[name]
    errors = _errors(change)
    for rank, error in enumerate(errors):
        assert isinstance(error, InvalidUsage)
        assert isinstance(error, ValueError)
        assert pytest.raises(InvalidUsage, match=message, check=lambda e, error=error: e is error)
        with pytest.raises(InvalidUsage, match=message):
            raise error
        if rank != 1:
            assert "rank 1 of the communicator refused its arguments" in str(error)
            assert (error.rank, error.peer, error.op) == (rank, 1, "ring_attention")


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_all_ranks(name):
    change, message = BAD[name]
    for error in _errors(change, ranks=range(SIZE)):
        with pytest.raises(InvalidUsage, match=message.replace("rank 1 of 3", r"rank \d of 3")):
            raise error


def _other_lengths(arguments, comm):
    other = [0, 30, 52]
    x = torch.zeros(52, 4, 8, dtype=torch.float64)
    arguments["cu_seqlens"] = other
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        arguments[name] = shard(x[:, :heads].contiguous(), other, rank=comm.rank, size=comm.size)


@pytest.mark.parametrize("change", [
    _other_lengths,
    _set(causal=False),
    _set(window=5),
    _set(scale=0.5),
    _set(variant="gather"),
    _set(sinks=torch.zeros(4)),
    _spoil("v", lambda v: v[..., :4].contiguous()),
    lambda arguments, comm: arguments.update(zip("qkv", _good(comm, torch.float32), strict=True)),
])  # fmt: skip
def test_ranks_that_disagree_all_hear_of_it(change):
    for rank, error in enumerate(_errors(change, variant="ring")):
        with pytest.raises(Mismatch, match="called with different arguments, so no rank began") as info:
            raise error
        assert info.value.rank == rank
        assert info.value.peer == (1 if rank != 1 else 0)


def test_the_message_shows_both_views_of_cu_seqlens():
    error = _errors(_other_lengths)[0]
    assert "lengths [40, 12]" in str(error)
    assert "lengths [30, 22]" in str(error)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_and_infinity_are_found(name, value):
    def spoil(arguments, comm):  # noqa: ARG001
        arguments[name] = arguments[name].clone()
        arguments[name][3, 1, 1] = value

    for rank, error in enumerate(_errors(spoil)):
        with pytest.raises(InvalidUsage, match=rf"{name} holds NaN or infinity \(first at local token 3, head 1\)"):
            raise error
        assert (rank == 1) != ("refused its arguments" in str(error))


def test_scores_that_overflow_are_found():
    errors = _errors(_spoil("q", lambda q: q * 1e160), scale=1e160)
    for rank, error in enumerate(errors):
        with pytest.raises(InvalidUsage, match=r"log-sum-exp of .* is not a number"):
            raise error
        assert (rank == 1) != ("refused its arguments" in str(error))


def test_alone_the_same_errors():
    q = torch.zeros(4, 2, 8)
    with pytest.raises(InvalidUsage, match="not contiguous"):
        ring_attention(q.transpose(0, 1).contiguous().transpose(0, 1), q, q, comm=None, cu_seqlens=[0, 4])
    with pytest.raises(InvalidUsage, match="q holds NaN"):
        ring_attention(torch.full_like(q, torch.nan), q, q, comm=None, cu_seqlens=[0, 4])
    q[:] = torch.nan
    assert ring_attention(q, q, q, comm=None, cu_seqlens=[0, 4], options=AttentionOptions(check=False)).isnan().all()


@pytest.mark.parametrize("cu", [[0], [0, 1], [0, 2, 3]])
def test_packs_with_less_than_a_token_a_rank(cu):
    def main():
        comm = hdp.init()
        q = shard(torch.ones(cu[-1], 2, 4), cu, rank=comm.rank, size=comm.size).requires_grad_()
        out = ring_attention(q, q, q, comm=comm, cu_seqlens=cu)
        out.sum().backward()
        return out

    parts = run_threads(main, SIZE, timeout=30)
    assert sum(len(part) for part in parts) == cu[-1]
    assert all(torch.allclose(part, torch.ones_like(part)) for part in parts)
