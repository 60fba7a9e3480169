"""transformers.Trainer with plans: its weights are those of transformers' own Trainer on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.harness.tiny_huggingface import leave, padded, run  # noqa: E402


def planned(out: str, batch: int, accumulate: int, with_padding: bool) -> Any:
    from hdpcomm.integrations.huggingface import Trainer

    try:
        collator = padded if with_padding else None
        return run(Trainer, Path(out), batch, accumulate, collator)
    finally:
        leave()


def reference(out: Path, batch: int, accumulate: int, with_padding: bool) -> Any:
    """transformers' own Trainer, in this process, on the batches of all ranks."""
    flatten = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=False)
    try:
        return run(transformers.Trainer, out, batch, accumulate, padded if with_padding else flatten)
    finally:
        leave()


@pytest.mark.parametrize(
    ("size", "accumulate", "with_padding"), [(1, 1, True), (2, 1, False), (2, 2, True), (3, 1, True)]
)
def test_weights_and_losses_are_those_of_transformers(
    ranks: Any, tmp_path: Path, size: int, accumulate: int, with_padding: bool
) -> None:
    batch = 12 // size // accumulate // (1 if size == 3 else 2)
    all_ranks = ranks(size, planned, str(tmp_path / "a"), batch, accumulate, with_padding)
    # Ranks take turns batch by batch, so that one process with all their rows sees the same batches.
    expected, logged, evaluated = reference(tmp_path / "b", batch * size, accumulate, with_padding)
    for found, losses, loss in all_ranks:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)
        assert [entry["loss"] for entry in losses] == pytest.approx([entry["loss"] for entry in logged], abs=2e-4)
        assert [e["grad_norm"] for e in losses] == pytest.approx([e["grad_norm"] for e in logged], rel=1e-4)
        assert all(entry["hdp_tokens"] > 0 and entry["hdp_micro_batches"] >= 1 for entry in losses)
        if size == 1:
            assert loss == pytest.approx(evaluated, abs=1e-5)
