"""What ranks did last, written on errors and on SIGUSR1, and read by torch's own tool."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.flight_recorder import fr_trace

import hdpcomm as hdp
from hdpcomm import errors
from hdpcomm.comm import flight_recorder
from hdpcomm.testing import spawn
from tests.harness.fault_cases import LONG_S, caught, until, wait_for

SIZE = 3


def entries_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    dump = pickle.loads((folder / f"{flight_recorder.PREFIX}{rank}").read_bytes())
    assert dump["rank"] == rank
    return list(dump["entries"])


def torch_reads(folder: Path) -> Any:
    """The collectives that torchfrtrace finds."""
    output = folder.with_suffix(".database")
    fr_trace.main([str(folder), "-o", str(output)])
    _, database = pickle.loads(output.read_bytes())
    return database.collectives


def many_operations(comm: hdp.Communicator) -> int:
    """Something of each kind, the same on all ranks; returns how many operations all of them make together."""
    rank, size = comm.rank, comm.size
    x = torch.ones(5)
    comm.all_reduce(x)
    comm.barrier()
    comm.broadcast(x, 1)
    comm.reduce(x, 0)
    comm.all_gather(torch.zeros(5 * size), x)
    comm.reduce_scatter(torch.zeros(2), torch.ones(2 * size))
    comm.gather(torch.zeros(5 * size), x, 1)
    comm.scatter(torch.zeros(2), torch.ones(2 * size), 2)
    comm.all_to_all(torch.zeros(4 * size), torch.ones(4 * size))
    if rank < 2:
        comm.send(x, 1) if rank == 0 else comm.recv(x, 0)
    for _ in range(2):
        comm.exchange([(x, (rank + 1) % size)], [(torch.zeros(5), (rank - 1) % size)])
    pair = comm.subset([2, 0])
    if pair is not None:
        pair.all_reduce(x)
        pair.all_reduce(torch.ones(3, dtype=torch.float64), async_op=True).wait()
    comm.all_reduce(x)
    return 9 + 1 + 2 * size + 2 + 1


TRANSPORTS = ("shm", "tcp", "sim")


def dumps(folder: str) -> int:
    for transport in TRANSPORTS:
        with hdp.init(transport, timeout=LONG_S) as comm:
            count = many_operations(comm)
            comm.barrier()
            flight_recorder.dump(Path(folder, transport), comm.rank)
        del comm
        gc.collect()  # what has gone is in no later dump
    one_differs(Path(folder, "error"))
    return count + 1


def one_differs(folder: Path) -> None:
    os.environ["HDPCOMM_FLIGHT_FOLDER"] = str(folder)
    comm = hdp.init("shm", timeout=LONG_S)
    for _ in range(3):
        comm.all_reduce(torch.ones(4))
    assert not (folder / f"{flight_recorder.PREFIX}{comm.rank}").exists()  # nothing has failed here
    count = 5 if comm.rank == 1 else 4
    assert isinstance(caught(lambda: comm.all_reduce(torch.ones(count))), hdp.Error)


def test_torch_reads_them(tmp_path: Path) -> None:
    count = spawn(dumps, SIZE, str(tmp_path), timeout=120)[0]
    for transport in TRANSPORTS:
        all_match(tmp_path / transport, "nccl" if transport == "sim" else "gloo", count)
    collectives = torch_reads(tmp_path / "error")
    good, bad = [[each for each in collectives if each.pass_check is passed] for passed in (True, False)]
    assert len(good) == 3
    assert "SIZE_OR_SYNTAX_MISMATCH" in str(bad[0].mismatch_collectives[1].type_of_mismatch)  # of rank 1
    for rank in range(SIZE):
        last = entries_of(tmp_path / "error", rank)[-1]
        assert last["input_sizes"] == [[5 if rank == 1 else 4]]
        assert (last["state"], last["error"]) == ("started", True)


def all_match(folder: Path, backend: str, count: int) -> None:
    collectives = torch_reads(folder)
    assert [each for each in collectives if not each.pass_check] == []
    assert sum(each.collective_name.startswith(f"{backend}:") for each in collectives) == count
    for rank in range(SIZE):
        entries = entries_of(folder, rank)
        assert all(entry["state"] == "completed" and not entry["error"] for entry in entries)
        times = [entry["time_created_ns"] for entry in entries]
        assert times == sorted(times)
        assert all(entry["time_discovered_completed_ns"] >= entry["time_created_ns"] for entry in entries)


def stuck(folder: str, signs: str) -> None:
    os.environ["HDPCOMM_FLIGHT_FOLDER"] = folder
    before: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: before.append(1))
    comm = hdp.init("shm", timeout=LONG_S)
    comm.barrier()
    here, go = Path(signs, str(comm.rank)), Path(signs, "go")
    if comm.rank == 0:
        work = comm.all_reduce(torch.ones(7), async_op=True)
        queued = comm.all_reduce(torch.ones(8), async_op=True)
        here.write_text(str(os.getpid()))
        work.wait()  # SIGUSR1 is heard here
        queued.wait()
        assert before == [1]  # the program's own handler still gets it
    else:
        here.write_text(str(os.getpid()))
        wait_for(go)
        comm.all_reduce(torch.ones(7))
        comm.all_reduce(torch.ones(8))


def test_a_signal_writes_them_and_the_rank_goes_on(tmp_path: Path) -> None:
    folder, signs = tmp_path / "flight", tmp_path / "signs"
    signs.mkdir()

    def asks() -> None:
        wait_for(signs / "0")
        wait_for(signs / "1")
        assert until(lambda: (signs / "0").read_text() != "")
        os.kill(int((signs / "0").read_text()), signal.SIGUSR1)
        wait_for(folder / f"{flight_recorder.PREFIX}0")
        (signs / "go").touch()

    thread = threading.Thread(target=asks)
    thread.start()
    spawn(stuck, 2, str(folder), str(signs), timeout=120)
    thread.join()
    first, second, third = entries_of(folder, 0)
    assert (first["state"], second["state"], third["state"]) == ("completed", "started", "scheduled")
    assert second["input_sizes"] == [[7]]
    assert third["time_discovered_started_ns"] is None


def keeps_the_last(folder: str) -> None:
    os.environ["HDPCOMM_FLIGHT_RECORDS"] = "5"  # eight are kept
    with hdp.init("shm", timeout=LONG_S) as comm:
        for i in range(20):
            comm.all_reduce(torch.ones(i + 1))
        kept = flight_recorder.record(comm.rank)["entries"]
        assert [each["input_sizes"] for each in kept] == [[[i]] for i in range(13, 21)]
        assert [each["collective_seq_id"] for each in kept] == list(range(12, 20))
    os.environ["HDPCOMM_FLIGHT_RECORDS"] = "0"
    with hdp.init("shm", timeout=LONG_S) as comm:
        comm.barrier()
        with pytest.raises(hdp.InvalidUsage, match="unset HDPCOMM_FLIGHT_RECORDS=0"):
            flight_recorder.dump(f"{folder} of nothing")
    del os.environ["HDPCOMM_FLIGHT_RECORDS"]
    cannot_be_written(Path(folder))


def cannot_be_written(folder: Path) -> None:
    """What cannot be written hides no error."""
    folder.write_text("a file")
    os.environ["HDPCOMM_FLIGHT_FOLDER"] = str(folder)
    heard: list[str] = []
    errors.on_failure(lambda error: heard.append(str(error)))
    comm = hdp.init("shm", timeout=LONG_S)
    error = caught(lambda: comm.all_reduce(torch.ones(4 + comm.rank)))
    assert "all_reduce(4 x float32" in str(error)
    assert heard == [str(error)]
    with pytest.raises(OSError):
        flight_recorder.dump(folder)
    with pytest.raises(hdp.InvalidUsage, match="subset"):
        comm.subset([])
    assert heard == [str(error)]  # an argument that is wrong is no failure


def test_only_the_last_are_kept_and_nothing_hides_an_error(tmp_path: Path) -> None:
    spawn(keeps_the_last, 2, str(tmp_path / "flight"), timeout=120)
    assert not (tmp_path / "flight of nothing").exists()
