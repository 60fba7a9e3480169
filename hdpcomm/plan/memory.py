"""Device memory of a training step from its parts, and what planners make of it: :class:`StepMemory`,
:class:`MemoryModel`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hdpcomm.arguments import MOST_TOKENS, check_number, check_whole, size_text
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.specs import ClusterSpec, ModelSpec

__all__ = ["Line", "MemoryModel", "StepMemory", "most_in_flight"]

_CHUNK_BYTES = 16 << 20
"""Bytes of logits in a chunk of the loss; see :func:`hdpcomm.kernels.linear_cross_entropy`."""


def most_in_flight(pipeline: int, chunks: int, device: int) -> float:
    """Most micro-batches whose activations a device of a pipeline holds at once under 1F1B, or interleaved 1F1B with
    ``chunks`` stages a device; those of one stage of several count in part (arXiv 2104.04473, section 2.2)."""
    if chunks == 1:
        return float(pipeline - device)
    return (2 * (pipeline - device - 1) + (chunks - 1) * pipeline + 1) / chunks


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes that grow with the tokens of a rank: ``fixed + token * tokens``."""

    fixed: float
    token: float

    def at(self, tokens: float) -> float:
        return self.fixed + self.token * tokens


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on a rank's device in a step: states, and the most that a forward and backward pass adds to them.

    A pass is largest in one of three places. At the loss, which holds the activations of all layers and the logits of
    one chunk. In the backward pass of the last layer, which needs room to work beside them. And, if layers are
    recomputed, in the backward pass of one of those, which holds its activations again, and the inputs of the layers
    before it. Linear in the tokens each; the loss has a part that ends to grow where a chunk is full.

    Attributes:
        layers: of the model. Recomputed ones are counted from the first.
        states: parameters, gradients, master weights and the optimizer's state.
        layer: bytes a token that a layer keeps for its backward pass.
        layer_input: of these, what a recomputed layer keeps.
        forward: the pass up to the loss, all layers kept, without logits.
        backward: the pass in the last layer's backward, all layers kept.
        recomputed: the pass in the backward of a recomputed layer, all layers recomputed.
        logits: bytes of one token's logits; 0: they do not exist or are in the lines, as the whole.
        chunk: tokens whose logits exist at a time.
        update: what the optimizer's step adds to the states.
        resident: layers at the end that offload leaves alone.
        in_flight: micro-batches whose activations the device holds at once, the one that it works on among them: above
            1 on a device of a pipeline (:func:`most_in_flight`). Tokens are those of one.
        messages: bytes a token of what is under way between this device and other stages.
        owed: bytes a token that a layer that is not recomputed keeps after a split backward pass, for the gradients of
            its weights; 0: backward passes are whole.
        owing: micro-batches that owe these gradients at once, beside those in flight.
        weights, gradients: of the states; 0 where they were not told apart.
        replicas: bytes of the weights of a layer's replicas of experts, which it keeps for its backward pass unless it
            is recomputed; that makes gradients of as many.
        host: bytes in host memory of an optimizer that computes there: masters, its state and their gradients.
    """

    layers: int
    states: float
    layer: float
    layer_input: float
    forward: Line
    backward: Line
    recomputed: Line
    logits: float = 0.0
    chunk: int = 1
    update: float = 0.0
    resident: int = 2
    in_flight: float = 1.0
    messages: float = 0.0
    owed: float = 0.0
    owing: float = 0.0
    weights: float = 0.0
    gradients: float = 0.0
    host: float = 0.0
    replicas: float = 0.0

    def offloadable(self, recompute: int = 0) -> float:
        """Bytes a token that go to host memory at an offload ratio of 1, with ``recompute`` layers recomputed."""
        leaving = max(0, self.layers - self.resident)
        inputs = min(recompute, leaving)
        return inputs * self.layer_input + (leaving - inputs) * self.layer

    def activation_bytes(self, tokens: float, recompute: int = 0, ratio: float = 0.0) -> float:
        """The most that a pass over ``tokens`` tokens of a rank takes beside the states.

        Args:
            recompute: layers that are recomputed.
            ratio: share of the tokens whose activations go to host memory.
        """
        saved = recompute * (self.layer - self.layer_input) + ratio * self.offloadable(recompute)
        owed = (self.layers - recompute) * self.owed
        chunk = math.ceil(tokens / math.ceil(tokens / self.chunk)) if tokens > 0 else 0  # chunks are of equal size
        most = self.forward.at(tokens) + chunk * self.logits - saved * tokens
        if recompute < self.layers:
            back = min(ratio * self.offloadable(recompute), owed)  # what gradients are owed for stays on the device
            most = max(most, self.backward.at(tokens) + (back - saved) * tokens)
        if recompute:
            # The recomputed layer, and the inputs of those before it, of which offload has taken some; the layers after
            # it owe gradients, if backward passes are split.
            kept = (self.layers - recompute) * self.layer_input
            inputs = min(recompute, max(0, self.layers - self.resident)) * self.layer_input
            most = max(most, self.recomputed.at(tokens) + (owed - kept - ratio * inputs) * tokens)
        others = (self.in_flight - 1) * max(self.forward.token - self.layer_input - saved, owed)
        copies = (2 + self.in_flight * (self.layers - recompute)) * self.replicas
        return most + copies + (others + self.owing * owed + self.messages) * tokens

    def peak_bytes(self, tokens: float, recompute: int = 0, ratio: float = 0.0) -> float:
        """The most that a step takes; arguments of :meth:`activation_bytes`."""
        return self.states + max(self.update, self.activation_bytes(tokens, recompute, ratio))

    def capacity(self, limit: float, recompute: int = 0, ratio: float = 0.0) -> int:
        """The most tokens of a rank that fit into ``limit`` bytes; 0: not even one."""
        low, high = 0, 1
        while self.peak_bytes(high, recompute, ratio) <= limit:
            low, high = high, 2 * high
            if high > 1 << 50:  # nothing grows with the tokens
                break
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak_bytes(middle, recompute, ratio) <= limit else (low, middle)
        return low

    def fewest_recomputed(self, limit: float, tokens: int, ratio: float = 0.0) -> int:
        """The fewest layers to recompute so that ``tokens`` tokens of a rank fit into ``limit`` bytes.

        Raises:
            InvalidUsage: they do not fit whatever is recomputed; says what does.
        """
        for recompute in range(self.layers + 1):
            if self.peak_bytes(tokens, recompute, ratio) <= limit:
                return recompute
        best = max(self.capacity(limit, recompute, ratio) for recompute in (0, self.layers))
        raise InvalidUsage(
            f"{tokens:,} tokens a rank take {size_text(self.peak_bytes(tokens, self.layers, ratio))} with all "
            f"{self.layers} layers recomputed, and {size_text(limit)} is the limit, in which {best:,} fit "
            f"({size_text(self.states)} are weights, gradients and optimizer); lower the capacity, or take more ranks"
        )

    def line(self, recompute: int = 0) -> Line:
        """:meth:`activation_bytes` of many tokens, where it is a line."""
        tokens = 1e9
        near, far = (self.activation_bytes(count, recompute) for count in (tokens, 2 * tokens))
        token = (far - near) / tokens
        return Line(max(0.0, near - token * tokens), token)

    @classmethod
    def of(cls, model: ModelSpec, *, states: float, layers: int | None = None, tensor: int = 1) -> StepMemory:
        """From the shape of a model as :class:`hdpcomm.models.Llama` keeps its activations.

        Args:
            layers: on this rank, of a pipeline; default all.
            tensor: ranks that share each layer.
        """
        size, layers = model.dtype_bytes, layers or model.layers
        wide = max(4, size)
        hidden, vocabulary = size * model.hidden, model.vocab / tensor
        layer = model.activation_bytes / tensor
        # The gradient of the last layer's weight, which is summed in the wide type.
        chunk = max(model.hidden, int(_CHUNK_BYTES // max(1.0, vocabulary * size)), 1)
        head = vocabulary * model.hidden
        around = 3 * 8 + size * (model.head_dim or model.hidden // model.heads)  # tokens, labels, positions; angles
        kept = layers * layer + around
        # At the gate: gradients of its result and of both inputs, less the result, which is gone by then. In attention:
        # gradients of queries, keys, values and results.
        working = max(2 * model.ffn * model.top_k * size / tensor + hidden, 4 * hidden / tensor)
        return cls(
            layers=layers,
            states=states,
            layer=layer,
            layer_input=hidden,
            forward=Line(head * (wide if wide == size else wide + size), kept + 3 * hidden),
            backward=Line(head * size, kept + working),
            recomputed=Line(head * size, (layers - 1) * hidden + layer + around + working),
            logits=size * vocabulary,
            chunk=chunk,
        )


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """How many tokens a rank can hold (ByteScale, section 5.2), of the parts that :class:`StepMemory` has.

    Attributes:
        capacity: tokens without offload.
        offloadable: share of a token's bytes that offload can move: all layers but two.
        copy_s: seconds to copy that share of one token one way; 0: no offload.
        host_tokens: tokens that fit into the pinned host memory of a rank.
        token_bytes: activations of one token; ``None`` without a model.
        state_bytes: weights, gradients and optimizer on a rank, with the logits of a chunk and the gradient of the last
            layer, which every pass needs; ``None`` without a model.
        kept: share of a token's bytes that its keys and values take in slices to come, with their gradients in float32;
            1 without a model.
        kept_offloaded: of these, what stays on the device at an offload ratio of 1.
        kept_copy_s, kept_back_s: seconds to load a token's keys and values for a forward pass of a slice, and them and
            their gradients for a backward pass.
    """

    capacity: int
    offloadable: float = 0.0
    copy_s: float = 0.0
    host_tokens: float = 0.0
    token_bytes: float | None = None
    state_bytes: float | None = None
    kept: float = 1.0
    kept_offloaded: float = 1.0
    kept_copy_s: float = 0.0
    kept_back_s: float = 0.0

    def __post_init__(self) -> None:
        check_whole("MemoryModel", "capacity", self.capacity, least=1, most=MOST_TOKENS)
        check_number("MemoryModel", "offloadable", self.offloadable, least=0, most=1)
        for name in ("copy_s", "host_tokens", "kept", "kept_offloaded", "kept_copy_s", "kept_back_s"):
            check_number("MemoryModel", name, getattr(self, name), least=0)

    def bytes_held(self, tokens: float) -> float | None:
        """Bytes in use on the device while it holds the activations of ``tokens`` tokens; ``None`` without a model."""
        if self.token_bytes is None or self.state_bytes is None:
            return None
        return self.state_bytes + tokens * self.token_bytes

    @classmethod
    def of(cls, model: ModelSpec | None, cluster: ClusterSpec) -> MemoryModel:
        """Derives the capacity (unless the cluster gives it) and what offload can move, and how fast."""
        if model is None:
            if cluster.capacity is None or cluster.offload:
                what = "offload" if cluster.capacity is not None else "a cluster without a capacity"
                raise InvalidUsage(f"{what} needs a ModelSpec, to know the bytes of a token: give the model")
            return cls(cluster.capacity)
        device = cluster.hardware
        layers = cluster.most_layers(model.layers)
        step = StepMemory.of(model, states=_state_bytes(model, cluster), layers=layers, tensor=cluster.tensor)
        token_bytes, states = step.line().token, step.states + step.line().fixed
        capacity = cluster.capacity or _derived_capacity(model, cluster, token_bytes, states)
        resident = cls(capacity, token_bytes=token_bytes, state_bytes=states)
        if not cluster.offload or layers <= 2:
            return resident.with_kept(model, cluster)
        moved = step.offloadable()
        bandwidth = min(device.d2h_bandwidth, device.h2d_bandwidth)
        offloaded = replace(
            resident,
            offloadable=moved / token_bytes,
            copy_s=moved / bandwidth / cluster.largest_share,  # of the mean stage
            host_tokens=device.host_bytes / (token_bytes * _sets_held(cluster)),
        )
        return offloaded.with_kept(model, cluster)

    def with_kept(
        self, model: ModelSpec, cluster: ClusterSpec, token_bytes: float | None = None, *, recompute: int = 0
    ) -> MemoryModel:
        """With what slices of ``model`` keep; ``token_bytes``: of one token, default those that this knows, or else
        those of the model on a device that recomputes so many layers.

        On the device they are those of all layers, and of one layer the gradients that a pass finds, piece and sum.
        With all in host memory there are three sets of one layer: those in use, those that come or leave, and again the
        gradients that a pass finds.
        """
        whole, share = cluster.most_layers(model.layers), cluster.largest_share
        step = StepMemory.of(model, states=0.0, layers=whole, tensor=cluster.tensor)
        size = token_bytes or self.token_bytes or step.line(min(whole, recompute)).token
        layers = model.layers / cluster.pipeline * share
        narrow, wide = model.dtype_bytes, max(4, model.dtype_bytes)
        values = model.kept_values(cluster.tensor) / cluster.pipeline * share
        both = values * (narrow + wide) / size
        kept = both * (1 + 1 / layers)
        if not self.offloads:
            return replace(self, kept=kept, kept_offloaded=kept)
        of_one = self.copy_s / (self.offloadable * (self.token_bytes or size))  # seconds a byte
        return replace(
            self,
            kept=kept,
            kept_offloaded=min(kept, 3 * both / layers),
            kept_copy_s=values * narrow * of_one,
            kept_back_s=values * (narrow + wide) * of_one,
        )

    @property
    def offloads(self) -> bool:
        """Whether anything can go to host memory."""
        return self.copy_s > 0 and self.offloadable > 0

    def kept_at(self, ratio: float) -> float:
        """Share of a token's bytes that slices keep on the device at an offload ratio."""
        return self.kept + ratio * (self.kept_offloaded - self.kept)

    def room_of_slices(self, kept: int, ratio: float) -> int:
        """The most tokens that a slice may have on a rank which keeps ``kept`` tokens of it and the others."""
        room = (self.capacity - self.kept_at(ratio) * kept) / (1 - ratio * self.offloadable)
        if ratio > 0:
            room = min(room, (self.host_tokens - ratio * self.kept * kept) / (ratio * self.offloadable))
        return math.floor(room + 1e-6)

    def token_limit(self, ratio: float) -> int:
        """The most tokens that a rank can hold at an offload ratio."""
        if ratio <= 0:
            return self.capacity
        limit = min(self.capacity / (1 - ratio * self.offloadable), self.capacity + self.host_tokens)
        return int(limit + 1e-6)


def _state_bytes(model: ModelSpec, cluster: ClusterSpec) -> float:
    """Bytes of bf16 weights and fp32 gradients, and of a shard of fp32 master weights and two moments (ZeRO-1)."""
    elsewhere = model.expert_params * (1 - 1 / cluster.expert)  # of a rank's weights and gradients, not of the shards
    here = (model.params - elsewhere) * (2 + 4) + model.params * 12 / cluster.ranks
    return here / (cluster.tensor * cluster.pipeline) * cluster.largest_share


def _sets_held(cluster: ClusterSpec) -> float:
    """Micro-batches whose activations the first device of a pipeline holds: under 1F1B as many as there are devices."""
    return cluster.pipeline if cluster.chunks == 1 else cluster.pipeline + (cluster.pipeline - 1) / cluster.chunks


def _derived_capacity(model: ModelSpec, cluster: ClusterSpec, token_bytes: float, states: float) -> int:
    device = cluster.hardware
    room = 0.9 * device.memory_bytes - states  # a tenth for buffers and fragmentation
    capacity = int(room / (token_bytes * _sets_held(cluster)))
    if capacity < 1:
        raise InvalidUsage(
            f"{model.name} takes {states / 1e9:.1f} GB for weights, gradients and optimizer on a rank of "
            f"{cluster.tensor} x {cluster.pipeline} {device.name} with {device.memory_bytes / 1e9:.0f} GB each, which "
            f"leaves no room for a token: raise tensor or pipeline"
        )
    return capacity
