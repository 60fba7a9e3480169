"""Graphs of simulated devices: what captures record and refuse, as in CUDA, and replays in stream order."""

from __future__ import annotations

import pytest
import torch

import hdpcomm as hdp
from tests.harness.native import _testing


@pytest.fixture
def device() -> _testing.TestDevice:
    return _testing.TestDevice(0)


def copy(device: _testing.TestDevice, to: torch.Tensor, source: torch.Tensor, stream: int) -> None:
    device.copy(to.data_ptr(), source.data_ptr(), bytes=to.numel() * to.element_size(), stream=stream)


def test_work_runs_at_launches_only_and_in_order(device: _testing.TestDevice) -> None:
    """A graph of two streams, forked and joined; each launch reads the memory's content at that time."""
    first, second = device.create_stream(), device.create_stream()
    forked, joined = device.create_event(), device.create_event()
    x, middle, y = (torch.zeros(50_000) for _ in range(3))
    device.begin_capture(first)
    assert device.is_capturing(first)
    assert not device.is_capturing(second)
    copy(device, middle, x, first)
    device.record(forked, first)
    device.wait(second, forked)
    assert device.is_capturing(second)
    copy(device, y, middle, second)
    device.record(joined, second)
    device.wait(first, joined)
    graph = device.end_capture(first)
    assert not device.is_capturing(first)
    assert not device.is_capturing(second)
    x.fill_(1)
    device.synchronize_stream(first)
    assert (y == 0).all()
    for turn in range(1, 20):
        x.fill_(turn)
        graph.launch(first)
        device.synchronize_stream(first)
        assert (y == turn).all()


def test_launches_follow_each_other_and_the_work_around_them(device: _testing.TestDevice) -> None:
    """Copies x -> y, then y -> x by the graph: the same memory on two streams, without the host in between."""
    stream = device.create_stream()
    x, y = torch.zeros(30_000), torch.zeros(30_000)
    device.begin_capture(stream)
    copy(device, y, x, stream)
    graph = device.end_capture(stream)
    ones, seen = torch.ones(30_000), [torch.zeros(30_000) for _ in range(6)]
    for turn, each in enumerate(seen):
        device.fill(x.data_ptr(), turn, bytes=4 * 30_000, stream=stream)
        graph.launch(stream)
        copy(device, each, y, stream)
    copy(device, x, ones, stream)
    device.synchronize_stream(stream)
    for turn, each in enumerate(seen):
        assert (each.view(torch.uint8) == turn).all()


def test_flags_of_a_graph_are_waited_for_at_each_launch(device: _testing.TestDevice) -> None:
    stream, other = device.create_stream(), device.create_stream()
    memory = device.allocate(512)
    device.fill(memory, 0, bytes=512, stream=stream)
    device.synchronize_stream(stream)
    device.begin_capture(stream)
    device.wait_value(stream, memory, 1)
    device.write_value(stream, memory, 0)
    graph = device.end_capture(stream)
    for _ in range(3):
        graph.launch(stream)
        with pytest.raises(hdp.CommTimeout):
            device.synchronize_stream(stream, 0.02)
        device.write_value(other, memory, 1)
        device.synchronize_stream(stream, 5.0)
    device.free(memory)


def test_a_capture_that_is_not_joined_is_refused(device: _testing.TestDevice) -> None:
    first, second = device.create_stream(), device.create_stream()
    event = device.create_event()
    x, y = torch.zeros(10), torch.zeros(10)
    device.begin_capture(first)
    device.record(event, first)
    device.wait(second, event)
    copy(device, y, x, second)
    with pytest.raises(hdp.InvalidUsage, match="a stream had work that the first stream does not wait for"):
        device.end_capture(first)
    copy(device, y, x, second)  # both are as before
    device.synchronize_stream(second)
    device.synchronize_stream(first)


def test_what_a_capture_refuses(device: _testing.TestDevice) -> None:
    first, second = device.create_stream(), device.create_stream()
    inside, outside = device.create_event(), device.create_event()
    device.record(outside, second)
    with pytest.raises(hdp.InvalidUsage, match="begins on a stream that is not the default one"):
        device.begin_capture(0)
    with pytest.raises(hdp.InvalidUsage, match="on the stream on which it began"):
        device.end_capture(first)
    device.begin_capture(first)
    with pytest.raises(hdp.InvalidUsage, match="nor captured"):
        device.begin_capture(first)
    with pytest.raises(hdp.InvalidUsage, match="an event that was recorded outside of it"):
        device.wait(first, outside)
    device.record(inside, first)
    with pytest.raises(hdp.InvalidUsage, match=r"query\(\) got an event that was recorded in a capture"):
        device.query(inside)
    with pytest.raises(hdp.InvalidUsage, match=r"synchronize\(\) got an event"):
        device.synchronize_event(inside, 1.0)
    with pytest.raises(hdp.InvalidUsage, match="a stream that is being captured"):
        device.synchronize_stream(first, 1.0)
    device.wait(second, inside)
    with pytest.raises(hdp.InvalidUsage, match="on the stream on which it began"):
        device.end_capture(second)
    device.end_capture(first)
    with pytest.raises(hdp.InvalidUsage, match="a capture that has ended"):
        device.wait(second, inside)
    device.record(inside, first)  # a new record is an ordinary one
    device.wait(second, inside)
    device.synchronize_event(inside, 1.0)
