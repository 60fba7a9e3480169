"""tests/harness/warm_python.py: what starts there does what a new interpreter does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.warm_python import Python, run_python

CODES = {
    "an exit code": "import sys; sys.exit(3)",
    "a message": "import sys; sys.exit('no such thing')",
    "both outputs": "import sys; print('here'); print('there', file=sys.stderr)",
    "the end": "import atexit; atexit.register(print, 'last'); print('first')",
    "a signal": "import os; os.write(1, b'dies'); os.kill(os.getpid(), 9)",
    "arguments": "import sys; print(sys.argv)",
    "its place": "import os; print(os.getcwd(), sorted(os.environ))",
    "its name": "print(__name__)",
    "its parent": "import os; print(os.getppid() == int(os.environ.get('PARENT', os.getppid())))",
    "an error": "1 / 0",
    "a termination": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(60)",
}
STARTS = """
import json, os, subprocess, sys
from tests.harness.warm_children import fork_python_programs
from tests.harness.warm_python import run_child

fork_python_programs(run_child)
environment = {**os.environ, "PARENT": str(os.getpid())}
done = [
    subprocess.run(
        [sys.executable, "-u", *arguments], capture_output=True, text=True, env=environment, start_new_session=True
    )
    for arguments in json.loads(sys.argv[1])
]
print(json.dumps([(one.returncode, one.stdout, one.stderr.splitlines()[-1:]) for one in done]))
"""


@pytest.mark.parametrize("name", CODES)
def test_as_a_new_interpreter(name: str, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "OF_THIS_TEST": "1", "LC_CTYPE": "C.UTF-8"}
    script = tmp_path / "script.py"
    script.write_text(CODES[name])
    (tmp_path / "module.py").write_text(CODES[name])
    for arguments in (["-c", CODES[name], "-x"], [str(script), "-x"], ["-m", "module", "-x"]):
        done = run_python(arguments, timeout=60, env=environment, cwd=tmp_path)
        new = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path
        )
        assert (done.returncode, done.stdout, _last(done)) == (new.returncode, new.stdout, _last(new))


def test_programs_that_it_starts(tmp_path: Path) -> None:
    """As torchrun starts its ranks: each a child in a session of its own."""
    top = Path(__file__).parents[2]
    (tmp_path / "module.py").write_text(CODES["arguments"])
    asked = [["-c", code, "-x"] for name, code in CODES.items() if name not in ("its place", "an exit code")]
    asked += [["-m", "module", "-x"], [str(tmp_path / "module.py"), "-x"], ["-c", CODES["an exit code"]]]
    found = run_python(
        ["-c", f"import sys; sys.path.append({str(top)!r})\n{STARTS}", json.dumps(asked)], timeout=60, cwd=tmp_path
    )
    assert not found.stderr
    for arguments, (code, out, last) in zip(asked, json.loads(found.stdout), strict=True):
        new = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert (code, out, last) == (new.returncode, new.stdout, _last(new)), arguments


def _last(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The last line of stderr: those before it name the files and lines that lead to an error."""
    return done.stderr.splitlines()[-1:]


def test_one_that_does_not_end() -> None:
    with Python(["-c", "import time; time.sleep(60)"], merged=True) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        assert process.poll() is None
        process.kill()
        assert process.communicate(60) == ("", "")
    assert process.returncode == -9


def test_garbage_is_not_looked_for_in_what_was_imported() -> None:
    done = run_python(["-c", "import gc; print(gc.get_freeze_count())"], timeout=60)
    assert int(done.stdout) > 100_000
