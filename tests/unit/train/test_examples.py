"""The examples in the docstrings run as they are printed."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = {
    "hdpcomm.attention.packs": 1,
    "hdpcomm.data.fold": 1,
    "hdpcomm.data.opening": 1,
    "hdpcomm.data.sampler": 1,
    "hdpcomm.data.records": 1,
    "hdpcomm.plan.tree": 2,
    "hdpcomm.models.adapt": 1,
    "hdpcomm.comm.mesh": 1,
    "hdpcomm.train.losses.functions": 1,
    "hdpcomm.train.step.trainer": 1,
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    module = importlib.import_module(name)
    examples = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]
    assert len(examples) == MODULES[name]
    assert doctest.testmod(module).failed == 0
