"""Facts of a host: its name and links."""

from __future__ import annotations

from hdpcomm.measure.topology import host_facts


def test_facts_of_this_host() -> None:
    facts = host_facts()
    assert isinstance(facts["name"], str)
    assert isinstance(facts["links"], list)
