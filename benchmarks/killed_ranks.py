"""A rank ends by SIGKILL at a random point of what it does: when the others are told, and what is left behind.

For ``faults.py --kills``. The phases: random traffic, joining, closing, ``hdpcomm train``, and the same with a
checkpoint at every step. Each point draws its victim, its moment and its traffic from its seed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import multiprocessing.util
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

import hdpcomm as hdp
from hdpcomm.cli.main import main as hdpcomm_command
from hdpcomm.run.checkpoints import CheckpointFolder, newest_checkpoint
from hdpcomm.testing import RankPool

__all__ = ["PHASES", "Outcome", "Point", "kill", "make_workplace"]

PHASES = ("traffic", "joining", "closing", "training", "saving")
RANKS, TRAINING_RANKS = 4, 3
HANG_S = 60.0
"""A run that takes so long hangs; far more than the launcher gives the ranks that have lost another one."""
GONE_S = 20.0
"""What has not gone so long after a run is left behind."""
COUNTS = (1, 2, 500, 4000, 60_000, 300_000)
MARK = "HDPCOMM_FAULTS_RUN"
PRELOAD = ("torch._dynamo", "hdpcomm.run", "hdpcomm.run.tensor_files", "killed_ranks")
MODEL = ["--layers", "3", "--hidden", "16", "--ffn", "16", "--context", "512", "--tokens-per-step", "2048"]


@dataclass(frozen=True, slots=True)
class Point:
    """Where to kill: ``transport`` is one of ``init()``, or ``fragments``: shm without copies between processes."""

    phase: str
    transport: str
    seed: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """``seconds``: from the death until the last of the others was told. ``faults``: what should not have been: ranks
    that were not told who died, that hung, or what was left."""

    seconds: float
    faults: tuple[str, ...]


# --- ranks


def operate(comm: hdp.Communicator, draw: random.Random, number: int) -> None:
    """The next operation of a program that all ranks draw alike, on some of them; its result tells who took part."""
    members = draw.sample(range(comm.size), draw.randint(1, comm.size))
    kind, count = draw.choice(("all_reduce", "all_gather", "exchange", "broadcast", "barrier")), draw.choice(COUNTS)
    group = comm.subset(members)
    if group is None:
        return
    values = [1000.0 * member + number % 1000 for member in members]
    x = torch.full((count,), values[group.rank])
    if kind == "all_reduce":
        group.all_reduce(x)
        right = torch.full((count,), sum(values))
    elif kind == "all_gather":
        gathered = torch.empty(group.size * count)
        group.all_gather(gathered, x)
        x, right = gathered, torch.tensor(values).repeat_interleave(count)
    elif kind == "exchange":
        received = torch.empty(count)
        group.exchange([(x, (group.rank + 1) % group.size)], [(received, (group.rank - 1) % group.size)])
        x, right = received, torch.full((count,), values[group.rank - 1])
    elif kind == "broadcast":
        group.broadcast(x, 0)
        right = torch.full((count,), values[0])
    else:
        group.barrier()
        right = x
    if not torch.equal(x, right):
        raise RuntimeError(f"wrong data from {kind} number {number} of ranks {members}")


def put(path: Path, value: object) -> None:
    """Writes a file that is there whole or not at all."""
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)


def rank_program(phase: str, transport: str, folder: str, seed: str) -> None:
    """Runs on all ranks, of which one is killed; each other one writes when it was told what."""
    rank, home = int(os.environ["RANK"]), Path(folder)
    own, common = random.Random(f"{seed} {rank}"), random.Random(seed)
    put(home / f"pid {rank}", os.getpid())
    message = ""
    try:
        if phase == "joining":
            time.sleep(own.random() * 0.05)
        comm = hdp.init(transport, timeout=HANG_S)
        if phase != "joining":
            comm.barrier()
            put(home / f"ready {rank}", rank)
        if phase == "closing":
            for number in range(common.randrange(5)):
                operate(comm, common, number)
            time.sleep(own.random() * 0.02)
            comm.close()
        else:
            for number in itertools.count():
                operate(comm, common, number)
    except hdp.Error as error:
        message = f"{type(error).__name__}: {error}"
    put(home / f"told {rank}", [time.monotonic(), message])
    if phase == "closing":  # the victim may not have ended before it is killed
        await_file(home / "killed")


def await_file(path: Path, end: float = float("inf")) -> None:
    """Until the file is there. Raises: TimeoutError after ``end`` (of ``time.monotonic()``)."""
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path.name} was not written")
        time.sleep(0.0005)


# --- the one that kills


def kill_when(home: Path, victim: int, gates: list[str], delay_s: float) -> float:
    """Kills a rank a while after files have appeared; the time of its death."""
    end = time.monotonic() + HANG_S
    for name in (f"pid {victim}", *gates):
        await_file(home / name, end)
    time.sleep(delay_s)
    os.kill(json.loads((home / f"pid {victim}").read_text()), signal.SIGKILL)
    died = time.monotonic()
    put(home / "killed", died)
    return died


def kill_in_program(point: Point, home: Path) -> Outcome:
    """Traffic, joining and closing: a program of our own."""
    draw = random.Random(point.seed)
    victim = draw.randrange(RANKS)
    gates = [] if point.phase == "joining" else [f"ready {rank}" for rank in range(RANKS)]
    delay_s = draw.random() * {"traffic": 0.3, "joining": 0.15, "closing": 0.04}[point.phase]
    faults = []
    with RankPool(RANKS, preload=PRELOAD) as pool, ThreadPoolExecutor(1) as executor:
        death = executor.submit(kill_when, home, victim, gates, delay_s)
        try:
            pool.run(rank_program, point.phase, init_name(point), str(home), point.seed, timeout=HANG_S)
            faults.append("the launcher noticed no death")
        except hdp.PeerLost as error:
            if not str(error).startswith(f"rank {victim} ended by signal SIGKILL in the middle of its run"):
                faults.append(f"the launcher said: {error}")
        except hdp.Error as error:
            faults.append(f"the launcher said: {error}")
        died = death.result()
    last = died
    for rank in set(range(RANKS)) - {victim}:
        file = home / f"told {rank}"
        if not file.exists():
            faults.append(f"rank {rank} hung")
            continue
        when, message = json.loads(file.read_text())
        last = max(last, when)
        finished = point.phase == "closing" and message == ""
        if not (finished or re.search(rf"\brank {victim}\b", message)):
            faults.append(f"rank {rank} was told: {message}")
    return Outcome(last - died, tuple(faults))


def kill_training(point: Point, home: Path) -> Outcome:
    """``hdpcomm train`` with any stage of ZeRO, with a checkpoint at every step or without; its launcher is this
    process."""
    draw = random.Random(point.seed)
    victim, steps = draw.randrange(TRAINING_RANKS), draw.randint(1, 6)
    out = home / "out"
    log = out / "metrics.jsonl"
    told: list[int] = []
    arguments = ["train", "--ranks", str(TRAINING_RANKS), "--steps", "1000000", *MODEL]
    arguments += ["--zero", draw.choice("0123"), "--out", str(out), "--trackers", "none"]
    if point.phase == "saving":
        arguments += ["--save-every", "1"]

    def kill_rank() -> float:
        end = time.monotonic() + HANG_S
        await_file(log, end)
        while steps_told(log) < steps:
            if time.monotonic() > end:
                raise TimeoutError("the run made no steps")
            time.sleep(0.002)
        time.sleep(draw.random() * 0.2)
        told.append(steps_told(log))
        ranks = next(each for child in psutil.Process().children() if len(each := child.children()) == TRAINING_RANKS)
        sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))[victim].kill()
        return time.monotonic()

    said, faults = io.StringIO(), []
    with ThreadPoolExecutor(1) as executor, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        death = executor.submit(kill_rank)
        code = hdpcomm_command(arguments)
        ended = time.monotonic()
        died = death.result()
    if code != 3 or f"rank {victim} ended by signal SIGKILL" not in said.getvalue():
        faults.append(f"hdpcomm train ended with {code} and said: {said.getvalue()}")
    if point.phase == "saving":
        faults += checkpoint_faults(out / "checkpoints", told[0] - 2)
    return Outcome(ended - died, tuple(faults))


def steps_told(log: Path) -> int:
    return log.read_text().count("\n")


def checkpoint_faults(folder: Path, expected: int) -> list[str]:
    """What is wrong with the checkpoints; those that are not whole go when the run is resumed.

    ``expected``: the step of the last one that must be whole. A step is told before its checkpoint begins, in the
    background, and a checkpoint begins when the one before is whole: with three steps told, that is the first one.
    """
    newest, damaged = newest_checkpoint(folder)
    if (0 if newest is None else newest.step) < expected:
        damaged.append(f"the newest checkpoint is {newest and newest.path.name}, not step-{expected} or a later one")
    CheckpointFolder(folder, keep=3)
    return damaged + [f"left: {path.name}" for path in folder.iterdir() if not path.name.startswith("step-")]


def init_name(point: Point) -> str:
    return "shm" if point.transport == "fragments" else point.transport


def kill(point: Point, work: Path) -> Outcome:
    """Runs one point; ``work``: what :func:`make_workplace` has returned."""
    home = work / "runs" / point.seed.replace(" ", "-")
    home.mkdir(parents=True)
    before = things_there(work)
    run: Callable[[Point, Path], Outcome] = kill_in_program if point.phase in PHASES[:3] else kill_training
    os.environ["HDPCOMM_TRANSPORT"] = init_name(point)
    os.environ["HDPCOMM_SHM_CMA"] = "0" if point.transport == "fragments" else "1"
    try:
        outcome = run(point, home)
    finally:
        del os.environ["HDPCOMM_TRANSPORT"], os.environ["HDPCOMM_SHM_CMA"]
    return Outcome(outcome.seconds, outcome.faults + tuple(f"left: {thing}" for thing in left(work, before)))


# --- what is left


def make_workplace() -> Path:
    """A folder for all points, with the temporary folder of all processes, once in the life of this one. What ranks
    print goes to a file there."""
    work = Path(tempfile.mkdtemp(prefix="hdpcomm-faults-"))
    # Behind the temporary folder of multiprocessing, which goes when this process ends.
    multiprocessing.util.Finalize(None, shutil.rmtree, (work, True), exitpriority=-200)
    for folder in ("tmp", "torch", "runs"):
        (work / folder).mkdir()
    os.environ |= {"TMPDIR": str(work / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(work / "torch"), MARK: str(work)}
    tempfile.tempdir = None  # read anew from TMPDIR
    sys.stderr.flush()
    own_stderr, printed = os.dup(2), os.open(work / "printed", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        os.dup2(printed, 2)
        with RankPool(1, preload=PRELOAD) as pool:  # starts the fork server, which stays
            pool.run(os.getpid)
    finally:
        os.dup2(own_stderr, 2)
        os.close(own_stderr)
        os.close(printed)
    return work


def things_there(work: Path) -> Counter[str]:
    """Shared memory, temporary files, processes, and what the launcher holds: descriptors and threads. Shared memory
    that a process of another program maps is that program's."""
    things = Counter(f"temporary {path.relative_to(work)}" for path in (work / "tmp").rglob("*"))
    mark = f"{MARK}={work}".encode()
    shared = {file.inode(): file.path for file in os.scandir("/dev/shm")}
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if process.pid != os.getpid() and mark not in environment_of(process.pid):
                for inode in shared.keys() & (mapped(process.pid) if shared else ()):
                    del shared[inode]
            elif process.pid != os.getpid():
                things[f"process {process.pid}"] += 1
                things.update(descriptors(process.pid))
    things.update(f"shared memory {path}" for path in shared.values())
    things.update(descriptors(os.getpid()))
    things.update(f"thread {thread.name}" for thread in threading.enumerate())
    return things


def environment_of(pid: int) -> list[bytes]:
    """What the environment of a process was when its program began."""
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def mapped(pid: int) -> set[int]:
    """The inodes in /dev/shm that a process has in its memory; a semaphore's has another name there."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if " /dev/shm/" in line}


def descriptors(pid: int) -> Iterator[str]:
    """Open descriptors of a process by kind: a socket, a pipe, a memfd, or the path of a file."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            yield f"descriptor of process {pid}: {re.sub(r':.*', '', os.readlink(path))}"


def left(work: Path, before: Counter[str]) -> list[str]:
    """What has come since and stays, once it has had the time to go. Others may use this machine meanwhile."""
    end = time.monotonic() + GONE_S
    more = things_there(work) - before
    while more and time.monotonic() < end:
        time.sleep(0.05)
        more &= things_there(work) - before
    return sorted(more)
