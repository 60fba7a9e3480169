"""Rows of the report: what was measured, what it is held against, and how it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["BROKEN", "GOOD", "JUDGEMENTS", "LOOK", "NOT_TRIED", "Report", "Row", "Rule", "named", "rated"]

GOOD, LOOK, BROKEN, NOT_TRIED = JUDGEMENTS = ("good", "look here", "broken", "not tried")


@dataclass(frozen=True, slots=True)
class Rule:
    """How a ratio is judged: measured over limit where more is better, limit over measured of a time.

    Attributes:
        good: the least ratio that is good.
        broken: a ratio below this one is broken; between the two lies what somebody should look at.
    """

    good: float
    broken: float

    def judge(self, ratio: float) -> str:
        """``good``, ``look here`` or ``broken``."""
        return GOOD if ratio >= self.good else BROKEN if not ratio >= self.broken else LOOK


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report.

    Attributes:
        section: what was tried, as docs/acceptance.md names it.
        judged: one of ``JUDGEMENTS``.
        measured, limit: with their units; empty where the check has no figure.
        ratio: see :class:`Rule`; ``None`` without a limit.
        note: what is wrong, and on which ranks.
    """

    section: str
    check: str
    judged: str
    measured: str = ""
    limit: str = ""
    ratio: float | None = None
    note: str = ""


@dataclass(slots=True)
class Report:
    """All rows, equal on every rank that got to the end.

    Attributes:
        costs: of the transport, by the names under which :func:`hdpcomm.comm.costs.save_costs` takes them.
        speaks: whether this rank shows the report: the first one that lives.
    """

    rows: list[Row] = field(default_factory=list)
    costs: dict[str, dict[str, float]] = field(default_factory=dict)
    speaks: bool = True

    @property
    def healthy(self) -> bool:
        """Whether nothing is broken."""
        return all(row.judged != BROKEN for row in self.rows)


def rated(
    section: str,
    check: str,
    measured: float,
    limit: float | None,
    unit: str,
    rule: Rule,
    note: str = "",
) -> Row:
    """A row of a figure in ``unit``: ``us`` and ``s`` (given in seconds), ``GB/s`` (bytes/s) or ``TFLOP/s`` (FLOP/s).

    ``limit``: ``None``, where nothing is known of it: the figure is shown, and good. ``note`` stays away from what is
    good.
    """
    if limit is None:
        return Row(section, check, GOOD, _text(measured, unit))
    is_time = unit in ("us", "s")
    above, below = (limit, measured) if is_time else (measured, limit)
    ratio = above / below if below > 0 else 0.0
    judged = rule.judge(ratio)
    return Row(section, check, judged, _text(measured, unit), _text(limit, unit), ratio, "" if judged == GOOD else note)


def named(ranks: Sequence[int]) -> str:
    """Ranks as text: "rank 3", "ranks 0, 1 and 5", or "ranks 0, 1, 2, 3 and 12 more"."""
    shown = [str(rank) for rank in (ranks if len(ranks) <= 8 else ranks[:8])]
    if len(shown) == 1:
        return f"rank {shown[0]}"
    last = f"{len(ranks) - len(shown)} more" if len(ranks) > len(shown) else shown.pop()
    return f"ranks {', '.join(shown)} and {last}"


def _text(value: float, unit: str) -> str:
    scale = {"us": 1e6, "s": 1.0, "GB/s": 1e-9, "TFLOP/s": 1e-12}[unit]
    return f"{value * scale:.3g} {unit}"
