"""States of a run in the memory of its ranks, from which it goes on when some die: :class:`PeerSaves`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.train.state.layout import TensorPart
from hdpcomm.train.state.peer_copies import KeptStep, PeerCopies
from hdpcomm.train.step.state import path_name, walk_state

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.train import Trainer

__all__ = ["KeptCheckpoint", "PeerSaves"]

_GENERATORS = "generators"


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """As :class:`hdpcomm.run.checkpoints.Checkpoint`, of a state that ranks hold together.

    Attributes:
        living: the communicator of all that hold parts of it.
        call_spares: on one rank, what calls those to :meth:`load_into` that have no part in the run that goes on.
    """

    kept: KeptStep
    living: Communicator
    call_spares: Callable[[], None] = lambda: None

    @property
    def path(self) -> Path:
        """Name for messages."""
        return Path(f"step-{self.step} in the ranks' memory")

    @property
    def step(self) -> int:
        return self.kept.step

    @property
    def facts(self) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = self._notes()[0]["facts"]
        return facts

    def load_into(self, state: dict[str, Any]) -> None:
        """Writes into the tensors of ``state``, as those of :meth:`Checkpoint.load_into`; other leaves are replaced.
        Collective over ``living``: ranks without a part in the run give an empty state.

        Raises: InvalidUsage, on all ranks: it does not fit. PeerLost.
        """
        self.call_spares()
        leaves = list(walk_state(state))
        self.kept.load_into(
            {path_name(path): value for path, value in leaves if isinstance(value, (Tensor, TensorPart))}, self.living
        )
        for policy, own in state.get("policies", {}).items():
            self._load_numbers(policy, own)

    def _load_numbers(self, policy: str, own: dict[str, Any]) -> None:
        every = [note["policies"][policy] for note in self._notes()]
        own["num_steps"] = every[0]["num_steps"]
        by_name = {name: saved for note in every for saved in note["groups"] for name in saved["params"]}
        for group in own["optimizer"]["param_groups"]:
            saved: dict[str, Any] = next((by_name[name] for name in group["params"] if name in by_name), {})
            group.update({key: _alike(value, group.get(key)) for key, value in saved.items() if key != "params"})
        plain = {tuple(path): value for note in every for path, value in note["plain"]}
        for path, value in walk_state({"optimizer": {"state": own["optimizer"]["state"]}}):
            if isinstance(value, (Tensor, TensorPart)):
                continue
            if path not in plain:
                raise InvalidUsage(f"{self.path}: no surviving rank holds {'.'.join(path)}")
            own["optimizer"]["state"][path[2]][path[3]] = _alike(plain[path], value)

    def _notes(self) -> list[Any]:
        return [note for note in self.kept.notes if note is not None]


class PeerSaves:
    """One rank's copies of the states of a run; they outlive its attempts.

    A run gives its state after each step. When ranks have died, :meth:`newest` says what the others hold together; the
    next attempt makes copies for its own ranks, and these take the place of those before as soon as they are whole.
    """

    def __init__(self) -> None:
        self._attempt = 0
        self._copies: dict[int, PeerCopies] = {}

    def next_attempt(self) -> None:
        """The living ranks begin again, with or without this one. Every living rank says so. Local."""
        self._attempt += 1

    def begin(self, comm: Communicator, trainers: Mapping[str, Trainer]) -> None:
        """The attempt has its trainers. Collective over its ranks."""
        self._copies[self._attempt] = PeerCopies(_live(comm, trainers)[0], comm)

    def take(self, comm: Communicator, step: int, trainers: Mapping[str, Trainer], facts: Mapping[str, Any]) -> None:
        """Copies the state after ``step`` steps. Collective over the attempt's ranks. Raises: PeerLost, Aborted."""
        copies = self._copies[self._attempt]
        first = copies.step < 0
        tensors, numbers = _live(comm, trainers)
        copies.take(step, tensors, {"facts": facts, "policies": numbers})
        if not first:  # that one is in the memory of all its keepers
            self._copies = {self._attempt: copies}

    def newest(self, living: Communicator) -> KeptCheckpoint | None:
        """The newest state that the living ranks hold together. Collective over ``living``. Raises: PeerLost."""
        attempts = {each for own in gather_json(living, list(self._copies)) for each in own}
        for attempt in sorted(attempts, reverse=True):
            if (kept := PeerCopies.newest(self._copies.get(attempt), living)) is not None:
                return KeptCheckpoint(kept, living)
        return None


def _live(
    comm: Communicator, trainers: Mapping[str, Trainer]
) -> tuple[dict[str, Tensor | TensorPart], dict[str, dict[str, Any]]]:
    """State of all policies on this rank, and the numbers of each beside it. Local."""
    tensors: dict[str, Tensor | TensorPart] = {}
    numbers = {}
    for policy, trainer in trainers.items():
        own, numbers[policy] = trainer.live_state()
        tensors |= {path_name(("policies", policy, name)): value for name, value in own.items()}
    state = torch.get_rng_state()
    tensors[_GENERATORS] = TensorPart((comm.size, state.numel()), [((comm.rank, 0), state[None])])
    return tensors, numbers


def _alike(value: Any, live: Any) -> Any:
    """JSON has no tuples."""
    return tuple(value) if isinstance(live, tuple) and isinstance(value, list) else value
