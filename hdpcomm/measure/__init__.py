"""Measurements on the ranks at hand: costs of steps, memory and copies of a model, costs of links."""

from hdpcomm.measure.activations import ActivationProfile, profile_activations
from hdpcomm.measure.costs import forward_backward, profile_cost_model, profile_samples
from hdpcomm.measure.memory import profile_memory

__all__ = [
    "ActivationProfile",
    "forward_backward",
    "profile_activations",
    "profile_cost_model",
    "profile_memory",
    "profile_samples",
]
