"""ZeRO-3: weights lie in parts at their owners, and each rank pulls a layer when its passes come to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.train.zero.buckets import Bucket, BucketShards, SharedShards, Unit, Units
    from hdpcomm.train.zero.side_work import SideWork

__all__ = ["PulledWeights", "has_part", "names_only", "set_part", "without_values"]


class PulledWeights:
    """Weights of which each rank keeps its part only, in memory that all ranks of the host map.

    A pass that comes to a layer finds it pulled: that began when the pass came to the layer before, on a thread or
    stream of its own. Nobody else takes part in that, so ranks may run any numbers of passes. The layer's memory is
    given back when the pass has come to the next one; so at most two layers are there at a time, and the root, what is
    in no layer, as long as the passes of a step last. The backward pass finds the last layer of the forward pass still
    there, and the next forward pass the first one.

    Outside of that a parameter has its shape and no values: what reads it gets NaN, what writes into it an error, and
    ``state_dict()`` is refused.

    Args:
        units: the layers, and the units of parameters.
        buckets: of trained and frozen parameters, each of one unit.
        dtype: in which floating-point parameters are pulled; ``None``: their own.
    """

    def __init__(
        self,
        units: Units,
        buckets: Sequence[Bucket],
        memory: SharedShards,
        side: SideWork,
        dtype: torch.dtype | None,
    ) -> None:
        self._units, self._side = units, side
        self._parts: dict[int, BucketShards] = {}
        self._by_unit: dict[int, list[Bucket]] = {}
        self._whole: dict[int, Tensor] = {}
        """By bucket: its parameters, in a storage that has no memory while its unit is not here."""
        for bucket in buckets:
            first = bucket.parameters[0]
            narrow = dtype if dtype is not None and first.is_floating_point() else first.dtype
            self._parts[id(bucket)] = memory.reserve(bucket, narrow)
            self._by_unit.setdefault(id(units.of[id(bucket.parameters[0])]), []).append(bucket)
            self._whole[id(bucket)] = whole = torch.empty(
                bucket.length, dtype=narrow, device=bucket.parameters[0].device
            )
            whole.untyped_storage().resize_(0)
        self._here: dict[int, Unit] = {}
        self._coming: dict[int, tuple[Unit, Callable[[], object]]] = {}
        self._open = False
        units.listen(self._on_layer_entered)
        for module in (each for chunk in units.chunks for each in chunk.modules()):
            module.register_state_dict_post_hook(_refuse_no_values)  # type: ignore[no-untyped-call]

    def own(self, bucket: Bucket) -> Tensor:
        """This rank's part of a bucket, as others pull it; a view."""
        return self._parts[id(bucket)].own

    @torch.no_grad()
    def take_over(self, bucket: Bucket) -> Tensor:
        """This rank's part of a bucket in the parameters' own type; the parameters have no values from then on. Local.

        Others see it after the next operation of all of them.
        """
        first = bucket.parameters[0]
        wide = torch.zeros(bucket.part, dtype=first.dtype, device=first.device)
        narrow = self.own(bucket)
        for parameter, start, stop, span in bucket.spans(bucket.sharding.own):
            if has_part(parameter):
                values = _taken_part(parameter, start, stop)
            else:
                values = parameter.detach().flatten()[start:stop]
            if start < stop:
                wide[span] = values
            parameter.data = without_values(parameter.shape, narrow.dtype, narrow.device)
        narrow.copy_(wide)
        return narrow if narrow.dtype == wide.dtype else wide

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context of the passes of a step, or of an evaluation. Local; all ranks must have agreed on what they run
        since the weights have last changed, and must be through before they change."""
        self._open = True
        try:
            for root in self._units.roots:
                self._ensure_resident(root)
            yield
        finally:
            self._open = False
            for unit in [*self._here.values(), *(unit for unit, _ in self._coming.values())]:
                self._drop(unit)
            self._side.close()

    def _on_layer_entered(self, unit: Unit, backward: bool) -> None:
        """A pass has come to a layer."""
        if not self._open:
            return
        beside = unit.before if backward else unit.after
        self._ensure_resident(unit)
        kept = {id(unit), id(beside), *map(id, self._units.roots)}
        for other in [*self._here.values(), *(each for each, _ in self._coming.values())]:
            if id(other) not in kept:
                self._drop(other)
        if beside is not None and id(beside) not in self._here and id(beside) not in self._coming:
            self._coming[id(beside)] = beside, self._side.start(partial(self._pull, beside))

    def _ensure_resident(self, unit: Unit) -> None:
        if id(unit) in self._here:
            return
        if id(unit) in self._coming:
            self._coming.pop(id(unit))[1]()
        else:
            self._side.start(partial(self._pull, unit))()
        self._here[id(unit)] = unit
        for bucket in self._by_unit.get(id(unit), ()):
            whole = self._whole[id(bucket)]
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                parameter.data = whole[offset : offset + parameter.numel()].view(parameter.shape)

    @torch.no_grad()
    def _pull(self, unit: Unit) -> None:
        for bucket in self._by_unit.get(id(unit), ()):
            parts, whole = self._parts[id(bucket)], self._whole[id(bucket)]
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            for owner in range(bucket.parts):
                whole[owner * bucket.part : (owner + 1) * bucket.part].copy_(parts.part(owner))

    def _drop(self, unit: Unit) -> None:
        if id(unit) in self._coming:
            with suppress(Exception):  # nobody needs what it brings
                self._coming.pop(id(unit))[1]()
        self._here.pop(id(unit), None)
        for bucket in self._by_unit.get(id(unit), ()):
            whole = self._whole[id(bucket)]
            for parameter in bucket.parameters:
                parameter.data = without_values(parameter.shape, whole.dtype, whole.device)
            whole.untyped_storage().resize_(0)


def without_values(shape: torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of a shape without the memory for it: each element is the same NaN. Local."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


_names_only: ContextVar[bool] = ContextVar("names_only", default=False)


@contextmanager
def names_only() -> Iterator[None]:
    """Context in which ``state_dict()`` of a model is not refused, as its values are not used. Local."""
    token = _names_only.set(True)
    try:
        yield
    finally:
        _names_only.reset(token)


def _refuse_no_values(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook of ``state_dict()``, after it: a file of its values would hold NaN. Not with ``keep_vars=True``."""
    for name in () if _names_only.get() else module._parameters:
        value = state.get(prefix + name)
        if value is not None and not isinstance(value, nn.Parameter) and value.numel() > 1 and not any(value.stride()):
            raise InvalidUsage(
                f"{prefix}{name} has no values between steps, since zero=3 keeps a part of it on each rank: save with "
                "all ranks by the trainer, save_model() of transformers' or whole_tensors() of hdpcomm's"
            )


def set_part(parameter: Tensor, start: int, values: Tensor) -> None:
    """Gives a parameter :func:`without_values` this rank's part of it, from the element ``start`` on, for
    :meth:`PulledWeights.take_over`. Local."""
    parameter._hdpcomm_part = (start, values)  # type: ignore[attr-defined]


def has_part(parameter: Tensor) -> bool:
    """Whether :func:`set_part` has given it one."""
    return hasattr(parameter, "_hdpcomm_part")


def _taken_part(parameter: nn.Parameter, start: int, stop: int) -> Tensor:
    begin: int
    values: Tensor
    begin, values = parameter.__dict__.pop("_hdpcomm_part")
    if (begin, begin + values.numel()) != (start, stop):
        raise InvalidUsage(
            f"a parameter of shape {tuple(parameter.shape)} was made with the elements {begin} to "
            f"{begin + values.numel()} on this rank, and the trainer needs {start} to {stop}: freeze parameters, and "
            "cut the model, before materialize()"
        )
    return values
