"""The Python programs that a process starts, torchrun's ranks above all, forked from one that has imported torch.

A rank that torchrun starts is a new interpreter, and takes 4 s of processor time until it has imported what it needs.
Here it is forked from a copy of the process that will start it, which was made before that one had any thread. It is a
child of the process that started it as any other is: that one waits for it, and sends it signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["fork_python_programs"]

_Main = Callable[[list[str], dict[str, str]], object]
_PR_SET_CHILD_SUBREAPER = 36
_SIZE = struct.Struct("=q")
_START_S = 30.0


def fork_python_programs(main: _Main) -> None:
    """From here on, ``subprocess.Popen([sys.executable, ...])`` of this process forks in place of a new interpreter.

    Call it while this process has one thread. main runs the program in the child, with its arguments and environment.
    """
    ours, theirs = socket.socketpair()
    creator = os.getpid()
    if os.fork() == 0:
        ours.close()
        try:
            _serve(theirs, creator, main)
        finally:
            os._exit(0)
    theirs.close()
    subprocess.Popen._execute_child = _executed_by(ours)  # type: ignore[attr-defined]


def _executed_by(server: socket.socket) -> Callable[..., None]:
    """In place of ``Popen._execute_child``."""
    new_interpreter = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    reaper = ctypes.CDLL(None).prctl

    def execute_child(process: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        pass_fds, cwd, env, _, _, shell, stdin, to_stdin, from_stdout, stdout, from_stderr, stderr, *last = rest
        others = (preexec_fn, pass_fds, shell, *last[1:5])  # user, groups and umask
        if isinstance(args, str) or args[0] != sys.executable or not close_fds or any(x not in _NONE for x in others):
            new_interpreter(process, args, executable, preexec_fn, close_fds, *rest)
            return
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        given = pickle.dumps((list(args[1:]), environment, str(cwd or os.getcwd()), last[5]))
        files = [fd if fd >= 0 else number for number, fd in enumerate((stdin, stdout, stderr))]
        reaper(_PR_SET_CHILD_SUBREAPER, 1)  # the child loses its parent, and gets this process
        try:
            socket.send_fds(server, [_SIZE.pack(len(given))], files)
            server.sendall(given)
            process.pid = _SIZE.unpack(_read(server, _SIZE.size))[0]
        finally:
            reaper(_PR_SET_CHILD_SUBREAPER, 0)
        process._child_created = True
        for theirs, ours in ((stdin, to_stdin), (stdout, from_stdout), (stderr, from_stderr)):
            if theirs >= 0 and ours >= 0:
                os.close(theirs)
        process._closed_child_pipe_fds = True

    return execute_child


_NONE: tuple[object, ...] = (None, False, (), [], -1)


def _read(source: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        if not (piece := source.recv(count - len(read))):
            raise EOFError
        read += piece
    return read


def _serve(requests: socket.socket, creator: int, main: _Main) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # those of a terminal or a group are for the others
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        while True:
            size, files, _, _ = socket.recv_fds(requests, _SIZE.size, 3)
            if not size:
                return
            arguments, environment, cwd, new_session = pickle.loads(_read(requests, _SIZE.unpack(size)[0]))
            reads, writes = os.pipe()
            between = os.fork()
            if between == 0:
                if child := os.fork():
                    os.write(writes, _SIZE.pack(child))
                    os._exit(0)
                for fd in (reads, writes, requests.detach()):
                    os.close(fd)
                _become(files, cwd, new_session, creator)
                main(arguments, environment)
                os._exit(0)
            os.waitpid(between, 0)
            requests.sendall(os.read(reads, _SIZE.size))
            for fd in (reads, writes, *files):
                os.close(fd)


def _become(files: list[int], cwd: str, new_session: bool, parent: int) -> None:
    """The process that was asked for, before its program runs."""
    limit = time.monotonic() + _START_S
    while os.getppid() != parent:
        if time.monotonic() > limit:
            os._exit(1)
        time.sleep(0.001)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if new_session:
        os.setsid()
    for number, fd in enumerate(files):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(cwd)
