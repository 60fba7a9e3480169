"""`.ci/style` on this tree, and on small trees with a sentence that begins with "Of", a docstring, or parameters."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.planted import run_check, run_planted

SOUND = {
    "csrc/base/error.hpp": '// What the peer sent.\nconst char* kText = "// Of a peer";  // says "of whom"\n',
    "csrc/base/raw.cpp": "auto text = R\"x(\n// Of a string\n)x\";\nint big = 1'000'000;\n",
    "hdpcomm/comm/work.py": (
        '"""Work. Offload comes later, and a list of Of-words."""\n'
        'text = "# Of a string"  # the rest of it\n'
        'names = ["Of all"]\n\n\n'
        "class Work:\n"
        "    def wait(self, a, b, c, d, e, f, g, h, *, i, j): ...\n"
    ),
    "tests/test_many.py": "def test(a, b, c, d, e, f, g, h, i, j, k): ...\n",
}


@pytest.fixture
def planted(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the check on the sound tree with other files written into it."""
    return lambda files: run_planted("style", tmp_path, {**SOUND, **files})


def test_this_tree_keeps_the_rules() -> None:
    done = run_check("style")
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) > 500


def test_a_sound_tree_passes(planted: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = planted({})
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "4 files: 0 places\n")


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("csrc/a.hpp", "int a;\n// Of the last find().\nint b;\n", 2),
        ("csrc/a.hpp", "int a;  // Of the last find().\n", 1),
        ("csrc/a.cpp", "// The cost of a wave. It is\n// not free. Of a pipeline, only\n// one end counts.\n", 2),
        ("csrc/a.cu", "/* Waits.\n * Of the streams, one. */\n", 2),
        ("csrc/a.cuh", "/// Of a stream.\n", 1),
        ("hdpcomm/a.py", '"""Of a module."""\n', 1),
        ("hdpcomm/a.py", 'x = 1\n"""Of a constant."""\n', 2),
        ("hdpcomm/a.py", "def f():\n    '''Adds.\n\n    Of the rows, the first.\n    '''\n", 4),
        ("hdpcomm/a.py", 'class A:\n    """Adds what it gets. Of\n    the rows, the first."""\n', 2),
        ("hdpcomm/a.py", 'def f(a):\n    """Adds.\n\n    Args:\n        a: Of the rows.\n    """\n', 5),
        ("hdpcomm/a.py", "# Adds (as `numpy`.) Of two rows,\n# the first.\n", 1),
        ("hdpcomm/a.py", "x = 1  #: Of a constant.\n", 1),
        ("hdpcomm/a.py", "x = 1  # a row\n# Of all rows, the first.\n", 2),
        ("hdpcomm/a.pyi", "def f() -> None: ...  # Of a stub\n", 1),
        ("tests/a.py", "def test():\n    # Adds.\n    # (Of two rows, the first.)\n    pass\n", 3),
    ],
)
def test_a_sentence_that_begins_with_of_is_named(
    planted: Callable[..., subprocess.CompletedProcess[str]], file: str, text: str, line: int
) -> None:
    done = planted({file: text})
    assert done.returncode == 1
    first, last = done.stdout.splitlines()
    assert first.startswith(f'{file}:{line}: a sentence begins with "Of": "Of ')
    assert last == "5 files: 1 places"


@pytest.mark.parametrize(
    "text", ["What it has.", "That of the job.", "Those of a rank.", "Round passes.", "The same rows."]
)
def test_a_docstring_that_points_at_nothing_is_named(
    planted: Callable[..., subprocess.CompletedProcess[str]], text: str
) -> None:
    done = planted({"hdpcomm/a.py": f'def f():\n    """{text}"""\n', "tests/a.py": f'"""{text}"""\n'})
    assert done.returncode == 1
    first, last = done.stdout.splitlines()
    assert first.startswith('hdpcomm/a.py:2: a docstring begins with "')
    assert last == "6 files: 1 places"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def many(a, b, c, d, e, f, g, h, i, j, k): ...\n", 11),
        ("async def many(a, b, c, d, e, f, *, g, h, i, j, k, m): ...\n", 12),
        ("class A:\n    def many(self, a, b, c, d, e, f, g, h, i, *args, **kwargs): ...\n", 11),
        ("def outer():\n    def many(a, /, b, c, d, e, f, g, h, i, j, k): ...\n", 11),
    ],
)
def test_a_function_of_many_parameters_is_named(
    planted: Callable[..., subprocess.CompletedProcess[str]], text: str, count: int
) -> None:
    done = planted({"hdpcomm/comm/many.py": text})
    assert done.returncode == 1
    assert f": many has {count} parameters, more than 10; put what is rarely given into" in done.stdout


def test_an_exception_is_for_as_many_parameters_as_it_says(
    planted: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    names = "abcdefghijklmno"
    for count, code in ((11, 0), (12, 1), (10, 1)):
        done = planted({"hdpcomm/attention/api.py": f"def ring_attention({', '.join(names[:count])}): ...\n"})
        assert done.returncode == code, done.stdout
    assert "ring_attention is an exception of .ci/style and needs none" in done.stdout


def test_nothing_to_read_is_no_success(tmp_path: Path) -> None:
    done = run_check("style", tmp_path)
    assert done.returncode == 2
    assert "give the top of the tree" in done.stderr
