"""Simulation of planned steps on a cluster. Imports no torch."""

from hdpcomm.sim.step import StepReport, simulate_step
from hdpcomm.sim.stream import StreamReport, simulate_stream
from hdpcomm.sim.sync import optimizer_seconds, processor_seconds, reduction_seconds

__all__ = [
    "StepReport",
    "StreamReport",
    "optimizer_seconds",
    "processor_seconds",
    "reduction_seconds",
    "simulate_step",
    "simulate_stream",
]
