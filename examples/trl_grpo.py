"""TRL's GRPOTrainer on 8 devices, a 7B model: answers of any lengths, rewarded where they have what a line says.

torchrun --nproc-per-node 8 examples/trl_grpo.py MODEL_FOLDER QUESTIONS.jsonl --out FOLDER
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from hdpcomm.integrations.huggingface import HybridDataParallel


class PlanningGRPOTrainer(HybridDataParallel, GRPOTrainer):
    pass


def has_answer(completions, answer, **_):
    return [float(wanted in completion) for completion, wanted in zip(completions, answer, strict=True)]


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="folder, as save_pretrained writes it, with its tokenizer")
parser.add_argument("data", help='lines like {"prompt": "2 + 3 =", "answer": "5"}')
parser.add_argument("--out", required=True, help="folder for the model")
parser.add_argument("--length", type=int, default=4096, help="most tokens of an answer")
parser.add_argument("--steps", type=int, default=-1)
options = parser.parse_args()
args = GRPOConfig(
    options.out, use_cpu=not torch.cuda.is_available(), bf16=False, max_steps=options.steps, learning_rate=1e-6,
    per_device_train_batch_size=8, num_generations=8, max_completion_length=options.length, logging_steps=1,
    save_strategy="no", report_to=[])  # fmt: skip
questions = load_dataset("json", data_files=options.data, split="train")
given = {"processing_class": AutoTokenizer.from_pretrained(options.model), "train_dataset": questions}
# Each rank keeps a part of the weights, of their gradients and of fp32 masters.
trainer = PlanningGRPOTrainer(options.model, args=args, reward_funcs=has_answer, zero=3, dtype=torch.bfloat16, **given)
trainer.train()
trainer.save_model()
