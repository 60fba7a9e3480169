"""Collectives of hdpcomm, gloo, Open MPI and MPICH in one run, compared with the time of one copy on this machine.

    python benchmarks/collectives.py                          # the tables of docs/communication-figures.md
    python benchmarks/collectives.py --ranks 2 --ops all_gather --sizes 8,1M --rounds 3 --peers gloo

hdpcomm and gloo alternate in the same processes; each MPI runs in its own mpirun, once a round (mpi4py; blocking calls
everywhere). A time is the median over the rounds of the mean over iterations and ranks; a ratio is a library's median
over hdpcomm's. The limit is the time in which all ranks at once copy the same number of bytes, by memcpy and by
process_vm_readv from their neighbour. If there is a core for each rank, the ranks of all libraries are bound to cores,
as mpirun of Open MPI does by default; ``--free`` binds none. With ``--cpp BUILD`` (a build with
HDPCOMM_BUILD_BENCHMARKS) the table from C++ follows, with the same MPIs. Writes JSON to benchmarks/results. Needs an
idle machine for reliable figures.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import ctypes.util
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gloo import join_gloo
from mpi.launch import launcher, lines, rows_of

import hdpcomm as hdp
from hdpcomm.comm.launch import RankPool
from hdpcomm.perf.config import PerfConfig, parse_size
from hdpcomm.perf.data import element_type
from hdpcomm.perf.ops import OPERATIONS, Case, operation
from hdpcomm.perf.runner import measure_side, points

HERE = Path(__file__).parent
OPS = ("sendrecv", "all_gather", "all_reduce", "reduce_scatter", "broadcast", "alltoall")
SIZES = "8,1K,16K,64K,256K,1M,8M,64M"
REGISTERED = "hdpcomm, comm.empty()"  # buffers in memory that the other ranks map

Table = dict[tuple[str, int], dict[str, list[float]]]  # (op, bytes) -> library -> microseconds of each round


@dataclass(frozen=True)
class Mpi:
    """An installed MPI, and how it is started here."""

    name: str
    mpirun: str
    compiler: str | None
    variables: dict[str, str]


def iterations(size: int, *, slow: bool = False) -> int:
    """Number of iterations: small messages take tens of milliseconds in all, so that the scheduler reaches a steady
    state where ranks share cores. ``slow``: for gloo."""
    return max(4, min(100 if slow else 5000, (320 << 20) // (size + (64 << 10))))


def config_of(op: str, size: int, *, slow: bool = False) -> PerfConfig:
    """The settings of a row."""
    iters = iterations(size, slow=slow)
    return PerfConfig(op, min_bytes=size, max_bytes=size, iters=iters, warmup=max(2, iters // 10), check=0)


# --- the ranks of hdpcomm and gloo -----------------------------------------------------------------------------------


def measure_round(rows: list[tuple[str, int]], with_gloo: bool, pinned: bool) -> list[tuple[str, int, str, float]]:
    """Runs one round on this rank: (op, bytes, library, microseconds), including the limits of the machine."""
    torch.set_num_threads(1)
    gloo = join_gloo(300) if with_gloo else None
    out = []
    cores = os.sched_getaffinity(0)
    with hdp.init(timeout=300) as world:
        if pinned and world.size <= len(cores):  # binds only this thread, not gloo's threads
            os.sched_setaffinity(0, {sorted(cores)[world.rank]})
        libraries: list[tuple[str, Any]] = [("hdpcomm", world), (REGISTERED, world)]
        if gloo is not None:
            libraries.append(("gloo", gloo))
        for op, size in rows:
            for name, comm in libraries:
                if name == REGISTERED and size < 1 << 14:
                    continue  # small messages are copied at once from any memory
                out.append((op, size, name, measure_row(world, name, comm, op, size)))
        for size in sorted({size for _, size in rows}):
            out += [("limit", size, name, us) for name, us in copy_limits(world, size)]
        world.barrier()
    os.sched_setaffinity(0, cores)
    if gloo is not None:
        torch.distributed.destroy_process_group()
    return out


def measure_row(world: Any, name: str, comm: Any, op: str, size: int) -> float:
    """Microseconds of an operation."""
    kind = element_type("float")
    shape = operation(op).shape(max(size // kind.bytes, 1), world.size)
    everyone = tuple(range(world.size))
    side = measure_side(
        world,
        operation(op),
        Case(comm, kind, shape, registered=name == REGISTERED),
        config_of(op, size, slow=name == "gloo"),
        everyone,
    )
    return side.time_us


def copy_limits(world: Any, size: int) -> Iterator[tuple[str, float]]:
    """Microseconds in which every rank copies ``size`` bytes, all at the same time."""
    source, target = (torch.full((size,), value, dtype=torch.uint8) for value in (1, 2))
    mine = torch.tensor([os.getpid(), source.data_ptr()], dtype=torch.int64)
    everyone = torch.empty(2 * world.size, dtype=torch.int64)
    world.all_gather(everyone, mine)
    pid, address = everyone.view(world.size, 2)[(world.rank + 1) % world.size].tolist()
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    libc.process_vm_readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    local, remote = (ctypes.c_size_t * 2)(target.data_ptr(), size), (ctypes.c_size_t * 2)(address, size)

    def read() -> None:
        if libc.process_vm_readv(pid, local, 1, remote, 1, 0) != size:
            raise OSError(ctypes.get_errno(), "process_vm_readv")

    def copy() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)

    for name, call in (("memcpy", copy), ("process_vm_readv", read)):
        number = iterations(size)
        for _ in range(2):
            call()
        world.barrier()
        started = time.perf_counter()
        for _ in range(number):
            call()
        times = torch.tensor([(time.perf_counter() - started) / number * 1e6], dtype=torch.float64)
        world.all_reduce(times, "avg")
        yield name, float(times)
    world.barrier()  # the neighbour may still read


# --- MPI -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def installed_mpis(wanted: set[str]) -> Iterator[list[Mpi]]:
    """Open MPI and MPICH, if they are installed and mpi4py works with them."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for name, suffix in (("Open MPI", "openmpi"), ("MPICH", "mpich")):
            mpirun = shutil.which(f"mpirun.{suffix}")
            if suffix not in wanted:
                continue
            if mpirun is None or importlib.util.find_spec("mpi4py") is None:
                print(f"{name} is left out: mpirun.{suffix} or mpi4py is not installed", file=sys.stderr)
                continue
            variables = {"MPI4PY_MPIABI": suffix}
            if suffix == "mpich":  # Debian calls the library libmpich.so.12, mpi4py's wheel looks for libmpi.so.12
                library = ctypes.util.find_library("mpich")
                if library is not None:
                    for place in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"):
                        if Path(place, library).exists():
                            Path(folder, "libmpi.so.12").symlink_to(Path(place, library))
                            break
                    variables["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
            found.append(Mpi(name, mpirun, shutil.which(f"mpicxx.{suffix}"), variables))
        yield found


def mpi_rows(ranks: int, rows: list[tuple[str, int]]) -> dict[str, Any]:
    """The specification for the MPI ranks, with the same rows."""
    configs = [config_of(op, size) for op, size in rows]
    return {"rows": [row for config in configs for row in rows_of(config, list(points(config, ranks)))]}


def binding(ranks: int, free: bool) -> dict[str, str]:
    """Environment variables that bind the ranks of both MPIs to cores, if there is one for each."""
    bound = not free and ranks <= len(os.sched_getaffinity(0))
    policy = "core" if bound else "none"
    return {"OMPI_MCA_hwloc_base_binding_policy": policy, "HYDRA_BINDING": policy}


def mpi_round(
    one: Mpi, ranks: int, rows: list[tuple[str, int]], give_up_s: float, free: bool
) -> list[tuple[str, int, str, float]]:
    """One round with an MPI; some rows are missing if it did not end in time."""
    out = []
    variables = one.variables | binding(ranks, free)
    for record in lines(mpi_rows(ranks, rows), ranks, timeout=give_up_s, mpirun=one.mpirun, variables=variables):
        if "index" not in record or record["note"]:
            continue
        op, size = rows[record["index"]]
        out.append((op, size, one.name, statistics.fmean(record["out_of_place"])))
    return out


# --- from C++ --------------------------------------------------------------------------------------------------------


def cpp_commands(build: Path, mpis: list[Mpi], ranks: int, folder: Path, free: bool) -> Iterator[tuple[str, list[str]]]:
    """(library, command) for the C++ benchmarks."""
    free_option = ["2000", "free"] if free else []
    yield "hdpcomm", [str(build / "benchmarks" / "collectives"), str(ranks), *free_option]
    if ranks == 2:
        yield "hdpcomm", [str(build / "benchmarks" / "latency"), *(["20000", "free"] if free else [])]
    for one in mpis:
        if one.compiler is None:
            continue
        binary = folder / one.name.replace(" ", "")
        if not binary.exists():
            source = str(HERE / "mpi" / "collectives.cpp")
            subprocess.run([one.compiler, "-O2", "-std=c++20", "-o", str(binary), source], check=True)
        yield one.name, [*launcher(one.mpirun, ranks), str(binary)]


def cpp_table(build: Path, mpis: list[Mpi], ranks: int, rounds: int, give_up_s: float, free: bool) -> Table:
    """Microseconds of small operations from C++; the libraries alternate, bound to cores as from Python."""
    environment = dict(os.environ) | binding(ranks, free)
    table: Table = {}
    late: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, command in cpp_commands(build, mpis, ranks, Path(folder), free):
                if name in late:
                    continue
                try:
                    done = subprocess.run(
                        command, capture_output=True, text=True, timeout=give_up_s, check=True, env=environment
                    )
                except subprocess.TimeoutExpired:
                    print(f"{name} on {ranks} ranks, C++: not done within {give_up_s:g} s", file=sys.stderr)
                    late.add(name)
                    continue
                for key, value in json.loads(done.stdout).items():
                    if key.endswith("_us"):
                        table.setdefault((key.removesuffix("_us"), 8), {}).setdefault(name, []).append(value)
    return table


# --- tables ----------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, mpis: list[Mpi], ranks: int) -> Table:
    """All rounds with one number of ranks."""
    rows = [(op, size) for op in args.ops for size in args.sizes]
    table: Table = {}
    late: set[str] = set()
    with RankPool(ranks) as pool:
        for number in range(args.rounds):
            print(f"{ranks} ranks, round {number + 1} of {args.rounds}", file=sys.stderr)
            measured = pool.run(measure_round, rows, "gloo" in args.peers, not args.free, timeout=1800)[0]
            for one in mpis:
                if one.name in late:
                    continue
                got = mpi_round(one, ranks, rows, args.give_up, args.free)
                measured += got
                if {row[:2] for row in got} != set(rows):
                    print(f"{one.name} on {ranks} ranks: not done within {args.give_up:g} s", file=sys.stderr)
                    late.add(one.name)
            for op, size, library, us in measured:
                table.setdefault((op, size), {}).setdefault(library, []).append(us)
    return table


def shown(size: int) -> str:
    """Bytes as text: 8 B, 64 KiB, 1 MiB."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def print_table(title: str, rows: list[tuple[str, dict[str, list[float]]]], limits: tuple[str, ...] = ()) -> None:
    """A cell in Markdown: median microseconds, in brackets the ratio to hdpcomm (above 1: hdpcomm is faster)."""
    names = list(dict.fromkeys(name for _, by in rows for name in by if name not in ("hdpcomm", *limits)))
    present = [name for name in limits if any(name in by for _, by in rows)]
    head = ["", "hdpcomm us", *(f"{name} us (ratio)" for name in names), *(f"{name} us (share)" for name in present)]
    print(f"\n**{title}**\n\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for label, by in rows:
        ours = statistics.median(by["hdpcomm"]) if by.get("hdpcomm") else None
        cells = [label, "-" if ours is None else f"{ours:.2f}"]
        for name in (*names, *present):
            times = by.get(name)
            if not times:
                cells.append("-")
                continue
            theirs = statistics.median(times)
            # A limit is shown as the share of it that hdpcomm reaches.
            ratio = "" if not ours else f" ({theirs / ours:.2f})"
            cells.append(f"{theirs:.2f}{ratio}")
        print(f"| {' | '.join(cells)} |")


def print_tables(ranks: int, table: Table, sizes: list[int]) -> None:
    """Prints one table per operation."""
    for op in dict.fromkeys(op for op, _ in table if op != "limit"):
        rows = [(shown(size), table[op, size] | table.get(("limit", size), {})) for size in sizes]
        print_table(f"{op}, {ranks} ranks", rows, ("memcpy", "process_vm_readv"))


def versions(mpis: list[Mpi]) -> dict[str, str]:
    """The versions of the libraries."""
    found = {"hdpcomm": hdp.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for one in mpis:
        text = subprocess.run([one.mpirun, "--version"], capture_output=True, text=True, check=False).stdout
        numbers = re.findall(r"\d+\.\d+(?:\.\d+)?", text)
        found[one.name] = numbers[0] if numbers else "unknown"
    return found


def machine() -> dict[str, Any]:
    """Facts about the machine on which the figures depend."""
    models = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=sorted(OPERATIONS))
    parser.add_argument("--sizes", default=SIZES, help="bytes, separated by commas (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="the libraries take turns (default %(default)s)")
    parser.add_argument(
        "--peers", nargs="*", default=["gloo", "openmpi", "mpich"], choices=["gloo", "openmpi", "mpich"]
    )
    parser.add_argument("--free", action="store_true", help="let ranks wander between cores")
    parser.add_argument("--cpp", type=Path, metavar="BUILD", help="the folder that holds benchmarks/latency")
    parser.add_argument("--give-up", type=float, default=120.0, help="seconds for a round of an MPI; some spin")
    parser.add_argument("--json", type=Path, help="default benchmarks/results/collectives-DATE.json")
    args = parser.parse_args(argv)
    args.sizes = [parse_size(text) for text in args.sizes.split(",")]
    for binary in ("latency", "collectives") if args.cpp else ():
        if not (args.cpp / "benchmarks" / binary).exists():
            parser.error(f"--cpp {args.cpp}: there is no benchmarks/{binary}; build with -DHDPCOMM_BUILD_BENCHMARKS=ON")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    record: dict[str, Any] = {"date": date.today().isoformat(), "machine": machine(), "rounds": args.rounds}
    record |= {"pinned": not args.free, "rows": []}
    path = args.json or HERE / "results" / f"collectives-{record['date']}.json"
    with installed_mpis(set(args.peers)) as mpis:
        record["versions"] = versions(mpis)
        print(f"{record['machine']['cpu']}, {record['machine']['cores']} cores; {record['date']}; {record['versions']}")
        for ranks in args.ranks:
            tables = {"python": run(args, mpis, ranks)}
            print_tables(ranks, tables["python"], args.sizes)
            if args.cpp:
                tables["c++"] = cpp_table(args.cpp, mpis, ranks, args.rounds, args.give_up, args.free)
                rows = [(op.replace("_", " "), by) for (op, _), by in tables["c++"].items()]
                print_table(f"from C++, {ranks} ranks", rows)
            for language, table in tables.items():
                for (op, size), by in table.items():
                    for library, times in by.items():
                        record["rows"].append(
                            {"language": language, "ranks": ranks, "op": op, "bytes": size, "library": library}
                            | {"median_us": statistics.median(times), "rounds_us": times}
                        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwritten to {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
