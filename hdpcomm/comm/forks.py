"""Connections that a forked child must not hold: it would hide the death of its parent."""

from __future__ import annotations

import os
import stat

__all__ = ["close_in_children"]

_sockets: dict[int, int] = {}  # descriptor -> inode, which tells whether it is still the same socket
_room = 64  # as many are kept before those that were closed are looked for


def close_in_children(handle: int) -> None:
    """The open socket is closed in forked children of this process from now on."""
    global _room
    if len(_sockets) >= _room:
        for closed in [each for each, inode in _sockets.items() if _inode(each) != inode]:
            _sockets.pop(closed, None)
        _room = max(64, 2 * len(_sockets))
    inode = _inode(handle)
    if inode is not None:
        _sockets[handle] = inode


def _inode(handle: int) -> int | None:
    """The inode of a socket's descriptor; ``None`` for anything else."""
    try:
        status = os.fstat(handle)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _close_in_child() -> None:
    if not _sockets:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for handle, inode in _sockets.items():
        if _inode(handle) == inode:
            os.dup2(nothing, handle, inheritable=False)  # the number stays taken: its library may close it once more
    os.close(nothing)
    _sockets.clear()


os.register_at_fork(after_in_child=_close_in_child)
