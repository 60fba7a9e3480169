"""``hdpcomm perf``: measures one operation as nccl-tests does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdpcomm.cli.output import TRANSPORTS, check_writable, ranks_here, write_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.options import count, num_bytes, positive, whole

if TYPE_CHECKING:
    from hdpcomm.perf.config import PerfConfig
    from hdpcomm.perf.results import Report

__all__ = ["OPS", "add_parser", "operation_name"]

WRONG_DATA = 7

_EPILOG = """sizes are bytes, with K, M, G for binary units. Exit codes: 0 all right, 1 an internal error, 2 a device,
3 a rank died or disagreed, 4 a timeout, 6 bad usage, 7 wrong data.

examples:
  hdpcomm perf all_reduce --ranks 4 -b 8 -e 64M -f 2
  hdpcomm perf all_gather --ranks 4 -b 1K -e 1M -f 4 --subset 0,3,1
  hdpcomm perf sendrecv -b 8 -e 8 -n 1000 -I -J now.json
  torchrun --nproc-per-node 4 -m hdpcomm.cli.main perf alltoall -b 1M -e 1M
  mpirun -n 4 hdpcomm perf broadcast -b 1M -e 1M -r 2
"""


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
    ("ring", "keys and values go round the ring, as in ring attention"),
)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text!r}: give 0 or 1")
    return text == "1"


_WAITED = "each operation is waited for before the next"
_ONLY = (
    ("-t", "--nthreads", "1", "a rank is one process with one device here, and --ranks N starts N of them"),
    ("-g", "--ngpus", "1", "a rank is one process with one device here, and --ranks N starts N of them"),
    ("-m", "--agg_iters", "1", _WAITED),
    ("-z", "--blocking", "0", _WAITED),
    ("-C", "--report_cputime", "0", _WAITED),
    ("-G", "--cudagraph", "0", "each iteration is started by itself; docs/device.md shows operations in a CUDA graph"),
    ("-a", "--average", "1", "a time is the mean of the ranks"),
    ("-K", "--per_iter_skip", "0", "-w runs iterations that do not count"),
    ("-M", "--memory", "0", "hdpcomm fit tells what ranks take"),
    ("-S", "--report_timestamps", "0", "the file of -J has the times of begin and end"),
    ("-p", "--parallel_init", "0", "ranks are processes, which always join at the same time"),
    ("-y", "--stream_null", "0", "operations run on streams of hdpcomm's own"),
    ("-x", "--cta_policy", "0", "no operation holds thread blocks while it waits"),
    ("-D", "--device_implementation", "0", "choose by --transport and --algorithm"),
    ("-V", "--device_cta_count", "0", "choose by --transport and --algorithm"),
)
"""Options of nccl-tests of which one value is possible here, its default there, and why."""


def _only(value: str, why: str) -> Callable[[str], str]:
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
    return (whole(text),)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part for part in text.split(",") if part)
    if not names:
        raise argparse.ArgumentTypeError("give at least one name")
    return names


def add_nccl_options(group: argparse._ArgumentGroup) -> None:
    """Options that are given get into the namespace by the names of the fields of ``PerfConfig``."""
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    for short, long, name, kind, metavar, text in (
        ("-b", "--minbytes", "min_bytes", num_bytes, "SIZE", "first size (default 32M)"),
        ("-e", "--maxbytes", "max_bytes", num_bytes, "SIZE", "last size (default 32M, or -b if that is larger)"),
        ("-n", "--iters", "iters", count, "N", "iterations of a size (default 20)"),
        ("-w", "--warmup_iters", "warmup", whole, "N", "untimed iterations first (default 1)"),
        ("-N", "--run_cycles", "cycles", whole, "N", "repeat the sweep; 0: for ever (default 1)"),
        ("-c", "--check", "check", whole, "N", "checks of the data of a size (default 1; 0: none)"),
        ("-o", "--op", "redops", _names, "OP", "sum, prod, min, max, avg, a list, or all"),
        ("-d", "--datatype", "dtypes", _names, "TYPE", "float, half, int32, ..., a list, or all"),
        ("-r", "--root", "roots", _roots, "RANK", "root, or all (default 0)"),
        ("-T", "--timeout", "timeout", positive, "S", "seconds that an operation may take"),
        ("-u", "--unalign", "unalign", whole, "N", "index of the first element (default 0)"),
        ("-R", "--local_register", "register", _switch, "0/1", "1: allocate buffers of hdpcomm by comm.empty(), "
         "which is fastest for messages"),
    ):  # fmt: skip
        add(short, long, dest=name, type=kind, metavar=metavar, help=text)
    step = partial(group.add_mutually_exclusive_group().add_argument, default=argparse.SUPPRESS)
    step("-i", "--stepbytes", dest="step_bytes", type=num_bytes, metavar="SIZE", help="add for the next (default 1M)")
    step("-f", "--stepfactor", dest="step_factor", type=whole, metavar="N", help="multiply to reach the next size")
    add(
        "-I", "--per_iter_timing", dest="per_iter", type=_switch, nargs="?", const=True, metavar="0/1",
        help="percentiles",
    )  # fmt: skip
    for short, long, value, why in _ONLY:
        add(short, long, dest="ignored", type=_only(value, why), metavar=value, help=f"only {value}: {why}")
    add(
        "-J", "--json", "--output_file", dest="output_file", type=Path, default=None, metavar="FILE",
        help="write JSON (version 3 of nccl-tests' format)",
    )  # fmt: skip


def add_own_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--ranks", type=count, metavar="N", help="start N ranks here (default 2; under a launcher: its ranks)")
    add(
        "--subset", dest="subsets", type=_ranks_list, action="append", default=argparse.SUPPRESS, metavar="0,3,1",
        help="only these ranks, in this order; repeatable",
    )  # fmt: skip
    add("--algorithm", default="auto", metavar="NAME", help="(default %(default)s)")
    add("--transport", choices=TRANSPORTS, default="auto", help="(default %(default)s)")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "perf",
        help="measure an operation: latency, bandwidth, correctness",
        description="Measures one operation with the options, columns and files of nccl-tests:\n"
        + "\n".join(f"  {name:<15} {meaning}" for name, meaning in OPS),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [name for name, _ in OPS]
    parser.add_argument("op", metavar="OP", type=operation_name, choices=names, help="one of the above")
    add_nccl_options(parser.add_argument_group("as in nccl-tests"))
    add_own_options(parser.add_argument_group("of hdpcomm"))
    parser.set_defaults(func=_measure)


def _config(options: argparse.Namespace) -> PerfConfig:
    from hdpcomm.perf.config import REDOPS, PerfConfig
    from hdpcomm.perf.data import ALL
    from hdpcomm.perf.ops import operation

    known = {each.name for each in fields(PerfConfig)}
    given = {name: value for name, value in vars(options).items() if name in known}
    op = operation(options.op)
    redops = given.get("redops")
    if redops is not None and not op.reduces:
        raise InvalidUsage(f"-o {','.join(redops)}: {op.name} does not reduce; leave -o out")
    if "roots" in given and not op.rooted:
        raise InvalidUsage(f"-r: {op.name} has no root; leave -r out")
    given["redops"] = redops = REDOPS if redops == ("all",) else redops or ("sum",)
    for redop in redops:
        if redop not in REDOPS:
            raise InvalidUsage(f"-o {redop}: unknown; give one of: {', '.join(REDOPS)}, all")
    given.setdefault("max_bytes", max(32 << 20, given.get("min_bytes", 0)))
    given["subsets"] = tuple(given.get("subsets", ()))
    if given.get("dtypes") == ("all",):
        given["dtypes"] = ALL
    return PerfConfig(**given, args=tuple(sys.argv))


def _measure(options: argparse.Namespace) -> int:
    """Checks all that can be checked, runs the sweep, and writes the file."""
    from hdpcomm.perf.results import Report
    from hdpcomm.perf.runner import check, now
    from hdpcomm.perf.table import TableWriter, json_document

    rank, ranks = ranks_here(options.ranks, default=2)
    config = _config(options)
    check(config, ranks)
    if options.output_file is not None:
        options.output_file = options.output_file.absolute()
        check_writable(options.output_file)
    report = Report(start_time=now())
    task = (config, report, options.output_file)
    if rank is not None:
        report = run_and_print(*task)
        if rank != 0:
            return WRONG_DATA if report.wrong else 0
    else:
        from hdpcomm.comm.launch import run_ranks

        report = run_ranks(run_and_print, ranks, *task)[0]
    TableWriter(config, sys.stdout).finish(report)
    if options.output_file is not None:
        write_json(options.output_file, json_document(config, report))
    return WRONG_DATA if report.wrong else 0


def run_and_print(config: PerfConfig, report: Report, output: Path | None) -> Report:
    """Runs one rank. Rank 0 prints the rows as they come, and updates the -J file after each cycle."""
    from hdpcomm.comm.launchers import joined, rank_and_size
    from hdpcomm.perf.runner import run_rank
    from hdpcomm.perf.table import TableWriter, json_document

    writer = TableWriter(config, sys.stdout)

    def emit(event: str, value: Any) -> None:
        if event == "start":
            writer.start(value)
        elif event == "row":
            writer.row(value)
        elif event == "cycle" and output is not None and config.cycles != 1:
            write_json(output, json_document(config, report))

    try:
        return run_rank(config, report, emit)
    except Exception as error:
        if output is not None and (not joined() or rank_and_size()[0] == 0):
            report.errors.append(f"{type(error).__name__}: {error}")
            write_json(output, json_document(config, report))
        raise
