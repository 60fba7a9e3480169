"""Messages between two hosts, one way and both ways at once, against gloo and a bare TCP connection in the same run.

    sudo python benchmarks/host_links.py --mbit 200 1000 0 --json FILE

The hosts are network namespaces of this machine, with links shaped by tc (0: as fast as the machine moves bytes), one
rank on each. Every round moves the same buffers by hdpcomm, by gloo and by one TCP connection, in turns; figures are
medians of the rounds. ``8 B`` is half of a round trip. Needs root, ip and tc.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
WAYS = ("one way", "both ways", "8 B")
SMALL_TURNS = 50


def connection(rank: int) -> socket.socket:
    """The two ranks' connection, its buffers and all else as the system has them."""
    place = (os.environ["MASTER_ADDR"], 29500)
    if rank == 0:
        with socket.create_server(("", place[1])) as server:
            return server.accept()[0]
    limit = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(place)
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)


def on_rank(file: Path, mib: int, rounds: int) -> int:
    import torch
    import torch.distributed as dist

    import hdpcomm as hdp

    rank = int(os.environ["HOST_RANKS"])
    peer = 1 - rank
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "eth0"}
    torch.set_num_threads(1)
    mine, theirs = (torch.zeros(mib << 20, dtype=torch.uint8) for _ in range(2))
    wire = connection(rank)

    def over_wire(send: torch.Tensor | None, receive: torch.Tensor | None) -> None:
        sender = threading.Thread(target=wire.sendall, args=(b"" if send is None else send.numpy().data,))
        sender.start()
        if receive is not None:
            place = receive.numpy().data
            while place:
                place = place[wire.recv_into(place) :]
        sender.join()

    with hdp.init(timeout=120) as world:
        dist.init_process_group("gloo", f"tcp://{os.environ['MASTER_ADDR']}:29600", rank=rank, world_size=2)

        def over_gloo(send: torch.Tensor | None, receive: torch.Tensor | None) -> None:
            works = [] if receive is None else [dist.irecv(receive, peer)]
            works += [] if send is None else [dist.isend(send, peer)]
            for work in works:
                assert work is not None
                work.wait()

        def over_hdpcomm(send: torch.Tensor | None, receive: torch.Tensor | None) -> None:
            if send is not None and receive is not None:
                world.exchange([(send, peer)], [(receive, peer)])
            elif send is not None:
                world.send(send, peer)
            elif receive is not None:
                world.recv(receive, peer)

        def seconds(move: Callable[[torch.Tensor | None, torch.Tensor | None], None], way: str) -> float:
            world.barrier()
            started = time.perf_counter()
            if way == "both ways":
                move(mine, theirs)
                return time.perf_counter() - started
            turns, size = (1, mine.numel()) if way == "one way" else (SMALL_TURNS, 8)
            for _ in range(turns):
                for sends in (rank == 0, rank == 1):
                    here = mine if sends else theirs
                    part = here[: size if sends == (rank == 0) or way == "8 B" else 8]
                    move(part if sends else None, None if sends else part)
            return (time.perf_counter() - started) / (turns if way == "one way" else 2 * turns)

        moves = {"hdpcomm": over_hdpcomm, "gloo": over_gloo, "TCP": over_wire}
        found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in moves}
        for number in range(rounds + 1):  # the first one warms up
            for way in WAYS:
                for name, move in moves.items():
                    took = seconds(move, way)
                    if number:
                        found[name][way].append(took)
        if rank == 0:
            file.write_text(json.dumps(found))
        world.barrier()
        dist.destroy_process_group()
    return 0


def run_case(mbit: int, mib: int, rounds: int, file: Path) -> dict[str, Any]:
    """Starts the ranks; link of ``mbit`` Mbit/s."""
    from tests.harness.hosts import Hosts

    with Hosts(2) as hosts:
        if mbit:
            hosts.limit(mbit)
        hosts.ranks(["benchmarks.host_links", f"--on-rank={file}", f"--mib={mib}", f"--rounds={rounds}"], range(2))
        hosts.finish(600)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[200, 1000, 0], help="Mbit/s (default %(default)s)")
    parser.add_argument("--mib", type=int, default=32, help="MiB of a message (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are timed (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--on-rank", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank:
        return on_rank(options.on_rank, options.mib, options.rounds)
    import tempfile

    from tests.harness.hosts import why_not

    if reason := why_not():
        sys.exit(f"this machine cannot make hosts: {reason}")
    cases = {}
    print(f"messages of {options.mib} MiB; MB/s, and us of 8 B; medians of {options.rounds} rounds\n")
    print("| link, Mbit/s | by | one way | both ways, each | 8 B, us |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for mbit in options.mbit:
            cases[str(mbit)] = found = run_case(mbit, options.mib, options.rounds, Path(folder) / "found.json")
            for name, ways in found.items():
                one, both, small = (statistics.median(ways[way]) for way in WAYS)
                rates = " | ".join(f"{(options.mib << 20) / took / 1e6:.1f}" for took in (one, both))
                print(f"| {mbit or 'not shaped'} | {name} | {rates} | {small * 1e6:.0f} |", flush=True)
    if options.json:
        about = {"date": date.today().isoformat(), "machine": platform.platform(), "cores": os.cpu_count()}
        sizes = {"mib": options.mib, "rounds": options.rounds}
        options.json.write_text(json.dumps(about | sizes | {"seconds": cases}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
