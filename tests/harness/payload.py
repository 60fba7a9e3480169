"""An object that runs something when it is unpickled."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["Payload"]


class Payload:
    """Makes the folder ``marker`` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)
