"""The tensors of a checkpoint on the disk, in the format of torch.distributed.checkpoint, without its process groups.

Each rank writes files of its own, with torch's metadata of these; one process joins the metadata, after which the files
of all ranks are one checkpoint.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hdpcomm.errors import Error
from hdpcomm.files import open_regular
from hdpcomm.train.state.layout import TensorPart

__all__ = ["METADATA", "TensorFiles", "join_files", "write_tensors"]

#: The file of torch's that names all tensors.
METADATA = ".metadata"
_METADATA_BYTES = 1 << 28  # the most that is read


def write_tensors(folder: Path, state: dict[str, Any], *, rank: int = 0) -> None:
    """Writes a state, in which :class:`TensorPart` may stand for tensors, to ``folder``: the file ``__<rank>_0.distcp``
    and its metadata. Synced to the disk. Local.
    """
    with _torch_reads_and_writes():
        save(state, storage_writer=_Writer(folder, f"__{rank}_0.distcp"), planner=_SavePlanner(), no_dist=True)


class TensorFiles:
    """Files of :func:`write_tensors`, for one or several reads. Local.

    Attributes:
        kinds: shape and type by name, as ``policies.balanced.model.embedding.weight``.

    Raises: what torch raises, also for metadata that name code.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = _Reader(folder)
        told = self._reader.read_metadata().state_dict_metadata
        self.kinds = {
            name: (each.size, each.properties.dtype)
            for name, each in told.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def read_into(self, state: dict[str, Any]) -> None:
        """Reads into the tensors of ``state``, in place, of a :class:`TensorPart` that part only; other leaves are
        replaced. Raises: what torch raises, as where a name is missing.
        """
        with _torch_reads_and_writes():
            load(state, storage_reader=self._reader, planner=_LoadPlanner(), no_dist=True)


def join_files(folder: Path, others: Sequence[Path]) -> None:
    """Moves what :func:`write_tensors` of other ranks has written in ``others`` to ``folder``, and joins the metadata.

    Raises: Error if a tensor would not be whole.
    """
    joined, places = Metadata({}, planner_data={}), dict[MetadataIndex, Any]()
    for each in (folder, *others):
        metadata = _Reader(each).read_metadata()
        joined.planner_data |= metadata.planner_data
        places |= metadata.storage_data
        for name, told in metadata.state_dict_metadata.items():
            known = joined.state_dict_metadata.setdefault(name, told)
            if known is not told and isinstance(told, TensorStorageMetadata):
                cast(TensorStorageMetadata, known).chunks.extend(told.chunks)
    _check_whole(joined)
    for each in others:
        for file in each.glob("*.distcp"):
            file.rename(folder / file.name)
    results = [WriteResult(index, 0, place) for index, place in places.items()]
    FileSystemWriter(folder, sync_files=True).finish(joined, [results])


def _check_whole(metadata: Metadata) -> None:
    for name, told in metadata.state_dict_metadata.items():
        if isinstance(told, TensorStorageMetadata):
            found = sum(math.prod(chunk.sizes) for chunk in told.chunks)
            if found != math.prod(told.size):
                raise Error(f"the checkpoint has {found} of the {math.prod(told.size)} elements of {name}")


def _check_kinds(state: Mapping[str, Any], metadata: Metadata) -> None:
    """Checks what torch does not: that tensors are read where tensors are, of the same type and whole. torch converts
    one of another type, and leaves what no chunk covers as it was, both in silence.

    Raises: ValueError, Error.
    """
    for name, own in state.items():
        told = metadata.state_dict_metadata.get(name)
        if told is None:
            continue  # which torch tells
        is_tensor = isinstance(own, (Tensor, TensorPart))
        if is_tensor != isinstance(told, TensorStorageMetadata):
            raise ValueError(f"{name} is {'no' if is_tensor else 'a'} tensor in the checkpoint")
        if isinstance(told, TensorStorageMetadata):
            boxes = [box for _, box in own.boxes] if isinstance(own, TensorPart) else [own]
            if any(box.dtype != told.properties.dtype for box in boxes):
                raise ValueError(f"{name} is {told.properties.dtype} in the checkpoint and {boxes[0].dtype} here")
    wanted = {name: told for name, told in metadata.state_dict_metadata.items() if name in state}
    _check_whole(replace(metadata, state_dict_metadata=wanted))


def _alike(found: Any, own: Any) -> bool:
    """Whether a value may take the place of another one, as options of an optimizer do."""
    if own is None or found is None:
        return found is None or isinstance(found, (bool, int, float))
    if isinstance(own, (list, tuple)) and own and not isinstance(own[0], str):
        return type(found) is type(own) and len(found) == len(own) and all(map(_alike, found, own))
    if isinstance(own, (int, float)) and not isinstance(own, bool):
        return isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found)
    return type(found) is type(own)


_TORCH_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = {
    *((_TORCH_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_TORCH_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_TORCH_METADATA, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name in Python 3.13
}


def _member(kind: Any, name: str) -> Any:
    """In the place of ``getattr``, by which Python 3.11.0 to 3.11.3 write the members of enumerations."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"{METADATA} asks for {name!a} of what is no enumeration with it")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    """Knows what torch's metadata is made of and nothing else, so that a file cannot name code to be called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which no checkpoint's metadata needs")


class _Reader(FileSystemReader):
    """Reads metadata, once, without torch's ``pickle.load``, which calls whatever the file names."""

    _known: Metadata | None = None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError:  # whose text says how to let it run code
            raise ValueError("a value of it holds more than numbers, texts and tensors") from None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        self._known = metadata = self._known or self._checked_metadata()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _checked_metadata(self) -> Metadata:
        folder = Path(self.path)
        with open_regular(folder / METADATA, most=_METADATA_BYTES) as file:
            metadata = _MetadataUnpickler(io.BytesIO(file.read())).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError(f"{METADATA} holds no metadata of a checkpoint")
        for name in {place.relative_path for place in metadata.storage_data.values()}:
            if Path(name).name != name:
                raise pickle.UnpicklingError(f"{METADATA} names the file {name!a}, which is not of this folder")
            open_regular(folder / name).close()
        return metadata


class _Writer(FileSystemWriter):
    """Writes one file, with the name of its rank, so that the files of all ranks fit into one folder."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, sync_files=True)
        self._file = folder / name

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch's, which keeps its copy of each tensor until all are written; a view is copied to be written."""
        results = []
        with self._file.open("wb") as file:
            for item in plan.items:
                data, start = planner.resolve_data(item), file.tell()
                if isinstance(data, Tensor):
                    data = data.detach().cpu()
                    whole = data.untyped_storage().nbytes() == data.nbytes
                    torch.save(data if whole else data.clone(), file)
                else:
                    file.write(data.getbuffer())
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(self._file.name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


class _SavePlanner(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # As torch's, but for its check that tensors are whole: here they are when the files are joined.
        self.global_plan, metadata = create_default_global_save_plan(all_plans)
        self.metadata = replace(metadata, planner_data=self.mappings)
        return self.global_plan, self.metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = _part(self.state_dict, index)
        return super().lookup_object(index) if found is None else found


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # As torch's, but for its look at what is on the meta device, which replaces objects that it does not know.
        self.original_state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self.state_dict, self.mappings = _nested_dict.flatten_state_dict(state_dict)
        if metadata is not None:
            _check_kinds(self.state_dict, metadata)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # As torch's, which unpickles with any globals.
        found, name = torch.load(value, weights_only=True), read_item.dest_index.fqn
        if not _alike(found, self.state_dict[name]):
            raise ValueError(f"{name} is {found!a:.100} where {self.state_dict[name]!a:.100} is")
        set_element(self.original_state_dict, self.mappings[name], found)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = _part(self.state_dict, index)
        return super().lookup_tensor(index) if found is None else found


def _part(state: Mapping[str, Any], index: MetadataIndex) -> Tensor | None:
    found = state.get(index.fqn)
    return found.box(index.offset) if isinstance(found, TensorPart) else None


_TORCH = threading.Lock()
"""torch's reader looks for names of older versions by a switch of the whole process: a thread that reads or writes
meanwhile would use these names."""


@contextmanager
def _torch_reads_and_writes() -> Iterator[None]:
    """One thread at a time; without torch's warnings of a single process, which is what is wanted here."""
    with _TORCH, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
