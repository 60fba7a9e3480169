"""The entry point by which `import torch` makes the backend known."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
before = "hdpcomm.torch_backend" in sys.modules
print(int("hdpcomm" in dist.Backend.backend_list), int(before))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("hdpcomm", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
import hdpcomm.torch_backend
print(x.tolist(), type(dist.group.WORLD).__name__)
dist.destroy_process_group()
"""


def installed(folder: Path) -> None:
    """What an installed package has besides its files: its entry points, as pyproject.toml names them."""
    groups = runpy.run_path(str(TOP / "tools/requirements.py"))["PROJECT"]["project"]["entry-points"]
    metadata = folder / "hdpcomm_for_a_test-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hdpcomm-for-a-test\nVersion: 1.0\n")
    text = ""
    for group, entries in groups.items():
        text += f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
    (metadata / "entry_points.txt").write_text(text)


@pytest.mark.parametrize("on", [True, False])
def test_importing_torch_makes_the_backend_known(tmp_path: Path, on: bool) -> None:
    installed(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{TOP}", "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(on))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if on:
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["1 0", "[1.0, 1.0, 1.0] HdpProcessGroup"]
    else:
        assert done.returncode != 0
        assert done.stdout.splitlines()[0] == "0 0"
