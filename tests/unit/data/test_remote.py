"""Data behind URLs: the tokens of the same files on a disk, on any number of ranks, whatever the network does."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import json
import lzma
import random
import socket
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hdpcomm as hdp
from hdpcomm.data import build_data, is_indexed, open_corpus
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.testing import run_threads

ADDED = ("i.jsonl.bz2", "j.ndjson.xz", "k.jsonl.zst")
FILES = ("b c.jsonl", "d#ü.parquet", "deep/e.ndjson", "f.txt", "g.jsonl.gz", "h.json.zst")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("hdpcomm.data.records._UNIT_BYTES", 3000)
    monkeypatch.setattr("hdpcomm.data.remote._TAIL_BYTES", 100)
    fsspec.filesystem("memory").store.clear()
    return tmp_path / "cache/hdpcomm/data"


def texts_of(name: str, count: int = 60) -> list[str]:
    drawn = random.Random(name)
    return [f"{name} {place} " + "é" * drawn.choice((0, 3, 40, 400)) for place in range(count)]


def lines_of(name: str, count: int = 60) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts_of(name, count)).encode()


def content_of(name: str) -> bytes:
    """A file of the kind that its name's ending says."""
    if name.endswith(".parquet"):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": range(60), "text": texts_of(name)}), sink, row_group_size=7)
        return sink.getvalue().to_pybytes()
    if name.endswith(".zst"):  # in two frames
        both = lines_of(name)
        return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (both[:900], both[900:]))
    packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
    return packed("\n".join(texts_of(name)).encode() if name.endswith(".txt") else lines_of(name))


def documents_of(name: str) -> list[bytes]:
    return ["\n".join(texts_of(name)).encode()] if name.endswith(".txt") else [text.encode() for text in texts_of(name)]


def fill(folder: Path) -> None:
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content_of(name))
    (folder / "empty.jsonl").touch()
    (folder / ".hidden.jsonl").write_bytes(b"no JSON")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")


def left_in(cache: Path) -> list[Path]:
    return list(cache.iterdir()) if cache.exists() else []


def read(corpus: Any) -> list[bytes]:
    return [bytes(corpus.read(sequence).tolist()) for sequence in range(len(corpus))]


def on_ranks(size: int, url: str, **options: Any) -> list[bytes]:
    """Documents as each of so many ranks reads them; all read the same."""

    def rank() -> list[bytes]:
        with hdp.init() as comm:
            return read(open_corpus([url], context=1 << 20, comm=comm, **options))

    first, *others = run_threads(rank, size)
    assert all(other == first for other in others)
    return first


class Handler(SimpleHTTPRequestHandler):
    """Files of a folder by HTTP, with ranges and ETags; counts the bytes that it sends, and fails where it shall."""

    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def send_head(self) -> Any:
        path = Path(self.translate_path(self.path))
        if path.is_dir() or not path.is_file():
            return super().send_head()
        data, wanted = path.read_bytes(), self.headers.get("Range", "") if self.server.ranges else ""
        begin, _, end = wanted.removeprefix("bytes=").partition("-")
        part = data[int(begin) : int(end) + 1] if wanted else data
        if status := self.server.refuses.get(path.name):
            self.send_error(status)
            if status >= 500:
                del self.server.refuses[path.name]
            return None
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hash(data)}"')
        self.send_header("Content-Length", str(len(part)))
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{int(begin) + len(part) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self.server.sent += len(part)
            if len(part) > 500 and self.server.breaks > 0:
                self.server.breaks -= 1
                self.server.refuses[path.name] = self.server.status
                self.wfile.write(part[: len(part) // 2])
                self.close_connection = True
                return None
            self.wfile.write(part)
        return None


class Server(ThreadingHTTPServer):
    ranges, breaks, status, sent = True, 0, 0, 0
    refuses: ClassVar[dict[str, int]] = {}
    daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "web").mkdir()
    fill(tmp_path / "web")
    server = Server(("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path / "web")))
    server.refuses = {}
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class Proxy:
    """A network between a client and a server: it can be cut after so many bytes of answers, and mended."""

    def __init__(self, port: int) -> None:
        self._target, self.left, self.refused = ("127.0.0.1", port), 1 << 60, 0
        self.mends_after = 1 << 60
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.left <= 0:
                    self.refused += 1
                    client.close()
                    if self.refused >= self.mends_after:
                        self.left = 1 << 60
                    continue
                server = socket.create_connection(self._target)
                for source, sink, answers in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass, args=(source, sink, answers), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 14)) and self.left > 0:
                if answers:
                    data, self.left = data[: self.left], self.left - len(data)
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
                each.close()

    def close(self) -> None:
        self._listener.close()


KEYS = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """An S3 server with a bucket ``data``, and the files below ``a folder/`` in it."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    fill(folder := tmp_path_factory.mktemp("bucket"))
    fs = s3fs.S3FileSystem(key="me", secret="secret", endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True)
    fs.mkdir("data")
    for name in ADDED:
        (folder / name).write_bytes(content_of(name))
    fs.put(str(folder) + "/", "data/a folder/", recursive=True)
    for name in ADDED:
        fs.mv(f"data/a folder/{name}", f"data/{name}")
    yield port
    server.stop()


@pytest.fixture
def bucket(moto: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The bucket behind a network."""
    import s3fs

    proxy = Proxy(moto)
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "AWS_MAX_ATTEMPTS": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    yield proxy
    proxy.close()
    s3fs.S3FileSystem.clear_instance_cache()


EXPECTED = [text for name in FILES for text in documents_of(name)]


@pytest.mark.usefixtures("bucket")
def test_folders_give_the_same_on_any_number_of_ranks(web: Server, tmp_path: Path, cache: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "web") + "/", "/data", recursive=True)
    for number, url in enumerate((web.url, "s3://data/a folder", "memory://data", f"file://{tmp_path}/web")):
        for size in (1, 2, 4):
            found = on_ranks(size, url, cache=cache / f"{number}{size}")
            assert sorted(found) == sorted(EXPECTED)
            if number != 3:  # where folders come behind the files beside them
                assert found == EXPECTED


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("name", [*FILES, *ADDED])
def test_a_file_gives_the_same_near_and_far(web: Server, tmp_path: Path, name: str) -> None:
    (tmp_path / "web" / name).write_bytes(content_of(name))
    escaped, folder = name.replace("#", "%23"), "" if name in ADDED else "a folder/"
    for url in (f"s3://data/{folder}{name}", f"{web.url}{escaped}?key=a/b=c", str(tmp_path / "web" / name)):
        assert read(open_corpus([url], context=1 << 20)) == documents_of(name), url


def test_compressed_files_of_a_folder_on_a_disk_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(content_of("a.jsonl.gz"))
    (tmp_path / "b.jsonl").write_bytes(content_of("b.jsonl"))
    assert read(open_corpus([tmp_path], context=1 << 20)) == documents_of("a.jsonl.gz") + documents_of("b.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst"])
def test_compressed_files_that_were_cut(tmp_path: Path, cache: Path, name: str) -> None:
    (tmp_path / name).write_bytes(content_of(name)[:-9])
    with pytest.raises(Error, match=rf"{name}: .*(check that the file is whole|cannot be read)"):
        open_corpus([tmp_path / name], context=9)
    assert not left_in(cache)


def test_a_rank_reads_no_more_than_its_units(web: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "web/long.jsonl").write_bytes(lines_of("long", 3000))
    size = (tmp_path / "web/long.jsonl").stat().st_size
    monkeypatch.setattr("hdpcomm.data.records._UNIT_BYTES", size // 8)
    assert on_ranks(4, f"{web.url}long.jsonl") == [text.encode() for text in texts_of("long", 3000)]
    assert size < web.sent < 1.1 * size


def test_a_server_without_ranges(web: Server) -> None:
    web.ranges = False
    assert on_ranks(2, web.url) == EXPECTED


@pytest.mark.parametrize("status", [0, 503])
def test_answers_that_break_off_are_asked_for_again(web: Server, tmp_path: Path, status: int) -> None:
    web.breaks, web.status = 4, status  # of the first range of each file, then a refusal
    for name in ("b c.jsonl", "g.jsonl.gz", "d#ü.parquet"):
        (tmp_path / "web" / name).rename(tmp_path / "web" / name.replace("#", ""))
        web.refuses[name] = 500
    assert on_ranks(2, web.url) == EXPECTED
    assert web.breaks == 0


@pytest.mark.parametrize("size", [1, 2])
def test_s3_that_goes_away_and_comes_back(bucket: Proxy, size: int) -> None:
    bucket.left, bucket.mends_after = 60_000, 8
    assert on_ranks(size, "s3://data/a folder/") == EXPECTED
    assert bucket.refused >= 8


@pytest.mark.parametrize("size", [1, 2])
def test_s3_that_stays_away(bucket: Proxy, cache: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("hdpcomm.data.remote.PATIENCE_S", 1.0)
    bucket.left = 60_000
    with pytest.raises(
        Error, match=r"s3://data/a folder/.*: no answer in 1 s \(.*\); nothing was kept; see that"
    ) as info:
        on_ranks(size, "s3://data/a folder/")
    assert "\n" not in str(info.value)
    assert not left_in(cache)
    bucket.left = 1 << 60
    assert on_ranks(size, "s3://data/a folder/") == EXPECTED


def test_a_range_that_never_comes_is_named(web: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdpcomm.data.remote.PATIENCE_S", 0.5)
    monkeypatch.setattr(web, "breaks", 10_000)
    with pytest.raises(Error, match=r"/b%20c.jsonl\?, bytes 0 to [0-9,]*: no answer in 0.5 s \(ClientPayloadError"):
        open_corpus([f"{web.url}b%20c.jsonl?signature=secret"], context=9)
    assert not left_in(cache)


def test_the_cache_follows_the_content_and_not_the_signature(web: Server, tmp_path: Path, cache: Path) -> None:
    first = f"{web.url}f.txt?signature=1"
    assert not is_indexed([first])
    open_corpus([first], context=9)
    assert is_indexed([f"{web.url}f.txt?signature=2"])
    (tmp_path / "web/f.txt").write_text("y" * (tmp_path / "web/f.txt").stat().st_size)
    assert not is_indexed([first])
    assert set(b"".join(read(open_corpus([first], context=9)))) == {ord("y")}
    assert len(list(cache.iterdir())) == 2


def test_files_that_change_while_they_are_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/data/a.jsonl", lines_of("a"))
    monkeypatch.setattr(
        "hdpcomm.data.build._publish", lambda *_: pytest.fail("what was read of two versions must not be kept")
    )
    changed = lambda *_: memory.pipe("/data/a.jsonl", lines_of("b"))
    with pytest.raises(InvalidUsage, match="memory://data: changed while it was read; start again"):
        open_corpus(["memory://data"], context=9, on_progress=changed)
    memory.pipe("/data/a.jsonl", lines_of("c"))
    cut = lambda *_: memory.pipe("/data/a.jsonl", lines_of("c")[:50])
    with pytest.raises(InvalidUsage, match="changed"):
        build_data(["memory://data/a.jsonl"], cache / "out", on_progress=cut)
    assert not left_in(cache)


def test_images_behind_a_url_are_inside_the_records() -> None:
    chat = [{"role": "user", "content": [{"type": "image", "path": "/etc/hostname"}]}]
    fsspec.filesystem("memory").pipe("/chat.jsonl", json.dumps({"messages": chat}).encode())
    with pytest.raises(
        InvalidUsage, match=r"chat.jsonl from byte 0 on: image /etc/hostname is no file, .*give the image"
    ):
        open_corpus(["memory://chat.jsonl"], context=9)


BAD = {
    "memory://nothing": "memory://nothing: FileNotFoundError: .*; nothing is there; check the URL",
    "memory://nothing/": "memory://nothing/: FileNotFoundError: .*; nothing is there; check the URL",
    "memory://empty.jsonl": "memory:///empty.jsonl: the file is empty",
    "memory://binary": "memory:///binary: this is a binary file",
    "memory://binaries": "memory://binaries: none of 2 files is text",
    "memory://set": "memory://set: a folder with dataset_info.json is read from a disk alone; copy it",
    "memory://no.jsonl": r"memory:///no.jsonl from byte 16 on: this line is not JSON",
    "memory://no.parquet": "memory:///no.parquet: no Parquet file, or a damaged one",
    "memory://cut.jsonl.gz": "memory:///cut.jsonl.gz: cannot be read .*",
    "nosuch://a/b": "nosuch://a/b: Protocol not known: nosuch; install fsspec's package for it",
    "{web}none": "/none: ClientResponseError: 404, .*; nothing is there; check the URL",
    "{web}refused?key=secret": r"/refused\?: ClientResponseError: 403, .*\?'; give the credentials",
    "{web}teapot": "/teapot: ClientResponseError: 418",
    "s3://no-such-bucket/a": "s3://no-such-bucket/a: FileNotFoundError: .*; nothing is there",
    "s3://data/a folde": "s3://data/a folde: FileNotFoundError: .*; nothing is there",
}


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("url", BAD)
def test_what_cannot_be_read(url: str, web: Server, cache: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name, content in {
        "empty.jsonl": b"", "binary": b"\0\1", "binaries/a": b"\0", "binaries/b": b"\1\0",
        "set/dataset_info.json": b"{}",
        "no.jsonl": b'{"text": "yes"}\nno\n', "no.parquet": b"PAR", "cut.jsonl.gz": gzip.compress(b"{}")[:-9],
    }.items():  # fmt: skip
        memory.pipe(f"/{name}", content)
    for name, status in {"refused": 403, "teapot": 418}.items():
        (tmp_path / "web" / name).touch()
        web.refuses[name] = status
    with pytest.raises(InvalidUsage, match=BAD[url]) as info:
        open_corpus([url.format(web=web.url)], context=9)
    assert "secret" not in str(info.value)
    assert "\n" not in str(info.value)
    assert not left_in(cache)


@pytest.mark.usefixtures("bucket")
def test_missing_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(InvalidUsage, match=r"NoCredentialsError: .*; give the credentials that its package reads"):
        open_corpus(["s3://data/a folder/"], context=9)


def test_a_url_that_became_a_path_is_told() -> None:
    with pytest.raises(InvalidUsage, match=r"s3:/data/x: no such file or folder; .*give a URL as text, not as a Path"):
        open_corpus([Path("s3://data/x")], context=9)
