"""A digest of what data say, so that ranks and runs notice other bytes behind the same lengths."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from hdpcomm.data.corpus import Corpus
from hdpcomm.data.records import files_of
from hdpcomm.data.token_store import TokenStore
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import open_regular

__all__ = ["content_digest"]

_SAMPLES = 1024
_SAMPLE_BYTES = 4096


@lru_cache(maxsize=2)
def content_digest(corpus: Corpus) -> str:
    """A digest of the sizes of files and :data:`_SAMPLES` samples, evenly spaced over all of them; for a store of
    tokens, of all of them and the checksums of images. Local; made once for each corpus.

    Raises: InvalidUsage if a file cannot be read.
    """
    digest = hashlib.sha256()
    for source in corpus.sources:
        if not isinstance(source, TokenStore):
            _add_files(digest, source.files)
        else:
            digest.update(source.content.encode())
            for name, sums in sorted(source.checksums.items()) if not source.content else ():
                digest.update(b"" if name.startswith("images-") else name.encode() + sums.tobytes())
            digest.update(source.images[:, -1].tobytes())  # of images wherever they lie
    return digest.hexdigest()[:16]


def _add_files(digest: hashlib._Hash, paths: Sequence[Path]) -> None:
    files = [file for path in paths for file in files_of(path)]
    step = max(1, len(files) // _SAMPLES)
    for file in files[::step]:
        try:
            for piece in _samples(file, max(1, _SAMPLES // len(files))):
                digest.update(piece)
        except OSError as error:
            raise InvalidUsage(f"{file}: cannot be read ({error.strerror}); give data that all ranks see") from error


def _samples(file: Path, count: int) -> Iterator[bytes]:
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        yield size.to_bytes(8, "little")
        room = max(0, size - _SAMPLE_BYTES)
        for place in sorted({room * number // max(1, count - 1) for number in range(count)}):
            opened.seek(place)
            yield opened.read(_SAMPLE_BYTES)
