"""Plots and Perfetto traces of plans and simulated steps."""

from hdpcomm.trace.chrome import plan_events, step_events, write_plan_trace, write_stream_trace
from hdpcomm.trace.gantt import plot_plans
from hdpcomm.trace.run_trace import TraceFile, timeline_events

__all__ = [
    "TraceFile",
    "plan_events",
    "plot_plans",
    "step_events",
    "timeline_events",
    "write_plan_trace",
    "write_stream_trace",
]
