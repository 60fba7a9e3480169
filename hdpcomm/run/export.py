"""The trained model of a run as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch

from hdpcomm.models import AdaptedCausalLM, LlamaConfig
from hdpcomm.models.export import check_export, export_llama, write_folder
from hdpcomm.models.lora import write_adapters
from hdpcomm.run.model import FolderModel, model_on_meta, read_config

__all__ = ["check_export", "export_model"]

_BESIDE = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("spiece.model", "sentencepiece*", "generation_config.json", "*processor_config.json"),
)


def export_model(
    model: LlamaConfig | FolderModel,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    folder: Path,
) -> None:
    """Writes a folder that transformers' ``from_pretrained`` opens. Local.

    A model of a folder keeps that folder's configuration, tokenizer, processor and chat template. One with LoRA gives
    its adapters, which ``peft.PeftModel.from_pretrained`` opens.

    Args:
        tensors: of the trained model by name, all at once or one by one: :meth:`hdpcomm.train.Trainer.whole_tensors`.
        folder: there whole or not at all; must not exist, or be empty.

    Raises: InvalidUsage: of :func:`hdpcomm.models.export.check_export`, or weights that do not fit.
    """
    if isinstance(model, LlamaConfig):
        export_llama(model, tensors, folder)
        return
    check_export(folder)
    given = tensors.items() if isinstance(tensors, Mapping) else tensors
    if model.lora is not None:
        whole = model_on_meta(model)
        assert isinstance(whole, AdaptedCausalLM)
        write_adapters(whole, given, folder, base=model.folder)
        return
    renamed = ((name.removeprefix("model."), tensor) for name, tensor in given)
    depths = model.depths if model.mtp_weight else 0
    write_folder(read_config(model.folder), renamed, folder, beside=partial(_copy_beside, model.folder), depths=depths)


def _copy_beside(source: Path, folder: Path) -> None:
    for path in sorted({path for pattern in _BESIDE for path in source.glob(pattern) if path.is_file()}):
        shutil.copy(path, folder / path.name)
