"""The oracle: a Llama written another way, on one process, one whole sequence at a time.

Rotary embedding by complex multiplication, attention by an explicit softmax over a masked score matrix for each head,
SwiGLU and norms spelled out, and the loss as log-sum-exp minus the score of the right token. In a mixture of
experts every expert computes every token, and its share of those that chose others is 0.
"""

from __future__ import annotations

import torch


def _norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x, theta):
    """x: [tokens, heads, D]; pairs (i, i + D/2) as complex numbers, turned by position * theta ** (-2i / D)."""
    tokens, _, dim = x.shape
    wide = torch.complex(x[..., : dim // 2].double(), x[..., dim // 2 :].double())
    rates = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64), rates)
    turned = wide * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def sequence_logits(weights, config, tokens, routes=None):
    """(logits of one sequence, scores of the routers of each block); ``routes``: experts [tokens, blocks, top_k]."""

    def linear(name, x):
        return x @ weights[name + ".weight"].T

    count, dim = len(tokens), config.head_dim
    x = weights["embedding.weight"][tokens]
    routers = []
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    for i, block in enumerate(f"blocks.{i}." for i in range(config.layers)):
        h = _norm(x, weights[block + "attention_norm.weight"], config.norm_eps)
        q = _rotate(linear(block + "attention.q", h).view(count, config.heads, dim), config.rope_theta)
        k = _rotate(linear(block + "attention.k", h).view(count, config.kv_heads, dim), config.rope_theta)
        v = linear(block + "attention.v", h).view(count, config.kv_heads, dim)
        heads = []
        for head in range(config.heads):
            shared = head * config.kv_heads // config.heads
            scores = q[:, head] @ k[:, shared].T / dim**0.5
            heads.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[:, shared])
        x = x + linear(block + "attention.out", torch.cat(heads, -1))
        h = _norm(x, weights[block + "ffn_norm.weight"], config.norm_eps)
        if config.experts:
            mixed, scores = _experts(
                weights, config, block + "ffn.", h, None if routes is None else routes[:, i].long()
            )
            x = x + mixed
            routers.append(scores)
            continue
        gate = linear(block + "ffn.gate", h)
        x = x + linear(block + "ffn.out", gate * torch.sigmoid(gate) * linear(block + "ffn.up", h))
    head = "embedding" if config.tied_embeddings else "head"
    return linear(head, _norm(x, weights["norm.weight"], config.norm_eps)), routers


def sequence_loss(weights, config, tokens):
    """Summed next-token loss of one sequence."""
    logits, routers = sequence_logits(weights, config, tokens)
    right = logits[:-1].gather(1, tokens[1:, None]).squeeze(1)
    loss = (logits[:-1].logsumexp(-1) - right).sum()
    return loss + router_losses(routers, config, range(len(tokens) - 1)) if config.experts else loss


def _experts(weights, config, name, h, best):
    scores = h @ weights[name + "router.weight"].T
    if best is None:
        best = scores.sort(descending=True).indices[:, : config.top_k]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
    shares = scores.masked_fill(~chosen, float("-inf")).softmax(-1)
    mixed = 0
    for expert in range(config.experts):
        gate, up = (h @ weights[name + "gate_up"][expert].T).split(config.ffn, dim=1)
        result = (gate * torch.sigmoid(gate) * up) @ weights[name + "out"][expert].T
        mixed = mixed + shares[:, expert, None] * result
    return mixed, scores


def router_losses(routers, config, where):
    """The routers' auxiliary losses of one sequence, of whose tokens those at ``where`` have a label."""
    labels, balance = len(where), 0.0
    for scores in routers:
        best = scores.sort(descending=True).indices[:, : config.top_k]
        frequency = torch.stack([(best == expert).sum().to(scores.dtype) for expert in range(config.experts)])
        balance += config.experts * (frequency / len(scores) * scores.softmax(-1).mean(0)).sum() / len(routers)
    squares = sum(scores[list(where)].logsumexp(-1).square().sum() for scores in routers) / len(routers)
    return config.router_aux_loss * labels * balance + config.router_z_loss * squares


def batch_gradients(model, sequences):
    """Mean loss over all next tokens of the sequences and its gradients by parameter name."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    labels = sum(len(tokens) - 1 for tokens in sequences)
    total = sum(sequence_loss(weights, model.config, tokens) for tokens in sequences)
    loss = total / labels
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in weights.items()}
