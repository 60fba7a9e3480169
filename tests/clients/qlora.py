"""LoRA over weights that torchao has quantised to int8: hdpcomm's Trainer with zero=3, against transformers' alone."""

from __future__ import annotations

from common import Figures, figures_of, join, leave, main, tiny_llama
from transformers_trainer import arguments, rows


def work(backend: str) -> Figures:
    import peft
    import torch
    import transformers
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = tiny_llama()
    quantize_(model.model, Int8WeightOnlyConfig())
    torch.manual_seed(5)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if backend == "hdpcomm":
        join(backend)  # before TrainingArguments, which would take gloo
    args = arguments(f"out-{backend}", 3 if backend == "hdpcomm" else 6, optim="sgd", learning_rate=0.1)
    if backend == "hdpcomm":
        from hdpcomm.integrations.huggingface import Trainer

        trainer = Trainer(model=model, args=args, train_dataset=rows(), zero=3)
    else:
        collator = transformers.DataCollatorWithFlattening()
        trainer = transformers.Trainer(model=model, args=args, train_dataset=rows(), data_collator=collator)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    whole = {name: p.detach() for name, p in adapters.items()}
    if backend == "hdpcomm":
        made = trainer._made[1].copied_weights(model.state_dict(keep_vars=True), keep=True)
        whole = {name: made[name] for name in adapters}
        leave(backend)
    return {"losses": losses, "adapters": figures_of(torch.nn.ParameterList(whole.values()))}


if __name__ == "__main__":
    main(work, against="one process", packages=["torch", "transformers", "peft", "torchao"], atol=2e-4)
