"""`.ci/rooms` on this tree, and on small trees with a line that needs a room above its own, or that closes a circle."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.planted import TOP, run_check, run_planted

SOUND = {
    "csrc/base/error.hpp": "#include <string>\n",
    "csrc/transport/transport.hpp": '#pragma once\n\n#include "base/error.hpp"\n',
    "csrc/transport/host/layout.hpp": '#include "transport/transport.hpp"\n',
    "csrc/transport/host/shm.cpp": '#include "layout.hpp"\n',
    "hdpcomm/__init__.py": "from hdpcomm.errors import Error\n",
    "hdpcomm/errors.py": "class Error(Exception): ...\n",
    "hdpcomm/comm/__init__.py": "from hdpcomm.comm.work import Work\n",
    "hdpcomm/comm/work.py": "from hdpcomm import _core\nfrom hdpcomm.errors import Error\n",
}


@pytest.fixture
def planted(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the check on the sound tree with other files written into it."""
    return lambda files: run_planted("rooms", tmp_path, {**SOUND, **files})


def test_this_tree_is_in_order() -> None:
    done = run_check("rooms")
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(": 0 out of order, 0 circles\n")
    includes, imports = map(int, re.findall(r"(\d+) (?:includes|imports)", done.stdout))
    assert includes > 100
    assert imports > 200


def test_the_documentation_tells_the_order_that_is_checked() -> None:
    source = (TOP / ".ci/rooms").read_text()
    namespace: dict[str, tuple[str, ...]] = {}
    exec(source[source.index("CORE = ") : source.index("INCLUDE = ")], namespace)
    text = " ".join((TOP / "docs/architecture.md").read_text().split())
    for order in (namespace["CORE"], namespace["PLANNER"], namespace["PACKAGE"]):
        assert f"`{', '.join(order)}`" in text


def test_a_sound_tree_passes(planted: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = planted({})
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 includes and 2 imports between rooms: 0 out of order, 0 circles" in done.stdout


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        (
            "csrc/base/error.hpp",
            '\n  #  include "transport/transport.hpp"\n',
            "csrc/base/error.hpp:2: base includes csrc/transport/transport.hpp, but transport is above base",
        ),
        (
            "csrc/kernels/sum.cu",
            '#include "../transport/host/layout.hpp"\n',
            "csrc/kernels/sum.cu:1: kernels includes csrc/transport/host/layout.hpp, but transport is above kernels",
        ),
        (
            "csrc/planner/model/plan.hpp",
            '#include "planner/bound/bound.hpp"\n',
            "csrc/planner/model/plan.hpp:1: model includes csrc/planner/bound/bound.hpp, but bound is above model",
        ),
        (
            "hdpcomm/comm/late.py",
            "def f():\n    from hdpcomm.attention.ring import run\n",
            "hdpcomm/comm/late.py:2: comm imports hdpcomm/attention/ring.py, but attention is above comm",
        ),
        (
            "hdpcomm/comm/typed.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .. import attention\n",
            "hdpcomm/comm/typed.py:3: comm imports hdpcomm/attention/__init__.py, but attention is above comm",
        ),
        (
            "hdpcomm/errors.py",
            "import hdpcomm._core.base\n",
            "hdpcomm/errors.py:1: errors imports hdpcomm/_core, but _core is above errors",
        ),
    ],
)
def test_what_needs_a_room_above_is_named(
    planted: Callable[..., subprocess.CompletedProcess[str]], file: str, text: str, says: str
) -> None:
    above = ("hdpcomm/attention/__init__.py", "hdpcomm/attention/ring.py", "csrc/planner/bound/bound.hpp")
    done = planted({**dict.fromkeys(above, ""), file: text})
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == says
    assert ": 1 out of order, " in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("file", "text", "verb", "circle"),
    [
        (
            "csrc/transport/transport.hpp",
            '#include "host/layout.hpp"\n',
            "include",
            {"csrc/transport/transport.hpp", "csrc/transport/host/layout.hpp"},
        ),
        (
            "hdpcomm/comm/work.py",
            "def f():\n    from hdpcomm.comm import Work\n",
            "import",
            {"hdpcomm/comm/__init__.py", "hdpcomm/comm/work.py"},
        ),
        (
            "hdpcomm/comm/work.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import Work\n",
            "import",
            {"hdpcomm/comm/__init__.py", "hdpcomm/comm/work.py"},
        ),
    ],
)
def test_files_in_a_circle_are_named(
    planted: Callable[..., subprocess.CompletedProcess[str]], file: str, text: str, verb: str, circle: set[str]
) -> None:
    done = planted({file: text})
    assert done.returncode == 1
    first, last = done.stdout.splitlines()
    files, says = first.split(": ")
    assert says == f"these files {verb} each other in a circle"
    assert set(files.split(" <- ")) == circle
    assert last.endswith(": 0 out of order, 1 circles")


def test_a_header_of_the_planner_and_its_source_are_one_file(
    planted: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = planted(
        {
            "csrc/planner/bound/bound.hpp": "",
            "csrc/planner/bound/bound.cpp": '#include "windows.hpp"\n',
            "csrc/planner/bound/windows.hpp": "",
            "csrc/planner/bound/windows.cpp": '#include "bound.hpp"\n',
        }
    )
    assert done.returncode == 1
    files, says = done.stdout.splitlines()[0].split(": ")
    assert set(files.split(" <- ")) == {"csrc/planner/bound/bound", "csrc/planner/bound/windows"}
    assert says == "these files include each other in a circle"


def test_each_circle_is_named(planted: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = planted(
        {
            "csrc/transport/transport.hpp": '#include "host/layout.hpp"\n',
            "hdpcomm/comm/work.py": "from hdpcomm.errors import Error\nfrom hdpcomm.comm import joining, Work\n",
            "hdpcomm/comm/joining.py": "import hdpcomm.comm.work\n",
        }
    )
    assert done.returncode == 1
    assert done.stdout.endswith(": 0 out of order, 3 circles\n")


def test_an_unknown_room_asks_for_a_place(planted: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = planted({"hdpcomm/attic/__init__.py": "from hdpcomm import errors\n"})
    assert done.returncode == 2
    assert "'attic' has no place in the order" in done.stderr


def test_nothing_to_read_is_no_success(tmp_path: Path) -> None:
    done = run_check("rooms", tmp_path)
    assert done.returncode == 2
    assert "give the top of the tree" in done.stderr


def test_plans_and_simulations_know_nothing_of_torch() -> None:
    code = "import sys, hdpcomm.plan, hdpcomm.sim, hdpcomm.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False, cwd=TOP).returncode == 0
