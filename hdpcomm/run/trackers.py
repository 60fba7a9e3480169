"""Who is told the figures of steps: TensorBoard, Weights & Biases and OpenTelemetry, where they are installed, and
Prometheus.

Not by accelerate's trackers, which join torch.distributed wherever RANK is set, nor by transformers' callbacks, which
need the state of its Trainer.
"""

from __future__ import annotations

import hmac
import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, make_server

from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG

__all__ = ["TRACKERS", "MetricsServer", "Tracker", "open_trackers", "tracker_names"]


class Tracker(Protocol):
    """Takes the figures of steps."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a step, by name."""

    def close(self) -> None:
        """Writes what is left."""


class _TensorBoard:
    def __init__(self, out: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(out / "tensorboard"), flush_secs=10)
        self._writer.add_text("config", "    " + str(config).replace(", ", "\n    "))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Offline unless ``WANDB_MODE`` says otherwise: nothing leaves the machine until ``wandb sync`` is called."""

    def __init__(self, out: Path, config: dict[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(project="hdpcomm", name=out.name, dir=str(out), mode=mode, config=config)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class _OpenTelemetry:
    """A span for each step and evaluation, with its figures as attributes: by the provider of the program (as
    ``opentelemetry-instrument`` sets one), or else to ``OTEL_EXPORTER_OTLP_ENDPOINT``."""

    def __init__(self, out: Path, config: dict[str, Any]) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        provider: Any = trace.get_tracer_provider()
        self._own: Any = None
        if not isinstance(provider, TracerProvider):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            facts = {"service.name": "hdpcomm", "hdpcomm.run": out.name}
            facts |= {f"hdpcomm.{name}": str(value) for name, value in config.items()}
            self._own = provider = TracerProvider(resource=Resource.create(facts))
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = provider.get_tracer("hdpcomm")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        policy = next(iter(values)).partition("/")[0]
        figures = {name.partition("/")[2]: value for name, value in values.items()}
        end, seconds = time.time_ns(), figures.get("seconds", 0.0)
        about = {f"hdpcomm.{name}": value for name, value in {**figures, "step": step, "policy": policy}.items()}
        kind = "step" if "loss" in figures else "evaluation"
        self._tracer.start_span(kind, start_time=end - int(1e9 * seconds), attributes=about).end(end)

    def close(self) -> None:
        if self._own is not None:
            self._own.shutdown()


class _Quiet(WSGIRequestHandler):
    timeout = 10.0  # for one that sends no request

    def log_message(self, *_: object) -> None:
        pass


class MetricsServer:
    """The newest figures of a run in the text format of Prometheus, by its client: ``hdpcomm_<name>`` with the label
    ``policy``, the sum ``hdpcomm_trained_tokens_total``, and, by which a monitor sees that a run stands still,
    ``hdpcomm_last_step_timestamp_seconds``.

    Args:
        address: ``PORT`` on the loopback interface, or ``IP:PORT``; port 0 is a free one.

    Raises: InvalidUsage: no such address, the port is taken, the client is not installed, or other hosts can read what
        no token (``HDPCOMM_METRICS_TOKEN``, for ``Authorization: Bearer``) protects.
    """

    def __init__(self, address: str) -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            raise InvalidUsage("--metrics-port needs prometheus_client; pip install 'hdpcomm[metrics]'")
        from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app
        from prometheus_client.exposition import ThreadingWSGIServer

        host, _, port = address.rpartition(":")
        host, token, registry = host or "127.0.0.1", os.environ.get("HDPCOMM_METRICS_TOKEN", ""), CollectorRegistry()
        try:
            if not token and not ip_address(host).is_loopback:
                raise ValueError(
                    "other hosts can read it; set HDPCOMM_METRICS_TOKEN, which they must then send (Authorization: "
                    "Bearer), or give the port alone"
                )
            app = _checked(make_wsgi_app(registry), token)
            self._server = make_server(host, int(port), app, ThreadingWSGIServer, _Quiet)
        except (OSError, ValueError, OverflowError) as error:
            raise InvalidUsage(f"--metrics-port {address}: {error}; expected a free PORT, or IP:PORT") from None
        self._gauges: dict[str, Any] = {}
        self._gauge: Any = partial(Gauge, documentation="of the last step", labelnames=["policy"], registry=registry)
        self._tokens = Counter("hdpcomm_trained_tokens", "of this process", ["policy"], registry=registry)
        self._last = Gauge("hdpcomm_last_step_timestamp_seconds", "when a step was done last", registry=registry)
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        threading.Thread(target=self._server.serve_forever, name="hdpcomm-metrics", daemon=True).start()
        LOG.info(f"metrics for Prometheus: {self.url}")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a step, by ``policy/name``."""
        for key, value in {**values, **{f"{key.partition('/')[0]}/step": step for key in values}}.items():
            policy, _, name = key.partition("/")
            name = "hdpcomm_" + re.sub(r"\W", "_", name)
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name)
            self._gauges[name].labels(policy).set(value)
            if name == "hdpcomm_tokens":
                self._tokens.labels(policy).inc(value)
        self._last.set_to_current_time()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _checked(app: Any, token: str) -> Any:
    """The application for those who send the token, if there is one."""

    def checked(environ: dict[str, Any], start: Any) -> Any:
        sent = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if not token or hmac.compare_digest(sent, f"Bearer {token}".encode()):
            return app(environ, start)
        start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"send the token of HDPCOMM_METRICS_TOKEN\n"]

    return checked


TRACKERS: dict[str, Callable[[Path, dict[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard, "wandb": _Wandb, "opentelemetry": _OpenTelemetry,
}  # fmt: skip


_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def tracker_names(wanted: str) -> list[str]:
    """The trackers of a run, see :func:`open_trackers`. Raises: InvalidUsage if the one that is wanted is missing."""
    if wanted == "none":
        return []
    if wanted != "auto" and importlib.util.find_spec(wanted) is None:
        package = "'hdpcomm[opentelemetry]'" if wanted == "opentelemetry" else wanted
        raise InvalidUsage(f"--trackers {wanted} was given and {wanted} is not installed; pip install {package}")
    found = [name for name in TRACKERS if wanted == name or (wanted == "auto" and importlib.util.find_spec(name))]
    if wanted == "auto" and not any(os.environ.get(name) for name in _ENDPOINTS):
        found = [name for name in found if name != "opentelemetry"]  # nobody is there who would take the spans
    return found


def open_trackers(wanted: str, out: Path, config: dict[str, Any]) -> list[Tracker]:
    """The trackers of a run, which write below ``out``.

    Args:
        wanted: ``auto``: those that are installed; ``none``; or the name of one, which must be installed.
    """
    return [TRACKERS[name](out, config) for name in tracker_names(wanted)]
