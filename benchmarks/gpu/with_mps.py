"""Runs a command with CUDA's Multi-Process Service, so that processes share the GPU at the same time.

usage: with_mps.py COMMAND...

Without it, processes get time slices of milliseconds, in which messages between them wait. The service is started for
the command alone, with a folder of its own, and ended after it; where it cannot be started, the command runs without.
The command finds HDPCOMM_MPS=1 if it runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

CONTROL = "nvidia-cuda-mps-control"


def control(environment: dict[str, str], *arguments: str, text: str = "") -> bool:
    try:
        done = subprocess.run(
            [CONTROL, *arguments], env=environment, input=text, text=True, timeout=20, check=False,
            stdout=subprocess.DEVNULL, stderr=sys.stderr,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{CONTROL}: {error}", file=sys.stderr)
        return False
    return done.returncode == 0


def main(command: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="hdpcomm-mps-") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **own}
        if not control(environment, "-d"):
            print("processes get time slices: the Multi-Process Service cannot be started", file=sys.stderr)
            return subprocess.run(command, check=False).returncode
        try:
            return subprocess.run(command, env={**environment, "HDPCOMM_MPS": "1"}, check=False).returncode
        finally:
            control(environment, text="quit\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
