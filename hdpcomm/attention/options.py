"""``AttentionOptions``: the rarely given arguments of the layers of :mod:`hdpcomm.attention`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from hdpcomm.arguments import check_type
from hdpcomm.attention.packs import CuSeqlens
from hdpcomm.attention.variants import AttentionCosts
from hdpcomm.errors import InvalidUsage

__all__ = ["AttentionOptions", "careful_of", "options_of"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """Rarely given arguments of attention and linear layers; the same on all ranks that share a call.

    A layer refuses each field that it does not have: ``ring_attention`` has ``variant``, ``cu_seqlens_k``, ``softcap``,
    ``sinks`` and ``chunk``; ``mla_attention`` has ``variant`` and ``send``; ``delta_rule`` and ``ssd`` have
    ``exchange``. All of them have ``costs`` and ``check``, ``short_conv`` has only ``check``, and ``packing`` takes
    ``variant``, ``costs`` and ``check``.

    Attributes:
        variant: how attention is divided among ranks: ``ring``, ``gather``, ``ulysses``, ``hybrid``, or ``auto``, the
            lowest estimate by ``costs``; all give the same result.
        cu_seqlens_k: like ``cu_seqlens``, for the keys, where their lengths differ (a sequence may have 0 keys);
            queries and keys are then aligned at their ends. Not with a tree or a mask.
        softcap: scores become softcap * tanh(score / softcap), where the backend can; 0: they stay.
        sinks: [heads], one more score per head that takes part in the softmax without a value; each rank gets its
            share of the gradient, to be summed over the ranks like that of any parameter.
        chunk: tokens of a chunk: a query sees the keys of its own chunk only, causally; chunks begin at the multiples
            of it in each sequence (Llama 4). 0: none. Not with a tree or a mask.
        send: what ranks of ``mla_attention`` send: ``latent``, ``kv``, or ``auto``, the lower estimate by ``costs``.
        exchange: how states of linear layers travel (:mod:`hdpcomm.attention.linear.exchange`): ``gather``, ``scan``,
            ``pipeline``, or ``auto``, the lowest estimate by ``costs``.
        costs: the costs by which ``auto`` chooses; default: those of the device's type.
        check: ranks compare their arguments first, and the result is searched for NaN, so that bad input is an error on
            all ranks. Default: on the CPU; it costs two small all-gathers.
    """

    variant: str = "auto"
    cu_seqlens_k: CuSeqlens | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunk: int = 0
    send: str = "auto"
    exchange: str = "auto"
    costs: AttentionCosts | None = None
    check: bool | None = None


def options_of(layer: str, given: AttentionOptions | None, *known: str) -> AttentionOptions:
    """The options of a call of ``layer``, which has the fields ``known``. Raises InvalidUsage for any other field."""
    if given is None:
        return AttentionOptions()
    check_type(layer, "options", given, AttentionOptions)
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name not in known and (value is not None if field.default is None else value != field.default):
            raise InvalidUsage(
                f"{layer} was given options with {field.name}={value!r}, which it does not have; leave it out "
                f"({layer} has {', '.join(known)})"
            )
    if given.costs is not None:
        check_type(layer, "costs", given.costs, AttentionCosts)
    return given


def careful_of(x: object, options: AttentionOptions | None) -> bool:
    """Whether the ranks of a call on ``x`` compare their arguments: by default on the CPU. Takes bad input, too, which
    the comparison then tells to all ranks."""
    check = options.check if isinstance(options, AttentionOptions) else None
    return (not isinstance(x, Tensor) or x.device.type == "cpu") if check is None else check
