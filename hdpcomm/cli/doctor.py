"""``hdpcomm doctor``: what this machine offers, and what of it hdpcomm can use."""

from __future__ import annotations

import argparse
import ctypes
import difflib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hdpcomm.cli.output import check_writable, write_json
from hdpcomm.errors import InvalidUsage

__all__ = ["Check", "add_parser", "checks", "unknown_variables"]


_PREFIX = "HDPCOMM_"
_OF_THE_BUILD = ("HDPCOMM_BUILD_TYPE",)  # setup.py reads it


def environment() -> list[dict[str, Any]]:
    """Every variable that hdpcomm reads; nothing where the core cannot be loaded.

    ``value`` is the text in force; ``error`` says why it is refused, else it is ``None``.
    """
    try:
        from hdpcomm import _core
    except ImportError:
        return []
    return [
        {
            "name": row.variable,
            "value": "(hidden)" if row.hidden and row.value else row.value,
            "default": row.default,
            "range": row.range,
            "meaning": row.meaning,
            "error": row.error,
        }
        for row in _core.settings_table()
    ]


def unknown_variables(given: Mapping[str, str] = os.environ) -> list[dict[str, str | None]]:
    """The variables with hdpcomm's prefix that it does not read; ``suggestion``: the name that is most like it."""
    known = [row["name"] for row in environment()]
    if not known:
        return []
    names = [name for name in sorted(given) if name.startswith(_PREFIX) and name not in (*known, *_OF_THE_BUILD)]
    return [{"name": name, "value": given[name], "suggestion": _nearest(name, known)} for name in names]


def _nearest(name: str, known: list[str]) -> str | None:
    # Without the prefix, which alone makes any two names alike.
    found = difflib.get_close_matches(name.removeprefix(_PREFIX), [each.removeprefix(_PREFIX) for each in known], 1)
    return _PREFIX + found[0] if found else None


def settings_lines(
    variables: list[dict[str, Any]], unknown: list[dict[str, str | None]], *, everything: bool
) -> list[str]:
    """Lines of the report: settings that differ from their defaults, or ``everything``; and what is unknown."""
    lines = []
    shown = [row for row in variables if everything or row["value"] != row["default"]]
    for row in shown:
        state = "bad " if row["error"] else ""
        lines.append(f"  {state}{row['name']}={row['value']} (default {row['default']})")
        lines.append(f"      {row['error'] or row['meaning'] + '; ' + row['range']}")
    for stranger in unknown:
        hint = f"did you mean {stranger['suggestion']}?" if stranger["suggestion"] else "--all shows the known ones"
        lines.append(f"  {stranger['name']}={stranger['value']} is unknown, nothing reads it; {hint}")
    if variables and len(shown) < len(variables):
        rest = "all" if not shown else "the others"
        lines.append(f"  {rest} at their defaults ({len(variables) - len(shown)}; --all shows them)")
    return lines


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``state``: ``ok``, ``off`` (hdpcomm works without it) or ``bad`` (it does not)."""

    topic: str
    name: str
    state: str
    detail: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine offers: versions, CUDA, settings",
        description="Prints versions, how the core was built, whether a CUDA driver is there, and the environment "
        "variables that differ from their defaults. Exit code 1 if something is missing that it needs, or a variable "
        "has a value that is refused.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")
    parser.add_argument("--all", action="store_true", help="show every environment variable that hdpcomm reads")
    parser.set_defaults(func=_doctor)


def checks() -> list[Check]:
    """Every check, in the order of the report; never raises for what is missing."""
    return [*_versions(), *_core(), *_cuda(), *_nccl()]


def _versions() -> list[Check]:
    rows = [Check("versions", "python", "ok", f"{platform.python_version()} at {sys.executable}")]
    libc = " ".join(platform.libc_ver())
    cores = len(os.sched_getaffinity(0))
    rows.append(
        Check(
            "versions",
            "system",
            "ok",
            f"{platform.system()} {platform.release()}, {platform.machine()}, {libc}, {cores} cores",
        )
    )
    for package in ("hdpcomm", "torch", "numpy", "rich", "PyYAML", "matplotlib"):
        try:
            rows.append(Check("versions", package, "ok", importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            if package == "hdpcomm":
                from hdpcomm import __version__

                rows.append(Check("versions", package, "ok", f"{__version__}, run from its source tree"))
            elif package == "matplotlib":
                rows.append(Check("versions", package, "off", "not installed; for --plot: pip install hdpcomm[plot]"))
            else:
                rows.append(Check("versions", package, "bad", f"not installed; pip install {package}"))
    return rows


def _core() -> list[Check]:
    try:
        from hdpcomm import _core
    except ImportError as error:
        return [Check("core", "hdpcomm._core", "bad", f"cannot be loaded ({error}); install hdpcomm again")]
    info = _core.build_info()
    rows = [Check("core", "hdpcomm._core", "ok", f"compiled by {info['compiler']}")]
    if info["cuda"]:
        rows.append(Check("core", "CUDA code", "ok", f"compiled with CUDA {info['cuda']}"))
    else:
        rows.append(Check("core", "CUDA code", "off", "this build is for CPUs only; install again where nvcc is found"))
    return rows


def _cuda() -> list[Check]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [Check("cuda", "driver", "off", "no libcuda.so.1 here; ranks run on the CPU")]
    code = driver.cuInit(0)
    if code:
        return [Check("cuda", "driver", "off", f"found, but cuInit gives error {code}; ranks run on the CPU")]
    version, devices = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(devices))
    rows = [
        Check(
            "cuda",
            "driver",
            "ok",
            f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}, {devices.value} devices",
        )
    ]
    for index in range(devices.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, 256, device)
        rows.append(Check("cuda", f"device {index}", "ok", name.value.decode()))
    return rows


def _nccl() -> list[Check]:
    try:
        from hdpcomm.comm.device.nccl_library import describe
    except ImportError:
        return []
    try:
        there, text = describe()
    except InvalidUsage as error:
        there, text = False, f"not looked for: {error}"
    return [Check("cuda", "nccl", "ok" if there else "off", text)]


def _doctor(options: argparse.Namespace) -> int:
    check_writable(options.json)
    rows = checks()
    variables, unknown = environment(), unknown_variables()
    topic = ""
    for row in rows:
        if row.topic != topic:
            topic = row.topic
            print(topic)
        print(f"  {row.state:<4}{row.name:<18}{row.detail}")
    print("environment")
    print("\n".join(settings_lines(variables, unknown, everything=options.all)))
    healthy = all(row.state != "bad" for row in rows) and not any(row["error"] for row in variables)
    if options.json:
        report = {"healthy": healthy, "checks": [asdict(row) for row in rows]}
        write_json(options.json, report | {"environment": variables, "unknown_variables": unknown})
    return 0 if healthy else 1
