"""The measured costs by which ``algorithm="auto"`` chooses; ``hdpcomm acceptance --costs`` writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hdpcomm import _core
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text, user_folder, write_whole
from hdpcomm.plan.specs import DEVICES
from hdpcomm.plan.specs import link_costs as nccl_link_costs

__all__ = ["cost_names", "costs_path", "known_costs", "link_costs", "load_costs", "save_costs"]

_ADVICE = "measure costs by hdpcomm acceptance --only links --costs"
_DEFAULTS = _core.collective.DEFAULT_COSTS
_DEVICE = _core.collective.DEVICE_COSTS
_NCCL_INSIDE, _NCCL_BETWEEN = nccl_link_costs(DEVICES["h100"])
# Costs of transports that nobody measured.
_TRANSPORT_DEFAULTS: dict[str, dict[str, float]] = {
    # By benchmarks/host_links.py, between two network namespaces of one machine (2 cores, 2026-11-23).
    "tcp": {"alpha_s": 5e-5, "message_s": 1e-5, "beta_s_per_byte": 7e-10, "gamma_s_per_byte": 0.8e-10},
    "cuda": _DEVICE,  # derived, with its sources in csrc/collective/peer_reads.hpp
    # By the figures of planner and simulator (hdpcomm/plan/presets.py): inside a node, and between nodes.
    "nccl": _NCCL_INSIDE,
    "nccl between nodes": _NCCL_BETWEEN,
    # Measured between two processes on 2 cores (Xeon at 2.5 GHz, 2026-11-21).
    "sim": {
        "alpha_s": 1.3e-5,
        "message_s": 1.4e-5,
        "beta_s_per_byte": 2.4e-10,
        "gamma_s_per_byte": 0.8e-10,
        "round_s": 1.5e-5,
        "signal_s": 0.8e-5,
        "read_s_per_byte": 1.6e-10,
    },
}


def cost_names(transport: str) -> tuple[str, str]:
    """Under which names the costs of a world's transport are stored: inside its hosts, and between them."""
    inside, _, between = transport.partition("+")  # "shm+tcp", "cuda+nccl"
    between = between or inside
    return inside, "nccl between nodes" if between == "nccl" else between


def _defaults(transport: str) -> dict[str, float]:
    return _TRANSPORT_DEFAULTS.get(transport, _DEFAULTS)


def costs_path() -> Path:
    """``HDPCOMM_COSTS``, or ``costs.json`` in the user's cache folder (``XDG_CACHE_HOME``)."""
    if named := _core.settings().costs:
        return Path(named)
    return user_folder("XDG_CACHE_HOME", ".cache") / "costs.json"


def load_costs(transport: str) -> dict[str, float]:
    """The costs of a transport; the defaults if none are stored.

    alpha_s, message_s, beta_s_per_byte, gamma_s_per_byte; with a device also round_s, signal_s, read_s_per_byte.

    Raises: InvalidUsage for a file that does not hold positive numbers of these names.
    """
    path = costs_path()
    try:
        text = read_text(path)
    except FileNotFoundError:
        if _core.settings().costs:
            raise InvalidUsage(f"HDPCOMM_COSTS={path}: there is no such file; unset it, or {_ADVICE}") from None
        return dict(_defaults(transport))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidUsage(f"cannot read the costs in {path}: {error}; remove the file or set HDPCOMM_COSTS") from error
    try:
        stored = json.loads(text).get(transport, {})
        costs = {name: float(stored.get(name, default)) for name, default in _defaults(transport).items()}
    except (ValueError, AttributeError, TypeError, RecursionError, OverflowError) as error:
        raise InvalidUsage(f"{path} does not hold costs ({error}); remove it, or {_ADVICE}") from error
    for name, value in costs.items():
        if not (math.isfinite(value) and value > 0):
            raise InvalidUsage(f"{path}: {name} of {transport} is {value}; it must be above 0; {_ADVICE}")
    return costs


def known_costs(path: Path) -> dict[str, dict[str, float]]:
    """The costs of all transports in a file, none without one. Raises: InvalidUsage: it holds something else."""
    try:
        return {**json.loads(read_text(path))} if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise InvalidUsage(f"{path}: holds no costs ({error}); give another file or remove it") from error


def save_costs(transport: str, costs: dict[str, float], path: Path | None = None) -> Path:
    """Stores the costs of a transport beside those of the others; returns the file."""
    path = costs_path() if path is None else path
    known = _defaults(transport)
    unknown = set(costs) - set(known)
    if unknown:
        raise InvalidUsage(f"costs {sorted(unknown)} are unknown; known are: {', '.join(known)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    everything = known_costs(path)
    everything[transport] = everything.get(transport, {}) | costs  # what was not measured now stays
    write_whole(path, json.dumps(everything, indent=1).encode())
    return path


def link_costs(costs: dict[str, float]) -> tuple[float, float, float, float]:
    """Costs of messages as the core takes them."""
    return costs["alpha_s"], costs["message_s"], costs["beta_s_per_byte"], costs["gamma_s_per_byte"]
