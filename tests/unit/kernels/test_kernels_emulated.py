"""The CUDA kernels run on the CPU: the .cu files are compiled with the shim in emulated/ and compared with CPU kernels.

This tests without a GPU: indices, tails, any alignment, loops over more work than blocks, that all threads reach
barriers, and that nothing outside a buffer's words is accessed (AddressSanitizer); but not memory order or speed.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent / "emulated"
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++20", "-O0", "-fsanitize=address", "-w", f"-I{HERE / 'shim'}"]
LAUNCH = "hdpcomm::cuda::launch(name, Loaded<kernel>::it, grid, threads, stream, pointers);"
EMULATED = "emulated::run(blocks, threads, [&] { kernel(arguments...); }); static_cast<void>(stream);"
BLOCKS = "kMaxBlocks = 1 << 16;"

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no g++"), pytest.mark.timeout(240)]
ROUNDS = 25


def replace(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has {text.count(old)} times: {old}"
    path.write_text(text.replace(old, new))


def compile_one(source, build):
    cache = [ccache] if (ccache := shutil.which("ccache")) else []
    target = build / f"{source.name}.o"
    folders = [f"-I{source.parent}", f"-I{source.parents[1]}", f"-I{TOP / 'csrc'}"]  # the copy before the kernels
    command = [*cache, COMPILER, *FLAGS, *folders, "-x", "c++", "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True, timeout=110)


def link(build):
    program = build / "driver"
    objects = map(str, sorted(build.glob("*.o")))
    subprocess.run([COMPILER, "-fsanitize=address", *objects, "-o", str(program)], check=True, timeout=60)
    return program


def run(program, rounds):
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run([str(program), str(rounds)], capture_output=True, text=True, timeout=100, env=environment)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """(sources, objects): a copy of the kernels whose launches run in the emulation, three blocks at most."""
    sources, objects = tmp_path_factory.mktemp("copy") / "kernels", tmp_path_factory.mktemp("objects")
    shutil.copytree(TOP / "csrc/kernels", sources)
    replace(sources / "cuda_launch.cuh", LAUNCH, EMULATED)
    replace(sources / "cuda_launch.cuh", BLOCKS, "kMaxBlocks = 3;")
    others = (TOP / "csrc/base" / name for name in ("error.cpp", "dtype.cpp", "call.cpp", "text.cpp"))
    together = sources.parent / "unity.cpp"  # a third of the time
    together.write_text("".join(f'#include "{path}"\n' for path in (*sorted(sources.glob("*.cpp")), *others)))
    files = [*sources.glob("*.cu"), HERE / "driver.cpp"]
    files.sort(key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda source: compile_one(source, objects), [together, *files]))
    return sources, objects


def test_every_kernel_equals_its_cpu_twin(tree):
    done = run(link(tree[1]), ROUNDS)
    assert done.returncode == 0, done.stderr
    assert f"{ROUNDS} rounds equal" in done.stdout


PLANTED = {
    "a missing barrier": ("rows.cu", "__syncthreads();\n    int64_t word", "int64_t word"),
    "a barrier between tiles": ("rows.cu", "__syncthreads();  // `tile`", "// `tile`"),
    "a barrier of a reduction": ("cross_entropy.cu", "sum;\n      __syncthreads();", "sum;"),
    "a lane that reads too far": (
        "cross_entropy.cu",
        "e < slices.edges(); e += threads",
        "e <= slices.edges(); e += threads",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(tree, tmp_path, bug):
    sources, objects = (shutil.copytree(path, tmp_path / path.name) for path in tree)
    name, old, new = PLANTED[bug]
    replace(sources / name, old, new)
    compile_one(sources / name, objects)
    assert run(link(objects), ROUNDS).returncode != 0
