"""Does a model give on a pack what it gives on each sequence alone, with the attention that it came with?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.attention import packing, positions
from hdpcomm.errors import Error, InvalidUsage

__all__ = ["check_logits", "check_outputs", "check_same_logits", "check_stages", "few_logits"]

_CU_SEQLENS = (0, 7, 8, 13)
_SHORT = 3
"""What the windows of a model, and other lengths that it goes by, are during the check, so that sequences of a few
tokens are longer than any."""
_WINDOWS = re.compile(r"(window|window_size|attention_window\w*|attention_chunk_size|local_attention|floor_scale)$")
_CHOICES = re.compile(r"index_topk$")
"""The same of keys that are chosen; only where rounding chooses no others."""
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Models that are float64 but for their norms, which compute in float32, are off by 1e-6."""
_LOW_TOLERANCE = 0.1


def check_logits(adapted: Any) -> None:
    """Compares the logits of an adapted causal LM on a pack of short sequences with those of each sequence alone under
    the attention that the model came with. Local. Raises InvalidUsage where they differ.
    """
    causal_lm = adapted.causal_lm
    if _on_meta(causal_lm):
        return
    with _short_windows(causal_lm):
        found, wanted = few_logits(adapted), _alone(causal_lm)
        if _differs(causal_lm, found, wanted) and not _differs(causal_lm, _packed(causal_lm), wanted):
            raise InvalidUsage(
                f"{type(causal_lm).__name__} does more between its decoder and its logits than its last layer "
                f"({type(causal_lm.get_output_embeddings()).__name__}), so its loss cannot be made from the decoder's "
                "outputs; use hdpcomm.models.huggingface.enable(model), whose loss is the model's own"
            )
    _check_close(causal_lm, found, wanted)
    _check_windows(causal_lm, wanted)


def check_outputs(model: Any) -> None:
    """The same for a transformers model by itself: its logits, or its last hidden states where it has no head."""
    if _on_meta(model):
        return
    with _short_windows(model):
        found, wanted = _packed(model), _alone(model)
    _check_close(model, found, wanted)
    _check_windows(model, wanted)


def few_logits(adapted: Any) -> Tensor:
    """Logits of a pack of short sequences. Local; with tensor parallelism collective over its ranks."""
    tokens, places = _few_tokens(adapted.causal_lm)
    with _evaluating(adapted), torch.no_grad(), _refusing_on_errors(adapted.causal_lm):
        found: Tensor = adapted(tokens, positions=places, cu_seqlens=_cu_seqlens(), comm=None)
    return found


def check_same_logits(model: nn.Module, found: Tensor, wanted: Tensor, what: str) -> None:
    """Raises InvalidUsage where logits differ from those of the whole model. Local."""
    if _differs(model, found, wanted):
        raise InvalidUsage(
            f"{what} gives other logits than whole ({_error_text(model, found, wanted)}): its layers do more than its "
            "plan tells; train it without, and load it anew"
        )


def check_stages(adapted: Any, stages: Sequence[Callable[..., Any]]) -> None:
    """Compares what the stages of a pipeline, one after the other, give on a pack of short sequences with the logits of
    the whole model. Local. Raises InvalidUsage where they differ."""
    causal_lm = adapted.causal_lm
    if _on_meta(causal_lm):
        return
    made, places = _few_tokens(causal_lm)
    reason = None
    with _short_windows(causal_lm), _evaluating(adapted):
        wanted = few_logits(adapted)
        try:
            with torch.no_grad():
                for stage in stages:
                    made = stage(made, positions=places, cu_seqlens=_cu_seqlens(), comm=None)
        except Error:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    if reason is None and _differs(causal_lm, made, wanted):
        reason = _error_text(causal_lm, made, wanted)
    if reason is not None:
        raise InvalidUsage(
            f"{type(causal_lm).__name__} cut into {len(stages)} stages does not give the logits of the whole model "
            f"({reason}): its layers need more of each other, or of its tokens, than hidden states; train it without "
            "pipelines"
        )


def _on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _cu_seqlens() -> Tensor:
    return torch.tensor(_CU_SEQLENS, dtype=torch.int32)


def _few_tokens(model: Any) -> tuple[Tensor, Tensor]:
    """Tokens of the pack and their positions."""
    device: torch.device = model.get_input_embeddings().weight.device
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = (torch.arange(_CU_SEQLENS[-1], device=device) * 7 + 3) % vocabulary
    return tokens, positions(_cu_seqlens(), rank=0, size=1, device=device)


def _output(model: Any, tokens: Tensor, **options: Tensor) -> Tensor:
    """Logits [tokens, vocabulary], or the last hidden states."""
    with _refusing_on_errors(model):
        out = model(input_ids=tokens[None], use_cache=False, **options)
    found: Tensor = out.logits if getattr(out, "logits", None) is not None else out[0]
    return found[0]


@contextmanager
def _refusing_on_errors(model: nn.Module) -> Iterator[None]:
    """What a model raises on a few tokens is told as the reason why it is refused."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        raise InvalidUsage(
            f"{type(model).__name__} does not run on a pack of a few tokens ({type(error).__name__}: {error}): it does "
            "something of its own with its mask, or needs more than tokens; check=False skips this comparison"
        ) from error


def _packed(model: Any) -> Tensor:
    tokens, places = _few_tokens(model)
    with _evaluating(model), torch.no_grad(), packing(None, _cu_seqlens()):
        return _output(model, tokens, position_ids=places[None])


def _alone(model: Any) -> Tensor:
    """Each sequence by itself, in the attention that eager layers and masks define."""
    tokens, _ = _few_tokens(model)
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with _evaluating(model), torch.no_grad():
            return torch.cat([_output(model, tokens[a:b]) for a, b in pairwise(_CU_SEQLENS)])
    finally:
        model.set_attn_implementation(ours)


def _check_windows(model: Any, wanted: Tensor) -> None:
    """Refuses a window that the configuration names if short ones change nothing: it was fixed when the model was made,
    so the comparison did not see it. ``wanted``: outputs with short windows."""
    config = model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None) or ("sliding",)
    if not window or window <= _SHORT or not any("sliding" in kind for kind in kinds):
        return
    if torch.equal(wanted, _alone(model)):
        raise InvalidUsage(
            f"{type(model).__name__} has sliding_window={window} in its configuration, but no call of its attention "
            "passes it; set config.sliding_window = None if the model does without, or check=False skips this"
        )


def _relative(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def _limit(model: nn.Module) -> float:
    """That of the narrowest type in which the model computes; its logits may be wider."""
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((_TOLERANCE.get(dtype, _LOW_TOLERANCE) for dtype in types), default=_TOLERANCE[torch.float32])


def _differs(model: nn.Module, found: Tensor, wanted: Tensor) -> bool:
    return found.shape != wanted.shape or not _relative(found, wanted) <= _limit(model)


def _error_text(model: nn.Module, found: Tensor, wanted: Tensor) -> str:
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)}, where {tuple(wanted.shape)} was expected"
    return f"relative error {_relative(found, wanted):.1e}, at most {_limit(model):.0e} was expected"


def _check_close(model: Any, found: Tensor, wanted: Tensor) -> None:
    if _differs(model, found, wanted):
        raise InvalidUsage(
            f"{type(model).__name__} gives other logits on a pack than on each of its sequences alone "
            f"({_error_text(model, found, wanted)}): something else than its attention looks at other tokens, its "
            "attention differs from what it tells AttentionInterface, it counts positions in a way of its own, or its "
            "logits are changed after the last layer; check=False skips this comparison"
        )


@contextmanager
def _short_windows(model: nn.Module) -> Iterator[None]:
    """Every window of the model's configuration and layers is a few tokens long; each returns to its own length."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        owners[id(module)] = module
        config: Any = getattr(module, "config", None)
        text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else None
        owners |= {id(each): each for each in (config, text) if each is not None}
    wide = all(p.dtype in _TOLERANCE for p in model.parameters())
    changed = []
    try:
        for owner in owners.values():
            for name, value in list(vars(owner).items()):
                short = _WINDOWS.search(name) or (wide and _CHOICES.search(name))
                if type(value) is int and value > _SHORT and short:
                    changed.append((owner, name, value))
                    setattr(owner, name, _SHORT)
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


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
