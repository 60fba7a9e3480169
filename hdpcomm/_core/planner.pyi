from collections.abc import Sequence
from typing import Any

from hdpcomm.plan.step import MicroBatch, SequenceInfo

class CostModel:
    def __init__(
        self,
        *,
        attention: float,
        piece: float,
        linear: float,
        fixed: float,
        ring_step: float,
        kv_intra: float,
        kv_inter: float,
        latency_intra: float,
        latency_inter: float,
        forward: float,
        forward_transfer: float,
        capacity: int,
        offloadable: float,
        host_tokens: float,
        copy: float,
        ranks: int,
        ranks_per_node: int,
        pipeline: int,
        chunks: int = 1,
        speeds: Sequence[float] = (),
    ) -> None: ...
    def seconds(self, lengths: Sequence[int], size: int, one_node: bool) -> float: ...
    def token_limit(self, ratio: float) -> int: ...

def solve(
    cost: CostModel,
    lengths: Sequence[int],
    policy: str,
    context: int,
    context_ranks: int,
    batch_class: type[MicroBatch],
    sequence_class: type[SequenceInfo],
    squares: Sequence[float] = (),
    ids: Sequence[int] = (),
) -> tuple[tuple[MicroBatch, ...], float, float, float]: ...
def lower_bound(cost: CostModel, lengths: Sequence[int], squares: Sequence[float] = ()) -> float: ...
def simulate(
    cost: CostModel, batches: Sequence[tuple[Sequence[int], Sequence[int], float, Sequence[float]]]
) -> dict[str, Any]: ...
