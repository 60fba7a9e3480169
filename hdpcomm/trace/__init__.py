"""Plots and Perfetto traces of plans and simulated steps."""

from hdpcomm.trace.chrome import TraceFile, write_plan_trace, write_stream_trace
from hdpcomm.trace.gantt import plot_plans

__all__ = [
    "TraceFile",
    "plot_plans",
    "write_plan_trace",
    "write_stream_trace",
]
