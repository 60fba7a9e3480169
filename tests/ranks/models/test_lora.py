"""LoRA by peft, unchanged: gradients of the unsharded model for what it trains, nothing for the rest."""

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer

pytest.importorskip("transformers", minversion="4.54")
peft = pytest.importorskip("peft")

from tests.harness.families import LENGTHS, model_of, sequences, unsharded  # noqa: E402
from tests.ranks.models.test_adapt import planner_of  # noqa: E402

TARGETS = {"layers": ["q_proj", "down_proj"], "head": ["q_proj", "lm_head"]}


def lora_of(targets, **options):
    config = peft.LoraConfig(r=2, target_modules=TARGETS[targets], lora_dropout=0.0, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(model_of("qwen3", tie_word_embeddings=False), config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize(("targets", "recompute"), [("layers", "none"), ("layers", "full"), ("head", "none")])
def test_a_step_has_the_gradients_of_the_unsharded_model(targets, recompute):
    loss, gradients = unsharded(lora_of(targets))
    assert gradients
    assert all("lora_" in name for name in gradients)
    models = [lora_of(targets) for _ in range(3)]

    def main():
        comm = hdp.init()
        model = adapt(models[comm.rank], recompute=recompute, chunk_tokens=10)
        trained = [p for p in model.parameters() if p.requires_grad]
        trainer = Trainer(model, torch.optim.SGD(trained, lr=0.0), planner_of(comm.size), comm, max_grad_norm=None)
        return trainer.step(LENGTHS, lambda i: sequences()[i]).loss

    assert run_threads(main, 3, timeout=60.0) == [pytest.approx(loss, rel=1e-5)] * 3
    for model in models:
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (name in gradients)
            if name in gradients:
                error = float((parameter.grad - gradients[name]).norm())
                assert error <= 1e-5 * float(gradients[name].norm()) + 1e-9, name


def test_methods_that_add_tokens_are_refused():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(InvalidUsage, match="PROMPT_TUNING puts tokens of its own"):
        adapt(peft.get_peft_model(model_of("qwen3"), config))
