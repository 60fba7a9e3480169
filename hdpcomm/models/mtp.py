"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): layers behind a causal LM that predict tokens
further ahead.

Depth k joins, at token i, the hidden states of the depth before it (those of the model: as its head gets them) with the
embedding of token i + k, and predicts token i + k + 1 by one more layer of the model's kind and the model's head. These
layers lie behind the others in the decoder's list, which its forward pass does not run; their names are those of
DeepSeek-V3's checkpoints, ``model.layers.61.eh_proj`` and so on.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.arguments import check_number, check_whole
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import IGNORE
from hdpcomm.models.huggingface import decoder_of

__all__ = [
    *("MultiToken", "add_mtp", "as_saved_ahead", "decoders_ahead", "depths_of_config", "is_ahead", "model_name"),
    "tensors_ahead",
]

_WEIGHT = "hdpcomm_mtp_weight"
_FLAT_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}
"""Names in checkpoints of Qwen3-Next and models like it, which have one depth; other parts: ``mtp.layers.0``."""


def add_mtp(model: Any, depth: int = 1, *, weight: float = 0.3) -> None:
    """Gives a causal LM of transformers ``depth`` new layers for multi-token prediction. Local; before
    :func:`hdpcomm.models.adapt`.

    In training the loss gets ``weight / depth`` times the sum of their cross entropies, which is divided by the labels
    of the model's own loss. :attr:`hdpcomm.train.StepMetrics.loss` stays the model's own;
    :attr:`~hdpcomm.train.StepMetrics.mtp_loss` is the mean of theirs. Evaluation and log-probabilities leave them out.

    Args:
        model: its decoder has ``layers`` and a ``norm``, and is neither cut nor adapted.

    Raises: InvalidUsage: it is another model, or has such layers already.
    """
    check_whole("add_mtp()", "depth", depth, least=1)
    check_number("add_mtp()", "weight", weight, above=0)
    decoder: Any = decoder_of(model) if hasattr(model, "base_model") else None
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module) or hasattr(model, "peft_config"):
        raise InvalidUsage(
            f"add_mtp() got a {type(model).__name__}; expected a causal LM of transformers, without LoRA and before "
            "adapt(), whose decoder has `layers` and a `norm`"
        )
    if hasattr(model, _WEIGHT) or any("forward" in vars(module) for module in layers[-1].modules()):
        raise InvalidUsage(f"this {type(model).__name__} has layers for multi-token prediction already, or is adapted")
    if "num_hidden_layers" not in inspect.unwrap(type(decoder).forward).__code__.co_names:
        raise InvalidUsage(
            f"{type(decoder).__name__} runs all layers in its list, however many its configuration says, so also those "
            "of add_mtp(); train this model without multi-token prediction"
        )
    config = model.config.get_text_config()
    width, like = int(config.hidden_size), next(layers[-1].parameters())
    shared = {id(each): each for module in model.modules() if (each := getattr(module, "config", None)) is not None}
    for _ in range(depth):
        layer = copy.deepcopy(layers[config.num_hidden_layers - 1], dict(shared))
        layer.enorm, layer.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        layer.eh_proj = nn.Linear(2 * width, width, bias=False, device=like.device, dtype=like.dtype)
        layer.shared_head = nn.Module()
        layer.shared_head.norm = copy.deepcopy(norm)
        if not like.is_meta:
            for module in layer.modules():
                model._init_weights(module)
        layer.forward = _Forward(layer)
        layers.append(layer)
    setattr(model, _WEIGHT, float(weight))


def depths_of_config(config: Any) -> int:
    """Depths that a model's checkpoint has by its configuration; 1 where that does not say so."""
    return int(getattr(config.get_text_config(), "num_nextn_predict_layers", None) or 1)


def is_ahead(layer: nn.Module) -> bool:
    """Whether it is a layer of :func:`add_mtp`."""
    return hasattr(layer, "eh_proj")


class MultiToken:
    """The losses of the layers of :func:`add_mtp` in a causal LM.

    Attributes:
        depths: how many layers there are.
    """

    def __init__(self, causal_lm: Any, weight: float) -> None:
        self.depths, self._weight = len(_layers(causal_lm)), weight
        self._sums: Tensor | None = None

    @staticmethod
    def of(causal_lm: Any) -> MultiToken | None:
        """``None``: it has no such layers."""
        weight = getattr(causal_lm, _WEIGHT, 0.0)
        return MultiToken(causal_lm, weight) if weight else None

    def loss(self, losses: Sequence[Tensor], labels: Tensor) -> Tensor:
        """A zero with the gradient of the weighted sum of the depths' summed losses; a pass with gradients counts."""
        total = torch.stack(list(losses)).sum()
        if torch.is_grad_enabled():
            sums = torch.stack((total.detach().double(), (labels != IGNORE).sum().double()))
            self._sums = sums if self._sums is None else self._sums + sums
        return self._weight / self.depths * (total - total.detach())

    def take_sums(self) -> Tensor:
        """(losses, labels) of all depths in the passes since the last call, fp64 ``[2]`` on the CPU. Local."""
        sums, self._sums = self._sums, None
        return torch.zeros(2, dtype=torch.float64) if sums is None else sums.cpu()


def tensors_ahead(causal_lm: Any) -> Iterator[Tensor]:
    """Parameters and buffers of the layers of :func:`add_mtp`, if there are any. Local."""
    for layer in _layers(causal_lm):
        yield from (*layer.parameters(), *layer.buffers())


def _layers(causal_lm: Any) -> list[nn.Module]:
    return [layer for layer in getattr(decoder_of(causal_lm), "layers", ()) if is_ahead(layer)]


def decoders_ahead(causal_lm: Any) -> Iterator[Any]:
    """For each layer of :func:`add_mtp` the decoder with it alone: called with embeddings and hidden states side by
    side, it gives the next depth's hidden states. Local."""
    for layer in _layers(causal_lm):
        yield _alone(decoder_of(causal_lm), layer)


def _alone(decoder: Any, layer: nn.Module) -> Any:
    alone, config = copy.copy(decoder), copy.copy(decoder.config)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, name, value[-1:])
    config.num_hidden_layers, config.output_router_logits = 1, False
    alone.config = config
    vars(alone)["_modules"] = {**decoder._modules, "layers": nn.ModuleList([layer]), "norm": nn.Identity()}
    return alone


class _Forward:
    """The forward of a layer of :func:`add_mtp`: its norms and projection are inside, as its weights come and go with
    those of a layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        layer = self.layer
        embedding, hidden = hidden_states.chunk(2, -1)
        joined = layer.eh_proj(torch.cat((layer.enorm(embedding), layer.hnorm(hidden)), -1))
        out = type(layer).forward(layer, joined, *args, **options)
        normed: Tensor = layer.shared_head.norm(out[0] if isinstance(out, tuple) else out)
        return normed


def _place(model: Any) -> tuple[str, bool]:
    """Beginning of the names of the first of these layers, up to its number, and whether a checkpoint has them under
    the names of Qwen3-Next."""
    before = next(name for name, module in model.named_modules() if module is decoder_of(model).layers)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    flat = any("mtp" in pattern for pattern in ignored) and len(_layers(model)) == 1
    return f"{before}.{model.config.get_text_config().num_hidden_layers}.", flat


def as_saved_ahead(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model with such layers by their names in a checkpoint; under DeepSeek-V3's names each of the layers
    has the embedding and the head, too. Local."""
    if not _layers(model):
        return dict(tensors)
    first, flat = _place(model)
    saved: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part, _, leaf = name.removeprefix(first).rpartition(".")
        if flat and name.startswith(first):
            name = f"{_FLAT_NAMES[part]}.{leaf}" if part in _FLAT_NAMES else f"mtp.layers.0.{part}.{leaf}"
        saved[name] = tensor
    ends = {"embed_tokens": model.get_input_embeddings(), "shared_head.head": model.get_output_embeddings()}
    names = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    for part, end in ends.items() if not flat else ():
        if (own := tensors.get(names[id(end.weight)])) is not None:
            begin, number = first[:-1].rpartition(".")[::2]
            layers = range(int(number), int(number) + len(_layers(model)))
            saved |= {f"{begin}.{layer}.{part}.weight": own.clone() for layer in layers}
    return saved


def model_name(model: Any, key: str) -> str:
    """The name in the model of a tensor of a checkpoint with the names of :func:`as_saved_ahead`. Local."""
    if not key.startswith("mtp.") or not _layers(model):
        return key
    first, _ = _place(model)
    part, _, leaf = key.rpartition(".")
    own = {saved: ours for ours, saved in _FLAT_NAMES.items()}
    return f"{first}{own[part]}.{leaf}" if part in own else key.replace("mtp.layers.0.", first, 1)
