"""Small texts, facts and errors that ranks tell each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.files import file_error

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["from_rank", "gather_json", "on_rank_0", "raise_together"]

T = TypeVar("T")


def from_rank(comm: Communicator | None, text: str, root: int = 0) -> str:
    """The text of rank ``root`` on every rank. Collective; ``None``: a world of one."""
    if comm is None:
        return text
    data = text.encode("utf-8", "surrogateescape")
    size = torch.tensor([len(data)], dtype=torch.int64)
    comm.broadcast(size, root)
    if not int(size):
        return ""
    buffer = torch.zeros(int(size), dtype=torch.uint8)
    if comm.rank == root:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    comm.broadcast(buffer, root)
    return buffer.numpy().tobytes().decode("utf-8", "surrogateescape")


def raise_together(comm: Communicator | None, error: Error | None, *, order: int = 0) -> None:
    """Raises on every rank the error of the rank with the smallest ``order``, if any rank has one. Collective."""
    if comm is None:
        if error is not None:
            raise error
        return
    mine = torch.tensor([1 << 62 if error is None else order], dtype=torch.int64)
    everyone = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(everyone, mine)
    first = int(everyone.argmin())
    if int(everyone[first]) == 1 << 62:
        return
    usage = isinstance(error, InvalidUsage)
    text = from_rank(comm, f"{'u' if usage else 'e'}{'' if error is None else error.args[0]}", first)
    raise InvalidUsage(text[1:]) if text.startswith("u") else Error(text[1:])


def on_rank_0(comm: Communicator | None, fn: Callable[[], T]) -> T:
    """Result of rank 0's ``fn()``, made of what JSON has, on every rank; it is called there only. Collective. Raises
    what it raises."""
    text, error = "", cast("Error | None", None)
    if comm is None or comm.rank == 0:
        try:
            text = json.dumps(fn())
        except OSError as failure:
            error = file_error(failure, "the data")
        except Error as failure:
            error = failure
    raise_together(comm, error)
    return cast("T", json.loads(from_rank(comm, text)))


def gather_json(comm: Communicator, own: Any) -> list[Any]:
    """Gathers a value of each rank, on every rank. Collective over ``comm``."""
    data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64))
    most = int(sizes.max())
    everyone = torch.empty(comm.size, most, dtype=torch.uint8)
    comm.all_gather(everyone, torch.nn.functional.pad(data, (0, most - len(data))))
    rows = zip(everyone.numpy(), sizes.tolist(), strict=True)
    return [json.loads(row[:size].tobytes()) for row, size in rows]
