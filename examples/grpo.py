"""Reinforcement learning from a rule: a small Llama of transformers learns to add digits, by GRPO.

torchrun --nproc-per-node 2 examples/grpo.py        about a minute on two cores

Every rank samples answers to its share of the prompts with the model as it came; ranks tell each other what they have
sampled; then all train on all of it: one plan, prompts computed once, answers of any lengths.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hdpcomm as hdp
from hdpcomm.plan import trees_of_prompts
from hdpcomm.train import rollout
from hdpcomm.train.losses import grpo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--prompts", type=int, default=8, help="of a step, for each rank")
parser.add_argument("--answers", type=int, default=16, help="to a prompt")
parser.add_argument("--longest", type=int, default=4, help="tokens of an answer")
options = parser.parse_args()

PLUS, EQUALS, END, VOCABULARY = 10, 11, 12, 16  # 0 to 9 are digits


def reward_of(prompt: list[int], answer: list[int]) -> float:
    """1 for the sum and the end after it; a part of it for a digit that is near."""
    first, ends = answer[0], len(answer) == 2 and answer[1] == END
    near = max(0.0, 1.0 - abs(first - prompt[0] - prompt[2]) / 4) if first < 10 else 0.0
    return 0.7 * near**2 + 0.3 * ends


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: list[list[int]], draw: torch.Generator) -> list[list[int]]:
    """An answer to each prompt, with a cache of keys and values; all prompts have as many tokens."""
    tokens, cache = torch.tensor(prompts), None
    answers = torch.empty(len(prompts), 0, dtype=torch.int64)
    for _ in range(options.longest):
        told = model(tokens, past_key_values=cache, use_cache=True)
        cache = told.past_key_values
        tokens = torch.multinomial(told.logits[:, -1].softmax(-1), 1, generator=draw)
        answers = torch.cat((answers, tokens), 1)
    rows = answers.tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


torch.set_num_threads(1)
with hdp.init() as comm:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    actor = LlamaForCausalLM(config)  # samples; the trained weights are copied to it after each step
    model = hdp.adapt(LlamaForCausalLM(config))
    capacity = options.prompts * options.answers * 16
    planner = hdp.Planner.measured(model, comm, capacity=capacity, longest=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = hdp.Trainer(model, optimizer, planner, comm, loss=grpo(kl=0.0))
    draw = torch.Generator().manual_seed(comm.rank)
    for step in range(options.steps):
        actor.load_state_dict(model.model.state_dict())
        digits = torch.randint(0, 5, (options.prompts, 2), generator=draw).tolist()
        prompts = [[a, PLUS, b, EQUALS] for a, b in digits for _ in range(options.answers)]
        answers = sample(actor, prompts, draw)
        # one row for each sequence of all ranks: prompt, answer, length of the answer
        own = torch.tensor(
            [[*p, *a, *[END] * (options.longest - len(a)), len(a)] for p, a in zip(prompts, answers, strict=True)]
        )
        rows = own.new_empty(comm.size * len(own), own.shape[1])
        comm.all_gather(rows, own)
        asked = [row[:4] for row in rows.tolist()]
        said = [row[4 : 4 + row[-1]] for row in rows.tolist()]
        rewards = torch.tensor([reward_of(*each) for each in zip(asked, said, strict=True)]).view(-1, options.answers)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        batch = [
            rollout(p, a, advantages=float(advantage))
            for p, a, advantage in zip(asked, said, advantages.flatten(), strict=True)
        ]
        lengths = [len(each["tokens"]) for each in batch]
        shared = trees_of_prompts(lengths, [(i // options.answers, 4) for i in range(len(lengths))])
        done = trainer.step(lengths, batch.__getitem__, trees=shared)
        if comm.rank == 0 and (step % 5 == 0 or step == options.steps - 1):
            print(
                f"step {step}: reward {float(rewards.mean()):.3f}, right {float((rewards > 0.99).float().mean()):.0%}, "
                f"{sum(lengths):,} tokens of answers and prompts, {done.tokens:,} computed"
            )
