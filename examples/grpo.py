"""Reinforcement learning from a rule: a small Llama of transformers learns to add digits, by GRPO.

torchrun --nproc-per-node 2 examples/grpo.py                  about a minute on two cores: both ranks do both, in turns
torchrun --nproc-per-node 4 examples/grpo.py --generators 2   two ranks only generate, beside two that train
python examples/grpo.py --ranks 4 --generators 2 --kill 20    one of these dies in the middle of step 20
                                  --report grpo.png           a picture of the run

Prompts are numbers that a counter hands out to whoever is free. Ranks sample answers with a model of their own. What
they have sampled goes to those that train: one plan for all of it, prompts computed once, answers of any lengths. Where
ranks only generate, the weights of an update come to them while they sample, and those that train are a batch behind,
which the log-probabilities of the sampling model make up for. When one dies, the others sample what it had taken.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hdpcomm as hdp
from hdpcomm.plan import trees_of_prompts
from hdpcomm.testing import RankPool
from hdpcomm.train import Reshard, rollout
from hdpcomm.train.losses import grpo

PLUS, EQUALS, END, VOCABULARY = 10, 11, 12, 16  # 0 to 9 are digits
PROMPT = 4  # tokens


def reward_of(prompt, answer):
    """1 for the sum and the end after it; a part of it for a digit that is near."""
    first, ends = answer[0], len(answer) == 2 and answer[1] == END
    near = max(0.0, 1.0 - abs(first - prompt[0] - prompt[2]) / 4) if first < 10 else 0.0
    return 0.7 * near**2 + 0.3 * ends


@torch.no_grad()
def sample(model, number, options):
    """A prompt with its answers ``[answers, tokens]``, and the log-probabilities of the answers' tokens; with a cache
    of keys and values, the same for a number on every rank."""
    draw = torch.Generator().manual_seed(number)
    a, b = torch.randint(0, 5, (2,), generator=draw).tolist()
    rows = torch.tensor([[a, PLUS, b, EQUALS]]).repeat(options.answers, 1)
    chances = torch.empty(len(rows), 0)
    tokens, cache = rows, None
    for _ in range(options.longest):
        told = model(tokens, past_key_values=cache, use_cache=True)
        cache, logs = told.past_key_values, told.logits[:, -1].log_softmax(-1)
        tokens = torch.multinomial(logs.exp(), 1, generator=draw)
        rows, chances = torch.cat((rows, tokens), 1), torch.cat((chances, logs.gather(1, tokens)), 1)
    return rows, chances


def learn(trainer, rows, chances):
    """A step on what all ranks have sampled: ``[prompts, answers, tokens]``."""
    batch, rewards = [], []
    for row, own in zip(rows.flatten(0, 1).tolist(), chances.flatten(0, 1), strict=True):
        answer = row[PROMPT:]
        answer = answer[: answer.index(END) + 1] if END in answer else answer
        rewards.append(reward_of(row[:PROMPT], answer))
        batch.append(rollout(row[:PROMPT], answer, old_log_probs=own[: len(answer)]))
    grouped = torch.tensor(rewards).view(rows.shape[:2])
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    for each, advantage in zip(batch, advantages.flatten(), strict=True):
        each["advantages"] = advantage
    lengths = [len(each["tokens"]) for each in batch]
    trees = trees_of_prompts(lengths, [(i // rows.shape[1], PROMPT) for i in range(len(lengths))])
    done = trainer.step(lengths, batch.__getitem__, trees=trees)
    right = float((grouped > 0.99).float().mean())
    return {"reward": float(grouped.mean()), "right": right, "computed": done.tokens, "tokens": sum(lengths)}


class Loop:
    """One rank's part of the run, on whoever lives."""

    def __init__(self, world, options):
        self.world, self.options = world, options
        self.rank, self.ranks = world.rank, world.size  # as the run began
        trains = range(world.size - options.generators)
        self.learners = world.subset(trains)  # None on a rank that only generates
        self.kills = options.kill >= 0 and self.rank == world.size - 1
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
        self.actor = None if options.generators and self.learners else LlamaForCausalLM(config)
        self.trainer = None
        if self.learners is not None:
            model = hdp.adapt(LlamaForCausalLM(config))
            capacity = options.prompts * options.answers * (PROMPT + options.longest)
            planner = hdp.Planner.measured(model, self.learners, capacity=capacity, longest=64)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            self.trainer = hdp.Trainer(model, optimizer, planner, self.learners, loss=grpo(kl=0.0))
        self.updates = {"trained": torch.zeros(1), "actor": torch.zeros(1)}  # of the weights of either model
        self.step, self.found, self.batch, self.told = 0, {}, None, []
        self.weights = self.make_weights()

    def make_weights(self):
        """The exchange of weights among the ranks that live; how many updates they have had goes with them."""
        source = target = {}
        if self.trainer is not None:
            source = dict(self.trainer.model.model.named_parameters()) | {"updates": self.updates["trained"]}
        if self.actor is not None:
            target = dict(self.actor.named_parameters()) | {"updates": self.updates["actor"]}
        return Reshard(source, target, self.world)

    def run(self):
        while self.step < self.options.steps:
            try:
                self.one_step()
            except hdp.Error as error:
                self.go_on_without(error)

    def go_on_without(self, error):
        """All that live come here, from wherever they were, and do the earliest step that one of them has not ended."""
        before = self.world
        self.world = before.shrink()
        died = sorted({*before.ranks} - {*self.world.ranks})
        generators = range(self.ranks - self.options.generators, self.ranks)
        if not died or any(rank not in generators for rank in died):
            raise error  # no death, or that of a rank whose weights are needed
        if not any(rank in generators for rank in self.world.ranks):
            raise SystemExit("no rank is left that generates") from error
        trained = 0 if self.trainer is None else int(self.updates["trained"])
        both = torch.tensor([self.step, -trained])
        self.world.all_reduce(both, "min")
        self.step = int(both[0])
        if self.trainer is not None and trained < -int(both[1]):
            self.count_update()  # another one has passed the barrier of learn(), so all have updated
        if self.batch is not None and self.batch[0] >= self.step:
            self.batch = None  # some may not have it: all do its step again
        self.weights = self.make_weights()
        if self.world.rank == 0:
            print(f"step {self.step}: without ranks {died}, which died; goes on with {[*self.world.ranks]}", flush=True)

    def one_step(self):
        """Samples the prompts of a step, and trains on them, or on those of the step before."""
        options, first = self.options, self.step * self.options.prompts
        numbers = range(first, first + options.prompts)
        self.found = {number: own for number, own in self.found.items() if number >= first - options.prompts}
        sampled = torch.tensor([number in self.found for number in numbers], dtype=torch.int32)
        self.world.all_reduce(sampled)  # some are, if a rank has died
        left = [number for number, times in zip(numbers, sampled.tolist(), strict=True) if not times]
        with self.world.counter() as counter:
            self.weights.start()
            due = True
            if options.generators and self.trainer is not None:
                self.learn()
            while self.actor is not None and (place := counter.fetch_add()) < len(left):
                if due and (self.weights.ready() or not options.generators):
                    self.weights.finish()
                    due = False
                if self.kills and self.step == options.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                rows, chances = sample(self.actor, left[place], options)
                self.found[left[place]] = rows, chances, self.rank, int(self.updates["actor"])
            if due:
                self.weights.finish()
            rows = torch.zeros(options.prompts, options.answers, PROMPT + options.longest, dtype=torch.int64)
            chances = torch.zeros(options.prompts, options.answers, options.longest)
            facts = torch.zeros(options.prompts, 2, dtype=torch.int64)
            for number, own in self.found.items():
                if number in numbers:
                    place = number - first
                    rows[place], chances[place], facts[place] = own[0], own[1], torch.tensor(own[2:])
            for each in (rows, chances, facts):
                self.world.all_reduce(each)
        self.batch = self.step, rows, chances, facts
        if not options.generators:
            self.learn()
        self.step += 1

    def learn(self):
        """On the batch that has come, once."""
        if self.batch is None or self.updates["trained"] > self.batch[0]:
            return
        number, rows, chances, facts = self.batch
        started = time.perf_counter()
        told = learn(self.trainer, rows, chances)
        by_rank = facts[:, 0].bincount(minlength=self.ranks).tolist()
        behind = number - float(facts[:, 1].float().mean())
        self.row = told | {"by_rank": by_rank, "behind": behind, "seconds": time.perf_counter() - started}
        self.learners.barrier()  # all have updated: from here on, who goes on without a dead rank harms no step
        self.count_update()

    def count_update(self):
        """Counts the update by the batch, which all have made."""
        number, told, by_rank, behind = self.batch[0], self.row, self.row["by_rank"], self.row["behind"]
        self.updates["trained"] += 1
        self.told.append(told)
        if self.rank == 0 and (number % 5 == 0 or number == self.options.steps - 1):
            taken = ", ".join(f"{count} by rank {rank}" for rank, count in enumerate(by_rank) if count)
            print(
                f"step {number}: reward {told['reward']:.3f}, right {told['right']:.0%}, "
                f"{told['computed']:,} of {told['tokens']:,} tokens computed; prompts: {taken}; "
                f"weights {behind:.1f} updates behind",
                flush=True,
            )


def draw(told, file):
    """Reward, who sampled, how old the weights were, and what shared prompts have saved, step by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, sharex=True, figsize=(8, 9), layout="constrained")
    axes[0].plot([each["reward"] for each in told], label="mean reward")
    axes[0].plot([each["right"] for each in told], label="right answers")
    axes[0].set(ylabel="share", ylim=(0, 1))
    below = [0] * len(told)
    for rank in range(len(told[0]["by_rank"])):
        counts = [each["by_rank"][rank] for each in told]
        if any(counts):
            axes[1].bar(range(len(told)), counts, bottom=below, width=1.0, label=f"rank {rank}")
            below = [a + b for a, b in zip(below, counts, strict=True)]
    axes[1].set(ylabel="prompts sampled")
    axes[2].step(range(len(told)), [each["behind"] for each in told], where="mid")
    axes[2].set(ylabel="updates behind")
    axes[3].plot([each["tokens"] for each in told], label="in sequences")
    axes[3].plot([each["computed"] for each in told], label="computed")
    axes[3].set(ylabel="tokens", xlabel="step", ylim=(0, None))
    for each in (axes[0], axes[1], axes[3]):
        each.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file, dpi=120)
    print(f"wrote {file}")


def main(options):
    torch.set_num_threads(1)
    with hdp.init() as world:
        if not 0 <= options.generators < world.size:
            raise SystemExit(f"--generators {options.generators}: of {world.size} ranks at least one has to train")
        loop = Loop(world, options)
        loop.run()
        if loop.rank == 0 and options.report and loop.told:
            draw(loop.told, options.report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=0, help="processes to start here; 0: torchrun has started them")
    parser.add_argument("--generators", type=int, default=0, help="ranks that only generate; 0: all ranks do both")
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--answers", type=int, default=16, help="to a prompt")
    parser.add_argument("--longest", type=int, default=4, help="tokens of an answer")
    parser.add_argument("--kill", type=int, default=-1, help="the last rank, which only generates, dies in this step")
    parser.add_argument("--report", type=Path, help="where rank 0 writes a picture of the run")
    options = parser.parse_args()
    if options.kill >= 0 and not (options.ranks and options.generators > 1):
        parser.error("--kill needs --ranks, as torchrun ends all ranks when one dies, and 2 --generators")
    if options.ranks:
        with RankPool(options.ranks) as pool:
            pool.run(main, options, survivors=True)
    else:
        main(options)
