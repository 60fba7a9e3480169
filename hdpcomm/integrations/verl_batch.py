"""Batches of verl as sequences of planned passes, and what of them is refused."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode

from hdpcomm.integrations.row_passes import Sequences
from hdpcomm.integrations.verl_options import unsupported
from hdpcomm.models.media import FAMILIES, MediaEncoder
from hdpcomm.train.losses.functions import IGNORE

__all__ = ["check_batch", "sequences_of", "temperature_of"]

_OUTPUTS = ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared")


def sequences_of(micro_batches: list[Any], encoder: MediaEncoder | None, *, values: bool, routes: bool) -> Sequences:
    """The rows of micro-batches, one after the other; every token but a row's first is a label, or has a value.

    Args:
        encoder: of the model's images and videos, which ``multi_modal_inputs`` have then.
    """
    nested = [each["input_ids"] for each in micro_batches]
    lengths = torch.cat([each.offsets().diff() for each in nested]).cpu()
    tokens = torch.cat([each.values() for each in nested]).cpu().long()
    labels = torch.zeros_like(tokens) if values else tokens.roll(-1)
    if not values:
        labels[lengths.cumsum(0) - 1] = IGNORE
    taken = None
    if routes:
        taken = torch.cat([each["routed_experts"].values() for each in micro_batches]).cpu().to(torch.int16)
    media = None
    if encoder is not None:
        given = chain.from_iterable(
            _media(each) or [{}] * len(ids.offsets().diff()) for each, ids in zip(micro_batches, nested, strict=True)
        )
        media = [{name: x for name, x in row.items() if name in encoder.names} for row in given]
    return Sequences(lengths.tolist(), tokens, labels, routes=taken, media=media)


def _media(data: Any) -> list[dict[str, Tensor]]:
    """The processor's results for the images and videos of each row; empty: the batch has none."""
    rows = tensordict_utils.get(data, "multi_modal_inputs", None)
    rows = [] if rows is None else [getattr(row, "data", row) for row in rows]
    return [{name: x for name, x in (row or {}).items() if x is not None} for row in rows]


def temperature_of(data: Any) -> float:
    """By which logits are divided. Raises InvalidUsage for several."""
    given = tensordict_utils.get(data, "temperature", 1.0)
    values = {float(each) for each in given} if isinstance(given, Tensor) and given.dim() else {float(given)}
    if len(values) != 1:
        raise unsupported("rows of several temperatures", "give those of one temperature at a time")
    return values.pop()


def check_batch(data: Any, encoder: MediaEncoder | None) -> None:
    """Raises InvalidUsage for what the engine would compute otherwise than verl's. Local."""
    for name in _OUTPUTS:
        if tensordict_utils.get_non_tensor_data(data, name, False):
            raise unsupported(name, "a loss gets log-probabilities and entropies only: set it to False")
    if tensordict_utils.get_non_tensor_data(data, "pad_mode", DatasetPadMode.NO_PADDING) != DatasetPadMode.NO_PADDING:
        raise unsupported("pad_mode other than no_padding", "use verl's default")
    known = {*encoder.names, "images_seqlens"} if encoder is not None else set()
    if others := sorted({name for row in _media(data) for name in row} - known):
        raise unsupported(f"multi_modal_inputs with {', '.join(others)}", f"known are images of {', '.join(FAMILIES)}")
    rows, places = data["input_ids"], data["position_ids"]
    if not rows.is_nested or not places.is_nested or places.dim() not in ((2,) if encoder is None else (2, 3)):
        raise unsupported("rows that are no nested tensors of tokens", "use a model and data of text")
    starts, lengths = rows.offsets()[:-1], rows.offsets().diff()
    expected = torch.arange(len(rows.values()), device=starts.device) - starts.repeat_interleave(lengths)
    found = places.values() if places.dim() == 2 else places.values()[0]  # before those in time, height and width
    if not torch.equal(found, expected.to(found.dtype)):
        raise unsupported("position_ids other than 0, 1, 2, ... in each row", "use rows without gaps")
