"""Log-probabilities and entropies of labels in chunks, and losses of them, against torch's own softmax in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdpcomm as hdp
from hdpcomm.kernels import LabelLoss, LossOptions, linear_cross_entropy
from hdpcomm.testing import run_threads

IGNORED = -100
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def problem(seed, tokens, columns, width, dtype):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(0, columns, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = IGNORED
    return normal(tokens, width), normal(columns, width) * 0.5, normal(columns), labels


def oracle(hidden, weight, bias, labels, options, temperature=1.0):
    """(log-probabilities, entropies), differentiable, 0 without a label."""
    logits = options.scale * (hidden @ weight.t() + bias)
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    logs = torch.log_softmax(logits / temperature, -1)
    has = labels != IGNORED
    picked = logs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(has, picked, 0.0), torch.where(has, -(logs.exp() * logs).sum(1), 0.0)


class Weighted:
    """The sum of log-probabilities and entropies, each times a factor of its own; keeps both."""

    def __init__(self, factors):
        self.factors = factors
        self.log_probs, self.entropies = (torch.full_like(factors[0], torch.nan) for _ in range(2))

    def __call__(self, log_probs, entropies, part):
        own = [each[part].to(log_probs.dtype) for each in self.factors]
        self.log_probs[part] = log_probs
        losses = own[0] * log_probs
        if entropies is not None:
            self.entropies[part] = entropies
            losses = losses + own[1] * entropies
        return losses, own[0], None if entropies is None else own[1]


def close(found, wanted, dtype):
    assert float((found.double() - wanted.double()).norm()) <= LIMITS[dtype] * (1.0 + float(wanted.double().norm()))


@given(
    st.integers(0, 2**32), st.integers(0, 11), st.integers(1, 40), st.integers(1, 9), st.sampled_from(list(LIMITS)),
    st.integers(1, 12), st.sampled_from([1.0, 0.25]), st.sampled_from([0.0, 3.0]), st.sampled_from([1.0, 0.7, 4.0]),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_values_and_gradients_are_those_of_softmax(
    seed, tokens, columns, width, dtype, chunk, scale, softcap, temperature, entropy
):
    options = LossOptions(scale=scale, softcap=softcap)
    hidden, weight, bias, labels = problem(seed, tokens, columns, width, dtype)
    found = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    wanted = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    theirs = oracle(*wanted, labels, options, temperature)
    factors = torch.randn(1 + entropy, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weighted = Weighted(list(factors))
    mine = linear_cross_entropy(
        found[0],
        found[1],
        labels,
        bias=found[2],
        options=options,
        weights=LabelLoss(weighted, temperature, entropy),
        chunk_tokens=chunk,
    )
    close(weighted.log_probs, theirs[0].detach(), dtype)
    total = (factors[0] * theirs[0]).sum()
    if entropy:
        close(weighted.entropies, theirs[1].detach(), dtype)
        total = total + (factors[1] * theirs[1]).sum()
    close(mine.detach(), total.detach(), dtype)
    total.backward()
    mine.backward()
    for a, b in zip(found, wanted, strict=True):
        assert a.grad.dtype == dtype
        close(a.grad, b.grad, dtype)


class Squared:
    """log_prob ** 2 - entropy / 2 times the number of the label."""

    def __init__(self):
        self.parts = []

    def __call__(self, log_probs, entropies, part):
        self.parts.append((part.start, part.stop))
        place = torch.arange(part.start, part.stop, dtype=log_probs.dtype)
        return (log_probs**2 - entropies / 2) * place, 2 * log_probs * place, -place / 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loss_of_log_probabilities_makes_logits_once(dtype):
    hidden, weight, bias, labels = problem(3, 9, 7, 5, dtype)
    found = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    wanted = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    label_loss = Squared()
    loss = linear_cross_entropy(
        found[0], found[1], labels, bias=found[2], weights=LabelLoss(label_loss, 0.7, True), chunk_tokens=4
    )
    log_probs, entropies = oracle(*wanted, labels, LossOptions(), 0.7)
    total = ((log_probs**2 - entropies / 2) * torch.arange(9)).sum()
    assert label_loss.parts == [(0, 3), (3, 6), (6, 9)]
    close(loss.detach(), total.detach(), dtype)
    loss.backward()
    total.backward()
    for a, b in zip(found, wanted, strict=True):
        close(a.grad, b.grad, dtype)


@pytest.mark.parametrize("columns", [6, 1])
def test_shards_of_the_vocabulary_give_the_same(columns):
    hidden, weight, bias, labels = problem(5, 10, 2 * columns, 6, torch.float64)
    factors = torch.linspace(-1.0, 2.0, 10, dtype=torch.float64)

    def main():
        comm = hdp.init()
        cut = slice(0, columns) if comm.rank == 0 else slice(columns, 2 * columns)
        parts = [x.clone().requires_grad_() for x in (hidden, weight[cut], bias[cut])]
        weighted = Weighted([factors, torch.full_like(factors, 2.0)])
        linear_cross_entropy(
            parts[0], parts[1], labels, bias=parts[2], weights=LabelLoss(weighted, entropy=True), comm=comm,
            chunk_tokens=3,
        ).backward()  # fmt: skip
        return weighted.log_probs, weighted.entropies, [x.grad for x in parts]

    results = run_threads(main, 2)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    log_probs, entropies = oracle(*leaves, labels, LossOptions())
    ((factors * log_probs).sum() + 2 * entropies.sum()).backward()
    for found in results:
        close(found[0], log_probs.detach(), torch.float64)
        close(found[1], entropies.detach(), torch.float64)
        close(found[2][0], leaves[0].grad, torch.float64)
    for place in (1, 2):
        close(torch.cat([found[2][place] for found in results]), leaves[place].grad, torch.float64)


def test_labels_without_a_loss_have_no_gradient_whatever_their_logits():
    hidden, weight, bias, _ = problem(1, 3, 4, 2, torch.float32)
    hidden[1] = torch.nan
    labels = torch.tensor([1, IGNORED, 2])
    leaf = hidden.clone().requires_grad_()
    weighted = Weighted([torch.ones(3), torch.ones(3)])
    linear_cross_entropy(leaf, weight, labels, bias=bias, weights=LabelLoss(weighted, entropy=True)).backward()
    assert weighted.log_probs[1] == 0
    assert weighted.entropies[1] == 0
    assert torch.equal(leaf.grad[1], torch.zeros(2))
    assert leaf.grad.isfinite().all()
