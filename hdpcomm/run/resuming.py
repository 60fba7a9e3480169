"""Where a run goes on: finding a checkpoint, agreeing on it, and checking that it is of this run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.data import Corpus, DocumentStream
from hdpcomm.data.agree import on_rank_0
from hdpcomm.errors import InvalidUsage
from hdpcomm.run.checkpoints import Checkpoint, newest_checkpoint, open_checkpoint
from hdpcomm.run.config import RunConfig
from hdpcomm.run.model import model_facts

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["agreed_checkpoint", "check_same_run", "config_facts", "data_facts", "gather_generators"]


def agreed_checkpoint(comm: Communicator, folder: Path, resume: str | None) -> Checkpoint | None:
    """The checkpoint to go on from: rank 0 looks and checks it, all read the same one. Collective.

    Args:
        folder: of the run's own checkpoints.
        resume: ``None``: none; ``"auto"``: the newest sound one of ``folder``; else a path.

    Raises: InvalidUsage, on all ranks: there is none at this path, or no sound one.
    """
    if resume is None:
        return None
    found = on_rank_0(comm, lambda: _find(folder, resume))
    return open_checkpoint(Path(found)) if found else None


def _find(folder: Path, resume: str) -> str:
    if resume == "auto":
        found, damaged = newest_checkpoint(folder)
        _warn(damaged)
        if found is None and damaged:
            raise InvalidUsage(
                f"{folder}: no checkpoint there is whole; give another one by --resume PATH, or start anew with "
                "another --out"
            )
        return "" if found is None else str(found.path.resolve())
    path = Path(resume)
    for candidate in (path, path / "checkpoints"):
        if candidate.is_dir() and any(candidate.glob("step-*")):
            newest, damaged = newest_checkpoint(candidate)
            _warn(damaged)
            if newest is not None:
                return str(newest.path.resolve())
    return str(open_checkpoint(path).path.resolve())


def _warn(damaged: list[str]) -> None:
    for text in damaged:
        print(f"hdpcomm: warning: {text}", file=sys.stderr)


def check_same_run(found: Checkpoint, corpus: Corpus | DocumentStream, config: RunConfig) -> None:
    """What must be as it was, so that the checkpoint's step means the same batches and the same model.

    Raises: InvalidUsage with what was saved and what is wanted.
    """
    then, now = found.facts.get("config"), config_facts(config)
    if not isinstance(then, Mapping) or "cost_model" not in found.facts:
        raise InvalidUsage(f"{found.path}: holds no run of hdpcomm train; give another checkpoint")
    for name in ("model", "policies", "tokens_per_step", "seed", "offload", "dtype"):
        was, wanted = then.get(name, then.get(f"{name}_bytes")), now[name]  # the name that checkpoints had before
        if was != wanted:
            raise InvalidUsage(
                f"{found.path} was saved with {name}={was}, and this run has {wanted}; give the same, or start anew "
                "with another --out"
            )
    saved_on, data = found.facts.get("data"), data_facts(corpus)
    if saved_on != data:
        raise InvalidUsage(
            f"{found.path} was saved on other data ({saved_on}) than this run's ({data}); give the same --data, "
            "--tokenizer and --context (and --loader), or start anew with another --out"
        )


def config_facts(config: RunConfig) -> dict[str, Any]:
    """The configuration as a checkpoint notes it; it has the costs beside it."""
    plain = asdict(replace(config, calibration=None))
    del plain["calibration"]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()} | {
        "model": model_facts(config.model)
    }


def data_facts(corpus: Corpus | DocumentStream) -> dict[str, Any]:
    """What a checkpoint notes of the data: enough to see that its batches are the same."""
    if isinstance(corpus, DocumentStream):
        return corpus.facts
    digest = hashlib.sha256(corpus.sequences.tobytes()).hexdigest()[:16]
    facts = {"sequences": len(corpus), "tokens": corpus.num_tokens, "context": corpus.context, "places": digest}
    return facts | {"encoder": corpus.encoder}


def gather_generators(comm: Communicator) -> torch.Tensor:
    """``[ranks, bytes]``: torch's generator of every rank. Collective."""
    own = torch.get_rng_state()
    states = torch.empty(comm.size * own.numel(), dtype=torch.uint8)
    comm.all_gather(states, own)
    return states.view(comm.size, -1)
