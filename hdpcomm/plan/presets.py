"""Presets by name: the models of the paper's Table 1, and devices.

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

from dataclasses import replace

from hdpcomm.plan.specs import DeviceSpec, ModelSpec

__all__ = ["DEVICES", "HOP_S", "LAUNCH_S", "MODELS", "NODE_DEVICES", "device_in", "link_costs", "message_latency_s"]

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
