"""What the system refuses or has run out of: each case works in another way, or ends in an error that says so."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm.costs import costs_path, load_costs
from hdpcomm.data.build import cache_folder
from hdpcomm.run.metrics_log import MetricsLog
from hdpcomm.testing import spawn
from tests.harness.fault_cases import LONG_S, still_works, until, wait_for

MEMFD_CREATE, PROCESS_VM_READV = 319, 310  # on x86-64
MANY_RANKS = int(os.environ.get("HDPCOMM_MANY_RANKS", "8"))
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter has system call numbers of x86-64")


class _Filter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.POINTER(_Filter)))


def deny(*calls: int) -> None:
    """These system calls fail with EPERM from now on, in this process for good."""
    load, equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    lines = [_Filter(load, 0, 0, 0)]
    for call in calls:
        lines += [_Filter(equal, 0, 1, call), _Filter(give, 0, 0, refuse)]
    lines.append(_Filter(give, 0, 0, allow))
    program = _Program(len(lines), (_Filter * len(lines))(*lines))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, by_filter, ctypes.byref(program), 0, 0) == 0


def sends_from_its_heap(comm: hdp.Communicator) -> None:
    for count in (5, 300_000):
        x = comm.empty(count).fill_(float(comm.rank))
        out = torch.empty(comm.size * count)
        comm.all_gather(out, x)
        assert out.view(comm.size, count).eq(torch.arange(comm.size)[:, None]).all()


def without_calls(*calls: int) -> str:
    deny(*calls)
    with hdp.init("shm", timeout=LONG_S) as comm:
        still_works(comm)
        sends_from_its_heap(comm)
        return comm.transport


@on_x86
@pytest.mark.parametrize("calls", [(MEMFD_CREATE,), (PROCESS_VM_READV,), (MEMFD_CREATE, PROCESS_VM_READV)])
def test_denied_system_calls(calls: tuple[int, ...], nothing_left_in_shm: None) -> None:
    del nothing_left_in_shm
    assert spawn(without_calls, 2, *calls, timeout=LONG_S) == ["shm", "shm"]


def in_little_address_space(limited: int) -> None:
    comm = hdp.init("shm", timeout=LONG_S)
    if comm.rank == limited:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (4 << 30)  # 4 GiB more than it has
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sends_from_its_heap(comm)
    still_works(comm)
    comm.close()


@pytest.mark.parametrize("limited", [0, 1])
def test_little_address_space(limited: int) -> None:
    """``ulimit -v``: the rank has no heap, and reads from the other's without mapping it."""
    spawn(in_little_address_space, 2, limited, timeout=LONG_S)


def add_up() -> float:
    with hdp.init("shm", timeout=LONG_S) as comm:
        x = torch.ones(3)
        comm.all_reduce(x)
        comm.barrier()
        return x[0].item()


def test_many_ranks() -> None:
    """``HDPCOMM_MANY_RANKS``: how many; 64 take 10 s on two idle cores."""
    assert spawn(add_up, MANY_RANKS, timeout=LONG_S) == [float(MANY_RANKS)] * MANY_RANKS


LAUNCHER = """
import time
from hdpcomm.testing import spawn
from tests.faults.test_resources import stays
if __name__ == "__main__":
    spawn(stays, 2, {folder!r})
"""


def stays(folder: str) -> None:
    with hdp.init("shm", timeout=LONG_S) as comm:
        comm.barrier()
        Path(folder, f"rank {comm.rank}").touch()
        time.sleep(LONG_S)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The address of a socket has 108 characters at most; pytest's folders are longer."""
    with tempfile.TemporaryDirectory(prefix="hdp") as folder:
        yield Path(folder)


def test_a_killed_launcher_leaves_nothing(tmp_path: Path, short_folder: Path) -> None:
    temporary, marks, script = short_folder, tmp_path / "marks", tmp_path / "launcher.py"
    marks.mkdir()
    script.write_text(LAUNCHER.format(folder=str(marks)))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": root}
    launcher = subprocess.Popen([sys.executable, str(script)], env=environment, cwd=root)
    try:
        limit = time.monotonic() + 90  # it imports torch first
        while len(list(marks.iterdir())) < 2:
            assert time.monotonic() < limit
            time.sleep(0.05)
        assert list(temporary.glob("pymp-*")), "Python keeps its sockets elsewhere: the test looks at nothing"
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    assert until(lambda: not list(temporary.glob("pymp-*")))


WITHOUT_SERVER = """
import multiprocessing.forkserver, os, signal, threading, time
from pathlib import Path
from hdpcomm.testing import spawn
from tests.faults.test_resources import stays_until_told

folder = Path({folder!r})

def end_server():
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.05)
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGTERM)
    (folder / "go").touch()

if __name__ == "__main__":
    threading.Thread(target=end_server, daemon=True).start()
    print(spawn(stays_until_told, 2, str(folder), timeout=60.0))
"""


def stays_until_told(folder: str) -> int:
    with hdp.init("shm", timeout=LONG_S) as comm:
        comm.barrier()
        Path(folder, f"rank {comm.rank}").touch()
        wait_for(Path(folder, "go"))
        return comm.rank


def test_a_launcher_without_its_fork_server_ends_in_good_order(tmp_path: Path, short_folder: Path) -> None:
    """A signal to a whole group ends the fork server first. The launcher takes its ranks for ended then, and removes
    its folder, which they have left to it."""
    marks, script = tmp_path / "marks", tmp_path / "launcher.py"
    marks.mkdir()
    script.write_text(WITHOUT_SERVER.format(folder=str(marks)))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "TMPDIR": str(short_folder), "PYTHONPATH": root}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1]\n", "")
    assert until(lambda: not list(short_folder.glob("pymp-*")))


def test_a_log_on_a_full_disk() -> None:
    with (
        MetricsLog(Path("/dev/full")) as log,
        pytest.raises(hdp.Error, match=r"/dev/full: cannot be written .*No space"),
    ):
        log.append({"step": 1})


def drops_its_work(folder: str, dropped_first: bool) -> list[str]:
    with hdp.init("shm", timeout=LONG_S) as comm, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if comm.rank == 1 and dropped_first:
            wait_for(Path(folder, "dropped"))
        work = comm.all_reduce(torch.zeros(3 + comm.rank), async_op=True)
        if not dropped_first:
            assert until(work.done)
        del work
        gc.collect()
        Path(folder, "dropped").touch()

        def texts() -> list[str]:
            """Other tests of these processes have dropped works, too."""
            _core.comm.free_ended()
            return [text for text in (str(each.message) for each in told) if "all_reduce" in text]

        assert until(lambda: bool(texts()))
        with pytest.raises(hdp.Aborted):
            comm.all_reduce(torch.zeros(3), async_op=True).wait()
        return texts()


@pytest.mark.parametrize("dropped_first", [False, True])
def test_a_dropped_work_does_not_swallow_its_error(ranks: Any, tmp_path: Path, dropped_first: bool) -> None:
    for told in ranks(2, drops_its_work, str(tmp_path), dropped_first):
        assert len(told) == 1, told
        assert told[0].startswith("an operation failed whose Work was dropped: rank ")
        assert "3 x float32" in told[0]
        assert "4 x float32" in told[0]


def test_a_program_that_ends_with_a_work_says_nothing() -> None:
    program = "import torch, hdpcomm\ncomm = hdpcomm.init()\nwork = comm.recv(torch.ones(3), 0, async_op=True)\n"
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_container_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No HOME and no such user: caches are in the user's folder of the temporary one, unless it is another user's."""

    def nobody(_: int) -> None:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME", "HDPCOMM_COSTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / f"hdpcomm-{os.geteuid()}"
    assert (costs_path(), cache_folder()) == (own / "costs.json", own / "data")
    assert own.stat().st_mode & 0o777 == 0o700
    assert load_costs("shm")
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(hdp.InvalidUsage, match="is another user's, and there is no home to write to; set XDG_CACHE_H"):
        costs_path()
