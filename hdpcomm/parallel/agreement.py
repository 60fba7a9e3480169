"""All ranks of a mesh must have cut the same model alike: each holds its own stages, and none is missing or double."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hdpcomm.comm import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.comm.tensors import plain_tensors
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.models import AdaptedCausalLM
from hdpcomm.models.self_check import check_same_logits, few_logits
from hdpcomm.parallel.stages import Stage

__all__ = [
    "check_same_mesh",
    "check_same_stages",
    "check_same_trained",
    "checked_stages",
    "same_logits",
    "share_values",
]


@contextmanager
def same_logits(model: nn.Module, comm: Communicator, what: str, *, check: bool) -> Iterator[None]:
    """Surrounds what leaves each rank of ``comm`` its part of a model: all start with the first one's values, and the
    logits of a few tokens, of a model of transformers that is neither a stage nor on the meta device, stay. Collective
    over ``comm``. Raises InvalidUsage where they differ, of ``what``."""
    tensors = (*model.parameters(), *model.buffers())
    share_values(comm, (t for t in tensors if not t.is_meta))
    checked = check and isinstance(model, AdaptedCausalLM) and not any(t.is_meta for t in tensors)
    wanted = few_logits(model) if checked else None
    yield
    if wanted is not None:
        check_same_logits(model, few_logits(model), wanted, what)


def checked_stages(given: Stage | Sequence[Stage], mesh: Mesh) -> list[Stage]:
    """The stages as a list. Local. Raises InvalidUsage unless they can be those of this rank."""
    stages = [given] if isinstance(given, Stage) else list(given) if isinstance(given, Sequence) else []
    how = f"split_model(model, {mesh.pipeline})[mesh.stage], or split_model(model, n)[mesh.stage::{mesh.pipeline}]"
    if not stages or not all(isinstance(stage, Stage) for stage in stages):
        raise InvalidUsage(f"the model is a {type(given).__name__}; give this rank's stages, {how}")
    if len(stages) > 1 and mesh.pipeline == 1:
        raise InvalidUsage(f"{len(stages)} stages on a device need a pipeline of 2 devices or more; give one stage")
    last = mesh.stage == mesh.pipeline - 1
    for place, stage in enumerate(stages):
        if (stage.first, stage.last) != (mesh.stage + place == 0, last and place == len(stages) - 1):
            raise InvalidUsage(
                f"this rank is stage {mesh.stage} of {mesh.pipeline}, and was given the layers {stage.layers.start} to "
                f"{stage.layers.stop - 1} of {stage.num_layers} as number {place} of its {len(stages)}; give {how}"
            )
    return stages


def check_same_mesh(mesh: Mesh, model: str) -> None:
    """Compares the meshes of all ranks, and what ``model`` says of theirs. Collective over the mesh.

    Raises: Mismatch on every rank, naming the ranks with another one.
    """
    own = _digest(f"{mesh.pipeline} {mesh.tensor} {mesh.expert} {mesh.positions.tolist()} {model}")
    digests = gather_json(mesh.comm, own)
    others = [rank for rank, digest in zip(mesh.comm.ranks, digests, strict=True) if digest != own]
    if others:
        raise _mismatch(
            f"rank {mesh.comm.global_rank} has another mesh or another model than the ranks {others}: {mesh}; give "
            "Mesh and the model (split_model, tensor_parallel) the same arguments on all ranks",
            mesh,
        )


def check_same_stages(stages: Sequence[Stage], mesh: Mesh) -> None:
    """Compares the meshes and the cuts of all ranks. Collective over the mesh.

    Raises: Mismatch on every rank, naming the ranks with another mesh, or the layers that do not follow each other.
    """
    check_same_mesh(mesh, f"{stages[0].config} {len(stages)}")
    own = torch.tensor([[stage.layers.start, stage.layers.stop] for stage in stages], dtype=torch.int64)
    rows = own.new_empty(mesh.comm.size, len(stages), 2)
    mesh.comm.all_gather(rows, own)
    # [chunk, stage, HDP rank, (first, end)]
    bounds = rows[mesh.positions[:, :, 0]].permute(2, 0, 1, 3).flatten(0, 1).tolist()
    alike = all(row == each[0] for each in bounds for row in each)
    if not alike or any(before[0][1] != after[0][0] for before, after in itertools.pairwise(bounds)):
        raise _mismatch(
            f"the stages hold the layers [first, end] {bounds}, HDP rank by HDP rank, which do not follow each other; "
            "give split_model the same arguments on all ranks",
            mesh,
        )


def check_same_trained(trained: Collection[str], mesh: Mesh) -> None:
    """Compares the names of the trained parameters of all ranks with the same stage. Collective over the mesh.

    Raises:
        Mismatch: on every rank, naming the ranks that train others.
        InvalidUsage: on every rank, where a stage has none.
    """
    nothing = _digest("")
    digests = gather_json(mesh.comm, _digest("\n".join(sorted(trained))))
    for stage, positions in enumerate(mesh.positions.flatten(1).tolist()):
        found = {position: digests[position] for position in positions}
        usual, _ = Counter(found.values()).most_common(1)[0]
        if others := [mesh.comm.ranks[position] for position in positions if found[position] != usual]:
            raise _mismatch(
                f"the ranks {others} train other parameters than the other ranks of their stage (rank "
                f"{mesh.comm.global_rank} trains {len(trained):,}); freeze the same ones (requires_grad) on all ranks",
                mesh,
            )
        if usual == nothing:
            where = f"stage {stage}" if mesh.pipeline > 1 else "the model"
            raise InvalidUsage(
                f"{where} has no parameter with requires_grad; there is nothing to train"
                + (" on its ranks; train something of each stage, or without a pipeline" if mesh.pipeline > 1 else "")
            )


def _digest(facts: str) -> str:
    return hashlib.sha256(facts.encode()).hexdigest()


def _mismatch(message: str, mesh: Mesh) -> Mismatch:
    return Mismatch(message, rank=mesh.comm.global_rank, op="mesh", ranks=mesh.comm.ranks)


def share_values(comm: Communicator, tensors: Iterable[Tensor], root: int = 0) -> None:
    """Gives all ranks the values of ``root``, in place; the tensors may be strided, or quantised. Collective over
    ``comm``."""
    with torch.no_grad():
        for tensor in (plain for each in tensors for plain in plain_tensors(each)):
            whole = tensor.detach().resolve_conj().contiguous()
            comm.broadcast(torch.view_as_real(whole) if whole.is_complex() else whole, root)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)
