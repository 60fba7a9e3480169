"""The build backend: that of setuptools, and nvcc's wheels where CUDA code will be compiled without a toolkit.

pip, uv and build call it (PEP 517). ``HDPCOMM_CUDA`` in ``CMAKE_ARGS`` decides as in CMakeLists.txt: ``ON`` compiles
the CUDA code, ``OFF`` leaves it out, ``AUTO`` (default) compiles it where an NVIDIA driver or a CUDA toolkit is.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (the hooks that stay as they are)

CUDA_REQUIRES = [f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")]
_DRIVER = ("/dev/nvidiactl", "/proc/driver/nvidia/version")


def _has_toolkit() -> bool:
    folders = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [Path(folder, "bin/nvcc") for folder in [*folders, "/usr/local/cuda"] if folder]
    return bool(os.environ.get("CUDACXX") or shutil.which("nvcc")) or any(place.exists() for place in places)


def cuda_requires() -> list[str]:
    """The requirements of this build besides those of pyproject.toml."""
    asked = re.findall(r"-DHDPCOMM_CUDA(?::\w+)?=(\w+)", os.environ.get("CMAKE_ARGS", ""))
    wanted = asked[-1].upper() if asked else "AUTO"
    if _has_toolkit() or wanted in ("OFF", "0", "NO", "FALSE"):
        return []
    return [] if wanted == "AUTO" and not any(Path(path).exists() for path in _DRIVER) else CUDA_REQUIRES


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *cuda_requires()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *cuda_requires()]


if __name__ == "__main__":
    print("\n".join(cuda_requires()))
