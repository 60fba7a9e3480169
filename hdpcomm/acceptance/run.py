"""All checks, one after the other: :func:`accept`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hdpcomm.acceptance.checks import (
    check_collectives,
    check_copies,
    check_disks,
    check_links,
    check_processors,
    check_products,
    check_recovery,
    check_ring,
    check_step,
    check_versions,
    step_config,
)
from hdpcomm.acceptance.report import BROKEN, GOOD, LOOK, NOT_TRIED, Report, Row
from hdpcomm.arguments import ranks_text
from hdpcomm.comm import Communicator, init
from hdpcomm.comm.topology import shared_cores
from hdpcomm.data.agree import from_rank
from hdpcomm.errors import Error, first_line
from hdpcomm.log import LOG
from hdpcomm.measure.timing import measure_world
from hdpcomm.run import RunConfig

__all__ = ["SECTIONS", "Settings", "accept"]

SECTIONS = ("versions", "hosts", "links", "devices", "collectives", "steps", "recovery")

Check = Callable[[Communicator], list[Row]]
_AGREE_S = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of :func:`accept`, equal on all ranks.

    Attributes:
        transport: of :func:`hdpcomm.init`.
        folder: a place where checkpoints would be written.
        config: the model whose step is tried, with its capacity and types; ``None``: a small one.
        limit_s: no check begins later than so many seconds after the first one.
        only: sections; empty: all.
        costs: also measure the costs by which ``algorithm="auto"`` chooses.
    """

    transport: str = "auto"
    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    config: RunConfig | None = None
    limit_s: float = 600.0
    only: tuple[str, ...] = ()
    costs: bool = False


def accept(settings: Settings) -> Report:
    """Tries everything on the ranks of this job. Collective over all of them; never raises what a check finds.

    A check that fails with an error is broken, and no other one is tried after it: the ranks may not be in step any
    more.
    """
    report = Report()
    started = time.monotonic()
    try:
        comm = init(settings.transport)
    except Error as error:
        report.rows.append(Row("meeting", "all ranks", BROKEN, note=first_line(error)))
        return report
    with comm:
        took = f"{time.monotonic() - started:.3g} s"
        report.rows.append(Row("meeting", f"{ranks_text(comm.size)}, {comm.transport}", GOOD, took))
        broken, crowded = False, shared_cores(comm) is not None
        for section, check in _checks(settings):
            name = check.__name__.removeprefix("check_")
            try:
                in_time = from_rank(comm, str(time.monotonic() - started)) if not broken else "0"
                if broken or float(in_time) > settings.limit_s:
                    why = "as an error came before" if broken else f"the {settings.limit_s:g} s were over"
                    report.rows.append(Row(section, name, NOT_TRIED, note=why))
                    continue
                rows = check(comm)
                report.rows += [_in_doubt(row) for row in rows] if crowded else rows
            except Exception as error:  # of torch or the system as well: the report goes on
                LOG.debug("acceptance: %s", section, exc_info=error)
                broken = True
                report.rows.append(Row(section, name, BROKEN, note=first_line(error)))
                report.speaks = comm.rank == _first_living(comm)
        if not broken:
            report.costs = measure_world(comm) if settings.costs else {}
            report.speaks = comm.rank == 0
    return report


def _first_living(comm: Communicator) -> int:
    """Agreed by all that live: one that leaves in good order must not look dead to those that are slower."""
    try:
        return comm.shrink(_AGREE_S).ranks[0]
    except Error:  # a rank that lives did not come
        return min({*comm.ranks} - {*comm.lost()})


def _in_doubt(row: Row) -> Row:
    """The row where ranks share cores: times say little of links and devices then."""
    return replace(row, judged=LOOK) if row.judged == BROKEN and row.ratio is not None else row


def _checks(settings: Settings) -> list[tuple[str, Check]]:
    """Each with its section, in the order of the report."""

    def check_disk(comm: Communicator) -> list[Row]:
        return check_disks(comm, settings.folder)

    def check_training(comm: Communicator) -> list[Row]:
        return check_step(comm, settings.config or step_config(comm))

    found: list[tuple[str, Check]] = [
        ("versions", check_versions),
        ("hosts", check_processors),
        ("hosts", check_disk),
        ("links", check_links),
        ("devices", check_products),
        ("devices", check_copies),
        ("collectives", check_collectives),
        ("steps", check_ring),
        ("steps", check_training),
        ("recovery", check_recovery),
    ]
    return [(section, check) for section, check in found if not settings.only or section in settings.only]
