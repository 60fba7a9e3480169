"""Starts ranks on this host: processes that run a function; collects results and errors, ends those that hang."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hdpcomm.arguments import check_whole
from hdpcomm.comm.bootstrap import close_all
from hdpcomm.comm.secret import Secret, new_secret
from hdpcomm.comm.torch_store import DIED_KEY, SignedStore, TorchStorePort, open_file_store
from hdpcomm.errors import Aborted, CommTimeout, Error, InvalidUsage, PeerLost
from hdpcomm.log import shown, shown_level

__all__ = ["RankPool", "run_ranks"]

_PF_EXITING = 0x4  # Linux, include/linux/sched.h
_STORE_S = 10.0  # for a note in the store
_GRACE_S = 5.0  # for the other ranks to notice that one failed, before they are ended
_AWAKE_S = 0.5  # a signal may reach another thread, and this one runs its handler when it wakes up


class _RemoteTraceback(Exception):
    """Carries a rank's traceback as the cause of the error raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Runs ``fn(*args)`` on ``world_size`` new processes of this host; returns their results by rank.

    ``fn`` is importable (a function of a module); inside, ``hdpcomm.init()`` joins the world. ``timeout``: seconds for
    the whole run (``None``: no limit); past it every rank's stacks go to stderr and the ranks are ended. If a rank
    raises, the others get 5 s to notice; then the first error that is not a mere consequence is raised here.
    ``preload``: modules to import once for all ranks (the first call of a process decides).

    Raises: what a rank raised; PeerLost when one died; CommTimeout past the timeout.
    """
    with RankPool(world_size, preload=preload) as pool:
        return pool.run(fn, *args, timeout=timeout)


class RankPool:
    """Ranks that stay for several runs: starting a process costs far more than a short function."""

    def __init__(self, world_size: int, *, preload: Sequence[str] = ()) -> None:
        check_whole("ranks", "world_size", world_size, least=1, most=4096)
        self.world_size = world_size
        # A job inside of a job is another one: it inherits no secret of its launcher's.
        secret = new_secret()
        self._file = os.memfd_create("hdpcomm-store")
        self._store_path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._store = SignedStore(open_file_store(self._store_path, -1), Secret(secret), -1, seconds=_STORE_S)
        self._died: dict[int, str] = {}
        self._ports: list[TorchStorePort] = []
        self._processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        # A server with torch imported forks a rank in milliseconds; it has no threads, so the fork is safe.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["hdpcomm.comm.launch", *preload])
        folder = multiprocessing.util.get_temp_dir()
        try:
            self._ports.append(TorchStorePort())
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                environment = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "HDPCOMM_SECRET": secret,
                    "HDPCOMM_SECRET_FILE": "",
                } | self._places()
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, dict(os.environ) | environment, folder),
                    name=f"hdpcomm-rank-{rank}",
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        except BaseException:
            self.close()
            raise

    def _places(self) -> dict[str, str]:
        """Where the ranks find the stores of their job."""
        port = self._ports[-1].port
        return {"MASTER_PORT": str(port), "HDPCOMM_STORE": f"{port}:{self._store_path}"}

    @property
    def healthy(self) -> bool:
        """Whether all ranks still run and none was ended by a failure."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def signal(self, number: int) -> None:
        """Sends a signal to every rank that still runs. Safe in a signal handler."""
        for process in self._processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, survivors: bool = False
    ) -> list[Any]:
        """As :func:`run_ranks`, on the ranks of this pool. It is closed after any error that is not ``fn``'s own.

        ``survivors``: a rank that dies is no error while others live; the results are those of the others, by rank.
        Raises: InvalidUsage when it is closed; PeerLost, before any rank starts, when one has died since the last run.
        """
        if not self._pipes:
            raise InvalidUsage("this RankPool is closed (by close(), or an error that ended its ranks); make a new one")
        # The groups of torch.distributed have the same keys in each run: a rank would find addresses of the run before.
        # Groups that are still open may need their store.
        if self._ports[-1].used:
            self._ports.append(TorchStorePort())
        message = pickle.dumps((self._places(), shown_level(), fn, args))
        results: dict[int, Any] = {}
        errors: dict[int, tuple[BaseException, str]] = {}
        deaths: dict[int, tuple[BaseException, str]] = {} if survivors else errors
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            self._send(message)
            self._collect(results, errors, deaths, deadline, timeout)
        except BaseException:
            self.close()
            raise
        if not self.healthy or (errors and len(results) + len(errors) < self.world_size):
            self.close()
        if errors or not results:
            _raise_first(errors or deaths)
        return [results[rank] for rank in sorted(results)]

    def _send(self, message: bytes) -> None:
        for rank, process in enumerate(self._processes):
            if not process.is_alive():
                raise PeerLost(f"rank {rank} ended {self._end_of(rank)} between two runs of its pool", peer=rank)
        for pipe in self._pipes:
            # A rank that has died meanwhile shows when its pipe is read; the others have the job and will answer.
            with contextlib.suppress(OSError):
                pipe.send_bytes(message)

    def _collect(
        self,
        results: dict[int, Any],
        errors: dict[int, tuple[BaseException, str]],
        deaths: dict[int, tuple[BaseException, str]],
        deadline: float | None,
        timeout: float | None,
    ) -> None:
        waiting = dict(enumerate(self._pipes))
        while waiting:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                if errors:
                    return
                self._dump_stacks(list(waiting))
                raise CommTimeout(
                    f"ranks {sorted(waiting)} did not end within {timeout} s; their stacks are on stderr",
                    ranks=sorted(waiting),
                )
            slept = _AWAKE_S if left is None else min(left, _AWAKE_S)
            ready = multiprocessing.connection.wait(list(waiting.values()), slept)
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                self._receive(rank, waiting.pop(rank), results, errors, deaths)
            if errors:  # the rest has the grace time
                limit = time.monotonic() + _GRACE_S
                deadline = limit if deadline is None else min(deadline, limit)
                if timeout is None:
                    timeout = _GRACE_S

    def _receive(
        self,
        rank: int,
        pipe: multiprocessing.connection.Connection,
        results: dict[int, Any],
        errors: dict[int, tuple[BaseException, str]],
        deaths: dict[int, tuple[BaseException, str]],
    ) -> None:
        try:
            answer = pipe.recv_bytes()
        except (EOFError, OSError):
            end = self._end_of(rank)
            self._died[rank] = f"ended {end}"
            self._store.set(DIED_KEY, json.dumps(self._died))
            killed = " (which the system sends where memory is short, too)" if end.endswith("SIGKILL") else ""
            text = f"rank {rank} ended {end} in the middle of its run{killed}"
            deaths[rank] = (PeerLost(text, peer=rank), "")
            return
        try:
            ok, payload, trace = pickle.loads(answer)
        except Exception as error:
            text = f"what rank {rank} returned cannot be unpickled here ({type(error).__name__}: {error})"
            errors[rank] = (InvalidUsage(f"{text}; return objects of importable classes"), traceback.format_exc())
            return
        if ok:
            results[rank] = payload
        else:
            errors[rank] = (payload, trace)

    def _end_of(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(2)
        code = process.exitcode
        return f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"

    def _dump_stacks(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            print(f"--- stacks of rank {rank}", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.2)

    def close(self) -> None:
        """Ends the ranks: those that wait for work at once, others by SIGTERM and then SIGKILL. Idempotent."""
        for pipe in self._pipes:
            pipe.close()
        for stop in ("join", "terminate", "kill"):
            limit = time.monotonic() + 2
            for process in self._processes:
                if stop != "join":
                    getattr(process, stop)()
                process.join(max(0.0, limit - time.monotonic()))
            if not any(process.is_alive() for process in self._processes):
                break
        self._processes = []
        self._pipes = []
        for port in self._ports:
            port.close()
        self._store.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raise_first(errors: dict[int, tuple[BaseException, str]]) -> None:
    """Raises the cause rather than a consequence: a death, then an error of the function, then what others noticed."""

    def order(item: tuple[int, tuple[BaseException, str]]) -> tuple[bool, bool, int]:
        rank, (error, trace) = item
        return trace != "", isinstance(error, (PeerLost, Aborted)), rank

    rank, (error, trace) = min(errors.items(), key=order)
    if trace:
        raise error from _RemoteTraceback(f"rank {rank}:\n{trace}")
    raise error


def _rank_main(pipe: multiprocessing.connection.Connection, environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True).start()
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            places, level, fn, args = pickle.loads(job)
            os.environ.update(places)
            with shown(level):
                answer = _pickled(fn(*args))
            close_all("")
        except BaseException as error:
            close_all(f"{type(error).__name__}: {error}")
            answer = pickle.dumps((False, _picklable(error), traceback.format_exc()))
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(answer)
        del answer


def _end_with_parent(parent: Any, folder: str) -> None:
    """Ends this rank when its launcher has ended; a killed one has left the fork server's socket in its folder. Where
    a signal has ended the fork server only, the launcher removes its folder itself."""
    multiprocessing.connection.wait([parent.sentinel])
    with contextlib.suppress(OSError):  # a process that is not there, or a folder
        state, *_, flags = Path(f"/proc/{parent.pid}/stat").read_text().rpartition(")")[2].split()[:7]
        # One that ends closes its files some time before it is a zombie.
        if state not in "ZX" and not int(flags) & _PF_EXITING:
            os._exit(1)
    with contextlib.suppress(OSError):
        for socket in Path(folder).glob("listener-*"):
            socket.unlink(missing_ok=True)
        Path(folder).rmdir()
    os._exit(1)


def _pickled(result: Any) -> bytes:
    """The answer of a function that has ended."""
    try:
        return pickle.dumps((True, result, ""))
    except Exception as error:
        raise InvalidUsage(
            f"the function returned a {type(result).__name__} that cannot be pickled ({type(error).__name__}: "
            f"{error}); return what pickle takes"
        ) from error


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return Error(f"{type(error).__name__}: {error}")
    return error
