"""Documents in files and behind URLs: text, JSONL, Parquet and Hugging Face datasets, in units that ranks share."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from hdpcomm.data.megatron import megatron_prefix
from hdpcomm.data.remote import RemoteFile, first_bytes, local_path, remote_files, shown
from hdpcomm.errors import Error, InvalidUsage, first_line
from hdpcomm.files import read_text

__all__ = [
    "Fields", "Unit", "block_starts", "check_paths", "check_text", "describe_units", "files_of", "input_files",
    "is_text", "json_record", "looks_like_text", "records", "text_files", "units_from", "units_of",
]  # fmt: skip

File = Path | RemoteFile
Index = npt.NDArray[np.int64]
_ENDINGS = re.compile(r"\.(parquet)$|\.(?:jsonl|ndjson)(?:\.(gz|bz2|xz|zst))?$|\.json\.(gz|zst)$")
_MODULES = {"gz": "gzip", "bz2": "bz2", "xz": "lzma"}
_OF_FOLDERS = {"dataset_info.json", "dataset_dict.json", "documents.npy", "index.json"}  # of one format
_PACKAGES = {"streaming": "mosaicml-streaming", "litdata": "litdata"}
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
    path: File
    start: int
    stop: int
    size: int
    """Weight in progress bars: bytes, or rows of a dataset."""


def input_files(named: str | Path) -> list[File]:
    """The files of a path or URL that the user named: itself, or the text, JSONL and Parquet files of a folder.

    A Hugging Face dataset is named as its folder. Links that lead out of a folder are left out.

    Raises: InvalidUsage for what is not there, not a file, empty, binary, or a folder without such files. Error: the
    server of a URL does not answer.
    """
    path = local_path(named)
    if path is None:
        return _input_of_url(str(named))
    if megatron_prefix(path) is not None:
        raise InvalidUsage(f"{path}: tokens of Megatron-Core are read in place; give them to --data as they are")
    if path.is_dir():
        if _is_dataset(path) or _samples_of(path):
            return [path]
        found: list[File] = list(text_files(path, with_binary=True))
        if not found:
            raise InvalidUsage(
                f"{path}: this folder holds no text file; give one with text, JSONL or Parquet files in it, a Hugging "
                "Face dataset (save_to_disk), a folder of hdpcomm data build or a prefix of Megatron-Core's files"
            )
        return found
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        text = "; give a URL as text, not as a Path" * (":/" in str(path))
        raise InvalidUsage(f"{path}: no such file or folder; check the path given with --data{text}") from None
    except (OSError, ValueError) as error:
        raise InvalidUsage(f"{path}: cannot be read ({error}); check the path given with --data") from None
    if not stat.S_ISREG(mode):
        raise InvalidUsage(
            f"{path}: this is a pipe, a socket or a device; give a file, since data is read in any order and again"
        )
    if path.suffix != ".parquet":
        check_text(path)
    return [path]


def _input_of_url(url: str) -> list[File]:
    files, is_folder = remote_files(url)
    if not is_folder:
        if _kind(files[0])[0] != "parquet":
            check_text(files[0])
        return list(files)
    if odd := _OF_FOLDERS.intersection(file.name for file in files):
        raise InvalidUsage(f"{shown(url)}: a folder with {min(odd)} is read from a disk alone; copy it, and give that")
    unknown = [file for file in files if _kind(file)[0] == "text"]
    binary = {
        file for file, head in zip(unknown, first_bytes(unknown, SNIFF_BYTES), strict=True) if not looks_like_text(head)
    }
    found: list[File] = [file for file in files if file not in binary]
    if not found:
        raise InvalidUsage(f"{shown(url)}: none of {len(files)} files is text; give text, JSONL or Parquet files")
    return found


def is_text(file: File) -> bool:
    """Whether a file of :func:`input_files` is one document of plain text on a disk, which is read in place."""
    return isinstance(file, Path) and file.is_file() and _kind(file) == ("text", "")


def _kind(file: File) -> tuple[str, str]:
    """(kind of units, compression) by the ending of a file's name."""
    match = _ENDINGS.search(file.name)
    if match is None:
        return "text", ""
    return ("parquet", "") if match[1] else ("jsonl", match[2] or match[3] or "")


def _open(file: File, stop: int | None = None) -> BinaryIO:
    """The content of a file as it is without its compression."""
    compression = _kind(file)[1]
    opened = file.open("rb") if isinstance(file, Path) else file.open(stop)
    if compression == "zst":
        arrow = _library("pyarrow", file)
        return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(opened, mode="r"), "zstd"))
    if compression:
        return cast("BinaryIO", importlib.import_module(_MODULES[compression]).open(opened))
    return opened


def _is_dataset(path: Path) -> bool:
    if (path / "dataset_dict.json").is_file():
        try:
            splits = json.loads(read_text(path / "dataset_dict.json"))["splits"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            splits = []
        names = ", ".join(str(path / str(name)) for name in splits) or f"a folder below {path}"
        raise InvalidUsage(f"{path}: this is a dataset of several splits; give one of them: {names}")
    return (path / "dataset_info.json").is_file() and (path / "state.json").is_file()


def _samples_of(path: Path) -> tuple[str, str, int] | None:
    """(package, class that reads it, rows) of a folder of MDS or litdata, whose classes count a rank's part. Local."""
    try:
        index = json.loads(read_text(path / "index.json"))
        if "shards" in index:
            return "streaming", "LocalDataset", sum(each["samples"] for each in index["shards"])
        return "litdata", "StreamingDataset", sum(each["chunk_size"] for each in index["chunks"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def units_of(path: File) -> list[Unit]:
    """The units of a file of :func:`input_files`, in the order of its documents. Local."""
    if isinstance(path, Path) and path.is_dir():
        samples = _samples_of(path)
        rows = samples[2] if samples else len(_dataset(path))
        starts = range(0, rows, _UNIT_ROWS)
        return [Unit("dataset", path, s, min(rows, s + _UNIT_ROWS), min(rows - s, _UNIT_ROWS)) for s in starts]
    size = path.stat().st_size if isinstance(path, Path) else path.size
    kind, compression = _kind(path)
    if kind == "parquet":
        file = _parquet(path)
        groups = [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
        return [Unit("parquet", path, group, group + 1, nbytes) for group, nbytes in enumerate(groups)]
    if kind == "jsonl" and (
        compression or (isinstance(path, RemoteFile) and not path.ranged)
    ):  # whose lines cannot be reached but from the first one on
        return [Unit("jsonl", path, 0, 1 << 62, max(size, 1))]
    if kind == "jsonl":
        starts = range(0, size, _UNIT_BYTES)
        return [Unit("jsonl", path, s, min(size, s + _UNIT_BYTES), min(size - s, _UNIT_BYTES)) for s in starts]
    return [Unit("text", path, 0, size, max(size, 1))]


def describe_units(units: Sequence[Unit]) -> list[list[Any]]:
    """Units for JSON; :func:`units_from` is the inverse."""
    paths = [astuple(each.path)[:-1] if isinstance(each.path, RemoteFile) else str(each.path) for each in units]
    return [[each.kind, path, each.start, each.stop, each.size] for path, each in zip(paths, units, strict=True)]


def units_from(rows: Sequence[Sequence[Any]]) -> list[Unit]:
    """Units of :func:`describe_units`."""
    return [
        Unit(kind, Path(path) if isinstance(path, str) else RemoteFile(*path), start, stop, size)
        for kind, path, start, stop, size in rows
    ]


def check_paths(paths: Any) -> None:
    """Raises InvalidUsage unless these are paths, and at least one."""
    listed = paths if isinstance(paths, Sequence) else (None,)
    if isinstance(paths, (str, Path)) or not all(isinstance(each, (str, Path)) for each in listed):
        raise InvalidUsage(f"paths is {paths!r}; give a list of paths")
    if not paths:
        raise InvalidUsage("no path was given; name at least one text file, JSONL file or folder")


def records(unit: Unit, fields: Fields) -> Iterator[tuple[object, str | bytes | Index | tuple[list[Any], list[Any]]]]:
    """(where, text, tokens or (messages, images for the placeholders in them)) of each document of a unit; ``where``
    names its place in messages. Local."""
    if unit.kind == "text":
        with _open(unit.path) as file:
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
        folder = cast("Path", unit.path)
        dataset = _dataset(folder)
        if _samples_of(folder):
            for row in range(unit.start, unit.stop):
                where = f"{unit.path} row {row}"
                yield where, _content(dict(dataset[row]), where, fields, "column")
            return
        dataset = dataset.select_columns(_columns(dataset.column_names, unit.path, fields))
        features = dict(dataset.features)
        if encoded := "Image(" in str(features.get(_IMAGES)):
            features[_IMAGES] = [_library("datasets", unit.path).Image(decode=False)]
        for start in range(unit.start, unit.stop, _ROWS_AT_ONCE):
            rows = dataset.select(range(start, min(start + _ROWS_AT_ONCE, unit.stop)), keep_in_memory=True)
            if encoded:  # else it writes a copy into the user's folder
                rows = rows.cast(type(dataset.features)(features), keep_in_memory=True)
            columns = rows[:]
            for row, values in enumerate(zip(*columns.values(), strict=True), start):
                where = f"{unit.path} row {row}"
                yield where, _content(dict(zip(columns, values, strict=True)), where, fields, "column")


def files_of(path: Path) -> list[Path]:
    """A file itself, or the files of a dataset's folder, without what its package caches there. Local."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if not file.name.startswith(("cache-", "tmp")))


class _Line:
    """``file:line`` of a byte offset, counted only when a message needs it; for what is far away, the byte."""

    def __init__(self, path: File, offset: int) -> None:
        self._path, self._offset = path, offset

    def __str__(self) -> str:
        if isinstance(self._path, RemoteFile):
            return f"{self._path} from byte {self._offset:,} on"
        number, left = 1, self._offset
        with _open(self._path) as file:
            while left > 0 and (chunk := file.read(min(left, 1 << 20))):
                number += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self._path}:{number}"


def _lines(unit: Unit) -> Iterator[tuple[int, bytes]]:
    """The lines that begin inside a unit's range of bytes, with their offsets."""
    with _open(unit.path, unit.stop) as file:
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
        if isinstance(text, list) or hasattr(text, "__array__"):
            with contextlib.suppress(ValueError):  # lists of lists
                values = np.asarray(text)
                if values.ndim == 1 and (values.dtype.kind in "iu" or not len(values)):
                    return values.astype(np.int64)
        if not isinstance(text, str):
            raise InvalidUsage(
                f"{where}: the {kind} {fields.text!r} holds a {type(text).__name__}, text was expected, or a list of "
                "whole numbers, which are tokens; choose one with --text-field"
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


def _columns(names: Sequence[str], path: File, fields: Fields) -> list[str]:
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


def _parquet(path: File) -> Any:
    parquet = _library("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path if isinstance(path, Path) else path.open(ahead=1 << 16))
    except Error:
        raise
    except Exception as error:  # pyarrow has many, some of them of OSError and ValueError
        raise InvalidUsage(
            f"{path}: no Parquet file, or a damaged one ({first_line(error)}); give another file"
        ) from None


def _dataset(path: Path) -> Any:
    package, opener, _ = _samples_of(path) or ("datasets", "load_from_disk", 0)
    library = _library(package, path)
    try:
        return getattr(library, opener)(str(path))
    except Exception as error:
        raise InvalidUsage(f"{path}: this dataset cannot be opened ({first_line(error)}); save it again") from None


def _library(name: str, path: File) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        wanted = _PACKAGES.get(package, "'hdpcomm[data]'")
        raise InvalidUsage(f"{path}: {package} is needed to read it; pip install {wanted}") from None


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


def check_text(path: File) -> None:
    """Raises InvalidUsage if a text file that the user named is empty, binary or unreadable."""
    try:
        with _open(path, SNIFF_BYTES) as file:
            head = file.read(SNIFF_BYTES)
    except Error:
        raise
    except Exception as error:  # of the system, or of one of many libraries for compressed files
        raise InvalidUsage(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); give a text or JSONL file that "
            "this user may read"
        ) from error
    if not head:
        raise InvalidUsage(f"{path}: the file is empty; give a file with text in it")
    if not looks_like_text(head):
        raise InvalidUsage(
            f"{path}: this is a binary file (its first {len(head)} bytes are not text); give plain text, or JSONL or "
            "Parquet with its ending"
        )


def text_files(
    folder: Path, *, suffix: str = "", without: Collection[str] = (), with_binary: bool = False
) -> Iterator[Path]:
    """The non-empty text files below ``folder`` in a fixed order.

    Hidden files and folders, links to folders, links that lead out of ``folder``, and binary files are left out.
    ``suffix`` is what a file's name must end with, ``without`` the names of folders to leave out; with ``with_binary``
    Parquet and compressed JSONL are taken, too.
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
            if with_binary and (path.suffix == ".parquet" or _kind(path)[1]):
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
