"""Instructions that 8-byte operations take from Python, by callgrind: hdpcomm's and torch.distributed's on two ranks.

Rank 0 runs under valgrind, rank 1 beside it without, so that messages are mostly there when rank 0 looks. Blocks of a
few calls are counted one by one, and blocks of an empty loop; a call's figure is the smallest block's, less the empty
one's: a block in which rank 0 waited counts more. ``--python`` may be given more than once, to compare builds. Needs
valgrind and two cores. Usage: ``python benchmarks/instructions.py [--python PATH ...] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CALLS = 4  # of a block
BLOCKS = 40  # of an operation
WARM_UP = 20
OPERATIONS = ("nothing", "exchange", "all_reduce", "dist.all_reduce")


def run_rank() -> None:
    """Both ranks. Callgrind writes one file a block: it dumps its counts before each call of getppid."""
    import torch
    import torch.distributed as dist

    import hdpcomm as hdp
    import hdpcomm.torch_backend

    dist.init_process_group("hdpcomm")
    with hdp.init(transport="shm", timeout=600) as comm:
        x, y = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        peer = 1 - comm.rank

        def exchange() -> None:
            comm.exchange([(x, peer)], [(y, peer)])

        def all_reduce() -> None:
            comm.all_reduce(x)

        def dist_all_reduce() -> None:
            dist.all_reduce(x)

        for operation in (lambda: None, exchange, all_reduce, dist_all_reduce):
            for _ in range(WARM_UP):
                operation()
            for _ in range(BLOCKS):
                os.getppid()
                for _ in range(CALLS):
                    operation()
            os.getppid()
    dist.destroy_process_group()


def blocks_of(folder: Path) -> list[int]:
    """The instructions of every dump, in order."""
    dumps = sorted(folder.glob("counts.*"), key=lambda path: int(path.suffix[1:]))
    found = []
    for dump in dumps:
        match = re.search(r"^(?:totals|summary): (\d+)", dump.read_text(), re.MULTILINE)
        found.append(int(match[1]) if match else 0)
    return found


def measure(python: str) -> dict[str, Any]:
    """The figures of one interpreter and the hdpcomm that it imports."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HDPCOMM_SPIN_US": "1000000",  # a peer that yields or sleeps would answer late
    }
    with tempfile.TemporaryDirectory() as folder:
        counted = [
            "valgrind",
            "--tool=callgrind",
            "--dump-before=getppid",
            f"--callgrind-out-file={folder}/counts",
            "--quiet",
        ]
        program = [python, __file__, "--rank"]
        other = subprocess.Popen(program, env=environment | {"RANK": "1", "LOCAL_RANK": "1"})
        try:
            subprocess.run([*counted, *program], env=environment | {"RANK": "0", "LOCAL_RANK": "0"}, check=True)
        finally:
            other.wait(60)
        counts = blocks_of(Path(folder))
    # The first dump of an operation holds what was before its first block.
    rows = {}
    for i, name in enumerate(OPERATIONS):
        first = i * (BLOCKS + 1) + 1
        rows[name] = counts[first : first + BLOCKS]
    empty = min(rows["nothing"])
    figures = {name: (min(rows[name]) - empty) // CALLS for name in OPERATIONS[1:]}
    return {"python": python, "instructions": figures, "blocks": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", metavar="PATH", help="interpreter with hdpcomm; default this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank()
        return
    if shutil.which("valgrind") is None:
        parser.error("there is no valgrind here; install it (apt-get install valgrind)")
    results = [measure(python) for python in arguments.python or [sys.executable]]
    print(f"{'operation':<18}{'instructions a call':>20}  python")
    for result in results:
        for name, count in result["instructions"].items():
            print(f"{name:<18}{count:>20}  {result['python']}")
    if arguments.json:
        document = {"machine": platform.processor() or platform.machine(), "calls": CALLS, "results": results}
        arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
