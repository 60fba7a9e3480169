"""``hdpcomm acceptance``: does this cluster do what it should, with this library?"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hdpcomm.cli.output import TRANSPORTS, check_writable, new_table, ranks_here, stdout_console, write_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.options import count, positive

if TYPE_CHECKING:
    from hdpcomm.acceptance import Report, Settings

__all__ = ["add_parser"]

_LAST_CHECK_S = 300.0
_COLORS = {"good": "green", "look here": "yellow", "broken": "bold red", "not tried": "dim"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "acceptance",
        help="ten minutes that tell whether a cluster does what it should",
        description="Measures versions, disks, links, devices, collectives, attention, a planned step and the "
        "loss of a rank, each beside its limit, and judges it: good, look here or broken (docs/acceptance.md). Starts "
        "the ranks on this machine; under torchrun, srun or mpirun it joins the given world. Exit code 1 if something "
        "is broken.",
    )
    parser.add_argument(
        "--ranks", type=count, metavar="N", help="start N ranks here (default 2; under a launcher: its ranks)"
    )
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default="auto", help="how the ranks exchange tensors (default %(default)s)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where checkpoints would be written (default %(default)s)",
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="train this model in place of a small one")
    parser.add_argument(
        "--limit", type=positive, default=600.0, metavar="SECONDS", help="begin no check later (default %(default)g)"
    )
    parser.add_argument("--only", nargs="+", metavar="SECTION", default=(), help="try these: links, devices, ...")
    parser.add_argument(
        "--costs",
        nargs="?",
        const="",
        metavar="FILE",
        help="also write the costs that algorithm=auto uses into FILE (default ~/.cache/hdpcomm/costs.json)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")
    parser.set_defaults(func=_acceptance)


def _acceptance(options: argparse.Namespace) -> int:
    from hdpcomm.acceptance import accept
    from hdpcomm.comm.costs import costs_path, known_costs, save_costs
    from hdpcomm.comm.launch import RankPool

    check_writable(options.json)
    settings = _settings(options)
    path = Path(options.costs) if options.costs else costs_path()
    if settings.costs:
        known_costs(path)
        os.environ.pop("HDPCOMM_COSTS", None)  # else init() would look for the file that is written here
    rank, ranks = ranks_here(options.ranks, default=2)
    if rank is not None:
        report: Report = accept(settings)
    else:
        with RankPool(ranks) as pool:
            reports = pool.run(accept, settings, survivors=True, timeout=settings.limit_s + _LAST_CHECK_S)
            report = next(each for each in reports if each is not None)
        report.speaks = True
    if report.speaks:
        _print(report)
        if options.json:
            write_json(options.json, {"healthy": report.healthy, "rows": [asdict(row) for row in report.rows]})
        for name, costs in report.costs.items():  # those of other transports stay
            save_costs(name, costs, path)
            print(f"{name}: {', '.join(_cost_text(key, value) for key, value in costs.items())}")
        if report.costs:
            print(f"written to {path}")
    return 0 if report.healthy else 1


def _settings(options: argparse.Namespace) -> Settings:
    from hdpcomm.acceptance import SECTIONS, Settings
    from hdpcomm.run import RunConfig, folder_model, model_path

    config = RunConfig(model=folder_model(model_path(options.model))) if options.model else None
    if not options.folder.is_dir():
        raise InvalidUsage(f"--folder {options.folder}: is no folder; give one that exists on every host")
    if unknown := sorted({*options.only} - {*SECTIONS}):
        raise InvalidUsage(f"--only {' '.join(unknown)}: give some of {', '.join(SECTIONS)}")
    costs = options.costs is not None
    return Settings(options.transport, options.folder, config, options.limit, tuple(options.only), costs)


def _cost_text(key: str, seconds: float) -> str:
    """A cost as text, like "alpha 1.00 us" or "beta 0.1200 ns/byte"."""
    name = key.split("_")[0]
    return f"{name} {seconds * 1e9:.4f} ns/byte" if key.endswith("_per_byte") else f"{name} {seconds * 1e6:.2f} us"


def _print(report: Report) -> None:
    table = new_table("acceptance", "", "", "measured", "limit", "ratio", "judged", left=("", "judged"))
    section = ""
    for row in report.rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        judged = f"[{_COLORS[row.judged]}]{row.judged}[/]"
        shown = "" if row.section == section else row.section
        table.add_row(shown, row.check, row.measured, row.limit, ratio, judged)
        section = row.section
    console = stdout_console()
    console.print(table)
    for row in report.rows:
        if row.note:
            console.print(f"{row.section}, {row.check}: {row.judged}: {row.note}", markup=False, soft_wrap=True)
    console.print("all is well" if report.healthy else "something is broken: see docs/acceptance.md")
