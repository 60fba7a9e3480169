"""Which settings bring a model's step within the memory of devices that are not here, and how long it takes then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG
from hdpcomm.plan.memory import StepMemory
from hdpcomm.plan.presets import NODE_DEVICES
from hdpcomm.run.config import RunConfig
from hdpcomm.run.dry_run import cluster_elsewhere, planners_elsewhere
from hdpcomm.run.memory import fit_recompute, memory_beside, predict_memory
from hdpcomm.run.pipelines import recompute_by_device
from hdpcomm.sim import simulate_step

__all__ = ["Setting", "best_setting", "fit_settings"]

_ALIKE = 1.01
"""Times that differ by less than one in a hundred are the same."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to train a model, and what it takes.

    Attributes:
        config: with what is recomputed; all layers where that is not enough.
        device: memory by its parts, of the fullest device.
        recomputed: layers that it recomputes.
        activations: bytes that a pass adds to the states.
        taken: bytes of all of it, with messages.
        limit: bytes that there are.
        step_s: of the simulated step; ``None`` where it does not fit, or the model is no plain decoder.
    """

    config: RunConfig
    device: StepMemory
    recomputed: int
    activations: float
    taken: float
    limit: float
    step_s: float | None = None

    @property
    def fits(self) -> bool:
        """Whether there is as much memory as it takes."""
        return self.taken <= self.limit


def fit_settings(
    config: RunConfig, lengths: Sequence[int], ranks: int, device: str, *, tensor: Sequence[int], zero: Sequence[int]
) -> Iterator[Setting]:
    """Each number of tensor ranks with each stage of ZeRO, and as few layers recomputed as fit. Local; allocates
    nothing. A combination that cannot be is left out with a warning.

    Args:
        config: with ``memory``, the bytes of a device that a step may take.
        lengths: tokens of the sequences of one step.
        ranks: devices, of the kind ``device`` (``hdpcomm.plan.DEVICES``).

    Raises: InvalidUsage: none of them can be.
    """
    limit, found, refused = config.memory, False, InvalidUsage("no setting was given; give one at least")
    for shared in tensor:
        known: tuple[StepMemory, ...] = ()
        for stage in zero:
            try:
                tried = replace(config, tensor=shared, zero=stage, recompute="auto", memory=limit)
                cluster = cluster_elsewhere(tried, ranks, device)
                tried = replace(tried, capacity=max(config.capacity, -(-max(lengths) // cluster.ranks)))
                cluster = replace(cluster, capacity=tried.capacity)
                known = predict_memory(tried, ranks, cluster.ranks_per_node, known)
            except InvalidUsage as error:
                if str(refused) != str(error):
                    LOG.warning(f"tensor {shared}, zero {stage} is left out: {error}")
                refused = error
                continue
            found = True
            beside = memory_beside(tried, min(ranks, NODE_DEVICES), on_devices=True).device
            try:
                fitted, _ = fit_recompute(replace(tried, memory=limit - beside), known)
            except InvalidUsage:
                yield _setting(replace(tried, recompute="full", memory=0), known, beside, limit)
                continue
            planners = planners_elsewhere(fitted, cluster, known, context=max(lengths))
            steps = [simulate_step(planner, lengths).step_s for planner in planners.values()]
            yield replace(_setting(fitted, known, beside, limit), step_s=steps[0] if steps else None)
    if not found:
        raise refused


def _setting(config: RunConfig, devices: Sequence[StepMemory], beside: int, limit: float) -> Setting:
    ratio = 1.0 if config.offload else 0.0
    _, full, count = max(
        (each.peak_bytes(config.capacity, count, ratio), place, count)
        for place, (each, count) in enumerate(zip(devices, recompute_by_device(config), strict=True))
    )
    device = devices[full]
    activations = device.activation_bytes(config.capacity, count, ratio)
    return Setting(config, device, count, activations, device.peak_bytes(config.capacity, count, ratio) + beside, limit)


def best_setting(settings: Sequence[Setting]) -> Setting | None:
    """The fastest one of those that fit; if several are as fast, the one that cuts least. Local."""
    able = [each for each in settings if each.fits]
    fastest = min((each.step_s or 0.0 for each in able), default=0.0)
    alike = [each for each in able if (each.step_s or 0.0) <= _ALIKE * fastest]
    return min(alike, key=lambda each: (each.recomputed, each.config.zero, each.config.tensor), default=None)
