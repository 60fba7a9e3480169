"""Builds, tests and measures hdpcomm on a machine with a GPU; offline, in less than 9 minutes (docs/gpu.md).

Every part is a process with its own time limit; a failed part is reported and the others still run. The parts of a
batch run at the same time: tests share a batch, measurements run alone. Exit code 0: all parts ran and all targets are
met. 1: a part failed. 3: there is no GPU. 4: all parts ran, a target is missed. 130: Ctrl-C, which ends all parts.
"""

import argparse
import contextlib
import ctypes
import datetime
import functools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
TOTAL_S = 520.0
NO_GPU, FAILED, MISSED, INTERRUPTED = 3, 1, 4, 130
# Files of tests/gpu with several ranks, which share the GPU.
RANK_TESTS = ("training", "transport", "zero", "torch_backend", "nccl", "commands")


@dataclass(frozen=True)
class Part:
    """One process. In its command, ``{json}`` is replaced by the file for its rows, and ``{out}`` by the folder OUT."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    missing: str = ""  # why it cannot run, or empty


def sanitizer(tool: str) -> Part:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    missing = "" if Path(program).exists() else "compute-sanitizer is not installed (it comes with the CUDA toolkit)"
    command = (program, "--tool", tool, "--error-exitcode", "9", sys.executable, str(HERE / "sanitizer_driver.py"))
    return Part(tool, command, 110, missing)


def tests(name: str) -> Part:
    """The part of one file of tests/gpu; each file is a part, so that a test that hangs stops only its file."""
    options = ("-q", "-p", "no:cacheprovider", "-o", "timeout=60")
    limit_s = 110.0
    if name == "training":  # many small steps
        limit_s = 240.0
    if name == "commands":  # new interpreters
        options = (*options, "-n", "3")
    return Part(f"test_{name}", (sys.executable, "-m", "pytest", *options, f"tests/gpu/test_{name}_gpu.py"), limit_s)


def benchmark(name: str, limit_s: float, script: str = "", *options: str) -> Part:
    command = (sys.executable, str(HERE / f"{script or name}.py"), "--json", "{json}", *options)
    return Part(name, command, limit_s)


def of_processes(part: Part) -> Part:
    """The part with the Multi-Process Service, where it can be started."""
    return Part(part.name, (sys.executable, str(HERE / "with_mps.py"), *part.command), part.limit_s)


def calibration() -> Part:
    command = ("-m", "hdpcomm.cli.main", "acceptance", "--only", "links", "--costs", "{out}/costs.json")
    return of_processes(Part("calibrate", (sys.executable, *command, "--transport", "cuda", "--ranks", "2"), 40))


def all_parts() -> list[list[Part]]:
    """All parts in batches, the most important figures first, since the time may not be enough for all."""
    kinds = [path.name[5:-7] for path in sorted((TOP / "tests/gpu").glob("test_*_gpu.py"))]
    alone = [kind for kind in kinds if kind not in RANK_TESTS]
    return [
        [Part("build", (sys.executable, str(HERE / "build.py")), 200)],
        [benchmark("train", 150, "step", "--groups", "one", "offload")],
        [of_processes(benchmark("train_mixed", 90, "step", "--groups", "mixed"))],
        [of_processes(benchmark("train_long", 90, "step", "--groups", "long"))],
        [benchmark("kernels", 60)],
        [benchmark("cross_entropy", 75)],
        [of_processes(benchmark("exchange", 50))],
        [of_processes(benchmark("ring", 40, "ring", "--groups", "two"))],
        [of_processes(benchmark("ring4", 50, "ring", "--groups", "four"))],
        [of_processes(benchmark("graph", 45))],
        *([of_processes(tests(kind))] for kind in RANK_TESTS),
        [of_processes(benchmark("queues", 40))],
        [*map(tests, alone), *map(sanitizer, ("memcheck", "racecheck", "synccheck"))],
        [benchmark("offload", 180, "activations")],
        [calibration()],
    ]


def find_gpu() -> tuple[dict[str, str], str]:
    """(facts about the first GPU, the reason if there is none)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {}, "libcuda.so.1 is not found: no NVIDIA driver is installed"
    count, version, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    code = driver.cuInit(0)
    if code != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return {}, f"the driver finds no GPU (cuInit: {code}, devices: {count.value}); see nvidia-smi"
    driver.cuDeviceGetName(name, len(name), 0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    found = {"device": name.value.decode(), "devices": str(count.value)}
    found["cuda_of_driver"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, IndexError):
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        found["driver"] = answer.stdout.splitlines()[0].strip()
    return found, ""


def environment() -> dict[str, str]:
    """The environment of every part: this tree's package, and the tools of this Python and of the CUDA toolkit."""
    packages = os.pathsep.join(filter(None, (str(TOP), os.environ.get("PYTHONPATH", ""))))
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    return os.environ | {"PYTHONPATH": packages, "PATH": tools}


class Running:
    """The processes of a batch. Each has its own session, so Ctrl-C does not reach them, and :meth:`end` ends them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen] = set()
        self._over = False

    def add(self, process: subprocess.Popen) -> None:
        """Adds a process, from any thread; ends it at once if :meth:`end` was called before."""
        with self._lock:
            self._processes.add(process)
            if self._over:
                end_session(process)

    def remove(self, process: subprocess.Popen) -> None:
        """Removes a process, and ends all that it has left running."""
        with self._lock:
            self._processes.discard(process)
            end_session(process)

    def end(self) -> None:
        """Ends all processes, also those that are added later."""
        with self._lock:
            self._over = True
            for process in self._processes:
                end_session(process)


def run_part(part: Part, limit_s: float, out: Path, running: Running) -> dict:
    """Runs a part and returns its record: status (ok, failed, timeout, missing, skipped), seconds, rows, note. Appends
    its output to ``part.log`` in ``out``."""
    record = {"part": part.name, "status": "ok", "seconds": 0.0, "rows": [], "note": part.missing}
    if part.missing:
        return record | {"status": "missing"}
    if limit_s < 1:
        return record | {"status": "skipped", "note": "no time was left; run it alone with --only"}
    rows_file = out / f"{part.name}.rows.json"
    rows_file.unlink(missing_ok=True)
    names = {"{json}": str(rows_file), "{out}": str(out)}
    command = [
        functools.reduce(lambda text, name: text.replace(name, names[name]), names, word) for word in part.command
    ]
    started = time.monotonic()
    with (out / f"{part.name}.log").open("w") as output:
        output.write(f"\n=== {part.name}: {' '.join(command)}\n")
        output.flush()
        try:  # in its own session, so that its ranks end with it
            process = subprocess.Popen(
                command, cwd=TOP, env=environment(), stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            return record | {"status": "failed", "note": str(error)}
        running.add(process)
        try:
            code = process.wait(limit_s)
            if code != 0:
                record |= {"status": "failed", "note": f"exit code {code}; the log says why"}
        except subprocess.TimeoutExpired:
            record |= {"status": "timeout", "note": f"stopped after {limit_s:.0f} s"}
        finally:
            running.remove(process)
    record["seconds"] = round(time.monotonic() - started, 1)
    if rows_file.exists():
        try:
            record["rows"] = json.loads(rows_file.read_text())["rows"]
        except (ValueError, KeyError) as error:
            record |= {"status": "failed", "note": f"{rows_file.name} cannot be read: {error!r}"}
        rows_file.unlink(missing_ok=True)
    return record


def end_session(process: subprocess.Popen) -> None:
    """Ends all processes that the part has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def versions() -> dict[str, str]:
    """Versions of the software on which the figures depend."""
    script = "import torch, hdpcomm, json; print(json.dumps([torch.__version__, hdpcomm.__version__]))"
    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", script], cwd=TOP, env=environment(), capture_output=True, text=True, timeout=60
        )
        found["torch"], found["hdpcomm"] = json.loads(answer.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        found["torch"] = "cannot be imported"
    return found


def table(records: list[dict]) -> str:
    lines = [f"{'part':<14} {'status':<8} {'seconds':>8}  note"]
    for record in records:
        lines.append(f"{record['part']:<14} {record['status']:<8} {record['seconds']:>8.1f}  {record['note']}")
    lines += ["", f"{'figure':<58} {'value':>12} {'unit':<7} {'target':<10} met"]
    for row in (row for record in records for row in record["rows"]):
        met = {True: "yes", False: "NO", None: ""}[row["met"]]
        lines.append(f"{row['name']:<58} {row['value']:>12.4g} {row['unit']:<7} {row['target']:<10} {met}")
    return "\n".join(lines)


def exit_code(records: list[dict]) -> int:
    if any(record["status"] != "ok" for record in records):
        return FAILED
    return MISSED if any(row["met"] is False for record in records for row in record["rows"]) else 0


def run_batch(batch: list[Part], left_s: float, out: Path) -> list[dict]:
    """Runs parts at the same time and returns their records. Ctrl-C ends them all."""
    limits = [min(part.limit_s, left_s) for part in batch]
    for part, limit_s in zip(batch, limits, strict=True):
        print(f"{part.name} (at most {max(limit_s, 0):.0f} s)", file=sys.stderr, flush=True)
    running = Running()
    with ThreadPoolExecutor(len(batch)) as pool:
        try:
            return list(pool.map(run_part, batch, limits, [out] * len(batch), [running] * len(batch)))
        except KeyboardInterrupt:
            running.end()  # otherwise the pool would wait until their time limits
            raise


def parts_before(out: Path, about: dict) -> list[dict]:
    """The records of earlier runs into this folder, of the same GPU, driver and commit."""
    try:
        found = json.loads((out / "gpu.json").read_text())
    except (OSError, ValueError):
        return []
    same = all(found.get(name) == about.get(name) for name in ("device", "driver", "commit"))
    return list(found.get("parts", [])) if same else []


def commit() -> str:
    """That of this tree; ``+`` behind it where files differ from it, empty where it is no clone."""
    git = ["git", "-C", str(TOP)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        head = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
        return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
    return ""


def run_all(batches: list[list[Part]], out: Path, about: dict, total_s: float = TOTAL_S) -> int:
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + total_s
    chosen = {part.name for batch in batches for part in batch}
    before = [record for record in parts_before(out, about) if record["part"] not in chosen]
    records: list[dict] = []
    for batch in batches:
        records += run_batch(batch, end - time.monotonic(), out)
        if "versions" not in about:  # after the build
            about = {**about, "versions": versions()}
        with (out / "gpu.log").open("w") as log:
            for record in records:
                own = out / f"{record['part']}.log"
                log.write(f"\n=== {record['part']}: {record['status']} {record['note']}\n")
                log.write(own.read_text(errors="replace") if own.exists() else "")
        # Written after each batch, in case the next one is interrupted.
        (out / "gpu.json").write_text(json.dumps({**about, "parts": [*before, *records]}, indent=1) + "\n")
    for record in records:
        (out / f"{record['part']}.log").unlink(missing_ok=True)
    print(table([*before, *records]))
    return exit_code(records)


def main(arguments: list[str] | None = None) -> int:
    batches = all_parts()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = "directory of gpu.json and gpu.log (default: build/gpu)"
    parser.add_argument("out", nargs="?", type=Path, default=TOP / "build/gpu", metavar="OUT", help=where)
    names = [part.name for batch in batches for part in batch]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"only these of: {', '.join(names)}")
    again = "only those that no run into OUT has ended well, of this GPU, driver and commit"
    parser.add_argument("--missing", action="store_true", help=again)
    options = parser.parse_args(arguments)
    gpu, why = find_gpu()
    if not gpu:
        print(f"no GPU: {why}. Nothing was run.", file=sys.stderr)
        return NO_GPU
    about = {"date": datetime.date.today().isoformat(), "commit": commit(), **gpu}
    print(f"{gpu['device']}, driver {gpu.get('driver', 'unknown')}, {about['date']}", flush=True)
    known = parts_before(options.out, about) if options.missing else []
    done = {record["part"] for record in known if record["status"] == "ok"}
    chosen = [
        [part for part in batch if (options.only is None or part.name in options.only) and part.name not in done]
        for batch in batches
    ]
    try:
        return run_all([batch for batch in chosen if batch], options.out, about)
    except KeyboardInterrupt:
        print(f"interrupted; what had ended is in {options.out}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
