# Type stubs of the compiled module; one file a room.
from typing import Final

from hdpcomm._core import collective as collective
from hdpcomm._core import comm as comm
from hdpcomm._core import device as device
from hdpcomm._core import kernels as kernels
from hdpcomm._core import offload as offload
from hdpcomm._core import planner as planner
from hdpcomm._core import transport as transport

DTYPES: dict[str, int]

def build_info() -> dict[str, str | None]: ...
def outlast_late_threads() -> None: ...
def settings() -> Settings: ...
def settings_table() -> list[Setting]: ...

# The environment variables in force. Frozen; what is fixed for a process is as it was when first asked for.
class Settings:
    timeout_s: Final[float]
    transport: Final[str]
    host_id: Final[str]
    domain: Final[str]
    secret: Final[str]
    secret_file: Final[str]
    store: Final[str]
    costs: Final[str]
    shm_eager_bytes: Final[int]
    shm_payload_bytes: Final[int]
    shm_cma: Final[bool]
    deadlocks: Final[bool]
    flight_records: Final[int]
    flight_folder: Final[str]
    spin_us: Final[float]
    yield_us: Final[float]
    liveness_s: Final[float]
    silence_s: Final[float]
    longest_wait_s: Final[float]
    nccl: Final[str]
    nccl_connect: Final[int]
    device_slot_bytes: Final[int]
    device_slots: Final[int]
    device_lanes: Final[int]
    device_landing_bytes: Final[int]
    device_window_bytes: Final[int]
    device_small_bytes: Final[int]

# A row of their table.
class Setting:
    variable: Final[str]
    field: Final[str]  # of Settings
    default: Final[str]
    range: Final[str]  # "a number from 0 to 1000000"
    meaning: Final[str]
    hidden: Final[bool]  # reports do not show its value
    fixed: Final[bool]  # read once a process, else at each init()
    value: Final[str]  # as set now, or the default
    error: Final[str | None]  # why the value is refused
