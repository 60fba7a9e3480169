"""How pytest-xdist deals the test files to its processes."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.order import waits

__all__ = ["OneWaits"]


class OneWaits(LoadFileScheduling):
    """``--dist loadfile``, and one process at a time has a file that waits."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = (work for other, work in self.assigned_work.items() if other is not node)
        waited = any(waits(file) and not all(tests.values()) for work in others for file, tests in work.items())
        for file in self.workqueue:
            if waits(file) != waited:
                self.workqueue.move_to_end(file, last=False)
                break
        super()._assign_work_unit(node)
