"""``hdpcomm acceptance``: every check on healthy ranks, and the row that names each planted fault."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.acceptance import SECTIONS, Report, Row, Rule, Settings, accept, checks, rated
from hdpcomm.acceptance.checks import check_copies, check_links, check_products, check_ring
from hdpcomm.acceptance.report import named
from hdpcomm.cli.main import main
from hdpcomm.comm.costs import load_costs
from hdpcomm.testing import RankPool
from tests.harness.hosts import WarmHosts, why_not


def test_the_command_tries_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["acceptance", "--ranks", "2", "--json", str(tmp_path / "report.json")])
    found = json.loads((tmp_path / "report.json").read_text())
    rows = [Row(**row) for row in found["rows"]]
    assert list(dict.fromkeys(row.section for row in rows)) == ["meeting", *SECTIONS]
    assert not [row for row in rows if row.judged == "not tried"]
    # Ratios depend on what else this machine does.
    assert not [row for row in rows if row.judged == "broken" and row.ratio is None], rows
    assert code == (not found["healthy"])
    text = capsys.readouterr().out
    assert all(name in text for name in (*SECTIONS, "measured", "all_reduce, all 2 ranks", "a rank is killed"))


@pytest.mark.parametrize("check", [check_links, check_products, check_copies, check_ring])
def test_checks_of_one_rank_and_of_four(
    ranks: Callable[..., list[Any]], check: Callable[[hdp.Communicator], list[Row]]
) -> None:
    assert all(row.judged == "good" for row in ranks(1, run_check, check)[0] if row.ratio is None)
    found = ranks(4, run_check, check)
    assert found[0]
    assert found == [found[0]] * 4


def run_check(check: Callable[[hdp.Communicator], list[Row]]) -> list[Row]:
    torch.set_num_threads(1)
    with hdp.init() as comm:
        return check(comm)


def test_ratios_are_judged_by_their_rule() -> None:
    rule = Rule(0.8, 0.5)
    rows = [rated("links", "x", value, 1e9, "GB/s", rule, "look") for value in (0.8e9, 0.79e9, 0.5e9, 0.49e9, 0.0)]
    assert [row.judged for row in rows] == ["good", "look here", "look here", "broken", "broken"]
    assert [row.note for row in rows] == ["", *["look"] * 4]
    times = [rated("steps", "x", value, 1.0, "s", rule) for value in (1.25, 1.3, 2.1, 0.1)]
    assert [row.judged for row in times] == ["good", "look here", "broken", "good"]
    assert rule.judge(float("nan")) == "broken"
    assert rated("links", "x", 3e-6, None, "us", rule).measured == "3 us"
    assert named([4]) == "rank 4"
    assert named([0, 2, 3]) == "ranks 0, 2 and 3"
    assert named(range(12)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


def of_version(versions: list[str]) -> list[Row]:
    with hdp.init() as comm:
        checks.__version__ = versions[comm.rank]  # type: ignore[attr-defined]
        try:
            return checks.check_versions(comm)
        finally:
            checks.__version__ = hdp.__version__  # type: ignore[attr-defined]


def test_an_old_version_is_named(ranks: Callable[..., list[Any]]) -> None:
    rows = ranks(3, of_version, ["7", "6", "7"])[2]
    (bad,) = [row for row in rows if row.judged != "good"]
    assert (bad.check, bad.judged, bad.measured) == ("hdpcomm", "broken", "7")
    assert "rank 1 has 6" in bad.note


def on_full_disk(folder: str, full: bool) -> list[Row]:
    with hdp.init() as comm:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if full and comm.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            return checks.check_disks(comm, Path(folder))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)


def test_a_disk_without_room_is_named(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for folder, full in ((tmp_path, True), (tmp_path / "none", False)):
        (row,) = ranks(2, on_full_disk, str(folder), full)[1]
        assert row.judged == "broken"
        assert "rank 0" in row.note
        assert "--folder" in row.note
    (row,) = ranks(2, on_full_disk, str(tmp_path), False)[0]
    assert row.measured
    assert not list(tmp_path.iterdir())


def of_wrong_sums() -> list[Row]:
    with hdp.init() as comm:
        plain = type(comm).all_reduce

        def wrong(self: Any, x: Any, *args: Any, out: Any = None, **more: Any) -> Any:
            done = plain(self, x, *args, out=out, **more)
            if self.rank == 1 and out is not None:
                out[3] += 1
            return done

        type(comm).all_reduce = wrong  # type: ignore[method-assign]
        try:
            return checks.check_collectives(comm)
        finally:
            type(comm).all_reduce = plain  # type: ignore[method-assign]


def test_a_collective_that_is_wrong_is_named(ranks: Callable[..., list[Any]]) -> None:
    rows = ranks(2, of_wrong_sums)[0]
    (bad,) = [row for row in rows if row.note.startswith("wrong")]
    assert bad.check == "all_reduce, all 2 ranks"
    assert bad.judged == "broken"
    assert "rank 1" in bad.note


def with_slow_rank() -> list[Row]:
    torch.set_num_threads(1)
    with hdp.init() as comm:
        plain = checks.repeated_s

        def slower(*given: Any) -> float:
            return plain(*given) * (2.5 if comm.rank == 1 else 1.0)

        checks.repeated_s = slower  # type: ignore[attr-defined]
        try:
            return check_products(comm)
        finally:
            checks.repeated_s = plain  # type: ignore[attr-defined]


def test_a_slow_rank_is_named(ranks: Callable[..., list[Any]]) -> None:
    for _ in range(5):  # other tests may hold back rank 0 as well
        (row,) = [row for row in ranks(2, with_slow_rank)[0] if row.check == "slowest of the ranks"]
        if row.note.startswith("rank 1 slower"):
            break
    assert row.note.startswith("rank 1 slower")


def dying(in_collectives: bool) -> Report:
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "0":
        if in_collectives:
            checks.operation = die  # type: ignore[attr-defined]
        else:
            checks.pair_costs = die  # type: ignore[attr-defined]
    checks._TIMEOUT_S = 10.0
    return accept(Settings())


@pytest.mark.parametrize("in_collectives", [False, True])
def test_a_rank_that_dies_is_named_and_the_next_one_speaks(in_collectives: bool) -> None:
    with RankPool(3) as pool:
        reports = pool.run(dying, in_collectives, survivors=True, timeout=120)
    assert [report.speaks for report in reports] == [True, False]
    for report in reports:
        (bad,) = [row for row in report.rows if row.judged == "broken" and row.ratio is None]
        assert bad.section == ("collectives" if in_collectives else "links")
        assert "rank 0" in bad.note
        later = report.rows[report.rows.index(bad) + 1 :]
        assert all(row.judged == "not tried" for row in later)


def test_a_wrong_secret_is_named() -> None:
    outputs = []
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "hdpcomm", "acceptance"],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}
            | {"HDPCOMM_SECRET": "a secret of sixteen characters" * (rank + 1), "HDPCOMM_TIMEOUT": "15"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        outputs.append(process.communicate(timeout=90)[0])
    assert [process.returncode for process in started] == [1, 1]
    assert all("meeting, all ranks: broken" in text for text in outputs)
    assert any("secret" in text for text in outputs), outputs


def test_time_that_is_over_is_said() -> None:
    with RankPool(2) as pool:
        report = pool.run(accept, Settings(limit_s=1e-9), timeout=60)[0]
    assert [row.judged for row in report.rows[1:]] == ["not tried"] * 10
    assert report.healthy


def test_costs_keep_those_of_other_transports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = {"alpha_s": 1e-6, "message_s": 2e-7, "beta_s_per_byte": 1e-10, "gamma_s_per_byte": 3e-10}
    monkeypatch.setattr(RankPool, "run", lambda *_, **__: [Report(costs={"shm": costs})])
    monkeypatch.delenv("HDPCOMM_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "hdpcomm" / "costs.json"
    path.parent.mkdir()
    path.write_text('{"tcp": {"alpha_s": 1}}')
    command = ["acceptance", "--costs"]
    assert main(command) == 0
    assert json.loads(path.read_text()) == {"tcp": {"alpha_s": 1}, "shm": costs}
    assert load_costs("shm") == costs
    assert "alpha 1.00 us, message 0.20 us, beta 0.1000 ns/byte, gamma 0.3000" in capsys.readouterr().out
    monkeypatch.setenv("HDPCOMM_COSTS", str(tmp_path / "new.json"))
    assert main(command) == 0
    assert json.loads((tmp_path / "new.json").read_text()) == {"shm": costs}
    for text in ("{", "[]"):
        path.write_text(text)
        assert main([*command, str(path)]) == 6
        assert "holds no costs" in capsys.readouterr().err


def test_sections_that_are_asked_for_and_their_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, report = tmp_path / "costs.json", tmp_path / "report.json"
    options = ["--only", "versions", "hosts", "--costs", str(path), "--json", str(report)]
    assert main(["acceptance", "--ranks", "2", "--transport", "tcp", *options]) == 0
    written = json.loads(path.read_text())
    assert list(written) == ["tcp"]
    assert min(written["tcp"].values()) > 0
    assert f"written to {path}" in capsys.readouterr().out
    sections = [row["section"] for row in json.loads(report.read_text())["rows"]]
    assert list(dict.fromkeys(sections)) == ["meeting", "versions", "hosts"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--folder", "/no/such/place"], "--folder /no/such/place: is no folder"),
        (["--model", "/no/such/place"], "/no/such/place"),
        (["--ranks", "0"], "below 1"),
        (["--only", "links", "hope"], "--only hope: give some of versions, hosts, links"),
    ],
)
def test_wrong_options(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(["acceptance", *given])
    except SystemExit as end:
        code = end.code
    assert code == 6
    assert message in capsys.readouterr().err


def on_three_hosts(program: str, folder: Path) -> dict[tuple[str, str], Row]:
    """Rows of a program of tests/harness/host_program.py, where the third host sends 200 Mbit/s."""
    if reason := why_not():
        pytest.skip(reason)
    with WarmHosts(3) as three:
        three.limit_host(2, 200)
        three.ranks(["tests.harness.host_program", program, str(folder)], [0, 1, 2])
        three.finish(180)
    found = [torch.load(folder / f"rows{rank}", weights_only=False) for rank in range(3)]
    assert found == [found[0]] * 3
    return {(row.section, row.check): row for row in found[0]}


def test_a_slow_host_is_named(tmp_path: Path) -> None:
    rows = on_three_hosts("acceptance", tmp_path)
    slow = rows["links", "slowest pair between hosts"]
    assert slow.judged == "broken"
    assert slow.note.startswith("rank 2 on ")
    assert rows["collectives", "all_gather, all 3 ranks"].measured


def test_a_job_on_three_hosts_goes_on_without_one(tmp_path: Path) -> None:
    assert on_three_hosts("recovery", tmp_path)["recovery", "pause when a rank is killed"].judged == "good"
