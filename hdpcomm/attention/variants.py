"""Chooses the variant of distributed attention: by name, or the fastest one according to a small cost model.

The choice depends only on what is the same on all ranks (lengths, mask, heads, types, costs), so all choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from torch import Tensor

from hdpcomm.arguments import check_number, check_type, check_whole
from hdpcomm.attention.backends.base import Problem
from hdpcomm.attention.gather import head_passes
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.packs import CuSeqlens
from hdpcomm.attention.ring import find_atoms
from hdpcomm.attention.tiles import Band
from hdpcomm.errors import InvalidUsage

__all__ = [
    "VARIANTS",
    "AttentionCosts",
    "AttentionOptions",
    "Variant",
    "careful_of",
    "choose_variant",
    "estimate",
    "options_of",
]


VARIANTS = ("ring", "gather", "ulysses", "hybrid")


@dataclass(frozen=True, slots=True)
class AttentionCosts:
    """The costs by which the variant is chosen; the same on all ranks."""

    flops_per_s: float
    """Attention speed of one rank."""
    bytes_per_s: float
    """Bandwidth of one rank's link, each way."""
    message_s: float
    """Latency of an exchange."""
    call_s: float
    """Fixed cost of a kernel call."""
    ranks_per_node: int = 8
    """Neighbours with fast links; the size of the head groups of a hybrid."""

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s"):
            check_number("AttentionCosts", name, getattr(self, name), above=0)
        for name in ("message_s", "call_s"):
            check_number("AttentionCosts", name, getattr(self, name), least=0)
        check_whole("AttentionCosts", "ranks_per_node", self.ranks_per_node, least=1)

    @staticmethod
    def default(device: str) -> AttentionCosts:
        """Orders of magnitude: for cpu one core and shared memory, for cuda an H100 and its network interface."""
        if device == "cuda":
            return AttentionCosts(flops_per_s=4e14, bytes_per_s=4e10, message_s=3e-5, call_s=1e-5)
        return AttentionCosts(flops_per_s=5e10, bytes_per_s=4e9, message_s=3e-5, call_s=3e-5, ranks_per_node=1)


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant with its parameters."""

    name: str
    gather: bool = False
    head_group: int = 1


def _head_groups(problem: Problem, size: int) -> list[int]:
    """Sizes of head groups among which the heads can be shared."""
    heads = problem.heads
    kv_heads = 1 if problem.latent_dim else problem.kv_heads  # every head needs the whole latent
    return [
        n for n in range(2, size + 1)
        if size % n == 0 and heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]  # fmt: skip


def _named(name: str, size: int, problem: Problem, ranks_per_node: int) -> Variant:
    if name in ("ring", "gather") or size == 1:
        return Variant(name, gather=name == "gather")
    groups = _head_groups(problem, size)
    if name == "ulysses":
        if size not in groups:
            raise InvalidUsage(
                f"the variant ulysses cannot share {problem.heads} heads with {problem.kv_heads} kv_heads among {size} "
                f"ranks: heads must be a multiple of the ranks, kv_heads a multiple or a divisor; choose ring or gather"
            )
        return Variant(name, head_group=size)
    fitting = [n for n in groups if n <= ranks_per_node and n < size] or [n for n in groups if n < size]
    if not fitting:
        raise InvalidUsage(
            f"the variant hybrid finds no head group for {problem.heads} heads with {problem.kv_heads} kv_heads on "
            f"{size} ranks: it needs a divisor of the ranks that the heads can be shared by; choose ring or gather"
        )
    return Variant(name, head_group=max(fitting) if ranks_per_node > 1 else min(fitting))


def estimate(
    variant: Variant, problem: Problem, layout: tuple[Layout, Layout], band: Band, costs: AttentionCosts
) -> float:
    """Rough seconds of one forward on the busiest rank, good enough to rank the variants."""
    q_layout, kv_layout = layout
    size, group = q_layout.size, variant.head_group
    atoms = find_atoms(q_layout, kv_layout, band)
    dims = problem.head_dim + problem.v_dim
    kv_bytes = (problem.latent_dim or problem.kv_heads * dims) * problem.dtype.itemsize
    q_bytes = problem.heads * dims * problem.dtype.itemsize  # q one way, out the other
    tokens = (float(q_layout.tokens), float(kv_layout.tokens))
    sequences, pairs = q_layout.calls(), q_layout.pairs(kv_layout, band)
    compute = 2 * pairs * problem.heads * dims / size / costs.flops_per_s
    head_exchange = 0.0
    if group > 1:
        shared = group if problem.latent_dim else 1  # each member takes the whole latent
        moved = (tokens[0] * q_bytes + tokens[1] * kv_bytes * shared) / size * (group - 1) / group
        head_exchange = 2 * costs.message_s + moved / costs.bytes_per_s
    rings = size // group
    moved_kv = float((atoms.rows * atoms.needed.sum(axis=1)).sum()) / size * kv_bytes / group
    if rings == 1:
        moved_kv = 0.0
    elif group > 1:
        moved_kv *= (rings - 1) / max(1, size - 1) * group
    wire = moved_kv / costs.bytes_per_s
    if problem.latent_dim:  # what arrives is expanded, to the heads that this rank computes
        compute += 2 * moved_kv / problem.dtype.itemsize * problem.heads / group * dims / costs.flops_per_s
    if variant.gather:
        passes = len(head_passes(problem.heads, problem.kv_heads))
        first, calls = wire / passes, 2 * sequences * passes * costs.call_s
        return head_exchange + costs.message_s + first + max(compute + calls, wire - first)
    calls = rings * sequences * costs.call_s
    steps = max(1, rings - 1)
    compute_step, wire_step = compute / rings, wire / steps + (costs.message_s if rings > 1 else 0.0)
    return head_exchange + calls + compute_step + (rings - 1) * max(compute_step, wire_step)


@lru_cache(maxsize=256)
def choose_variant(
    name: str, problem: Problem, layout: tuple[Layout, Layout], band: Band, costs: AttentionCosts | None
) -> Variant:
    """The variant called ``name``, or with "auto" the one with the lowest estimate. Raises InvalidUsage."""
    costs = AttentionCosts.default(problem.device) if costs is None else costs
    size = layout[0].size
    if name not in ("auto", *VARIANTS):
        raise InvalidUsage(f"there is no variant {name!r}; expected auto or one of {', '.join(VARIANTS)}")
    if name != "auto":
        return _named(name, size, problem, costs.ranks_per_node)
    if size == 1:
        return Variant("ring")
    candidates = [Variant("ring"), Variant("gather", gather=True)]
    groups = _head_groups(problem, size)
    if size in groups:
        candidates.append(Variant("ulysses", head_group=size))
    candidates += [Variant("hybrid", head_group=n) for n in groups if 1 < n < size and n <= costs.ranks_per_node]
    return min(candidates, key=lambda variant: estimate(variant, problem, layout, band, costs))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """Rarely given arguments of attention and linear layers; the same on all ranks that share a call.

    A layer refuses each field that it does not have: ``ring_attention`` has ``variant``, ``cu_seqlens_k``, ``softcap``,
    ``sinks`` and ``chunk``; ``mla_attention`` has ``variant`` and ``send``; ``delta_rule`` and ``ssd`` have
    ``exchange``. All of them have ``costs`` and ``check``, ``short_conv`` has only ``check``, and ``packing`` takes
    ``variant``, ``costs`` and ``check``.

    Attributes:
        variant: how attention is divided among ranks: ``ring``, ``gather``, ``ulysses``, ``hybrid``, or ``auto``, the
            lowest estimate by ``costs``; all give the same result.
        cu_seqlens_k: like ``cu_seqlens``, for the keys, where their lengths differ (a sequence may have 0 keys);
            queries and keys are then aligned at their ends. Not with a tree or a mask.
        softcap: scores become softcap * tanh(score / softcap), where the backend can; 0: they stay.
        sinks: [heads], one more score per head that takes part in the softmax without a value; each rank gets its
            share of the gradient, to be summed over the ranks like that of any parameter.
        chunk: tokens of a chunk: a query sees the keys of its own chunk only, causally; chunks begin at the multiples
            of it in each sequence (Llama 4). 0: none. Not with a tree or a mask.
        send: what ranks of ``mla_attention`` send: ``latent``, ``kv``, or ``auto``, the lower estimate by ``costs``.
        exchange: how states of linear layers travel (:mod:`hdpcomm.attention.linear.exchange`): ``gather``, ``scan``,
            ``pipeline``, or ``auto``, the lowest estimate by ``costs``.
        costs: the costs by which ``auto`` chooses; default: those of the device's type.
        check: ranks compare their arguments first, and the result is searched for NaN, so that bad input is an error on
            all ranks. Default: on the CPU; it costs two small all-gathers.
    """

    variant: str = "auto"
    cu_seqlens_k: CuSeqlens | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunk: int = 0
    send: str = "auto"
    exchange: str = "auto"
    costs: AttentionCosts | None = None
    check: bool | None = None


def options_of(layer: str, given: AttentionOptions | None, *known: str) -> AttentionOptions:
    """The options of a call of ``layer``, which has the fields ``known``. Raises InvalidUsage for any other field."""
    if given is None:
        return AttentionOptions()
    check_type(layer, "options", given, AttentionOptions)
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name not in known and (value is not None if field.default is None else value != field.default):
            raise InvalidUsage(
                f"{layer} was given options with {field.name}={value!r}, which it does not have; leave it out "
                f"({layer} has {', '.join(known)})"
            )
    if given.costs is not None:
        check_type(layer, "costs", given.costs, AttentionCosts)
    return given


def careful_of(x: object, options: AttentionOptions | None) -> bool:
    """Whether the ranks of a call on ``x`` compare their arguments: by default on the CPU. Takes bad input, too, which
    the comparison then tells to all ranks."""
    check = options.check if isinstance(options, AttentionOptions) else None
    return (not isinstance(x, Tensor) or x.device.type == "cpu") if check is None else check
