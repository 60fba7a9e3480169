"""A whole training run on a corpus: what ``hdpcomm train`` does on every rank."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hdpcomm.comm.launchers import local_place
from hdpcomm.comm.topology import shared_cores
from hdpcomm.data import BatchReader, BatchSampler, Corpus
from hdpcomm.data.agree import on_rank_0
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, adapt
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, PlanAhead, Planner
from hdpcomm.run.checkpoints import Checkpoint, CheckpointFolder, newest_checkpoint, open_checkpoint
from hdpcomm.run.config import RunConfig, learning_rate
from hdpcomm.run.stopping import StopRequest
from hdpcomm.train import StepMetrics, Trainer, profile_cost_model
from hdpcomm.train.activation_profile import profile_activations
from hdpcomm.train.data_parallel import DataParallelTrainer, WholeSequencePlanner, gloo_group

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["RunResult", "Saving", "check_limits", "train"]


SMALLEST_OFFLOAD = 4096  # bytes; smaller tensors are not worth a copy
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROFILE_TOKENS = 4096  # the longest sequence of the profile; enough to see the square in a few seconds


@dataclass(frozen=True, slots=True)
class Saving:
    """Where a run keeps its checkpoints, and where it goes on from.

    Attributes:
        folder: of the checkpoints; made if need be.
        every: steps between two; one more is made at the end, and when the run is asked to stop. 0: only these.
        keep: how many of the newest stay.
        resume: ``None``: start anew; ``"auto"``: the newest sound checkpoint of ``folder``, if there is any; else the
            path of a checkpoint, or of a folder of checkpoints.
    """

    folder: Path
    every: int = 0
    keep: int = 3
    resume: str | None = None

    def __post_init__(self) -> None:
        if self.every < 0:
            raise InvalidUsage(f"every is {self.every}; give the steps between two checkpoints, or 0")
        if self.keep < 1:
            raise InvalidUsage(f"keep is {self.keep}; at least 1 checkpoint has to stay")


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of :func:`train`, equal on every rank but for the clock.

    Attributes:
        steps: by policy, in the order of ``RunConfig.policies``; those of this call, from ``first_step`` on.
        parameters: of the model, tied ones counted once.
        first_step: 0, or where the checkpoint was taken.
        stopped_by: the signal that ended the run before its last step, or 0.
        saved: the last checkpoint, if there is one.
        state: rank 0: the weights of the first policy's model, by name; elsewhere empty.
    """

    ranks: int
    transport: str
    parameters: int
    steps: dict[str, list[StepMetrics]]
    first_step: int = 0
    stopped_by: int = 0
    saved: Path | None = None
    state: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


def check_limits(corpus: Corpus, config: RunConfig, *, ranks: int) -> None:
    """Raises InvalidUsage if a sequence fits no batch, or not all ranks together; says which limit to raise. Local."""
    longest, room = int(corpus.lengths.max()), config.capacity * ranks
    if longest > room and not config.offload_bytes:  # with offload the planner knows, once it is measured
        raise InvalidUsage(
            f"the longest sequence has {longest:,} tokens, and {ranks} ranks with a capacity of {config.capacity:,} "
            f"tokens hold {room:,}; raise --capacity to at least {-(-longest // ranks):,} or --ranks to "
            f"{-(-longest // config.capacity):,}, or lower --context to {room:,}"
        )
    if corpus.vocabulary > config.model.vocabulary:
        raise InvalidUsage(
            f"the data has tokens up to {corpus.vocabulary - 1:,} ({corpus.encoder_name}), and the model has a "
            f"vocabulary of {config.model.vocabulary:,}; give the tokenizer that belongs to the model"
        )
    _sampler(corpus, config)


def train(
    comm: Communicator,
    corpus: Corpus,
    config: RunConfig,
    *,
    saving: Saving | None = None,
    on_step: Callable[[str, StepMetrics], None] | None = None,
) -> RunResult:
    """Trains up to ``config.steps`` steps with each policy. Collective over ``comm``: equal arguments on every rank.

    Plans are made in the background, while the steps before run. The policies take turns, step by step, each with
    weights of its own: what else the machine does slows all alike. With ``saving`` the run writes checkpoints, goes on
    from one, and on SIGTERM or Ctrl-C ends after the step, saved. On as many ranks as before, a resumed run computes
    the very bits that it would have computed without the interruption: the checkpoint holds the measured costs, which
    the plans follow.

    Args:
        corpus: every rank reads only the sequences that it works on.
        on_step: called on this rank after every step with the policy and the metrics.

    Raises:
        InvalidUsage: of :func:`check_limits`; no checkpoint where ``saving.resume`` says, or one of another run.
        Error: of the step, see :meth:`hdpcomm.train.Trainer.step`; a checkpoint cannot be written.
    """
    check_limits(corpus, config, ranks=comm.size)
    with ExitStack() as stack:
        stopping = stack.enter_context(StopRequest()) if saving is not None else None
        run = _Run(comm, corpus, config, saving, stack)
        run.advance(on_step, stopping)
        return run.result()


class _Run:
    """One rank's state of a run."""

    def __init__(
        self, comm: Communicator, corpus: Corpus, config: RunConfig, saving: Saving | None, stack: ExitStack
    ) -> None:
        self.comm, self.corpus, self.config, self.saving = comm, corpus, config, saving
        self.folder = None
        if saving is not None and comm.rank == 0:
            self.folder = CheckpointFolder(saving.folder, keep=saving.keep)
            stack.callback(self.folder.wait)
        found = _agree_on_checkpoint(comm, self.folder, saving)
        if found is not None:
            _check_same_run(found, corpus, config)
        self.first_step = self.done = 0 if found is None else found.step
        if self.first_step > config.steps:
            raise InvalidUsage(
                f"{found.path if found else ''} was saved after step {self.first_step} and --steps is {config.steps}; "
                "give more steps, or an earlier checkpoint"
            )
        self.saved: Path | None = None if found is None else found.path
        self.stopped_by = 0
        self.cost_model, self.memory, pool = self._costs(found)
        cluster = ClusterSpec(
            ranks=comm.size,
            capacity=config.capacity,
            offload=config.offload_bytes > 0,
            cores=shared_cores(comm) if comm.device.type == "cpu" else None,
        )
        longest = int(corpus.lengths.max())
        planners = {
            policy: WholeSequencePlanner(cluster, self.cost_model)
            if policy == "ddp"
            else Planner(None, cluster, policy, self.cost_model, context=longest, memory=self.memory)
            for policy in config.policies
        }
        # From here on, so that the first step's plan is made while the models are.
        self.plans = {
            policy: stack.enter_context(PlanAhead(planner, _lengths(corpus, config, self.first_step)))
            for policy, planner in planners.items()
        }
        self.trainers = {policy: self._trainer(planner, pool, stack) for policy, planner in planners.items()}
        self.steps: dict[str, list[StepMetrics]] = {policy: [] for policy in planners}
        if found is not None:
            self._load(found)

    def _costs(self, found: Checkpoint | None) -> tuple[CostModel, MemoryModel | None, PinnedPool | None]:
        """As measured now, or as the checkpoint has them: plans follow them, and so does the order of sums."""
        config, comm = self.config, self.comm
        pool = _host_memory(comm, config)
        if found is not None:
            memory = found.facts.get("memory_model")
            return CostModel(**found.facts["cost_model"]), MemoryModel(**memory) if memory else None, pool
        model = _new_model(comm, config).to(_DTYPES[config.dtype])
        longest = min(int(self.corpus.lengths.max()), config.capacity, PROFILE_TOKENS)
        cost_model = profile_cost_model(model, comm, longest=longest)
        if pool is None:
            return cost_model, None, None
        offload = ActivationOffload(pool, model, min_bytes=SMALLEST_OFFLOAD)
        profile = profile_activations(model, offload, comm, tokens=max(2, min(config.capacity, PROFILE_TOKENS // 8)))
        return cost_model, profile.memory_model(config.capacity, config.offload_bytes), pool

    def _trainer(self, planner: Planner, pool: PinnedPool | None, stack: ExitStack) -> Trainer:
        model = _new_model(self.comm, self.config)
        if isinstance(planner, WholeSequencePlanner):
            group = stack.enter_context(gloo_group(self.comm))
            optimizer = _optimizer(model, self.config)
            limit = self.config.max_grad_norm
            return DataParallelTrainer(model, optimizer, planner, self.comm, group, max_grad_norm=limit)
        return Trainer(
            model,
            _optimizer(model, self.config),
            planner,
            self.comm,
            max_grad_norm=self.config.max_grad_norm,
            offload=None if pool is None else ActivationOffload(pool, model, min_bytes=SMALLEST_OFFLOAD),
            zero=self.config.zero,
            dtype=None if self.config.dtype == "fp32" else _DTYPES[self.config.dtype],
        )

    def advance(self, on_step: Callable[[str, StepMetrics], None] | None, stopping: StopRequest | None) -> None:
        """Runs the steps that are left, and saves on the way."""
        sampler = _sampler(self.corpus, self.config)
        for step in range(self.first_step, self.config.steps):
            batch = sampler.batch(step)
            for policy, trainer in self.trainers.items():
                for group in trainer.optimizer.param_groups:
                    group["lr"] = learning_rate(self.config, step)
                metrics = trainer.step(next(self.plans[policy]), BatchReader(self.corpus, batch.ids))
                self.steps[policy].append(metrics)
                if on_step is not None:
                    on_step(policy, metrics)
            self.done = step + 1
            if stopping is not None and (number := stopping.agreed(self.comm)):
                self.stopped_by = number
                break
            if self.saving is not None and self.saving.every and self.done % self.saving.every == 0:
                self._save()
        if self.saving is not None and (self.saved is None or self.saved.name != f"step-{self.done}"):
            self._save()
        if self.folder is not None:
            self.folder.wait()

    def _state(self) -> dict[str, Any]:
        return {policy: trainer.state_dict() for policy, trainer in self.trainers.items()}

    def _save(self) -> None:
        assert self.saving is not None
        state = self._state()
        generators = _gather_generators(self.comm)
        self.saved = self.saving.folder / f"step-{self.done}"
        if self.folder is None:
            return
        facts = {
            "ranks": self.comm.size,
            "config": asdict(self.config),
            "data": _data_facts(self.corpus),
            "cost_model": asdict(self.cost_model),
            "memory_model": None if self.memory is None else asdict(self.memory),
        }
        self.folder.save(self.done, {"policies": state, "generators": generators}, facts)

    def _load(self, found: Checkpoint) -> None:
        same_ranks = found.facts["ranks"] == self.comm.size
        state: dict[str, Any] = {"policies": self._state()}
        if same_ranks:
            state["generators"] = _gather_generators(self.comm)
        found.load_into(state)
        for policy, trainer in self.trainers.items():
            trainer.load_state_dict(state["policies"][policy])
        if same_ranks:
            torch.set_rng_state(state["generators"][self.comm.rank].clone())  # torch wants one that starts its memory

    def result(self) -> RunResult:
        model = self.trainers[self.config.policies[0]].model
        weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
        return RunResult(
            ranks=self.comm.size,
            transport=self.comm.transport,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            steps=self.steps,
            first_step=self.first_step,
            stopped_by=self.stopped_by,
            saved=self.saved,
            state=weights if self.comm.rank == 0 else {},
        )


def _agree_on_checkpoint(
    comm: Communicator, folder: CheckpointFolder | None, saving: Saving | None
) -> Checkpoint | None:
    """The checkpoint to go on from: rank 0 looks and checks it, all read the same one. Collective."""
    if saving is None or saving.resume is None:
        return None
    found = on_rank_0(comm, lambda: _find_checkpoint(folder, saving))
    return open_checkpoint(Path(found)) if found else None


def _find_checkpoint(folder: CheckpointFolder | None, saving: Saving) -> str:
    assert folder is not None
    assert saving.resume is not None
    if saving.resume == "auto":
        found, damaged = folder.newest()
        for text in damaged:
            print(f"hdpcomm: warning: {text}", file=sys.stderr)
        if found is None and damaged:
            raise InvalidUsage(
                f"{folder.path}: no checkpoint there is whole; give another one by --resume PATH, or start anew with "
                "another --out"
            )
        return "" if found is None else str(found.path.resolve())
    path = Path(saving.resume)
    nested = path / "checkpoints"
    for candidate in (path, nested):
        if candidate.is_dir() and any(candidate.glob("step-*")):
            newest, damaged = newest_checkpoint(candidate)
            for text in damaged:
                print(f"hdpcomm: warning: {text}", file=sys.stderr)
            if newest is not None:
                return str(newest.path.resolve())
    return str(open_checkpoint(path).path.resolve())


def _check_same_run(found: Checkpoint, corpus: Corpus, config: RunConfig) -> None:
    """What must be as it was, so that the checkpoint's step means the same batches and the same model."""
    then, now = found.facts.get("config"), asdict(config)
    if not isinstance(then, dict) or "cost_model" not in found.facts:
        raise InvalidUsage(f"{found.path}: holds no run of hdpcomm train; give another checkpoint")
    for name in ("model", "policies", "tokens_per_step", "seed", "offload_bytes", "dtype"):
        was, wanted = then.get(name), list(now[name]) if name == "policies" else now[name]
        if was != wanted:
            raise InvalidUsage(
                f"{found.path} was saved with {name}={was}, and this run has {wanted}; give the same, or start anew "
                "with another --out"
            )
    saved_on, data = found.facts.get("data"), _data_facts(corpus)
    if saved_on != data:
        raise InvalidUsage(
            f"{found.path} was saved on other data ({saved_on}) than this run's ({data}); give the same --data, "
            "--tokenizer and --context, or start anew with another --out"
        )


def _data_facts(corpus: Corpus) -> dict[str, Any]:
    digest = hashlib.sha256(corpus.sequences.tobytes()).hexdigest()[:16]
    facts = {"sequences": len(corpus), "tokens": corpus.num_tokens, "context": corpus.context, "places": digest}
    return facts | {"encoder": corpus.encoder}


def _gather_generators(comm: Communicator) -> torch.Tensor:
    """``[ranks, bytes]``: torch's generator of every rank. Collective."""
    own = torch.get_rng_state()
    states = torch.empty(comm.size * own.numel(), dtype=torch.uint8)
    comm.all_gather(states, own)
    return states.view(comm.size, -1)


def _new_model(comm: Communicator, config: RunConfig) -> nn.Module:
    """On this rank's device, the same on every rank."""
    return adapt(Llama(config.model, seed=config.seed).to(comm.device), recompute=config.recompute)


def _host_memory(comm: Communicator, config: RunConfig) -> PinnedPool | None:
    """Pinned memory for the activations of this rank, of which the ranks of a host get a share each."""
    if not config.offload_bytes:
        return None
    _, sharers = local_place(comm.rank, comm.size)
    return PinnedPool(config.offload_bytes, device=comm.device, sharers=sharers)


def _sampler(corpus: Corpus, config: RunConfig) -> BatchSampler:
    return BatchSampler(corpus.lengths, tokens=config.tokens_per_step, seed=config.seed)


def _lengths(corpus: Corpus, config: RunConfig, first: int) -> Iterator[Sequence[int]]:
    """Lengths of each step's sequences; for a thread of its own, so with a sampler of its own."""
    sampler = _sampler(corpus, config)
    return (sampler.batch(step).lengths for step in range(first, config.steps))


def _optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """AdamW that does not pull the norms' weights towards zero."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
