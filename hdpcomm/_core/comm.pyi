from collections.abc import Callable, Sequence
from typing import Any, Final

from hdpcomm._core.collective import DeviceTransportCosts
from hdpcomm._core.device import Device
from hdpcomm._core.transport import FrameLink, NcclLibrary, ShmSegment

LinkCosts = tuple[float, float, float, float]  # alpha_s, message_s, beta_s_per_byte, gamma_s_per_byte

OPS: dict[str, int]
REDOPS: dict[str, int]
ALGORITHMS: dict[str, int]
OUT_OF_STEP_ADVICE: str  # how the error of a refused operation ends

def algorithms_of(op: int) -> list[str]: ...
def peer_readers_of(op: int) -> list[str]: ...
def host_identity() -> str: ...
def close_at_end(world: World) -> None: ...
def close_worlds(reason: str) -> None: ...
def join_shm_world(
    segment: ShmSegment, rank: int, timeout: float, joining: float, pids: Sequence[int] = ...
) -> World: ...
def join_framed_world(link: FrameLink, timeout: float) -> World: ...
def join_hosts(
    segment: ShmSegment,
    link: FrameLink,
    host_of_rank: Sequence[int],
    timeout: float,
    joining: float,
    pids: Sequence[int] = ...,
) -> World: ...
def process_runs(pid: int) -> bool: ...

class Work:
    def wait(self, timeout: float = -1.0, quiet: bool = False) -> None: ...  # the program is not told of an error
    def done(self) -> bool: ...

def free_ended() -> None: ...  # buffers of operations that were let go of and have ended since

class Block: ...  # has the buffer protocol

class World:
    rank: Final[int]
    size: Final[int]
    timeout: Final[float]
    transport: Final[str]
    over: Final[bool]  # closed or aborted
    def communicator(self) -> Communicator: ...
    def stats(self) -> dict[str, int]: ...
    def allocate(self, bytes: int) -> Block | None: ...
    def set_costs(self, alpha_s: float, message_s: float, beta_s_per_byte: float, gamma_s_per_byte: float) -> None: ...
    def set_nodes(self, node_of_rank: Sequence[int], remote_costs: LinkCosts) -> None: ...
    def nodes(self) -> list[int]: ...  # of every rank
    def has_left(self, rank: int) -> bool: ...  # closed its world, died, or was cut off
    def go_by_liveness(self, on: bool) -> None: ...
    def tick(self) -> None: ...
    def begin_activity(self, what: str, limit_s: float) -> int: ...
    def end_activity(self, activity: int) -> None: ...
    def abort(self, reason: str) -> None: ...
    def close(self, reason: str) -> None: ...

class Communicator:
    rank: Final[int]
    size: Final[int]
    ranks: Final[tuple[int, ...]]
    hash: Final[int]
    def waited_s(self) -> float: ...
    world: Final[World]
    def resync(self, timeout: float, quiet: bool = False) -> None: ...

class SharedCounter:
    word: Final[int]
    generation: Final[int]
    owner: Final[int]  # global rank
    def close(self) -> None: ...

def open_counter(comm: Communicator) -> SharedCounter: ...  # on the first rank of the communicator
def join_counter(comm: Communicator, word: int, generation: int) -> SharedCounter: ...  # on the others

class Window:
    def __init__(self, comm: Communicator, words: int, bytes: int) -> None: ...
    descriptor: Final[int]
    def open(self, position: int, pid: int, descriptor: int) -> None: ...
    def data(self, position: int) -> Block: ...
    def set(self, position: int, word: int, value: int) -> None: ...
    def get(self, position: int, word: int) -> int: ...
    def wait(self, position: int, word: int, value: int, awaited: int) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...

class FlightRecord:
    op: Final[str]
    subset: Final[int]  # of Flight.groups
    count: Final[int]
    dtype: Final[str]
    root: Final[int]  # position in the ranks, or -1
    state: Final[int]  # 0: under way, 1: queued, 2: done, 3: failed
    started_ns: Final[int]  # of the system's clock
    ended_ns: Final[int]  # 0: it has not
    seq: Final[int]
    order: Final[int]  # equal on all ranks that take part
    peer: Final[int]  # global rank; -1: a collective
    sends: Final[bool]

class Flight:
    first: Final[int]
    records: Final[list[FlightRecord]]
    groups: Final[dict[int, list[int]]]  # global ranks

class FlightSource:
    def read(self) -> Flight | None: ...  # None: its world or engine has gone
    gone: Final[bool]

def flight_of_world(world: World) -> FlightSource: ...
def flight_of_engine(engine: StreamEngine) -> FlightSource: ...

class StreamWork:
    def wait(self, timeout: float = -1.0) -> None: ...
    def wait_on(self, stream: int) -> None: ...
    def release_buffers(self) -> None: ...
    def done(self) -> bool: ...
    failed: Final[bool]

class LinkJoining:
    def __init__(
        self,
        *,
        slot_bytes: int,
        num_slots: int,
        num_lanes: int,
        landing_bytes: int,
        window_bytes: int,
        small_bytes: int,
        costs: DeviceTransportCosts,
    ) -> None: ...
    def arena_bytes(self, num_ranks: int) -> int: ...

class NcclJoining:
    def __init__(
        self,
        *,
        library: Callable[[], NcclLibrary],
        connect_distance: int,
        inside: LinkCosts,
        between: LinkCosts,
    ) -> None: ...

class StreamEngine:
    @staticmethod
    def join_links(comm: Communicator, device: Device, links: LinkJoining) -> StreamEngine: ...
    @staticmethod
    def join_nccl(comm: Communicator, device: Device, nccl: NcclJoining) -> StreamEngine: ...
    @staticmethod
    def join_paths(comm: Communicator, device: Device, links: LinkJoining, nccl: NcclJoining) -> StreamEngine: ...
    name: Final[str]  # of the transport
    device: Final[Device]
    def reads_peers(self, comm: Communicator) -> bool: ...  # has the algorithms of peer_readers_of()
    def lands(self, comm: Communicator, peer: int) -> bool: ...
    host_stream: Final[int]
    def landing(self) -> tuple[int, int]: ...  # address and bytes
    def synchronize(self, timeout: float) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def waited_s(self, comm: Communicator) -> float: ...

# Plain C functions: positional arguments only. Those that run an operation block, or start it if `async_op`: then they
# return its Work. `describe` is asked about tensors that are not plain: as hdpcomm.comm.tensors.describe.
Describe = Callable[..., tuple[int, int, int]]
Splits = tuple[Sequence[int] | None, Sequence[int] | None]  # elements from and for each rank

def subset(comm: Communicator, positions: Sequence[int], /) -> tuple[Communicator, int, int] | None: ...
def fetch_add(counter: SharedCounter, amount: int, /) -> int: ...
def describe_torch(x: object, /) -> tuple[int, int, int] | None: ...
def use_exchange_api(capsule: object, tensor: type, parameter: type, /) -> bool: ...
def send(comm: Communicator, describe: Describe, x: object, peer: int, async_op: bool, /) -> Work | None: ...
def recv(comm: Communicator, describe: Describe, x: object, peer: int, async_op: bool, /) -> Work | None: ...
def exchange(
    comm: Communicator,
    describe: Describe,
    sends: Sequence[tuple[Any, ...]],
    recvs: Sequence[tuple[Any, ...]],
    async_op: bool,
    /,
) -> Work | None: ...
def collective(
    comm: Communicator,
    describe: Describe,
    operation: int,
    x: object,
    out: object,
    op: str | None,
    root: int | None,
    algorithm: str,
    splits: Splits | None,
    async_op: bool,
    /,
) -> Work | None: ...

# The same by streams. None: the caller's stream waits for the end, and nobody else has to.
def stream_exchange(
    engine: StreamEngine,
    comm: Communicator,
    describe: Describe,
    sends: Sequence[tuple[Any, ...]],  # (tensor, peer) or (tensor, peer, offset in the landing zone or None)
    recvs: Sequence[tuple[Any, ...]],
    stream: int,
    async_op: bool,
    /,
) -> StreamWork | None: ...
def stream_collective(
    engine: StreamEngine,
    comm: Communicator,
    describe: Describe,
    operation: int,
    x: object,
    out: object,
    op: str | None,
    root: int | None,
    algorithm: str,
    splits: Splits | None,
    stream: int,
    async_op: bool,
    /,
) -> StreamWork | None: ...
