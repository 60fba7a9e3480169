"""Where a run goes on: finding a checkpoint, agreeing on it, and checking that it is of this run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.arguments import check_whole
from hdpcomm.data import Corpus
from hdpcomm.data.agree import gather_json, on_rank_0
from hdpcomm.data.corpus import content_digest
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.log import LOG
from hdpcomm.plan import CostModel, MemoryModel
from hdpcomm.run.checkpoints import Checkpoint, newest_checkpoint, open_checkpoint
from hdpcomm.run.config import RunConfig
from hdpcomm.run.model import model_facts

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.run.peer_saves import KeptCheckpoint

__all__ = [
    "agreed_checkpoint",
    "check_same_data",
    "check_same_run",
    "config_facts",
    "data_facts",
    "gather_generators",
    "saved_config",
]

_SAME = ("model", "policies", "tokens_per_step", "seed", "offload", "dtype", "optimizer", "optimizer_options")
"""Options that a run which goes on must have as before."""


def agreed_checkpoint(
    comm: Communicator, folder: Path, resume: str | None, *, before: int | None = None
) -> Checkpoint | None:
    """The checkpoint to go on from: rank 0 looks and checks it, all read the same one. Collective.

    Args:
        folder: of the run's own checkpoints.
        resume: ``None``: none; ``"auto"``: the newest sound one of ``folder``; else a path.
        before: only one of fewer steps, as the newer ones do not fit; ``None`` if there is none.

    Raises: InvalidUsage, on all ranks: there is none at this path, or no sound one.
    """
    if resume is None:
        return None
    found = on_rank_0(comm, lambda: _find(folder, resume, before))
    return open_checkpoint(Path(found)) if found else None


def _find(folder: Path, resume: str, before: int | None) -> str:
    if resume == "auto":
        found, damaged = newest_checkpoint(folder, before=before, check=_check_facts)
        _warn(damaged)
        if found is None and damaged and before is None:
            raise InvalidUsage(
                f"{folder}: no checkpoint there is whole; give another one by --resume PATH, or start anew with "
                "another --out"
            )
        return "" if found is None else str(found.path.resolve())
    path = Path(resume)
    for candidate in (path, path / "checkpoints"):
        if candidate.is_dir() and any(candidate.glob("step-*")):
            newest, damaged = newest_checkpoint(candidate, before=before, check=_check_facts)
            _warn(damaged)
            if newest is not None:
                return str(newest.path.resolve())
    if before is not None:
        return ""
    single = open_checkpoint(path)
    _check_facts(single)
    return str(single.path.resolve())


def _check_facts(found: Checkpoint) -> None:
    """Validates ``meta.json``. Raises: InvalidUsage."""
    facts = found.facts
    if not set(_SAME) <= set(saved_config(found)):
        raise InvalidUsage(f"{found.path}: holds no run of hdpcomm train; give another checkpoint")
    ranks, learned = facts.get("ranks"), facts.get("learned") or {}
    policies, name = saved_config(found)["policies"], "policies"
    try:
        if not isinstance(policies, list) or not policies or not all(isinstance(each, str) for each in policies):
            raise ValueError(f"{policies!a:.40} is no list of policies")
        name = "ranks"
        if type(ranks) is not int or ranks < 1:
            raise ValueError(f"{ranks!a:.40} is no number of ranks")
        name = "cost_model"
        CostModel.from_dict(facts.get(name, {}))
        name = "memory_model"
        if facts.get(name):
            MemoryModel(**facts[name])
        name = "nics"
        if (shared := facts.get(name)) is not None:
            check_whole("a run", name, shared, least=1)
        name = "learned"
        if not all(isinstance(each, Mapping) for each in (learned, *learned.values())):
            raise TypeError(f"{learned!a:.40}")
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidUsage(f"{found.path}: damaged (meta.json: {name}: {error}); use another checkpoint") from None


def _warn(damaged: list[str]) -> None:
    for text in damaged:
        LOG.warning(text)


def saved_config(found: Checkpoint | KeptCheckpoint) -> Mapping[str, Any]:
    """The configuration that a checkpoint notes; empty if it notes none."""
    config = found.facts.get("config")
    return config if isinstance(config, Mapping) else {}


def check_same_run(found: Checkpoint | KeptCheckpoint, corpus: Corpus, config: RunConfig) -> None:
    """Checks that the checkpoint's step means the same batches and the same model as here.

    Raises: InvalidUsage with what was saved and what is wanted.
    """
    then, now = saved_config(found), config_facts(config)
    for name in (*_SAME, "ramp", "ema"):  # the last two are not in older checkpoints
        if then.get(name) != now[name]:
            raise InvalidUsage(
                f"{found.path} was saved with {name}={then.get(name)}, and this run has {now[name]}; give the same, or "
                "start anew with another --out"
            )
    saved_on, data = found.facts.get("data"), data_facts(corpus)
    if saved_on != data:
        raise InvalidUsage(
            f"{found.path} was saved on other data ({saved_on}) than this run's ({data}); give the same --data, "
            "--tokenizer and --context, or start anew with another --out"
        )


def check_same_data(comm: Communicator, corpus: Corpus, found: Checkpoint | KeptCheckpoint | None) -> None:
    """Compares digests of the data on all ranks with the checkpoint's, or else with rank 0's. Collective.

    Raises: Mismatch, on all ranks, with those that read others (``unlike``).
    """
    try:
        own = content_digest(corpus)
    except InvalidUsage as failure:
        own = str(failure)
    everyone = gather_json(comm, own)
    saved_on = None if found is None else found.facts.get("data")
    saved = saved_on.get("content") if isinstance(saved_on, Mapping) else None
    right = saved if saved in everyone else everyone[0]
    if odd := [comm.ranks[place] for place, each in enumerate(everyone) if each != right]:
        error = Mismatch(
            f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} read other data than this run's "
            f"({everyone[comm.ranks.index(odd[0])]} where {right} was expected); give all ranks the same files",
            rank=comm.global_rank,
        )
        error.unlike = tuple(odd)
        raise error


def config_facts(config: RunConfig) -> dict[str, Any]:
    """The configuration as a checkpoint notes it; it has the costs beside it."""
    plain = asdict(replace(config, calibration=None))
    del plain["calibration"]
    del plain["init_from"], plain["keep_optimizer"]  # where it began, which is no matter once it has
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()} | {
        "model": model_facts(config.model)
    }


def data_facts(corpus: Corpus) -> dict[str, Any]:
    """Facts of the data for checkpoints: enough to see that its batches are the same."""
    digest = hashlib.sha256(corpus.sequences.tobytes()).hexdigest()[:16]
    facts = {"sequences": len(corpus), "tokens": corpus.num_tokens, "context": corpus.context, "places": digest}
    facts["content"] = content_digest(corpus)
    if corpus.weights:
        facts["weights"] = list(corpus.weights)
    if corpus.later_weights:
        facts["later_weights"] = [[step, *weights] for step, weights in corpus.later_weights]
    return facts | {"encoder": corpus.encoder}


def gather_generators(comm: Communicator) -> torch.Tensor:
    """``[ranks, bytes]``: torch's generator of every rank. Collective."""
    own = torch.get_rng_state()
    states = torch.empty(comm.size * own.numel(), dtype=torch.uint8)
    comm.all_gather(states, own)
    return states.view(comm.size, -1)
