"""Communication in functions that torch.compile compiles: graph breaks, the same results, and no noise."""

import gc
import subprocess
import sys
import warnings

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import delta_rule, positions, ring_attention, shard
from hdpcomm.comm.device.paths import StreamMark
from hdpcomm.comm.work import Work
from hdpcomm.testing import run_threads

CU = [0, 11, 16]


def compiled_once(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager")


def noiseless(main, size, monkeypatch):
    """Results of ranks whose destructors raise nothing, not even into the void."""
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "an operation failed whose Work was dropped")
        results = run_threads(main, size, timeout=60)
        gc.collect()
    assert not [str(each.exc_value) for each in ignored]
    return results


def test_every_operation(monkeypatch):
    def main():
        comm = hdp.init()
        other = (comm.rank + 1) % comm.size

        def function(x, received, gathered):
            x = x * 2
            comm.all_reduce(x)
            x = x + 1
            work = comm.all_reduce(x, async_op=True)
            twice = received * 2
            work.wait()
            comm.exchange([(x, other)], [(received, other)])
            works = [comm.send(x, other, async_op=True), comm.recv(received, other, async_op=True)]
            for each in works:
                each.wait()
            comm.all_gather(gathered, x)
            comm.barrier()
            assert comm.subset([comm.rank]).size == 1
            return x + received + twice + gathered.sum()

        def arguments():
            return torch.full((4,), comm.rank + 1.0), torch.zeros(4), torch.zeros(8)

        eager = function(*arguments())
        return eager, compiled_once(function)(*arguments())

    for eager, compiled in noiseless(main, 2, monkeypatch):
        assert torch.equal(eager, compiled)


def test_a_work_that_compiled_code_drops(monkeypatch):
    def main():
        comm = hdp.init()

        def function(x):
            x = x * 2
            comm.all_reduce(x, async_op=True)
            return x.shape[0] + 1

        found = compiled_once(function)(torch.ones(4))
        gc.collect()
        comm.barrier()
        comm.barrier()
        return found

    assert noiseless(main, 2, monkeypatch) == [5, 5]


@pytest.mark.parametrize("size", [1, 2])
def test_attention(size, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(CU[-1], 2, 8, generator=generator) for _ in range(3)]

    def main():
        comm = hdp.init()
        place = {"rank": comm.rank, "size": comm.size}

        def function(q, k, v):
            out = ring_attention(q * 2, k, v, comm=comm, cu_seqlens=CU)
            rows = torch.sigmoid(q[..., 0])
            out = out + delta_rule(q, k, v, -rows, rows, comm=comm, cu_seqlens=CU)
            return (out * (1 + positions(CU, **place))[:, None, None]).sum()

        def gradients(call):
            mine = [shard(x, CU, **place).requires_grad_() for x in whole]
            loss = call(*mine)
            loss.backward()
            return loss.detach(), *(x.grad for x in mine)

        return gradients(function), gradients(compiled_once(function))

    for eager, compiled in noiseless(main, size, monkeypatch):
        for a, b in zip(eager, compiled, strict=True):
            torch.testing.assert_close(a, b)


def test_sharding_compiles(monkeypatch):
    def main():
        comm = hdp.init()

        def function(x):
            return shard(x + 1, CU, rank=comm.rank, size=comm.size) * 2

        x = torch.arange(16.0)
        return function(x), compiled_once(function)(x)

    for eager, compiled in noiseless(main, 2, monkeypatch):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("made", [Work, StreamMark])
def test_objects_whose_init_did_not_run_go_in_silence(made, monkeypatch):
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    made.__new__(made)
    gc.collect()
    assert not [str(each.exc_value) for each in ignored]


def test_nothing_of_the_compiler_is_imported():
    program = "import sys, hdpcomm.comm, hdpcomm.attention; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
