"""vLLM's side of the backend: made by vLLM in each of its workers (:mod:`hdpcomm.integrations.vllm`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations.vllm import WeightStages, join_workers
from hdpcomm.models.export import as_saved
from hdpcomm.models.media import auto_class

__all__ = ["WeightReceiver"]


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Facts that :class:`hdpcomm.integrations.vllm.WeightSender` sends each worker."""

    place: dict[str, Any]
    trainers: int
    names: list[str]
    shapes: list[list[int]]
    dtype: str
    stage_bytes: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Nothing: what comes has been told in the beginning."""


class WeightReceiver(WeightTransferEngine):  # type: ignore[misc]
    """One worker. Which rank it is follows from vLLM's own: data, then pipeline and tensor ranks, after those that
    train."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._world: Communicator | None = None
        self._stages: WeightStages | None = None
        self._store: Any = None
        with torch.device("meta"):  # knows the names of its files
            config = self.model_config.hf_config
            self._reference = auto_class(config.model_type).from_config(config)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the ranks that train. Collective over these and all workers."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.trainers + parallel.data_parallel_index * parallel.world_size + parallel.rank
        if rank >= init_info.place["size"]:
            raise InvalidUsage(
                f"worker {rank - init_info.trainers} of vLLM joins a trainer that was told of "
                f"{init_info.place['size'] - init_info.trainers} workers; give WeightSender(workers=) all of them"
            )
        self._world, self._store = join_workers(init_info.place, rank)
        shapes = dict(zip(init_info.names, init_info.shapes, strict=True))
        self._stages = WeightStages(
            shapes, self._world, None, dtype=getattr(torch, init_info.dtype), stage_bytes=init_info.stage_bytes
        )

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Collective, as :meth:`init_transfer_engine`."""
        del update_info
        if self._stages is None:
            raise InvalidUsage("update_weights() before init_weight_transfer_engine(); make the trainer's WeightSender")
        self._stages.run(self._load)

    def _load(self, layer: dict[str, torch.Tensor]) -> None:
        stored = as_saved(self._reference, layer)
        # a copy: vLLM keeps tensors until all of one of its layers have come
        self.model.load_weights([(name, tensor.to(self.device, copy=True)) for name, tensor in stored.items()])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leaves the ranks that train. Local."""
        if self._world is not None:
            self._world.close()
        self._world = self._stages = self._store = None
