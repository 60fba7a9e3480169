from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

OPS: dict[str, int]

def reduce(out: int, a: int, b: int, count: int, dtype: int, op: int, cuda: bool, stream: int) -> None: ...
def divide(data: int, count: int, divisor: float, dtype: int, cuda: bool, stream: int) -> None: ...
def fold(
    outputs: Sequence[int], inputs: Sequence[int], count: int, dtype: int, op: int, cuda: bool, stream: int
) -> None: ...
def collect(out: int, inputs: Sequence[int], bytes: int, stride: int, first: int, cuda: bool, stream: int) -> None: ...
def put(dst: int, src: int, bytes: int, flag: int, value: int, cuda: bool, stream: int) -> None: ...
def cross_entropy_stats(
    shape: Sequence[int], dtype: int, logits: int, labels: int, stats: int, num_threads: int, cuda: bool, stream: int
) -> None: ...
def cross_entropy_loss(
    stats: int,
    labels: int,
    weights: int,
    sums: int,
    loss: int,
    shards: int,
    tokens: int,
    ignore_index: int,
    cuda: bool,
    stream: int,
) -> None: ...
def cross_entropy_grad(
    shape: Sequence[int],
    dtype: int,
    logits: int,
    labels: int,
    sums: int,
    weights: int,
    upstream: int,
    upstream_stride: int,
    grad: int,
    num_threads: int,
    cuda: bool,
    stream: int,
) -> None: ...
def merge(
    out: int,
    lse: int,
    block_out: int,
    block_lse: int,
    rows: int,
    shape: Sequence[int],
    block_lse_strides: Sequence[int],
    acc: int,
    block: int,
    num_threads: int,
    cuda: bool,
    stream: int,
) -> None: ...
def copy_rows(
    dst: int,
    src: int,
    strides: Sequence[int],
    row_bytes: int,
    segments: int,
    num_segments: int,
    total_rows: int,
    positions: int,
    cuda: bool,
    stream: int,
) -> None: ...
def add_rows(
    dst: int,
    src: int,
    strides: Sequence[int],
    row_bytes: int,
    segments: int,
    num_segments: int,
    total_rows: int,
    dtype: int,
    cuda: bool,
    stream: int,
) -> None: ...
def zigzag_bounds(
    cu_seqlens: npt.NDArray[np.int64], size: int, key_limit: float = 0.0, limited: float = 0.0
) -> npt.NDArray[np.int64]: ...
