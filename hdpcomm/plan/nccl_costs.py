"""What NCCL's messages cost: one place for the device presets, and so for planner, simulator and collectives.

A message of its own (a step of a schedule is one group, and so one kernel) costs the latency with which NCCL's own
model starts a ring, and one hop of the kind of link, both by the protocol that large messages take (Simple). Source:
NCCL, src/graph/tuning.cc, defaults: base 8.4 us; hops of a ring: NVLink 3.4, PCI 5.7, network 14 us. The sum of both is
derived: within one kernel NCCL pays the base once, and then hops only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hdpcomm.plan.specs import DeviceSpec

__all__ = ["HOP_S", "LAUNCH_S", "LinkCosts", "link_costs", "message_latency_s"]

#: A group's kernel: from its launch until its first message is under way.
LAUNCH_S = 8.4e-6
#: A hop, by the kind of link.
HOP_S = {"nvlink": 3.4e-6, "pci": 5.7e-6, "network": 14e-6}
# A further message of a group takes a channel of the same kernel, and its part of the launch: derived, not measured.
_FURTHER_MESSAGE_S = 0.5e-6
# Three accesses to memory a byte, at 85% of the data sheet's rate.
_REDUCTION_ACCESSES = 3 / 0.85


def message_latency_s(link: str) -> float:
    """Seconds before the first byte of a message of its own arrives over a link of this kind."""
    return LAUNCH_S + HOP_S[link]


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What a collective's algorithm is chosen by, of one kind of link.

    Attributes:
        alpha_s: of a step; message_s: of each message of a step; beta_s_per_byte: of a byte moved;
        gamma_s_per_byte: of a byte reduced.
    """

    alpha_s: float
    message_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float


def link_costs(device: DeviceSpec) -> tuple[LinkCosts, LinkCosts]:
    """Of NCCL inside a node and between nodes, by the figures of the device that planner and simulator go by."""
    gamma = _REDUCTION_ACCESSES / device.hbm_bandwidth

    def costs(latency_s: float, bandwidth: float) -> LinkCosts:
        return LinkCosts(latency_s, _FURTHER_MESSAGE_S, 1 / bandwidth, gamma)

    return costs(device.intra_latency_s, device.intra_bandwidth), costs(device.inter_latency_s, device.inter_bandwidth)
