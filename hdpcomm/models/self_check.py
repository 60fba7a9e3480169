"""Does an adapted model give the logits of the model that it came from?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.attention import positions
from hdpcomm.errors import InvalidUsage

__all__ = ["check_logits", "check_same_logits", "few_logits"]

_CU_SEQLENS = (0, 7, 8, 13)
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_TOLERANCE = 0.1


def check_logits(adapted: nn.Module, causal_lm: Any, attention: str) -> None:
    """Compares the logits of a pack of short sequences with those of each sequence alone under the attention that the
    model came with. Local. Raises InvalidUsage where they differ.
    """
    tokens = _few_tokens(causal_lm)
    found = few_logits(adapted)
    with _evaluating(adapted), torch.no_grad():
        ours = causal_lm.config._attn_implementation
        causal_lm.set_attn_implementation(attention if attention != ours else "eager")
        try:
            wanted = torch.cat(
                [causal_lm(input_ids=tokens[None, a:b], use_cache=False).logits[0] for a, b in pairwise(_CU_SEQLENS)]
            )
        finally:
            causal_lm.set_attn_implementation(ours)
    error = _relative(found, wanted)
    limit = _TOLERANCE.get(wanted.dtype, _LOW_TOLERANCE)
    if not error <= limit:
        raise InvalidUsage(
            f"{type(causal_lm).__name__} gives other logits on a pack than on each of its sequences alone (relative "
            f"error {error:.1e}, at most {limit:.0e} was expected): something else than its attention looks at other "
            "tokens, its attention differs from what it tells AttentionInterface, or its logits are changed after the "
            "last layer; check=False skips this comparison"
        )


def few_logits(adapted: Any) -> Tensor:
    """Logits of a pack of short sequences. Local; with tensor parallelism collective over its ranks."""
    tokens = _few_tokens(adapted.causal_lm)
    cu_seqlens = torch.tensor(_CU_SEQLENS, dtype=torch.int32)
    places = positions(cu_seqlens, rank=0, size=1, device=tokens.device)
    with _evaluating(adapted), torch.no_grad():
        found: Tensor = adapted(tokens, positions=places, cu_seqlens=cu_seqlens, comm=None)
    return found


def check_same_logits(found: Tensor, wanted: Tensor, what: str) -> None:
    """Raises InvalidUsage where logits differ from those of the whole model. Local."""
    error = _relative(found, wanted)
    limit = _TOLERANCE.get(wanted.dtype, _LOW_TOLERANCE)
    if not error <= limit:
        raise InvalidUsage(
            f"{what} gives other logits than whole (relative error {error:.1e}, at most {limit:.0e} was expected): its "
            "layers do more than its plan tells; train it without, and load it anew"
        )


def _few_tokens(causal_lm: Any) -> Tensor:
    device: torch.device = causal_lm.get_input_embeddings().weight.device
    vocabulary = int(causal_lm.config.get_text_config().vocab_size)
    return (torch.arange(_CU_SEQLENS[-1], device=device) * 7 + 3) % vocabulary


def _relative(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout, no jitter; each module returns to its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
