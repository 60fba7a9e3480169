"""Attention backends, which compute one block of a distributed attention."""

from __future__ import annotations

from functools import lru_cache

import torch

from hdpcomm.attention.backends.base import Backend, Problem
from hdpcomm.attention.backends.cuda import CudnnBackend, EfficientBackend, FlashAttn2Backend, FlashBackend
from hdpcomm.attention.backends.dense import CpuBackend, DividedBackend, PaddedBackend, ReferenceBackend
from hdpcomm.errors import InvalidUsage

__all__ = ["Problem", "available", "choose"]

_BACKENDS: tuple[Backend, ...] = (
    CpuBackend(),
    DividedBackend(CudnnBackend(), FlashBackend(), least=2048, generations=(9, 10)),
    FlashBackend(),
    FlashAttn2Backend(),
    CudnnBackend(),
    EfficientBackend(),
    ReferenceBackend(),
)
"""In order of preference. torch's flash attention has the kernels of flash-attn 2, which adds the softcap."""


def available(problem: Problem) -> dict[str, str | None]:
    """Every backend by name, with the reason why it cannot compute ``problem`` here, or None if it can."""
    return {backend.name: backend.refuses(problem) for backend in _BACKENDS}


def choose(name: str, problem: Problem) -> Backend:
    """The backend called ``name``, or with "auto" the first that can compute ``problem``; padded where V has a head_dim
    that its kernel does not take.

    Raises: InvalidUsage, which names the alternatives.
    """
    return _choose(name, problem, torch.are_deterministic_algorithms_enabled())


@lru_cache(maxsize=256)
def _choose(name: str, problem: Problem, _deterministic: bool) -> Backend:
    reasons = available(problem)
    if name == "auto":
        for backend in _BACKENDS:
            if reasons[backend.name] is None:
                return _fitted(backend, problem)
        raise InvalidUsage(f"no attention backend can do this: {_listed(reasons)}")
    if name not in reasons:
        raise InvalidUsage(f"there is no attention backend {name!r}; expected auto or one of {', '.join(reasons)}")
    if reasons[name] is not None:
        able = [other for other, reason in reasons.items() if reason is None]
        advice = f"use {' or '.join(able)}" if able else f"nor can another: {_listed(reasons)}"
        raise InvalidUsage(f"the attention backend {name!r} cannot do this: {reasons[name]}; {advice}")
    return _fitted(next(backend for backend in _BACKENDS if backend.name == name), problem)


def _fitted(backend: Backend, problem: Problem) -> Backend:
    return backend if backend.own_v_dim or problem.v_dim == problem.head_dim else PaddedBackend(backend)


def _listed(reasons: dict[str, str | None]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
