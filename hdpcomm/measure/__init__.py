"""Measurements on the ranks at hand: costs of steps, memory and copies of a model, costs of links."""

from hdpcomm.measure.costs import forward_backward, profile_cost_model, profile_samples
from hdpcomm.measure.memory import measured_planner, profile_activations, profile_memory

__all__ = [
    "forward_backward",
    "measured_planner",
    "profile_activations",
    "profile_cost_model",
    "profile_memory",
    "profile_samples",
]
