"""A job that is never left alone: random checked traffic for a long time, while its ranks die and stop.

    sudo python benchmarks/soak.py [--minutes 60] [--seed 0] [--json FILE]

Ranks are processes on four hosts (network namespaces of this machine, joined by a bridge). They draw operations on
random subsets alike and check each result (``killed_ranks.operate``); the first one saves checkpoints on a small disk
and reads each of them again. Meanwhile ranks are killed, stopped for up to two seconds, links get slow, and the disk
gets full. Those who live go on by ``shrink()``; few of them end in order, and a new job begins. Counts what was done,
what was wrong, ranks that hung or ended by an error, and what is left: memory, descriptors and threads of a rank over
the time, processes and files at the end. Exit code 4: something was wrong, hung or left. Needs root, ip, tc, mount and
1 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
HOSTS, RANKS, LEAST = 4, 8, 3
TIMEOUT_S, HANG_S = 30.0, 120.0
MISSED = 4
SLOW_MBIT = 100
EVENTS = {
    "kill": 5, "stop": 3, "slow link": 2, "fast link": 2, "full disk": 1, "room on the disk": 2,
}  # fmt: skip
DISK, DISK_BYTES, SAVED_BYTES, SAVES_EVERY = "disk", 8 << 20, 1 << 20, 200


# --- ranks


class Rank:
    """One process of the job, until it is told to end."""

    def __init__(self, name: str, folder: Path, seed: str) -> None:
        self.name, self.folder, self.seed = name, folder, seed
        self.epoch, self.operations, self.shrunk = 0, 0, 0
        self.saved, self.not_saved, self.step = 0, 0, 0
        self.disk: Any = None
        self.told_s = 0.0

    def tell(self, size: int, *, end: str = "") -> None:
        """What the others look at, once a second."""
        if not end and time.monotonic() - self.told_s < 1:
            return
        self.told_s = time.monotonic()
        me = psutil.Process()
        row = {
            "name": self.name,
            "time": time.time(),
            "operations": self.operations,
            "size": size,
            "shrunk": self.shrunk,
            "saved": self.saved,
            "not_saved": self.not_saved,
            "memory": me.memory_info().rss - me.memory_info().shared,
            "descriptors": me.num_fds(),
            "threads": me.num_threads(),
            "end": end,
        }
        with (self.folder / f"{self.name}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def run(self, comm: Any) -> None:
        import torch

        import hdpcomm as hdp

        while True:
            try:
                shared = torch.tensor([self.epoch])
                comm.all_reduce(shared, "max")
                self.epoch = int(shared) + 1
                self.work(comm)
                comm.close()
                return
            except (hdp.PeerLost, hdp.Aborted, hdp.CommTimeout):
                comm = comm.shrink()
                self.shrunk += 1

    def work(self, comm: Any) -> None:
        """Operates until the end has come."""
        import torch
        from killed_ranks import operate

        for number in range(1 << 30):
            draw = random.Random(f"{self.seed} {self.epoch} {number}")
            operate(comm, draw, number)
            self.operations += 1
            self.tell(comm.size)
            if comm.rank == 0 and number % SAVES_EVERY == SAVES_EVERY - 1:
                self.save()
            if number % 40:
                continue
            over = torch.tensor([int(comm.rank == 0 and (self.folder / "stop").exists())])
            comm.broadcast(over, 0)
            if int(over):
                return

    def save(self) -> None:
        """Looks at the newest checkpoint, and begins to write the next one; the disk may be full."""
        import torch

        import hdpcomm as hdp
        from hdpcomm.run.checkpoints import CheckpointFolder

        if self.disk is None:
            self.disk = CheckpointFolder(self.folder / DISK, keep=2)
        try:
            self.disk.wait()
            self.saved += self.step > 0
        except hdp.Error as error:
            if "No space left" not in str(error):
                raise RuntimeError(f"not saved, and not for want of room: {error}") from error
            self.not_saved += 1
        found, wrong = self.disk.newest()
        if wrong:
            raise RuntimeError(f"checkpoints that are not sound: {wrong}")
        if found is not None:
            state = {"x": torch.zeros(SAVED_BYTES // 8, dtype=torch.int64)}
            found.load_into(state)
            if not bool((state["x"] == found.step).all()):
                raise RuntimeError(f"wrong data in the checkpoint of step {found.step}")
        self.step = max(self.step, 0 if found is None else found.step) + 1
        self.disk.save(self.step, {"x": torch.full((SAVED_BYTES // 8,), self.step)}, {}, copy=False)


def rank_main(name: str, folder: Path, seed: str) -> int:
    import torch

    import hdpcomm as hdp

    torch.set_num_threads(1)
    rank = Rank(name, folder, seed)
    rank.tell(0, end="starts")
    try:
        rank.run(hdp.init(timeout=TIMEOUT_S))
    except hdp.Error as error:
        rank.tell(0, end=f"failed: {error!r}")
        return 0
    except BaseException as error:
        rank.tell(0, end=f"wrong: {error!r}")
        raise
    rank.tell(0, end="over")
    return 0


# --- the one that disturbs


class Job:
    """The processes of the job, as seen from outside."""

    def __init__(self, hosts: Any, folder: Path, seed: str) -> None:
        self.hosts, self.folder, self.seed = hosts, folder, seed
        self.draw = random.Random(seed)
        self.count = 0
        self.slow: set[int] = set()
        self.killed: set[str] = set()

    def start(self) -> None:
        """Starts as many ranks as a job has at first."""
        (self.folder / "stop").unlink(missing_ok=True)
        port = str(29400 + self.count)
        for rank in range(RANKS):
            self.count += 1
            name = f"r{self.count}"
            command = [sys.executable, __file__, "--rank", name, "--folder", str(self.folder), "--seed", self.seed]
            place = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": self.hosts.address(0)}
            # Without a reader a pipe would fill; what a rank says goes to a file.
            log = str(self.folder / f"{name}.log")
            place["MASTER_PORT"] = port
            self.hosts.start(rank % HOSTS, ["sh", "-c", '"$@" >> "$0" 2>&1', log, *command], place)

    def end(self) -> list[str]:
        """Lets the job end; names of ranks that hung."""
        (self.folder / "stop").touch()
        limit = time.monotonic() + HANG_S
        while self.processes() and time.monotonic() < limit:
            time.sleep(0.2)
        return sorted(self.processes())

    def processes(self) -> dict[str, psutil.Process]:
        """Those that live, by name."""
        found = {}
        for each in psutil.process_iter(["cmdline"]):
            line = each.info["cmdline"] or []
            if str(self.folder) in line and "--rank" in line and line[0] == sys.executable:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if each.status() != psutil.STATUS_ZOMBIE:
                        found[line[line.index("--rank") + 1]] = each
        return found

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def working(self) -> dict[str, psutil.Process]:
        """Those that have operated."""
        return {name: p for name, p in self.processes().items() if (rows := self.rows(name)) and rows[-1]["operations"]}

    def kill(self, names: dict[str, psutil.Process]) -> None:
        name = self.draw.choice(sorted(names))
        self.killed.add(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            names[name].kill()

    def disturb(self) -> str:
        living = self.working()
        kind = self.draw.choice([kind for kind, weight in EVENTS.items() for _ in range(weight)])
        if kind == "kill" and len(living) > 2:
            self.kill(living)
        if kind == "stop":
            for each in self.draw.sample(sorted(living), min(len(living), self.draw.randint(1, 2))):
                with contextlib.suppress(psutil.NoSuchProcess):
                    living[each].suspend()
                    time.sleep(2 * self.draw.random())
                    living[each].resume()
        if kind == "slow link":
            host = self.draw.randrange(HOSTS)
            if host not in self.slow:
                self.slow.add(host)
                self.hosts.limit_host(host, SLOW_MBIT)
        if kind == "fast link" and self.slow:
            host = self.slow.pop()
            self.hosts.limit_host(host, None)
        if kind == "full disk":
            with contextlib.suppress(OSError), self.filler.open("ab", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
        if kind == "room on the disk":
            self.filler.unlink(missing_ok=True)
        return kind

    @property
    def filler(self) -> Path:
        return self.folder / DISK / "filler"


def by_fifths(every: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """What a rank holds: the median of all that work, in each fifth of the time. New ranks are left out for a while."""
    rows = [row for own in every.values() for row in [row for row in own if row["operations"]][20:]]
    if not rows:
        return {}
    begin, end = min(row["time"] for row in rows), max(row["time"] for row in rows)
    fifths: list[list[dict[str, Any]]] = [[] for _ in range(5)]
    for row in rows:
        fifths[min(4, int(5 * (row["time"] - begin) / max(1e-9, end - begin)))].append(row)
    kinds = ("memory", "descriptors", "threads", "size")
    return {what: [statistics.median(row[what] for row in fifth) for fifth in fifths if fifth] for what in kinds}


def soak(minutes: float, seed: str) -> dict[str, Any]:
    from hdpcomm.run.checkpoints import CheckpointFolder
    from tests.harness.hosts import Hosts

    events: Counter[str] = Counter()
    faults: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hdpcomm-soak-")))
        stack.enter_context(small_disk(folder / DISK))
        hosts = stack.enter_context(Hosts(HOSTS))
        job = Job(hosts, folder, seed)
        job.start()
        end, moved, before = time.monotonic() + 60 * minutes, time.monotonic(), -1
        while time.monotonic() < end and not faults:
            time.sleep(3 + 6 * job.draw.random())
            done = sum(row["operations"] for name in job.working() for row in job.rows(name)[-1:])
            if done != before:
                before, moved = done, time.monotonic()
            elif time.monotonic() - moved > HANG_S:
                faults.append(f"nothing was done for {HANG_S:g} s")
            events[job.disturb()] += 1
            names = [f"r{i + 1}" for i in range(job.count)]
            faults += [
                f"{n}: {row['end']}" for n in names for row in job.rows(n)[-1:] if row["end"].startswith(("f", "w"))
            ]
            if len(job.processes()) <= LEAST and not faults:
                faults += [f"{name} hung" for name in job.end()]
                events["new job"] += 1
                job.start()
        left = job.end()
        faults += [f"{name} hung" for name in left]
        every = {f"r{i + 1}": job.rows(f"r{i + 1}") for i in range(job.count)}
        for name, rows in every.items():
            last = rows[-1]["end"] if rows else "never started"
            if name not in job.killed and name not in left and last != "over":
                faults.append(f"{name} ended: {last or 'in the middle of its work'}: {log_of(folder, name)}")
        job.filler.unlink(missing_ok=True)
        faults += CheckpointFolder(folder / DISK, keep=2).newest()[
            1
        ]  # which sweeps what a killed rank left, as a run does
        files = sorted(path.name for path in folder.iterdir() if path.suffix not in (".jsonl", ".log"))
        files += sorted(path.name for path in (folder / DISK).iterdir() if not path.name.startswith("step-"))
        return {
            "minutes": minutes,
            "events": dict(sorted(events.items())),
            "processes": job.count,
            "killed": len(job.killed),
            "operations": max((rows[-1]["operations"] for rows in every.values() if rows), default=0),
            "operations_of_all_ranks": sum(rows[-1]["operations"] for rows in every.values() if rows),
            "shrinks": max((row["shrunk"] for rows in every.values() for row in rows), default=0),
            "saved": sum(rows[-1]["saved"] for rows in every.values() if rows),
            "not_saved_disk_full": sum(rows[-1]["not_saved"] for rows in every.values() if rows),
            "of_a_rank_by_fifths_of_the_time": by_fifths(every),
            "files_left": [name for name in files if name not in ("stop", DISK)],
            "faults": faults,
        }


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A file system of few bytes there, while it is entered; hosts that are made meanwhile see it, too."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "hdpcomm-soak", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def log_of(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    return path.read_text()[-1500:] if path.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--json", type=Path)
    for name in ("--rank", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main(options.rank, Path(options.folder), options.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found = soak(options.minutes, options.seed)
    found |= {"date": date.today().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    print(json.dumps(found, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return MISSED if found["faults"] or found["files_left"] else 0


if __name__ == "__main__":
    sys.exit(main())
