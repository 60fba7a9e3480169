"""Builds the C++20/CUDA core (``hdpcomm._core``) with CMake; everything else is in pyproject.toml."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class CMakeExtension(Extension):
    """An extension whose sources CMake knows."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    """Runs CMake in ``build/``, which is kept between builds so that an edit recompiles only what it touches."""

    def run(self) -> None:
        # setuptools builds elsewhere and copies the modules that it knows; `inplace` is cleared meanwhile.
        self.into_source = bool(self.inplace or self.editable_mode)
        super().run()

    def copy_extensions_to_source(self) -> None:
        """Nothing to copy: CMake has put the modules into the source tree."""

    def build_extension(self, ext: Extension) -> None:
        self._check_compiler()
        source = Path(__file__).parent.resolve()
        package = source / ext.name.split(".")[0]
        output = package if self.into_source else Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = source / "build" / f"cmake-{sys.implementation.cache_tag}"
        self._drop_stale(build)
        build.mkdir(parents=True, exist_ok=True)
        arguments = [
            f"-DCMAKE_BUILD_TYPE={os.environ.get('HDPCOMM_BUILD_TYPE', 'Release')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}",
            "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
            *(() if self.into_source else ("-DHDPCOMM_TESTING=OFF",)),  # no wheel has testing._native
        ]
        if ninja := shutil.which("ninja"):
            arguments += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        try:
            import pybind11
        except ImportError:  # CMake then looks for a system pybind11 and says so if there is none
            pass
        else:
            arguments.append(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")
        for command in (["-S", str(source), "-B", str(build), *arguments], ["--build", str(build)]):
            if code := subprocess.call(["cmake", *command]):
                sys.exit(f"hdpcomm: error: cmake {command[0]} ended with code {code}; its errors are above")

    @staticmethod
    def _check_compiler() -> None:
        """CMake tells of a missing compiler, too, above a traceback of pip's."""
        told = shlex.split(os.environ.get("CXX", ""))
        if not any(map(shutil.which, told[:1] or ("c++", "g++", "clang++"))):
            what = f"CXX is {told[0]}, which is not there" if told else "there is no c++, g++ or clang++ here"
            sys.exit(
                f"hdpcomm: error: {what}, and the core is compiled from C++20; install g++ 11 or newer (Debian, "
                "Ubuntu: apt install g++), or set CXX"
            )

    @staticmethod
    def _drop_stale(build: Path) -> None:
        """Removes a build directory that remembers tools of an isolated environment which pip has deleted since."""
        cache = build / "CMakeCache.txt"
        if not cache.exists():
            return
        text = cache.read_text()
        for name in ("CMAKE_MAKE_PROGRAM", "CMAKE_COMMAND"):
            match = re.search(rf"^{name}:\w+=(.*)$", text, re.MULTILINE)
            if match and match[1].startswith("/") and not Path(match[1]).exists():
                shutil.rmtree(build)
                return


setup(ext_modules=[CMakeExtension("hdpcomm._core")], cmdclass={"build_ext": CMakeBuild})
