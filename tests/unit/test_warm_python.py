"""tests/warm_python.py: what starts there does what a new interpreter does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_python import Python, run_python

CODES = {
    "an exit code": "import sys; sys.exit(3)",
    "a message": "import sys; sys.exit('no such thing')",
    "both outputs": "import sys; print('here'); print('there', file=sys.stderr)",
    "the end": "import atexit; atexit.register(print, 'last'); print('first')",
    "a signal": "import os; os.write(1, b'dies'); os.kill(os.getpid(), 9)",
    "arguments": "import sys; print(sys.argv)",
    "its place": "import os; print(os.getcwd(), sorted(os.environ))",
    "its name": "print(__name__)",
}


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
        assert (done.returncode, done.stdout, done.stderr) == (new.returncode, new.stdout, new.stderr)


def test_one_that_does_not_end() -> None:
    with Python(["-c", "import time; time.sleep(60)"], merged=True) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        assert process.poll() is None
        process.kill()
        assert process.communicate(60) == ("", "")
    assert process.returncode == -9
