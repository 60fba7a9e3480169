"""How ranks exchange values in the job's store while they join a world, and learn of one that will not come."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hdpcomm import _core
from hdpcomm.comm.secret import SAME_SECRET
from hdpcomm.comm.torch_store import DIED_KEY, SignedStore
from hdpcomm.errors import CommTimeout, Error, PeerLost

__all__ = ["Joining", "wait_for_all"]

_TOLD_S = 2.0  # for the others to read why the rank that serves the store gives up
_CHECK_S = 0.1  # between checks whether all who are awaited can still come
_LISTED = 32  # names in a message
_HINT = ": look for its error"


@dataclass(frozen=True, slots=True)
class Joining:
    """Arguments of a rank that joins a world.

    Attributes:
        store: key-value store of the job; the world's keys begin with ``prefix``.
        seconds: that the ranks have for joining; ``deadline``: when they are over, by ``time.monotonic()``.
        pids: the process of each rank, 0 where it runs elsewhere; empty: not known yet.
        serves: the store is in this process.
    """

    store: Any
    prefix: str
    rank: int
    size: int
    seconds: float
    deadline: float
    pids: tuple[int, ...] = ()
    serves: bool = False

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.1, self.deadline - time.monotonic())

    def wait(self, *keys: str) -> None:
        """Waits for keys of this world. Raises: CommTimeout past the deadline; PeerLost as :meth:`check_peers`."""
        full = [f"{self.prefix}/{key}" for key in keys]
        wait_for_all(self.store, full, self.deadline, self.seconds, self.rank, check_peers=self.check_peers)

    def from_rank_0(self, key: str, make: Callable[[], Any]) -> Any:
        """A JSON value that rank 0 makes, returned on all ranks. Collective."""
        if self.rank == 0:
            self.store.set(f"{self.prefix}/{key}", json.dumps(make()))
        self.wait(key)
        with self.reading(key):
            return json.loads(self.store.get(f"{self.prefix}/{key}"))

    def from_all(self, key: str, value: str) -> list[str]:
        """The values of all ranks, by rank. Collective."""
        self.store.set(f"{self.prefix}/{key}/{self.rank}", value)
        self.wait(*(f"{key}/{peer}" for peer in range(self.size)))
        texts = self.store.multi_get([f"{self.prefix}/{key}/{peer}" for peer in range(self.size)])
        with self.reading(key):
            return [text.decode() for text in texts]

    @contextlib.contextmanager
    def reading(self, key: str) -> Iterator[None]:
        """Turns errors of the block, which values of ``key`` that no rank writes cause, into an Error with the key."""
        try:
            yield
        except Error:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise Error(
                f"rank {self.rank} read values of '{key}' in the job's store that no rank of this version of hdpcomm "
                f"writes ({str(error)[:200]}): start all ranks with the same version, and keep others from the store",
                rank=self.rank,
                op="init",
            ) from error

    def check_peers(self) -> None:
        """Raises PeerLost when the process of a rank of this host has ended, or another rank has reported a failure."""
        for peer, pid in enumerate(self.pids):
            if pid and not _core.comm.process_runs(pid):
                raise self._lost(f"rank {peer} died (process {pid}) while the ranks joined the world", peer)
        if self.store.check([DIED_KEY]):
            with self.reading("died"):
                for peer, text in json.loads(self.store.get(DIED_KEY)).items():
                    raise self._lost(f"rank {peer} {text} while the ranks joined the world", int(peer))
        if self.store.check([self._lost_key]):
            with self.reading("lost"):
                report = json.loads(self.store.get(self._lost_key))
                self.store.add(f"{self._lost_key}/read", 1)
                raise self._lost(f"{report['text']} (told by rank {report['by']})", int(report["peer"]))

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Reports an error of the block to the other ranks, on whatever host, so that they stop waiting for this one.

        Timeouts are not reported: the others' time is over, too, and each names whom it misses. A rank that serves the
        store may end with the error, and waits until the others have read the report.
        """
        try:
            yield
        except CommTimeout:
            raise
        except PeerLost as error:
            self._report(str(error), self.rank if error.peer is None else error.peer)
            self._wait_told()
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._report(
                f"rank {self.rank} gave up while the ranks joined the world; its last words: {reason}", self.rank
            )
            self._wait_told()
            raise

    def _wait_told(self) -> None:
        until = time.monotonic() + min(_TOLD_S, self.left)
        with contextlib.suppress(RuntimeError, Error):
            while (
                self.serves and time.monotonic() < until and self.store.add(f"{self._lost_key}/read", 0) < self.size - 1
            ):
                time.sleep(0.01)

    @property
    def _lost_key(self) -> str:
        return f"{self.prefix}/lost"

    def _lost(self, text: str, peer: int) -> PeerLost:
        return PeerLost(text + _HINT, rank=self.rank, peer=peer, op="init")

    def _report(self, text: str, peer: int) -> None:
        """Only the first report counts. The store itself may be what is lost."""
        with contextlib.suppress(RuntimeError, Error):
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
    check_peers: Callable[[], None] = lambda: None,
) -> None:
    """Waits until all keys are there. Raises: CommTimeout past the deadline, and what ``check_peers`` raises.

    It polls, since ``store.wait()`` is ended neither by Ctrl-C nor by the death of a neighbour. Where there are many
    keys it narrows down to a missing one and polls for that, so that the store of many ranks has little to do.
    """
    started = time.monotonic()
    next_check = started
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
                if now >= next_check:
                    next_check = now + _CHECK_S
                    check_peers()
                if now > deadline:
                    break
                time.sleep(min(0.1, 1e-3 + (now - started) / 10))
        absent = [key.rsplit("/", 1)[1] for key in keys if not store.check([key])]
        known = _what_the_store_knows(store, absent) if absent else ""
    except RuntimeError as error:
        raise Error(f"rank {rank} lost the job's store in init(): {error}; did rank 0 end?", rank=rank) from error
    if absent:
        raise CommTimeout(
            f"rank {rank} waited {seconds} s in init() for: {_listed(absent)} (ranks that did not come, or rank 0's "
            f"segment){known}; look for their errors, or raise timeout=",
            rank=rank,
            op="init",
        )


def _what_the_store_knows(store: Any, absent: Sequence[str]) -> str:
    """Which ranks have never reached the store, and which have another secret."""
    if not isinstance(store, SignedStore):
        return ""
    ranks = [rank for rank in absent if rank.isdigit()]
    shown = store.shown_secrets(ranks)
    never, others = [rank for rank in ranks if rank not in shown], [rank for rank in ranks if not shown.get(rank, True)]
    told = f"; never at the job's store: {_listed(never)} (not started, or ended before)" if never else ""
    return told + (f"; ranks with another secret: {_listed(others)}: {SAME_SECRET}" if others else "")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
