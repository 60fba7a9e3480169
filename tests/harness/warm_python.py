"""Python processes that have imported torch: forked from the tests' fork server, in place of ``subprocess``.

``python -m hdpcomm train`` takes 7 s of processor time for its first steps, and all but 1 s of it goes into imports:
torch in the command and again in the fork server of its ranks. A process that starts here has them from the fork server
of the tests. All else is as with ``subprocess``: a process of its own with its arguments, environment, outputs, signals
and exit code, and its ranks are children of a fork server of its own. The Python programs that it starts, torchrun's
ranks above all, are its children and have imported torch, too. Tests of how a process starts, or of what it imports,
start a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from tests.harness.warm_children import fork_python_programs

__all__ = ["PRELOAD", "Python", "run_child", "run_python"]

# Imported once for all ranks, where a training rank would import it for itself: torch._dynamo when AdamW is made, and
# what a model of transformers needs; not transformers.trainer, which starts a thread that no fork would have.
PRELOAD = (
    "torch._dynamo",
    "hdpcomm.run",
    "hdpcomm.run.tensor_files",
    "transformers.modeling_utils",
    "tests.harness.frozen",
)


class Python:
    """A process that does what ``python *arguments`` does; captures its outputs. The methods are those of Popen.

    arguments: ``-m module ...``, ``-c code ...`` or ``script ...``. merged: stderr goes where stdout goes.
    namespaces_of: the process whose network, files, processes and names it shall see, as with ``nsenter``.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        merged: bool = False,
        namespaces_of: int | None = None,
    ) -> None:
        self.args = list(arguments)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["hdpcomm.comm.launch", *PRELOAD])
        self.stdout, out = _pipe()
        self.stderr, err = (self.stdout, out) if merged else _pipe()
        environment = dict(os.environ if env is None else env)
        place = str(cwd or Path.cwd())
        given = (self.args, environment, place, out, err, namespaces_of)
        # One that a failed test leaves is ended with the tests.
        self._process = context.Process(target=_main, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        for ours in {out, err}:
            ours.close()

    @property
    def returncode(self) -> int | None:
        """None while it runs, -n after signal n."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        self._process.join(max(0.0, timeout))
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What is left of stdout and stderr, when it has ended."""
        limit = time.monotonic() + timeout
        texts: dict[TextIO, str] = {}

        def read(file: TextIO) -> None:
            texts[file] = file.read()

        readers = [threading.Thread(target=read, args=(file,), daemon=True) for file in {self.stdout, self.stderr}]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(0.0, limit - time.monotonic()))
        if any(reader.is_alive() for reader in readers):
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(limit - time.monotonic())
        return texts[self.stdout], "" if self.stderr is self.stdout else texts[self.stderr]

    def __enter__(self) -> Python:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait(60.0)
        for file in {self.stdout, self.stderr}:
            file.close()


def run_python(
    arguments: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)``."""
    with Python(arguments, env=env, cwd=cwd) as process:
        out, err = process.communicate(timeout)
    code = process.returncode
    assert code is not None
    done = subprocess.CompletedProcess(process.args, code, out, err)
    if check:
        done.check_returncode()
    return done


def _pipe() -> tuple[TextIO, Connection]:
    reads, writes = os.pipe()
    return open(reads), Connection(writes, readable=False)


def _main(
    arguments: list[str],
    environment: dict[str, str],
    cwd: str,
    out: Connection,
    err: Connection,
    namespaces_of: int | None,
) -> None:
    if namespaces_of is not None:
        _enter(namespaces_of)
    os.chdir(cwd)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    _leave_the_fork_server()
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        fork_python_programs(run_child)
    _run(arguments, environment)


def _run(arguments: list[str], environment: dict[str, str]) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # was read when torch was imported
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        _execute(arguments)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # multiprocessing ends its processes without


def run_child(arguments: list[str], environment: dict[str, str]) -> None:
    """A whole process, to its end."""
    if arguments[0] == "-u":
        del arguments[0]
        sys.stdout.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    code = 0
    try:
        _run(arguments, environment)
        threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = int(error.code is not None) if not isinstance(error.code, int) else error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _enter(process: int) -> None:
    """Goes on in its namespaces, in a child: a process stays in the namespace of processes that it was born in."""
    libc = ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY) for name in ("net", "uts", "ipc", "pid", "mnt")]
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)


def _leave_the_fork_server() -> None:
    """Ranks of this process come from a fork server of its own, which is forked from it, too."""
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = server._forkserver_address = server._forkserver_pid = None
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config.pop("tempdir", None)  # the tests' own: ranks clear up behind a launcher that was killed
    config.pop("daemon", None)  # it may start processes
    multiprocessing.util.spawnv_passfds = _fork_instead  # type: ignore[attr-defined]


def _fork_instead(path: bytes, arguments: list[str], fds: Sequence[int]) -> int:
    """In place of a new interpreter that runs ``-c`` the last argument, with these files open."""
    del path
    if pid := os.fork():
        return pid
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in fds:
            with contextlib.suppress(OSError):  # the one of this list
                os.close(fd)
    try:
        with contextlib.suppress(SystemExit):  # when the last process that may ask it has ended
            exec(arguments[-1], {})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _execute(arguments: list[str]) -> None:
    kind, *rest = arguments
    sys.path.insert(0, str(Path.cwd() if kind in ("-m", "-c") else Path(kind).parent))
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")
