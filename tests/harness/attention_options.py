"""Arguments of attention and linear layers as tests write them: all in one dict."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hdpcomm.attention import AttentionOptions

__all__ = ["with_options"]

_FIELDS = frozenset(field.name for field in fields(AttentionOptions))


def with_options(**arguments: Any) -> dict[str, Any]:
    """The arguments with those that are fields of :class:`AttentionOptions` as one ``options``."""
    given = {name: arguments.pop(name) for name in _FIELDS.intersection(arguments)}
    return {**arguments, "options": AttentionOptions(**given)} if given else arguments
