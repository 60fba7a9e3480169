"""Does a model give on a pack what it gives on each sequence alone, with the attention that it came with?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.attention import packing, positions
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.models.heads import SEQUENCE, classified_token
from hdpcomm.models.huggingface import decoder_of
from hdpcomm.models.lean_layers import take_lean_off

__all__ = [
    "CHECKED_TOKENS",
    "check_logits",
    "check_same_logits",
    "check_stages",
    "check_takes_tokens",
    "few_logits",
    "is_random",
]

_CU_SEQLENS = (0, 7, 8, 13)
CHECKED_TOKENS = _CU_SEQLENS[-1]
_SHORT = 3
"""Length of a model's windows and chunks during the check, so that sequences of a few
tokens are longer than any."""
_WINDOWS = re.compile(r"(window|window_size|attention_window\w*|attention_chunk_size|local_attention|floor_scale)$")
_CHOICES = re.compile(r"index_topk$")
"""Names of numbers of chosen keys, which are small then, too; only where rounding chooses no others."""
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Models that are float64 but for norms, gates and states, which compute in float32, are off by 1e-7 to 1.1e-5."""
_LOW_TOLERANCE = 0.1


def check_logits(adapted: Any) -> None:
    """Compares the logits of an adapted causal LM on a pack of short sequences with those of each sequence alone under
    the attention that the model came with. Local. Raises InvalidUsage where they differ.
    """
    causal_lm = adapted.causal_lm
    if _on_meta(causal_lm):
        return
    with _short_windows(causal_lm):
        found, wanted = _own_logits(adapted), _alone(causal_lm)
        if _differs(causal_lm, found, wanted) and not _differs(causal_lm, _packed(causal_lm), wanted):
            raise InvalidUsage(
                f"{type(causal_lm).__name__} does more between its decoder and its logits than its last layer "
                f"({type(adapted.last_layer).__name__}), so its loss cannot be made from the decoder's "
                "outputs; give a causal LM whose last layer alone makes them"
            )
    _check_close(causal_lm, found, wanted, partial(_own_logits, adapted))
    _check_windows(causal_lm, wanted)


def _own_logits(adapted: Any) -> Tensor:
    """As :func:`few_logits`; of a classifier of sequences, of their classified tokens only, as transformers gives."""
    logits = few_logits(adapted)
    if adapted.labels_of != SEQUENCE:
        return logits
    tokens, _ = _few_tokens(adapted.causal_lm)
    padding = adapted.causal_lm.config.get_text_config().pad_token_id
    return logits[[a + classified_token(tokens[a:b], padding) for a, b in pairwise(_CU_SEQLENS)]]


def few_logits(adapted: Any) -> Tensor:
    """Logits of a pack of short sequences. Local; with tensor parallelism collective over its ranks."""
    tokens, places = _few_tokens(adapted.causal_lm)
    with _evaluating(adapted), torch.no_grad(), _refusing_on_errors(adapted.causal_lm):
        found: Tensor = adapted(tokens, positions=places, cu_seqlens=_cu_seqlens(), comm=None)
    return found


def check_takes_tokens(adapted: nn.Module, model: nn.Module) -> None:
    """Raises InvalidUsage unless a module gives logits ``[tokens, vocabulary]`` of a few tokens. Local.

    Args:
        adapted: the module in the trainer's form; ``model``: as it was given.
    """
    if _on_meta(model):
        return
    tokens, places = _tokens_of_any_vocabulary(model)
    try:
        with _evaluating(model), torch.no_grad():
            found = adapted(tokens, positions=places, cu_seqlens=_cu_seqlens(), comm=None)
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        reason = None if isinstance(found, Tensor) and found.shape[:-1] == tokens.shape else f"it gave {shape}"
    except Error:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        raise InvalidUsage(
            f"{type(model).__name__} does not make logits [tokens, vocabulary] of int64 tokens [{len(tokens)}] "
            f"({reason}); give a causal LM of transformers, or a module as adapt() describes it"
        )


def is_random(model: nn.Module, hidden: Tensor | None = None) -> bool:
    """Whether forward passes in training mode differ, as with dropout or noise in routers.

    Two forward passes on a few tokens in training mode, with other random numbers, tell. Random state, modes and
    buffers are as before afterwards. Local; collective over the ranks that share the model's layers or experts.

    Args:
        model: in the trainer's form. One without memory (on the meta device) is not looked at.
        hidden: of a later stage of a pipeline, what holds those of ``CHECKED_TOKENS`` tokens.
    """
    if _on_meta(model):
        return False
    tokens, places = _tokens_of_any_vocabulary(model)
    x = tokens if hidden is None else hidden.normal_(generator=torch.Generator(hidden.device).manual_seed(0))
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices), _in_mode(model, training=True), torch.no_grad(), _without_zeros(model):

        def run(seed: int) -> Tensor:
            torch.manual_seed(seed)
            out: Tensor = model(x, positions=places, cu_seqlens=_cu_seqlens(), comm=None)
            return out

        first, other = run(0), run(1)
        if torch.equal(first, other):
            return False
        again = run(0)  # kernels whose sums have no order differ for the same numbers, too
        return _relative(other, first) > min(2 * _relative(again, first), _limit(model))


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Parameters that are 0 are noise inside, so that the branches of new adapters count; they and all buffers are as
    before afterwards."""
    zeros = [p for p in model.parameters() if p.is_floating_point() and not p.any()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        for parameter in zeros:
            parameter.normal_(std=0.1)
        yield
    finally:
        for parameter in zeros:
            parameter.zero_()
        for buffer, value in buffers:
            buffer.copy_(value)


def check_same_logits(model: nn.Module, found: Tensor, wanted: Tensor, what: str) -> None:
    """Raises InvalidUsage where logits differ from those of the whole model. Local."""
    if _differs(model, found, wanted):
        raise InvalidUsage(
            f"{what} gives other logits than whole ({_error_text(model, found, wanted)}): its layers do more than "
            "they tell; train it without, and load it anew"
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


def _tokens_of_any_vocabulary(model: nn.Module) -> tuple[Tensor, Tensor]:
    """As :func:`_few_tokens`, of a model that does not tell its vocabulary."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    tokens = torch.arange(CHECKED_TOKENS, device=device) % 2
    return tokens, positions(_cu_seqlens(), rank=0, size=1, device=device)


def _few_tokens(model: Any) -> tuple[Tensor, Tensor]:
    """Tokens of the pack and their positions."""
    device: torch.device = model.get_input_embeddings().weight.device
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = (torch.arange(CHECKED_TOKENS, device=device) * 7 + 3) % vocabulary
    return tokens, positions(_cu_seqlens(), rank=0, size=1, device=device)


def _output(model: Any, tokens: Tensor, **options: Tensor) -> Tensor:
    """Logits [tokens, vocabulary], of a classifier of sequences [1, outputs], or the last hidden states."""
    with _refusing_on_errors(model):
        out = model(input_ids=tokens[None], use_cache=False, **options)
    found: Tensor = out.logits if getattr(out, "logits", None) is not None else out[0]
    return found.reshape(-1, found.shape[-1])


@contextmanager
def _refusing_on_errors(model: nn.Module) -> Iterator[None]:
    """Refuses a model for what it raises on a few tokens."""
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
    """Each sequence by itself, in the attention that eager layers and masks define, by the model's own layers."""
    tokens, _ = _few_tokens(model)
    text = decoder_of(model)
    ours, put_lean_back = text.config._attn_implementation, take_lean_off(model)
    text.set_attn_implementation("eager")
    try:
        with _evaluating(model), torch.no_grad():
            return torch.cat([_output(model, tokens[a:b]) for a, b in pairwise(_CU_SEQLENS)])
    finally:
        text.set_attn_implementation(ours)
        put_lean_back()


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
    """Tolerance of the narrowest type in which the model computes; its logits may be wider."""
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((_TOLERANCE.get(dtype, _LOW_TOLERANCE) for dtype in types), default=_TOLERANCE[torch.float32])


def _differs(model: nn.Module, found: Tensor, wanted: Tensor) -> bool:
    return found.shape != wanted.shape or not _relative(found, wanted) <= _limit(model)


def _error_text(model: nn.Module, found: Tensor, wanted: Tensor) -> str:
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)}, where {tuple(wanted.shape)} was expected"
    return f"relative error {_relative(found, wanted):.1e}, at most {_limit(model):.0e} was expected"


def _check_close(model: Any, found: Tensor, wanted: Tensor, run: Callable[[], Tensor]) -> None:
    """``run`` gives ``found`` anew."""
    if not _differs(model, found, wanted):
        return
    if getattr(model.config.get_text_config(), "index_topk", None):
        with _short_windows(model, choices=False):
            same = not _differs(model, run(), _alone(model))
        if same:
            raise InvalidUsage(
                f"{type(model).__name__} gives other logits on a pack than on each of its sequences alone only where "
                f"its indexers choose some of the keys ({_error_text(model, found, wanted)}): scores that are equal, "
                "which few index heads (index_n_heads) often make 0, are chosen in no order by the model's own "
                "torch.topk, and by their places here; check=False skips this comparison"
            )
    raise InvalidUsage(
        f"{type(model).__name__} gives other logits on a pack than on each of its sequences alone "
        f"({_error_text(model, found, wanted)}): something else than its attention looks at other tokens, its "
        "attention differs from what it tells AttentionInterface, it counts positions in a way of its own, or its "
        "logits are changed after the last layer; check=False skips this comparison"
    )


@contextmanager
def _short_windows(model: nn.Module, *, choices: bool = True) -> Iterator[None]:
    """Every window of the model's configuration and layers, and with ``choices`` every number of chosen keys, is a few
    tokens long; each returns to its own length."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        owners[id(module)] = module
        config: Any = getattr(module, "config", None)
        text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else None
        owners |= {id(each): each for each in (config, text) if each is not None}
    choices = choices and all(p.dtype in _TOLERANCE for p in model.parameters())
    changed = []
    try:
        for owner in owners.values():
            for name, value in list(vars(owner).items()):
                short = _WINDOWS.search(name) or (choices and _CHOICES.search(name))
                if type(value) is int and value > _SHORT and short:
                    changed.append((owner, name, value))
                    setattr(owner, name, _SHORT)
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def _evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """No dropout, no jitter."""
    return _in_mode(model, training=False)


@contextmanager
def _in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Each module returns to its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before
