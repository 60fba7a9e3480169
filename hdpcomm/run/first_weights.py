"""The weights with which a run begins: new ones, those of a folder, or those of another run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hdpcomm.data.agree import on_rank_0
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import FolderWeights, NewWeights, Weights
from hdpcomm.models.lora_names import base_name, is_adapter
from hdpcomm.models.weights import by_tensor
from hdpcomm.run.model import FolderModel
from hdpcomm.run.resuming import agreed_checkpoint, saved_config

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.run.checkpoints import Checkpoint
    from hdpcomm.run.config import RunConfig
    from hdpcomm.train import Trainer

__all__ = ["CheckpointWeights", "FirstWeights", "keep_optimizer"]


class FirstWeights:
    """Where the models of a run begin, by its configuration. Collective over ``comm``.

    Called with a whole model on the meta device, it gives that model's weights.

    Attributes:
        run: the checkpoint of the other run, if it is one.

    Raises: InvalidUsage, on all ranks: there is neither a run nor a model's folder at ``config.init_from``.
    """

    def __init__(self, comm: Communicator, config: RunConfig) -> None:
        self.run: Checkpoint | None = None
        self._make: Callable[[Any], Weights] = partial(NewWeights, seed=config.seed)
        path, model = config.init_from, config.model
        kind = on_rank_0(comm, lambda: "folder" if path is not None and (path / "config.json").is_file() else "run")
        if path is not None and kind == "run":
            self.run = agreed_checkpoint(comm, path, str(path))
            assert self.run is not None  # or the line above has raised
            self._make = partial(CheckpointWeights, self.run, seed=config.seed)
        elif path is not None:
            if not isinstance(model, FolderModel):
                raise InvalidUsage(
                    f"--init-from {path} is the folder of a transformers model, and this run trains the built-in "
                    f"Llama; give --model {path}, too, or another folder with its configuration"
                )
            self._make = partial(FolderWeights, path, seed=config.seed)
        elif isinstance(model, FolderModel) and model.weights:
            self._make = partial(FolderWeights, model.folder, seed=config.seed)
        if config.keep_optimizer and self.run is None:
            raise InvalidUsage(
                f"--keep-optimizer was given, and --init-from {path} is a model's folder, which has no optimizer; give "
                "a run of hdpcomm train, or leave it out"
            )

    def __call__(self, whole: nn.Module) -> Weights:
        return self._make(whole)


class CheckpointWeights:
    """Weights of the first policy's model in a checkpoint of a run, in the widest type that it holds.

    Args:
        whole: the model that begins with them, on any device; its tensors have the names and shapes of the other one's.
            What the checkpoint lacks and a model computes (tables of rotary positions) is computed.

    Raises: InvalidUsage: it lacks a parameter, or has it in another shape.
    """

    def __init__(self, found: Checkpoint, whole: nn.Module, *, seed: int = 0) -> None:
        self._found, self._files = found, found.open_tensors()
        self._new = NewWeights(whole, seed)
        before = f"policies.{saved_config(found)['policies'][0]}."
        self._keys: dict[str, str] = {}
        buffers = {id(buffer) for buffer in whole.buffers()}
        for names, tensor in by_tensor(whole):
            known = [*names, *map(base_name, names)]  # a run without adapters goes on with them
            keys = [f"{before}{kind}.{name}" for kind in ("masters", "model") for name in known]
            key = next((key for key in keys if key in self._files.kinds), None)
            shape = None if key is None else self._files.kinds[key][0]
            if key is not None and shape == tensor.shape:
                self._keys.update(dict.fromkeys(names, key))
            elif key is not None or not (id(tensor) in buffers or is_adapter(names[0])):
                there = "does not have it" if shape is None else f"has it with the shape {list(shape)}"
                raise InvalidUsage(
                    f"the model has {names[0]} with the shape {list(tensor.shape)}, and {found.path} {there}; "
                    "--init-from goes on with a model of the same layers and widths (data, context, mesh and rotary "
                    "positions may be others)"
                )

    def whole(self, name: str) -> Tensor:
        key = self._keys.get(name)
        if key is None:
            return self._new.whole(name)
        shape, dtype = self._files.kinds[key]
        tensor = torch.empty(shape, dtype=dtype)
        self._found.load_into({key: tensor}, self._files)
        return tensor


def keep_optimizer(found: Checkpoint, trainer: Trainer, name: str) -> None:
    """Gives a new trainer the optimizer's state of another run: its moments and counts of steps. Collective.

    Args:
        name: the optimizer of this run; it must be that of the other one.

    Raises: InvalidUsage: that had another optimizer.
    """
    saved = saved_config(found)
    if (before := saved["optimizer"]) != name:
        raise InvalidUsage(
            f"--keep-optimizer: {found.path} was saved with the optimizer {before}, and this run has {name}; give "
            f"--optimizer {before}, or leave out --keep-optimizer"
        )
    state = trainer.checkpoint_state()
    found.load_into({"policies": {saved["policies"][0]: {"optimizer": {"state": state["optimizer"]["state"]}}}})
    trainer.load_state_dict(state)
