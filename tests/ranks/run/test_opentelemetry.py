"""Spans of steps, as a collector of OpenTelemetry gets them over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from hdpcomm.cli.main import main
from hdpcomm.run.trackers import open_trackers, tracker_names

OPTIONS = ["--context", "300", "--tokens-per-step", "900", "--hidden", "16", "--layers", "1", "--ranks", "2"]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Resources with their spans, as they come."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            got.extend(request.resource_spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    yield got
    server.shutdown()
    server.server_close()


def attributes(pairs: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in pairs}


def test_a_collector_gets_a_span_for_each_step(collector: list[Any], tmp_path: Path) -> None:
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"the {i}th text; " * 30)
    given = ["--data", *(str(tmp_path / f"{i}.txt") for i in range(4)), *OPTIONS, "--steps", "3"]
    out = tmp_path / "run"
    assert main(["train", *given, "--eval-fraction", "0.3", "--out", str(out), "--trackers", "opentelemetry"]) == 0
    about = attributes(collector[0].resource.attributes)
    assert (about["service.name"], about["hdpcomm.run"], about["hdpcomm.steps"]) == ("hdpcomm", "run", "3")
    spans = [span for each in collector for scope in each.scope_spans for span in scope.spans]
    steps = [span for span in spans if span.name == "step"]
    assert [attributes(span.attributes)["hdpcomm.step"] for span in steps] == [0, 1, 2]
    for span in steps:
        figures = attributes(span.attributes)
        assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(1e9 * figures["hdpcomm.seconds"])
        assert {"hdpcomm.loss", "hdpcomm.tokens", "hdpcomm.idle_s", "hdpcomm.policy"} <= figures.keys()
        assert abs(span.end_time_unix_nano / 1e9 - time.time()) < 100
    [evaluated] = [attributes(span.attributes) for span in spans if span.name == "evaluation"]
    assert evaluated["hdpcomm.held_out_loss"] > 0


def test_it_is_left_out_where_nobody_takes_spans(monkeypatch: pytest.MonkeyPatch, collector: list[Any]) -> None:
    assert "opentelemetry" in tracker_names("auto")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    assert "opentelemetry" not in tracker_names("auto")
    assert tracker_names("opentelemetry") == ["opentelemetry"]
    assert not collector


def test_a_collector_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    [tracker] = open_trackers("opentelemetry", tmp_path, {})
    tracker.write(0, {"balanced/loss": 1.0, "balanced/seconds": 0.1})
    tracker.close()
    assert time.monotonic() - started < 60
