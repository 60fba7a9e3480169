"""Strangers at the job's store and at its frames: without the secret none joins, reads, or ends the job."""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hdpcomm as hdp
from hdpcomm.comm.bootstrap import Joining
from hdpcomm.comm.secret import Secret, job_secret, new_secret
from hdpcomm.comm.torch_store import SignedStore, connect_store, open_file_store, serve_store
from hdpcomm.testing import RankPool, spawn
from tests.harness.hosts import why_not
from tests.harness.warm_python import Python

OURS, THEIRS = Secret("the secret of this job"), Secret("another job's secret")
LONG_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> set[str]:
    """The addresses at which this host listens on the port, as the kernel writes them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.add(local.rpartition(":")[0])
    return found


def where_it_listens() -> tuple[set[str], list[str], list[str]]:
    with hdp.init(timeout=20) as comm:
        comm.barrier()
        command = Path("/proc/self/cmdline").read_bytes().decode().split("\0")
        return listening(int(os.environ["MASTER_PORT"])), command, [os.environ["HDPCOMM_SECRET"]]


_AS_NOBODY = """
import os, sys
os.setgid(65534); os.setuid(65534)
try: open(sys.argv[1], "r+b")
except OSError as error: print(type(error).__name__)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_does_not_open_a_launchers_store() -> None:
    with RankPool(1) as pool:
        command = [sys.executable, "-S", "-c", _AS_NOBODY, pool._store_path]
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert told.strip() == "PermissionError"


def test_a_launcher_that_has_ended_is_told() -> None:
    with pytest.raises(hdp.PeerLost, match="the launcher of rank 3 has ended"):
        open_file_store("/proc/1/fd/999999", 3)


def test_a_launcher_listens_on_loopback_alone_and_shows_no_secret(ranks: Any) -> None:
    """What listens there is for torch's own store; ours has no port."""
    for addresses, command, (secret,) in ranks(2, where_it_listens):
        assert addresses == {"0100007F"}
        assert len(secret) == 64
        assert not any(secret in word for word in command)


def test_rank_0_listens_where_it_was_told_alone() -> None:
    port = free_port()
    server = serve_store("127.0.0.1", port, seconds=5)
    assert listening(port) == {"0100007F"}
    del server
    assert not listening(port)


_JOIN = """
import sys, hdpcomm as hdp
try:
    with hdp.init(timeout=float(sys.argv[1])) as comm: comm.barrier()
    print("joined")
except hdp.Error as error:
    print(type(error).__name__, error)
"""


def test_ranks_join_by_a_secret_from_anywhere_and_others_do_not(tmp_path: Path) -> None:
    """A job without a launcher of ours. The stranger comes as rank 1, too."""
    file = tmp_path / "secret"
    file.write_text((secret := new_secret()) + "\n")
    file.chmod(0o600)
    port = free_port()
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def start(variables: dict[str, str]) -> Python:
        return Python(["-c", _JOIN, "40"], env=common | variables)

    processes = [start({"RANK": "0", "HDPCOMM_SECRET": secret})]
    stranger = SignedStore(connect_store("127.0.0.1", port, 1, seconds=40), THEIRS, 1, seconds=40)
    until = time.monotonic() + LONG_S
    while "0" not in (shown := stranger.shown_secrets(["0"])):
        assert time.monotonic() < until
    assert not shown["0"]
    for key in ("hdpcomm/inits/0", "hdpcomm/1/host/0"):
        assert not stranger.check([key])
    processes.append(start({"RANK": "1", "HDPCOMM_SECRET_FILE": str(file)}))
    assert [process.communicate(timeout=LONG_S)[0].strip() for process in processes] == ["joined"] * 2


# --- without any configuration


def torchruns(port: int) -> dict[str, str]:
    """The variables of a rank of torchrun, whose store is at that port."""
    return {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


_AS_ANOTHER_USER = """
import os, sys, torch, hdpcomm as hdp
import hdpcomm.comm.bootstrap, hdpcomm.comm.connections, concurrent.futures.thread, encodings.idna
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    with hdp.init(sys.argv[1], timeout=float(sys.argv[2])) as comm:
        x = torch.full((4,), 1e30); comm.all_reduce(x); print("joined", x)
except hdp.Error as error:
    print(type(error).__name__, error)
"""

_SUM = """
import sys, torch, hdpcomm as hdp
with hdp.init(sys.argv[1], timeout=60) as comm:
    x = torch.ones(4); comm.all_reduce(x); print(x.tolist())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("transport_name", ["shm", "tcp", "auto"])
@pytest.mark.parametrize("started", ["by hand", "by torchrun", "by srun"])
def test_another_user_does_not_join_a_job_without_configuration(transport_name: str, started: str) -> None:
    """He comes as rank 1, first, and finds nothing; then this user's own rank 1 joins, which was told nothing."""
    port = free_port()
    server = None
    common = {name: value for name, value in os.environ.items() if not name.startswith("HDPCOMM_SECRET")}
    if started == "by torchrun":
        server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        common |= torchruns(port) | {"WORLD_SIZE": "2"}
    elif started == "by hand":
        common |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    else:
        common |= {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2"}
        common |= {"SLURM_STEP_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def rank(number: int) -> dict[str, str]:
        return {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0"} if started == "by srun" else {"RANK": str(number)}

    theirs = {"HDPCOMM_SECRET": "what a stranger may think of"}
    first = Python(["-c", _SUM, transport_name], env=common | rank(0))
    stranger = Python(["-c", _AS_ANOTHER_USER, transport_name, "3"], env=common | rank(1) | theirs)
    told = stranger.communicate(timeout=LONG_S)[0]
    assert "CommTimeout" in told
    assert "ranks with another secret: 0: set HDPCOMM_SECRET" in told
    second = Python(["-c", _SUM, transport_name], env=common | rank(1))
    for each in (first, second):
        assert each.communicate(timeout=LONG_S)[0].strip() == "[2.0, 2.0, 2.0, 2.0]"
    del server


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No secret, and an own home; gives the folder where the secret of this user will be."""
    for name in ("HDPCOMM_SECRET", "HDPCOMM_SECRET_FILE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".local" / "state" / "hdpcomm"


def test_a_users_own_secret_is_made_once(nothing_set: Path) -> None:
    """Also where ranks come at once; nobody else may read it, and nothing is left beside it."""
    with ThreadPoolExecutor(8) as pool:
        macs = {secret.sign("a") for secret in pool.map(lambda _: job_secret(), range(64))}
    assert len(macs) == 1
    assert [path.name for path in nothing_set.iterdir()] == ["secret"]
    assert (nothing_set / "secret").stat().st_mode & 0o777 == 0o600
    assert nothing_set.stat().st_mode & 0o777 == 0o700
    assert job_secret().sign("a") in macs


def test_an_explicit_secret_wins(nothing_set: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = job_secret().sign("a")
    assert (nothing_set / "secret").exists()
    monkeypatch.setenv("HDPCOMM_SECRET", "x" * 20)
    assert job_secret().sign("a") == Secret("x" * 20).sign("a") != own


def test_where_the_file_may_be(nothing_set: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_STATE_HOME before the home, and a folder of the host's temporary one where there is no home."""
    state, temporary = tmp_path / "state", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    first = job_secret().sign("a")
    assert (state / "hdpcomm" / "secret").is_file()
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # as if it were not set, says its specification
    assert job_secret().sign("a") != first
    assert (nothing_set / "secret").is_file()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("HOME", "/proc/none")
    third = job_secret().sign("a")
    assert (temporary / f"hdpcomm-{os.geteuid()}" / "secret").is_file()
    (temporary / f"hdpcomm-{os.geteuid()}").chmod(0o777)  # as if another user had made it first
    with pytest.raises(
        hdp.InvalidUsage, match=r"no file for this user's secret .* others may write there.*set HDPCOMM_"
    ):
        job_secret()
    (temporary / f"hdpcomm-{os.geteuid()}").chmod(0o700)
    assert job_secret().sign("a") == third


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [("x" * 20, 0o644, "may be read by others"), ("x" * 3, 0o600, "has 3 characters"), ("", 0o600, "has 0 characters")],
)
def test_a_users_file_that_is_no_secret_is_refused(nothing_set: Path, content: str, mode: int, words: str) -> None:
    nothing_set.mkdir(parents=True)
    file_of(nothing_set, content.encode(), mode)
    with pytest.raises(hdp.InvalidUsage, match=words):
        job_secret()


@pytest.mark.skipif(bool(reason := why_not()), reason=reason)
def test_another_network_namespace_reaches_nothing() -> None:
    """It has its own loopback."""
    port = free_port()
    server = serve_store("127.0.0.1", port, seconds=5)
    program = (
        "import socket, sys\n"
        "try: socket.socket().connect(('127.0.0.1', int(sys.argv[1]))); print('in')\n"
        "except OSError: print('out')\n"
    )
    command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, "-S", "-c", program]
    told = subprocess.run([*command, str(port)], capture_output=True, text=True, timeout=30, check=True).stdout
    assert told.split() == ["out"]
    del server


# --- the secret


def test_ranks_that_wait_hear_of_another_secret() -> None:
    inner = dist.HashStore()
    store = signed(inner)
    SignedStore(inner, THEIRS, 1, seconds=5).show_secret()
    joining = Joining(store, "job/1", 0, 2, 0.2, time.monotonic() + 0.2)
    with pytest.raises(hdp.CommTimeout, match=r"for: 1 .*; ranks with another secret: 1: set HDPCOMM_SECRET"):
        joining.from_all("host", "here")


def test_a_secret_has_no_text_of_its_own() -> None:
    assert "secret of" not in f"{OURS} {OURS!r} {[OURS]}"


def test_purposes_and_parts_are_kept_apart() -> None:
    macs = {
        OURS.sign("a", b"b", b"c"),
        OURS.sign("a", b"bc"),
        OURS.sign("a", b"bc", b""),
        OURS.sign("ab", b"c"),
        THEIRS.sign("a", b"bc"),
    }
    assert len(macs) == 5
    assert OURS.verify(OURS.sign("a", b"bc"), "a", b"bc")
    assert not OURS.verify(b"", "a", b"bc")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda _: {"HDPCOMM_SECRET": "short"}, "HDPCOMM_SECRET has 5 characters; give at least 16"),
        (lambda _: {"HDPCOMM_SECRET": "x" * 20, "HDPCOMM_SECRET_FILE": "y"}, "are both set; set one"),
        (lambda p: {"HDPCOMM_SECRET_FILE": str(p / "none")}, "cannot be read: .*No such file"),
        (lambda p: {"HDPCOMM_SECRET_FILE": str(p)}, "is no regular file|cannot be read"),
        (lambda p: {"HDPCOMM_SECRET_FILE": file_of(p, b"x" * 20, 0o644)}, "may be read by others.*mode 644.*chmod 600"),
        (lambda p: {"HDPCOMM_SECRET_FILE": file_of(p, b"x" * 3, 0o600)}, "has 3 characters"),
        (lambda p: {"HDPCOMM_SECRET_FILE": file_of(p, b"", 0o600)}, "has 0 characters"),
        (lambda p: {"HDPCOMM_SECRET_FILE": file_of(p, b"\xff" * 20, 0o600)}, "cannot be read"),
        (lambda p: {"HDPCOMM_SECRET_FILE": pipe_of(p)}, "is no regular file"),
    ],
)
def test_a_bad_secret_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], dict[str, str]], words: str
) -> None:
    monkeypatch.delenv("HDPCOMM_SECRET", raising=False)
    for name, value in prepare(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(hdp.InvalidUsage, match=words) as info:
        job_secret()
    assert "xxx" not in str(info.value)


def file_of(folder: Path, content: bytes, mode: int) -> str:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def pipe_of(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


def test_reports_hide_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    from hdpcomm.cli.doctor import environment, settings_lines

    monkeypatch.setenv("HDPCOMM_SECRET", "the secret of this job")
    rows = environment()
    assert "the secret of" not in json.dumps(rows) + "".join(settings_lines(rows, [], everything=True))
    assert "HDPCOMM_SECRET=(hidden)" in "".join(settings_lines(rows, [], everything=False))


# --- stores of torch


def signed(inner: Any, rank: int = 0, seconds: float = 5.0) -> SignedStore:
    return SignedStore(inner, OURS, rank, seconds=seconds)


def test_signed_values() -> None:
    inner = dist.HashStore()
    store = signed(inner)
    store.set("a", "1")
    store.set("b", b"\0\xff")
    assert signed(inner).multi_get(["a", "b"]) == [b"1", b"\0\xff"]
    assert not inner.check(["a"])  # nobody guesses the name
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    assert store.compare_set("c", b"", b"x") == b"x"
    assert store.compare_set("c", b"x", b"y") == b"y"
    assert store.compare_set("c", b"x", b"z") == b"y"
    assert store.delete_key("a")
    assert not store.check(["a"])
    with pytest.raises(hdp.CommTimeout, match="waited in vain for a in"):
        signed(inner, seconds=0.05).get("a")


def test_a_store_that_has_gone_is_told_in_a_sentence() -> None:
    """torchrun's agent has ended."""

    class Gone(dist.HashStore):  # type: ignore[misc, name-defined]
        def _raise(self, *_: object) -> None:
            raise dist.DistNetworkError("Broken pipe")

        set = check = add = _raise

    store = signed(Gone())
    for call in (lambda: store.set("b", "1"), lambda: store.check(["a"]), lambda: store.add("n", 1)):
        with pytest.raises(hdp.PeerLost, match=r"rank 0 lost the job's store .*start the job again"):
            call()


def test_a_forged_value_is_as_if_it_were_not_there() -> None:
    inner = dist.HashStore()
    store = signed(inner)
    store.set("real", b"1")
    for forged in (b"", b"1", os.urandom(80), inner.get(store._name("real"))):  # the last: of another key
        inner.set(store._name("a"), forged)
        assert not store.check(["a"])
    with pytest.raises(hdp.CommTimeout, match="under a is not signed with the job's secret"):
        signed(inner, seconds=0.05).get("a")


def test_a_forged_report_does_not_end_the_job() -> None:
    """Under the old name, and under the true one."""
    inner = dist.HashStore()
    report = json.dumps({"peer": 1, "by": 1, "text": "rank 1 died"})
    store = signed(inner)
    joining = Joining(store, "hdpcomm/1", 0, 2, LONG_S, time.monotonic() + LONG_S)
    for name in ("hdpcomm/1/lost", store._name("hdpcomm/1/lost")):
        inner.set(name, report)
        joining.check_peers()
    store.set("hdpcomm/1/lost", report)
    with pytest.raises(hdp.PeerLost, match="rank 1 died"):
        joining.check_peers()


def stuck(*_: Any) -> None:
    time.sleep(1.0)


def test_a_store_that_does_not_answer_keeps_no_rank_beyond_its_deadline() -> None:
    class Stopped(dist.HashStore):  # type: ignore[misc, name-defined]
        check = set = add = stuck

    store = signed(Stopped(), seconds=LONG_S)
    store.deadline = time.monotonic() + 0.1
    with pytest.raises(hdp.CommTimeout, match="got no answer of the job's store in time"):
        store.check(["a"])


# --- who dies or gives up before all are there


def dies_at_once(folder: str) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    with pytest.raises(hdp.PeerLost, match=r"rank 1 .*(ended by signal SIGKILL|died).* while the ranks joined") as info:
        hdp.init(timeout=LONG_S)
    assert (info.value.peer, info.value.op) == (1, "init")
    Path(folder, os.environ["RANK"]).touch()


def test_a_rank_that_dies_before_it_joins_is_named(tmp_path: Path) -> None:
    with pytest.raises(hdp.PeerLost, match="rank 1 ended by signal SIGKILL"):
        spawn(dies_at_once, 3, str(tmp_path), timeout=LONG_S)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "2"}


def test_the_error_of_the_rank_that_serves_the_store_reaches_the_others() -> None:
    """It may end its process with the error, and the store with it."""
    program = """
import sys, hdpcomm as hdp
from hdpcomm.comm import bootstrap
def fails(*_): raise KeyError("no such shard")
if sys.argv[1] == "0": bootstrap._JOINS = {"shm": fails}
hdp.init("shm", timeout=60)
"""
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [Python(["-c", program, str(rank)], env=common | {"RANK": str(rank)}) for rank in range(2)]
    errors = [process.communicate(timeout=LONG_S)[1] for process in processes]
    assert "KeyError: 'no such shard'" in errors[0]
    assert "PeerLost: rank 0 gave up" in errors[1]
    assert "no such shard" in errors[1]


@pytest.mark.parametrize("agent", [False, True], ids=["ours", "torchrun's"])
def test_ctrl_c_while_the_store_is_not_reached(agent: bool) -> None:
    """Something listens there and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        program = (
            "import os, signal, hdpcomm as hdp\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "try: hdp.init(timeout=50)\n"
            "except KeyboardInterrupt: print('interrupted', flush=True); os._exit(0)\n"
        )
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables["TORCHELASTIC_USE_AGENT_STORE"] = str(agent)
        rank = Python(["-c", program], env=os.environ | variables)
        silent.settimeout(120)
        with silent.accept()[0]:
            time.sleep(0.2)
            rank.send_signal(signal.SIGINT)
            assert rank.communicate(timeout=40)[0] == "interrupted\n"


@pytest.mark.parametrize("agent", [False, True], ids=["ours", "torchrun's"])
def test_the_deadline_holds_while_the_store_is_not_reached(agent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        variables["MASTER_PORT"] = str(silent.getsockname()[1])
        variables["TORCHELASTIC_USE_AGENT_STORE"] = str(agent)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(hdp.CommTimeout, match=r"did not reach the job's store at 127\.0\.0\.1:\d+ within 0\.4 s"):
            hdp.init(timeout=0.4)


def test_torchs_own_store_is_made_when_a_rank_asks_for_it(ranks: Any) -> None:
    ranks(2, uses_torchs_store)


def uses_torchs_store() -> None:
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=20))
    store.set(f"who/{os.environ['RANK']}", "here")
    assert store.multi_get(["who/0", "who/1"]) == [b"here"] * 2
