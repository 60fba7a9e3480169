"""Trained weights to vLLM's workers, as its weight transfer has it: a backend ``hdpcomm``.

What a trainer's ranks hold of each tensor, on any mesh and with any ``zero``, goes to the workers as it is: nothing is
gathered on the trainer's side, each byte crosses hosts once, and each worker gets the tensors of a few layers at a
time, under the names of the model's files, as vLLM's ``load_weights`` takes them. Written for vLLM 0.33; the processes
that train need no vLLM.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hdpcomm.arguments import check_whole
from hdpcomm.comm import Communicator
from hdpcomm.comm.bootstrap import join
from hdpcomm.comm.secret import Secret, new_secret
from hdpcomm.comm.torch_store import SignedStore
from hdpcomm.data.agree import gather_json, on_rank_0, raise_together
from hdpcomm.errors import CommTimeout, InvalidUsage
from hdpcomm.models.export import by_layer
from hdpcomm.train import Trainer
from hdpcomm.train.state.layout import TensorPart
from hdpcomm.train.state.reshard import Reshard

__all__ = ["SyncClient", "WeightSender", "WeightStages", "join_workers", "register"]

BACKEND = "hdpcomm"
_STAGE_BYTES = 1 << 30


class SyncClient(Protocol):
    """vLLM's ``VLLMWeightSyncClient``: its HTTP routes, an actor of Ray, or an engine in this process."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every worker gets it; returns when all have it carried out."""

    def start_weight_update(self) -> None:
        """Likewise."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Likewise."""

    def finish_weight_update(self) -> None:
        """Likewise."""


class WeightStages:
    """The exchange of a model, some layers at a time, between the ranks that train it and workers that want it whole.

    Collective over ``comm``, as is :meth:`run`; nothing is moved before that.

    Args:
        shapes: of all tensors, by their names in the model of transformers, those of a layer together; equal on all
            ranks.
        comm: of the ranks that train and the workers.
        source: what this rank has; ``None``: it is a worker.
        dtype: in which workers get them.
        stage_bytes: most bytes that a worker has of tensors that it has not loaded yet, but for a layer that is larger.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        comm: Communicator,
        source: Mapping[str, TensorPart | Tensor] | None,
        *,
        dtype: torch.dtype,
        stage_bytes: int = _STAGE_BYTES,
    ) -> None:
        check_whole("WeightStages", "stage_bytes", stage_bytes, least=1)
        self._comm = comm
        self._stages: list[tuple[list[dict[str, Tensor]], Reshard]] = []
        layers = [list(layer) for layer in by_layer(shapes.items())]
        groups = _groups(layers, shapes, dtype.itemsize, stage_bytes)
        elements = max(sum(_count(shapes[name]) for layer in group for name in layer) for group in groups)
        staging = torch.empty(elements if source is None else 0, dtype=dtype)  # the same for all stages
        for group in groups:
            names = [name for layer in group for name in layer]
            own = {} if source is None else {name: source[name] for name in names if name in source}
            wanted: dict[str, Tensor] = {}
            place = 0
            for name in names if source is None else ():
                count = _count(shapes[name])
                wanted[name] = staging[place : place + count].view(*shapes[name])
                place += count
            made = [{name: wanted[name] for name in layer} for layer in group] if wanted else []
            self._stages.append((made, Reshard(own, wanted, comm)))

    @property
    def bytes_sent(self) -> int:
        """By this rank in a run."""
        return sum(moving.bytes_sent for _, moving in self._stages)

    def run(self, load: Callable[[dict[str, Tensor]], None] | None = None) -> None:
        """Moves all tensors. A worker's ``load`` gets those of a layer; they are overwritten once it has returned.

        Raises: what ``load`` raised, with whose text the others' operations end (``abort()``); as :meth:`Reshard.run`.
        """
        for layers, moving in self._stages:
            moving.run()
            if load is None:
                continue
            try:
                for layer in layers:
                    load(layer)
            except BaseException as error:
                self._comm.abort(f"rank {self._comm.rank} could not load weights: {error}")
                raise


def join_workers(place: Mapping[str, Any], rank: int, *, server: bool = False) -> tuple[Communicator, Any]:
    """The communicator of the ranks that train and the workers, who know nothing of each other but an address; and the
    store by which they have met, which lives as long.

    Collective over all ``size`` ranks.

    Args:
        place: ``address``, ``port``, ``size``, ``secret``, which nobody else may know, and ``timeout``: seconds, also
            of every operation.
        server: the address is on this rank's host, and it serves the others.

    Raises: as :func:`hdpcomm.init`.
    """
    size, timeout = place["size"], place["timeout"]
    inner = dist.TCPStore(  # type: ignore[attr-defined]
        place["address"], place["port"], size, server, timedelta(seconds=timeout), wait_for_workers=False
    )
    store = SignedStore(inner, Secret(place["secret"]), rank, seconds=timeout)
    made = join(store, rank, size, timeout=timeout, devices=False)
    made.barrier()  # nobody asks the store any more, should its rank leave
    return made, store


class WeightSender:
    """The trainer's side. Collective over the trainer's ranks, as is :meth:`send`.

    Args:
        trainer: of a model of transformers that :func:`hdpcomm.adapt` took.
        comm: of the ranks that train.
        client: on rank 0, the workers' control (vLLM's ``VLLMWeightSyncClient``); elsewhere it is not used.
        workers: how many take part: data, tensor and pipeline ranks of all of vLLM's engines.
        address: of this host on rank 0, as the workers see it.
        dtype: of vLLM's weights.
        stage_bytes: as :class:`WeightStages`.
        timeout: seconds for joining, for each operation, and for each answer of the workers.

    Raises: InvalidUsage on all ranks: rank 0 has no client or another address, or a tensor is not floating point; as
        :func:`hdpcomm.init`.

    Example, on every rank of a trainer::

        sender = WeightSender(trainer, comm, client, workers=8, address="10.0.0.1")
        trainer.step(lengths, fetch)
        sender.send()
    """

    def __init__(
        self,
        trainer: Trainer,
        comm: Communicator,
        client: SyncClient | None,
        *,
        workers: int,
        address: str = "127.0.0.1",
        dtype: torch.dtype = torch.bfloat16,
        stage_bytes: int = _STAGE_BYTES,
        timeout: float = 300.0,
    ) -> None:
        check_whole("WeightSender", "workers", workers, least=1)
        self._client, self._rank, self._timeout = client, comm.rank, timeout
        port, secret = on_rank_0(comm, lambda: f"{_free_port(address, client)} {new_secret()}").split()
        source = {name.removeprefix("model."): part for name, part in trainer.checkpoint_state()["model"].items()}
        shapes = _shapes_of(source, comm)
        place = {
            "address": address, "port": int(port), "size": comm.size + workers, "secret": secret, "timeout": timeout,
        }  # fmt: skip
        told = {
            "place": place, "trainers": comm.size, "names": list(shapes), "shapes": [*map(list, shapes.values())],
            "dtype": str(dtype).removeprefix("torch."), "stage_bytes": stage_bytes,
        }  # fmt: skip
        with self._calling("init_weight_transfer_engine", told):
            self._world, self._store = join_workers(place, comm.rank, server=comm.rank == 0)
            self._stages = WeightStages(shapes, self._world, source, dtype=dtype, stage_bytes=stage_bytes)

    def send(self) -> None:
        """Gives the workers the weights of now, and has them load these.

        Raises: on rank 0 what the client's call raised, and an error with its text elsewhere: make another sender; as
        :meth:`Reshard.run`.
        """
        if self._rank == 0 and self._client is not None:
            self._client.start_weight_update()
        with self._calling("update_weights", {}, self._world):
            self._stages.run()
        if self._rank == 0 and self._client is not None:
            self._client.finish_weight_update()

    def close(self) -> None:
        """Leaves the workers. Local."""
        self._world.close()

    @contextlib.contextmanager
    def _calling(self, name: str, told: Mapping[str, Any], world: Communicator | None = None) -> Iterator[None]:
        """Rank 0 calls the client meanwhile: all workers do in it what the ``with`` does here. When the call fails,
        nobody is left to exchange with, so the ``with`` is ended, too."""
        if self._rank:
            yield
            return
        errors: list[BaseException] = []

        def run() -> None:
            try:
                getattr(self._client, name)(told)
            except BaseException as error:
                errors.append(error)
                if world is not None:
                    world.abort(f"a worker of vLLM failed: {error}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            thread.join(5.0)  # a worker may not answer after an error here
            if errors:
                raise errors[0] from error
            raise
        thread.join(self._timeout)
        if errors:
            raise errors[0]
        if thread.is_alive():
            raise CommTimeout(
                f"rank 0 has no answer of vLLM's workers to {name}() {self._timeout} s after they got their part; look "
                "at their logs, or give WeightSender a longer timeout",
                rank=0,
                op=name,
            )


def register() -> None:
    """Tells vLLM of the backend; vLLM calls it in each of its processes (entry point ``vllm.general_plugins``)."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "hdpcomm.integrations.vllm_engine", "WeightReceiver")


def _shapes_of(source: Mapping[str, TensorPart | Tensor], comm: Communicator) -> dict[str, list[int]]:
    """Shapes of all ranks' tensors, layer by layer. Collective. Raises: InvalidUsage: one is not floating point."""
    other = [
        f"{name} ({tensor.dtype})"
        for name, part in source.items()
        for tensor in ([part] if isinstance(part, Tensor) else [box for _, box in part.boxes])
        if not tensor.is_floating_point()
    ]
    error = InvalidUsage(f"the model has {other[0]}; WeightSender takes floating point tensors only") if other else None
    raise_together(comm, error, order=comm.rank)
    found: dict[str, list[int]] = {}
    for own in gather_json(comm, {name: list(part.size()) for name, part in source.items()}):
        found.update(own)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> list[tuple[int, str]]:
    """Layers by number, what is of one layer together."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]


def _groups(
    layers: Sequence[list[str]], shapes: Mapping[str, Sequence[int]], item: int, most: int
) -> list[list[list[str]]]:
    """Layers in order, as many together as have at most so many bytes."""
    groups: list[list[list[str]]] = []
    size = most + 1
    for layer in layers:
        own = item * sum(_count(shapes[name]) for name in layer)
        if size + own > most:
            groups.append([])
            size = 0
        groups[-1].append(layer)
        size += own
    return groups


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _free_port(address: str, client: SyncClient | None) -> int:
    """A port of rank 0's host at the address. Raises: InvalidUsage."""
    if client is None:
        raise InvalidUsage("WeightSender on rank 0 got no client; give what controls vLLM's workers")
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise InvalidUsage(
            f"WeightSender got the address {address!r}, at which rank 0 cannot be reached ({error}); give one of rank "
            "0's host that the workers see"
        ) from None
