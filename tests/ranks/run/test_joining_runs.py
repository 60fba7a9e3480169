"""``hdpcomm train --join``: ranks come back, others come, those that do not fit are refused; the losses stay."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import hdpcomm as hdp
from hdpcomm.comm.secret import Secret, job_secret
from hdpcomm.run import lobby
from hdpcomm.run.lobby import Lobby, _door_at, enter
from tests.harness.warm_python import Python, run_python
from tests.ranks.run.test_elastic import TOLD, command, data, losses, no_world, ranks_of, wait_for_steps

__all__ = ["data", "no_world"]

CONSTANT = ["--schedule", "constant", "--warmup", "1", "--lr", "1e-4"]
MOST = 400
FACTS = f"hdpcomm {hdp.__version__}"
LIMIT_S = 150.0


@pytest.fixture(scope="module")
def exact(data: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank that nobody disturbs, as many as a test may come to."""
    out = tmp_path_factory.mktemp("exact")
    run_python(command(data, out, *CONSTANT, "--ranks", "1", steps=MOST), timeout=400, check=True)
    return [loss for _, loss in losses(out)]


@contextmanager
def running(data: str, out: Path, *options: str) -> Iterator[Python]:
    """A run that goes on until it is told to end."""
    process = Python(command(data, out, *CONSTANT, "--elastic", *options, steps=1_000_000))
    try:
        wait_for_steps(process, out, 2)
        yield process
    finally:
        if process.poll() is None:
            process.kill()


def ended(process: Python, out: Path) -> str:
    """Asks a run for its end; what it said on stderr."""
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert not (out / "lobby.json").exists()
    return str(errors)


def newcomer(where: Path | str) -> Python:
    return Python(["-m", "hdpcomm.cli.main", "train", "--join", str(where)])


def wait_for_size(process: Python, out: Path, size: int) -> None:
    """Until steps are made by so many ranks."""
    limit = time.monotonic() + LIMIT_S
    while True:
        assert process.poll() is None, process.communicate(timeout=10)
        assert time.monotonic() < limit, (size, (out / "metrics.jsonl").read_text()[-500:])
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
        if rows and rows[-1]["ranks"] == size:
            return
        time.sleep(0.05)


def check_losses(out: Path, exact: list[float], lost: int) -> None:
    rows = losses(out)
    done = max(step for step, _ in rows) + 1
    assert sorted({step for step, _ in rows}) == list(range(done))
    assert len(rows) <= done + lost  # a death costs one finished step at most, and a newcomer none
    assert done <= MOST, "give exact more steps"
    apart = [abs(loss - exact[step]) for step, loss in rows]
    assert max(apart) < 5e-5


@pytest.mark.parametrize("options", [["--zero", "1"], ["--pipeline", "2"]], ids=["zero 1", "pipeline 2"])
def test_four_three_four_six(data: str, tmp_path: Path, exact: list[float], options: list[str]) -> None:
    out = tmp_path / "run"
    with running(data, out, "--ranks", "4", *options) as process:
        ranks_of(process, 4)[3].kill()
        step = 2 if "--pipeline" in options else 1
        wait_for_size(process, out, 3 // step * step)
        others = [newcomer(out)]
        wait_for_size(process, out, 4)
        others += [newcomer(out), newcomer(out)]
        wait_for_size(process, out, 6)
        errors = ended(process, out)
        for each in others:
            told = each.communicate(timeout=LIMIT_S)
            assert each.returncode == 0, told
    sizes = [int(count) for count, _ in TOLD.findall(errors)]
    assert (sizes[0], sizes[1], sizes[-1]) == (3 // step * step, 4, 6), errors
    check_losses(out, exact, lost=1)


@pytest.mark.parametrize("seed", range(int(os.environ.get("HDPCOMM_TEST_JOINS", "6")) // 6))
def test_ranks_come_and_go(data: str, tmp_path: Path, exact: list[float], seed: int) -> None:
    """``HDPCOMM_TEST_JOINS=60``: ten runs with six joins and deaths each."""
    draw, out, deaths = random.Random(seed), tmp_path / "run", 0
    with running(data, out, "--ranks", "2", *draw.choice([[], ["--zero", "1"]])) as process:
        others: list[Python] = []
        size = 2
        for _ in range(6):
            living = [each for each in others if each.poll() is None]
            if size > 2 and draw.random() < 0.5:
                psutil.Process(draw.choice(living).pid).kill()
                size, deaths = size - 1, deaths + 1
            else:
                others.append(newcomer(out))
                size += 1
            wait_for_size(process, out, size)
            wait_for_steps(process, out, len(losses(out)) + draw.randint(0, 3))
        errors = ended(process, out)
        for each in others:
            each.communicate(timeout=LIMIT_S)
    assert [int(count) for count, _ in TOLD.findall(errors)][-1] == size
    check_losses(out, exact, lost=deaths)


def test_who_does_not_fit_is_refused_and_the_run_unharmed(data: str, tmp_path: Path, exact: list[float]) -> None:
    out = tmp_path / "run"
    with running(data, out, "--ranks", "2") as process:
        place = out / "lobby.json"
        address = json.loads(place.read_text())
        for where in (place, address):
            with pytest.raises(hdp.InvalidUsage, match="do not share the job's secret"):
                enter(where, Secret("x" * 32), FACTS, timeout=20.0)
            with pytest.raises(hdp.InvalidUsage, match=r"no such newcomer: the run is hdpcomm .* process is hdpcomm 9"):
                enter(where, job_secret(), "hdpcomm 9", timeout=20.0)
        broken = tmp_path / "broken.json"
        for text in ("", "{}", "[1]", "1", '"host"', json.dumps(address.rpartition(":")[0] + ":1")):
            broken.write_text(text)
            with pytest.raises(hdp.InvalidUsage, match="no run waits for newcomers there"):
                enter(broken, job_secret(), "", timeout=2.0)
        errors = ended(process, out)
    assert "joined" not in errors
    check_losses(out, exact, lost=0)


def test_a_newcomer_comes_by_an_address(data: str, tmp_path: Path, exact: list[float]) -> None:
    """It sees the data, and not the folder of the run."""
    out = tmp_path / "run"
    with running(data, out, "--ranks", "2") as process:
        address = json.loads((out / "lobby.json").read_text())
        other = newcomer(address)
        wait_for_size(process, out, 3)
        errors = ended(process, out)
        other.communicate(timeout=LIMIT_S)
        assert other.returncode == 0
    assert f"hdpcomm: more ranks may come: hdpcomm train --join {address}\n" in errors
    check_losses(out, exact, lost=0)


@pytest.mark.parametrize("another", [True, False])
def test_who_waits_outlives_the_rank_with_the_lobby(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """The next rank opens another one; where none does, the newcomer says so."""
    monkeypatch.setattr(lobby, "_joined", lambda _, *place: place)
    monkeypatch.setattr(lobby, "_GROWING_S", 30.0 if another else 2.0)
    path, secret = tmp_path / "lobby.json", Secret("of the job, and long")
    first = Lobby(path, secret, FACTS)
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(enter, path, secret, FACTS)
        while not first.waiting():
            time.sleep(0.01)
        first._store.close()  # as the end of its process does
        if not another:
            with pytest.raises(hdp.PeerLost, match="the run has ended, or the rank that waited for newcomers has"):
                coming.result(LIMIT_S)
        else:
            second = Lobby(path, secret, FACTS)
            while not (numbers := second.waiting()):
                time.sleep(0.01)
            place = {"door": ["127.0.0.1", 1, "name"], "rank": 2, "size": 3, "transport": "shm", "timeout": 5.0}
            second.give_places({numbers[0]: place})
            assert coming.result(LIMIT_S) == (2, 3, "shm", 5.0)
            second.close()
        first.close()


def test_a_newcomer_that_never_comes(data: str, tmp_path: Path, exact: list[float]) -> None:
    """It has a place and is gone: the others go on as they were."""
    out = tmp_path / "run"
    with running(data, out, "--ranks", "2") as process:
        store = _door_at(out / "lobby.json", job_secret()).open(-1, 20.0)
        number = store.add("count", 1)
        store.set(f"asks/{number}", FACTS)
        place = json.loads(store.get(f"place/{number}"))
        assert (place["rank"], place["size"]) == (2, 3)
        before = len(losses(out))
        store.close()
        wait_for_steps(process, out, before + 3)
        errors = ended(process, out)
    assert "newcomers did not come\nhdpcomm: going on with 2 ranks from step-" in errors
    check_losses(out, exact, lost=0)


def test_a_run_whose_lobby_cannot_be_made_goes_on(data: str, tmp_path: Path, exact: list[float]) -> None:
    out = tmp_path / "run"
    (out / "lobby.json").mkdir(parents=True)
    process = Python(command(data, out, *CONSTANT, "--elastic", "--ranks", "2", steps=5))
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert errors.count("warning: no process can join this run (--join): ") == 1
    check_losses(out, exact, lost=0)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".lobby")]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--join", "{out}"], "no run of hdpcomm train is there"),
        (["--join", "{out}", "--lr", "1"], "--join was given with --lr, and a newcomer has the options of the run"),
    ],
)
def test_what_cannot_join(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    from hdpcomm.cli.main import main

    check: Callable[[list[str]], int] = main
    assert check(["train", *(each.format(out=tmp_path) for each in arguments)]) == 6
    assert told in capsys.readouterr().err


def test_who_came_is_known_by_the_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that others come to later, on a host whose own name has no address."""
    monkeypatch.setattr(lobby, "_known_as", None)
    monkeypatch.setattr(lobby, "join", lambda *_, **__: SimpleNamespace(barrier=lambda: None))
    server, door = lobby._served(Secret("of the job, and long"))
    lobby._joined(door, 1, 2, "shm", 5.0)
    server.close()
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "a-name-without-an-address.invalid")
    again, other = lobby._served(Secret("of the job, and long"))
    again.close()
    assert other.host == door.host
    monkeypatch.setattr(lobby, "_known_as", None)
    with pytest.raises(hdp.Error, match="no way from this host to the address of its own name a-name-without"):
        lobby._served(Secret("of the job, and long"))


def test_who_gives_no_sign_of_life_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdpcomm.run.lobby._SILENT_S", 0.3)
    lobby = Lobby(tmp_path / "lobby.json", job_secret(), "facts")
    store = _door_at(tmp_path / "lobby.json", job_secret()).open(-1, 10.0)
    assert store.add("count", 3) == 3
    for number in (1, 3):
        store.set(f"asks/{number}", "facts")
    assert lobby.waiting() == [1, 3]
    time.sleep(0.4)
    store.add("alive/3", 1)
    assert lobby.waiting() == [3]
    lobby.close()
