"""How processes come to a job that runs: one of its ranks has a lobby where they wait, and all make a new world.

A newcomer proves that it knows the lobby's secret, says what it is, and waits. When the ranks are ready, each of them
and each newcomer that fits joins a new, larger world (:func:`grow`); the old one stays as it is until all are there, so
a newcomer that dies or never comes costs nothing but the time until that is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdpcomm.comm.addresses import listening_address
from hdpcomm.comm.bootstrap import join
from hdpcomm.comm.secret import SAME_SECRET, Secret
from hdpcomm.comm.torch_store import SignedStore, connect_store, serve_store
from hdpcomm.data.agree import from_rank
from hdpcomm.errors import CommTimeout, Error, InvalidUsage, PeerLost, plain_text
from hdpcomm.files import read_text

if TYPE_CHECKING:
    from hdpcomm.comm.communicator import Communicator

__all__ = ["LOBBY", "Lobby", "enter", "grow"]

LOBBY = "lobby.json"
"""In the folder of a run: where newcomers wait."""
_OFFER, _COUNT, _ASKS, _ALIVE, _PLACE, _REFUSED = "offer", "count", "asks", "alive", "place", "refused"
_MOST = 4096  # newcomers of a lobby
_GROWING_S = 30.0  # for all to come into the new world
_PLACE_S = 3600.0  # for a newcomer to get a place: the step that runs may be long
_POLL_S = 0.5
_SILENT_S = 3.0  # without a sign of life, after which a newcomer is gone


@dataclass(frozen=True, slots=True)
class _Door:
    """Where a store of this job is, and its secret."""

    host: str
    port: int
    secret: Secret

    def open(self, number: int, seconds: float) -> SignedStore:
        inner = connect_store(self.host, self.port, number, seconds=seconds)
        return SignedStore(inner, self.secret, number, seconds=seconds)


_known_as: str | None = None
"""The address of this process on the way to others of its job, once it has joined a world that grew. What launched a
newcomer knows no other rank, and the own name of its host may have no address, or one that only this host has."""


def _served(secret: Secret) -> tuple[SignedStore, _Door]:
    """A new store that this process serves."""
    host = _known_as or listening_address(None)
    inner = serve_store(host, 0, seconds=_GROWING_S)
    return SignedStore(inner, secret, 0, seconds=_GROWING_S), _Door(host, inner.port, secret)


def _secret_of(secret: Secret, name: str) -> str:
    """The secret of a new world, as text, for those that know the lobby's: the store does not keep it."""
    return secret.sign("door", name.encode()).hex()


class Lobby:
    """Where newcomers wait, on one rank of a job.

    Args:
        path: a file that tells them the place; removed by :meth:`close`.
        secret: who knows it may come.
        facts: what each of them must say of itself.
        offer: what each of them is told of the job.

    Attributes:
        address: ``host:port``, for those that do not see the file.
    """

    def __init__(self, path: Path, secret: Secret, facts: str, offer: str = "") -> None:
        self._path, self._facts, self.secret = path, facts, secret
        self._store, door = _served(secret)
        self.address = f"{door.host}:{door.port}"
        self._known: set[int] = set()
        self._signs: dict[int, tuple[int, float]] = {}  # signs of life, and when the last one came
        self._store.show_secret()
        self._store.set(_OFFER, offer)
        try:
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            with open(handle, "w") as file, contextlib.ExitStack() as failed:
                failed.callback(os.unlink, name)
                json.dump(self.address, file)
                file.flush()
                os.replace(name, path)  # whole, and this user's, whoever has made one before
                failed.pop_all()
        except OSError:
            self._store.close()
            raise

    def waiting(self) -> list[int]:
        """Numbers of the newcomers that wait, fit, and live. Those that do not fit are told why. Local."""
        found = []
        for number in range(1, min(_MOST, self._store.add(_COUNT, 0)) + 1):
            if number in self._known or not self._store.check([f"{_ASKS}/{number}"]):
                continue
            facts = self._store.get(f"{_ASKS}/{number}")
            if facts.decode(errors="replace") != self._facts:
                self._known.add(number)
                told = f"the run is {self._facts}, and this process is {plain_text(facts)}"
                self._store.set(f"{_REFUSED}/{number}", told)
            elif self._lives(number):
                found.append(number)
        return found

    def _lives(self, number: int) -> bool:
        signs, now = self._store.add(f"{_ALIVE}/{number}", 0), time.monotonic()
        if signs != self._signs.get(number, (-1, now))[0]:
            self._signs[number] = signs, now
        return now - self._signs[number][1] < _SILENT_S

    def give_places(self, places: dict[int, Any]) -> None:
        """Tells each newcomer its place in the new world."""
        for number, place in places.items():
            self._known.add(number)
            self._store.set(f"{_PLACE}/{number}", json.dumps(place))

    def close(self) -> None:
        """Nobody may come any more. Idempotent."""
        self._path.unlink(missing_ok=True)
        self._store.close()


def enter(
    where: Path | str,
    secret: Secret,
    facts: str,
    *,
    timeout: float = _PLACE_S,
    told: Callable[[str], None] = lambda _: None,
) -> Communicator:
    """A newcomer's end of :func:`grow`: waits in the lobby of a job for its place in a new world of it. When the rank
    with the lobby dies, it waits in that of the next one, if the file says where that is.

    Args:
        where: the file of the job's :class:`Lobby`, or its address.
        secret: that of the lobby.
        facts: what this process is.
        timeout: seconds until it has a place. Operations then have the deadline of the job's.
        told: called with the lobby's offer when it waits.

    Raises:
        InvalidUsage: nobody is there, another secret, or this process does not fit.
        PeerLost: the run has ended, or the rank with the lobby has and there is no other one.
        CommTimeout: no place in time.
    """
    until = time.monotonic() + timeout
    try:
        store = _door_at(where, secret).open(-1, min(timeout, _GROWING_S))
    except (OSError, ValueError, TypeError, AttributeError, CommTimeout) as error:
        raise InvalidUsage(
            f"{where}: no run waits for newcomers there ({error}); give the folder of one that runs with --elastic, or "
            "the address that it has told"
        ) from error
    offer = place = None
    while place is None:
        try:
            if not store.shown_secrets(["0"]).get("0", True):
                raise InvalidUsage(f"this process and the run at {where} do not share the job's secret: {SAME_SECRET}")
            if offer is None:
                offer = store.get(_OFFER).decode()
                told(offer)
            place = _place_in(store, where, facts, until)
        except PeerLost:
            store = _next_lobby(where, secret)
    host, port, name = place["door"]
    door = _Door(host, port, Secret(_secret_of(secret, name)))
    return _joined(door, place["rank"], place["size"], place["transport"], place["timeout"])


def _door_at(where: Path | str, secret: Secret) -> _Door:
    address: str = where if isinstance(where, str) else ""
    if isinstance(where, Path):
        address = json.loads(read_text(where))
    host, _, port = address.rpartition(":")
    return _Door(host, int(port), secret)


def _place_in(store: SignedStore, where: Path | str, facts: str, until: float) -> Any:
    """Asks in a lobby, and waits. Raises: PeerLost: it is there no more."""
    number = store.add(_COUNT, 1)
    store.set(f"{_ASKS}/{number}", facts)
    while not store.check([f"{_PLACE}/{number}"]):
        if store.check([f"{_REFUSED}/{number}"]):
            raise InvalidUsage(f"the run takes no such newcomer: {store.get(f'{_REFUSED}/{number}').decode()}")
        if time.monotonic() > until:
            raise CommTimeout(f"the run whose lobby is at {where} gave no place in time; is it stopped?", op="enter")
        store.add(f"{_ALIVE}/{number}", 1)
        time.sleep(_POLL_S)
    return json.loads(store.get(f"{_PLACE}/{number}"))


def _next_lobby(where: Path | str, secret: Secret) -> SignedStore:
    """The lobby that another rank opens when the first one has died. Raises: PeerLost: none does."""
    until = time.monotonic() + _GROWING_S
    while isinstance(where, Path) and where.exists() and time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, CommTimeout):
            return _door_at(where, secret).open(-1, _POLL_S)
        time.sleep(_POLL_S)
    raise PeerLost(
        f"{where}: the run has ended, or the rank that waited for newcomers has; if it still runs, start this again "
        "with the folder or the address that it has told since",
        op="enter",
    )


def grow(living: Communicator, lobby: Lobby | None, root: int, transport: str) -> Communicator:
    """The communicator of a new world, of the ranks of ``living`` in their order and then of the newcomers that wait;
    ``living`` itself where they did not come. Collective over ``living``.

    Args:
        lobby: on position ``root``; ``None`` elsewhere.
        transport: of :func:`hdpcomm.init`, for the new world.

    Raises: what :meth:`Communicator.agree` does: ranks have died.
    """
    server: SignedStore | None = None
    told = ""
    if lobby is not None and (newcomers := lobby.waiting()):
        name = secrets.token_hex(16)
        text = _secret_of(lobby.secret, name)
        server, door = _served(Secret(text))
        size = living.size + len(newcomers)
        place = {"door": [door.host, door.port, name], "size": size, "transport": transport}
        place["timeout"] = living.timeout
        lobby.give_places({each: place | {"rank": living.size + i} for i, each in enumerate(newcomers)})
        told = json.dumps(place | {"door": [door.host, door.port, text]})
    try:
        told = from_rank(living, told, root)
        if not told:
            return living
        place = json.loads(told)
        made: Communicator | None = None
        try:
            host, port, text = place["door"]
            door = _Door(host, port, Secret(text))
            made = _joined(door, living.rank, place["size"], transport, place["timeout"])
        except Error:
            made = None  # some newcomer did not come
        if living.agree(made is not None):
            assert made is not None
            living.close()
            return made
        if made is not None:
            made.abort("not all ranks came into the larger world")
        return living
    finally:
        if server is not None:
            server.close()


def _joined(door: _Door, rank: int, size: int, transport: str, timeout: float) -> Communicator:
    global _known_as
    store = door.open(rank, _GROWING_S)
    _known_as = listening_address(store)
    made = join(store, rank, size, timeout=timeout, transport=transport, devices=False, joining=_GROWING_S)
    made.barrier()  # nobody asks the store any more
    return made
