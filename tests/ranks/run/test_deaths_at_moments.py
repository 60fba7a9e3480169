"""A run's ranks die in the middle of what ``--elastic`` does for them: copying, saving, the way back. The others go on,
with the losses of a run that nobody disturbed."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from tests.harness.warm_python import Python, run_python
from tests.ranks.run.test_elastic import STEPS, TOLD, command, data, losses, no_world

__all__ = ["data", "no_world"]

#: Started by hand as rank HDPCOMM_DEATHS names, which dies before or after a call. "now": the nth call of all. "then":
#: the first one after ranks have agreed that another one is dead.
SCRIPT = """
import functools, importlib, os, signal, sys
from hdpcomm.cli.main import main
from hdpcomm.comm.communicator import Communicator

armed = False

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def hook(place, since, moment, number):
    module, names = place.split(":")
    owner = importlib.import_module(module)
    *outer, name = names.split(".")
    for each in outer:
        owner = getattr(owner, each)
    real, calls = getattr(owner, name), 0
    @functools.wraps(real)
    def dies(*arguments, **options):
        nonlocal calls
        calls += since == "now" or armed
        due = calls == int(number)
        if due and moment == "before":
            die()
        result = real(*arguments, **options)
        if due and moment == "after":
            die()
        return result
    setattr(owner, name, dies)

for death in filter(None, os.environ.get("HDPCOMM_DEATHS", "").split()):
    rank, place, since, moment, number = death.split(",")
    if rank == os.environ["RANK"]:
        hook(place, since, moment, number)
shrink = Communicator.shrink
def arms(self, *arguments, **options):
    global armed
    result = shrink(self, *arguments, **options)
    armed = True
    return result
Communicator.shrink = arms
sys.exit(main(sys.argv[1:]))
"""

COPIES = "hdpcomm.train.state.peer_copies:"
#: Where a rank dies by itself, at the third call of all.
AT_WORK = [
    f"{COPIES}PeerCopies.take",
    f"{COPIES}_Segment.fill",
    f"{COPIES}PeerCopies._finish",
    "hdpcomm.run.checkpoints:CheckpointFolder.save",
    "hdpcomm.run.checkpoints:CheckpointFolder._write_part",
    "hdpcomm.train:Trainer.step",
]
#: Where one dies on the way back from another death, at its first call since.
ON_THE_WAY_BACK = [
    "hdpcomm.run.peer_saves:PeerSaves.next_attempt",
    "hdpcomm.run.peer_saves:PeerSaves.newest",
    f"{COPIES}PeerCopies.newest",
    "hdpcomm.run.peer_saves:KeptCheckpoint.load_into",
    "hdpcomm.train.state.reshard:Reshard.run",
    "hdpcomm.run.peer_saves:PeerSaves.begin",
    f"{COPIES}PeerCopies.__init__",
    f"{COPIES}PeerCopies.take",
    "hdpcomm.train:Trainer.step",
]
#: The last rank dies first; of a pipeline there is a spare one then.
FIRST = "last,hdpcomm.train:Trainer.step,now,before,4"
DEATHS = [f"2,{place},now,{moment},3" for place in AT_WORK for moment in ("before", "after")]
DEATHS += [f"{FIRST} 2,{place},then,{moment},1" for place in ON_THE_WAY_BACK for moment in ("before", "after")]
MOST = 300
CONSTANT = ["--schedule", "constant", "--warmup", "1", "--lr", "1e-4"]
MESHES = {"hdp": (4, []), "zero 1": (4, ["--zero", "1"]), "pipeline 2": (6, ["--pipeline", "2"])}


#: ``HDPCOMM_TEST_MOMENTS=1``: every one on every mesh.
ALL = [(mesh, deaths) for deaths in DEATHS for mesh in MESHES]
CHOSEN = ALL if os.environ.get("HDPCOMM_TEST_MOMENTS") else ALL[13::26]


def short(deaths: str) -> str:
    return re.sub(r"hdpcomm\.\w+(\.\w+)?:", "", deaths)


@pytest.fixture(scope="module")
def exact(data: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("undisturbed")
    run_python(command(data, out, *CONSTANT, "--ranks", "1", steps=MOST), timeout=400, check=True)
    return [loss for _, loss in losses(out)]


def by_hand(arguments: list[str], ranks: int, deaths: str) -> list[Python]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    told = os.environ | place | {"HDPCOMM_DEATHS": deaths}
    return [Python(["-c", SCRIPT, *arguments], env=told | {"RANK": str(rank)}) for rank in range(ranks)]


@pytest.mark.parametrize(("mesh", "deaths"), CHOSEN, ids=short)
def test_the_others_go_on(data: str, tmp_path: Path, exact: list[float], mesh: str, deaths: str) -> None:
    if mesh == "hdp" and "CheckpointFolder" in deaths:
        pytest.skip("rank 0 alone saves what all ranks hold")
    out = tmp_path / "run"
    ranks, own = MESHES[mesh]
    deaths = deaths.replace("last", str(ranks - 1))
    options = [*own, *CONSTANT, "--elastic", "--ranks", str(ranks), "--save-every", "2", "--keep", "100"]
    processes = by_hand(command(data, out, *options, steps=STEPS)[2:], ranks, deaths)
    told = [process.communicate(timeout=150)[1] for process in processes]
    gone = {int(death.split(",")[0]) for death in deaths.split()}
    codes = [process.returncode for process in processes]
    assert codes == [-9 if rank in gone else 0 for rank in range(ranks)], "\n".join(told)
    rows = losses(out)
    assert sorted({step for step, _ in rows}) == list(range(STEPS))
    assert max(abs(loss - exact[step]) for step, loss in rows) < 5e-5
    if "the disk" not in told[0] and "lost, too" not in told[0]:
        assert len(rows) <= STEPS + len(gone), told[0]
    assert TOLD.findall(told[0]) or "lost, too" in told[0], told[0]
