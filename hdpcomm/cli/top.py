"""``hdpcomm top``: a training run in the terminal, while it goes on."""

from __future__ import annotations

import argparse
import os
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdpcomm.arguments import size_text
from hdpcomm.cli.output import new_table, stdout_console
from hdpcomm.errors import InvalidUsage
from hdpcomm.options import positive

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["add_parser"]

_KEPT = 60  # steps of a curve
_EVENTS = 6
_BLOCKS = "▁▂▃▄▅▆▇█"
_SHARES = {"compute": "green", "exposed": "red", "stall": "magenta", "idle": "yellow", "optimizer": "blue"}
_SILENCE_S = 5.0  # of an endpoint

Row = Mapping[str, Any]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "top",
        help="watch a training run in the terminal",
        description="Shows the last steps of a run as it goes on: loss, tokens a second, where the ranks' time goes, "
        "lengths, memory, the plan against the clock, and what happened. RUN may be on a file system of another host; "
        "URL is what --metrics-port serves (its token in HDPCOMM_METRICS_TOKEN). Without a terminal it prints once.",
    )
    parser.add_argument("run", metavar="RUN|URL", help="folder of hdpcomm train --out, or http://HOST:PORT/metrics")
    parser.add_argument("--every", type=positive, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print what there is, and end")
    parser.set_defaults(func=_top)


def _top(parsed: argparse.Namespace) -> int:
    from rich.live import Live

    remote = parsed.run.startswith(("http://", "https://"))
    source: _Folder | _Endpoint = _Endpoint(parsed.run) if remote else _Folder(Path(parsed.run))
    console = stdout_console()
    source.look()
    if parsed.once or not console.is_terminal:
        console.print(_page(parsed.run, source))
        return 0
    with (
        Live(_page(parsed.run, source), console=console, screen=True, auto_refresh=False) as live,
        suppress(KeyboardInterrupt),
    ):
        while True:
            live.update(_page(parsed.run, source), refresh=True)
            time.sleep(parsed.every)
            source.look()
    return 0


class _Source:
    """Last steps by policy, and what happened.

    Attributes:
        wrong: why the last look found nothing new.
    """

    def __init__(self) -> None:
        self.steps: dict[str, deque[Row]] = {}
        self.events: deque[Row] = deque(maxlen=_EVENTS)
        self.held_out: dict[str, float] = {}
        self.total: int | None = None
        self.wrong = ""

    def _add(self, row: Row) -> None:
        if not {"policy", "loss", "tokens", "seconds"} <= row.keys():
            return
        rows = self.steps.setdefault(str(row["policy"]), deque(maxlen=_KEPT))
        while rows and rows[-1]["step"] >= row["step"]:  # of a run that was resumed
            rows.pop()
        rows.append(row)


class _Folder(_Source):
    """Reads what a run has written since the last look."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self._run, self._read = run, dict[str, int]()
        if not run.is_dir():
            raise InvalidUsage(f"{run}: no such folder; give that of hdpcomm train --out, or the URL of --metrics-port")

    def look(self) -> None:
        for row in self._lines("metrics.jsonl"):
            self._add(row)
        for row in self._lines("evaluations.jsonl"):
            self.held_out[str(row.get("policy"))] = row.get("loss", 0.0)
        told = ("step", "evaluation", None)  # the first two are shown as figures
        self.events.extend(row for row in self._lines("events.jsonl") if row.get("event") not in told)
        if self.total is None and (config := self._run / "config.yaml").is_file():
            import yaml

            self.total = yaml.safe_load(config.read_text()).get("steps")
        self.wrong = "" if self.steps else "no step was done yet"

    def _lines(self, name: str) -> list[Row]:
        """The whole lines that have come since the last call."""
        from hdpcomm.run.metrics_log import row_of

        path = self._run / name
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(self._read.get(name, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[name] = self._read.get(name, 0) + len(whole)
        return [row for line in whole.splitlines() if (row := row_of(line)) is not None]


class _Endpoint(_Source):
    """Asks the endpoint of ``--metrics-port``."""

    def __init__(self, url: str) -> None:
        super().__init__()
        try:
            from prometheus_client.parser import text_string_to_metric_families as parse
        except ImportError:
            raise InvalidUsage("an endpoint is read by prometheus_client; pip install 'hdpcomm[metrics]'") from None
        token = os.environ.get("HDPCOMM_METRICS_TOKEN", "")
        self._request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        self._parse = parse

    def look(self) -> None:
        rows: dict[str, dict[str, Any]] = {}
        try:
            with urllib.request.urlopen(self._request, timeout=_SILENCE_S) as answer:
                text = answer.read(1 << 22).decode()
            for family in self._parse(text):
                for sample in family.samples:
                    if "policy" in sample.labels and sample.name.startswith("hdpcomm_"):
                        policy = sample.labels["policy"]
                        rows.setdefault(policy, {"policy": policy})[sample.name.removeprefix("hdpcomm_")] = sample.value
        except urllib.error.HTTPError as error:
            raise InvalidUsage(f"{self._request.full_url}: {error}; set HDPCOMM_METRICS_TOKEN as for the run") from None
        except (OSError, ValueError) as error:
            self.wrong = f"no answer ({error})"
            return
        for row in rows.values():
            if "step" in row:
                self._add(row | {"step": int(row["step"])})
            if "held_out_loss" in row:
                self.held_out[row["policy"]] = row["held_out_loss"]
        self.wrong = "" if self.steps else "no step was done yet"


def _page(name: str, source: _Source) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(f"{name}  {time.strftime('%H:%M:%S')}", style="bold")]
    parts += [Text(source.wrong)] if source.wrong else []
    for policy, rows in source.steps.items():
        parts += [_figures(policy, rows, source), _time_bar(rows[-1])]
    if source.events:
        table = Table.grid(padding=(0, 2))
        for row in source.events:
            table.add_row(time.strftime("%H:%M:%S", time.localtime(row.get("time", 0))), row["event"], _what(row))
        parts.append(table)
    return Group(*parts)


def _what(row: Row) -> str:
    if "told" in row:
        return str(row["told"])
    facts = {name: value for name, value in row.items() if name not in ("time", "event") and value not in ("", None)}
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items())


def _figures(policy: str, rows: deque[Row], source: _Source) -> Any:
    last, recent = rows[-1], [*rows][-10:]
    seconds, predicted = (sum(float(row.get(name, 0.0)) for row in recent) for name in ("measured_s", "predicted_s"))
    rate = sum(float(row["tokens"]) for row in recent) / max(1e-9, sum(float(row["seconds"]) for row in recent))
    of = "" if source.total is None else f" of {source.total}"
    left = "" if source.total is None else _left(recent, source.total - last["step"] - 1)
    table = new_table(f"{policy}: step {last['step'] + 1}{of}{left}", "", "", f"last {len(rows)} steps", left=("",))
    losses = f"{last['loss']:.4g}" + (f" (held out {source.held_out[policy]:.4g})" if policy in source.held_out else "")
    table.add_row("loss", losses, _curve([float(row["loss"]) for row in rows]))
    speeds = [float(row["tokens"]) / max(1e-9, float(row["seconds"])) for row in rows]
    table.add_row("tokens/s", f"{rate:,.0f}", _curve(speeds))
    table.add_row("tokens a step", f"{last['tokens']:,.0f}", _curve([float(row["tokens"]) for row in rows]))
    table.add_row("gradient norm", f"{last.get('grad_norm', 0):.3g}", _curve([row.get("grad_norm", 0) for row in rows]))
    if "longest" in last:
        lengths = f"{last['longest']:,.0f} on {last.get('longest_ranks', 0):.0f} of {last.get('ranks', 0):.0f} ranks"
        table.add_row("longest sequence", lengths, _curve([float(row.get("longest", 0)) for row in rows]))
    if predicted and seconds:
        table.add_row("measured / predicted", f"{seconds / predicted:.2f}", "")
    if last.get("slowest_speed"):
        table.add_row("slowest rank", f"{last['slowest_rank']:.0f} at {last['slowest_speed']:.0%} of the others", "")
    table.add_row("memory of a rank", size_text(int(last.get("device_bytes", 0))), "")
    return table


def _left(recent: list[Row], steps: int) -> str:
    seconds = steps * sum(float(row["seconds"]) for row in recent) / len(recent)
    return "" if steps <= 0 else f", {seconds / 3600:.1f} h left" if seconds > 3600 else f", {seconds:.0f} s left"


def _time_bar(row: Row) -> Any:
    """Where the ranks' time of a step went, as a bar."""
    from rich.text import Text

    bar, width = Text("  "), 30
    total = sum(float(row.get(f"{name}_s", 0.0)) for name in _SHARES) or 1.0
    for name, color in _SHARES.items():
        bar.append("█" * round(width * float(row.get(f"{name}_s", 0.0)) / total), style=color)
    for name, color in _SHARES.items():
        bar.append(f"  {name} {float(row.get(f'{name}_s', 0.0)) / total:.0%}", style=color)
    return bar.append("\n")


def _curve(values: list[float]) -> str:
    low, high = min(values), max(values)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(top * (each - low) / (high - low))] if high > low else _BLOCKS[0] for each in values)
