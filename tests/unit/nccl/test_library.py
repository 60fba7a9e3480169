"""Finding the real NCCL: candidates, what is missing, versions; and the library itself where it is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import hdpcomm as hdp
from hdpcomm._core import transport
from hdpcomm.comm.device import nccl_library
from tests.harness.native import _testing


def compiled(tmp_path: Path, source: str) -> str:
    code, library = tmp_path / "fake.c", tmp_path / "libnccl.so.2"
    code.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(code)], check=True, timeout=60)
    return str(library)


FUNCTIONS = """GetUniqueId CommInitRankConfig CommDestroy CommAbort CommGetAsyncError GetErrorString GetLastError
GroupStart
GroupEnd Send Recv AllReduce AllGather ReduceScatter Broadcast"""


def source(version: int, functions: list[str]) -> str:
    lines = [f"int ncclGetVersion(int* v) {{ *v = {version}; return 0; }}"]
    return "\n".join([*lines, *(f"void* nccl{name}(void) {{ return 0; }}" for name in functions)])


def test_nothing_found() -> None:
    with pytest.raises(hdp.DeviceError, match=r"NCCL was not found.*pip install(.|\n)*/no/such/libnccl.so.2: "):
        transport.load_nccl(["/no/such/libnccl.so.2"])


def test_a_function_is_missing(tmp_path: Path) -> None:
    library = compiled(tmp_path, source(22809, [name for name in FUNCTIONS.split() if name != "CommAbort"]))
    with pytest.raises(hdp.DeviceError, match="has no function ncclCommAbort"):
        transport.load_nccl([library])


def test_too_old_and_new_enough(tmp_path: Path) -> None:
    library = compiled(tmp_path, source(21000, FUNCTIONS.split()))
    with pytest.raises(hdp.DeviceError, match=r"is NCCL 2\.10\.0; at least 2\.18\.4 is needed"):
        transport.load_nccl([library])
    folder = tmp_path / "new"
    folder.mkdir()
    found = transport.load_nccl(["/no/such/library.so", compiled(folder, source(22809, FUNCTIONS.split()))])
    assert (found.version, transport.nccl_version_text(found.version)) == (22809, "2.28.9")
    assert found.path.endswith("new/libnccl.so.2")


def test_the_environment_names_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HDPCOMM_NCCL", raising=False)
    assert nccl_library.library_candidates()[-1] == "libnccl.so.2"
    monkeypatch.setenv("HDPCOMM_NCCL", str(tmp_path / "mine.so"))
    assert nccl_library.library_candidates() == [str(tmp_path / "mine.so")]
    there, text = nccl_library.describe()
    assert not there
    assert "mine.so" in text


def test_the_real_library_without_a_driver() -> None:
    there, text = nccl_library.describe()
    if not there:
        pytest.skip(f"no NCCL here: {text}")
    library = nccl_library.load()
    assert library.version >= _testing.OLDEST_NCCL
    first, second = _testing.nccl_unique_id(library), _testing.nccl_unique_id(library)
    assert len(first) == 128
    assert first != second
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a driver here")
    with pytest.raises(hdp.DeviceError, match=r"failed on rank 0: .*NCCL 2\.\d+"):
        _testing.try_nccl(library, 20.0)
