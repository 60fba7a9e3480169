"""Builds the core with a sanitizer and runs tests, or the fuzzers, with it, in a tree of its own under ``build/``.

    python tools/sanitize.py {address,thread} [--repeat N] [--build-only] [arguments of pytest, default: tests]
    python tools/sanitize.py {address,thread} --fuzz SECONDS

``address``: AddressSanitizer and UndefinedBehaviorSanitizer, with ``thread``: ThreadSanitizer. The tests run against a
copy of the package (links to its files) with the instrumented core, so that the usual core stays as it is. A process
that a sanitizer ends fails its test; every report is printed at the end. ``--repeat``: each time in a new process, for
what happens now and then. torch and Python are not instrumented: what they do without the core is not seen
(tools/sanitizer_thread.supp). ThreadSanitizer sees the threads of one process, not what processes do in memory that
they share. Exit code: pytest's, or 1 where there are reports.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAGS = {
    "address": "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined",
    # No fences: they order plain words that are atomic themselves (transport/wait_board.hpp).
    "thread": "-fsanitize=thread -Wno-tsan",
}
LIBRARIES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
LINKED = ("hdpcomm", "tests", "benchmarks", "examples", "docs", "tools", "csrc", ".ci")  # the tests read files of these
SHOWN = 6000  # characters of a report
PATIENCE_S = 600  # that a test may take
PATIENCE = 10  # times the usual limits that no test is about (tests/harness/patience.py)
# Tests that a sanitizer keeps from passing although nothing is wrong, with the reason.
SKIPPED: dict[str, dict[str, str]] = {
    "address": {
        "tests/unit/train/test_examples.py::test_examples[hdpcomm.data.opening]": (
            "it reads a folder of this package: links out of a folder are left out, and all files here are such"
        ),
    },
    "thread": {
        "tests/unit/comm/test_launchers.py::test_a_port_of_mpich_itself": (
            "mpiexec and the shell that it starts crash where ThreadSanitizer's library is loaded into them"
        ),
        "tests/ranks/nccl/test_nccl_benchmark.py::test_without_two_gpus_the_script_says_so": (
            "a script of the shell: bash and dash call setjmp, which is null in a ThreadSanitizer that is loaded first"
        ),
        "tests/faults/test_processes.py::test_a_forked_child_may_not_use_a_communicator": (
            "ThreadSanitizer's runtime may wait for ever in the forked child of a process with several threads"
        ),
        "tests/ranks/comm/test_counter.py::test_a_forked_child_may_not_use_a_counter": "as the one before",
        # In the forked child of a process with several threads ThreadSanitizer holds SIGCHLD back for good, so a fork
        # server there never hears that its ranks have ended.
        "tests/faults/test_faults_benchmark.py::test_rows_and_file": "its ranks end unheard",
        "tests/faults/test_faults_benchmark.py::test_kills": "its ranks end unheard",
        "tests/faults/test_train_kill.py::test_sigkill_of_a_rank": "its ranks end unheard",
        "tests/faults/test_flight_recorder.py::test_a_signal_writes_them_and_the_rank_goes_on": (
            "ThreadSanitizer holds signals back until the next call that it intercepts, and the core waits in a futex"
        ),
    },
}


def link_tree(source: Path, target: Path) -> None:
    """Links to all files of ``source``, without compiled cores and caches; links to what is gone are removed."""
    for folder, names, files in os.walk(source):
        names[:] = [name for name in names if name != "__pycache__"]
        here = target / Path(folder).relative_to(ROOT)
        here.mkdir(parents=True, exist_ok=True)
        for old in here.iterdir():
            if old.is_symlink() and not old.exists():
                old.unlink()
        for name in files:
            link = here / name
            if not name.endswith(".so") and not link.is_symlink():
                link.symlink_to(Path(folder, name))


def build(kind: str, folder: Path) -> Path:
    """Compiles the core; returns the tree whose package holds it."""
    tree = folder / "tree"
    for name in LINKED:
        link_tree(ROOT / name, tree)
    for path in ROOT.iterdir():
        if path.is_file() and not (tree / path.name).is_symlink():
            (tree / path.name).symlink_to(path)
    pybind = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    )
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cmake = shutil.which("cmake", path=search) or "cmake"
    options = {
        "CMAKE_BUILD_TYPE": "None",
        "CMAKE_CXX_FLAGS": f"-O1 -g1 -fno-omit-frame-pointer {FLAGS[kind]}",
        "CMAKE_LIBRARY_OUTPUT_DIRECTORY": tree / "hdpcomm",
        "HDPCOMM_TESTING": "ON",
        "HDPCOMM_CUDA": "OFF",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind.stdout.strip(),
    }
    if launcher := shutil.which("ccache"):
        options["CMAKE_CXX_COMPILER_LAUNCHER"] = launcher
    ninja = shutil.which("ninja", path=search)
    subprocess.run(
        [
            *(cmake, "-S", ROOT, "-B", folder / "core"),
            *(("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}") if ninja else ()),
            *(f"-D{name}={value}" for name, value in options.items()),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    jobs = os.environ.get("BUILD_JOBS", os.cpu_count())
    subprocess.run([cmake, "--build", folder / "core", "--", f"-j{jobs}"], check=True, stdout=subprocess.DEVNULL)
    return tree


def library(name: str) -> str:
    """The path of a sanitizer's library."""
    compiler = os.environ.get("CXX", "c++")
    told = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(told.stdout.strip()).resolve())


def report_undefined_behavior(folder: Path) -> None:
    """UBSan's ``log_path`` goes to AddressSanitizer where both are loaded, and what UBSan prints is lost in the output
    that pytest keeps of a process that ends: each Python tells it the path anew."""
    path = bytes(folder / "report")
    call = f"ctypes.CDLL({library('libubsan.so')!r}).__sanitizer_set_report_path({path!r})"
    (folder / "tree" / "sitecustomize.py").write_text(f"import ctypes\n\n{call}\n")


def environment(kind: str, folder: Path) -> dict[str, str]:
    """Environment of the tests: the sanitizer's library comes first in each process that they start."""
    common = f"log_path={folder / 'report'}"
    suppressions = Path(__file__).with_name("sanitizer_thread.supp")
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(library(name) for name in LIBRARIES[kind]),
        # Python and torch keep memory until they end, which is no leak of the core's.
        "ASAN_OPTIONS": f"{common}:abort_on_error=1:detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": f"{common}:print_stacktrace=1",
        # A runtime of GCC up to 13 takes what lies before thread-local memory at the 16th byte of a page for a header
        # of an old glibc, and dies at the size that it reads there.
        "TSAN_OPTIONS": f"{common}:exitcode=66:abort_on_error=1:report_signal_unsafe=0:ignore_noninstrumented_modules=1"
        # Tests of forked children may start threads there: TSan would end a child that does.
        f":intercept_tls_get_addr=0:die_after_fork=0:suppressions={suppressions}",
        "TESTS_PATIENCE": str(PATIENCE),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(folder / "tree"),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(FLAGS))
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="runs of the tests (default %(default)s)")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--fuzz", type=float, metavar="SECONDS", help="run each fuzzer (tests/fuzz.py) for so long")
    args, rest = parser.parse_known_args(argv)
    if args.repeat < 1:
        parser.error(f"--repeat {args.repeat}: give at least 1")
    folder = ROOT / "build" / args.kind
    began = time.monotonic()
    tree = build(args.kind, folder)
    print(f"built in {time.monotonic() - began:.0f} s", flush=True)
    if args.build_only:
        return 0
    for old in folder.glob("report.*"):
        old.unlink()
    if args.kind == "address":
        report_undefined_behavior(folder)
    if args.fuzz is not None:
        program = ["-m", "tests.fuzz", "--seconds", str(args.fuzz), *rest]
    else:
        skipped = [f"--deselect={test}" for test in SKIPPED[args.kind]]
        program = [
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--timeout={PATIENCE_S}",
            *skipped,
            *(rest or ["tests"]),
        ]
    # The sanitizers' shadow memory wants addresses that are not moved about.
    command = ["setarch", platform.machine(), "-R", sys.executable, *program]
    worst = 0
    for run in range(args.repeat):
        began = time.monotonic()
        code = subprocess.run(command, cwd=tree, env=environment(args.kind, folder), check=False).returncode
        worst = worst or code
        reports = sorted(folder.glob("report.*"))
        print(
            f"run {run + 1} of {args.repeat}: exit code {code}, {time.monotonic() - began:.0f} s, "
            f"{len(reports)} reports so far",
            flush=True,
        )
    for report in sorted(folder.glob("report.*")):
        print(f"--- {report}\n{report.read_text(errors='replace')[:SHOWN]}")
    return worst or (1 if any(folder.glob("report.*")) else 0)


if __name__ == "__main__":
    sys.exit(main())
