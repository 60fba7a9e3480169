"""Documents that become tokens while a run trains: files in blocks, of which nothing but the places is known before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdpcomm.arguments import check_whole
from hdpcomm.data.agree import on_rank_0
from hdpcomm.data.corpus import CorpusSummary
from hdpcomm.data.encoders import ByteEncoder, Encoder
from hdpcomm.data.records import Fields, Unit, check_paths, describe_units, input_files, units_from, units_of
from hdpcomm.data.token_store import is_store
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["BLOCK_BYTES", "SHUFFLED_BLOCKS", "DocumentStream", "open_stream"]

BLOCK_BYTES = 1 << 18
SHUFFLED_BLOCKS = 8
_BLOCK_ROWS = 256  # of a dataset, whose rows have no known size


@dataclass(frozen=True, slots=True, eq=False)
class DocumentStream:
    """Documents of files, cut into blocks; made by :func:`open_stream`. It holds places, no tokens.

    Attributes:
        name: for messages.
        context: the longest sequence, in tokens; longer documents are cut into pieces of this size.
        blocks: units of files that become tokens together.
        files: bytes and time of the last change of each file, by its path, as they were when it was opened.
        shuffled: blocks whose sequences are shuffled together.
        encoder: makes the tokens.
    """

    name: str
    context: int
    blocks: tuple[tuple[Unit, ...], ...]
    files: dict[str, tuple[int, int]]
    fields: Fields
    shuffled: int
    encoder: Encoder

    @property
    def longest(self) -> int:
        """No sequence has more tokens."""
        return self.context

    @property
    def vocabulary(self) -> int:
        """Every token is below it."""
        return self.encoder.vocabulary

    @property
    def encoder_name(self) -> str:
        """The name of the encoder that makes the tokens, for messages."""
        return self.encoder.name

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for a checkpoint: equal ones mean the same sequences in the same blocks."""
        places = [[[unit.kind, str(unit.path), unit.start, unit.stop] for unit in block] for block in self.blocks]
        digest = hashlib.sha256(json.dumps([places, asdict(self.fields), None]).encode("utf-8", "surrogatepass"))
        return {
            "blocks": len(self.blocks),
            "shuffled": self.shuffled,
            "context": self.context,
            "places": digest.hexdigest()[:16],
            "encoder": self.encoder.fingerprint,
        }

    def place(self, block: int) -> str:
        """Where a block begins, for messages."""
        unit = self.blocks[block][0]
        return f"{unit.path} from {'byte' if unit.kind in ('text', 'jsonl') else 'row or group'} {unit.start:,}"

    def check_unchanged(self, block: int) -> None:
        """Raises: InvalidUsage if a file of the block is not as it was when the stream was opened."""
        for path in {str(unit.path) for unit in self.blocks[block]}:
            try:
                status = Path(path).stat()
            except OSError as error:
                raise InvalidUsage(
                    f"{path}: cannot be read any more ({error.strerror}); every server of the loader must see it under "
                    "this path, for as long as the run reads it"
                ) from None
            size, changed = self.files[path]
            if (status.st_size, status.st_mtime_ns) != (size, changed):
                raise InvalidUsage(
                    f"{path}: had {size:,} bytes when the run began and has been changed since ({status.st_size:,} "
                    "bytes now); start anew, and leave the data as it is while a run reads it"
                )

    def summary(self) -> CorpusSummary:
        """Facts of this data for the report of a run."""
        size = sum(size for size, _ in self.files.values())
        text = (
            f"{self.name}: {len(self.files):,} files with {size:,} bytes, made into {self.encoder_name} tokens while "
            f"the run trained, in {len(self.blocks):,} blocks; documents longer than {self.context:,} were cut"
        )
        return CorpusSummary(self.name, self.context, None, None, None, None, text)


def open_stream(
    paths: Sequence[str | Path],
    *,
    context: int,
    text_field: str = "text",
    messages_field: str = "messages",
    encoder: Encoder | None = None,
    comm: Communicator | None = None,
    block_bytes: int = BLOCK_BYTES,
    shuffled: int = SHUFFLED_BLOCKS,
) -> DocumentStream:
    """Looks at files whose documents a :class:`LoaderService` is to read. Collective over ``comm``: rank 0 looks.

    Args:
        paths: text files, JSONL, Parquet, folders of these, Hugging Face datasets.
        context: the longest sequence in tokens; longer documents are cut into pieces of this size.
        text_field, messages_field: as in :func:`hdpcomm.data.open_corpus`.
        encoder: makes the tokens; ``None``: they are bytes.
        block_bytes: of files, about as many become tokens together.
        shuffled: blocks whose sequences are shuffled together. The order of the blocks is shuffled, too.

    Raises:
        InvalidUsage: a path that does not exist, an empty or binary file, a folder without text, a folder of tokens.

    Examples:
        >>> open_stream([__file__], context=4096).longest
        4096
    """
    check_whole("open_stream()", "context", context, least=1)
    check_whole("open_stream()", "block_bytes", block_bytes, least=1)
    check_whole("open_stream()", "shuffled", shuffled, least=1)
    check_paths(paths)
    found = on_rank_0(comm, lambda: _look([Path(path) for path in paths], block_bytes))
    return DocumentStream(
        name=", ".join(map(str, paths)),
        context=context,
        blocks=tuple(tuple(units_from(block)) for block in found["blocks"]),
        files={path: (size, changed) for path, (size, changed) in found["files"].items()},
        fields=Fields(text_field, messages_field),
        shuffled=shuffled,
        encoder=encoder or ByteEncoder(),
    )


def _look(paths: Sequence[Path], block_bytes: int) -> dict[str, Any]:
    units: list[Unit] = []
    files: dict[str, tuple[int, int]] = {}
    for path in paths:
        if is_store(path):
            raise InvalidUsage(
                f"{path}: holds tokens already (hdpcomm data build), which are read in place; leave out --loader, or "
                "give the files that they were made of"
            )
        for file in input_files(path):
            status = file.absolute().stat()
            files[str(file.absolute())] = status.st_size, status.st_mtime_ns
            units += [part for unit in units_of(file.absolute()) for part in _parts(unit, block_bytes)]
    return {"blocks": [describe_units(block) for block in _grouped(units, block_bytes)], "files": files}


def _parts(unit: Unit, block_bytes: int) -> Iterator[Unit]:
    """Smaller units with the same documents, where there is a way to cut."""
    if unit.kind not in ("jsonl", "dataset"):
        yield unit
        return
    most = block_bytes if unit.kind == "jsonl" else _BLOCK_ROWS
    for start in range(unit.start, unit.stop, most):
        stop = min(unit.stop, start + most)
        yield Unit(unit.kind, unit.path, start, stop, stop - start)


def _grouped(units: Sequence[Unit], block_bytes: int) -> list[list[Unit]]:
    """Small units of neighbours together."""
    weight: Callable[[Unit], int] = lambda unit: block_bytes if unit.kind == "dataset" else unit.size
    blocks: list[list[Unit]] = []
    room = 0
    for unit in units:
        if weight(unit) > room:
            blocks.append([])
            room = block_bytes
        blocks[-1].append(unit)
        room -= weight(unit)
    return blocks
