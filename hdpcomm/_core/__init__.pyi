# Type stubs of the compiled module; one file a room.
from hdpcomm._core import collective as collective
from hdpcomm._core import comm as comm
from hdpcomm._core import device as device
from hdpcomm._core import kernels as kernels
from hdpcomm._core import offload as offload
from hdpcomm._core import planner as planner
from hdpcomm._core import transport as transport

DTYPES: dict[str, int]

def build_info() -> dict[str, str | None]: ...
def environment() -> list[tuple[str, str, str, str]]: ...  # name, value in force, default, meaning
