"""Opens what the user names as data: in place, from a store of tokens, or by building one in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hdpcomm.arguments import check_whole
from hdpcomm.data.agree import on_rank_0, raise_together
from hdpcomm.data.build import build_store, cache_folder, open_published, store_key
from hdpcomm.data.corpus import Corpus, Source, TextPieces, corpus_of
from hdpcomm.data.encoders import ByteEncoder, Encoder
from hdpcomm.data.megatron import MegatronTokens, megatron_prefix, open_megatron
from hdpcomm.data.records import (
    Fields,
    File,
    check_paths,
    describe_units,
    input_files,
    is_text,
    units_from,
    units_of,
)
from hdpcomm.data.remote import local_path, shown
from hdpcomm.data.sampler import checked_weights
from hdpcomm.data.token_store import TokenStore, is_store, open_store
from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["build_data", "is_indexed", "open_corpus"]

Progress = Callable[[int, int], None]


def open_corpus(
    paths: Sequence[str | Path],
    *,
    context: int,
    weights: Sequence[float] | Mapping[int, Sequence[float]] = (),
    text_field: str = "text",
    messages_field: str = "messages",
    name: str | None = None,
    encoder: Encoder | None = None,
    cache: Path | None = None,
    comm: Communicator | None = None,
    on_progress: Progress | None = None,
) -> Corpus:
    """Indexes text, JSONL and Parquet files, folders of these, also behind URLs, Hugging Face datasets, tokens of
    Megatron-Core and stores of tokens.

    Collective over ``comm``, if there is one: rank 0 looks at the files, and all ranks share the work. Text as bytes is
    read in place, as are files of Megatron-Core and stores of ``hdpcomm data build``. All else is turned into tokens
    once, into a store in the cache that later runs find again as long as the files, the tokenizer and the fields are
    the same.

    Args:
        paths: files and folders, or as text URLs of some as fsspec takes them. The files of a folder are taken in a
            fixed order, without empty and binary ones; a file that is named here must not be empty or binary.
        context: the longest sequence in tokens; longer documents are cut into pieces of this size.
        weights: of the tokens of each path in a mixture, or these by their first steps
            (:class:`hdpcomm.data.BatchSampler`); none: every sequence comes once an epoch.
        text_field, messages_field: names of the field (or column) of a text, or of the messages of a conversation, of
            which the assistant's tokens alone count for the loss.
        encoder: makes the tokens; ``None``: they are bytes.
        cache: folder of the built stores; default: :func:`hdpcomm.data.build.cache_folder`.
        on_progress: see :func:`hdpcomm.data.build.build_store`.

    Raises:
        InvalidUsage: a path that does not exist, an empty or binary file, a folder with no text, a record that is wrong
            (``file:line``) or has no such field, a damaged store, tokens of another tokenizer.

    Examples:
        >>> corpus = open_corpus([Path(__file__).parent], context=4096)
        >>> len(corpus.read(0)) - int(corpus.lengths[0])
        0
    """
    check_whole("open_corpus()", "context", context, least=1)
    check_paths(paths)
    phases = checked_weights("open_corpus()", weights)
    if phases and len(phases[0]) != len(paths):
        raise InvalidUsage(f"{len(phases[0])} weights were given for {len(paths)} paths; give one for each, or none")
    encoder, fields = encoder or ByteEncoder(), Fields(text_field, messages_field)
    found = on_rank_0(comm, lambda: _look(paths, encoder, fields, cache or cache_folder()))
    opened: dict[str, Source] = {}  # a path may be several sources of a mixture
    for each in found:
        if each["name"] not in opened:
            opened[each["name"]] = _open(each, encoder, fields, comm, on_progress)
    corpus = corpus_of(name or _names(paths), [opened[each["name"]] for each in found], context=context)
    first, later = phases.get(0, ()), tuple(sorted(phases.items()))[1:]
    named = replace(corpus, weights=first, later_weights=later, source_names=tuple(_names([each]) for each in paths))
    return replace(named, _model=getattr(encoder, "folder", None))


def is_indexed(
    paths: Sequence[str | Path],
    *,
    text_field: str = "text",
    messages_field: str = "messages",
    encoder: Encoder | None = None,
    cache: Path | None = None,
) -> bool:
    """Whether :func:`open_corpus` would find all of it in place, so that one process alone can open it at once. Local.

    Raises: InvalidUsage for paths that cannot be read.
    """
    looked = _look(paths, encoder or ByteEncoder(), Fields(text_field, messages_field), cache or cache_folder())
    return all(each["kind"] != "build" for each in looked)


def build_data(
    paths: Sequence[str | Path],
    out: Path,
    *,
    text_field: str = "text",
    messages_field: str = "messages",
    encoder: Encoder | None = None,
    comm: Communicator | None = None,
    on_progress: Progress | None = None,
) -> TokenStore:
    """Turns files into the store ``out``, which :func:`open_corpus` takes. Collective; arguments as there.

    Raises: InvalidUsage, also if ``out`` is there and not empty.
    """
    encoder, fields = encoder or ByteEncoder(), Fields(text_field, messages_field)

    def look() -> tuple[str, list[list[Any]]]:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InvalidUsage(f"{out} is there already; give another folder, or delete it")
        check_paths(paths)
        files = [file for path in paths for file in input_files(path)]
        return store_key(files, encoder, fields), _units(files)

    key, units = on_rank_0(comm, look)
    check = lambda: _check_unchanged(paths, key, encoder, fields)
    store = build_store(units_from(units), encoder, out, comm=comm, fields=fields, check=check, on_progress=on_progress)
    _refuse_empty(store, _names(paths))
    return store


def _check_unchanged(paths: Sequence[str | Path], key: str, encoder: Encoder, fields: Fields) -> None:
    if store_key([file for path in paths for file in input_files(path)], encoder, fields) != key:
        raise InvalidUsage(f"{_names(paths)}: changed while it was read; start again when it is complete")


def _names(paths: Sequence[str | Path]) -> str:
    return ", ".join(map(shown, paths))


def _look(paths: Sequence[str | Path], encoder: Encoder, fields: Fields, cache: Path) -> list[dict[str, Any]]:
    return [{"name": str(path), **_look_at(path, encoder, fields, cache)} for path in paths]


def _look_at(named: str | Path, encoder: Encoder, fields: Fields, cache: Path) -> dict[str, Any]:
    """Kind of data behind a path, ``text``, ``store`` or ``build``, and where it is."""
    path = local_path(named)
    if path is not None and is_store(path):
        store = open_store(path)
        if store.encoder != encoder.fingerprint:
            raise InvalidUsage(
                f"{path} holds tokens of {store.encoder_name}, and this run's are of {encoder.name}; build it again "
                "with this tokenizer (hdpcomm data build --tokenizer), or give the other one"
            )
        _refuse_empty(store, str(path))
        return {"kind": "store", "store": str(path)}
    if path is not None and (prefix := megatron_prefix(path)) is not None:
        if isinstance(encoder, ByteEncoder):
            raise InvalidUsage(f"{prefix}: tokens of Megatron-Core do not name their tokenizer; give it by --tokenizer")
        _refuse_empty(_megatron(prefix, encoder), prefix)
        return {"kind": "megatron", "store": prefix}
    files = input_files(named)
    if isinstance(encoder, ByteEncoder) and all(map(is_text, files)):
        return {"kind": "text", "files": [[str(file), file.stat().st_size] for file in files if isinstance(file, Path)]}
    kept = cache / store_key(files, encoder, fields)
    LOG.debug(f"{shown(named)}: its tokens are kept in {kept}")
    if kept.exists():
        try:
            open_store(kept)
            return {"kind": "store", "store": str(kept)}
        except InvalidUsage as error:
            LOG.warning(f"{error}; it is built again now")
    return {"kind": "build", "store": str(kept), "units": _units(files)}


def _open(
    found: dict[str, Any], encoder: Encoder, fields: Fields, comm: Communicator | None, on_progress: Progress | None
) -> Source:
    if found["kind"] == "text":
        pieces = [(number, 0, size) for number, (_, size) in enumerate(found["files"])]
        files = tuple(Path(name) for name, _ in found["files"])
        return TextPieces(files, np.array(pieces, dtype=np.int64).reshape(-1, 3))
    store: MegatronTokens | TokenStore | None
    final, store, error = Path(found["store"]), None, None
    if found["kind"] == "build":
        units = units_from(found["units"])
        check = lambda: _check_unchanged([found["name"]], final.name, encoder, fields)
        store = build_store(units, encoder, final, comm=comm, fields=fields, check=check, on_progress=on_progress)
    else:
        try:
            store = _megatron(str(final), encoder) if found["kind"] == "megatron" else open_published(final)
        except InvalidUsage as failure:  # rank 0 has opened it: this rank sees another file system
            error = failure
        raise_together(comm, error)
    assert store is not None
    _refuse_empty(store, shown(found["name"]))
    return store


def _megatron(prefix: str, encoder: Encoder) -> MegatronTokens:
    return open_megatron(prefix, encoder.fingerprint, encoder.name, encoder.vocabulary)


def _refuse_empty(store: MegatronTokens | TokenStore, name: str) -> None:
    if not store.lengths.any():
        raise InvalidUsage(
            f"{name}: no document with a token to train on (every line has an empty text, or conversations without an "
            "answer); give files with text in them"
        )


def _units(files: Sequence[File]) -> list[list[Any]]:
    with ThreadPoolExecutor(16) as pool:  # what Parquet files hold is asked of each, maybe far away
        return describe_units([unit for units in pool.map(units_of, files) for unit in units])
