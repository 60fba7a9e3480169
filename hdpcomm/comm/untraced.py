"""Keeps torch.compile out of what communicates, and of plans made on the host.

Neither can be a part of a graph. The compiler would follow a call through the package down to the core; meanwhile it
makes example objects without their ``__init__``, and fails at some uses of numpy. A call of a marked function is a
graph break: the function and what it calls run as they are. Outside of compiled code it costs nothing. torch's own
``torch.compiler.disable`` imports the compiler at once and wraps each call.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["untraced"]

Marked = TypeVar("Marked", bound=Callable[..., Any])


def _skipping() -> Callable[[types.CodeType], None] | None:
    """A function that keeps the compiler from code and all that it calls; None: this torch has no such thing."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not hasattr(frames, "set_code_exec_strategy"):
        return None
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    return lambda code: frames.set_code_exec_strategy(code, strategy)


_skip = _skipping()


def untraced(marked: Marked) -> Marked:
    """A function, or all methods that a class itself defines. Local."""
    functions = vars(marked).values() if isinstance(marked, type) else (marked,)
    for function in functions:
        if isinstance(function, types.FunctionType):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
            function._torchdynamo_disable_msg = "it communicates, or plans on the host"  # type: ignore[attr-defined]
            if _skip is not None:
                _skip(function.__code__)
    return marked
