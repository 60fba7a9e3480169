"""TRL's SFTTrainer on chats of any lengths: a 7B model on 8 devices, or adapters of a 70B model with --lora 16.

torchrun --nproc-per-node 8 examples/trl_sft.py MODEL_FOLDER CHATS.jsonl --out FOLDER
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from hdpcomm.integrations.huggingface import HybridDataParallel


class PlanningSFTTrainer(HybridDataParallel, SFTTrainer):
    pass


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="folder, as save_pretrained writes it, with its tokenizer")
parser.add_argument("data", help='lines like {"messages": [{"role": "user", "content": "..."}, ...]}')
parser.add_argument("--out", required=True, help="folder for the model, or its adapters")
parser.add_argument("--lora", type=int, help="train adapters of this rank")
parser.add_argument("--context", type=int, default=32768, help="longest chat, on all ranks together")
parser.add_argument("--steps", type=int, default=-1)
options = parser.parse_args()
args = SFTConfig(
    options.out, use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=True, logging_steps=1,
    per_device_train_batch_size=8, learning_rate=2e-4 if options.lora else 2e-5, max_length=options.context,
    max_steps=options.steps, save_strategy="no", report_to=[],
)  # fmt: skip
adapters = LoraConfig(r=options.lora, target_modules="all-linear") if options.lora else None
chats = load_dataset("json", data_files=options.data, split="train")
given = {"processing_class": AutoTokenizer.from_pretrained(options.model), "peft_config": adapters}
# Each rank keeps a part of the weights, of their gradients and of fp32 masters.
trainer = PlanningSFTTrainer(options.model, args, train_dataset=chats, zero=3, dtype=torch.bfloat16, **given)
trainer.train()
trainer.save_model()
