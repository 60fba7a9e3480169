"""State of a trainer for checkpoints: by the names of the whole model, for any other mesh."""

from __future__ import annotations

import itertools
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.comm import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Weights
from hdpcomm.train.state.layout import Layout, Placement, TensorPart, box_slices, plain_name
from hdpcomm.train.step.averages import AVERAGE, first_average
from hdpcomm.train.zero.masters import Masters, MasterShard
from hdpcomm.train.zero.matrix_owners import MatrixOwners
from hdpcomm.train.zero.shared_parts import names_only

__all__ = ["State", "path_name", "walk_state"]

Path = tuple[str, ...]
"""Where a value is in the nested dict of a state: ("model", name), ("masters", name), ("optimizer", "state", name,
key)."""

_KINDS = {"model": "values", "optimizer": "optimizer state", "masters": "master weights"}


class State:
    """Parameters, buffers, optimizer state and master weights on a rank.

    Args:
        model: the module, or the ``nn.ModuleList`` of stages, on this rank.
        masters: what the optimizer updates in place of the parameters, or ``None``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        mesh: Mesh,
        masters: Masters | None,
    ) -> None:
        self._model, self._optimizer, self._layout, self._mesh = model, optimizer, layout, mesh
        self._masters = masters
        self._owners = optimizer if isinstance(optimizer, MatrixOwners) else None
        self._whole = mesh.pipeline * mesh.tensor * mesh.expert == 1
        """All of the model is on this rank."""

    def parts(self) -> dict[str, Any]:
        """``model``, ``optimizer`` and ``masters``, if there are any: the live tensors, as :class:`TensorPart` of those
        of the whole model where other ranks have parts of it. Collective over the mesh, if there are such ranks.
        """
        _make_state(self._optimizer)
        found: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": []}}
        for path, value in self._live():
            _put(found, path, value)
        groups = self._groups()
        own: list[Any] = [[[_key(group), group["params"]] for group in groups], list(self._plain())]
        comm = self._mesh.comm if self._cut() else self._mesh.pipeline_comm
        everyone = [own] if comm.size == 1 else gather_json(comm, own)
        for _, plain in everyone:
            for path, value in plain:
                _put(found, path, value)
        found["optimizer"]["param_groups"] = _merged_groups(groups, [groups for groups, _ in everyone])
        return found

    def live(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's own share of :meth:`parts`, and no word to others: tensors and parts, by the names of their paths
        (:func:`path_name`); and what is none, as JSON: ``groups``, the options of each and the name of its first
        parameter, and ``plain``. Local."""
        _make_state(self._optimizer)
        tensors = {path_name(path): value for path, value in self._live() if isinstance(value, (Tensor, TensorPart))}
        groups = [{**group, "params": group["params"][:1]} for group in self._groups()]
        return tensors, {"groups": groups, "plain": [[list(path), value] for path, value in self._plain()]}

    def whole(
        self, kinds: Sequence[str] = tuple(_KINDS), *, keep: Callable[[Tensor], Tensor] | None = lambda each: each
    ) -> dict[str, Any]:
        """State with whole tensors, equal on every rank; those that are whole on this rank anyway are the live ones.
        Collective over the mesh, if ranks have parts of the model or of the optimizer's state.

        Args:
            kinds: of ``model``, ``optimizer`` and ``masters``.
            keep: gives what is returned of a tensor that ranks have parts of; ``None``: this rank helps others, and has
                no use for what it returns.
        """
        parts = {kind: part for kind, part in self.parts().items() if kind in kinds}
        if not self._whole or self._cut():
            for path, tensor in _whole_tensors(parts, self._mesh.comm):
                if keep is not None:
                    _put(parts, path, keep(tensor))
        return parts

    def whole_tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers of the whole model by name, one at a time. Collective over the mesh: every rank goes
        through all of them.

        Args:
            names: of those that are wanted, alike on all ranks; ``None``: all.
        """
        model = {path[1]: value for path, value in self._live_model() if names is None or path[1] in names}
        tensors: Iterable[tuple[Path, Tensor]] = (((name,), value) for name, value in model.items())
        if not self._whole or any(isinstance(value, TensorPart) for value in model.values()):
            here = [each for each in tensors if isinstance(each[1], Tensor)]  # as buffers with ZeRO-3
            tensors = itertools.chain(here, _whole_tensors(model, self._mesh.comm))
        yield from ((path[0], value.detach()) for path, value in tensors)

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of a state of :meth:`whole`, of a trainer on any mesh; of :meth:`parts`, into which a
        checkpoint was read, what is not in place already. Local.

        Raises:
            InvalidUsage: the state lacks a tensor that is here.
        """
        _make_state(self._optimizer)
        for path, live in self._live():
            given = _get(state, path)
            name = path[-2] if path[0] == "optimizer" else path[-1]
            if given is None:
                raise InvalidUsage(
                    f"the state has no {_KINDS[path[0]]} for {name}; give that of a trainer of the same model and dtype"
                )
            if isinstance(given, Tensor) and given.shape != live.size():
                raise InvalidUsage(
                    f"the {_KINDS[path[0]]} of {name} are {list(given.shape)} in the state and {list(live.size())} in "
                    "the model that trains; give the state of a trainer of the same model"
                )
            _fill(live, given)
        states = state["optimizer"]["state"]
        for parameter, placement in self._optimized():
            own = self._optimizer.state[parameter]
            for key, value in states.get(placement.trained, {}).items():
                if not isinstance(value, (Tensor, TensorPart)) and not isinstance(own.get(key), Tensor):
                    own[key] = value
        if self._masters is not None:
            self._masters.follow_parameters()
        self._load_groups(state["optimizer"]["param_groups"])

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> None:
        """Takes this rank's part of a whole model's tensors, master weights included; the optimizer's state stays.
        Local, but that others pull parts of parameters from here: call it on all ranks, between steps."""
        wanted: dict[str, list[Any]] = {}
        for path, live in self._live_model():
            wanted.setdefault(path[-1], []).append(live)
        for piece in self._masters.pieces if self._masters is not None else ():
            if piece.master.dtype != piece.parameter.dtype:
                placement = self._layout.of(piece.parameter)
                part = self._piece(placement, piece, piece.master.detach(), same=True)
                wanted.setdefault(placement.name, []).append(part)
        for name, live in wanted.items():
            value = weights.whole(name)
            for each in live:
                _fill(each, value)
        if self._masters is not None:
            self._masters.follow_parameters()

    def _load_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Takes the options of each group from that which had its parameters; of a group without any here, from the one
        in its place."""
        by_name = {name: group for group in saved for name in group["params"]}
        for place, (live, own) in enumerate(zip(self._optimizer.param_groups, self._groups(), strict=True)):
            given = next((by_name[name] for name in own["params"] if name in by_name), None)
            if given is None and place < len(saved):
                given = saved[place]
            live.update({key: value for key, value in (given or {}).items() if key != "params"})

    def _live(self) -> Iterator[tuple[Path, Any]]:
        yield from self._live_model()
        if self._masters is None:
            for parameter, placement in self._optimized():
                for key, value in self._optimizer.state[parameter].items():
                    if isinstance(value, Tensor):
                        if self._owners is not None and self._owners.owns(parameter):
                            made: Any = TensorPart(value.size(), [([0] * value.dim(), value)])
                        else:
                            made = self._part(placement, value, parameter.shape)
                        yield ("optimizer", "state", placement.trained, key), made
            return
        for piece in self._masters.pieces:
            placement, master = self._layout.of(piece.parameter), piece.master
            for key, value in self._optimizer.state[master].items():
                if isinstance(value, Tensor):
                    made = self._piece(placement, piece, value, same=value.shape == master.shape)
                    yield ("optimizer", "state", placement.trained, key), made
            if master.dtype != piece.parameter.dtype:
                yield ("masters", placement.trained), self._piece(placement, piece, master.detach(), same=True)

    def _live_model(self) -> Iterator[tuple[Path, Any]]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        cut = {} if self._masters is None else {id(each.parameter): each for each in self._masters.parts()}
        names = self._model.named_parameters(remove_duplicate=False) if cut else ()
        cut_names = {plain_name(name): cut[id(p)] for name, p in names if id(p) in cut}
        with names_only():  # of those that are cut
            state = get_model_state_dict(self._model)
        for name, value in state.items():
            placement = self._layout.by_name.get(name)
            if placement is not None and name in cut_names:
                own = cut_names[name]  # this rank's shard of a parameter that has no values here (ZeRO-3)
                part = TensorPart.of_range(own.parameter.shape, own.start, own.values)
                yield ("model", placement.name), placement.part(part.boxes, written=own.sharding.first)
                continue
            if placement is None or not isinstance(value, Tensor) or self._whole:
                yield ("model", name if placement is None else placement.name), value
            else:
                first = placement.holders.replicas.rank == 0
                yield ("model", placement.name), placement.part([([0] * value.dim(), value)], written=first)

    def _part(self, placement: Placement, value: Tensor, shape: Sequence[int]) -> Any:
        """A tensor of the optimizer's state: one for each element, or, as a count of steps, one for the parameter."""
        if self._whole:
            return value
        written, boxes = placement.holders.replicas.rank == 0 and not placement.copy, [([0] * value.dim(), value)]
        if value.shape != torch.Size(shape):
            return TensorPart(value.size(), boxes, written=written and placement.writes)
        return placement.part(boxes, written=written)

    def _piece(self, placement: Placement, piece: MasterShard, value: Tensor, *, same: bool) -> Any:
        cut = piece.master.shape != piece.parameter.shape
        if not cut and not self._cut():
            return self._part(placement, value, piece.parameter.shape)
        first = piece.first and not placement.copy
        if not same:
            alone = first and piece.start == 0 and placement.writes
            return TensorPart(value.size(), [([0] * value.dim(), value)], written=alone)
        part = TensorPart.of_range(piece.parameter.shape, piece.start, value.flatten())
        return placement.part(part.boxes, written=first)

    def _cut(self) -> bool:
        """Whether ranks have parts of the optimizer's state, or of weights: with ZeRO-3 one rank alone, too."""
        if self._masters is None:
            return self._owners is not None
        cut = any(bucket.length > bucket.piece for bucket in self._masters.gradients.buckets)
        return cut or next(self._masters.parts(), None) is not None

    def _optimized(self) -> Iterator[tuple[nn.Parameter, Placement]]:
        """Parameters that the optimizer updates on this rank, and their places in the whole model."""
        if self._masters is None:
            for group in self._optimizer.param_groups:
                yield from ((p, self._layout.of(p)) for p in group["params"])
        else:
            yield from ((piece.master, self._layout.of(piece.parameter)) for piece in self._masters.pieces)

    def _plain(self) -> Iterator[tuple[Path, Any]]:
        """Non-tensor state of the optimizer."""
        for parameter, placement in self._optimized():
            for key, value in self._optimizer.state[parameter].items():
                if not isinstance(value, Tensor) and not placement.copy:
                    yield ("optimizer", "state", placement.trained, key), value

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the names of their parameters."""
        names = {id(parameter): placement.trained for parameter, placement in self._optimized()}
        return [{**group, "params": [names[id(p)] for p in group["params"]]} for group in self._optimizer.param_groups]


def _key(group: Mapping[str, Any]) -> str:
    """The options of a group as JSON."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, Tensor) else str(value)

    return json.dumps({key: value for key, value in group.items() if key != "params"}, sort_keys=True, default=plain)


def _merged_groups(own: Sequence[dict[str, Any]], everyone: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """The groups of the whole model, in one order on all ranks, with the names of their parameters. Groups of two ranks
    are one where their options are equal, since a stage may lack some.

    Args:
        everyone: by rank, (:func:`_key`, names) of each group.
    """
    names: dict[tuple[str, int], dict[str, None]] = {}
    for groups in everyone:
        for place, members in zip(_places(key for key, _ in groups), (each for _, each in groups), strict=True):
            names.setdefault(place, {}).update(dict.fromkeys(members))
    here = dict(zip(_places(map(_key, own)), own, strict=True))
    return [{**here.get(place, json.loads(place[0])), "params": list(members)} for place, members in names.items()]


def _places(keys: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Each key with the number of equal ones before it."""
    seen: Counter[str] = Counter()
    for key in keys:
        yield key, seen[key]
        seen[key] += 1


def _whole_tensors(parts: Mapping[str, Any], comm: Communicator) -> Iterator[tuple[Path, Tensor]]:
    """The whole tensors of which the ranks of ``comm`` have parts, one after the other, on each rank. Collective."""
    own = {path: value for path, value in walk_state(parts) if isinstance(value, TensorPart)}
    facts: list[Any] = [
        [path, list(value.size()), *_kind(value), [[list(o), list(t.shape)] for o, t in value.written]]
        for path, value in own.items()
        if value.written
    ]
    there: dict[Path, list[tuple[int, list[Any]]]] = {}
    for rank, entries in enumerate(gather_json(comm, facts)):
        for path, *fact in entries:
            there.setdefault(tuple(path), []).append((rank, fact))
    for path, entries in there.items():
        shape, dtype, on_host, _ = entries[0][1]
        device = torch.device("cpu") if on_host else comm.device
        whole = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for rank, (*_, boxes) in entries:
            for offsets, sizes in boxes:
                if rank == comm.rank:
                    box = own[path].box(torch.Size(offsets)).detach().contiguous()
                else:
                    box = torch.empty(sizes, dtype=whole.dtype, device=device)
                comm.broadcast(box, rank)
                whole[box_slices(offsets, sizes)] = box
        yield path, whole


def _kind(part: TensorPart) -> tuple[str, bool]:
    """The type of a part's elements, and whether they are in host memory, as counts of steps are."""
    tensor = part.boxes[0][1]
    return str(tensor.dtype).removeprefix("torch."), tensor.device.type == "cpu"


def _fill(live: Any, given: Any) -> None:
    """Copies into the live tensor, or the parts of one, what a state has in its place."""
    if isinstance(given, TensorPart):
        return
    if not isinstance(live, TensorPart):
        if isinstance(live, Tensor) and live is not given:
            live.copy_(given if isinstance(given, Tensor) else torch.as_tensor(given))
        return
    for offsets, tensor in live.boxes:
        tensor.copy_(given[box_slices(offsets, tensor.shape)])


def path_name(path: Path) -> str:
    """One name for what lies at a path of a state."""
    return "/".join(path)


def walk_state(state: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a state, each with its path."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from walk_state(value, (*path, name))
        else:
            yield (*path, name), value


def _put(state: dict[str, Any], path: Iterable[str], value: Any) -> None:
    *names, last = path
    for name in names:
        state = state.setdefault(name, {})
    state[last] = value


def _get(state: Mapping[str, Any], path: Path) -> Any:
    found: Any = state
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives parameters without any the state of one that has made no step. Local.

    There is no way to ask an optimizer for it, but a step with a gradient of zero, after which the counts of steps and
    the parameter are put back. A shallow copy of the optimizer makes it, so that hooks, schedulers and counters of the
    program see no step. One parameter at a time: nothing is copied for long.
    """
    if isinstance(optimizer, MatrixOwners):
        for part in optimizer.parts:
            _make_state(part)
        optimizer.link()
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and not optimizer.state.get(p) and (state := _first_state(optimizer, group, p)):
                optimizer.state[p] = state


def _first_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    twin = object.__new__(type(optimizer))
    twin.__dict__ = {**vars(optimizer), "state": defaultdict(dict), "param_groups": [{**group, "params": [p]}]}
    twin.__dict__.pop("step", None)  # a scheduler's, which counts
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()
    if "weight_decay" in group:  # some add it to the gradient
        twin.param_groups[0]["weight_decay"] = 0.0
    before, gradient = p.clone(), p.grad
    p.grad = torch.zeros_like(p)
    try:
        twin.step()
    finally:
        p.copy_(before)
        p.grad = gradient
    state: dict[str, Any] = twin.state.get(p, {})
    if AVERAGE in group:
        first_average(state, p)
    for key, value in {"step": 0.0, "mu_product": 1.0, "eta": float(group.get("lr", 0.0))}.items():  # NAdam, ASGD
        if isinstance(state.get(key), Tensor):
            state[key].fill_(value)
        elif key in state:
            state[key] = type(state[key])(value)
    return state
