"""hdpcomm: communication and scheduling for training on very short and very long sequences at once."""

from hdpcomm.comm import Communicator, Work, init
from hdpcomm.errors import Aborted, CommTimeout, DeviceError, Error, InvalidUsage, Mismatch, PeerLost

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "CommTimeout",
    "Communicator",
    "DeviceError",
    "Error",
    "InvalidUsage",
    "Mismatch",
    "PeerLost",
    "Work",
    "__version__",
    "init",
]
