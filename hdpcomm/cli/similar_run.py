"""``hdpcomm simulate --like RUN``: the batches of a run, and what its steps took beside what is simulated."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hdpcomm.cli.plan import KNOWN_BY_CALIBRATION, refuse_given
from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG

if TYPE_CHECKING:
    from hdpcomm.plan import Planner
    from hdpcomm.sim import StepReport, StreamReport

__all__ = ["SimilarRun"]

_STEPS = 8
_KNOWN_BY_RUN = {
    "distribution": "byted",
    "lengths": None,
    "tokens": 32 << 20,
    "context": None,
    "seed": 0,
    "calibration": None,
    "offload": False,
} | KNOWN_BY_CALIBRATION
"""Options that a run decides, with their defaults."""


class SimilarRun:
    """A finished or running run in a folder. Sets ``calibration``, ``context``, ``offload``, ``queue`` and ``slices``
    of the options.

    Raises: InvalidUsage for an option that the run decides, a folder without a run, data that are not there any more.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        from hdpcomm.cli.config_file import resolve_options
        from hdpcomm.cli.train_data import train_data
        from hdpcomm.data import Corpus
        from hdpcomm.plan import Calibration
        from hdpcomm.run import read_metrics

        refuse_given(options, _KNOWN_BY_RUN, "--like, whose run")
        run: Path = options.like
        for name in ("config.yaml", "calibration.json", "metrics.jsonl"):
            if not (run / name).is_file():
                raise InvalidUsage(
                    f"--like {run} has no {name}; give the folder of a run of hdpcomm train --out that has begun"
                )
        trained = resolve_options({}, run / "config.yaml")
        if trained.loader != "index":
            raise InvalidUsage(
                f"--like {run}: this run made its tokens as it went (--loader {trained.loader}), and its batches are "
                "not known without them; give a run that has an index"
            )
        corpus = train_data(trained, trained.data).open()
        assert isinstance(corpus, Corpus)
        if trained.eval_fraction is not None:
            corpus, _ = corpus.split(trained.eval_fraction, seed=trained.seed)
        self._sampler = corpus.sampler(tokens=trained.tokens_per_step, seed=trained.seed)
        rows = read_metrics(run / "metrics.jsonl")
        self._rows = {(str(row["policy"]), int(row["step"])): row for row in rows if "measured_s" in row}
        if not self._rows:
            raise InvalidUsage(f"--like {run}: metrics.jsonl has no complete step; wait for the first ones")
        self._steps: list[int] = []
        options.calibration = run / "calibration.json"
        self._processor_model = Calibration.load(options.calibration).processor_model
        options.context = int(corpus.lengths.max())
        options.offload = trained.offload > 0
        options.queue = options.queue or trained.queue
        options.slices = max(options.slices, trained.slices)

    def batches(self, steps: int | None) -> list[list[int]]:
        """The lengths of the last steps that were measured."""
        last = max(step for _, step in self._rows)
        known = sorted({step for _, step in self._rows})
        self._steps = known[-(steps or _STEPS) :]
        if steps is not None and len(self._steps) < steps:
            LOG.warning(f"the run has {len(known)} steps up to {last}, which are simulated")
        return [list(self._sampler.batch(step).lengths) for step in self._steps]

    def compare(self, planners: Sequence[Planner], reports: Sequence[StreamReport]) -> dict[str, Any]:
        """Prints simulated and measured seconds of forward and backward for each policy of the run; returns them.

        Beside them, where both are known, the processor time of all ranks together.
        """
        found: dict[str, dict[str, Any]] = {}
        for planner, report in zip(planners, reports, strict=True):
            pairs = [
                (step, simulated.compute_s, row)
                for step, simulated in zip(self._steps, report.steps, strict=True)
                if (row := self._rows.get((planner.policy, step))) is not None
            ]
            if not pairs:
                continue
            print(f"\n{planner.policy}: forward and backward of a step, s\n")
            print(f"{'step':>6} {'tokens':>9} {'simulated':>10} {'measured':>10} {'ratio':>6}")
            for step, simulated, row in pairs:
                measured = float(row["measured_s"])
                print(
                    f"{step:>6} {row['tokens']:>9,} {simulated:>10.4g} {measured:>10.4g} {simulated / measured:>6.2f}"
                )
            ratios = [simulated / float(row["measured_s"]) for _, simulated, row in pairs]
            rest = [float(row["seconds"]) - float(row["measured_s"]) - float(row["plan_wait_s"]) for *_, row in pairs]
            print(
                f"median: simulated / measured {median(ratios):.2f}; the reduction of gradients, the optimizer and the "
                f"rest took {median(rest):.4g} s a step, which is not simulated here"
            )
            own = found[planner.policy] = {
                "steps": [step for step, *_ in pairs],
                "simulated_s": [simulated for _, simulated, _ in pairs],
                "measured_s": [float(row["measured_s"]) for *_, row in pairs],
                "rest_s": rest,
            }
            own |= self._processor_time(planner, [report.steps[self._steps.index(step)] for step, *_ in pairs])
        return {"like": found}

    def _processor_time(self, planner: Planner, reports: Sequence[StepReport]) -> dict[str, list[float]]:
        from hdpcomm.sim import processor_seconds

        rows = [self._rows[planner.policy, step] for step in self._steps if (planner.policy, step) in self._rows]
        if self._processor_model is None or not all(row.get("passes_processor_s") for row in rows):
            return {}
        simulated = [processor_seconds(each.plan, self._processor_model, planner.cluster) for each in reports]
        measured = [float(row["passes_processor_s"]) for row in rows]
        ratio = median(s / m for s, m in zip(simulated, measured, strict=True))
        print(
            f"processor time of all ranks, s a step: simulated {median(simulated):.4g}, measured "
            f"{median(measured):.4g}, ratio {ratio:.2f} (medians; waiting takes next to none)"
        )
        return {"simulated_processor_s": simulated, "measured_processor_s": measured}
