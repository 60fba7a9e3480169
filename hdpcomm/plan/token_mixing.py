"""How the layers of a model mix tokens, for the planner: :class:`TokenMixing`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hdpcomm.errors import InvalidUsage

__all__ = ["TokenMixing", "delta_mixing", "indexed_mixing", "latent_mixing", "softmax_mixing", "ssd_mixing"]

_CHUNK = 64
"""Tokens of a chunk of a recurrence (:mod:`hdpcomm.attention.linear`)."""


@dataclass(frozen=True, slots=True)
class TokenMixing:
    """Token mixing in some of a model's layers: softmax attention, full or in a window, or a recurrence.

    Attributes:
        kind: ``full``, ``window``, ``latent`` (multi-head latent attention), ``indexed`` (keys chosen by an indexer)
            or ``linear``, for messages.
        layers: how many of the model's layers.
        weights: parameters of one layer, all of them products with each token.
        pair_flops: FLOPs of one (query, key) pair, over all heads, forward.
        window: keys that a query sees at most, the last ones; ``None``: all before it.
        top_k: keys that a query sees at most, which an indexer chooses of all before it; ``None``: all.
        index_flops: FLOPs of the indexer for one pair, forward; it has no backward pass.
        token_flops: FLOPs of a recurrence a token, forward, beside ``weights``.
        sent: numbers a token that go from rank to rank: K and V, or the latent.
        expansion: of ``weights``, those that make K and V of the latent, on each rank that needs them.
        state: numbers of a recurrence's state, which goes from rank to rank whatever the length.
        kept: numbers a token that are kept for the backward pass in the type of activations.
        kept_wide: numbers a token that are kept in float32.
        summed: numbers a token that are summed in float32 and not kept.
    """

    kind: str
    layers: int
    weights: int
    pair_flops: float = 0.0
    window: int | None = None
    top_k: int | None = None
    index_flops: float = 0.0
    token_flops: float = 0.0
    sent: int = 0
    expansion: int = 0
    state: int = 0
    kept: int = 0
    kept_wide: int = 0
    summed: int = 0

    def __post_init__(self) -> None:
        if self.layers < 1 or self.weights < 1 or (self.window is not None and self.window < 1):
            raise InvalidUsage(
                f"TokenMixing: {self.layers} layers, {self.weights} weights and a window of {self.window} were given; "
                "expected positive numbers"
            )

    def over(self, layers: int) -> TokenMixing:
        """This mixing in another number of layers."""
        return replace(self, layers=layers)

    @property
    def squares_flops(self) -> float:
        """FLOPs of one layer's causal forward pass per token squared; a window or a recurrence has none, and of chosen
        keys those of the indexer are apart."""
        return 0.0 if self.window is not None or self.top_k is not None else self.pair_flops / 2

    @property
    def index_squares_flops(self) -> float:
        """FLOPs of one layer's indexer per token squared."""
        return self.index_flops / 2

    @property
    def linear_flops(self) -> float:
        """FLOPs of one layer's forward pass per token beside ``weights``. In a window, and of chosen keys, those of a
        long sequence; the tokens at its beginning see fewer keys."""
        return self.token_flops + self.pair_flops * (self.window or self.top_k or 0)


def softmax_mixing(
    hidden: int, heads: int, kv_heads: int, head_dim: int, *, window: int | None = None, gated: bool = False
) -> TokenMixing:
    """Softmax attention of one layer. ``gated``: each query head has a gate of its output (Qwen3-Next)."""
    width, kv_width = heads * head_dim, kv_heads * head_dim
    return TokenMixing(
        kind="full" if window is None else "window",
        layers=1,
        weights=hidden * ((3 if gated else 2) * width + 2 * kv_width),
        pair_flops=4.0 * width,
        window=window,
        sent=2 * kv_width,
        kept=(3 if gated else 2) * width + 2 * kv_width,
        kept_wide=heads,
        summed=width,
    )


def latent_mixing(
    hidden: int, heads: int, *, q_rank: int | None, kv_rank: int, nope_dim: int, rope_dim: int, v_dim: int
) -> TokenMixing:
    """Multi-head latent attention of one layer; the latent is what ranks send each other."""
    q_width, v_width = heads * (nope_dim + rope_dim), heads * v_dim
    queries = hidden * q_width if q_rank is None else q_rank * (hidden + q_width)
    expansion = kv_rank * heads * (nope_dim + v_dim)
    return TokenMixing(
        kind="latent",
        layers=1,
        weights=queries + hidden * (kv_rank + rope_dim) + expansion + v_width * hidden,
        pair_flops=2.0 * (q_width + v_width),
        sent=kv_rank + rope_dim,
        expansion=expansion,
        kept=q_width + v_width + 2 * (kv_rank + rope_dim) + 2 * (q_rank or 0),
        kept_wide=heads,
        summed=v_width,
    )


def indexed_mixing(
    hidden: int, latent: TokenMixing, *, heads: int, dim: int, q_rank: int, width: int, kv_rank: int, top_k: int
) -> TokenMixing:
    """Latent attention of one layer over the keys that an indexer chooses (DeepSeek-V3.2), as it runs here: the index
    keys of all tokens go round, and of chosen tokens the latents, over which all heads attend; where these are more,
    the keys and values of all heads, made once by who holds them.

    Args:
        latent: the attention without the indexer. heads, dim: of the indexer. q_rank: of the queries' latent.
        width: of all heads' keys and values together.
        kv_rank: of the latent; scores are over it and the rotary part, results over it.
    """
    inside, query_heads = latent.sent < width, latent.kept_wide
    over_latents = query_heads * (latent.sent + kv_rank)  # queries that have taken in the keys' weights, and results
    return replace(
        latent,
        kind="indexed",
        weights=latent.weights + q_rank * heads * dim + hidden * (dim + heads),
        pair_flops=2.0 * over_latents if inside else latent.pair_flops,
        top_k=top_k,
        index_flops=2.0 * heads * (dim + 1),
        sent=min(latent.sent, width) + dim,
        expansion=0,
        kept=latent.kept + (over_latents if inside else width),
        kept_wide=latent.kept_wide + 2 * top_k,
        summed=latent.summed,
    )


def delta_mixing(hidden: int, *, key_heads: int, key_dim: int, heads: int, value_dim: int, gates: int) -> TokenMixing:
    """A gated delta rule or KDA of one layer. ``gates``: parameters that make decays, write strengths and the gate of
    the output."""
    keys, values = key_heads * key_dim, heads * value_dim
    pairs = _CHUNK * (6 * key_dim + 4 * value_dim)  # products inside of a chunk
    return TokenMixing(
        kind="linear",
        layers=1,
        weights=hidden * (2 * keys + 2 * values) + gates,
        token_flops=float(heads * (pairs + 6 * key_dim * value_dim)),
        state=heads * key_dim * value_dim,
        kept=4 * keys + 4 * values + 2 * heads,
    )


def ssd_mixing(hidden: int, *, inner: int, heads: int, groups: int, state_dim: int) -> TokenMixing:
    """The state-space layer of Mamba-2, ``inner`` = heads * head_dim."""
    head_dim = inner // heads
    pairs = _CHUNK * 2 * (state_dim + head_dim)
    return TokenMixing(
        kind="linear",
        layers=1,
        weights=hidden * (2 * inner + 2 * groups * state_dim + heads) + inner * hidden,
        token_flops=float(heads * (pairs + 4 * state_dim * head_dim)),
        state=heads * state_dim * head_dim,
        kept=4 * inner + 4 * groups * state_dim + 2 * heads,
    )
