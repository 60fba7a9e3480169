"""Plans as binary files that are mapped into memory, in the layout of safetensors.

A file is: the length N of the header, 8 bytes, little endian; N bytes of JSON, padded with spaces so that the data
begins at a multiple of 64; the columns of the plan's :class:`~hdpcomm.plan.table.PlanTable`, little endian, without
gaps, those of 8-byte numbers first. The header has, by name of a column, ``{"dtype": "I64" | "I32" | "F64", "shape":
[entries], "data_offsets": [begin, end]}``, in bytes from the end of the header on; and ``__metadata__``, all texts:
``format`` (``hdpcomm.plan``), ``version`` (``1``), the plan's values, ``fragments`` as JSON, and ``sha256`` over the
header without it (JSON with sorted keys, no spaces) and the data. The package safetensors reads such files, too.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage
from hdpcomm.files import write_whole
from hdpcomm.plan.micro_batch import SequenceFragment
from hdpcomm.plan.plan_checks import check_values
from hdpcomm.plan.table import COLUMNS, PlanTable
from hdpcomm.plan.tree import TreeFragment

__all__ = ["check_plan_suffix", "read_plan", "read_text", "write_file", "write_plan"]

_SUFFIXES = (".json", ".safetensors")
_FORMAT, _VERSION = "hdpcomm.plan", "1"
_TEXTS = ("format", "version", "policy", "num_ranks", "makespan_s", "lower_bound_s", "planning_s", "idle_share")
# Values that files may lack, and what they are there.
_LATER: dict[str, float | int | str] = {"noise_s": 0.0, "queued": 0, "queue_pools": 1, "made_by": ""}
_KINDS = {np.int64: "I64", np.int32: "I32", np.float64: "F64"}
_ALIGNMENT = 64
_MOST_HEADER = 100 << 20  # as the package safetensors


def check_plan_suffix(path: Path) -> str:
    """The suffix of a plan's file, which tells its form. Raises: InvalidUsage for any but .json and .safetensors."""
    if path.suffix not in _SUFFIXES:
        raise InvalidUsage(f"{path}: a plan is a file that ends in {' or '.join(_SUFFIXES)}")
    return path.suffix


def write_file(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file so that a reader sees either the old one or the complete new one.

    Raises:
        InvalidUsage: it cannot be written.
    """
    try:
        write_whole(path, *parts)
    except OSError as error:
        raise InvalidUsage(f"cannot write the plan {path}: {error.strerror or error}") from error


def read_text(path: Path) -> str:
    """The text of a file. Raises: InvalidUsage if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidUsage(f"cannot read the plan {path}: {error}") from error


def write_plan(
    path: Path, table: PlanTable, values: dict[str, Any], fragments: tuple[TreeFragment | SequenceFragment, ...]
) -> None:
    """Writes a plan; ``values``: its plain attributes by name. Raises: InvalidUsage if the file cannot be written."""
    columns = dict(zip(COLUMNS, table.columns(), strict=True))
    header: dict[str, Any] = {}
    data = []
    end = 0
    for name in sorted(columns, key=lambda name: -columns[name].itemsize):  # so that all are aligned
        column = columns[name]
        stored = column.astype(column.dtype.newbyteorder("<"), copy=False)
        begin, end = end, end + stored.nbytes
        header[name] = {"dtype": _KINDS[COLUMNS[name]], "shape": [len(stored)], "data_offsets": [begin, end]}
        data.append(stored.view(np.uint8).data)
    texts = {name: value if isinstance(value, str) else repr(value) for name, value in values.items()}
    parts = [
        [each.tree, list(each.segments), list(map(int, each.repeated))]
        if isinstance(each, TreeFragment)
        else [each.sequence, each.start, each.stop]
        for each in fragments
    ]
    header["__metadata__"] = {"format": _FORMAT, "version": _VERSION, **texts, "fragments": json.dumps(parts)}
    header["__metadata__"]["sha256"] = _checksum(header, *data)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    write_file(path, struct.pack("<Q", len(text)), text, *data)


def read_plan(path: Path) -> tuple[PlanTable, dict[str, Any], tuple[TreeFragment | SequenceFragment, ...]]:
    """Maps a file of :func:`write_plan`; its columns are views of it.

    Raises:
        InvalidUsage: a file that cannot be read, is no plan, or was changed; says what is wrong with it.
    """
    try:
        content = _mapped(path)
        header, first = _header(content)
        metadata = header["__metadata__"]
        if metadata.get("format") != _FORMAT or metadata.get("version") != _VERSION:
            raise ValueError(
                f"its format is {metadata.get('format')!r} {metadata.get('version')!r}, this release reads {_FORMAT!r} "
                f"{_VERSION!r}"
            )
        columns = _columns(content, header, first)
        told = metadata.pop("sha256", None)
        if told != _checksum(header, memoryview(content)[first:]):
            raise ValueError("its checksum is another one: it was changed since it was written, or cut off")
        table = PlanTable(**columns)
        values = _values(metadata)
        check_values(table, values)
        return table, values, _fragments(metadata["fragments"])
    except OSError as error:
        raise InvalidUsage(f"cannot read the plan {path}: {error.strerror or error}") from error
    except (InvalidUsage, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        told = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
        raise InvalidUsage(
            f"{path} holds no step plan ({told}); write one with StepPlan.save() or hdpcomm plan --out FILE"
        ) from error


def _mapped(path: Path) -> mmap.mmap:
    if path.exists() and not path.is_file():
        raise ValueError("it is no plain file")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size <= 8:
            raise ValueError("it is too short")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _checksum(header: dict[str, Any], *data: bytes | memoryview) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True, separators=(",", ":")).encode())
    for part in data:
        digest.update(part)
    return digest.hexdigest()


def _header(content: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The header, and where the data begins."""
    (size,) = struct.unpack("<Q", content[:8])
    if size > min(_MOST_HEADER, len(content) - 8):
        raise ValueError(f"its header is said to have {size} bytes, and the file has {len(content)}")
    header = json.loads(content[8 : 8 + size].decode("utf-8"))
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        raise ValueError("its header has no __metadata__")
    if not all(isinstance(text, str) for text in header["__metadata__"].values()):
        raise ValueError("its __metadata__ has values that are no texts")
    return header, 8 + size


def _columns(content: mmap.mmap, header: dict[str, Any], first: int) -> dict[str, NDArray[Any]]:
    if header.keys() - {"__metadata__"} != COLUMNS.keys():
        raise ValueError(f"it has the columns {sorted(header.keys() - {'__metadata__'})}, expected {sorted(COLUMNS)}")
    columns = {}
    places = []
    for name, kind in COLUMNS.items():
        entry, item = header[name], np.dtype(kind).newbyteorder("<")
        begin, end = entry["data_offsets"]
        (entries,) = entry["shape"]
        if not all(type(number) is int and number >= 0 for number in (begin, end, entries)):
            raise ValueError(f"the offsets or the shape of {name} are no whole numbers of at least 0")
        inside = first + end <= len(content) and (first + begin) % item.itemsize == 0
        if entry["dtype"] != _KINDS[kind] or end - begin != entries * item.itemsize or not inside:
            raise ValueError(
                f"{name} is said to be {entries} numbers of {entry['dtype']!r} at bytes {begin} to {end} of "
                f"{len(content) - first}, expected {_KINDS[kind]}, {item.itemsize} bytes each"
            )
        places.append((begin, end))
        columns[name] = np.frombuffer(content, item, entries, first + begin).astype(kind, copy=False)
    places.sort()
    if [begin for begin, _ in places] != [0, *(end for _, end in places[:-1])] or first + places[-1][1] != len(content):
        raise ValueError("its columns overlap, or leave bytes between them")
    return columns


def _values(metadata: dict[str, str]) -> dict[str, Any]:
    if metadata.keys() - _LATER.keys() != {*_TEXTS, "fragments"}:
        raise ValueError(
            f"its __metadata__ has {sorted(metadata)}, expected {sorted({*_TEXTS, 'fragments', 'sha256'})}"
        )
    values: dict[str, Any] = {"policy": metadata["policy"], "num_ranks": int(metadata["num_ranks"])}
    values |= {name: float(metadata[name]) for name in _TEXTS if name.endswith(("_s", "_share"))}
    return values | {name: type(before)(metadata.get(name, before)) for name, before in _LATER.items()}


def _fragments(text: str) -> tuple[TreeFragment | SequenceFragment, ...]:
    found: list[TreeFragment | SequenceFragment] = []
    for tree, segments, repeated in json.loads(text):
        if type(segments) is int:
            if not all(type(number) is int and number >= 0 for number in (tree, segments, repeated)):
                raise ValueError("its slices of sequences are not [sequence, start, stop]")
            found.append(SequenceFragment(tree, segments, repeated))
            continue
        whole = all(type(number) is int and number >= 0 for number in (tree, *segments, *repeated))
        if not whole or len(segments) != len(repeated) or not {*repeated} <= {0, 1}:
            raise ValueError("its fragments of trees are not [tree, segments, repeated]")
        found.append(TreeFragment(tree, tuple(segments), tuple(map(bool, repeated))))
    return tuple(found)
