"""Ranks of this process on a machine that is not there: several hosts, simulated GPUs, a fake NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hdpcomm import _core, testing
from hdpcomm.comm.machine import Machine
from hdpcomm.testing import device_check
from tests.harness.machines import joining_on
from tests.harness.native import _testing
from tests.harness.patience import PATIENCE

__all__ = ["FakeMachine", "check", "planted_sites", "run_threads"]

Reaches = Callable[[int, int], bool]


class FakeMachine(Machine):
    """For one run of ranks that are threads.

    hosts: the host of each rank; none: all are on one. nccl: the fake that the ranks join, or a new one. reaches:
    whether a rank's device reads the memory of another's. opens: makes a device,
    from its number and those whose memory it does not read.
    """

    def __init__(
        self,
        world_size: int,
        hosts: Sequence[int] = (),
        *,
        nccl: _testing.FakeNccl | None = None,
        reaches: Reaches = lambda own, other: True,  # noqa: ARG005
        opens: Callable[[int, list[int]], _core.device.Device] = _testing.open_sim,
    ) -> None:
        self.hosts = tuple(hosts) or (0,) * world_size
        self.fake = nccl or _testing.FakeNccl(world_size)
        self.reaches = reaches
        self.opens = opens

    def host(self, rank: int) -> str:
        return f"host {self.hosts[rank]}"

    def device(self, transport: str, rank: int, size: int) -> _core.device.Device:
        del transport
        return self.opens(rank, [other for other in range(size) if not self.reaches(rank, other)])

    def refuse_threads(self, transport: str, size: int) -> None:
        """None of its devices has locks that ranks share."""

    def nccl(self, rank: int, device: _core.device.Device) -> _core.transport.NcclLibrary:
        return self.fake.library(rank, device)

    def ranks(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` for ranks that join on this machine."""

        def on_machine(*args: Any) -> Any:
            with joining_on(self):
                return fn(*args)

        return on_machine

    def assert_nccl_was_used_well(self) -> None:
        """NCCL may answer by a hang or a crash to what the fake complains about."""
        assert self.fake.complaints() == []


def run_threads(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    transport: str = "shm",
    timeout: float = 60.0 * PATIENCE,
    hosts: Sequence[int] = (),
    fake_nccl: _testing.FakeNccl | None = None,
    **machine: Any,
) -> list[Any]:
    """As :func:`hdpcomm.testing.run_threads`, on a :class:`FakeMachine`."""
    fakes = FakeMachine(world_size, hosts, nccl=fake_nccl, **machine)
    results = testing.run_threads(fakes.ranks(fn), world_size, *args, transport=transport, timeout=timeout)
    fakes.assert_nccl_was_used_well()
    return results


def check(
    fn: Callable[..., Any],
    world_size: int,
    *,
    seeds: Iterable[int],
    transport: str,
    hosts: Sequence[int] = (),
) -> None:
    """As :func:`hdpcomm.testing.device_check.check`, with a new :class:`FakeMachine` for each seed."""
    for seed in seeds:
        fakes = FakeMachine(world_size, hosts)
        device_check.check(fakes.ranks(fn), world_size, seeds=[seed], transport=transport)
        fakes.assert_nccl_was_used_well()


def planted_sites(
    fn: Callable[..., Any],
    world_size: int,
    *,
    seeds: Iterable[int],
    path: str,
    transport: str,
    hosts: Sequence[int] = (),
) -> list[device_check.PlantedSite]:
    """As :func:`hdpcomm.testing.device_check.planted_sites`, with a new :class:`FakeMachine` for each seed.

    A line that orders in the runs of several seeds is there for each of them.
    """
    found = []
    for seed in seeds:
        fakes = FakeMachine(world_size, hosts)
        found += device_check.planted_sites(fakes.ranks(fn), world_size, seeds=[seed], path=path, transport=transport)
        fakes.assert_nccl_was_used_well()
    return found
