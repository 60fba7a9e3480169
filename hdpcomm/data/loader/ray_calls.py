"""Calls of Ray actors: with a deadline, and with errors of this library. Only this file imports ray."""

from __future__ import annotations

import threading
import time
from typing import Any

from hdpcomm.errors import Aborted, CommTimeout, Error, InvalidUsage

__all__ = ["get", "import_ray"]

_ROUND_S = 0.2  # between two looks whether the service was stopped


def get(answer: Any, deadline_s: float, *, what: str, stopped: threading.Event | None = None) -> Any:
    """Answer of an actor. Waits, while Ray starts a dead one again.

    Raises: Error that the actor raised; CommTimeout; Aborted when ``stopped`` is set meanwhile.
    """
    ray = import_ray()
    started = time.monotonic()
    try:
        while not ray.wait([answer], timeout=min(_ROUND_S, deadline_s))[0]:
            if stopped is not None and stopped.is_set():
                raise Aborted("the loader was closed while it waited for an answer")
            if time.monotonic() - started > deadline_s:
                raise CommTimeout(
                    f"{what} did not answer within {deadline_s:g} s; look at ray status and the logs of the actor, "
                    "give more --loaders, or use --loader threads"
                )
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Error):
            raise error.cause from None
        text = str(error.cause or error).strip().splitlines() or ["?"]
        raise Error(f"{what} failed ({text[-1]}); look at the logs of the actor") from None
    except ray.exceptions.RayError as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise Error(f"{what} is gone ({text[0]}); look at ray status, and resume from the last checkpoint") from None


def import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError:
        raise InvalidUsage("Ray is needed for --loader ray; pip install 'hdpcomm[ray]'") from None
    return ray
