from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

class CostModel:
    def __init__(self, values: Mapping[str, Any]) -> None: ...
    def seconds(self, lengths: Sequence[int], size: int, one_node: bool, one_domain: bool = False) -> float: ...
    def token_limit(self, ratio: float) -> int: ...

Columns = tuple[npt.NDArray[Any], ...]

def solve(
    cost: CostModel,
    lengths: Sequence[int],
    policy: str,
    context: int,
    context_ranks: int,
    squares: Sequence[float] = (),
    ids: Sequence[int] = (),
    queue: bool = False,
    next_id: int = 0,
    trees: Sequence[tuple[int, Sequence[int], Sequence[int]]] = (),
) -> tuple[Columns, float, float, float, int, int, str]: ...
def lower_bound(cost: CostModel, lengths: Sequence[int], squares: Sequence[float] = ()) -> float: ...
def simulate(
    cost: CostModel,
    table: Columns,
    squares: npt.NDArray[np.float64],
    slices: list[tuple[int, int, int, bool]] = ...,
) -> dict[str, Any]: ...
