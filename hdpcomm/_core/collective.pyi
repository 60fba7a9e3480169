from collections.abc import Sequence
from typing import Any

def schedule(
    op: int,
    algorithm: int,
    group_size: int,
    rank: int,
    count: int,
    element_bytes: int = 1,
    root: int = -1,
    average: bool = False,
) -> dict[str, Any]: ...

# op, algorithm, count, root, average, in place, global ranks
Operation = tuple[int, int, int, int, bool, bool, list[int]]

def check(num_ranks: int, operations: Sequence[Operation], seed: int = 0, fault: int = 0) -> str: ...
