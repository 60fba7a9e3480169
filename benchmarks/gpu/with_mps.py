"""Runs a command with CUDA's Multi-Process Service, so that processes share the GPU at the same time.

usage: with_mps.py COMMAND...

Without it, processes get time slices of milliseconds, in which messages between them wait. The service is started for
the command alone, with a folder of its own, and ended after it, also when this process is killed; where it cannot be
started, the command runs without. The command finds HDPCOMM_MPS=1 if it runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile

CONTROL = "nvidia-cuda-mps-control"
# A process of its own session: its input ends with this one, however that goes.
END = f'cat >/dev/null; echo quit | {CONTROL}; rm -rf "$CUDA_MPS_PIPE_DIRECTORY"'


def starts(environment: dict[str, str]) -> bool:
    """Whether the service runs now."""
    try:
        done = subprocess.run([CONTROL, "-d"], env=environment, timeout=20, check=False, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{CONTROL}: {error}", file=sys.stderr)
        return False
    return done.returncode == 0


def main(command: list[str]) -> int:
    folder = tempfile.mkdtemp(prefix="hdpcomm-mps-")
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    if not starts(environment):
        shutil.rmtree(folder)
        print("processes get time slices: the Multi-Process Service cannot be started", file=sys.stderr)
        return subprocess.run(command, check=False).returncode
    end = subprocess.Popen(
        ["sh", "-c", END], env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return subprocess.run(command, env={**environment, "HDPCOMM_MPS": "1"}, check=False).returncode
    finally:
        assert end.stdin is not None
        end.stdin.close()
        try:
            end.wait(20)
        except subprocess.TimeoutExpired:
            print(f"{CONTROL} has not ended the service within 20 s", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
