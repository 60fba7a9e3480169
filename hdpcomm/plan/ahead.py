"""Planning in the background: the next step is planned while the current one runs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

from hdpcomm.arguments import check_has, check_whole
from hdpcomm.plan.items import PlacedItems
from hdpcomm.plan.planner import Planner
from hdpcomm.plan.step import StepPlan
from hdpcomm.plan.tree import Tree, tree_of

__all__ = ["PlanAhead", "PlannedStep"]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that is ready to run: its lengths, its plan, the seconds that the caller waited for the plan, and images
    and videos of its sequences, if there are any."""

    lengths: tuple[int | Tree, ...]
    plan: StepPlan
    waited_s: float
    items: PlacedItems | None = None

    def tree(self, number: int) -> Tree | None:
        """The tree that an id of the plan means, or the part of one; see :func:`hdpcomm.plan.tree.tree_of`."""
        return tree_of(number, self.lengths, self.plan.fragments)


_Planned: TypeAlias = "tuple[tuple[int | Tree, ...], StepPlan]"


class PlanAhead:
    """Iterates over planned steps; a thread plans up to ``depth`` steps ahead.

    The solver releases the GIL, so the thread uses another core, not the training loop's time. An error of the planner
    or of ``batches`` is raised where the step would have been returned. Use it as a context manager, or call
    :meth:`close`; reading to the end closes it, too.

    Args:
        planner: plans each step.
        batches: for each step, the lengths of its sequences, or trees.
        depth: most plans that are ready and waiting.

    Attributes:
        planner: may be replaced between steps: the plan that begins when the next step is taken is made by it, and so
            are those after it. Ranks that replace theirs between the same steps make the same plans.

    Examples:
        >>> from hdpcomm.plan import ClusterSpec, CostModel
        >>> planner = Planner(None, ClusterSpec(ranks=2, capacity=100), cost_model=CostModel(1e-9, 1e-6))
        >>> with PlanAhead(planner, [[150, 20], [90]]) as steps:
        ...     [len(step.plan.micro_batches) > 0 for step in steps]
        [True, True]
    """

    def __init__(
        self,
        planner: Planner,
        batches: Iterable[Sequence[int | Tree]],
        *,
        depth: int = 1,
    ) -> None:
        check_has("PlanAhead", "planner", planner, "plan", "a Planner")
        check_has("PlanAhead", "batches", batches, "__iter__", "the lengths of each step")
        check_whole("PlanAhead", "depth", depth, least=1)
        self.planner = planner
        self._batches = iter(batches)
        self._slots: queue.SimpleQueue[Planner] = queue.SimpleQueue()  # for each plan that may begin, who makes it
        for _ in range(depth):
            self._slots.put(planner)
        self._ready: queue.SimpleQueue[_Planned | BaseException | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hdpcomm-planner", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while True:
                planner = self._slots.get()
                if self._closed.is_set():
                    break
                lengths = next(self._batches, None)
                if lengths is None:
                    break
                plan = planner.plan(lengths)
                self._ready.put((tuple(lengths), plan))
        except BaseException as error:
            self._ready.put(error)
        else:
            self._ready.put(None)

    def __iter__(self) -> Iterator[PlannedStep]:
        return self

    def __next__(self) -> PlannedStep:
        if self._closed.is_set():
            raise StopIteration
        start = time.perf_counter()
        item = self._ready.get()
        waited = time.perf_counter() - start
        if isinstance(item, tuple):
            self._slots.put(self.planner)  # the step begins, so the thread may plan another one
            return PlannedStep(item[0], item[1], waited)
        self.close()
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Ends the thread, after the plan that it is making."""
        self._closed.set()
        self._slots.put(self.planner)
        self._thread.join()

    def __enter__(self) -> PlanAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
