"""The trained model of a run as a Hugging Face folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.models.export import check_export, export_llama
from hdpcomm.run.model import FolderModel, read_config

__all__ = ["check_export", "export_model"]

_BESIDE = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("spiece.model", "sentencepiece*", "generation_config.json"),
)


def export_model(model: LlamaConfig | FolderModel, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` opens. Local.

    A model of a folder keeps that folder's configuration, tokenizer and chat template.

    Args:
        state: ``RunResult.state``.
        folder: there whole or not at all; must not exist, or be empty.

    Raises: InvalidUsage: of :func:`hdpcomm.models.export.check_export`, or weights that do not fit.
    """
    if isinstance(model, LlamaConfig):
        export_llama(model, state, folder)
        return
    check_export(folder)
    from transformers import AutoModelForCausalLM

    weights = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    made = AutoModelForCausalLM.from_config(read_config(model.folder), dtype=dtype)
    try:
        made.load_state_dict(weights)
    except RuntimeError as error:
        raise InvalidUsage(f"the weights do not fit {model.folder}/config.json: {str(error)[:300]}") from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        partial = Path(name) / "model"
        made.save_pretrained(partial)
        for path in sorted({path for pattern in _BESIDE for path in model.folder.glob(pattern) if path.is_file()}):
            shutil.copy(path, partial / path.name)
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
