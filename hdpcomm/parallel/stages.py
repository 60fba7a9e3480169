"""A model cut into the stages of a pipeline, by layers: :func:`split_model`. All ranks of a mesh must have cut the same
model alike: each holds its own stages, and none is missing or double.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hdpcomm.attention.packs import CuSeqlens, as_pack
from hdpcomm.comm import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.comm.tensors import plain_tensors
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.models import AdaptedCausalLM, Llama
from hdpcomm.models.expert_group import ExpertGroup
from hdpcomm.models.heads import LayeredModel
from hdpcomm.models.media import MediaEncoder, TokensWithItems
from hdpcomm.models.moe import AddedLosses
from hdpcomm.models.routes import RoutesShape
from hdpcomm.models.self_check import check_same_logits, check_stages, few_logits
from hdpcomm.models.tensor_group import TensorGroup
from hdpcomm.models.weights import by_tensor
from hdpcomm.offload.layers import AbsentLayer, layer_list
from hdpcomm.plan.stage_cut import check_cut

__all__ = [
    "AbsentPart",
    "DeviceStages",
    "Stage",
    "check_same_mesh",
    "check_same_stages",
    "check_same_trained",
    "checked_stages",
    "same_logits",
    "share_values",
    "split_model",
]

_MODEL = "model."
"""Before the names of the model in a :class:`Stage`."""


def _of_model(name: str) -> Any:
    """An attribute of a stage that is one of its model."""
    return property(lambda stage: getattr(stage.model, name), lambda stage, value: setattr(stage.model, name, value))


class Stage(LayeredModel):
    """Some consecutive layers of a model, with its embedding or its head at the ends.

    Called like the model, with the boundary activations ``[tokens, hidden]`` of the stage before in the place of tokens
    unless it is the first (this rank's shard; of it the block of this tensor rank, where there are several), it gives
    those for the next stage, or, if it is the last, what the model gives. Labels are those of the last stage; another
    one with routers whose losses count gets them, too, and gives these losses beside its result. Made by
    :func:`split_model`; the layers are the model's own modules.

    The stage runs the model's own forward, so what a model makes once for all layers (rotary tables, masks) is made on
    each stage from the positions. In the place of the layers of other stages are :class:`AbsentLayer`, so layers keep
    their numbers and their names.

    Attributes:
        model: a :class:`hdpcomm.models.Llama` or :class:`hdpcomm.models.AdaptedCausalLM` with the stage's layers only.
        layers: which of the model's layers these are.
        num_layers: layers of the whole model.
        blocks: the layers.
        first, last: whether the model's embedding and its head are here.
        tied_names: names in the whole model of the head's weight and the embedding's, if they are one.
    """

    embedding: nn.Module = _of_model("embedding")
    """The layer that makes hidden states of tokens; on the first stage."""
    last_layer: nn.Module = _of_model("last_layer")
    """The layer that makes logits; on the last stage."""
    tensor: TensorGroup | None = _of_model("tensor")
    """The ranks that share the layers; see :func:`hdpcomm.parallel.tensor_parallel`."""
    expert: ExpertGroup | None = _of_model("expert")
    """The ranks that share the experts; see :func:`hdpcomm.parallel.expert_parallel`."""
    routes_shape: RoutesShape | None = _of_model("routes_shape")
    """The shape of the whole model's routes; see :mod:`hdpcomm.models.routes`."""
    media: MediaEncoder | None = _of_model("media")
    """The encoder of images and videos, whose weights all stages have."""
    chunk_tokens: int | None = _of_model("chunk_tokens")
    """Tokens in a chunk of the loss; see :func:`hdpcomm.kernels.linear_cross_entropy`."""
    loss_terms: AddedLosses | None = _of_model("loss_terms")
    """Losses that the routers of the whole model add."""

    def __init__(self, model: Llama | AdaptedCausalLM, anatomy: _Anatomy, layers: range) -> None:
        super().__init__()
        self.layers, self.num_layers = layers, len(anatomy.layers)
        self.first, self.last = layers.start == 0, layers.stop == self.num_layers
        self.tied_names = anatomy.tied_names
        self.blocks = tuple(anatomy.layers[place] for place in layers)
        self.model: Llama | AdaptedCausalLM = _cut(model, anatomy, layers)
        there = layer_list(self.model)
        self._edges: Any = (  # no modules of their own
            None if self.first else there[layers.start - 1],
            None if self.last else there[layers.stop],
        )

    @property
    def config(self) -> Any:
        """Configuration of the whole model."""
        return self.model.config if isinstance(self.model, Llama) else self.model.causal_lm.config

    @property
    def takes_trees(self) -> bool:
        """Whether the model's attention knows trees."""
        return getattr(self.model, "takes_trees", True)

    @property
    def tied(self) -> nn.Parameter | None:
        """The parameter whose twin is on the other end of the pipeline, or ``None``. Both start equal."""
        if self.tied_names is None or self.first == self.last:
            return None
        return cast(nn.Parameter, (self.last_layer if self.last else self.embedding).weight)

    def is_everywhere(self, tensor: Tensor) -> bool:
        """Whether it is of the encoder of images and videos, which all stages have: each computes some."""
        return self.media is not None and any(tensor is each for each in self.media.tensors())

    def boundary(self, tokens: int) -> Tensor:
        """An uninitialised tensor for what a stage gives the next one, or its gradient: ``[tokens, hidden]``, with
        tensor parallelism this rank's block of them. Local.
        """
        like = next(p for block in self.blocks for p in block.parameters() if p.is_floating_point())
        width = self.config.hidden if isinstance(self.model, Llama) else self.config.get_text_config().hidden_size
        return torch.empty(self._rows(tokens), width, dtype=like.dtype, device=like.device)

    def finish(self, hidden: Tensor, *labels: Any) -> Tensor:
        """Hidden states for the next stage; on the last one, what the model makes of them."""
        return self.model.finish(hidden, *labels) if self.last else hidden

    def carried(self, cu_seqlens: CuSeqlens) -> Tensor:
        """An uninitialised tensor for what routers give the next stage, or its gradient, fp64: their losses so far, or
        where a loss multiplies sums over all layers, the sums ``[2, sequences, experts]`` so far. Local."""
        assert self.loss_terms is not None  # they count
        shape = self.loss_terms.carried_shape(len(as_pack(cu_seqlens).segments()[0]))
        return self.boundary(0).new_empty(shape, dtype=torch.float64)

    def added_losses(self, router_logits: Any, *places: Any, **_: Any) -> Tensor:
        """Losses of this stage's layers and those before, or what the next one needs for them (:meth:`carried`)."""
        own, before = router_logits
        return self.model.added_losses(own, *places, before=before, last=self.last)

    def joined(self, out: Tensor, added: Tensor) -> Any:
        """The loss with those that layers add; of a stage that is not the last, both."""
        return super().joined(out, added) if self.last else (out, added)

    def run_layers(self, x: Any, *, positions: Tensor, cu_seqlens: CuSeqlens, comm: Communicator) -> tuple[Tensor, Any]:
        """Runs the layers on hidden states, whatever the model does to them before its first and after its last
        layer: that is for the first and the last stage. ``x`` may be (hidden states, :meth:`carried`)."""
        items = x if isinstance(x, TokensWithItems) else None
        x = x if items is None else items.tokens
        x, carried = x if isinstance(x, tuple) else (x, None)
        before, after = self._edges
        model: Any = self.model
        there: dict[str, Any] = {"positions": positions, "cu_seqlens": cu_seqlens, "comm": comm}
        if before is None:
            hidden, added = model.run_layers(items or x, **there)
        else:
            with before.giving(x):
                x = x.new_zeros(()).expand(x.shape)
                hidden, added = model.run_layers(x if items is None else replace(items, tokens=x), **there)
        if after is None:
            return hidden, (added, carried)
        hidden = after.take()[: self._rows(positions.shape[0])]
        if hidden.dtype != (wanted := self.boundary(0).dtype):
            raise InvalidUsage(
                f"{_name(self.model)} has hidden states of {hidden.dtype} and weights of {wanted}; stages exchange the "
                "type of their weights: set residual_in_fp32=False in its configuration, or train it without pipelines"
            )
        return hidden, (added, carried)

    def _rows(self, tokens: int) -> int:
        """Rows of the hidden states that are on this rank."""
        return tokens if self.tensor is None else self.tensor.rows(tokens)

    def name_in_model(self, name: str) -> str:
        """The name that a parameter of this stage has in the model. Local."""
        return name.removeprefix(_MODEL)


def split_model(
    model: nn.Module, stages: int, *, layers: Sequence[int] | None = None, check: bool = True
) -> list[Stage]:
    """The stages of a model, in order; each rank keeps its own and drops the others. Local.

    The layers are shared with ``model``, which still works. With tied embeddings and more than one stage the last one
    gets a copy of the weight, which training keeps equal to that of the first.

    Args:
        model: a :class:`hdpcomm.models.Llama`, or a causal LM of transformers after :func:`hdpcomm.models.adapt`; not
            cut for tensor or expert ranks yet, which is done stage by stage.
        layers: how many each stage gets; default: all as many.
        check: compares the logits of a few tokens, stage by stage, with those of the whole model, for models of
            transformers that are not on the meta device.

    Raises:
        InvalidUsage: the stages do not divide the layers, or ``layers`` does not sum up to them; layers need more of
            each other than hidden states (shared keys, shared weights); the check failed.
    """
    if not isinstance(model, (Llama, AdaptedCausalLM)):
        raise InvalidUsage(
            f"split_model() got a {type(model).__name__}; it cuts hdpcomm.models.Llama, and causal LMs of transformers "
            "(hdpcomm.models.adapt)"
        )
    if model.tensor is not None or model.expert is not None:
        raise InvalidUsage(
            "this model has been cut for tensor or expert ranks already; give it to split_model() first, and then each "
            "stage to tensor_parallel() and expert_parallel()"
        )
    if isinstance(model, AdaptedCausalLM):
        _refuse(model)
    anatomy = _anatomy(model)
    ranges = _ranges(len(anatomy.layers), stages, layers)
    if model.media is not None and model.media.deepest > ranges[0].stop:
        raise InvalidUsage(
            f"the first {model.media.deepest} layers of {_name(model)} add features of its images, and the first stage "
            f"has {ranges[0].stop} layers; give it more (layers=)"
        )
    made = [Stage(model, anatomy, each) for each in ranges]
    if check and isinstance(model, AdaptedCausalLM) and stages > 1:
        check_stages(model, made)
    return made


def _ranges(total: int, stages: int, layers: Sequence[int] | None) -> list[range]:
    if layers is None:
        if stages < 1 or total % stages:
            raise InvalidUsage(
                f"{total} layers cannot be cut into {stages} stages of as many layers each: say how many each stage "
                "gets (layers=, as hdpcomm.plan.stage_layers finds them)"
            )
        layers = [total // stages] * stages
    check_cut(layers, total, stages)
    bounds = [0, *itertools.accumulate(layers)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def _name(model: nn.Module) -> str:
    return type(model.causal_lm if isinstance(model, AdaptedCausalLM) else model).__name__


_WITHOUT = "train it without pipelines"


def _refuse(model: AdaptedCausalLM) -> None:
    """Raises InvalidUsage for what a configuration tells of layers that need more than hidden states."""
    config = model.causal_lm.config.get_text_config()
    if model.gives_values:
        raise InvalidUsage(f"{_name(model)} is a classifier, which stages of a pipeline do not know; {_WITHOUT}")
    if model.mtp is not None:
        raise InvalidUsage(
            f"{_name(model)} has layers for multi-token prediction (add_mtp), which need the embedding of tokens "
            f"behind the last layer, and the first stage has it; {_WITHOUT}"
        )
    if shared := getattr(config, "num_kv_shared_layers", 0):
        raise InvalidUsage(
            f"{_name(model)} has num_kv_shared_layers={shared}: its last layers use keys and values of earlier ones, "
            f"which another stage has; {_WITHOUT}"
        )
    if width := getattr(config, "hidden_size_per_layer_input", 0):
        raise InvalidUsage(
            f"{_name(model)} has hidden_size_per_layer_input={width}: each of its layers needs an embedding of the "
            f"tokens of its own, which the first stage has; {_WITHOUT}"
        )


@dataclass(frozen=True, slots=True)
class _Anatomy:
    """Where the layers of a model are, and the modules with parameters before the first and after the last one."""

    layers: tuple[nn.Module, ...]
    before: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]
    tied_names: tuple[str, str] | None


def _anatomy(model: Llama | AdaptedCausalLM) -> _Anatomy:
    listed = layer_list(model)
    path = next(name for name, module in model.named_modules() if module is listed).split(".")
    around: list[list[nn.Module]] = [[], []]
    parent: nn.Module = model
    for place, part in enumerate(path):
        inner = parent.get_submodule(part)
        for name, _ in parent.named_parameters(recurse=False):
            raise InvalidUsage(
                f"{'.'.join([*path[:place], name])} of {_name(model)} is a parameter beside its layers, and only "
                f"modules before the first and after the last layer can be given to a stage; {_WITHOUT}"
            )
        behind = False
        for child in parent.children():
            behind = behind or child is inner
            if child is not inner and any(True for _ in child.parameters()):
                around[behind].append(child)
        parent = inner
    found = _Anatomy(tuple(listed), tuple(around[0]), tuple(around[1]), _tied_names(model))
    _refuse_shared(model, found)
    return found


def _tied_names(model: Llama | AdaptedCausalLM) -> tuple[str, str] | None:
    weight = getattr(model.embedding, "weight", None)
    if weight is None or weight is not getattr(model.last_layer, "weight", None):
        return None
    names = next(names for names, tensor in by_tensor(model) if tensor is weight)
    return names[-1], names[0]


def _refuse_shared(model: Llama | AdaptedCausalLM, found: _Anatomy) -> None:
    """Raises InvalidUsage where parts of a model that may be on two stages have one parameter, the embedding's apart
    that is the head's."""
    owners: dict[int, int] = {}
    tied = model.embedding.weight if found.tied_names is not None else None
    for place, part in enumerate((*found.before, *found.layers, *found.after)):
        for name, parameter in part.named_parameters():
            if owners.setdefault(id(parameter), place) != place and parameter is not tied:
                raise InvalidUsage(
                    f"{name} of a {type(part).__name__} of {_name(model)} is the parameter of another layer, too, "
                    f"which may be on another stage; {_WITHOUT}"
                )


def _cut(model: Llama | AdaptedCausalLM, anatomy: _Anatomy, layers: range) -> Llama | AdaptedCausalLM:
    """A copy of the model around its own layers, with the parts of a stage and others in the place of the rest."""
    first, last = layers.start == 0, layers.stop == len(anatomy.layers)
    put: dict[int, Any] = {}
    """By the identity of what the model has, what the copy has in its place."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        put[id(config)] = config
        if callable(getattr(config, "get_text_config", None)):
            put[id(config.get_text_config())] = config.get_text_config()
    for place, layer in enumerate(anatomy.layers):
        kind = {layers.start - 1: _LayerBefore, layers.stop: _LayerAfter}.get(place, AbsentLayer)
        put[id(layer)] = layer if place in layers else kind(layer)
    encoders = () if model.media is None else tuple(model.media.modules())
    for part in anatomy.before:
        put[id(part)] = part if first or part in encoders else AbsentPart(part)
    for part in anatomy.after:
        put[id(part)] = part if last else AbsentPart(part)
    if anatomy.tied_names is not None and last and not first:
        head: Any = model.last_layer
        weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        own = {id(p): p for p in head.parameters()} | {id(head.weight): weight}
        put[id(head)] = copy.deepcopy(head, own)
    made: Llama | AdaptedCausalLM = copy.deepcopy(model, put)
    return made


class AbsentPart(nn.Module):
    """Stands for what another stage has before the first layer or after the last one. What it gives is not used."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self._width = part.embedding_dim if isinstance(part, nn.Embedding) else None

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x if self._width is None else torch.zeros(*x.shape, self._width, device=x.device)


class _LayerBefore(AbsentLayer):
    """The last layer of the stage before: gives what came from there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self._given: Tensor | None = None

    @contextmanager
    def giving(self, x: Tensor) -> Iterator[None]:
        """Inside, the layer gives ``x: [rows, width]``."""
        self._given = x
        try:
            yield
        finally:
            self._given = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        like, x = super().forward(*args, **kwargs), self._given
        assert x is not None  # the stage gives it
        if like.shape[-2] > x.shape[0]:  # a token that stands for none
            x = torch.cat((x, x.new_zeros(like.shape[-2] - x.shape[0], x.shape[1])))
        return x.view(like.shape)


class _LayerAfter(AbsentLayer):
    """The first layer of the next stage: keeps what is for there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self._taken: Tensor | None = None

    def take(self) -> Tensor:
        """Rows since the last call: ``[rows, width]``."""
        taken, self._taken = self._taken, None
        assert taken is not None  # the model has run
        return taken.flatten(0, -2)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self._taken = super().forward(*args, **kwargs)
        return self._taken


class DeviceStages(nn.Module):
    """Runs one micro-batch through the stages of a device, one after the other. What other stages give is made up.

    Called like a model with labels. Its loss is the model's if the last stage is here; else one whose gradient is as
    large as what comes from the next stage.

    Args:
        stages: of one device, in order, cut for its tensor and expert ranks.

    Attributes:
        layers: of all stages, in order.
    """

    takes_labels = True

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        self.stages = tuple(stages)
        for place, stage in enumerate(stages):
            self.add_module(f"stage{place}", stage)
        self.layers = nn.ModuleList(block for stage in stages for block in stage.blocks)
        self.tensor, self.expert = stages[0].tensor, stages[0].expert
        if stages[0].first:
            self.embedding = stages[0].embedding
        if stages[-1].last:  # as models tell how their loss is computed
            self.chunk_tokens = stages[-1].chunk_tokens
            self.last_layer = stages[-1].last_layer

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        cu_seqlens: CuSeqlens,
        comm: Communicator,
        labels: Tensor,
    ) -> Tensor:
        """The loss of ``tokens: [local tokens]``. Collective over ``comm``, and the ranks that share layers."""
        x: Any = tokens
        where: dict[str, Any] = {"positions": positions, "cu_seqlens": cu_seqlens, "comm": comm}
        for stage in self.stages:
            if not stage.first and x is tokens:
                x = self._given(stage, tokens.shape[0])
            if stage.last:
                stage.chunk_tokens = self.chunk_tokens
            x = stage(x, **where, labels=labels if stage.last or stage.has_added_losses else None)
        x, carried = x if isinstance(x, tuple) else (x, None)
        total: Tensor = x if self.stages[-1].last else (x * x.detach()).sum()
        return total if carried is None else total + carried.sum()

    def _given(self, stage: Stage, tokens: int) -> Tensor:
        """Rows that differ, since routers send equal ones to the same experts."""
        x = stage.boundary(tokens)
        if not x.is_meta:
            x.normal_(generator=torch.Generator(x.device).manual_seed(0))
        return x.requires_grad_()


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
