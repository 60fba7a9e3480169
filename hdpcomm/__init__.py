"""hdpcomm: communication and scheduling for training on very short and very long sequences at once."""

from hdpcomm.errors import Aborted, CommTimeout, DeviceError, Error, InvalidUsage, Mismatch, PeerLost

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "CommTimeout",
    "DeviceError",
    "Error",
    "InvalidUsage",
    "Mismatch",
    "PeerLost",
    "__version__",
]
