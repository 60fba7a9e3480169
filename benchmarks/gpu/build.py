"""Builds the core for the GPU of this machine, in place, with what is installed: cmake, a C++ compiler, nvcc, pybind11.

CMake is called directly: setup.py would need a setuptools that knows the package's metadata. Only the architecture of
the first GPU is compiled, in a build folder of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import torch

TOP = Path(__file__).resolve().parents[2]


def arguments(architecture: str) -> list[str]:
    """The arguments of cmake's configure step."""
    build = TOP / "build" / f"gpu-{sys.implementation.cache_tag}-{architecture}"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    return [
        "cmake", "-S", str(TOP), "-B", str(build), *generator,
        "-DCMAKE_BUILD_TYPE=Release",
        "-DHDPCOMM_TESTING=ON",  # tests/gpu uses the simulated device's helpers, too
        f"-DCMAKE_CUDA_ARCHITECTURES={architecture}-real",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={TOP / 'hdpcomm'}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]  # fmt: skip


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device: it is a CPU build, or CUDA_VISIBLE_DEVICES hides the GPU")
    major, minor = torch.cuda.get_device_capability()
    configure = arguments(f"{major}{minor}")
    subprocess.check_call(configure)
    subprocess.check_call(["cmake", "--build", configure[4], "--parallel", str(os.cpu_count() or 4)])
    check = "from hdpcomm import _core; print(_core.build_info()); assert _core.build_info()['cuda']"
    subprocess.check_call([sys.executable, "-c", check], cwd=TOP)


if __name__ == "__main__":
    main()
