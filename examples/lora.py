"""LoRA fine-tuning of a Hugging Face model on sequences of any lengths.

torchrun --nproc-per-node 4 examples/lora.py MODEL_FOLDER DATA --out ADAPTER
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import hdpcomm as hdp
from hdpcomm.data import BatchSampler, open_corpus

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="folder, as save_pretrained writes it")
parser.add_argument("data", nargs="+", help="files or folders of text")
parser.add_argument("--out", required=True, help="folder for the adapter")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--context", type=int, default=4096, help="longest sequence, on all ranks together")
options = parser.parse_args()

torch.set_num_threads(1)
with hdp.init() as comm:
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted = hdp.adapt(model)  # attention and loss for packs that ranks share; the weights are the same objects
    capacity = -(-options.context // comm.size)
    planner = hdp.Planner.measured(adapted, comm, capacity=capacity)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    trainer = hdp.Trainer(adapted, optimizer, planner, comm)
    corpus = open_corpus(options.data, context=options.context)
    sampler = BatchSampler(corpus.lengths, tokens=4 * options.context)
    for step in range(options.steps):
        batch = sampler.batch(step)
        done = trainer.step(batch.lengths, lambda place, ids=batch.ids: corpus.read(ids[place]))
        if comm.rank == 0:
            print(f"step {step}: loss {done.loss:.3f}, {done.tokens / done.seconds:,.0f} tokens/s")
    if comm.rank == 0:
        model.save_pretrained(options.out)
        print(f"saved {options.out}")
