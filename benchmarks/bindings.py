"""What a call into C++ costs by pybind11, by nanobind, and by nanobind on the stable ABI.

usage: python benchmarks/bindings.py [--rounds N]     (Python 3.12 or later; pip install pybind11 nanobind; g++)

The call does nothing and has the arguments of a collective: an address, a count, a type, a name and a deadline; it lets
go of the GIL. Each module is timed in processes of its own, in turns; medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = """
struct Calls {
  long calls = 0;
  long call(std::uintptr_t, long count, int, const std::string&, double) { return calls += count; }
};
%s {
  nb::class_<Calls>(m, "Calls")
      .def(nb::init<>())
      .def("call", &Calls::call, nb::arg("address"), nb::arg("count"), nb::arg("dtype"), nb::arg("op"),
           nb::arg("timeout"), nb::call_guard<nb::gil_scoped_release>());
}
"""
HEADS = {
    "pybind11": "#include <pybind11/pybind11.h>\nnamespace nb = pybind11;\n",
    "nanobind": "#include <nanobind/nanobind.h>\n#include <nanobind/stl/string.h>\nnamespace nb = nanobind;\n",
}
TIMED = """
import sys, timeit, {name}
call = {name}.Calls().call
for code in ("call(1 << 40, 1024, 3, 'sum', 60.0)", "call(1 << 40, 1024, 3, op='sum', timeout=60.0)"):
    print(1e9 * min(timeit.repeat(code, globals=globals(), number=200_000, repeat=3)) / 200_000)
"""


def build(folder: Path, name: str, library: str, *options: str) -> None:
    import nanobind
    import pybind11

    macro = f"{'PYBIND11_MODULE' if library == 'pybind11' else 'NB_MODULE'}({name}, m)"
    (folder / f"{name}.cpp").write_text(HEADS[library] + SOURCE % macro)
    own = Path(nanobind.__path__[0])
    includes = [Path(sysconfig.get_path("include")), Path(pybind11.get_include())]
    includes += [own / "include", own / "ext/robin_map/include"]
    command = [
        "g++",
        "-std=c++20",
        "-O3",
        "-DNDEBUG",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-strict-aliasing",
    ]
    command += [f"-I{each}" for each in includes] + [*options, f"{name}.cpp", "-o", f"{name}.so"]
    command += [str(own / "src/nb_combined.cpp")] if library == "nanobind" else []
    subprocess.run(command, cwd=folder, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        build(folder, "by_pybind11", "pybind11")
        build(folder, "by_nanobind", "nanobind")
        build(folder, "by_nanobind_abi3", "nanobind", "-DPy_LIMITED_API=0x030C0000")
        names = ("by_pybind11", "by_nanobind", "by_nanobind_abi3")
        found: dict[str, list[list[float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                command = [sys.executable, "-c", TIMED.format(name=name)]
                done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
                found[name].append([float(line) for line in done.stdout.split()])
        for name, rows in found.items():
            plain, named = (statistics.median(column) for column in zip(*rows, strict=True))
            size = (folder / f"{name}.so").stat().st_size
            print(f"{name}: {plain:.0f} ns, with two arguments by name {named:.0f} ns, {size:,} bytes")


if __name__ == "__main__":
    main()
