from collections.abc import Sequence
from typing import Any

from hdpcomm._core.collective import DeviceCosts
from hdpcomm._core.device import Device
from hdpcomm._core.scale import Costs, NcclLibrary

OPS: dict[str, int]
REDOPS: dict[str, int]
ALGORITHMS: dict[str, int]

def algorithms_of(op: int) -> list[str]: ...
def peer_readers_of(op: int) -> list[str]: ...
def create_segment(num_ranks: int) -> ShmSegment: ...
def open_segment(address: str, num_ranks: int) -> ShmSegment: ...
def host_identity() -> str: ...
def process_vm_readv_works() -> bool: ...
def memfd_works() -> bool: ...
def close_at_end(world: World) -> None: ...
def close_worlds(reason: str) -> None: ...
def join_shm_world(segment: ShmSegment, rank: int, timeout: float, joining: float) -> World: ...

class ShmSegment:
    def address(self) -> str: ...
    def release(self) -> None: ...

class Work:
    def wait(self, timeout: float = -1.0) -> None: ...
    def done(self) -> bool: ...

class Block: ...  # has the buffer protocol

class World:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def transport(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def communicator(self) -> Communicator: ...
    def stats(self) -> dict[str, int]: ...
    def allocate(self, bytes: int) -> Block | None: ...
    def set_costs(self, alpha_s: float, message_s: float, beta_s_per_byte: float, gamma_s_per_byte: float) -> None: ...
    def abort(self, reason: str) -> None: ...
    def close(self, reason: str) -> None: ...

Message = tuple[int, int, int, int]  # address, count, dtype, peer

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def hash(self) -> int: ...
    @property
    def world(self) -> World: ...
    def start_exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Work: ...
    def start_collective(
        self, op: int, source: int, target: int, count: int, dtype: int, redop: int, root: int, algorithm: int
    ) -> Work: ...
    def start_all_to_all(
        self,
        source: int,
        target: int,
        dtype: int,
        out_counts: Sequence[int],
        in_counts: Sequence[int],
        algorithm: int,
    ) -> Work: ...

StreamMessage = tuple[int, int, int, int, int | None]  # address, count, dtype, peer, offset in the landing zone

class StreamWork:
    def wait(self, timeout: float = -1.0) -> None: ...
    def wait_on(self, stream: int) -> None: ...
    def done(self) -> bool: ...

class StreamEngine:
    @staticmethod
    def join(
        comm: Communicator,
        device: Device,
        slot_bytes: int,
        num_slots: int,
        num_lanes: int,
        landing_bytes: int,
        window_bytes: int,
        costs: DeviceCosts,
    ) -> StreamEngine: ...
    @staticmethod
    def join_nccl(
        comm: Communicator,
        device: Device,
        library: NcclLibrary,
        connect_distance: int,
        inside: Costs,
        between: Costs,
    ) -> StreamEngine: ...
    @property
    def name(self) -> str: ...  # of the transport
    @property
    def device(self) -> Device: ...
    @property
    def reads_peers(self) -> bool: ...  # has the algorithms of peer_readers_of()
    @property
    def host_stream(self) -> int: ...
    @property
    def landing(self) -> tuple[int, int]: ...  # address and bytes
    @property
    def scratch_bytes(self) -> int: ...
    def exchange(
        self,
        comm: Communicator,
        sends: Sequence[StreamMessage],
        recvs: Sequence[StreamMessage],
        stream: int,
        background: bool,
    ) -> StreamWork: ...
    def collective(
        self,
        comm: Communicator,
        op: int,
        source: int,
        target: int,
        count: int,
        dtype: int,
        redop: int,
        root: int,
        algorithm: int,
        stream: int,
        background: bool,
    ) -> StreamWork: ...
    def all_to_all(
        self,
        comm: Communicator,
        source: int,
        target: int,
        dtype: int,
        out_counts: Sequence[int],
        in_counts: Sequence[int],
        algorithm: int,
        stream: int,
        background: bool,
    ) -> StreamWork: ...
    def synchronize(self, timeout: float) -> None: ...
    def stats(self) -> dict[str, int]: ...

# Plain C functions: positional arguments only; the run_* block.
def subset(comm: Communicator, positions: Sequence[int], /) -> tuple[Communicator, int, int] | None: ...
def describe_torch(x: object, /) -> tuple[int, int, int] | None: ...
def use_exchange_api(capsule: object, tensor: type, parameter: type) -> bool: ...
def run_send(comm: Communicator, address: int, count: int, dtype: int, peer: int, /) -> None: ...
def run_recv(comm: Communicator, address: int, count: int, dtype: int, peer: int, /) -> None: ...
def run_exchange(comm: Communicator, sends: list[Message], recvs: list[Message], /) -> None: ...
def exchange_plain(
    comm: Communicator, sends: Sequence[tuple[Any, ...]], recvs: Sequence[tuple[Any, ...]], /
) -> bool: ...
def collective_plain(
    comm: Communicator,
    op: int,
    x: object,
    out: object,
    x_parts: int,
    out_parts: int,
    redop: int | None,
    root: int,
    algorithm: int | None,
    /,
) -> bool: ...
def run_collective(
    comm: Communicator,
    op: int,
    source: int,
    target: int,
    count: int,
    dtype: int,
    redop: int,
    root: int,
    algorithm: int,
    /,
) -> None: ...
