"""Documents in files: text, JSONL, Parquet and Hugging Face datasets, in units that ranks share out."""

from __future__ import annotations

import importlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdpcomm.errors import InvalidUsage, first_line
from hdpcomm.files import read_text

__all__ = [
    "Fields", "Unit", "block_starts", "check_paths", "check_text", "describe_units", "input_files", "is_text",
    "json_record", "looks_like_text", "records", "text_files", "units_from", "units_of",
]  # fmt: skip

_JSONL = {".jsonl", ".ndjson"}
_UNIT_BYTES = 4 << 20
_UNIT_ROWS = 4096
_ROWS_AT_ONCE = 64  # which may hold images
_IMAGES = "images"
SNIFF_BYTES = 8192
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\f\b\x1b")) + b"\x7f"


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of the fields (or columns) of a record: its text, or the messages of a conversation."""

    text: str = "text"
    messages: str = "messages"


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a file that one rank turns into tokens.

    Attributes:
        kind: ``text`` (a whole file), ``jsonl`` (lines that begin in a range of bytes), ``parquet`` (a row group) or
            ``dataset`` (a range of rows).
    """

    kind: str
    path: Path
    start: int
    stop: int
    size: int
    """Weight in progress bars: bytes, or rows of a dataset."""


def input_files(path: Path) -> list[Path]:
    """The files of a path that the user named: itself, or the text, JSONL and Parquet files of a folder.

    A Hugging Face dataset is named as its folder. Links that lead out of a folder are left out.

    Raises: InvalidUsage for what is not there, not a file, empty, binary, or a folder without such files.
    """
    if path.is_dir():
        if _is_dataset(path):
            return [path]
        found = list(text_files(path, also=(".parquet",)))
        if not found:
            raise InvalidUsage(
                f"{path}: this folder holds no text file; give one with text, JSONL or Parquet files in it, a Hugging "
                "Face dataset (save_to_disk) or a folder of hdpcomm data build"
            )
        return found
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise InvalidUsage(f"{path}: no such file or folder; check the path given with --data") from None
    except (OSError, ValueError) as error:
        raise InvalidUsage(f"{path}: cannot be read ({error}); check the path given with --data") from None
    if not stat.S_ISREG(mode):
        raise InvalidUsage(
            f"{path}: this is a pipe, a socket or a device; give a file, since data is read in any order and again"
        )
    if path.suffix != ".parquet":
        check_text(path)
    return [path]


def is_text(path: Path) -> bool:
    """Whether a file of :func:`input_files` is one document of plain text."""
    return path.is_file() and path.suffix not in _JSONL and path.suffix != ".parquet"


def _is_dataset(path: Path) -> bool:
    if (path / "dataset_dict.json").is_file():
        try:
            splits = json.loads(read_text(path / "dataset_dict.json"))["splits"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            splits = []
        names = ", ".join(str(path / str(name)) for name in splits) or f"a folder below {path}"
        raise InvalidUsage(f"{path}: this is a dataset of several splits; give one of them: {names}")
    return (path / "dataset_info.json").is_file() and (path / "state.json").is_file()


def units_of(path: Path) -> list[Unit]:
    """The units of a file of :func:`input_files`, in the order of its documents. Local."""
    if path.is_dir():
        rows = len(_dataset(path))
        return [
            Unit("dataset", path, start, min(rows, start + _UNIT_ROWS), min(rows, start + _UNIT_ROWS) - start)
            for start in range(0, rows, _UNIT_ROWS)
        ]
    size = path.stat().st_size
    if path.suffix == ".parquet":
        file = _parquet(path)
        groups = [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
        return [Unit("parquet", path, group, group + 1, nbytes) for group, nbytes in enumerate(groups)]
    if path.suffix in _JSONL:
        starts = range(0, size, _UNIT_BYTES)
        return [Unit("jsonl", path, s, min(size, s + _UNIT_BYTES), min(size - s, _UNIT_BYTES)) for s in starts]
    return [Unit("text", path, 0, size, size)]


def describe_units(units: Sequence[Unit]) -> list[list[Any]]:
    """Units for JSON; :func:`units_from` is the inverse."""
    return [[unit.kind, str(unit.path), unit.start, unit.stop, unit.size] for unit in units]


def units_from(rows: Sequence[Sequence[Any]]) -> list[Unit]:
    """Units of :func:`describe_units`."""
    return [Unit(kind, Path(path), start, stop, size) for kind, path, start, stop, size in rows]


def check_paths(paths: Any) -> None:
    """Raises InvalidUsage unless these are paths, and at least one."""
    listed = paths if isinstance(paths, Sequence) else (None,)
    if isinstance(paths, (str, Path)) or not all(isinstance(each, (str, Path)) for each in listed):
        raise InvalidUsage(f"paths is {paths!r}; give a list of paths")
    if not paths:
        raise InvalidUsage("no path was given; name at least one text file, JSONL file or folder")


def records(unit: Unit, fields: Fields) -> Iterator[tuple[object, str | bytes | tuple[list[Any], list[Any]]]]:
    """(where, text or (messages, images for the placeholders in them)) of each document of a unit; ``where`` names its
    place in messages. Local."""
    if unit.kind == "text":
        with unit.path.open("rb") as file:
            yield str(unit.path), file.read(unit.stop)
    elif unit.kind == "jsonl":
        for offset, line in _lines(unit):
            if line.strip():
                line_place = _Line(unit.path, offset)
                yield line_place, _content(json_record(line, line_place, fields.text), line_place, fields, "field")
    elif unit.kind == "parquet":
        file = _parquet(unit.path)
        columns = _columns(file.schema_arrow.names, unit.path, fields)
        row = sum(file.metadata.row_group(group).num_rows for group in range(unit.start))
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[unit.start], columns=columns):
            for record in batch.to_pylist():
                where = f"{unit.path} row {row}"
                yield where, _content(record, where, fields, "column")
                row += 1
    else:
        dataset = _dataset(unit.path)
        dataset = dataset.select_columns(_columns(dataset.column_names, unit.path, fields))
        if "Image(" in str(dataset.features.get(_IMAGES)):
            dataset = dataset.cast_column(_IMAGES, [_library("datasets", unit.path).Image(decode=False)])
        for start in range(unit.start, unit.stop, _ROWS_AT_ONCE):
            columns = dataset[start : min(start + _ROWS_AT_ONCE, unit.stop)]
            for row, values in enumerate(zip(*columns.values(), strict=True), start):
                where = f"{unit.path} row {row}"
                yield where, _content(dict(zip(columns, values, strict=True)), where, fields, "column")


class _Line:
    """``file:line`` of a byte offset, counted only when a message needs it."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path, self._offset = path, offset

    def __str__(self) -> str:
        number, left = 1, self._offset
        with self._path.open("rb") as file:
            while left > 0 and (chunk := file.read(min(left, 1 << 20))):
                number += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self._path}:{number}"


def _lines(unit: Unit) -> Iterator[tuple[int, bytes]]:
    """The lines that begin inside a unit's range of bytes, with their offsets."""
    with unit.path.open("rb") as file:
        offset = unit.start
        if offset:
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        while offset < unit.stop and (line := file.readline()):
            yield offset, line
            offset += len(line)


def json_record(line: bytes, where: object, field: str) -> Mapping[str, Any]:
    """The object of one line of JSONL. Raises: InvalidUsage that begins with ``where``."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise InvalidUsage(f"{where}: this JSON is nested too deeply; give one object a line") from None
    except ValueError as error:  # also UnicodeDecodeError
        raise InvalidUsage(f"{where}: this line is not JSON ({error}); JSONL holds one JSON object a line") from error
    if not isinstance(record, dict):
        raise InvalidUsage(
            f"{where}: this line holds a JSON {type(record).__name__}, an object with the field {field!r} was expected"
        )
    return record


def _content(record: Mapping[str, Any], where: object, fields: Fields, kind: str) -> Any:
    if fields.text in record:
        text = record[fields.text]
        if not isinstance(text, str):
            raise InvalidUsage(
                f"{where}: the {kind} {fields.text!r} holds a {type(text).__name__}, text was expected; choose one "
                "with --text-field"
            )
        return text
    if fields.messages in record:
        messages, images = record[fields.messages], record.get(_IMAGES) or []
        for name, value, listed in ((fields.messages, messages, "messages"), (_IMAGES, images, "images")):
            if not isinstance(value, list):
                wrong = type(value).__name__
                raise InvalidUsage(f"{where}: the {kind} {name!r} holds a {wrong}, a list of {listed} was expected")
        return messages, images
    raise _missing(list(record), where, fields, kind)


def _columns(names: Sequence[str], path: Path, fields: Fields) -> list[str]:
    for name in (fields.text, fields.messages):
        if name in names:
            return [name, *({_IMAGES} & set(names) if name == fields.messages else ())]
    raise _missing(names, path, fields, "column")


def _missing(names: Sequence[str], where: object, fields: Fields, kind: str) -> InvalidUsage:
    listed = ", ".join(repr(name) for name in names[:8]) or "none"
    return InvalidUsage(
        f"{where}: there is no {kind} {fields.text!r} or {fields.messages!r} ({kind}s: {listed}); choose one with "
        "--text-field or --messages-field"
    )


def _parquet(path: Path) -> Any:
    parquet = _library("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path)
    except Exception as error:  # pyarrow has many, some of them of OSError and ValueError
        raise InvalidUsage(
            f"{path}: no Parquet file, or a damaged one ({first_line(error)}); give another file"
        ) from None


def _dataset(path: Path) -> Any:
    datasets = _library("datasets", path)
    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:
        raise InvalidUsage(
            f"{path}: this dataset cannot be opened ({first_line(error)}); save it again by save_to_disk"
        ) from None


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise InvalidUsage(f"{path}: {package} is needed to read it; pip install 'hdpcomm[data]'") from None


def looks_like_text(head: bytes) -> bool:
    """Whether the first bytes of a file look like text.

    No NUL byte (what git asks), and either valid UTF-8 with few control characters or another 8-bit encoding of which
    at most 30% is not printable ASCII.
    """
    if b"\0" in head:
        return False
    controls = len(head) - len(head.translate(None, _CONTROL))
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data" and error.start >= len(head) - 3:  # cut inside a character
            return controls * 10 <= len(head)
        odd = sum(byte >= 128 for byte in head) + controls
        return odd * 10 <= len(head) * 3
    return controls * 10 <= len(head)


def check_text(path: Path) -> int:
    """Size in bytes of a text file that the user named. Raises InvalidUsage if it is empty, binary or unreadable."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(SNIFF_BYTES)
    except OSError as error:
        raise InvalidUsage(
            f"{path}: cannot be read ({error.strerror}); give a text or JSONL file that this user may read"
        ) from error
    if size == 0:
        raise InvalidUsage(f"{path}: the file is empty; give a file with text in it")
    if not looks_like_text(head):
        raise InvalidUsage(
            f"{path}: this is a binary file (its first {len(head)} bytes are not text); give plain text or JSONL, "
            "uncompressed"
        )
    return size


def text_files(
    folder: Path, *, suffix: str = "", without: Collection[str] = (), also: Collection[str] = ()
) -> Iterator[Path]:
    """The non-empty text files below ``folder`` in a fixed order.

    Hidden files and folders, links to folders, links that lead out of ``folder``, and binary files are left out.
    ``suffix`` is what a file's name must end with, ``without`` the names of folders to leave out, ``also`` the endings
    of files that are taken though they are no text.
    """
    root = folder.resolve()
    for directory, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in without)
        for name in sorted(files):
            path = Path(directory, name)
            if name.startswith(".") or not name.endswith(suffix) or not path.is_file():
                continue
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                continue
            if path.suffix in also:
                yield path
                continue
            try:
                with path.open("rb") as file:
                    head = file.read(SNIFF_BYTES)
            except OSError:
                continue
            if head and looks_like_text(head):
                yield path


def block_starts(source: bytes) -> list[int]:
    """Where the blocks of a program's text begin: a blank line or a smaller indentation ends one.

    Examples:
        >>> block_starts(b"def f(x):\\n    y = x\\n    if y:\\n        g()\\n    return y\\n\\nf(1)\\n")
        [0, 42, 56]
    """
    starts, place, depth, blank = [0], 0, 0, False
    for line in source.splitlines(keepends=True):
        text = line.lstrip(b" \t")
        if text.strip():
            if (blank or len(line) - len(text) < depth) and place:
                starts.append(place)
            depth, blank = len(line) - len(text), False
        else:
            blank = True
        place += len(line)
    return starts
