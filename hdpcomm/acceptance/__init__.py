"""Tells whether a machine, its links and this library do together what they should: ``hdpcomm acceptance``."""

from hdpcomm.acceptance.report import JUDGEMENTS, Report, Row, Rule, rated
from hdpcomm.acceptance.run import SECTIONS, Settings, accept

__all__ = ["JUDGEMENTS", "SECTIONS", "Report", "Row", "Rule", "Settings", "accept", "rated"]
