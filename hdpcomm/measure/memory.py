"""The device memory of a model's training step, measured on short passes: for the memory model of the planner, and for
planners of the ranks at hand, by what steps of a model take on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hdpcomm.comm import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.linear_cross_entropy import default_chunk_tokens
from hdpcomm.measure.costs import forward_backward, profile_cost_model
from hdpcomm.models.expert_group import ExpertGroup
from hdpcomm.models.recompute import WeightGradients, recomputed_layers, set_recompute
from hdpcomm.offload import ActivationOffload, MemoryMeter, measure_copies
from hdpcomm.offload.layers import AbsentLayer, find_layers, layer_kind
from hdpcomm.plan import CostModel, MemoryModel, ModelSpec, Planner
from hdpcomm.plan.memory import Line, StepMemory
from hdpcomm.train.step.runner import WHOLE, StepSettings
from hdpcomm.train.zero.buckets import Units
from hdpcomm.train.zero.gradients import trained_parameters, wide_type
from hdpcomm.train.zero.matrix_owners import MatrixMemory

__all__ = ["Replicas", "measured_planner", "profile_activations", "profile_memory", "with_states"]

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_DOUBLINGS = 6
_CHANGE = 4e-3  # of bytes a token, from some tokens to twice as many
_EXPERTS_CHANGE = 0.05
_LONG = 2048
"""Tokens from which blocks of kernels come and go, which change bytes a token on meta as well."""
_CHUNK = 16
"""Tokens whose logits exist at a time in the passes, so that they are not the most of them."""
_CHUNK_ON_META, _CHUNKS_ON_META = 64, 64
"""There each chunk takes time, and no memory: a long pass has larger ones, at least so many."""
_SEQUENCE = 256
"""Tokens of a rank of one sequence: packs of short ones take the memory of a long one, and less time."""
_SEQUENCE_ON_META = 8192
"""There long sequences take no more time than short ones."""
_FEW = 3
"""Layers of a list that are enough where nothing is allocated, if each kind is among them."""
_GRADIENTS_ON_THEIR_WAY = 2
"""Layers whose gradients are not with their owners yet, with ZeRO-2: one that a pass makes, one that is added."""
_SAMPLE = 4096
"""Elements of the tensor on which an optimizer shows what it needs."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many HDP ranks share what ZeRO cuts; what belongs to experts those share that hold the same ones.

    Attributes:
        all: they share the optimizer's state and master weights.
        on_host: of these, they share weights and gradients.
    """

    all: int
    on_host: int


def profile_memory(
    model: nn.Module,
    comm: Communicator,
    optimizer: MakeOptimizer,
    *,
    tokens: int,
    settings: StepSettings = WHOLE,
    everyone: Communicator | None = None,
    split_backward: bool = False,
    replicas: Replicas | None = None,
    matrices: MatrixMemory | None = None,
) -> StepMemory:
    """Measures passes of ``tokens / 2`` and ``tokens`` tokens, with no layer, a few and all layers recomputed.

    On torch's meta device, with the mesh of :class:`hdpcomm.comm.mesh.AbsentRanks`, nothing is allocated and the
    figures are the same, experts' rows being spread evenly.

    Collective over ``everyone``: with more than one rank in ``comm`` the passes are those of one sequence on all of
    them, so that the buffers of the ring are counted. Gradients are dropped; the model recomputes afterwards what it
    did before.

    Args:
        model: in the type that it will be trained in (the settings' ``dtype`` if that is given).
        optimizer: makes one over the parameters it is given; called with a small one, to count its state.
        tokens: of a rank, in the longer of the first passes; some hundreds are enough. Doubled until bytes a token
            are steady, since gradients of the embedding and the last layer may be the most of a short pass.
        settings: of the trainer.
        everyone: all ranks that measure at the same time, since they share layers; default: those of ``comm``. Each
            stage of a pipeline gets figures of its own.
        replicas: among which the settings' ``zero`` cuts; default: the ranks of ``comm``, on one host.
        matrices: what the optimizer of whole matrices takes, if there is one
            (:class:`hdpcomm.train.MatrixOwners`); ``optimizer`` is then that of all other parameters.
        split_backward: backward passes leave weight gradients for later
            (:class:`hdpcomm.models.recompute.WeightGradients`).

    Raises:
        InvalidUsage: fewer than 8 tokens, or a model without a list of layers.
    """
    if tokens < 8:
        raise InvalidUsage(f"tokens is {tokens}; at least 8 are needed to see how memory grows")
    layers = find_layers(model)
    some = _some_of(model, layers) if next(model.parameters()).is_meta else list(layers)
    with _only(model, layers, some):
        passes = _measured_passes(model, comm, tokens, everyone or comm, split_backward=split_backward)
    kept, backward, recomputed, layer, layer_input, owed = passes
    more = (len(layers) - len(some)) * layer
    if more and (others := _kept_by_kind(model, comm, tokens, layers, some)):
        each = [others.get(layer_kind(one), layer) for one in layers]
        more = sum(size for one, size in zip(layers, each, strict=True) if one not in some)
        layer = sum(each) / len(layers)
    logits, chunk, _ = _logits(model)
    found = StepMemory(
        layers=len(layers),
        states=0.0,
        layer=layer,
        layer_input=layer_input,
        forward=replace(kept, token=kept.token + more),
        backward=replace(backward, token=backward.token + more),
        recomputed=replace(recomputed, token=recomputed.token + (len(layers) - len(some)) * layer_input),
        logits=logits,
        chunk=chunk,
        owed=owed,
    )
    replicas = replicas or Replicas(comm.size, comm.size)
    return with_states(found, model, optimizer, settings=settings, replicas=replicas, matrices=matrices)


def with_states(
    passes: StepMemory,
    model: nn.Module,
    optimizer: MakeOptimizer,
    *,
    settings: StepSettings,
    replicas: Replicas,
    matrices: MatrixMemory | None = None,
) -> StepMemory:
    """The memory of a step whose passes are known, with the states under other settings. Local; arguments of
    :func:`profile_memory`."""
    replicas = replicas if settings.zero else Replicas(1, 1)
    weights, gradients, others, update = _state_bytes(
        model, optimizer, replicas=replicas, zero=settings.zero, dtype=settings.dtype, matrices=matrices
    )
    host = 0.0
    if settings.optimizer_offload:
        host, others, update = _host_bytes(model, optimizer, replicas, settings.dtype), 0.0, 0.0
    states = weights + gradients + others
    copies = _replica_bytes(model, settings.dtype) / passes.layers
    return replace(
        passes, states=states, update=update, weights=weights, gradients=gradients, host=host, replicas=copies
    )


def _replica_bytes(model: nn.Module, dtype: torch.dtype | None) -> float:
    """Bytes of the replicas of others' experts on this rank, of all layers."""
    held: dict[int, float] = {}
    for module in model.modules():
        if isinstance(group := getattr(module, "expert", None), ExpertGroup):
            own = dict(module.named_parameters(remove_duplicate=False))
            experts = [own[name] for name in group.shards if name in own]
            held |= {id(each): group.replicas * _narrow_bytes(each, dtype) / each.shape[0] for each in experts}
    return sum(held.values())


def _measured_passes(
    model: nn.Module, comm: Communicator, tokens: int, everyone: Communicator, *, split_backward: bool
) -> tuple[Line, Line, Line, float, float, float]:
    """See :class:`StepMemory`: the lines ``forward``, ``backward`` and ``recomputed``, the bytes a token ``layer``,
    ``layer_input`` and ``owed``, the most of the ranks of ``comm``. Collective over ``everyone``."""
    layers = find_layers(model)
    # What is before the first layer may be frozen (LoRA); then it keeps less than the others, the second one tells.
    few = (0, 1, 2) if _begins_frozen(model, layers) else (0, 1)
    before = recomputed_layers(model)
    inputs: list[int] = []
    before_that: Tensor | None = None
    # How many rows come to the experts of a rank is never quite the same.
    shared = any(isinstance(getattr(each, "expert", None), ExpertGroup) for each in model.modules())
    hook = layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(_largest(args, kwargs)), with_kwargs=True
    )
    meta = next(model.parameters()).is_meta
    shorter: dict[int, tuple[int, int]] = {}  # peaks of half the tokens, by layers recomputed
    later = WeightGradients() if split_backward else None
    owed = 0.0
    try:
        for _ in range(_DOUBLINGS):
            chunk = _chunk(tokens, meta=meta)
            with _small_chunks(model, chunk):
                set_recompute(model, 0)
                forward_backward(model, comm, [2 * comm.size])  # makes the gradients, which stay
                lines = {}
                for recompute in dict.fromkeys((*few, len(layers))):
                    set_recompute(model, recompute)
                    if later is not None:
                        later.watch(layers)
                    half = shorter.get(recompute) or _peaks(model, comm, tokens // 2, later)[:2]
                    inputs.clear()
                    *whole, left = _peaks(model, comm, tokens, later)
                    if recompute == 0:
                        layer_input, owed = inputs[-1] / tokens, left / tokens / len(layers)
                    lines[recompute] = tuple(map(partial(_line, tokens), half, whole))
                    if chunk == _chunk(2 * tokens, meta=meta):  # else the next passes have larger ones
                        shorter[recompute] = whole[0], whole[1]
                (kept, backward), (_, recomputed) = lines[0], lines[len(layers)]
            layer = lines[few[-2]][0].token - lines[few[-1]][0].token + layer_input
            working = recomputed.token - (len(layers) - 1) * layer_input - layer
            slopes = torch.tensor([kept.token, backward.token, recomputed.token])
            change = _EXPERTS_CHANGE if shared or (meta and tokens >= _LONG) else _CHANGE
            steady = before_that is not None and torch.allclose(slopes, before_that, rtol=change)
            held = min(kept.token, len(layers) * layer)
            steady = steady and working > 0 and backward.token > held + working / 2
            if _all_agree(everyone, steady):
                break
            tokens, before_that = 2 * tokens, slopes  # what does not grow with the tokens was the most
    finally:
        hook.remove()
        if later is not None:
            later.leave(layers)
        set_recompute(model, before)
        model.zero_grad(set_to_none=True)
    narrow = _logits(model)[2]
    most = torch.tensor(
        [
            kept.fixed + narrow, kept.token + layer_input, backward.fixed, backward.token, recomputed.fixed,
            recomputed.token, layer, layer_input, owed,
        ],
        dtype=torch.float64,
    )  # fmt: skip
    comm.all_reduce(most, "max")
    values = most.tolist()
    return Line(*values[:2]), Line(*values[2:4]), Line(*values[4:6]), values[6], values[7], values[8]


def _chunk(tokens: int, *, meta: bool) -> int:
    """Tokens of a pass whose logits exist at a time."""
    return min(_CHUNK_ON_META if meta else _CHUNK, max(_CHUNK, tokens // _CHUNKS_ON_META), tokens // 4)


def _some_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The first layers of each list of them, up to one of each kind."""
    lists = [own for _, own in _lists(model, layers) if len(own) < len(layers)] or [list(layers)]
    chosen = set()
    for own in lists:
        kinds = [layer_kind(each) for each in own]
        chosen.update(own[: max(_FEW, *(kinds.index(kind) + 1 for kind in kinds))])
    return [layer for layer in layers if layer in chosen]


def _kept_by_kind(
    model: nn.Module, comm: Communicator, tokens: int, layers: Sequence[nn.Module], some: Sequence[nn.Module]
) -> dict[str, float]:
    """Bytes a token that layers keep which are of another kind than the first one: with the first of that kind as the
    last layer, less those without it."""
    found: dict[str, float] = {}
    for place, layer in enumerate(some):
        if place and (kind := layer_kind(layer)) not in (layer_kind(some[0]), *found):
            kept = []
            for count in (place, place + 1):
                with _only(model, layers, some[:count]):
                    kept.append(_peaks(model, comm, tokens, None)[0])
            found[kind] = (kept[1] - kept[0]) / tokens
    return found


def _lists(model: nn.Module, layers: Sequence[nn.Module]) -> list[tuple[nn.ModuleList, list[nn.Module]]]:
    """The lists that have some of these layers and no others, but absent ones; and which they have."""
    known, found = set(map(id, layers)), []
    for each in model.modules():
        if isinstance(each, nn.ModuleList):
            own = [layer for layer in each if not isinstance(layer, AbsentLayer)]
            if {*map(id, own)} <= known:
                found.append((each, own))
    return found


@contextmanager
def _only(model: nn.Module, layers: Sequence[nn.Module], few: Sequence[nn.Module]) -> Iterator[None]:
    """The model has no other layers meanwhile."""
    without = set(map(id, layers)) - set(map(id, few))
    lists = [each for each, _ in _lists(model, layers)]
    before = [each._modules for each in lists]
    try:
        for each in lists:
            each._modules = {str(n): layer for n, layer in enumerate(m for m in each if id(m) not in without)}
        yield
    finally:
        for each, modules in zip(lists, before, strict=True):
            each._modules = modules


def _begins_frozen(model: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Whether there is nothing to train before the first of several layers."""
    inside = {id(p) for layer in layers for p in layer.parameters()}
    embeddings = [p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
    outside = [p for p in embeddings if id(p) not in inside]
    return len(layers) > 2 and bool(outside) and not any(p.requires_grad for p in outside)


def _all_agree(comm: Communicator, own: bool) -> bool:
    """Whether all ranks say so. Collective."""
    least = torch.tensor([int(own)])
    comm.all_reduce(least, "min")
    return bool(least)


def _peaks(model: nn.Module, comm: Communicator, tokens: int, later: WeightGradients | None) -> tuple[int, int, int]:
    """Bytes that are kept at the end of the forward pass, the most of both passes, and what is left for ``later``."""
    device = next(model.parameters()).device
    lengths = {
        min(tokens, each) for each in ((_SEQUENCE, _SEQUENCE_ON_META) if device.type == "meta" else (_SEQUENCE,))
    }
    found = []
    for length in lengths:  # from four ranks on, attention may run in another way, with other buffers, for each
        kept: list[int] = []
        pack = [min(length, tokens - start) * comm.size for start in range(0, tokens, length)]
        meter = MemoryMeter("cpu" if device.type == "meta" else device)
        with meter, nullcontext() if later is None else later.put_off(0):
            forward_backward(model, comm, pack, context=_noting_at_end(meter, kept))
        found.append((kept[0], meter.peak, 0 if later is None else later.held_bytes))
        if later is not None:
            later.forget()
    most_kept, most, owed = map(max, zip(*found, strict=True))
    return most_kept, most, owed


def _line(tokens: int, half: int, whole: int) -> Line:
    """Through the bytes of half the tokens and of all."""
    slope = (whole - half) / (tokens - tokens // 2)
    return Line(whole - slope * tokens, slope)


@contextmanager
def _noting_at_end(meter: MemoryMeter, found: list[int]) -> Iterator[None]:
    yield
    found.append(meter.in_use)


@contextmanager
def _small_chunks(model: nn.Module, tokens: int) -> Iterator[None]:
    """The loss in chunks of so many tokens, where it has chunks, so that longer passes only add activations."""
    if not hasattr(model, "chunk_tokens"):
        yield
        return
    before = model.chunk_tokens
    model.chunk_tokens = tokens  # type: ignore[assignment]
    try:
        yield
    finally:
        model.chunk_tokens = before


def _logits(model: nn.Module) -> tuple[float, int, float]:
    """Bytes of one token's logits, tokens of a chunk, and bytes of a second gradient of the last layer, in its own
    type; (0, 1, 0) where the logits exist as a whole."""
    if not hasattr(model, "chunk_tokens"):
        return 0.0, 1, 0.0
    weight: Tensor = model.last_layer.weight  # type: ignore[union-attr, assignment]
    chunk = model.chunk_tokens or default_chunk_tokens(weight)
    narrow = weight.numel() * weight.element_size() if weight.element_size() < 4 else 0
    return float(weight.shape[0] * weight.element_size()), int(chunk), float(narrow)  # type: ignore[arg-type]


def _state_bytes(
    model: nn.Module,
    optimizer: MakeOptimizer,
    *,
    replicas: Replicas,
    zero: int,
    dtype: torch.dtype | None,
    matrices: MatrixMemory | None,
) -> tuple[float, float, float, float]:
    """Bytes that a trainer keeps between steps: weights, gradients, and masters with the optimizer's state; and the
    most that its optimizer's step adds."""
    trained = trained_parameters(model.parameters())
    wide = wide_type(trained, dtype)
    sharded = bool(zero) or dtype is not None
    held = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    parts = _parts(model, replicas.all)
    count, updated = sum(p.numel() for p in trained), sum(p.numel() / parts[id(p)] for p in trained)
    weights: float = sum(_narrow_bytes(t, dtype) for t in held)
    gradients: float = count * wide.itemsize
    if zero > 1:
        shared = _parts(model, replicas.on_host)
        own = sum(p.numel() / shared[id(p)] for p in trained)
        root, layer = _unit_bytes(model, model.parameters(), dtype)
        trained_root, trained_layer = _unit_bytes(model, trained, dtype)
        gradients = own * wide.itemsize + trained_root + _GRADIENTS_ON_THEIR_WAY * trained_layer
        if zero == 3:
            whole = sum(_narrow_bytes(p, dtype) for p in model.parameters())
            weights += sum(_narrow_bytes(p, dtype) / shared[id(p)] for p in model.parameters()) - whole
            weights += root + 2 * layer  # the one that computes, and the next one
    narrow = sum(p.numel() / parts[id(p)] for p in trained if (dtype or p.dtype) != wide) if sharded else 0
    kept, added = _needs(optimizer, wide)
    if matrices is not None:  # zero is 0, and the others' state is whole
        others = [p.numel() for p in trained if id(p) not in matrices.parameters]
        state, update = matrices.kept + kept * sum(others), max(matrices.added, added * max(others, default=0))
        return weights, gradients, state, update
    largest = max(p.numel() for p in trained)
    part = largest / min(parts.values())
    return weights, gradients, narrow * wide.itemsize + kept * updated, added * part


def _host_bytes(model: nn.Module, optimizer: MakeOptimizer, replicas: Replicas, dtype: torch.dtype | None) -> float:
    """Bytes of master weights, their gradients and the optimizer's state that a rank updates on the host."""
    trained = trained_parameters(model.parameters())
    wide, parts = wide_type(trained, dtype), _parts(model, replicas.all)
    return sum(p.numel() / parts[id(p)] for p in trained) * (2 * wide.itemsize + _needs(optimizer, wide)[0])


def _narrow_bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    """Bytes of a tensor as passes use it."""
    kind = dtype or tensor.dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.numel() * kind.itemsize


def _unit_bytes(model: nn.Module, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> tuple[float, float]:
    """Bytes of those parameters that are in no layer, and of those of the layer that has most."""
    units, sizes = Units([model]), dict[int, int]()
    for parameter in parameters:
        key = id(units.of[id(parameter)])
        sizes[key] = sizes.get(key, 0) + _narrow_bytes(parameter, dtype)
    roots = sum(sizes.get(id(root), 0) for root in units.roots)
    return roots, max((sizes.get(id(layer), 0) for layer in units.layers), default=0)


def _parts(model: nn.Module, ranks: int) -> dict[int, int]:
    """By parameter, among how many ranks its optimizer's state is cut."""
    found = dict.fromkeys(map(id, model.parameters()), ranks)
    for module in model.modules():
        if ranks > 1 and isinstance(group := getattr(module, "expert", None), ExpertGroup):
            own = dict(module.named_parameters(remove_duplicate=False))
            found |= {id(own[name]): max(1, ranks // group.comm.size) for name in group.shards if name in own}
    return found


def _needs(optimizer: MakeOptimizer, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes an element that an optimizer keeps, and that its step adds for a while."""
    sample = nn.Parameter(torch.zeros(_SAMPLE, dtype=dtype))
    made = optimizer([sample])
    for _ in range(2):  # the state is made in the first step
        sample.grad = torch.zeros_like(sample)
        with MemoryMeter("cpu") as meter:
            made.step()
    kept = sum(
        t.numel() * t.element_size() for t in made.state[sample].values() if isinstance(t, Tensor) and t.numel() > 1
    )
    return kept / _SAMPLE, meter.peak / _SAMPLE


def _largest(args: Any, kwargs: Any) -> int:
    """Bytes of the largest tensor among a layer's arguments: the hidden states. No gradient comes to them where what is
    before them is frozen."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
    return max(t.numel() * t.element_size() for t in [t for t in tensors if t.requires_grad] or tensors)


def profile_activations(
    model: nn.Module, offload: ActivationOffload, comm: Communicator, *, tokens: int, capacity: int
) -> MemoryModel:
    """Runs three short passes of at most ``tokens`` tokens on each rank alone, and copies, for planners of ranks that
    hold ``capacity`` tokens without offload. Collective over ``comm``.

    Every rank gets the same model of its memory (means over the ranks). Gradients are dropped.

    Raises:
        InvalidUsage: fewer than 2 tokens, or the pool is too small for a pass of this length at ratio 1.
    """
    if tokens < 2:
        raise InvalidUsage(f"tokens is {tokens}; at least 2 are needed to see how memory grows")
    alone = comm.subset([comm.rank])
    assert alone is not None
    forward_backward(model, alone, [tokens])  # makes the gradients, which stay
    peaks = []
    for length in (tokens // 2, tokens):
        with MemoryMeter(offload.lane.place) as meter:
            forward_backward(model, alone, [length])
        peaks.append(meter.peak)
    line = _line(tokens, *peaks)
    before = offload.stats().stored_bytes
    forward_backward(model, alone, [tokens], context=offload.micro_batch(1.0, tokens=tokens))
    moved = (offload.stats().stored_bytes - before) / tokens
    model.zero_grad(set_to_none=True)
    pool = offload.pool.stats().capacity
    rate = measure_copies(offload.pool, min(8 << 20, pool // 4))
    shared = torch.tensor([line.fixed, line.token, moved, rate], dtype=torch.float64)
    comm.all_reduce(shared)
    fixed, token, moved, rate = (shared / comm.size).tolist()
    moved = min(moved, 0.999 * token)
    return MemoryModel(
        capacity,
        offloadable=moved / token,
        copy_s=moved / rate,
        host_tokens=pool / token,
        token_bytes=token,
        state_bytes=max(0.0, fixed),
    )


def measured_planner(
    model: nn.Module,
    comm: Communicator | Mesh,
    *,
    capacity: int,
    longest: int,
    policy: str = "balanced",
    queue: bool = False,
    slices: int = 1,
    spec: ModelSpec | None = None,
    offload: ActivationOffload | None = None,
    cost_model: CostModel | None = None,
) -> Planner:
    """See :meth:`hdpcomm.plan.Planner.measured`; ``cost_model``: known, so that it is not measured."""
    mesh = comm if isinstance(comm, Mesh) else Mesh(comm, placement=range(comm.size))
    if mesh.pipeline > 1:
        raise InvalidUsage(
            f"Planner.measured() runs whole models, and the mesh has pipelines of {mesh.pipeline} stages; measure a "
            "model of one stage's layers by profile_cost_model() and give it to Planner(None, mesh.cluster(...))"
        )
    if slices > 1 and spec is None:
        raise InvalidUsage(
            f"slices={slices}: it is not known how much slices of this model keep for later ones; give spec=, a "
            "ModelSpec, or slices=1 and more ranks, a larger capacity or offload="
        )
    cluster = mesh.cluster(capacity=capacity)
    longest = min(longest, capacity)
    if cost_model is None:
        cost_model = profile_cost_model(model, mesh.hdp_comm, longest=longest, everyone=mesh.comm)
    memory = MemoryModel(capacity)
    if offload is not None:
        memory = profile_activations(model, offload, mesh.comm, tokens=max(2, longest), capacity=capacity)
    if slices > 1 and spec is not None:
        spec = replace(spec, dtype_bytes=next(model.parameters()).element_size())
        whole = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())  # of transformers
        recompute = spec.layers if whole else recomputed_layers(model)
        memory = memory.with_kept(spec, cluster, recompute=recompute)
    return Planner(None, cluster, policy, cost_model, memory=memory, queue=queue, slices=slices)
