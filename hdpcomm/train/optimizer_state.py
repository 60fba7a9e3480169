"""An optimizer's state that is loaded: its tensors become the optimizer's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["own_state"]


@contextmanager
def own_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Round ``load_state_dict`` of the optimizer, or what calls it. Local.

    ``load_state_dict`` keeps the tensors that it is given: a second optimizer with the same state would share them, and
    each step of one would change the other. Here they are copied, but for those that were this optimizer's before.
    """
    before = {value.data_ptr() for value in _tensors(optimizer)}
    yield
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.data_ptr() not in before:
                state[name] = value.clone()


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
