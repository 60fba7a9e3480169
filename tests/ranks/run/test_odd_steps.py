"""Slow and wrong steps that are planted: which line names each."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.data import BatchReader, open_corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import Planner
from hdpcomm.run import RunConfig, RunFiles, Watching, loop, read_lines, train
from hdpcomm.run.watch import CAUSES, GarbageClock, StepWatch
from hdpcomm.train import StepMetrics, Trainer
from tests.harness.hosts import WarmHosts, why_not

Ranks = Callable[..., list[Any]]
CONFIG = LlamaConfig(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24)
STEP, EXTRA_S = 20, 0.8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"{i:02} of the texts; " * 12)
    return str(folder)


def busy() -> None:
    end = time.process_time() + EXTRA_S
    while time.process_time() < end:
        pass


def collect() -> None:
    """Takes about EXTRA_S of the garbage collector."""
    end = time.perf_counter() + EXTRA_S
    while time.perf_counter() < end:
        cycles = [[] for _ in range(200_000)]  # type: list[Any]
        for each in cycles:
            each.append(each)
        gc.collect()
        del each, cycles
        gc.collect()


def with_fault(fault: str, data: str, out: str) -> None:
    """A run of which step STEP is slow on rank 1, for the reason that is named."""
    now, done = [-1], [False]

    def delayed(owner: Any, name: str, delay: Callable[[], None], *, calls: int = 0) -> Any:
        real, count = getattr(owner, name), [0]

        def wrapper(self: Any, *given: Any, **more: Any) -> Any:
            count[0] += 1
            if (now[0] == STEP if not calls else count[0] == calls) and not done[0]:
                done[0] = True
                delay()
            return real(self, *given, **more)

        return mock.patch.object(owner, name, wrapper)

    def sleep() -> None:
        time.sleep(EXTRA_S)

    real_step = loop._Run._step

    def counted(self: Any, policy: str, step: int) -> None:
        now[0] = step
        real_step(self, policy, step)

    with hdp.init() as comm, ExitStack() as stack:
        stack.enter_context(mock.patch.object(loop._Run, "_step", counted))
        if comm.rank == 1:
            faults = {
                "data": (BatchReader, "part", sleep),
                "compute": (Llama, "forward", busy),
                "processor": (Llama, "forward", sleep),
                "garbage": (Llama, "forward", collect),
                "optimizer": (torch.optim.AdamW, "step", sleep),
            }
            if fault in faults:
                stack.enter_context(delayed(*faults[fault]))
            if fault == "data":
                stack.enter_context(delayed(BatchReader, "__call__", sleep))
            if fault == "plan":
                stack.enter_context(delayed(Planner, "plan", sleep, calls=STEP + 1))
        corpus = open_corpus([data], context=300, comm=comm)
        config = RunConfig(CONFIG, steps=STEP + 3, capacity=300, tokens_per_step=2000)
        if comm.rank:
            train(comm, corpus, config)
        else:
            with RunFiles(Path(out)) as files:
                train(comm, corpus, config, watching=Watching(files.step, on_event=files.event))


def events(out: Path, *kinds: str) -> list[dict[str, Any]]:
    return [row for row in read_lines(out / "events.jsonl") if row["event"] in kinds]


@pytest.mark.parametrize("fault", ["data", "plan", "compute", "processor", "garbage", "optimizer"])
def test_a_slow_step_says_why(ranks: Ranks, data: str, tmp_path: Path, fault: str) -> None:
    ranks(2, with_fault, fault, data, str(tmp_path / "run"))
    found = [row for row in events(tmp_path / "run", "slow") if row["step"] == STEP]
    assert [(row["cause"], row["rank"]) for row in found] == [(fault, 1)]
    told = found[0]["told"]
    assert told.startswith(f"step {STEP + 1} took ")
    assert CAUSES[fault].partition("{")[0] in told
    assert found[0]["seconds"] > found[0]["expected_s"] + 0.3 * EXTRA_S  # a mean over the ranks


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_slow_link_is_named(data: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--data", data, "--context", "512", "--steps", "40", "--capacity", "300", "--tokens-per-step", "2000"]
    options += ["--hidden", "32", "--trackers", "none", "--out", str(out)]
    with WarmHosts(2) as hosts:
        hosts.torchrun(["hdpcomm", "train", *options], 1)
        deadline = time.monotonic() + 60
        while not (out / "events.jsonl").exists() or len(events(out, "step")) < 15:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        hosts.limit_host(1, 4)
        hosts.finish(100)
    causes = [row["cause"] for row in events(out, "slow")]
    assert causes.count("messages") >= 3, causes  # on a busy machine processors are missing, too


def test_a_poisoned_document_is_named(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text("abcabcabc" * 25)
    noise = random.Random(0)
    (folder / "poison.txt").write_text("".join(chr(noise.randrange(35, 126)) for _ in range(225)))
    ranks(2, poisoned, str(folder), str(tmp_path / "run"))
    found = events(tmp_path / "run", "spike")
    assert found, "no spike was told"
    assert f"most of {folder / 'poison.txt'}, tokens 0 to 225" in found[0]["told"]
    ranks(2, poisoned, str(folder), str(tmp_path / "other"), True)
    [told] = [row["told"] for row in events(tmp_path / "other", "spike")][:1]
    assert told.endswith("; losses of its sequences are not to be had (this model has none)")


def no_losses(*_: Any, **__: Any) -> Any:
    raise InvalidUsage("this model has none")


def poisoned(data: str, out: str, refused: bool = False) -> None:
    with hdp.init() as comm, ExitStack() as stack:
        if refused:
            stack.enter_context(mock.patch.object(Trainer, "log_probs", no_losses))
        corpus = open_corpus([data], context=300, comm=comm)
        seed = next(seed for seed in range(100) if late(corpus, seed))
        config = RunConfig(CONFIG, steps=30, capacity=300, tokens_per_step=460, note_spikes=True, seed=seed, lr=0.02)
        if comm.rank:
            train(comm, corpus, config)
        else:
            with RunFiles(Path(out)) as files:
                train(comm, corpus, config, watching=Watching(files.step, on_event=files.event))


def late(corpus: Any, seed: int) -> bool:
    """Whether the poisoned document comes after 20 steps or more."""
    sampler, worst = corpus.sampler(tokens=460, seed=seed), len(corpus) - 1
    assert corpus.place_of(worst).endswith("poison.txt, tokens 0 to 225")
    return all(worst not in sampler.batch(step).ids for step in range(20))


def test_a_learning_rate_that_is_too_high_is_named(ranks: Ranks, data: str, tmp_path: Path) -> None:
    ranks(2, too_fast, data, str(tmp_path / "run"))
    losses = [row["loss"] for row in events(tmp_path / "run", "step")]
    found = events(tmp_path / "run", "rise")
    assert len(found) == 1, losses
    assert "the learning rate (10) is probably too high" in found[0]["told"]


def too_fast(data: str, out: str) -> None:
    with hdp.init() as comm:
        corpus = open_corpus([data], context=300, comm=comm)
        config = RunConfig(CONFIG, steps=24, capacity=300, tokens_per_step=1000, lr=10.0)
        if comm.rank:
            train(comm, corpus, config)
        else:
            with RunFiles(Path(out)) as files:
                train(comm, corpus, config, watching=Watching(files.step, on_event=files.event))


def metrics(step: int, seconds: float = 0.1, loss: float = 2.0, predicted_s: float = 0.1) -> StepMetrics:
    return StepMetrics(
        step=step, loss=loss, tokens=10, seconds=seconds, bytes_sent=0, idle_share=0.0, grad_norm=1.0, longest=1,
        longest_ranks=1, micro_batches=1, predicted_s=predicted_s, planning_s=0.0, plan_wait_s=0.0, processor_s=0.0,
    )  # fmt: skip


def test_steps_are_compared_by_their_plans() -> None:
    watch, quiet = StepWatch(lr=0.1), {name: [0.0, 0.0] for name in CAUSES}
    for step in range(20):  # some are ten times as long, and planned so
        long = 10.0 if step % 3 == 0 else 1.0
        row = quiet | {"compute": [0.09 * long, 0.05 * long]}
        assert watch.slow(metrics(step, 0.1 * long, predicted_s=0.1 * long), row) is None
    found = watch.slow(metrics(20, 0.4), quiet | {"compute": [0.09, 0.05]})
    assert found is not None
    assert (found["cause"], found["rank"], found["new"]) == ("unknown", -1, True)
    told = [watch.slow(metrics(step, 0.4), quiet | {"messages": [0.3, 0.3]}) for step in range(21, 33)]
    assert [each["new"] for each in told if each is not None] == [True] + [False] * 11
    assert all(each["told"].endswith("by hdpcomm perf or hdpcomm acceptance") for each in told if each)


def test_usual_losses_are_no_spikes() -> None:
    draws = random.Random(1)
    watch = StepWatch(lr=0.1)
    odd = [watch.odd_loss(metrics(step, loss=4.0 * 0.99**step + draws.gauss(0, 0.1))) for step in range(500)]
    assert odd == [None] * 500
    assert watch.odd_loss(metrics(500, loss=3.0)) == {"kind": "spike", "told": mock.ANY}
    flat = StepWatch(lr=0.1)
    assert all(flat.odd_loss(metrics(step, loss=1.0 + draws.gauss(0, 0.2))) is None for step in range(500))


def test_the_collector_is_timed_only_inside() -> None:
    with GarbageClock() as clock:
        gc.collect()
    took = clock.seconds
    assert took > 0
    gc.collect()
    assert clock.seconds == took
