"""The reference Llama: a decoder that runs on this rank's shard of packed sequences.

Only attention looks at other tokens, so only attention communicates; everything else works on the local tokens, whose
positions inside their own sequences are passed in because a zigzag shard is not contiguous. Architecture: Touvron et
al., https://arxiv.org/abs/2302.13971 (RMSNorm before each block, rotary positions, SwiGLU) with grouped-query
attention.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hdpcomm.arguments import check_number, check_whole
from hdpcomm.attention import packed_attention, packing
from hdpcomm.attention.packs import CuSeqlens
from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import LabelLoss, linear_cross_entropy
from hdpcomm.models.heads import LayeredModel
from hdpcomm.models.lean import gated, rms_norm, rotate
from hdpcomm.models.moe import AddedLosses, MixtureOfExperts, RouterLosses
from hdpcomm.models.routes import number_routers

__all__ = [
    "Llama",
    "LlamaConfig",
    "apply_rope",
    "initial_value",
    "rope_tables",
    "seed_of",
]


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
