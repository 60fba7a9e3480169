"""Costs of NCCL's messages, for the device presets and the collectives.

A single message (a step of a schedule is one group, and so one kernel) costs the latency with which NCCL's own model
starts a ring, plus one hop over its kind of link, both for the protocol of large messages (Simple). Source: NCCL,
src/graph/tuning.cc, defaults: base 8.4 us; hops of a ring: NVLink 3.4, PCI 5.7, network 14 us. Adding the two is our
derivation: within one kernel NCCL pays the base once, and then only hops.
"""

from __future__ import annotations

from hdpcomm.plan.specs import DeviceSpec

__all__ = ["HOP_S", "LAUNCH_S", "link_costs", "message_latency_s"]

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
