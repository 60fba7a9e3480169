"""The model, the device and the ranks that train, :class:`ModelSpec`, :class:`DeviceSpec` and :class:`ClusterSpec`,
with presets by name: the models of the paper's Table 1, and devices.

Model shapes: ByteScale (arXiv 2502.21231) Table 1 gives layers, heads, KV groups and hidden size; the FFN widths and
vocabularies are those of the published LLaMA-2/-1 and Mixtral configurations. Device rates: matrix products at 65% of
the data sheet's dense bf16 peak and attention at 50% (FlashAttention-2 on A100) or 55% (FlashAttention-3 on H100/H200),
which are usual sustained rates; links one way: NVLink 4 at 370 of 450 GB/s, NVLink 3 at 240 of 300 GB/s, one 400 Gb/s
(A100: 200 Gb/s) NIC per device at 92%; PCIe Gen5 (Gen4) x16 under two-way load at 40 (18) GB/s. Latencies are NCCL's: a
single message (a step of a schedule is one group, and so one kernel) costs the latency with which NCCL's own model
starts a ring, plus one hop over its kind of link, both for the protocol of large messages (Simple). Source: NCCL,
src/graph/tuning.cc, defaults: base 8.4 us; hops of a ring: NVLink 3.4, PCI 5.7, network 14 us. Adding the two is our
derivation: within one kernel NCCL pays the base once, and then only hops.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any

from hdpcomm.arguments import MOST_TOKENS, check_number, check_type, check_whole
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.token_mixing import TokenMixing, softmax_mixing

__all__ = [
    "ClusterSpec",
    "DEVICES",
    "DeviceSpec",
    "MODELS",
    "ModelSpec",
    "NODE_DEVICES",
    "cluster_from_dict",
    "cluster_to_dict",
    "device_in",
    "link_costs",
]


def check_positive(owner: str, *, most: int = MOST_TOKENS, **values: int) -> None:
    """Raises InvalidUsage for a value, named as a field of ``owner``, that is no whole number of at least 1."""
    for name, value in values.items():
        check_whole(owner, name, value, least=1, most=most)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape of a decoder-only transformer with SwiGLU (and, with ``experts`` > 1, top-k routed experts).

    Attributes:
        layers, hidden, heads, kv_heads, ffn, vocab: the usual sizes.
        head_dim: width of an attention head; default ``hidden / heads``.
        experts, top_k: experts per layer, and how many of them process a token.
        dtype_bytes: bytes of an element of activations and KV.
        shared_ffn: width of what processes every token beside the experts.
        dense_layers, dense_ffn: layers without experts, and their width.
        mixing: how the layers mix tokens, together ``layers`` of them; default full softmax attention in all.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int | None = None
    experts: int = 1
    top_k: int = 1
    dtype_bytes: int = 2
    name: str = "custom"
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    mixing: tuple[TokenMixing, ...] = ()

    def __post_init__(self) -> None:
        check_positive(
            "ModelSpec",
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn or (1 if self.mixing else 0),  # Mamba-2 has no MLP
            vocab=self.vocab,
            head_dim=1 if self.head_dim is None else self.head_dim,
            experts=self.experts,
            top_k=self.top_k,
        )
        check_number("ModelSpec", "dtype_bytes", self.dtype_bytes, above=0)
        if self.heads % self.kv_heads:
            raise InvalidUsage(
                f"ModelSpec: heads is {self.heads} and kv_heads {self.kv_heads}, expected kv_heads to divide heads"
            )
        if self.top_k > self.experts:
            raise InvalidUsage(f"ModelSpec: top_k is {self.top_k}, expected at most the {self.experts} experts")

        if self.mixing and sum(each.layers for each in self.mixing) != self.layers:
            raise InvalidUsage(
                f"ModelSpec: mixing is of {sum(each.layers for each in self.mixing)} layers, expected the "
                f"{self.layers} layers of the model"
            )
        if not 0 <= self.dense_layers <= self.layers or min(self.shared_ffn, self.dense_ffn) < 0:
            raise InvalidUsage(
                f"ModelSpec: {self.dense_layers} dense layers of width {self.dense_ffn} and shared experts of width "
                f"{self.shared_ffn} were given; expected at most the {self.layers} layers, and no negative width"
            )

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Width of K, and of V."""
        return self.attention_width // self.heads * self.kv_heads

    @property
    def token_mixing(self) -> tuple[TokenMixing, ...]:
        """``mixing``, or full softmax attention in all layers."""
        if self.mixing:
            return self.mixing
        return (
            softmax_mixing(self.hidden, self.heads, self.kv_heads, self.attention_width // self.heads).over(
                self.layers
            ),
        )

    def _mixed(self, name: str) -> float:
        """The sum over all layers of an attribute of their mixing."""
        return float(sum(each.layers * getattr(each, name) for each in self.token_mixing))

    def _ffn_weights(self, experts: int) -> int:
        """Parameters of the MLPs of all layers, with so many experts in each."""
        sparse = (self.layers - self.dense_layers) * (self.ffn * experts + self.shared_ffn)
        return 3 * self.hidden * (sparse + self.dense_layers * self.dense_ffn)

    @property
    def params(self) -> int:
        """Number of parameters, with both embedding and output projection, without norms."""
        return int(self._mixed("weights")) + self._ffn_weights(self.experts) + 2 * self.hidden * self.vocab

    @property
    def expert_params(self) -> int:
        """Parameters of routed experts, a part of all."""
        return 3 * self.hidden * (self.layers - self.dense_layers) * self.ffn * self.experts if self.experts > 1 else 0

    @property
    def expert_flops_per_token(self) -> float:
        """The part of :attr:`linear_flops_per_token` in routed experts."""
        return 2.0 * self.expert_params / self.experts * self.top_k

    def dispatch_bytes_per_token(self, ranks: int) -> float:
        """Bytes that a rank sends for each of its tokens where ``ranks`` ranks share the experts and routers choose all
        alike: rows to their experts and results back, and the gradients of both.
        """
        layers = self.layers - self.dense_layers if self.experts > 1 else 0
        return 4.0 * layers * self.top_k * self.hidden * self.dtype_bytes * (ranks - 1) / ranks

    @property
    def linear_flops_per_token(self) -> float:
        """FLOPs of one forward pass per token, without those that grow with the square of the length."""
        products = self._mixed("weights") + self._ffn_weights(self.top_k) + self.hidden * self.vocab
        return 2.0 * products + self.mixing_flops_per_token

    @property
    def mixing_flops_per_token(self) -> float:
        """The part of them in scores of windowed attention and recurrences of linear layers."""
        return self._mixed("linear_flops")

    @property
    def attention_flops_per_token_squared(self) -> float:
        """FLOPs of the attention scores (QK^T and PV) of one causal forward pass, per token squared."""
        return self._mixed("squares_flops")

    @property
    def chosen_flops(self) -> tuple[float, float]:
        """The most keys that a query sees in layers that choose them, and the FLOPs of their attention in one causal
        forward pass per token squared, in sequences of no more tokens; of several limits, the one with the most work.
        """
        found: dict[int, float] = {}
        for each in self.token_mixing:
            if each.top_k is not None:
                found[each.top_k] = found.get(each.top_k, 0.0) + each.layers * each.pair_flops / 2
        return max(found.items(), key=lambda one: one[1] * one[0], default=(0, 0.0))

    @property
    def index_flops_per_token_squared(self) -> float:
        """FLOPs of indexers, which have a forward pass only, per token squared."""
        return self._mixed("index_squares_flops")

    def training_flops(self, tokens: float, squares: float) -> float:
        """FLOPs of forward and backward pass over causal sequences, without those of recomputation.

        Args:
            tokens: of all sequences. squares: the sum of the squares of their lengths.
        """
        both = self.linear_flops_per_token * tokens + self.attention_flops_per_token_squared * squares
        return 3 * both + self.index_flops_per_token_squared * squares

    @property
    def expansion_flops_per_token(self) -> float:
        """FLOPs of making K and V of a token's latent, on each rank that needs them, in all layers."""
        return 2.0 * self._mixed("expansion")

    @property
    def activation_bytes(self) -> float:
        """Bytes that one token keeps per layer until the backward pass, with flash attention and no recomputation; of
        layers of several kinds their mean.

        Inputs of the two norms, of QKV and of the MLP (4 hidden), Q, KV, the attention output, and gate, up and their
        product for each expert that processes the token; in fp32 (fp64 for 8 bytes) the LSE of each head, and a factor
        of each norm.
        """
        ffn = self._ffn_weights(self.top_k) / (self.hidden * self.layers)
        width = 4 * self.hidden + self._mixed("kept") / self.layers + ffn
        wide = max(4, self.dtype_bytes) * (self._mixed("kept_wide") / self.layers + 2)
        return float(self.dtype_bytes * width + wide)

    @property
    def moved_bytes(self) -> float:
        """:attr:`activation_bytes`, and what is summed in fp32 (fp64 for 8 bytes) on the way to them."""
        return self.activation_bytes + max(4, self.dtype_bytes) * self._mixed("summed") / self.layers

    def kept_values(self, tensor: int = 1) -> float:
        """Numbers a token that slices keep for later ones, in all layers, on each of ``tensor`` ranks: keys and values,
        or the latent, which serves all heads. Their gradients are summed in fp32 (fp64 for 8 bytes)."""
        return float(sum(each.layers * each.sent / (1 if each.expansion else tensor) for each in self.token_mixing))


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator and its links. Rates are those that kernels and copies reach, not the data sheet's peaks.

    Attributes:
        linear_flops, attention_flops: FLOP/s of matrix products, and of the attention kernel on long sequences.
        peak_flops: FLOP/s of the data sheet, for MFU.
        short_piece: tokens of a piece on which the attention kernel reaches half of its rate.
        memory_bytes, hbm_bandwidth: device memory and its bandwidth (bytes, bytes/s).
        intra_bandwidth, inter_bandwidth: bytes/s one way to a rank of the same node, and of another node.
        intra_latency_s, inter_latency_s: seconds until a message's first byte arrives.
        domain_bandwidth, domain_latency_s: to another node of the same domain (``ClusterSpec.ranks_per_domain``), where
            ``inter_*`` are to those of others; ``None``: as ``inter_*``.
        d2h_bandwidth, h2d_bandwidth: bytes/s to and from host memory while both directions run.
        host_bytes: pinned host memory for offload, per device.
        step_overhead_s: seconds of launches and synchronisation per layer and micro-batch, and per layer and ring step.
    """

    name: str
    linear_flops: float
    attention_flops: float
    peak_flops: float
    short_piece: float
    memory_bytes: float
    hbm_bandwidth: float
    intra_bandwidth: float
    inter_bandwidth: float
    intra_latency_s: float
    inter_latency_s: float
    d2h_bandwidth: float
    h2d_bandwidth: float
    host_bytes: float
    step_overhead_s: float
    domain_bandwidth: float | None = None
    domain_latency_s: float | None = None

    @property
    def inter_link(self) -> tuple[float, float]:
        """Bytes/s and latency to another node, or to one of another domain."""
        return self.inter_bandwidth, self.inter_latency_s

    @property
    def domain_link(self) -> tuple[float, float]:
        """Bytes/s and latency to another node of the same domain; never worse than to other nodes."""
        bandwidth, latency = self.inter_link
        near = self.domain_bandwidth or bandwidth, latency if self.domain_latency_s is None else self.domain_latency_s
        return max(near[0], bandwidth), min(near[1], latency)

    def __post_init__(self) -> None:
        for name in self.__slots__[1:]:
            if getattr(self, name) is None and name.startswith("domain_"):
                continue
            positive = name.endswith(("flops", "bandwidth", "memory_bytes"))
            check_number(f"DeviceSpec {self.name}", name, getattr(self, name), least=0, above=0 if positive else -1)


#: Seconds from the launch of a group's kernel until its first message is sent.
LAUNCH_S = 8.4e-6
#: Seconds of a hop, by kind of link.
HOP_S = {"nvlink": 3.4e-6, "pci": 5.7e-6, "network": 14e-6}
# Each further message of a group takes another channel of the same kernel, and a part of its launch: derived, not
# measured.
_FURTHER_MESSAGE_S = 0.5e-6
# Three memory accesses per byte, at 85% of the data sheet's rate.
_REDUCTION_ACCESSES = 3 / 0.85


def message_latency_s(link: str) -> float:
    """Seconds until the first byte of a single message arrives over a link of this kind."""
    return LAUNCH_S + HOP_S[link]


def link_costs(device: DeviceSpec) -> tuple[dict[str, float], dict[str, float]]:
    """NCCL's costs inside a node and between nodes, by the names of :mod:`hdpcomm.comm.costs`, from the same figures
    that planner and simulator use."""
    shared = {"message_s": _FURTHER_MESSAGE_S, "gamma_s_per_byte": _REDUCTION_ACCESSES / device.hbm_bandwidth}
    inside = {"alpha_s": device.intra_latency_s, "beta_s_per_byte": 1 / device.intra_bandwidth}
    between = {"alpha_s": device.inter_latency_s, "beta_s_per_byte": 1 / device.inter_bandwidth}
    return inside | shared, between | shared


NODE_DEVICES = 8
"""Devices of a host."""

MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(32, 4096, 32, 8, 11008, 32000, name="llama-7b"),
        ModelSpec(40, 5120, 40, 8, 13824, 32000, name="llama-13b"),
        ModelSpec(60, 6656, 56, 8, 17920, 32000, head_dim=128, name="llama-30b"),
        ModelSpec(80, 8192, 64, 8, 28672, 32000, name="llama-70b"),
        ModelSpec(32, 4096, 32, 8, 14336, 32000, experts=8, top_k=2, name="mistral-8x7b"),
        ModelSpec(56, 6144, 48, 8, 16384, 32768, experts=8, top_k=2, name="mistral-8x22b"),
    )
}

_H100 = DeviceSpec(
    name="h100",
    linear_flops=0.65 * 989e12,
    attention_flops=0.55 * 989e12,
    peak_flops=989e12,
    short_piece=768,
    memory_bytes=80e9,
    hbm_bandwidth=3.35e12,
    intra_bandwidth=370e9,
    inter_bandwidth=46e9,
    intra_latency_s=message_latency_s("nvlink"),
    inter_latency_s=message_latency_s("network"),
    d2h_bandwidth=40e9,
    h2d_bandwidth=40e9,
    host_bytes=200e9,
    step_overhead_s=15e-6,
)
_A100 = replace(
    _H100,
    name="a100",
    linear_flops=0.65 * 312e12,
    attention_flops=0.50 * 312e12,
    peak_flops=312e12,
    short_piece=512,
    hbm_bandwidth=2.0e12,
    intra_bandwidth=240e9,
    inter_bandwidth=23e9,
    d2h_bandwidth=18e9,
    h2d_bandwidth=18e9,
    step_overhead_s=20e-6,
)
_H200 = replace(_H100, name="h200", memory_bytes=141e9, hbm_bandwidth=4.8e12)

DEVICES: dict[str, DeviceSpec] = {spec.name: spec for spec in (_A100, _H100, _H200)}

_FLOAT32 = {"a100": 19.5e12, "h100": 66.9e12, "h200": 66.9e12}
"""Peaks of the data sheet without tensor cores, which torch leaves alone in float32 unless it is told otherwise."""


def device_in(name: str, dtype_bytes: float) -> DeviceSpec | str:
    """The preset with the rates of matrix products in elements of so many bytes; of an unknown device its name."""
    if dtype_bytes < 4 or name not in _FLOAT32:
        return DEVICES.get(name, name)
    device = DEVICES[name]
    slower = _FLOAT32[name] / device.peak_flops
    rates = {rate: getattr(device, rate) * slower for rate in ("linear_flops", "attention_flops")}
    return replace(device, peak_flops=_FLOAT32[name], **rates)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The ranks of hybrid data parallelism, and what each of them can hold.

    A rank is one device, or ``tensor * pipeline`` devices that work as one: ranks share the sequence dimension, while
    tensor and pipeline parallelism stay fixed.

    Attributes:
        ranks: number of HDP ranks.
        capacity: tokens that a rank holds without offload; ``None``: derived from its memory (needs a model).
        ranks_per_node: ranks that share the fast link; ``None``: all.
        ranks_per_domain: ranks of a domain: neighbouring nodes with faster links between them
            (``device.domain_bandwidth``) than to others, as those of a rack, or of an NVLink domain such as an NVL72. A
            multiple of ``ranks_per_node``; ``None``: links between nodes are all alike.
        tensor, pipeline: sizes of tensor and pipeline parallelism inside a rank.
        chunks: stages of the model on each device of a pipeline; more than 1 is interleaved 1F1B, which fills and
            drains the pipelines faster and keeps more activations.
        split_backward: backward passes of pipelines are split: the gradients of weights are computed where a device
            would wait for other stages (zero-bubble pipelines, arXiv 2401.10241). It needs a pipeline.
        offload: whether activations may go to host memory.
        expert: neighbouring ranks that share the experts of each layer; they run their micro-batches in waves
            (:mod:`hdpcomm.plan.waves`). It divides ``ranks``.
        expert_imbalance: rows that the busiest of these ranks gets from the routers, over the mean.
        cores: processors that the devices of all ranks share, if there are fewer of them than devices: a device that
            waits leaves its time to another. ``None``: each has its own.
        speeds: of each rank, relative to the fastest one, 0.001 to 1: a micro-batch takes 1 / speed times as long on a
            group whose slowest rank has it, whatever it waits for included. ``None``: all are alike.
            :class:`hdpcomm.plan.CostLearner` finds them in steps that were measured.
        nics: network interfaces of a node, each of ``device.inter_bandwidth``, that its ranks share in equal parts of
            neighbours. Where two messages of a ring would share one, the ring goes node after node and leaves each
            once, and ranks have more peers. ``None``: each rank has its own.
        stage_work: of each stage of the model, in that of the mean stage: its linear work, its attention work with
            messages, and what is paid once a layer (:func:`hdpcomm.plan.stage_work`). ``None``: all are alike.
        device: the name of a preset (``hdpcomm.plan.DEVICES``) or a :class:`DeviceSpec`.
    """

    ranks: int
    capacity: int | None = None
    ranks_per_node: int | None = None
    tensor: int = 1
    pipeline: int = 1
    offload: bool = False
    device: str | DeviceSpec = "h100"
    cores: int | None = None
    chunks: int = 1
    speeds: tuple[float, ...] | None = None
    expert: int = 1
    expert_imbalance: float = 1.0
    nics: int | None = None
    split_backward: bool = False
    ranks_per_domain: int | None = None
    stage_work: tuple[tuple[float, float, float], ...] | None = None

    def __post_init__(self) -> None:
        given = {
            name: getattr(self, name)
            for name in ("ranks_per_node", "ranks_per_domain", "cores", "nics")
            if getattr(self, name) is not None
        }
        counts = {"ranks": self.ranks, "tensor": self.tensor, "pipeline": self.pipeline, "chunks": self.chunks}
        counts["expert"] = self.expert
        check_positive("ClusterSpec", most=(1 << 31) - 1, **counts, **given)
        if self.ranks_per_domain is not None and self.ranks_per_domain % (self.ranks_per_node or self.ranks):
            raise InvalidUsage(
                f"ranks_per_domain is {self.ranks_per_domain} and nodes have {self.ranks_per_node or self.ranks} "
                "ranks: give a number of ranks that is a multiple of ranks_per_node"
            )
        if self.capacity is not None:
            check_positive("ClusterSpec", capacity=self.capacity)
        if self.chunks > 1 and self.pipeline == 1:
            raise InvalidUsage(
                f"chunks is {self.chunks} and pipeline 1: give a pipeline of 2 devices or more, or 1 chunk"
            )
        check_type("ClusterSpec", "split_backward", self.split_backward, bool)
        if self.split_backward and self.pipeline == 1:
            raise InvalidUsage(
                "split_backward was given and pipeline is 1, where no stage waits for another: give a pipeline of 2 "
                "devices or more, or whole backward passes"
            )
        if self.ranks % self.expert:
            raise InvalidUsage(
                f"expert is {self.expert} and ranks {self.ranks}: give a number of expert ranks that divides the ranks"
            )
        check_number("ClusterSpec", "expert_imbalance", self.expert_imbalance, least=1, most=self.expert)
        if self.speeds is not None:
            self._check_speeds(self.speeds)
        if self.stage_work is not None:
            self._check_stage_work(self.stage_work)

    def _check_speeds(self, speeds: tuple[float, ...]) -> None:
        check_type("ClusterSpec", "speeds", speeds, (tuple, list))
        if len(speeds) != self.ranks:
            raise InvalidUsage(f"ClusterSpec: {len(speeds)} speeds for {self.ranks} ranks, expected one for each")
        for rank, speed in enumerate(speeds):
            check_number("ClusterSpec", f"the speed of rank {rank}, 1 for the fastest,", speed, least=1e-3, most=1)
        if self.cores is not None and min(speeds) < 1:
            raise InvalidUsage(
                "ClusterSpec: ranks that share processors (cores) take time from each other and have no speeds of "
                "their own: give cores or speeds"
            )

    def _check_stage_work(self, works: tuple[tuple[float, float, float], ...]) -> None:
        check_type("ClusterSpec", "stage_work", works, (tuple, list))
        stages = self.pipeline * self.chunks
        if len(works) != stages or any(len(each) != 3 for each in works):
            raise InvalidUsage(
                f"ClusterSpec: stage_work is {works} for {stages} stages, expected (linear, attention, fixed) of each"
            )
        for shares in zip(*works, strict=True):
            for share in shares:
                check_number("ClusterSpec", "a share of a stage's work", share, least=0, most=stages)
            if abs(sum(shares) / stages - 1) > 1e-6:
                raise InvalidUsage(
                    f"ClusterSpec: stage_work has {shares} of one kind of work, expected shares of the mean stage's, "
                    "whose mean is 1"
                )

    @property
    def largest_share(self) -> float:
        """Layers of the device of a pipeline that has most, over the mean."""
        if self.stage_work is None:
            return 1.0
        shares = (self.stage_work[device :: self.pipeline] for device in range(self.pipeline))
        return max(sum(fixed for *_, fixed in each) for each in shares) / self.chunks

    def most_layers(self, layers: int) -> int:
        """Layers on the device of a pipeline that has most, where the model has so many."""
        return math.ceil(layers / self.pipeline * self.largest_share - 1e-6)

    def with_speeds(self, speeds: tuple[float, ...] | None) -> ClusterSpec:
        """This cluster with these speeds of its ranks."""
        return replace(self, speeds=speeds)

    @property
    def node_ranks(self) -> int:
        """Ranks that share a node."""
        return self.ranks if self.ranks_per_node is None else min(self.ranks, self.ranks_per_node)

    @property
    def domain_ranks(self) -> int:
        """Ranks that share a domain, or a node where there are no domains."""
        return max(self.node_ranks, min(self.ranks, self.ranks_per_domain or 0))

    @property
    def hardware(self) -> DeviceSpec:
        """The device; a name is looked up in the presets."""
        if isinstance(self.device, DeviceSpec):
            return self.device
        if not isinstance(self.device, str) or self.device not in DEVICES:
            raise InvalidUsage(f"unknown device {self.device!r}, expected one of {', '.join(DEVICES)} or a DeviceSpec")
        return DEVICES[self.device]


def cluster_to_dict(cluster: ClusterSpec) -> dict[str, Any]:
    """A cluster and the figures of its device, as plain Python objects."""
    return dataclasses.asdict(cluster) | {"device": dataclasses.asdict(cluster.hardware)}


def cluster_from_dict(content: dict[str, Any]) -> ClusterSpec:
    """Reads :func:`cluster_to_dict` back. Raises: TypeError, KeyError, ValueError, InvalidUsage for anything else."""
    values = dict(content)
    device = DeviceSpec(**values.pop("device"))
    speeds, work = values.pop("speeds", None), values.pop("stage_work", None)
    return ClusterSpec(
        **values,
        device=device,
        speeds=None if speeds is None else tuple(map(float, speeds)),
        stage_work=None if work is None else tuple((float(a), float(b), float(c)) for a, b, c in work),
    )
