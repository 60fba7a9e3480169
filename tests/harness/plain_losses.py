"""Losses of log-probabilities written another way: of whole trajectories, one at a time, on one process."""

from __future__ import annotations

import torch

from hdpcomm.train.losses import dapo, dpo, dr_grpo, grpo, gspo, ppo, sft, simpo
from hdpcomm.train.losses.functions import IGNORE
from tests.harness.plain_llama import router_losses, sequence_logits

__all__ = ["PLAIN", "batch_loss", "log_probs_of"]


def log_probs_of(weights, config, tokens, labels, temperature=1.0, routes=None):
    """(log-probabilities, entropies) of the labelled tokens of a trajectory, and where they are."""
    logits = sequence_logits(weights, config, tokens, routes)[0] / temperature
    where = [t for t, label in enumerate(labels.tolist()) if label != IGNORE]
    probs = logits[where].softmax(-1)
    picked = torch.stack([probs[n, labels[t]] for n, t in enumerate(where)]) if where else probs.new_zeros(0)
    return picked.log(), -(probs * probs.log()).sum(-1), where


def _mean(x):
    return x.mean() if len(x) else torch.zeros((), dtype=torch.float64)


def _surrogate(policy, own, low, high, kl=0.0, dual=None):
    found = []
    for n, log_prob in enumerate(policy):
        advantage = own["advantages"][n]
        r = torch.exp(log_prob - own["old_log_probs"][n])
        clipped = (
            max(min(r, 1 + high), 1 - low) if not isinstance(r, torch.Tensor) else torch.clamp(r, 1 - low, 1 + high)
        )
        gain = torch.min(r * advantage, clipped * advantage)
        if dual is not None and advantage < 0:
            gain = torch.max(gain, dual * advantage)
        d = own["ref_log_probs"][n] - log_prob
        found.append(-gain + kl * (torch.exp(d) - d - 1))
    return torch.stack(found) if found else policy


def _by_tokens(term):
    def total(policies, columns):
        terms = torch.cat([term(*each) for each in zip(policies, columns, strict=True)])
        return terms.sum() / len(terms)

    return total


def _by_sequences(term):
    return lambda policies, columns: torch.stack(
        [_mean(term(*each)) for each in zip(policies, columns, strict=True)]
    ).mean()


def _sequence_ratio(policy, own):
    if not len(policy):
        return policy.sum()[None]
    ratio = torch.exp((policy - own["old_log_probs"]).sum() / len(policy))
    advantage = own["advantages"][0]
    d = own["ref_log_probs"] - policy
    gain = torch.min(ratio * advantage, torch.clamp(ratio, 1 - 0.1, 1 + 0.2) * advantage)
    return (-gain + 0.03 * (torch.exp(d) - d - 1).sum() / len(policy))[None]


def _pairs(reward, rule):
    def total(policies, columns):
        rewards = [reward(*each) for each in zip(policies, columns, strict=True)]
        pairs = [rule(a - b) for a, b in zip(rewards[::2], rewards[1::2], strict=True)]
        return torch.stack(pairs).mean()

    return total


def _log_ratio(policy, own):
    return (policy - own["ref_log_probs"]).sum()


def _sigmoid(x):
    return 1 / (1 + torch.exp(-x))


PLAIN = {
    "sft": (sft(), _by_tokens(lambda policy, _: -policy)),
    "ppo": (
        ppo(0.1, kl=0.05, entropy=0.02, dual_clip=1.5, temperature=0.8),
        _by_tokens(lambda policy, own: _surrogate(policy, own, 0.1, 0.1, 0.05, 1.5) - 0.02 * own["entropies"]),
    ),
    "grpo": (grpo(0.15), _by_sequences(lambda policy, own: _surrogate(policy, own, 0.15, 0.15, 0.04))),
    "dapo": (dapo(0.1, 0.3), _by_tokens(lambda policy, own: _surrogate(policy, own, 0.1, 0.3))),
    "dr_grpo": (
        dr_grpo(40),
        lambda policies, columns: sum(
            _surrogate(*each, 0.2, 0.2).sum() / 40 for each in zip(policies, columns, strict=True)
        ) / len(policies),
    ),
    "gspo": (gspo(0.1, 0.2, kl=0.03), _by_sequences(_sequence_ratio)),
    "dpo": (dpo(0.5), _pairs(_log_ratio, lambda h: -torch.log(_sigmoid(0.5 * h)))),
    "dpo smoothed": (
        dpo(0.5, label_smoothing=0.2),
        _pairs(_log_ratio, lambda h: -0.8 * torch.log(_sigmoid(0.5 * h)) - 0.2 * torch.log(_sigmoid(-0.5 * h))),
    ),
    "dpo robust": (
        dpo(0.5, kind="robust", label_smoothing=0.2),
        _pairs(
            _log_ratio,
            lambda h: (-0.8 * torch.log(_sigmoid(0.5 * h)) + 0.2 * torch.log(_sigmoid(-0.5 * h))) / 0.6,
        ),
    ),
    "ipo": (
        dpo(0.5, kind="ipo", average=True),
        _pairs(lambda policy, own: _log_ratio(policy, own) / max(1, len(policy)), lambda h: (h - 1.0) ** 2),
    ),
    "hinge": (dpo(0.5, kind="hinge"), _pairs(_log_ratio, lambda h: torch.relu(1 - 0.5 * h))),
    "simpo": (
        simpo(2.0, margin=0.5),
        _pairs(lambda policy, _: policy.sum() / max(1, len(policy)), lambda h: -torch.log(_sigmoid(2 * h - 0.5))),
    ),
}  # fmt: skip
"""By name: a loss of the package, and what it has to be: a function of the log-probabilities of all trajectories."""


def batch_loss(model, rollouts, name):
    """Loss of a batch and its gradients by parameter name; ``rollouts``: dictionaries as ``fetch`` gives them."""
    loss, plain = PLAIN[name]
    weights = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    policies, columns, routers = [], [], []
    for each in rollouts:
        own, routes = dict(each), each.get("routes")
        own.pop("routes", None)
        tokens, labels = each["tokens"], each["labels"]
        policy, entropies, where = log_probs_of(weights, model.config, tokens, labels, loss.temperature, routes)
        policies.append(policy)
        length = len(each["tokens"])
        own = {key: torch.as_tensor(x).expand(length)[where].double() for key, x in own.items()}
        columns.append({**own, "entropies": entropies})
        if model.has_added_losses:
            routers.append(router_losses(sequence_logits(weights, model.config, tokens)[1], model.config, where))
    total = plain(policies, columns)
    if routers:  # divided as the labels' own losses are
        counts = [len(policy) for policy in policies]
        factors = {"tokens": [len(counts) / sum(counts)] * len(counts), "sequences": [1 / max(1, n) for n in counts]}
        factors = factors.get(loss.per) or [1 / loss.per] * len(counts)
        total = total + sum(a * b for a, b in zip(factors, routers, strict=True)) / len(counts)
    total.backward()
    return total.item(), {key: weight.grad for key, weight in weights.items()}
