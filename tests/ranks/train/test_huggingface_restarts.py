"""``transformers.Trainer`` with plans under torchrun: when a rank dies, all start anew and go on from a checkpoint.

On the backend ``hdpcomm``: a gloo group of torch 2.13 that is made after a restart may wait for an address of before.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.harness.warm_python import run_python

_PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import torch, transformers
import hdpcomm.torch_backend
from transformers.trainer_utils import get_last_checkpoint
from hdpcomm.integrations.huggingface import Trainer
from hdpcomm.plan import CostModel
from tests.harness.tiny_huggingface import arguments, documents, tiny

out, dies = Path(sys.argv[1]), sys.argv[2] == "dies"
first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"

torch.distributed.init_process_group("hdpcomm")

class Dies(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if dies and first and os.environ["RANK"] == "1" and state.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

args = arguments(out, 1, 1, max_steps=12, save_strategy="steps", save_steps=3, optim="adamw_torch", learning_rate=1e-2)
trainer = Trainer(
    model=tiny(), args=args, train_dataset=documents(), callbacks=[Dies()], cost_model=CostModel(1e-9, 1e-6, 1e-4)
)
found = get_last_checkpoint(str(out)) if out.is_dir() else None
trainer.train(resume_from_checkpoint=found)
if os.environ["RANK"] == "0":
    torch.save(trainer.model.state_dict(), out / "weights.pt")
    (out / "found.txt").write_text(str(found))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    (out / "losses.json").write_text(json.dumps([(row["step"], row["loss"]) for row in rows]))
"""


def test_weights_are_those_of_a_run_that_nobody_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    for name in ("lives", "dies"):
        run_python([*launcher, str(program), str(tmp_path / name), name], env=environment, timeout=200, check=True)
    lives, dies = tmp_path / "lives", tmp_path / "dies"
    assert (lives / "found.txt").read_text() == "None"
    assert (dies / "found.txt").read_text().endswith("checkpoint-6")
    assert json.loads((dies / "losses.json").read_text()) == json.loads((lives / "losses.json").read_text())
    expected = torch.load(lives / "weights.pt", weights_only=True)
    for name, value in torch.load(dies / "weights.pt", weights_only=True).items():
        assert torch.equal(value, expected[name]), name
