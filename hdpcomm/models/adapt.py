"""Models of others in the form that :class:`hdpcomm.train.Trainer` calls."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.arguments import check_type
from hdpcomm.attention import packing
from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text
from hdpcomm.models.causal_lm import AdaptedCausalLM, inner_causal_lm
from hdpcomm.models.media import auto_class
from hdpcomm.models.moe import RouterLosses
from hdpcomm.models.mtp import add_mtp, depths_of_config, tensors_ahead
from hdpcomm.models.recompute import set_recompute
from hdpcomm.models.self_check import check_takes_tokens
from hdpcomm.models.weights import FolderWeights, NewWeights, making, weight_files

__all__ = ["AdaptedModule", "adapt", "check_config", "from_pretrained"]

_PLACES = ("positions", "cu_seqlens", "comm")


class AdaptedModule(nn.Module):
    """A module whose attention goes through :func:`hdpcomm.attention.packed_attention`, in the trainer's form.

    Args:
        model: called as ``model(tokens)`` with those of ``positions=``, ``cu_seqlens=`` and ``comm=`` that its forward
            names; returns logits ``[local tokens, vocabulary]``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        named = inspect.signature(model.forward).parameters
        self._named = tuple(name for name in _PLACES if name in named)

    def forward(self, tokens: Tensor, *, positions: Tensor, cu_seqlens: Tensor, comm: Communicator) -> Tensor:
        """Logits of the local tokens; see :class:`hdpcomm.models.Llama`."""
        places = {"positions": positions, "cu_seqlens": cu_seqlens, "comm": comm}
        with packing(comm, cu_seqlens):
            logits: Tensor = self.model(tokens, **{name: places[name] for name in self._named})
        return logits


def adapt(
    model: nn.Module,
    *,
    recompute: str | int = "none",
    chunk_tokens: int | None = None,
    check: bool = True,
    lean: bool = True,
    router_losses: RouterLosses | None = None,
) -> nn.Module:
    """The model in the form that :class:`hdpcomm.train.Trainer` calls: ``(tokens, *, positions, cu_seqlens, comm)``.

    Parameters are shared, not copied: the given model is trained, and ``adapted.model`` is it.

    - A causal LM of transformers, LoRA by peft included: attention goes through transformers' AttentionInterface,
      linear and state-space layers through :mod:`hdpcomm.attention`, the last layer and the loss through
      :func:`hdpcomm.kernels.linear_cross_entropy`, the auxiliary loss of a router (``config.output_router_logits``)
      through the sequences' own means.
    - A module in the trainer's form, as :class:`hdpcomm.models.Llama`: returned as it is.
    - Any other module ``model(tokens) -> logits [local tokens, vocabulary]`` whose attention calls
      :func:`hdpcomm.attention.packed_attention` or :func:`hdpcomm.attention.scaled_dot_product_attention` and whose
      other layers look at one token at a time; it names ``positions``, ``cu_seqlens`` and ``comm`` if it wants them.

    Args:
        recompute: layers to compute again in the backward pass: ``"none"``, ``"full"`` or how many; see
            :func:`hdpcomm.models.set_recompute`.
        chunk_tokens: of the loss of a causal LM; see :func:`hdpcomm.kernels.linear_cross_entropy`.
        check: runs a causal LM on a few tokens, as a pack and sequence by sequence with the attention that it came
            with, and refuses it if the logits differ: something else than attention looks at other tokens, or attention
            is not what transformers tells of it. Another module, if it does not name ``comm``, must make logits of
            tokens.
        lean: norms, rotations and gated activations of a causal LM compute in fewer passes and keep less for the
            backward pass (:mod:`hdpcomm.models.lean`), where they give the values and gradients of the layers that they
            replace on a few rows; else each layer computes as its class does.
        router_losses: of a causal LM's mixtures of experts, in the place of that of its configuration.

    Local. Raises:
        InvalidUsage: what cannot be made right, by name: dropout in attention, layers that are neither full nor sliding
            attention nor a known linear layer (gated delta rule, KDA, Mamba-2), prompt tuning, models that take images,
            video or sound, a model that fails the check.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> bag = adapt(nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32)))
        >>> cu_seqlens = torch.tensor([0, 3, 5])
        >>> bag(torch.arange(5), positions=torch.tensor([0, 1, 2, 0, 1]), cu_seqlens=cu_seqlens, comm=None).shape
        torch.Size([5, 32])
    """
    check_type("adapt()", "model", model, nn.Module)
    causal_lm = inner_causal_lm(model)
    if causal_lm is not None:
        adapted: nn.Module = AdaptedCausalLM(
            model,
            chunk_tokens=chunk_tokens,
            check=check,
            lean=lean,
            router_losses=router_losses,
        )
    else:
        if chunk_tokens is not None or router_losses is not None:
            raise InvalidUsage(
                f"chunk_tokens and router_losses are for causal LMs of transformers; {type(model).__name__} is none: "
                "it computes its logits itself"
            )
        named = inspect.signature(model.forward).parameters
        adapted = model if all(name in named for name in _PLACES) else AdaptedModule(model)
        if check and "comm" not in named:
            check_takes_tokens(adapted, model)
    set_recompute(adapted, recompute)
    return adapted


def from_pretrained(
    source: str | Path | Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    recompute: str | int = "none",
    chunk_tokens: int | None = None,
    check: bool = True,
    lean: bool = True,
    mtp_weight: float = 0.0,
    router_losses: RouterLosses | None = None,
) -> AdaptedCausalLM:
    """A causal LM of transformers, adapted: from a folder with its weights, or new from a configuration.

    Args:
        source: a folder as ``save_pretrained`` writes it; nothing is downloaded. Or a configuration object of
            transformers, which stays as it is: weights are drawn from ``seed``, alike on every rank.
        dtype: of the parameters. Default: as stored, or fp32 for a configuration.
        mtp_weight: of the loss of multi-token prediction (:func:`hdpcomm.models.add_mtp`), by the folder's layers or
            new ones, as many as ``num_nextn_predict_layers`` of the configuration says, or one; 0: none.

    The others are those of :func:`adapt`. Local; threads that load at the same time take turns. Raises InvalidUsage: no
    such folder, no model in it, no transformers, or what :func:`adapt` refuses.
    """
    try:
        from transformers import PretrainedConfig
    except ImportError as error:
        raise InvalidUsage("transformers is needed; pip install 'hdpcomm[huggingface]'") from error
    if isinstance(source, PretrainedConfig):
        with making, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # The model keeps its configuration and changes it: it gets one of its own.
            made = auto_class(source.model_type)
            model = made.from_config(copy.deepcopy(source), dtype=dtype or torch.float32)
    else:
        folder = Path(source)
        kind = check_config(folder)
        weight_files(folder)
        try:
            with making:
                model = auto_class(kind).from_pretrained(
                    folder, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False, weights_only=True
                )
        except (OSError, ValueError) as error:
            raise InvalidUsage(f"{folder} does not hold a causal LM that transformers can load: {error}") from error
    model = model.to(device).train()
    if mtp_weight:
        add_mtp(model, depths_of_config(model.config), weight=mtp_weight)
    options: dict[str, Any] = {"check": check, "lean": lean, "router_losses": router_losses}
    adapted = adapt(model, recompute=recompute, chunk_tokens=chunk_tokens, **options)
    assert isinstance(adapted, AdaptedCausalLM)
    ahead = set(map(id, tensors_ahead(model)))
    if ahead and torch.device(device).type != "meta":
        new = isinstance(source, PretrainedConfig)
        weights = NewWeights(adapted, seed) if new else FolderWeights(Path(source), adapted, seed=seed)
        with torch.no_grad():
            for name, tensor in (*adapted.named_parameters(), *adapted.named_buffers()):
                if id(tensor) in ahead:
                    tensor.copy_(weights.whole(name))
    return adapted


def check_config(folder: Path) -> str:
    """Looks at a folder's ``config.json`` before transformers does, which loads kernels that it names, and runs them.
    Returns: its ``model_type``.

    Raises: InvalidUsage.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise InvalidUsage(
            f"{folder} is no folder with a config.json; give the folder of a model, as save_pretrained writes it"
        )
    try:
        content = json.loads(read_text(path))
        if not isinstance(content, dict):
            raise TypeError("no object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InvalidUsage(f"{path} is no model that transformers knows: {error}") from None
    parts = [content, *(each for each in content.values() if isinstance(each, dict))]
    for name in ("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation"):
        for part in parts:
            if "/" in str(part.get(name, "")):
                raise InvalidUsage(f"{path}: {name} is {part[name]!a}, which would load code; take it out")
    return str(content.get("model_type"))
