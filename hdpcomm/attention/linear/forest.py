"""The scan of a rank's forest: runs that start from each other's states or from those of carriers. Local."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hdpcomm.attention.linear.runs import Runs
from hdpcomm.attention.linear.scan import Inputs, Scan
from hdpcomm.attention.linear.state_plan import Links

__all__ = ["ForestScan"]


class ForestScan:
    """Like a :class:`hdpcomm.attention.linear.scan.Scan`, level by level, for runs whose final states nobody needs."""

    def __init__(self, levels: Sequence[tuple[Runs, Links]], make: Callable[[Runs], Scan]) -> None:
        """``levels``: the runs of each level, and the links from what comes before to their initial states."""
        self._levels = [(runs, links, make(runs)) for runs, links in levels]

    def run(self, initial: torch.Tensor) -> torch.Tensor:
        """``initial``: [states from carriers, heads, dk, dv]; returned as it is, since nothing follows."""
        states = initial
        for runs, links, scan in self._levels:
            states = scan.run(links.add(_zeros(initial, runs.count), states))
        return initial

    def output(self, out: torch.Tensor) -> None:
        for _, _, scan in self._levels:
            scan.output(out)

    def take_grad(self, dout: torch.Tensor) -> None:
        for _, _, scan in self._levels:
            scan.take_grad(dout)

    def run_backward(self, final: torch.Tensor) -> torch.Tensor:
        """The gradient of the initial states; ``final``: what it is written to, zeros."""
        above = [final, *(_zeros(final, runs.count) for runs, _, _ in self._levels)]
        for depth in range(len(self._levels) - 1, -1, -1):
            _, links, scan = self._levels[depth]
            links.transposed.add(above[depth], scan.run_backward(above[depth + 1]))
        return above[0]

    def gradients(self, grads: Inputs) -> None:
        for _, _, scan in self._levels:
            scan.gradients(grads)


def _zeros(like: torch.Tensor, count: int) -> torch.Tensor:
    return like.new_zeros((count, *like.shape[1:]))
