"""Performance measurements: the engine of ``hdpcomm perf``, with the conventions of nccl-tests."""

from hdpcomm.perf.config import PerfConfig, parse_size
from hdpcomm.perf.results import Report, Row, Side

__all__ = ["PerfConfig", "Report", "Row", "Side", "parse_size"]
