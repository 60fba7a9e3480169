"""Messages that NCCL puts into the landing zones of peers, on a fake NCCL (HDPCOMM_NCCL_ONE_SIDED)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from tests.faults.test_comm_errors import caught
from tests.harness.attention_oracle import GRADS, Case
from tests.harness.fakes import check, planted_sites, run_threads
from tests.harness.native import _testing
from tests.harness.ring_program import annotated, ring_attention
from tests.harness.stream_programs import exchanges, landings
from tests.harness.stream_programs import joined as joined_caller
from tests.harness.worlds import small_slots
from tests.ranks.device.test_device_training import MASKS, attention, training
from tests.ranks.nccl.test_graphs import caller, graph_of, settle


def staged() -> None:
    """Messages with places from outside of the zone, in the background and beside them on the caller's stream."""
    with joined_caller() as rank:
        n, r = rank.comm.size, rank.comm.rank
        to, back = (r + 1) % n, (r - 1) % n
        zone = rank.comm.landing_zone(torch.empty(0), back)
        assert zone is not None
        kept = []
        for turn in range(3):
            at = zone.memory[turn * 8192 :]
            late, soon = at[:4000].view(torch.float32), at[4096:8096].view(torch.float32)
            kept += [first := torch.empty(1000), second := torch.empty(1000)]
            rank.made(first)
            rank.made(second)
            work = rank.exchange([(first, to, turn * 8192)], [(late, back, turn * 8192)], background=True)
            rank.exchange([(second, to, turn * 8192 + 4096)], [(soon, back, turn * 8192 + 4096)])
            rank.used(soon)
            work.wait_on(rank.stream)
            rank.used(late)


PROGRAMS = {"exchanges": exchanges, "landings": landings, "staged": staged, "ring_attention": ring_attention}


@pytest.fixture(autouse=True)
def one_sided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDPCOMM_NCCL_ONE_SIDED", "1")
    monkeypatch.setenv("HDPCOMM_DEVICE_LANDING_BYTES", str(1 << 20))


def worlds(fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
    return run_threads(fn, size, *args, transport="nccl", **options)


@pytest.mark.parametrize("mask", MASKS)
def test_attention_has_the_bits_of_shared_memory(mask: str) -> None:
    case = Case(
        4, [150, 7, 1, 61], heads=4, kv_heads=4, dtype=torch.float32, **MASKS[mask], options={"variant": "ring"}
    )
    for (got, _), (want, _) in zip(worlds(attention, 4, case), run_threads(attention, 4, case), strict=True):
        for name in GRADS:
            assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("hosts", [(), (0, 0, 1)])
def test_trainer(hosts: tuple[int, ...]) -> None:
    by_puts = worlds(training, 3, hosts=hosts)
    for (losses, weights), (want_losses, want_weights) in zip(by_puts, run_threads(training, 3), strict=True):
        assert losses == pytest.approx(want_losses, rel=1e-5)
        torch.testing.assert_close(weights, want_weights, rtol=1e-4, atol=1e-5)


def message_mix() -> int:
    """Messages from and to anywhere, with places and without, to everybody and to this rank itself; the puts of all."""
    with hdp.init() as comm:
        zone = comm.landing_zone(torch.zeros(1))
        assert zone is not None
        assert comm.lands(0)
        size, me = comm.size, comm.rank
        for turn, count in enumerate((1, 700, 0, 40)):
            slot = 4 * count + 16
            outside = [torch.full((count,), 100.0 * me + peer + turn) for peer in range(size)]
            sends: list[tuple[Any, ...]] = [(outside[peer], peer, me * slot) for peer in range(size)]
            landed = [zone.memory[p * slot : p * slot + 4 * count].view(torch.float32) for p in range(size)]
            recvs: list[tuple[Any, ...]] = [(landed[peer], peer, peer * slot) for peer in range(size)]
            plain = torch.zeros(count)
            to, back = (me + 1) % size, (me - 1) % size
            sends.append((outside[to], to))
            recvs.append((plain, back))
            comm.exchange(sends, recvs, async_op=turn % 2 == 1).wait()
            for peer in range(size):
                assert (landed[peer] == 100.0 * peer + me + turn).all()
            assert (plain == 100.0 * back + me + turn).all()
            # On from where it landed.
            again = zone.memory[size * slot + 64 :][: 4 * count].view(torch.float32)
            comm.exchange([(landed[back], to, size * slot + 64)], [(again, back, size * slot + 64)])
            assert (again == 100.0 * ((me - 2) % size) + back + turn).all()
            comm.barrier()
        return comm.stats()["nccl_puts"]


def test_messages_of_all_kinds() -> None:
    # In three turns with bytes (size - 1) + 1; an empty message is none that is put.
    assert worlds(message_mix, 4) == [3 * 4] * 4
    assert worlds(message_mix, 3, hosts=(0, 1, 1)) == [3 * 3] * 3


def both_ways() -> tuple[int, int]:
    """A block that goes round a world with links and puts, always to the zone of the rank it comes from; the puts of
    this rank, and its zones."""
    with hdp.init() as comm:
        x = torch.empty(0)
        to, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        zone, other = comm.landing_zone(x, back), comm.landing_zone(x, to)
        assert zone is not None and other is not None  # noqa: PT018
        assert all(comm.lands(peer) for peer in range(comm.size))
        if zone.memory.data_ptr() != other.memory.data_ptr():
            with pytest.raises(hdp.InvalidUsage, match="not at offset 0 of the landing zone for messages of that rank"):
                comm.exchange([], [(other.memory[:4].view(torch.float32), back, 0)])
        block = torch.full((500,), float(comm.rank))
        before = comm.stats()["nccl_puts"]
        for step in range(1, 7):
            at = step % 2 * 4096
            got = zone.memory[at : at + 2000].view(torch.float32)
            comm.exchange([(block, to, at)], [(got, back, at)], async_op=step % 3 == 0).wait()
            assert (got == (comm.rank - step) % comm.size).all()
            block = got
        return comm.stats()["nccl_puts"] - before, len({zone.memory.data_ptr(), other.memory.data_ptr()})


def test_links_inside_hosts_and_puts_between_them() -> None:
    def mixed(hosts: tuple[int, ...]) -> list[tuple[int, int]]:
        return run_threads(both_ways, len(hosts), transport="cuda+nccl", hosts=hosts)

    assert mixed((0, 0, 1, 1)) == [(0, 2), (6, 2)] * 2
    assert mixed((0, 0, 1)) == [(0, 2), (6, 2), (6, 1)]
    assert mixed((0, 1)) == [(6, 1)] * 2


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1, 2)])
def test_attention_over_links_and_puts(hosts: tuple[int, ...]) -> None:
    case = Case(4, [150, 7, 1, 61], heads=4, kv_heads=4, dtype=torch.float32, options={"variant": "ring"})
    mixed = run_threads(attention, 4, case, transport="cuda+nccl", hosts=hosts)
    for (got, _), (want, _) in zip(mixed, run_threads(attention, 4, case), strict=True):
        for name in GRADS:
            assert torch.equal(got[name], want[name]), name


def test_memory_of_linked_peers_stays_as_it_is() -> None:
    """The put of the joining reaches them, and connects nobody."""

    def stats() -> tuple[int, int]:
        with hdp.init() as comm:
            return comm.stats()["predicted_buffer_bytes"], comm.stats()["nccl_puts"]

    assert run_threads(stats, 4, transport="cuda+nccl", hosts=(0, 0, 1, 1)) == [(0, 0)] * 4


def test_bad_places() -> None:
    def wrong() -> None:
        comm = hdp.init()
        zone = comm.landing_zone(torch.zeros(1))
        assert zone is not None
        x = torch.zeros(16)
        at = zone.memory[64:128].view(torch.float32)
        with pytest.raises(hdp.InvalidUsage, match=r"landing place of 64 bytes at 1048576; the zone has 1048576"):
            comm.exchange([(x, 1 - comm.rank, 1 << 20)], [])
        with pytest.raises(hdp.InvalidUsage, match="not at offset 0 of the landing zone"):
            comm.exchange([], [(at, 1 - comm.rank, 0)])
        large = torch.zeros(1 << 17)
        with pytest.raises(hdp.InvalidUsage, match="1572864 bytes with landing places to send from outside"):
            comm.exchange([(large, 1 - comm.rank, 0)] * 3, [])
        comm.exchange([(x + 1, 1 - comm.rank, 64)], [(at, 1 - comm.rank, 64)])
        assert (at == 1).all()

    worlds(wrong, 2)


def test_at_once_on_one_side_and_in_two_steps_on_the_other() -> None:
    """The signals of a pair would be taken for each other: nothing is put, both are told."""

    def differ() -> str:
        comm = hdp.init(timeout=20)
        zone = comm.landing_zone(torch.zeros(1))
        assert zone is not None
        x, at = torch.zeros(16), zone.memory[:64].view(torch.float32)
        peer = 1 - comm.rank
        if comm.rank == 0:
            return str(caught(lambda: comm.exchange([(x, peer, 0)], [(at, peer, 0)])))
        return str(caught(lambda: (comm.exchange([], [(at, peer, 0)]), comm.exchange([(x, peer, 0)], []))))

    first, second = worlds(differ, 2)
    for text in (first, second):
        assert "1 puts one way and 1 the other in one exchange" in text
        assert "1 puts one way and 0 the other in one exchange" in text


def lands_at_all() -> list[bool]:
    with hdp.init() as comm:
        return [comm.lands(peer) for peer in range(comm.size)]


@pytest.mark.parametrize("slow", ["ncclSend", "ncclPutSignal"])
def test_auto_takes_what_is_faster(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDPCOMM_NCCL_ONE_SIDED", "auto")
    fake = _testing.FakeNccl(3)
    fake.slow_down(slow, 0.02)

    def lands() -> bool:
        with hdp.init() as comm:
            assert (comm.landing_zone(torch.zeros(1)) is not None) == comm.lands(0)
            return comm.lands(0)

    assert worlds(lands, 3, fake_nccl=fake) == [slow == "ncclSend"] * 3
    fake = _testing.FakeNccl(3)
    fake.slow_down(slow, 0.02)
    mixed = run_threads(lands_at_all, 3, transport="cuda+nccl", hosts=(0, 0, 1), fake_nccl=fake)
    assert mixed == [[True, True, slow == "ncclSend"]] * 2 + [[slow == "ncclSend"] * 3]
    assert worlds(lands, 1) == [False]  # nobody to send to


def joined() -> bool:
    with hdp.init() as comm:
        x = torch.ones(9)
        comm.all_reduce(x, algorithm="ring")
        assert (x == comm.size).all()
        return comm.landing_zone(x) is not None


def test_where_nccl_cannot_put(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable() -> list[_testing.FakeNccl]:
        unable = _testing.FakeNccl(2)
        unable.without_puts()
        return [_testing.FakeNccl(2, version=22809), unable]

    texts = ["is NCCL 2.28.9, and at least 2.29.7 is needed", "devices and networks do not support it"]
    for fake, text in zip(unable(), texts, strict=True):
        with pytest.raises(hdp.DeviceError, match=f"HDPCOMM_NCCL_ONE_SIDED=1, but the ranks cannot put.*{text}"):
            worlds(joined, 2, fake_nccl=fake)
    for setting in ("auto", "0"):
        monkeypatch.setenv("HDPCOMM_NCCL_ONE_SIDED", setting)
        for fake in unable():
            assert worlds(joined, 2, fake_nccl=fake) == [False, False]
    monkeypatch.setenv("HDPCOMM_NCCL_ONE_SIDED", "yes")
    with pytest.raises(hdp.InvalidUsage, match="HDPCOMM_NCCL_ONE_SIDED='yes'; give 0, 1 or auto"):
        worlds(joined, 2)


def test_into_a_graph_nothing_is_put() -> None:
    """The message goes to the same place by a send, in every replay."""

    def run() -> None:
        with caller() as rank:
            zone = rank.comm.landing_zone(torch.zeros(1))
            assert zone is not None
            n, r = rank.comm.size, rank.comm.rank
            x, at = torch.zeros(64), zone.memory[256:512].view(torch.float32)

            def step() -> None:
                rank.exchange([(x, (r + 1) % n, 256)], [(at, (r - 1) % n, 256)])

            graph = graph_of(rank, step)
            puts = rank.comm.stats()["nccl_puts"]
            for turn in range(3):
                x.fill_(10 * r + turn)
                settle(rank)
                graph.launch(rank.stream)
                settle(rank)
                assert (at == 10 * ((r - 1) % n) + turn).all()
            assert rank.comm.stats()["nccl_puts"] == puts == 1

    with small_slots():
        worlds(run, 3, opens=_testing.TestDevice)


def test_a_graph_with_a_peer_that_was_only_put_to() -> None:
    def run() -> None:
        with caller() as rank:
            zone = rank.comm.landing_zone(torch.zeros(1))
            assert zone is not None
            n, r = rank.comm.size, rank.comm.rank
            x, at = torch.zeros(64), zone.memory[256:512].view(torch.float32)
            rank.exchange([(x, (r + 2) % n, 256)], [(at, (r - 2) % n, 256)])
            rank.device.synchronize_stream(rank.stream)  # a barrier would connect more of them
            rank.device.begin_capture(rank.stream)
            with pytest.raises(hdp.InvalidUsage, match="set HDPCOMM_NCCL_CONNECT to the distance"):
                rank.exchange([(x, (r + 2) % n, 256)], [(at, (r - 2) % n, 256)])
            rank.device.end_capture(rank.stream)

    with small_slots():
        worlds(run, 5, opens=_testing.TestDevice)


@pytest.mark.parametrize(("transport", "hosts"), [("nccl", ()), ("cuda+nccl", (0, 0, 1))])
@pytest.mark.parametrize("name", PROGRAMS)
def test_clean_in_any_order(name: str, transport: str, hosts: tuple[int, ...]) -> None:
    with small_slots(), annotated():
        check(PROGRAMS[name], 3, seeds=range(9), transport=transport, hosts=hosts)


def test_every_line_that_orders_is_needed() -> None:
    found: dict[tuple[str, int, str], bool] = {}
    with small_slots(), annotated():
        for program in (exchanges, landings, staged):
            for site in planted_sites(program, 3, seeds=range(3), path="csrc/transport/stream/nccl", transport="nccl"):
                key = (site.file, site.line, site.call)
                found[key] = found.get(key, False) or bool(site.found)
    assert found
    assert not [key for key, seen in found.items() if not seen]
