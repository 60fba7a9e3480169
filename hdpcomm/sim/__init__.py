"""Simulation of planned steps on a cluster. Imports no torch."""

from hdpcomm.sim.step import (
    StepReport,
    StreamReport,
    optimizer_seconds,
    processor_seconds,
    reduction_seconds,
    simulate_step,
    simulate_stream,
)

__all__ = [
    "StepReport",
    "StreamReport",
    "optimizer_seconds",
    "processor_seconds",
    "reduction_seconds",
    "simulate_step",
    "simulate_stream",
]
