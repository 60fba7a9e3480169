"""A ring step called by the host and replayed as a CUDA graph: equal results, and the host's microseconds for each.

A step sends KV to the next rank and computes attention on its own, then on the received KV, and adds both. Two ranks on
one GPU, as processes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import CUDA, Row, Rows, host_seconds, main, row
from torch.nn.functional import scaled_dot_product_attention as attend

import hdpcomm as hdp
from hdpcomm.testing import spawn

HEADS, TOKENS, DIM = 8, 512, 128


def ring_step(comm: hdp.Communicator) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    """(the step, its keys and values, its result)."""
    shape = (1, HEADS, TOKENS, DIM)
    generator = torch.Generator(CUDA).manual_seed(comm.rank)
    q = torch.randn(shape, device=CUDA, generator=generator).bfloat16()
    kv = torch.randn(2, *shape, device=CUDA, generator=generator).bfloat16()
    zone = comm.landing_zone(kv)
    assert zone is not None
    landed = zone.memory[: kv.numel() * 2].view(torch.bfloat16).view(kv.shape)
    result = torch.empty(shape, device=CUDA)
    to, back = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

    def step() -> None:
        work = comm.exchange([(kv, to, 0)], [(landed, back, 0)], async_op=True)
        result.copy_(attend(q, kv[0], kv[1]))
        work.wait()
        result.add_(attend(q, landed[0], landed[1]))

    return step, kv, result


def on_a_rank() -> dict[str, float]:
    with hdp.init(transport="cuda") as comm:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step, kv, result = ring_step(comm)
            for _ in range(3):
                step()
            comm.synchronize()
            torch.cuda.synchronize()
            eager = host_seconds(comm, step) * 1e6
            comm.synchronize()
            comm.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                step()
            replayed = host_seconds(comm, graph.replay) * 1e6
            differs = 0.0
            for turn in range(3):
                kv.fill_(turn + comm.rank).add_(torch.arange(DIM, device=CUDA) / DIM)
                graph.replay()
                got = result.clone()
                torch.cuda.synchronize()
                comm.barrier()
                step()
                torch.cuda.synchronize()
                differs = max(differs, float((got - result).abs().max()))
        return {"eager": eager, "replayed": replayed, "differs": differs}


def measure() -> list[Row]:
    found = spawn(on_a_rank, 2, transport="cuda", timeout=45)
    eager, replayed = (max(rank[name] for rank in found) for name in ("eager", "replayed"))
    return [
        row("ring step, host", eager, "us"),
        row("ring step as a graph, host", replayed, "us"),
        row("ring step: host time over the graph's", eager / replayed, "x", at_least=1.0),
        row("ring step as a graph: differs by", max(rank["differs"] for rank in found), "", at_most=0.0),
    ]


GROUPS: list[Rows] = [measure]

if __name__ == "__main__":
    main(__doc__.splitlines()[0], GROUPS)
