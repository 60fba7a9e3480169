"""Stages of a pipeline: how many layers each gets (:func:`stage_layers`), and how much work that is
(:func:`stage_work`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.memory import most_in_flight
from hdpcomm.plan.specs import ModelSpec

__all__ = ["by_layer", "check_cut", "cut_layers", "mean_work", "parse_cut", "stage_layers", "stage_work"]

_TOKENS = 4096
"""Length of a typical sequence."""
_STATE_BYTES = 16
"""A parameter with its gradient, master weight and two moments."""

Figure = Callable[[int, int, int], float]
"""By the number of a stage, its first layer, and the one after its last."""


def cut_layers(layers: int, stages: int, cost: Figure, memory: Figure) -> tuple[int, ...]:
    """Layers of each stage, so that the largest cost of a stage is least, and of such cuts the largest memory. Exact.

    Raises: InvalidUsage: there are fewer layers than stages.
    """
    if not 1 <= stages <= layers:
        raise InvalidUsage(
            f"{layers} layers cannot be cut into {stages} stages, of which each has one at least; give 1 to {layers} "
            "stages"
        )
    least, _ = _least_largest(layers, stages, cost, lambda *_: True)
    limit = least * (1 + 1e-9)
    return _least_largest(layers, stages, memory, lambda *place: cost(*place) <= limit)[1]


def _least_largest(
    layers: int, stages: int, figure: Figure, allowed: Callable[[int, int, int], bool]
) -> tuple[float, tuple[int, ...]]:
    """The least possible largest figure of a stage, and layers of each stage with it."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        last = layers - (stages - 1 - stage)
        for start, (before, counts) in best.items():
            for stop in range(start + 1 if stage + 1 < stages else layers, last + 1):
                if stop == start or not allowed(stage, start, stop):
                    continue
                value = max(before, figure(stage, start, stop))
                if stop not in found or value < found[stop][0]:
                    found[stop] = value, (*counts, stop - start)
        best = found
    return best[layers]


def check_cut(counts: Sequence[int], layers: int, stages: int) -> None:
    """Raises InvalidUsage unless they are the layers of so many stages, one at least in each."""
    if len(counts) != stages or min(counts, default=0) < 1 or sum(counts) != layers:
        raise InvalidUsage(
            f"layers of the stages are {list(counts)} for {stages} stages of a model with {layers} layers; give one "
            "number of at least 1 for each stage, with that sum"
        )


def parse_cut(text: str, layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, given like ``4,5,5,4``. Raises InvalidUsage as :func:`check_cut`."""
    counts = tuple(int(each) if each.strip().isdecimal() else 0 for each in text.split(","))
    check_cut(counts, layers, stages)
    return counts


def by_layer(model: ModelSpec) -> list[ModelSpec]:
    """Each layer as a model, with embedding and head."""
    mixing = [each.over(1) for each in model.token_mixing for _ in range(each.layers)]
    dense = [place < model.dense_layers for place in range(model.layers)]
    kinds = list(zip(mixing, dense, strict=True))
    known = {kind: replace(model, layers=1, mixing=kind[:1], dense_layers=int(kind[1])) for kind in set(kinds)}
    return [known[kind] for kind in kinds]


def stage_layers(model: ModelSpec, pipeline: int, chunks: int = 1) -> tuple[int, ...]:
    """Layers of each stage of a model, ``chunks`` on each device of a pipeline: stages of as equal FLOPs as can be,
    head included, for sequences of 4,096 tokens (:func:`cut_layers`).

    Examples:
        >>> from hdpcomm.plan import MODELS
        >>> stage_layers(MODELS["llama-7b"], 5)
        (6, 6, 7, 7, 6)
    """
    stages, layers = pipeline * chunks, by_layer(model)
    end = model.hidden * model.vocab
    head = 6.0 * end
    work = [each.training_flops(1, _TOKENS) - head for each in layers]
    held = [each.activation_bytes * _TOKENS for each in layers]
    costs, tokens = ([*accumulate(each, initial=0.0)] for each in (work, held))
    states = [*accumulate((_STATE_BYTES * (each.params - 2 * end) for each in layers), initial=0)]

    def cost(stage: int, start: int, stop: int) -> float:
        return costs[stop] - costs[start] + head * (stage + 1 == stages)

    def memory(stage: int, start: int, stop: int) -> float:
        ends = _STATE_BYTES * end * ((stage == 0) + (stage + 1 == stages))
        sets = most_in_flight(pipeline, chunks, stage % pipeline)
        return states[stop] - states[start] + ends + sets * (tokens[stop] - tokens[start])

    return cut_layers(model.layers, stages, cost, memory)


Work = tuple[float, float, float]
"""Linear work, attention work, and layers."""


def _work(model: ModelSpec | None, layers: range, *, head: bool) -> Work:
    """Work of some layers, in FLOPs a token and a token squared; ``None``: of layers that are alike, without a head."""
    if model is None:
        return float(len(layers)), float(len(layers)), float(len(layers))
    logits = 6.0 * model.hidden * model.vocab
    own = by_layer(model)[layers.start : layers.stop]
    linear = math.fsum(each.training_flops(1, 0) - logits for each in own)
    return linear + logits * head, math.fsum(each.training_flops(0, 1) for each in own), float(len(own))


def _shares(work: Work, of: Work) -> Work:
    linear, attention, layers = (round(a / b, 9) if b else 1.0 for a, b in zip(work, of, strict=True))
    return linear, attention, layers


def mean_work(model: ModelSpec | None, layers: int, stages: int, measured: int) -> Work:
    """Work of the mean of so many stages, in that of one with the first ``measured`` of ``layers`` layers and the
    head."""
    whole, part = _work(model, range(layers), head=True), _work(model, range(measured), head=True)
    return _shares((whole[0] / stages, whole[1] / stages, whole[2] / stages), part)


def stage_work(model: ModelSpec | None, counts: Sequence[int]) -> tuple[Work, ...] | None:
    """``ClusterSpec.stage_work`` of stages with so many layers each; ``None`` where all are alike.

    Args:
        model: ``None``: one whose layers are alike, without a head.
    """
    stages = [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
    work = [_work(model, each, head=each is stages[-1]) for each in stages]
    linear, attention, layers = (math.fsum(kind) / len(work) for kind in zip(*work, strict=True))
    shares = tuple(_shares(each, (linear, attention, layers)) for each in work)
    return None if len({*shares}) == 1 else shares
