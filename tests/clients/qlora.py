"""LoRA over weights that torchao has quantised to int8 and int4: hdpcomm's Trainer with zero=3, against transformers'
alone."""

from __future__ import annotations

from typing import Any

from common import Figures, figures_of, join, leave, main, tiny_llama
from transformers_trainer import arguments, rows


def configs() -> dict[str, Any]:
    """Weight-only quantisation that torchao has on CPUs."""
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return {"int8": Int8WeightOnlyConfig(), "int4": IntxWeightOnlyConfig(torch.int4, PerGroup(32))}


def case(backend: str, name: str, config: Any) -> Figures:
    import peft
    import torch
    import transformers
    from torchao.quantization import quantize_

    model = tiny_llama()
    quantize_(model.model, config)
    torch.manual_seed(5)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    planned = backend == "hdpcomm"
    args = arguments(f"out-{backend}-{name}", 3 if planned else 6, optim="sgd", learning_rate=0.1)
    if planned:
        from hdpcomm.integrations.huggingface import Trainer

        trainer = Trainer(model=model, args=args, train_dataset=rows(), zero=3)
    else:
        collator = transformers.DataCollatorWithFlattening()
        trainer = transformers.Trainer(model=model, args=args, train_dataset=rows(), data_collator=collator)
    trainer.train()
    trainer.save_model(f"saved-{backend}-{name}")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    whole = {name: p.detach() for name, p in adapters.items()}
    if planned:
        made = trainer._made[1].copied_weights(model.state_dict(keep_vars=True), keep=True)
        whole = {name: made[name] for name in adapters}
        trainer.comm.barrier()  # the first rank has saved
    saved = peft.load_peft_weights(f"saved-{backend}-{name}")
    for key, value in whole.items():
        assert torch.equal(saved[key.replace(".default", "")], value), key
    return {f"{name} losses": losses, f"{name} adapters": figures_of(torch.nn.ParameterList(whole.values()))}


def work(backend: str) -> Figures:
    if backend == "hdpcomm":
        join(backend)  # before TrainingArguments, which would take gloo
    figures: Figures = {}
    for name, config in configs().items():
        figures |= case(backend, name, config)
    if backend == "hdpcomm":
        leave(backend)
    return figures


if __name__ == "__main__":
    main(work, against="one process", packages=["torch", "transformers", "peft", "torchao"], atol=2e-4)
