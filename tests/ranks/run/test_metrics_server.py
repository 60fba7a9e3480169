"""``--metrics-port``: a run's figures as Prometheus reads them, and the dashboard and alerts of examples/monitoring."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from hdpcomm.errors import InvalidUsage
from hdpcomm.run import RunFiles
from hdpcomm.run.trackers import MetricsServer

MONITORING = Path(__file__).resolve().parents[3] / "examples" / "monitoring"
SMALL = ["--layers", "1", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--ffn", "24", "--context", "300",
         "--tokens-per-step", "700", "--ranks", "2", "--capacity", "400"]  # fmt: skip


def got(url: str, token: str = "") -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def eventually(call: Callable[[], Any], within_s: float = 60.0) -> Any:
    """The first result that is true."""
    end = time.monotonic() + within_s
    while True:
        try:
            if found := call():
                return found
        except (OSError, urllib.error.URLError):
            pass
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.2)


def figures(text: str) -> dict[str, float]:
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer("0")
    yield made
    made.close()


def test_the_newest_figures_of_each_policy(server: MetricsServer) -> None:
    before = time.time()
    server.write(4, {"balanced/loss": 2.5, "balanced/tokens": 100.0, "static/loss": 3.0})
    server.write(5, {"balanced/loss": 2.25, "balanced/tokens": 50.0, "balanced/odd name": 1.0})
    found = figures(got(server.url))
    assert found['hdpcomm_loss{policy="balanced"}'] == 2.25
    assert found['hdpcomm_loss{policy="static"}'] == 3.0
    assert found['hdpcomm_step{policy="balanced"}'] == 5
    assert found['hdpcomm_odd_name{policy="balanced"}'] == 1.0
    assert found['hdpcomm_tokens{policy="balanced"}'] == 50
    assert found['hdpcomm_trained_tokens_total{policy="balanced"}'] == 150
    assert before - 1 <= found["hdpcomm_last_step_timestamp_seconds"] <= time.time() + 1


def test_one_that_sends_nothing_keeps_nobody_out(server: MetricsServer) -> None:
    host, _, port = server.url.split("/")[2].partition(":")
    with socket.create_connection((host, int(port))):
        assert "hdpcomm_last_step" in got(server.url)


def test_other_hosts_send_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidUsage, match="set HDPCOMM_METRICS_TOKEN"):
        MetricsServer("0.0.0.0:0")
    monkeypatch.setenv("HDPCOMM_METRICS_TOKEN", "a token of letters")
    made = MetricsServer("0.0.0.0:0")
    try:
        url = made.url.replace("0.0.0.0", "127.0.0.1")
        for token in ("", "another"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                got(url, token)
        assert "hdpcomm_last_step" in got(url, "a token of letters")
    finally:
        made.close()


@pytest.mark.parametrize("address", ["", "x", "70000", "nowhere:80", "127.0.0.1:x", "-1"])
def test_addresses_that_cannot_be(address: str) -> None:
    with pytest.raises(InvalidUsage, match="expected a free PORT"):
        MetricsServer(address)


def test_a_port_that_is_taken(server: MetricsServer) -> None:
    with pytest.raises(InvalidUsage, match="in use"):
        MetricsServer(server.url.split(":")[2].split("/")[0])


def test_what_is_refused_leaves_nothing(server: MetricsServer, tmp_path: Path) -> None:
    """No port where the folder is in use, no folder where the port is; and a run without a step gives back both."""
    taken, port = server.url.split(":")[2].split("/")[0], str(free_port())
    with pytest.raises(InvalidUsage, match="in use"):
        RunFiles(tmp_path / "new", metrics=taken)
    assert not (tmp_path / "new").exists()
    with RunFiles(tmp_path / "run", metrics=port):
        with pytest.raises(InvalidUsage, match="in use by another run"):
            RunFiles(tmp_path / "run", metrics="0")
        assert [each.name for each in threading.enumerate()].count("hdpcomm-metrics") == 2
    MetricsServer(port).close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a run that goes on."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "data").mkdir()
    for i in range(10):
        (folder / "data" / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    address = f"127.0.0.1:{free_port()}"
    options = ["--data", str(folder / "data"), "--steps", "100000", "--metrics-port", address, "--eval-every", "5"]
    options += ["--eval-data", str(folder / "data"), "--out", str(folder / "out"), "--trackers", "none"]
    command = [sys.executable, "-m", "hdpcomm.cli.main", "train", *SMALL, *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        eventually(lambda: "hdpcomm_held_out_loss" in got(f"http://{address}/metrics"))
        yield address
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert f"metrics for Prometheus: http://{address}/metrics" in (folder / "log").read_text()
    assert "metrics_port" not in (folder / "out" / "config.yaml").read_text()


def queries() -> list[str]:
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_a_run_serves_all_that_the_dashboard_and_the_alerts_ask_for(run: str) -> None:
    served = {name.partition("{")[0] for name in figures(got(f"http://{run}/metrics"))}
    asked = queries() + re.findall(r"expr: (.*)", (MONITORING / "alerts.yml").read_text())
    names = {name for query in asked for name in re.findall(r"hdpcomm_\w+", query)}
    assert len(names) > 15
    assert names <= served
    first = figures(got(f"http://{run}/metrics"))['hdpcomm_step{policy="balanced"}']
    eventually(lambda: figures(got(f"http://{run}/metrics"))['hdpcomm_step{policy="balanced"}'] > first)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed")
def test_prometheus_itself(run: str, tmp_path: Path) -> None:
    """Scrapes, and every query of the dashboard answers; its rules and its configuration are sound."""
    for name in ("alerts.yml", "prometheus.yml"):
        (tmp_path / name).write_text((MONITORING / name).read_text().replace("127.0.0.1:9400", run).replace("5s", "1s"))
    subprocess.run(["promtool", "check", "config", str(tmp_path / "prometheus.yml")], check=True, timeout=60)
    text = got(f"http://{run}/metrics")
    subprocess.run(["promtool", "check", "metrics"], input=text, text=True, check=False, timeout=60)
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(["prometheus", *options, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:

        def answer(query: str) -> list[Any]:
            asked = urllib.parse.urlencode({"query": query})
            found = json.loads(got(f"http://{address}/api/v1/query?{asked}"))
            assert found["status"] == "success", found
            rows: list[Any] = found["data"]["result"]
            return rows

        for query in queries():
            rows = eventually(lambda query=query: answer(query))
            assert all(float(row["value"][1]) >= 0 for row in rows), query
        assert json.loads(got(f"http://{address}/api/v1/rules"))["data"]["groups"][0]["name"] == "hdpcomm"
    finally:
        process.terminate()
        process.wait(60)
