"""What ranks tell each other in the job's store while they join a world, and how all hear of one that will not come."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hdpcomm import _core
from hdpcomm.errors import CommTimeout, Error, PeerLost

__all__ = ["Joining", "wait_for_all"]

_LOOK_S = 0.1  # between looks at whether all who are awaited can still come
_HINT = ": look for its error"


@dataclass(frozen=True, slots=True)
class Joining:
    """What a rank has to join a world with.

    Attributes:
        store: key-value store of the job; the world's keys begin with ``prefix``.
        seconds: that the ranks have for joining; ``deadline``: when they are over, by ``time.monotonic()``.
        pids: the process of each rank, 0 where it runs elsewhere; empty: nobody has told yet.
    """

    store: Any
    prefix: str
    rank: int
    size: int
    seconds: float
    deadline: float
    pids: tuple[int, ...] = ()

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.1, self.deadline - time.monotonic())

    def wait(self, *keys: str) -> None:
        """Waits for keys of this world. Raises: CommTimeout past the deadline; PeerLost as :meth:`look_around`."""
        full = [f"{self.prefix}/{key}" for key in keys]
        wait_for_all(self.store, full, self.deadline, self.seconds, self.rank, look_around=self.look_around)

    def from_rank_0(self, key: str, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on all ranks; a JSON value. Collective, as the next."""
        if self.rank == 0:
            self.store.set(f"{self.prefix}/{key}", json.dumps(make()))
        self.wait(key)
        return json.loads(self.store.get(f"{self.prefix}/{key}"))

    def from_all(self, key: str, value: str) -> list[str]:
        """What every rank gives, by rank."""
        self.store.set(f"{self.prefix}/{key}/{self.rank}", value)
        self.wait(*(f"{key}/{peer}" for peer in range(self.size)))
        texts = self.store.multi_get([f"{self.prefix}/{key}/{peer}" for peer in range(self.size)])
        return [text.decode() for text in texts]

    def look_around(self) -> None:
        """Raises PeerLost when a process of this host has ended, and what another rank has told of any."""
        for peer, pid in enumerate(self.pids):
            if pid and not _core.comm.process_runs(pid):
                raise self._lost(f"rank {peer} died (process {pid}) while the ranks joined the world", peer)
        if self.store.check([self._lost_key]):
            told = json.loads(self.store.get(self._lost_key))
            raise self._lost(f"{told['text']} (told by rank {told['by']})", told["peer"])

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Whoever joins inside tells the others, on whatever host, why it does not come to an end.

        Not of a timeout: the others' time is over, too, and each names whom it misses.
        """
        try:
            yield
        except CommTimeout:
            raise
        except PeerLost as error:
            self._tell(str(error), self.rank if error.peer is None else error.peer)
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._tell(
                f"rank {self.rank} gave up while the ranks joined the world; its last words: {reason}", self.rank
            )
            raise

    @property
    def _lost_key(self) -> str:
        return f"{self.prefix}/lost"

    def _lost(self, text: str, peer: int) -> PeerLost:
        return PeerLost(text + _HINT, rank=self.rank, peer=peer, op="init")

    def _tell(self, text: str, peer: int) -> None:
        """The first to tell is heard. The store itself may be what is lost."""
        with contextlib.suppress(RuntimeError):
            if not self.store.check([self._lost_key]):
                self.store.set(
                    self._lost_key, json.dumps({"peer": peer, "by": self.rank, "text": text.removesuffix(_HINT)})
                )


def wait_for_all(
    store: Any,
    keys: list[str],
    deadline: float,
    seconds: float,
    rank: int,
    *,
    look_around: Callable[[], None] = lambda: None,
) -> None:
    """Waits until all keys are there. Raises: CommTimeout past the deadline, and what ``look_around`` raises.

    It asks instead of ``store.wait()``, which neither Ctrl-C nor the end of a neighbour ends before its time. Of many
    keys it comes to ask for one that is missing, again and again, so that a store of many ranks has little to do.
    """
    started = time.monotonic()
    next_look = started
    few = len(keys)
    try:
        while keys:
            if store.check(keys[:few]):
                keys = keys[few:]
                few = len(keys)
            elif few > 1:
                few //= 2
            else:
                now = time.monotonic()
                if now >= next_look:
                    next_look = now + _LOOK_S
                    look_around()
                if now > deadline:
                    break
                time.sleep(min(0.1, 1e-3 + (now - started) / 10))
        absent = [key.rsplit("/", 1)[1] for key in keys if not store.check([key])]
    except RuntimeError as error:
        raise Error(f"rank {rank} lost the job's store in init(): {error}; did rank 0 end?", rank=rank) from error
    if absent:
        raise CommTimeout(
            f"rank {rank} waited {seconds} s in init() for: {', '.join(absent)} (ranks that did not come, or rank 0's "
            "segment); look for their errors, or raise timeout=",
            rank=rank,
            op="init",
        )
