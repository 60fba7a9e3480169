"""How pytest-xdist deals the test files to its processes."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.harness.order import waits

__all__ = ["OneWaits"]


class OneWaits(LoadFileScheduling):
    """``--dist loadfile``, and one process at a time has a file that waits.

    The test in which a process ends is not run again: pytest-xdist 3.8 would run it once more in each process there is.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work[node]
        crashed = next(((tests, test) for tests in files.values() for test, done in tests.items() if not done), None)
        if crashed is None:
            return super().remove_node(node)
        tests, test = crashed
        tests[test] = True
        del self.assigned_work[node]
        self.workqueue.update({file: tests for file, tests in files.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return test

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:  # a process that takes the place of another has to collect first
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = (work for other, work in self.assigned_work.items() if other is not node)
        waited = any(waits(file) and not all(tests.values()) for work in others for file, tests in work.items())
        for file in self.workqueue:
            if waits(file) != waited:
                self.workqueue.move_to_end(file, last=False)
                break
        super()._assign_work_unit(node)
