"""Every kernel once or twice on small sizes, for compute-sanitizer: tails, unaligned buffers, several rows a block."""

from __future__ import annotations

import sys

import torch

from hdpcomm import kernels
from hdpcomm.attention import positions, shard
from hdpcomm.attention.rows import Rows, add_rows, merge
from tests.harness import buffer_kernels

CUDA = torch.device("cuda")


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device", file=sys.stderr)
        return 3
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for offset in (0, 1):
            a, b, out = (torch.randn(5003, device=CUDA).to(dtype) for _ in range(3))
            for op in ("sum", "prod", "min", "max"):
                kernels.reduce(out[:5000], a[offset:][:5000], b[:5000], op=op)
            buffer_kernels.divide(out[offset:], 3.0)
            buffer_kernels.fold([out[:5000]], [a[offset:][:5000], b[:5000], out[:5000]], op="avg")
    integers = torch.arange(9001, device=CUDA, dtype=torch.int8)
    kernels.reduce(integers[:9000], integers[:9000], integers[1:])
    buffer_kernels.collect(torch.empty(3, 3000, dtype=torch.int8, device=CUDA), list(integers[1:].view(3, 3000)))
    apart = torch.empty(3, 3001, dtype=torch.int8, device=CUDA)[:, :3000]
    buffer_kernels.collect(apart, list(integers[1:].view(3, 3000)), first=1)
    flag = torch.zeros(1, dtype=torch.int32, device=CUDA)
    buffer_kernels.put(torch.empty(777, dtype=torch.int8, device=CUDA), integers[3:780], flag, 1)
    for block in (torch.float32, torch.bfloat16):
        for dim in (64, 129):
            out, part = (torch.randn(65, 3, dim, device=CUDA) for _ in range(2))
            lse, part_lse = (torch.randn(65, 3, device=CUDA) for _ in range(2))
            part_lse[::2] = -torch.inf
            merge(out, lse, part.to(block), part_lse)
    cu = [0, 700, 701, 1024]
    positions(cu, rank=1, size=3, device=CUDA)
    for width in (1, 3, 256, 20000):
        shard(torch.randn(1024, width, device=CUDA), cu, rank=1, size=3)
        add_rows(*(torch.randn(400, width, device=CUDA) for _ in range(2)), Rows([(7, 0, 300), (310, 301, 90)]))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for columns in (1, 37, 2048, 5003):
            logits = torch.randn(19, columns, device=CUDA).to(dtype).requires_grad_()
            labels = torch.randint(0, columns, (19,), device=CUDA)
            labels[::5] = -100
            kernels.cross_entropy(logits * 1, labels).sum().backward()
    torch.cuda.synchronize()
    print("every kernel ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
