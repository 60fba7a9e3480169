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

DEFAULT_COSTS: dict[str, float]
DEVICE_COSTS: dict[str, float]

class DeviceTransportCosts:
    def __init__(
        self,
        *,
        alpha_s: float,
        message_s: float,
        beta_s_per_byte: float,
        gamma_s_per_byte: float,
        round_s: float,
        signal_s: float,
        read_s_per_byte: float,
        window_bytes: float = ...,
    ) -> None: ...
    def choose(self, op: int, group_size: int, count: int, element_bytes: int) -> str: ...
    def estimate_s(self, op: int, algorithm: int, group_size: int, count: int, element_bytes: int) -> float: ...

def choose(
    op: int,
    group_size: int,
    count: int,
    element_bytes: int,
    alpha_s: float,
    message_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float,
) -> str: ...
def estimate_s(
    op: int,
    algorithm: int,
    group_size: int,
    count: int,
    element_bytes: int,
    alpha_s: float,
    message_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float,
) -> float: ...

# op, algorithm, count, root, average, in place, global ranks
Operation = tuple[int, int, int, int, bool, bool, list[int]]

def check(num_ranks: int, operations: Sequence[Operation], seed: int = 0, fault: int = 0) -> str: ...
