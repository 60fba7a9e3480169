"""Causal LMs in the form that the trainer calls: the reference Llama, and models of transformers.

Both run on this rank's shard of packed sequences. Only attention looks at other tokens, so only attention communicates;
everything else works on the local tokens, whose positions inside their own sequences are passed in because a zigzag
shard is not contiguous. Architecture of Llama: Touvron et al., https://arxiv.org/abs/2302.13971 (RMSNorm before each
block, rotary positions, SwiGLU) with grouped-query attention.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hdpcomm.arguments import check_number, check_whole
from hdpcomm.attention import packed_attention, packing
from hdpcomm.attention.packs import CuSeqlens
from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import IGNORE, LabelLoss, LossOptions, linear_cross_entropy, loss_of_log_probs
from hdpcomm.models.heads import NEXT_TOKEN, TOKEN, LayeredModel, head_of
from hdpcomm.models.huggingface import decoder_of, set_attention
from hdpcomm.models.lean import gated, rms_norm, rotate
from hdpcomm.models.lean_layers import put_lean, take_lean_off
from hdpcomm.models.media import MediaEncoder, TokensWithItems
from hdpcomm.models.moe import AddedLosses, MixtureOfExperts, RouterLosses
from hdpcomm.models.mtp import MultiToken, decoders_ahead
from hdpcomm.models.recompute import refuse_reentrant
from hdpcomm.models.routes import RoutesShape, number_routers
from hdpcomm.models.self_check import check_logits

__all__ = [
    "AdaptedCausalLM",
    "Llama",
    "LlamaConfig",
    "apply_rope",
    "initial_value",
    "inner_causal_lm",
    "rope_tables",
    "seed_of",
]


def inner_causal_lm(model: nn.Module) -> Any | None:
    """The transformers model with the last layer; inside of a peft model, the one that it changes. None: there is none.

    Raises InvalidUsage for peft methods that add tokens.
    """
    found: Any = model
    if callable(getattr(model, "get_base_model", None)) and hasattr(model, "peft_config"):
        for config in model.peft_config.values():  # type: ignore[operator]
            if getattr(config, "is_prompt_learning", False):
                raise InvalidUsage(
                    f"peft's {config.peft_type} puts tokens of its own in front of each sequence, which packs do not "
                    "know; use a method that changes layers, as LoRA"
                )
        found = model.get_base_model()  # type: ignore[operator]
    transformers_model = hasattr(found, "base_model") and callable(getattr(found, "get_output_embeddings", None))
    if not transformers_model:
        return None
    if head_of(found) is None:
        raise InvalidUsage(
            f"{type(found).__name__} is a transformers model without a head that is known: neither one that gives "
            "logits of tokens, nor the layer score of a classifier; give a causal LM (AutoModelForCausalLM), or a "
            "classifier of sequences or tokens over a causal decoder, as LlamaForSequenceClassification"
        )
    return found


class AdaptedCausalLM(LayeredModel):
    """A causal LM of transformers, or a classifier over its decoder, in the form of :func:`hdpcomm.models.adapt`.

    Attributes:
        model: the model as it was given, trained in place; ``model.save_pretrained(folder)`` exports it.
        labels_of: to what a label belongs, see :mod:`hdpcomm.models.heads`; a classifier's are numbers of outputs.
        lean, router_losses: as :func:`hdpcomm.models.adapt` got them.
        attention: ``with adapted.attention.original(): adapted.model.generate(...)`` runs the model as it came.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunk_tokens: int | None,
        check: bool,
        lean: bool = True,
        router_losses: RouterLosses | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.lean, self.router_losses = lean, router_losses
        self.chunk_tokens = chunk_tokens
        causal_lm = self.causal_lm
        self.labels_of: str = head_of(causal_lm)[1]  # type: ignore[index]
        config = causal_lm.config.get_text_config()
        _check_is_decoder(config, causal_lm)
        self.attention = set_attention(causal_lm)
        (put_lean if lean else take_lean_off)(causal_lm)
        if model is not causal_lm:  # peft keeps it, too, and trainers set its tokens
            model.config = causal_lm.config
        try:
            _check_has_decoder(causal_lm)
            self._scale, self._softcap = _logit_maths(config)
            self.routes_shape = number_routers(causal_lm)
            if router_losses is None:
                self.loss_terms = _losses_of_config(causal_lm, config)
            elif router_losses != RouterLosses():
                self.loss_terms = _added_losses(causal_lm, router_losses, self.routes_shape)
            self.mtp = MultiToken.of(causal_lm)
            self.media = MediaEncoder.of(causal_lm)
            if check:
                check_logits(self)
        except Exception:
            take_lean_off(causal_lm)
            self.attention.undo()
            raise

    @property
    def causal_lm(self) -> Any:
        """The transformers model; of a peft model, the one inside."""
        return inner_causal_lm(self.model)

    @property
    def embedding(self) -> Any:
        """The layer that makes hidden states of tokens."""
        return self.causal_lm.get_input_embeddings()

    @property
    def last_layer(self) -> Any:
        """The layer that makes logits."""
        return head_of(self.causal_lm)[0]  # type: ignore[index]

    def run_layers(
        self, x: Tensor | TokensWithItems, *, positions: Tensor, cu_seqlens: CuSeqlens, comm: Communicator | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Output of the decoder for tokens, or for hidden states in the place of their embeddings: ``[tokens,
        width]``; and for :meth:`added_losses` each router's logits ``[tokens, experts]``. Blocks of tensor ranks.
        Collective over ``comm``."""
        hidden, logits = self._decode(decoder_of(self.causal_lm), x, positions, cu_seqlens, comm)
        if self.loss_terms is not None and self.training and torch.is_grad_enabled():
            refuse_reentrant(self.model, "the router's logits for its auxiliary loss")
        return hidden, logits

    def loss_ahead(
        self, hidden: Tensor, ahead: Tensor, *, positions: Tensor, cu_seqlens: CuSeqlens, comm: Communicator | None
    ) -> Tensor:
        """A zero whose gradient is that of the weighted losses of multi-token prediction; ``hidden``: of
        :meth:`run_layers`, ``ahead``: as of :meth:`forward`. Collective over ``comm``."""
        assert self.mtp is not None, "a model without layers ahead has no such loss"
        count, losses = positions.shape[0], []
        for decoder, (tokens, labels) in zip(decoders_ahead(self.causal_lm), ahead, strict=True):
            embedded = self.embedding(tokens[None] if count else tokens.new_zeros(1, 1))[0]
            x = torch.cat((embedded if count else embedded[:0], hidden), -1)
            hidden, _ = self._decode(decoder, x, positions, cu_seqlens, comm)
            losses.append(self.finish(hidden, count, labels))
        return self.mtp.loss(losses, ahead[:, 1])

    def _decode(
        self, decoder: Any, x: Tensor | TokensWithItems, positions: Tensor, cu_seqlens: CuSeqlens,
        comm: Communicator | None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """(output, routers' logits) of a decoder."""
        options: dict[str, Any] = {}
        coordinates, embedded = None, False
        if isinstance(x, TokensWithItems):
            coordinates, embedded = x.coordinates, x.embeddings is not None
            x, options = self._embed_items(x)
        count = positions.shape[0]
        kept = slice(None) if count else slice(0)
        if count == 0:  # layers of transformers want a token
            positions = positions.new_zeros(1)
            x = x if embedded else torch.cat((x, x.new_zeros(1, *x.shape[1:])))
        routed = self.loss_terms is not None and decoder is decoder_of(self.causal_lm)
        options |= {"output_router_logits": True} if routed else {}
        if positions.is_meta:  # without a mask transformers would look at the positions, which have no values there
            options["attention_mask"] = torch.ones(1, positions.shape[0], dtype=torch.bool, device="cpu")
        options["inputs_embeds" if x.is_floating_point() else "input_ids"] = x[None]
        filled = max(1, count) if self.tensor is None else self.tensor.rows(max(1, count))
        own = count if self.tensor is None else self.tensor.tokens_here(count)
        with packing(comm, cu_seqlens, padded=count == 0, token_rows=None if own == filled else own):
            places = positions[None] if coordinates is None or not count else coordinates[:, None]
            out = decoder(position_ids=places, use_cache=False, **options)
        # Modules that several decoders share, as stages do with the whole model, have transformers' hook several times.
        logits = {id(each): each for each in out.router_logits}.values() if routed else ()
        return out.last_hidden_state[0, kept], [each.flatten(0, -2)[kept] for each in logits]

    def _embed_items(self, x: TokensWithItems) -> tuple[Tensor, dict[str, Any]]:
        """(embeddings of all tokens, and of one if there are none; what the decoder takes beside these)."""
        if x.embeddings is None:
            return x.tokens, {}
        embedded = self.embedding((x.tokens if len(x.tokens) else x.tokens.new_zeros(1))[None])[0]
        own, *deeper = torch.split(x.embeddings.to(embedded.dtype), embedded.shape[-1], -1)
        options: dict[str, Any] = {}
        if deeper and len(x.rows):
            mask = torch.zeros(1, len(embedded), dtype=torch.bool, device=x.rows.device)
            mask[0, x.rows] = True
            options = {"visual_pos_masks": mask, "deepstack_visual_embeds": deeper}
        return embedded.index_copy(0, x.rows, own), options

    def finish(
        self,
        hidden: Tensor,
        tokens: int,
        labels: Tensor | None,
        label_rows: Tensor | None = None,
        label_weights: Tensor | LabelLoss | None = None,
    ) -> Tensor:
        """From what the decoder gives for so many tokens to logits or loss; labels as of :meth:`forward`."""
        if self.tensor is not None:
            plain = _is_plain_linear(self.last_layer)  # its loss sums hidden's gradients itself
            hidden = self.tensor.gather(hidden, tokens, partial=labels is None or not plain)
        if self.labels_of == TOKEN:
            hidden = self.causal_lm.dropout(hidden)
        if labels is None:
            return self._logits(hidden)
        return self._loss(hidden if label_rows is None else hidden[label_rows], labels, label_weights)

    @property
    def gives_values(self) -> bool:
        """Whether it is a classifier, whose outputs are not logits of tokens."""
        return self.labels_of != NEXT_TOKEN

    @property
    def takes_trees(self) -> bool:
        """Whether its attention knows trees: chunks are counted from the first token of a plain sequence, and images
        that see all of themselves are spans of one."""
        if self.media is not None and self.media.two_way:
            return False
        return "chunked_attention" not in (getattr(self.causal_lm.config.get_text_config(), "layer_types", None) or ())

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.last_layer
        logits: Tensor = head(_in_dtype_of(head, hidden))
        if self.tensor is not None:
            logits = self.tensor.join_columns(logits)
        if self._scale != 1.0:
            logits = logits * self._scale
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits

    def _loss(self, hidden: Tensor, labels: Tensor, weights: Tensor | LabelLoss | None) -> Tensor:
        head = self.last_layer
        if not _is_plain_linear(head) or getattr(weights, "temperature", 1.0) is None:
            return self._loss_of_any_head(hidden, labels, weights)
        return linear_cross_entropy(
            _in_dtype_of(head, hidden), head.weight, labels, weights=weights, bias=head.bias,
            options=LossOptions(self._scale, self._softcap), chunk_tokens=self.chunk_tokens,
            comm=None if self.tensor is None else self.tensor.comm,
        )  # fmt: skip

    def _loss_of_any_head(self, hidden: Tensor, labels: Tensor, weights: Tensor | LabelLoss | None) -> Tensor:
        """Loss with a head that is more than a matrix, as one that LoRA changes, or of outputs that are no logits: its
        chunks are computed again in the backward pass."""
        chunk = self.chunk_tokens or max(256, hidden.shape[-1])
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        start = 0
        for part in zip(*(torch.split(x, chunk) for x in (hidden, labels)), strict=True):
            place = slice(start, start + len(part[1]))
            total = total + checkpoint(self._chunk_loss, *part, weights, place, use_reentrant=False)
            start = place.stop
        return total

    def _chunk_loss(
        self, hidden: Tensor, labels: Tensor, all_weights: Tensor | LabelLoss | None, place: slice
    ) -> Tensor:
        """``place``: which of all labels these are."""
        logits = self._logits(hidden)
        if all_weights is not None and not isinstance(all_weights, Tensor):
            return loss_of_log_probs(logits, labels, all_weights, part=place)
        weights = 1.0 if all_weights is None else all_weights[place]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        trained = labels != IGNORE
        lse = logits.logsumexp(-1)
        picked = logits.gather(1, torch.where(trained, labels, 0)[:, None])[:, 0]
        return torch.where(trained, weights * (lse - picked), 0.0).sum()


def _losses_of_config(causal_lm: Any, config: Any) -> AddedLosses | None:
    """The auxiliary loss that a configuration asks for; ``None``: there is none, or it is switched off."""
    if not getattr(config, "output_router_logits", False):
        return None
    found: list[Any] = [
        getattr(causal_lm, x, None) for x in ("router_aux_loss_coef", "num_experts_per_tok", "num_experts")
    ]
    if None in found:
        raise InvalidUsage(
            f"config.output_router_logits asks for an auxiliary loss, and {type(causal_lm).__name__} does not tell "
            "router_aux_loss_coef, num_experts_per_tok and num_experts; set output_router_logits to False to train "
            "without"
        )
    coefficient, top_k, experts = found
    return AddedLosses(RouterLosses(float(coefficient)), 0, top_k, experts) if coefficient else None


def _added_losses(causal_lm: Any, losses: RouterLosses, shape: RoutesShape | None) -> AddedLosses:
    """The given losses, for routers whose logits transformers can hand out."""
    decoder = decoder_of(causal_lm)
    recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
    kind: Any = getattr(recorder, "target_class", ())
    ahead = {module for alone in decoders_ahead(causal_lm) for module in alone.layers.modules()}
    routers = [each for each in decoder.modules() if isinstance(each, kind) and each not in ahead]
    scores = {"sigmoid", "softmax"} & set(inspect.unwrap(kind.forward).__code__.co_names if routers else ())
    if shape is None or len(routers) != shape.routed or len(scores) != 1:
        raise InvalidUsage(
            f"router_losses were given for {type(causal_lm).__name__}, which does not tell the logits of its routers, "
            "or scores them by something else than softmax or sigmoid; train it without"
        )
    return AddedLosses(losses, shape.routed, shape.top_k, shape.experts, sigmoid=scores == {"sigmoid"})


def _is_plain_linear(head: nn.Module) -> bool:
    """Is the head no more than its weight and bias?"""
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and "forward" not in vars(head)
        and type(head.weight) in (nn.Parameter, Tensor)
    )


def _in_dtype_of(head: nn.Module, hidden: Tensor) -> Tensor:
    """In the type of the last layer: some models keep wider hidden states before it, as Mamba-2 in bf16."""
    weight = getattr(head, "weight", None)
    return hidden if weight is None or not weight.is_floating_point() else hidden.to(weight.dtype)


def _check_is_decoder(config: Any, causal_lm: Any) -> None:
    both_ways = getattr(config, "use_bidirectional_attention", False) in (True, "all")
    if both_ways or getattr(config, "is_encoder_decoder", False):
        name = type(causal_lm).__name__
        raise InvalidUsage(f"{name} is not a causal decoder (its tokens see later ones); give a causal LM")


def _check_has_decoder(causal_lm: Any) -> None:
    if decoder_of(causal_lm) is causal_lm:
        raise InvalidUsage(
            f"{type(causal_lm).__name__} does not tell which part of it is the decoder below its last layer "
            "(base_model is the model itself), so its loss cannot be made from the decoder's outputs; give a causal LM "
            "whose base_model is its decoder"
        )


def _logit_maths(config: Any) -> tuple[float, float]:
    """(factor, soft cap) that the model applies to what its last layer gives, under the names of its configuration."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return scale, float(getattr(config, "final_logit_softcapping", None) or 0.0)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Size of the model; the defaults train on a laptop's CPU.

    ``heads`` query heads share ``kv_heads`` key/value heads; a head has ``hidden / heads`` dimensions, an even number.

    With ``experts`` every block has so many feed-forward layers of width ``ffn``, of which each token goes through the
    ``top_k`` that its router chooses (Mixtral). ``router_aux_loss`` and ``router_z_loss`` are the factors of the losses
    of :class:`hdpcomm.models.RouterLosses`. 0 experts: one layer for all tokens.
    """

    vocabulary: int = 256
    layers: int = 2
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 384
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = True
    experts: int = 0
    top_k: int = 2
    router_aux_loss: float = 0.01
    router_z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "hidden", "heads", "kv_heads", "ffn", "top_k"):
            check_whole("LlamaConfig", name, getattr(self, name), least=1)
        check_whole("LlamaConfig", "experts", self.experts, least=0)
        if self.experts and self.top_k > self.experts:
            raise InvalidUsage(f"top_k is {self.top_k} of {self.experts} experts; give a top_k of at most that number")
        for name in ("router_aux_loss", "router_z_loss"):
            check_number("LlamaConfig", name, getattr(self, name), least=0)
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise InvalidUsage(
                f"hidden {self.hidden} over {self.heads} heads: the size of a head must be an even whole number "
                "(rotary positions turn pairs); choose hidden as a multiple of 2 x heads"
            )
        if self.heads % self.kv_heads:
            raise InvalidUsage(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly; kv_heads must divide heads"
            )
        for name in ("rope_theta", "norm_eps"):
            check_number("LlamaConfig", name, getattr(self, name), above=0)

    @property
    def head_dim(self) -> int:
        """Dimensions of one head."""
        return self.hidden // self.heads


def rope_tables(
    positions: Tensor, head_dim: int, *, theta: float = 10000.0, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each ``[tokens, 1, head_dim / 2]`` in ``dtype``.

    Args:
        positions: ``[tokens]`` int64, the place of each token inside its own sequence.

    The angles are computed in fp64: position 2,000,000 in fp32 is off by 0.1 rad, and a shard must get the very values
    that an unsharded sequence gets. Local.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64)[:, None] * (theta**-exponents)[None, :]
    return angles.cos().to(dtype)[:, None, :], angles.sin().to(dtype)[:, None, :]


def apply_rope(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (i, i + D/2) of ``x: [tokens, heads, D]`` by the angles of :func:`rope_tables`; local."""
    return rotate(x, *tables)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in at least fp32."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        inner, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = nn.Linear(config.hidden, inner, bias=False, dtype=dtype, device=device)
        self.k = nn.Linear(config.hidden, kv, bias=False, dtype=dtype, device=device)
        self.v = nn.Linear(config.hidden, kv, bias=False, dtype=dtype, device=device)
        self.out = nn.Linear(inner, config.hidden, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        tokens = x.shape[0]
        q = apply_rope(self.q(x).view(tokens, self.heads, self.head_dim), tables)
        k = apply_rope(self.k(x).view(tokens, self.kv_heads, self.head_dim), tables)
        v = self.v(x).view(tokens, self.kv_heads, self.head_dim)
        mixed: Tensor = self.out(packed_attention(q, k, v).reshape(tokens, self.heads * self.head_dim))
        return mixed


class _SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False, dtype=dtype, device=device)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False, dtype=dtype, device=device)
        self.out = nn.Linear(config.ffn, config.hidden, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.out(gated(self.gate(x), self.up(x), "silu"))
        return mixed


class _Block(nn.Module):
    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, eps=config.norm_eps, dtype=dtype, device=device)
        self.attention = _Attention(config, dtype=dtype, device=device)
        self.ffn_norm = RMSNorm(config.hidden, eps=config.norm_eps, dtype=dtype, device=device)
        self.ffn = (
            MixtureOfExperts(config.hidden, config.ffn, config.experts, config.top_k, dtype=dtype, device=device)
            if config.experts
            else _SwiGLU(config, dtype=dtype, device=device)
        )

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """The block's result, inside of ``with packing(...)``; with experts also their router's logits."""
        x = x + self.attention(self.attention_norm(x), tables)
        mixed = self.ffn(self.ffn_norm(x))
        return x + mixed if isinstance(mixed, Tensor) else (x + mixed[0], mixed[1])


def seed_of(name: str, seed: int) -> int:
    """The seed of one tensor of a model that is drawn from ``seed``. Local."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")


def initial_value(name: str, shape: torch.Size, *, layers: int, seed: int) -> Tensor:
    """A parameter of a new Llama of so many layers, fp32 in host memory: normal, deviation 0.02, less for what joins
    the residual stream. It follows from the seed and the parameter's name alone. Local."""
    if len(shape) == 1:
        return torch.ones(shape)
    residual = name.endswith(("out.weight", "ffn.out"))
    scale = 0.02 / math.sqrt(2 * layers) if residual else 0.02
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    return torch.randn(shape, generator=generator).mul_(scale)


class Llama(LayeredModel):
    """A Llama of any size and dtype (fp64 included, for exactness tests).

    Args:
        config: its size.
        seed: of the initial weights; the same seed gives the same weights on every rank and for every world size.
    """

    def __init__(
        self,
        config: LlamaConfig | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config = config or LlamaConfig()
        if not dtype.is_floating_point:
            raise InvalidUsage(f"dtype is {dtype}; a model's parameters need a floating-point type")
        device = torch.device(device)
        self.embedding = nn.Embedding(config.vocabulary, config.hidden, dtype=dtype, device=device)
        self.blocks = nn.ModuleList(_Block(config, dtype=dtype, device=device) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, eps=config.norm_eps, dtype=dtype, device=device)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False, dtype=dtype, device=device)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        self.routes_shape = number_routers(self)
        losses = RouterLosses(config.router_aux_loss, config.router_z_loss)
        if config.experts and losses != RouterLosses():
            self.loss_terms = AddedLosses(losses, config.layers, config.top_k, config.experts)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Fills all weights anew from ``seed`` (:func:`initial_value`); those on the meta device stay without."""
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(initial_value(name, parameter.shape, layers=self.config.layers, seed=seed))

    def run_layers(
        self, x: Tensor, *, positions: Tensor, cu_seqlens: CuSeqlens, comm: Communicator
    ) -> tuple[Tensor, list[Tensor]]:
        """Output of the last block for tokens, or for the hidden states of a stage before, and the router's logits of
        each block that has one. Collective over ``comm``."""
        if not x.is_floating_point():
            if x.shape != positions.shape or x.dim() != 1:
                raise InvalidUsage(
                    f"tokens {tuple(x.shape)} and positions {tuple(positions.shape)}: both must be [local tokens] of "
                    "the same shard"
                )
            x = self.embedding(x)
        tables = rope_tables(positions, self.config.head_dim, theta=self.config.rope_theta, dtype=x.dtype)
        router_logits: list[Tensor] = []
        with packing(comm, cu_seqlens):
            for block in self.blocks:
                out: Tensor | tuple[Tensor, Tensor] = block(x, tables)
                x, *logits = (out,) if isinstance(out, Tensor) else out
                router_logits += logits
        return x, router_logits

    def finish(
        self,
        x: Tensor,
        tokens: int,
        labels: Tensor | None,
        label_rows: Tensor | None = None,
        label_weights: Tensor | LabelLoss | None = None,
    ) -> Tensor:
        """From what the last block gives for so many tokens to logits or loss; labels as of :meth:`forward`."""
        x, group = self.norm(x), self.tensor
        if group is not None:
            x = group.gather(x, tokens, partial=labels is None)
        if labels is None:
            logits: Tensor = self.head(x)
            return logits if group is None else group.join_columns(logits)
        return linear_cross_entropy(
            x if label_rows is None else x[label_rows], self.head.weight, labels, weights=label_weights,
            comm=None if group is None else group.comm, chunk_tokens=self.chunk_tokens,
        )  # fmt: skip

    @property
    def last_layer(self) -> nn.Linear:
        """The layer that makes logits."""
        return self.head

    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
