"""The options of ``hdpcomm perf``: those of nccl-tests, and its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from hdpcomm.cli.output import TRANSPORTS
from hdpcomm.options import count, num_bytes, positive

__all__ = ["OPS", "add_nccl_options", "add_own_options", "operation_name"]

OPS = (
    ("all_gather", "every rank gets all parts"),
    ("all_reduce", "every rank gets the sum"),
    ("reduce_scatter", "every rank gets its part of the sum"),
    ("broadcast", "the root's buffer goes to all"),
    ("reduce", "the root gets the sum"),
    ("gather", "the root gets all parts"),
    ("scatter", "every rank gets its part of the root's"),
    ("alltoall", "every rank sends a part to every rank"),
    ("alltoallv", "the same with unequal parts"),
    ("sendrecv", "every rank sends to the next one"),
    ("hypercube", "an all-gather by pairwise exchanges"),
    ("ring", "keys and values go round the ring, as in ring attention"),
)


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text!r}: give 0 or 1")
    return text == "1"


def _only(value: str, why: str) -> Callable[[str], str]:
    """An option of nccl-tests of which one value is possible here."""

    def check(text: str) -> str:
        if text != value:
            raise argparse.ArgumentTypeError(f"{text!r}: {why}; give {value}, or leave it out")
        return text

    return check


def operation_name(text: str) -> str:
    """The name of an operation, also as nccl-tests and other libraries spell it: allreduce, all-gather_perf."""
    plain = text.lower().replace("-", "_").removesuffix("_perf").replace("_", "")
    return next((name for name, _ in OPS if name.replace("_", "") == plain), text)


def _ranks_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give ranks separated by commas, like 0,3,1") from None


def _roots(text: str) -> tuple[int, ...] | None:
    if text in ("all", "-1"):
        return None
    return (_whole(text),)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part for part in text.split(",") if part)
    if not names:
        raise argparse.ArgumentTypeError("give at least one name")
    return names


def add_nccl_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    one = _only("1", "a rank is one process with one device here, and --ranks N starts N of them")
    add("-t", "--nthreads", type=one, metavar="1", help="threads of a process: only 1")
    add("-g", "--ngpus", type=one, metavar="1", help="devices of a thread: only 1")
    add("-b", "--minbytes", type=num_bytes, default="32M", metavar="SIZE", help="first size (default 32M)")
    add("-e", "--maxbytes", type=num_bytes, metavar="SIZE", help="last size (default 32M, or -b if that is larger)")
    step = group.add_mutually_exclusive_group()
    step.add_argument(
        "-i", "--stepbytes", type=num_bytes, metavar="SIZE", help="add to reach the next size (default 1M)"
    )
    step.add_argument("-f", "--stepfactor", type=_whole, metavar="N", help="multiply to reach the next size")
    add("-n", "--iters", type=count, default=20, metavar="N", help="iterations of a size (default %(default)s)")
    add(
        "-w",
        "--warmup_iters",
        type=_whole,
        default=1,
        metavar="N",
        help="untimed iterations first (default %(default)s)",
    )
    add(
        "-m",
        "--agg_iters",
        type=count,
        default=1,
        metavar="N",
        help="operations started together (default %(default)s)",
    )
    add("-N", "--run_cycles", type=_whole, default=1, metavar="N", help="repeat the sweep; 0: for ever (default 1)")
    add("-c", "--check", type=_whole, default=1, metavar="N", help="checks of the data of a size (default 1; 0: none)")
    add("-o", "--op", dest="redop", type=_names, metavar="OP", help="sum, prod, min, max, avg, a list, or all")
    add(
        "-d",
        "--datatype",
        type=_names,
        default=("float",),
        metavar="TYPE",
        help="float, half, int32, ..., a list, or all",
    )
    add("-r", "--root", type=_roots, default=argparse.SUPPRESS, metavar="RANK", help="root, or all (default 0)")
    add(
        "-z", "--blocking", type=_whole, default=0, metavar="0..3", help="1: barrier after each; 2, 3: start, then wait"
    )
    add("-T", "--timeout", type=positive, metavar="S", help="seconds that an operation may take")
    add("-C", "--report_cputime", type=_switch, default=False, metavar="0/1", help="time of starting an operation only")
    add("-a", "--average", type=_whole, default=1, metavar="0..3", help="time of rank 0, mean, min or max (default 1)")
    add("-M", "--memory", type=_switch, nargs="?", const=True, default=False, metavar="0/1", help="report memory used")
    add("-u", "--unalign", type=_whole, default=0, metavar="N", help="index of the first element (default 0)")
    add(
        "-R",
        "--local_register",
        type=_switch,
        default=False,
        metavar="0/1",
        help="1: allocate buffers of hdpcomm by comm.empty(), which is fastest for messages",
    )
    add(
        "-I", "--per_iter_timing", type=_switch, nargs="?", const=True, default=False, metavar="0/1", help="percentiles"
    )
    add(
        "-K",
        "--per_iter_skip",
        type=_whole,
        default=0,
        metavar="N",
        help="leave the first N iterations out of the percentiles (default 0)",
    )
    add("-S", "--report_timestamps", type=_switch, default=False, metavar="0/1", help="the time at the end of a row")
    for short, long, why in (
        ("-p", "--parallel_init", "ranks are processes, which always join at the same time"),
        ("-y", "--stream_null", "operations run on streams of hdpcomm's own"),
        ("-G", "--cudagraph", "each iteration is started by itself; docs/device.md shows operations in a CUDA graph"),
        ("-x", "--cta_policy", "no operation holds thread blocks while it waits"),
        ("-D", "--device_implementation", "choose by --transport and --algorithm"),
        ("-V", "--device_cta_count", "choose by --transport and --algorithm"),
    ):
        add(short, long, type=_only("0", why), metavar="0", help=f"only 0: {why}")
    add(
        "-J", "--json", "--output_file", dest="output_file", type=Path, metavar="FILE",
        help="write JSON (version 3 of nccl-tests' format)",
    )  # fmt: skip


def add_own_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--ranks", type=count, metavar="N", help="start N ranks here (default 2; under a launcher: its ranks)")
    add(
        "--subset",
        type=_ranks_list,
        action="append",
        metavar="0,3,1",
        help="only these ranks, in this order; repeatable",
    )
    add("--algorithm", default="auto", metavar="NAME", help="(default %(default)s)")
    add("--transport", choices=TRANSPORTS, default="auto", help="(default %(default)s)")
