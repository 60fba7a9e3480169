"""``hdpcomm perf``: measures one operation as nccl-tests does."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdpcomm.cli.output import check_writable, ranks_here, write_json
from hdpcomm.cli.perf_options import OPS, add_nccl_options, add_own_options, operation_name
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.perf.config import PerfConfig
    from hdpcomm.perf.results import Report

__all__ = ["add_parser"]

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
