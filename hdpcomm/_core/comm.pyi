import enum
from collections.abc import Callable, Sequence
from typing import Any

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
def join_framed_world(link: FrameLink, name: str, timeout: float) -> World: ...
def join_hosts(
    segment: ShmSegment,
    link: FrameLink,
    host_of_rank: Sequence[int],
    name: str,
    timeout: float,
    joining: float,
    pids: Sequence[int] = ...,
) -> World: ...
def process_runs(pid: int) -> bool: ...

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
    def over(self) -> bool: ...  # closed or aborted
    def communicator(self) -> Communicator: ...
    def stats(self) -> dict[str, int]: ...
    def allocate(self, bytes: int) -> Block | None: ...
    def set_costs(self, alpha_s: float, message_s: float, beta_s_per_byte: float, gamma_s_per_byte: float) -> None: ...
    def set_nodes(self, node_of_rank: Sequence[int], remote_costs: LinkCosts) -> None: ...
    def nodes(self) -> list[int]: ...  # of every rank
    def has_left(self, rank: int) -> bool: ...  # closed its world, died, or was cut off
    def abort(self, reason: str) -> None: ...
    def close(self, reason: str) -> None: ...

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
    def resync(self, timeout: float) -> None: ...

class FlightRecord:
    @property
    def op(self) -> str: ...
    @property
    def subset(self) -> int: ...  # of Flight.groups
    @property
    def count(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def root(self) -> int: ...  # position in the ranks, or -1
    @property
    def state(self) -> int: ...  # 0: under way, 1: queued, 2: done, 3: failed
    @property
    def started_ns(self) -> int: ...  # of the system's clock
    @property
    def ended_ns(self) -> int: ...  # 0: it has not
    @property
    def seq(self) -> int: ...
    @property
    def order(self) -> int: ...  # equal on all ranks that take part
    @property
    def peer(self) -> int: ...  # global rank; -1: a collective
    @property
    def sends(self) -> bool: ...

class Flight:
    @property
    def first(self) -> int: ...
    @property
    def records(self) -> list[FlightRecord]: ...
    @property
    def groups(self) -> dict[int, list[int]]: ...  # global ranks

class FlightSource:
    def read(self) -> Flight | None: ...  # None: its world or engine has gone
    @property
    def gone(self) -> bool: ...

def flight_of_world(world: World) -> FlightSource: ...
def flight_of_engine(engine: StreamEngine) -> FlightSource: ...

class CollectiveCall: ...  # a collective whose tensors were described and fit each other

StreamMessage = tuple[int, int, int, int, int | None]  # address, count, dtype, peer, offset in the landing zone

class StreamWork:
    def wait(self, timeout: float = -1.0) -> None: ...
    def wait_on(self, stream: int) -> None: ...
    def done(self) -> bool: ...
    @property
    def failed(self) -> bool: ...

class LinkJoining:
    def __init__(
        self,
        *,
        slot_bytes: int,
        num_slots: int,
        num_lanes: int,
        landing_bytes: int,
        window_bytes: int,
        costs: DeviceTransportCosts,
    ) -> None: ...

class OneSided(enum.Enum):
    OFF = ...
    ON = ...
    MEASURE = ...

class NcclJoining:
    def __init__(
        self,
        *,
        library: Callable[[], NcclLibrary],
        connect_distance: int,
        inside: LinkCosts,
        between: LinkCosts,
        one_sided: OneSided,
        landing_bytes: int,
        no_puts: str,
    ) -> None: ...

class StreamEngine:
    @staticmethod
    def join_links(comm: Communicator, device: Device, links: LinkJoining) -> StreamEngine: ...
    @staticmethod
    def join_nccl(comm: Communicator, device: Device, nccl: NcclJoining) -> StreamEngine: ...
    @staticmethod
    def join_paths(comm: Communicator, device: Device, links: LinkJoining, nccl: NcclJoining) -> StreamEngine: ...
    @property
    def name(self) -> str: ...  # of the transport
    @property
    def device(self) -> Device: ...
    def reads_peers(self, comm: Communicator) -> bool: ...  # has the algorithms of peer_readers_of()
    def lands(self, comm: Communicator, peer: int) -> bool: ...
    @property
    def host_stream(self) -> int: ...
    def landing(self, comm: Communicator, source: int | None) -> tuple[int, int]: ...  # address and bytes
    def exchange(
        self,
        comm: Communicator,
        sends: Sequence[StreamMessage],
        recvs: Sequence[StreamMessage],
        stream: int,
        background: bool,
    ) -> StreamWork: ...
    def collective(self, comm: Communicator, call: CollectiveCall, stream: int, background: bool) -> StreamWork: ...
    def synchronize(self, timeout: float) -> None: ...
    def stats(self) -> dict[str, int]: ...

class Mailbox:
    def __init__(self, world: World) -> None: ...

class Mail:
    @property
    def receives(self) -> bool: ...
    @property
    def source(self) -> int: ...  # world rank of the sender of a receive that has ended; else -1
    def done(self) -> bool: ...

# Plain C functions: positional arguments only. Those that run an operation block, or start it if `async_op`: then they
# return its Work. `describe` is asked about tensors that are not plain: as hdpcomm.comm.tensors.describe.
Describe = Callable[..., tuple[int, int, int]]
Splits = tuple[Sequence[int] | None, Sequence[int] | None]  # elements from and for each rank

def subset(comm: Communicator, positions: Sequence[int], /) -> tuple[Communicator, int, int] | None: ...
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
def describe_collective(
    comm: Communicator,
    describe: Describe,
    operation: int,
    x: object,
    out: object,
    op: str | None,
    root: int | None,
    algorithm: str,
    splits: Splits | None,
    /,
) -> CollectiveCall: ...
def run_collective(comm: Communicator, call: CollectiveCall, async_op: bool, /) -> Work | None: ...

# A buffer: a tensor, or (address, count, dtype); None where it is no plain tensor.
def mail_send(mailbox: Mailbox, buffer: object, peer: int, tag: int, context: int, /) -> Mail | None: ...
def mail_receive(
    mailbox: Mailbox, buffer: object, sources: int | Sequence[int], tag: int, context: int, /
) -> Mail | None: ...
def mail_wait(mail: Mail, timeout: float, /) -> None: ...
