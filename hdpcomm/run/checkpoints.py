"""Checkpoints of a run: folders ``step-N`` that are there whole or not at all.

A checkpoint is written into a hidden folder, with the size and CRC-32 of each of its files in ``meta.json``, which has
a checksum of its own; it is synced to the disk and then renamed. So a process that is killed while it saves leaves
the checkpoints before it untouched, and a checkpoint that was cut short or changed afterwards is recognised. The
tensors are in the format of torch.distributed.checkpoint, which other tools read, too.

Where the optimizer is sharded, or the model is on a mesh, each rank writes its part into a hidden folder beside that
one, from which the process that writes the rest takes it before it renames.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.errors import Error, InvalidUsage, first_line
from hdpcomm.files import fingerprint, json_checksum, read_text, sync_folder, write_synced
from hdpcomm.log import LOG
from hdpcomm.train.state.layout import TensorPart

if TYPE_CHECKING:
    from hdpcomm.run.tensor_files import TensorFiles

__all__ = ["FORMAT", "Checkpoint", "CheckpointFolder", "newest_checkpoint", "open_checkpoint"]

#: Raised when a reader of today could not make sense of what is written.
FORMAT = 2

_NAME = re.compile(r"step-(\d+)")
_META = "meta.json"
_BEST = "best"
_FAILED = ".failed"  # in a part that its writer has given up
_CHECKSUM = "sha256"  # in meta.json: of all else in it
_CHUNK = 1 << 20
_PATIENCE_S = 600.0  # for the parts of other writers, which may be gigabytes on a slow disk
_LAST_PATIENCE_S = 5.0  # when the run has ended by an error
_SILENCE_S = 0.5  # then also the longest time without another byte: a dead writer's part does not grow
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are all there, with the sizes and checksums that were written.

    Attributes:
        path: its folder.
        step: optimizer steps that had been done.
        facts: what the run noted beside the tensors (``meta.json``).
    """

    path: Path
    step: int
    facts: Mapping[str, Any]

    def open_tensors(self) -> TensorFiles:
        """Its tensors, for :meth:`load_into`. Local. Raises: InvalidUsage: its metadata are damaged."""
        # Here and below: torch's checkpoints take a second to import, and the start of a run needs none of it.
        from hdpcomm.run.tensor_files import TensorFiles

        try:
            return TensorFiles(self.path)
        except Exception as error:
            raise InvalidUsage(f"{self.path}: damaged ({_reason(error)}); use another checkpoint") from error

    def load_into(self, state: dict[str, Any], tensors: TensorFiles | None = None) -> None:
        """Reads the tensors into those of ``state``, in place; other leaves are replaced. A
        :class:`hdpcomm.train.state.layout.TensorPart` reads only its own part. Local.

        Raises: InvalidUsage where the checkpoint has no entry of that name, or one of another shape.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        from hdpcomm.run.tensor_files import TensorFiles

        try:
            (tensors or TensorFiles(self.path)).read_into(state)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            reason = _reason(error)
            raise InvalidUsage(
                f"{self.path}: does not fit this run ({reason}); resume with the model and the options that it was "
                "saved with"
            ) from error


class CheckpointFolder:
    """The checkpoints of one run. One process of the run is the first writer, with ``rank`` 0.

    Args:
        path: made if it is not there. With more writers than one, the same files for all of them.
        keep: how many of the newest stay; at least 1. Beside them stays the one of :meth:`mark_best`.
        keep_every: those of steps that are multiples of it stay, too; 0: none of them.
        on_saved: (step, seconds that it took) as soon as one is there, called by the thread that has written it.
        rank, writers: this writer among those that each :meth:`save` a part of each checkpoint. Make the first one
            before any other saves: it sweeps what a killed process left.
        session: a name that the writers share and no others before them.
    """

    def __init__(
        self, path: Path, *, keep: int, rank: int = 0, writers: int = 1, session: str = "", keep_every: int = 0,
        on_saved: Callable[[int, float], None] | None = None,
    ) -> None:  # fmt: skip
        if keep < 1:
            raise InvalidUsage(f"keep is {keep}; at least 1 checkpoint has to stay")
        self.path = path
        self.keep, self.keep_every, self._on_saved = keep, keep_every, on_saved
        self._best = -1
        self._rank, self._writers, self._session = rank, writers, session
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._unjoined: Path | None = None
        self._patience_s = _PATIENCE_S
        self._giving_up = False
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidUsage(f"{path}: cannot be made ({error.strerror}); give a folder that can") from error
        if rank == 0:
            for left in path.glob(".step-*"):  # of a process that was killed while it saved
                shutil.rmtree(left, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, the newest first; not looked into."""
        return _steps_in(self.path)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest sound checkpoint, and what is wrong with each newer one."""
        return newest_checkpoint(self.path)

    def save(self, step: int, state: dict[str, Any], facts: Mapping[str, Any], *, copy: bool = True) -> None:
        """Writes a checkpoint in the background, from a copy of ``state`` that is taken now. Every writer calls it;
        those after the first one write the :class:`TensorPart` of their state only.

        ``copy=False``: from the state itself, which the caller leaves alone until :meth:`wait`; it takes no memory.

        Waits for the one before. Raises: Error if that could not be written.
        """
        self.wait()
        if self._rank == 0:
            work = partial(self._write, step, _own(state, copy), dict(facts))
        else:
            work = partial(self._write_part, step, _own_parts(state, copy))
        self._thread = threading.Thread(target=work, name="hdpcomm-checkpoint", daemon=False)
        self._thread.start()

    def mark_best(self, step: int) -> None:
        """The checkpoint of ``step``, there or being written, is to stay until another is marked; the link ``best``
        leads to it. Called by the first writer."""
        self._best = step
        if (self.path / f"step-{step}").is_dir():
            self._link_best(step)

    def _link_best(self, step: int) -> None:
        link = self.path / ".best"
        link.unlink(missing_ok=True)
        link.symlink_to(f"step-{step}")
        link.rename(self.path / _BEST)

    def _old(self) -> list[int]:
        """Steps whose checkpoints have had their time."""
        best = (self.path / _BEST).resolve().name
        every = self.keep_every
        return [s for s in self.steps()[self.keep :] if not (every and s % every == 0) and best != f"step-{s}"]

    def wait(self) -> None:
        """Until what is being written is on the disk. Raises: Error if it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            reason = _reason(failure)
            raise Error(
                f"a checkpoint could not be written to {self.path}: {reason}; make room there or give another --out. "
                "The checkpoints before it are as they were"
            ) from failure

    def give_up(self) -> None:
        """As :meth:`wait` after an error of the run, when another writer may be dead: waits a few seconds for parts
        that grow, half a second for one that does not, and leaves a checkpoint that does not become whole."""
        self._patience_s, self._giving_up = _LAST_PATIENCE_S, True
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, state: dict[str, Any], facts: dict[str, Any]) -> None:
        from hdpcomm.run.tensor_files import METADATA, join_files, write_tensors

        unfinished, started = self.path / f".step-{step}.partial", time.monotonic()
        parts = [self._part(step, rank) for rank in range(1, self._writers)]
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            write_tensors(unfinished, state)
            files = {path.name: fingerprint(path) for path in sorted(unfinished.glob("*.distcp"))}
            if parts:
                for part in parts:
                    files |= self._wait_for(part)
                join_files(unfinished, parts)
            files[METADATA] = fingerprint(unfinished / METADATA)
            noted = {"format": FORMAT, "step": step, **facts, "files": files}
            write_synced(unfinished / _META, json.dumps(noted | {_CHECKSUM: json_checksum(noted)}, indent=1))
            self._check(unfinished)
            self._publish(unfinished, self.path / f"step-{step}")
            LOG.debug(f"wrote {self.path / f'step-{step}'}")
            if step == self._best:
                self._link_best(step)
            for old in self._old():
                shutil.rmtree(self.path / f"step-{old}", ignore_errors=True)
            if self._on_saved is not None:
                self._on_saved(step, time.monotonic() - started)
        except BaseException as failure:
            self._failure = failure
            shutil.rmtree(unfinished, ignore_errors=True)
        for part in parts:
            shutil.rmtree(part, ignore_errors=True)

    def _write_part(self, step: int, state: dict[str, Any]) -> None:
        from hdpcomm.run.tensor_files import write_tensors

        part = self._part(step, self._rank)
        # The first writer may still be joining the part before this one. It has done without those before that.
        for left in self.path.glob(f".step-*.{self._session}.{self._rank}"):
            if left != self._unjoined:
                shutil.rmtree(left, ignore_errors=True)
        self._unjoined = part
        try:
            write_tensors(part, state, rank=self._rank)
            text = json.dumps({path.name: fingerprint(path) for path in part.glob("*.distcp")})
            write_synced(part / f".{_META}", text)
            (part / f".{_META}").rename(part / _META)  # now it is whole
        except BaseException as failure:
            self._failure = failure
            shutil.rmtree(part, ignore_errors=True)
            with contextlib.suppress(OSError):
                (part / _FAILED).mkdir(parents=True)

    def _part(self, step: int, rank: int) -> Path:
        return self.path / f".step-{step}.{self._session}.{rank}"

    def _wait_for(self, part: Path) -> dict[str, list[int]]:
        """The files of another writer's part, as soon as it is whole."""
        started = grown = time.monotonic()
        size = -1
        while not (part / _META).exists():
            if (part / _FAILED).exists():
                raise Error(f"rank {part.suffix[1:]} could not write its part, and says why")
            now = time.monotonic()
            if not self._giving_up:
                grown = now
            elif (found := _bytes_in(part)) != size:
                size, grown = found, now
            if now - started > self._patience_s or now - grown > _SILENCE_S:
                raise Error(
                    f"rank {part.suffix[1:]} has not written its part within {self._patience_s:g} s (all ranks of "
                    "a sharded optimizer or a mesh write to this folder, so it must be the same one on all hosts)"
                )
            time.sleep(_POLL_S)
        files: dict[str, list[int]] = json.loads(read_text(part / _META))
        return files

    def _check(self, unfinished: Path) -> None:
        """Reads back what was written, from the disk as far as the system lets go of its own copy. Raises: Error."""
        for path in unfinished.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            open_checkpoint(unfinished)
        except InvalidUsage as error:
            raise Error(f"what was written does not come back as it was ({error}); the disk may be broken") from None

    def _publish(self, unfinished: Path, final: Path) -> None:
        """Renames; a folder of that name (a damaged one that a resumed run has passed) goes first."""
        if final.exists():
            aside = final.with_name(f".{final.name}.replaced")
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
            unfinished.rename(final)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            unfinished.rename(final)
        sync_folder(self.path)


def newest_checkpoint(
    folder: Path, *, before: int | None = None, check: Callable[[Checkpoint], None] | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint of a folder, and what is wrong with each newer one. Only reads: the folder may belong
    to a run that is still going on. Local.

    Args:
        before: only those of fewer steps.
        check: raises InvalidUsage for one that is not to be taken.
    """
    damaged: list[str] = []
    for step in _steps_in(folder):
        if before is not None and step >= before:
            continue
        try:
            found = open_checkpoint(folder / f"step-{step}")
            if check is not None:
                check(found)
            return found, damaged
        except InvalidUsage as error:
            damaged.append(str(error))
    return None, damaged


def _steps_in(folder: Path) -> list[int]:
    there = folder.iterdir() if folder.is_dir() else ()
    names = (_NAME.fullmatch(path.name) for path in there if path.is_dir())
    return sorted((int(name[1]) for name in names if name), reverse=True)


def open_checkpoint(path: Path) -> Checkpoint:
    """Checks that a checkpoint is whole, and reads its ``meta.json``. Local.

    Raises: InvalidUsage if it is none, of another format, or if a file is missing, cut short or changed.
    """
    if not path.is_dir():
        raise InvalidUsage(f"{path}: no such checkpoint; give a folder step-N, or the folder of the run")
    try:
        facts = json.loads(read_text(path / _META))
    except FileNotFoundError:
        raise InvalidUsage(f"{path}: no checkpoint of hdpcomm ({_META} is missing)") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidUsage(f"{path}: damaged ({_META}: {error}); use another checkpoint") from None
    if not isinstance(facts, dict) or type(facts.get("step")) is not int or not isinstance(facts.get("files"), dict):
        raise InvalidUsage(f"{path}: no checkpoint of hdpcomm ({_META} has no step or files)")
    checksum = facts.pop(_CHECKSUM, None)
    if facts.get("format") != FORMAT:
        raise InvalidUsage(f"{path}: has format {facts.get('format')!a}, and this hdpcomm reads format {FORMAT}")
    if checksum != json_checksum(facts):
        raise InvalidUsage(
            f"{path}: damaged ({_META} does not have the checksum that it names); use another checkpoint"
        )
    step, named = facts["step"], _NAME.fullmatch(path.name)
    if step < 0 or (named and int(named[1]) != step):
        raise InvalidUsage(f"{path}: damaged ({_META} is of step {step}); use another checkpoint")
    for name, expected in facts["files"].items():
        file = path / Path(name).name
        try:
            found = fingerprint(file, expected or [])
        except (OSError, ValueError) as error:
            told = error.strerror if isinstance(error, OSError) else error
            raise InvalidUsage(f"{path}: damaged ({name!a}: {told}); use another checkpoint") from None
        if found != expected:
            raise InvalidUsage(
                f"{path}: damaged ({name} has {found[0]} bytes with checksum {found[1]:#x}, expected {expected}); use "
                "another checkpoint"
            )
    return Checkpoint(path, step, facts)


def _reason(error: BaseException) -> str:
    """Reason of an error of torch, without the traceback in its text."""
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # torch's own end of a file fails after it
        cause = cause.__cause__ or cause.__context__
    return (isinstance(cause, OSError) and cause.strerror) or first_line(error)


def _bytes_in(folder: Path) -> int:
    """Bytes of the files of a folder that another process may be writing, or about to make."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            total += path.stat().st_size
    return total


def _own_parts(value: Mapping[str, Any], copy: bool) -> dict[str, Any]:
    """Structure with the parts of tensors only."""
    found: dict[str, Any] = {}
    for key, each in value.items():
        if isinstance(each, TensorPart):
            if each.written:
                found[key] = each.copy() if copy else each
        elif isinstance(each, Mapping) and (inner := _own_parts(each, copy)):
            found[key] = inner
    return found


def _own(value: Any, copy: bool) -> Any:
    """Structure without the parts that other writers write; ``copy``: with tensors of its own, in host
    memory."""
    if isinstance(value, TensorPart):
        return value.copy() if copy else value
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if copy else value.detach()
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if not isinstance(each, TensorPart) or each.written}
        return {key: _own(each, copy) for key, each in kept.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_own(each, copy) for each in value)
    return value
