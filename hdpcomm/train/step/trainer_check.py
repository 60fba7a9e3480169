"""Checks what a :class:`hdpcomm.train.Trainer` is made of before it is used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hdpcomm.arguments import check_has, check_number, check_type, check_whole
from hdpcomm.comm.mesh import Mesh
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage, NotFinite
from hdpcomm.models.expert_group import ExpertGroup
from hdpcomm.models.self_check import CHECKED_TOKENS, is_random
from hdpcomm.models.tensor_group import TensorGroup
from hdpcomm.parallel.stages import Stage, check_same_mesh, check_same_stages, check_same_trained, checked_stages
from hdpcomm.plan import Planner, StepPlan, TrajectoryTree, Tree
from hdpcomm.train.losses import GroupLoss, TokenLoss
from hdpcomm.train.step.runner import StepSettings
from hdpcomm.train.zero.matrix_owners import MatrixOwners
from hdpcomm.train.zero.shared_parts import has_part

__all__ = [
    "check_finite",
    "check_log_prob_loss",
    "check_model",
    "check_order",
    "check_trained_names",
    "check_trainer",
    "check_trees",
    "mean_loss",
    "refuse_prefixes",
    "trained_names",
]


def check_finite(
    loss: float, grad_norm: float, plan: StepPlan, not_finite: Sequence[int], mesh: Mesh, step: int
) -> None:
    """Raises NotFinite, on all ranks, unless both are finite numbers. Collective then.

    Args:
        loss, grad_norm: equal on all ranks.
        not_finite: micro-batches on this rank whose loss is none.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    found = {index for own in gather_json(mesh.comm, list(not_finite)) for index in own}
    batches = [batch for batch in plan.micro_batches if batch.index in found]
    sequences = sorted({sequence.id for batch in batches for sequence in batch.sequences})
    what, value = ("loss", loss) if not math.isfinite(loss) else ("gradient norm", grad_norm)
    where = f", in micro-batches of sequences {_listed(sequences)}" if sequences else ""
    error = NotFinite(
        f"step {step}: the {what} is {value}{where}; lower the learning rate or look at the data (no parameter was "
        "updated)",
        rank=mesh.comm.global_rank,
        op="step",
    )
    error.sequences = tuple(sequences)
    raise error


def _listed(numbers: Sequence[int], most: int = 20) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def check_trainer(
    model: Any,
    optimizer: Any,
    planner: Any,
    comm: Any,
    *,
    max_grad_norm: Any,
    loss: Any,
    offload: Any,
    settings: StepSettings,
) -> None:
    """Raises InvalidUsage for an argument of another kind, or a number out of range."""
    modules = list(model) if isinstance(model, (list, tuple)) else [model]
    for module in modules:
        check_type("Trainer", "model", module, nn.Module)
    check_has("Trainer", "optimizer", optimizer, "param_groups", "an optimizer of torch")
    check_has("Trainer", "planner", planner, "cluster", "a hdpcomm.plan.Planner")
    if not isinstance(comm, Mesh):
        check_has("Trainer", "comm", comm, "all_reduce", "the communicator of init(), or a Mesh of its ranks")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidUsage("LBFGS computes the loss several times a step, which a planned step does once; give another")
    parameters = [parameter for module in modules for parameter in module.parameters()]
    own = {id(parameter) for parameter in parameters}
    updated = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if len(set(updated)) < len(updated):
        raise InvalidUsage(
            "the optimizer has a parameter twice, as of stages that share an encoder, and would update it twice; give "
            "each once (of several stages: nn.ModuleList(stages).parameters())"
        )
    strange = sum(key not in own for key in updated)
    if strange and any(p.requires_grad for p in parameters):  # else there is nothing to train, which is told
        raise InvalidUsage(
            f"{strange} parameters of the optimizer are none of the model's; make the optimizer from the parameters of "
            "the model that is given to the trainer, after it was cut or adapted"
        )
    if max_grad_norm is not None:
        check_number("Trainer", "max_grad_norm", max_grad_norm, above=0)
    if loss is not None and not isinstance(loss, (TokenLoss, GroupLoss)):
        check_has("Trainer", "loss", loss, "__call__", "a function of (logits, labels)")
    if offload is None and planner.memory.offloadable:
        raise InvalidUsage(
            "the planner counts on host memory (offload) and the trainer has no way there; give "
            "offload=ActivationOffload(pool, model), or plan with ClusterSpec(offload=False)"
        )
    if offload is not None:
        check_has("Trainer", "offload", offload, "micro_batch", "an ActivationOffload")
    if settings.dtype is not None:
        check_type("Trainer", "dtype", settings.dtype, torch.dtype)
    check_whole("Trainer", "zero", settings.zero, least=0, most=3)
    check_whole("Trainer", "bucket_bytes", settings.bucket_bytes, least=1)
    check_type("Trainer", "optimizer_offload", settings.optimizer_offload, bool)


def check_model(
    model: nn.Module | Sequence[Stage],
    optimizer: torch.optim.Optimizer,
    planner: Planner,
    mesh: Mesh,
    *,
    zero: int,
) -> tuple[nn.Module, list[Stage]]:
    """The module of this rank, and its stages if it is one of a pipeline. Collective over the mesh.

    Raises:
        InvalidUsage: the planner is for another mesh, or the model is not cut for this one.
        Mismatch: the ranks have made different meshes or models.
    """
    staged = mesh.pipeline > 1 or isinstance(model, Stage) or not isinstance(model, nn.Module)
    stages = checked_stages(model, mesh) if staged else []  # type: ignore[arg-type]
    module = nn.ModuleList(stages) if len(stages) > 1 else stages[0] if stages else model
    assert isinstance(module, nn.Module)
    for each in (*stages,) or (module,):
        _check_cut(each, mesh)
    _check_cluster(planner, mesh, max(1, len(stages)))
    places = mesh.comm.ranks, mesh.positions.tolist()
    if isinstance(optimizer, MatrixOwners) and places != (optimizer.mesh.comm.ranks, optimizer.mesh.positions.tolist()):
        raise InvalidUsage(
            f"the optimizer shares its matrices among the ranks of {optimizer.mesh}, and the trainer's are {mesh}; "
            "give MatrixOwners the trainer's mesh"
        )
    if zero != 3 and any(map(has_part, module.parameters())):
        raise InvalidUsage(
            f"the model was made by materialize(zero=3), so this rank has parts of its parameters, and zero is {zero}; "
            "give the trainer zero=3, or make the model with zero=0"
        )
    check_order(zero, queue=planner.queue, split_backward=planner.cluster.split_backward)
    if stages:
        check_same_stages(stages, mesh)
    else:
        check_same_mesh(mesh, str([(name, tuple(p.shape)) for name, p in module.named_parameters()]))
    check_same_trained(trained_names(module), mesh)
    return module, stages


def check_order(zero: int, *, queue: bool, split_backward: bool = False) -> None:
    """Raises InvalidUsage where nobody knows the order in which backward passes end, and ZeRO-2 or 3 needs it."""
    if zero > 1 and (queue or split_backward):
        given = "queue=True, where nobody knows who runs what" if queue else "split_backward=True"
        raise InvalidUsage(
            f"zero={zero} adds gradients in the order in which the plan's backward passes end, and the planner has "
            f"{given}; plan without, or give zero=1"
        )


def _check_cluster(planner: Planner, mesh: Mesh, chunks: int) -> None:
    cluster = planner.cluster
    found = cluster.ranks, cluster.pipeline, cluster.tensor, cluster.chunks
    if found == (mesh.hdp, mesh.pipeline, mesh.tensor, chunks):
        return
    if found[1:] == (1, 1, 1) and mesh.pipeline * mesh.tensor * chunks == 1:
        raise InvalidUsage(
            f"the planner plans for {cluster.ranks} ranks and the communicator has {mesh.hdp}; make it with "
            f"ClusterSpec(ranks={mesh.hdp}, ...)"
        )
    raise InvalidUsage(
        f"the planner plans for {cluster.ranks} ranks of {cluster.pipeline} x {cluster.tensor} devices (pipeline x "
        f"tensor) with {cluster.chunks} stages each, and the mesh has {mesh.hdp} of {mesh.pipeline} x {mesh.tensor} "
        f"with {chunks}; give ClusterSpec(ranks={mesh.hdp}, pipeline={mesh.pipeline}, tensor={mesh.tensor}, "
        f"chunks={chunks}, ...)"
    )


def _check_cut(model: nn.Module, mesh: Mesh) -> None:
    """Raises unless the model, or stage, is cut for the tensor and expert ranks of the mesh."""
    tensor, expert = getattr(model, "tensor", None), getattr(model, "expert", None)
    for group, kind, comm, size, what in (
        (tensor, TensorGroup, mesh.tensor_comm, mesh.tensor, "tensor"),
        (expert, ExpertGroup, mesh.expert_comm, mesh.expert, "expert"),
    ):
        ranks = tuple(group.comm.ranks) if isinstance(group, kind) else ()
        wanted = tuple(comm.ranks) if size > 1 else ()
        if ranks != wanted:
            found = "the model is cut for the tensor ranks" if what == "tensor" else "its experts are on the ranks"
            raise InvalidUsage(
                f"{found} {list(ranks)}, and the {what} ranks of the mesh are {list(wanted)}; give {what}_parallel("
                "model, mesh), with this mesh, and the mesh to the trainer"
            )


def check_log_prob_loss(loss: Any, model: nn.Module, stages: Sequence[Stage]) -> None:
    """Raises InvalidUsage where a loss of log-probabilities would be another one than it says."""
    if not isinstance(loss, (TokenLoss, GroupLoss)):
        return
    parts = (*stages, model)
    if loss.temperature is None and any(
        getattr(each, "takes_label_rows", False) and not getattr(each, "gives_values", False) for each in parts
    ):
        raise InvalidUsage(
            "the loss is one of outputs (temperature=None), and the model's are logits of tokens; give adapt() a "
            "classifier or a critic, as AutoModelForTokenClassification with num_labels=1"
        )
    if not isinstance(loss, GroupLoss):
        return
    if any(getattr(each, "has_added_losses", False) for each in parts):
        raise InvalidUsage(
            "the model's routers add a loss for each label, and the trainer's loss is a GroupLoss, which is divided by "
            "counts of groups; train without (router_losses=RouterLosses(), or router_aux_loss and "
            "router_z_loss of LlamaConfig 0), or with a TokenLoss"
        )
    if (
        any(is_random(stage, None if stage.first else stage.boundary(CHECKED_TOKENS)) for stage in stages)
        if stages
        else is_random(model)
    ):
        raise InvalidUsage(
            "two forward passes of the model in training mode differ (dropout, or noise in its routers), and a "
            "GroupLoss needs two that see the same model; set the probabilities in its configuration to 0"
        )


def trained_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that have a gradient."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def check_trained_names(model: nn.Module, before: frozenset[str]) -> None:
    """Raises InvalidUsage where a parameter was frozen or unfrozen since ``before``: gradients are reduced, and master
    weights kept, of those that were trained when the trainer was made."""
    now = trained_names(model)
    if now == before:
        return
    told = [
        f"{len(names)} {what} (as {min(names)})"
        for what, names in (("unfrozen", now - before), ("frozen", before - now))
        if names
    ]
    raise InvalidUsage(
        f"parameters were {' and '.join(told)} after the trainer was made, which goes on with those of then; make a "
        "new optimizer and a new trainer after each change of requires_grad"
    )


def check_trees(lengths: Sequence[int | Tree], parts: Iterable[nn.Module]) -> None:
    """Raises InvalidUsage for a tree where the parts of a model do not take any. Local."""
    if any(isinstance(length, Tree) for length in lengths) and not all(getattr(x, "takes_trees", True) for x in parts):
        raise InvalidUsage(
            "a tree was given, and the model has layers with chunks of attention, which know no trees; give its "
            "sequences"
        )


def refuse_prefixes(trees: Sequence[TrajectoryTree]) -> None:
    """Raises InvalidUsage for shared prefixes, where the loss is none of log-probabilities."""
    if trees:
        raise InvalidUsage(
            "trees= are of a loss of log-probabilities, and the trainer has another one; give it "
            "loss=hdpcomm.train.losses.sft(), or lengths that are trees"
        )


def mean_loss(total: float, labels: float) -> float:
    """The loss of a step. Raises InvalidUsage: there is nothing to divide by."""
    if labels <= 0:
        raise InvalidUsage(
            "no token of this batch has a label (a sequence of one token has no next one), or the weights of trees "
            f"do not sum up to more than 0 (the sum of labels and weights is {labels}); give longer sequences, "
            "labels or other weights"
        )
    return total / labels
