"""The losses of :mod:`hdpcomm.train.losses`, and that of a model's tokens without one: the sum over all tokens of the
step, divided by how many there are in the whole global batch.

Averaging by sequence, micro-batch or rank would weigh a token by where it landed; a sum does not depend on the plan, so
every rank adds up its own tokens and one reduction gives the exact gradient (ByteScale, arXiv 2502.21231, section 5.1,
equations 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hdpcomm.arguments import check_has, check_number
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import CROSS_ENTROPY_DTYPES, IGNORE, LabelLoss, cross_entropy, loss_of_log_probs

__all__ = [
    "GroupLoss",
    "IGNORE",
    "TokenLoss",
    "dapo",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "name_of_loss",
    "next_token_labels",
    "ppo",
    "rollout",
    "sft",
    "simpo",
    "summed_loss",
]


def next_token_labels(tokens: Tensor) -> Tensor:
    """Labels ``[length]`` of one whole sequence: token i is to predict token i + 1; the last one has no label
    (:data:`IGNORE`).

    To be made before sharding: in a zigzag shard the next token often lies on another rank. Local.
    """
    labels = torch.full_like(tokens, IGNORE)
    labels[:-1] = tokens[1:]
    return labels


def summed_loss(logits: Tensor, labels: Tensor, weights: Tensor | LabelLoss | None = None) -> Tensor:
    """Cross-entropy summed over the tokens that have a label, in at least fp32.

    Backward writes the gradient in place of the logits (:func:`hdpcomm.kernels.cross_entropy`): do not read them after
    it. Logits of other types than float32, bfloat16 and float16 go through torch and stay as they are.

    Args:
        logits: ``[tokens, vocabulary]``; zero tokens are fine and give a zero that still has a graph, so that this rank
            takes part in the backward of its group.
        labels: ``[tokens]`` int64, :data:`IGNORE` where there is no loss.
        weights: ``[tokens]`` float32, factors of the tokens' losses; or what the labels' losses are. Default: 1.
    """
    if logits.shape[:-1] != labels.shape:
        raise InvalidUsage(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}: one row of logits for each label was "
            "expected"
        )
    if weights is not None and not isinstance(weights, Tensor):
        return loss_of_log_probs(logits, labels, weights)
    if logits.dtype in CROSS_ENTROPY_DTYPES:
        return cross_entropy(logits, labels, weights=weights).sum()
    wide = torch.promote_types(logits.dtype, torch.float32)
    if weights is None:
        return F.cross_entropy(logits.to(wide), labels, ignore_index=IGNORE, reduction="sum")
    return (weights * F.cross_entropy(logits.to(wide), labels, ignore_index=IGNORE, reduction="none")).sum()


Columns = Mapping[str, Tensor]

COMPUTED = ("entropies",)
"""Names of columns that are not fetched."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss of each label by itself. Logits are made once: its derivative is taken where they are.

    Attributes:
        function: ``function(log_probs, columns) -> losses``: of labels ``[n]`` of any sequences, in any order and
            number, to a loss for each, by differentiable operations of torch. ``columns`` holds a tensor ``[n]`` for
            each name that ``fetch`` gave. It is called for a chunk of labels at a time, on every rank that works on
            them.
        columns: what ``fetch`` must give beside tokens and labels; it may give more.
        per: what the sum of the losses is divided by: "tokens", the labels of the global batch; "sequences": the loss
            of a sequence is the mean over its labels (0 without any), and that of the batch the mean over sequences; a
            number L: the loss of a sequence is the sum over its labels divided by L, then the mean over sequences.
        temperature: divides the logits, as where the tokens were sampled. ``None``: the function gets outputs of the
            last layer in the place of log-probabilities, of classifiers and critics: ``[n]`` where there is one, else
            ``[n, outputs]``.
        entropy: whether the function needs ``columns["entropies"]``, of each token's whole distribution.

    Raises: InvalidUsage for anything else.
    """

    function: Callable[[Tensor, Columns], Tensor]
    columns: Sequence[str] = ()
    per: str | float = "tokens"
    temperature: float | None = 1.0
    entropy: bool = False

    def __post_init__(self) -> None:
        _check(self)
        if isinstance(self.per, str):
            if self.per not in ("tokens", "sequences"):
                raise InvalidUsage(
                    f'TokenLoss: per is {self.per!r}; expected "tokens", "sequences" or a number of tokens'
                )
        else:
            check_number("TokenLoss", "per", self.per, above=0)

    def factor(self, labels: int) -> float:
        """Factor of each loss of a sequence with so many labels."""
        if self.per == "tokens":
            return 1.0
        return 1.0 / max(1, labels) if self.per == "sequences" else 1.0 / float(self.per)

    def mass(self, labels: int) -> float:
        """Share of a sequence with so many labels in the divisor of the sum."""
        return labels if self.per == "tokens" else 1.0


@dataclass(frozen=True, slots=True)
class GroupLoss:
    """A loss that looks at all labels of a group of sequences at once, on whichever ranks they lie.

    A step runs the forward passes twice: log-probabilities first; then the function gives the loss and its derivative
    by each of them, which the passes of the step carry into the model. Both have to see the same model, so dropout is
    refused.

    Attributes:
        function: ``function(log_probs, columns) -> loss``, or ``(loss, count)``: of one group to its loss, a scalar by
            differentiable operations of torch. Both arguments have an element for each sequence of the group, in the
            order of the batch: the log-probabilities ``[n]`` of its labels, and a tensor ``[n]`` for each column. The
            loss of the batch is the sum over the groups divided by the sum of counts (by default 1 each). It is called
            for a group on one rank, for which ``fetch`` is called there.
        columns: what ``fetch`` must give beside tokens and labels; it may give more.
        temperature: as of :class:`TokenLoss`; of models with one output.

    Raises: InvalidUsage for anything else.
    """

    function: Callable[[Sequence[Tensor], Sequence[Columns]], Tensor | tuple[Tensor, float]]
    columns: Sequence[str] = ()
    temperature: float | None = 1.0

    def __post_init__(self) -> None:
        _check(self)


def _check(loss: TokenLoss | GroupLoss) -> None:
    kind = type(loss).__name__
    check_has(kind, "function", loss.function, "__call__", "a function of log-probabilities and columns")
    if loss.temperature is not None:
        check_number(kind, "temperature", loss.temperature, above=0)
    elif getattr(loss, "entropy", False):
        raise InvalidUsage(f"{kind}: entropy=True with temperature=None; outputs that are no logits have no entropy")
    if isinstance(loss.columns, str) or not all(isinstance(name, str) for name in loss.columns):
        raise InvalidUsage(f"{kind}: columns is {loss.columns!r}; expected a list of names")
    taken = {"tokens", "labels", *COMPUTED} & set(loss.columns)
    if taken:
        raise InvalidUsage(f"{kind}: columns has {sorted(taken)}, which are there anyway; give other names")


def name_of_loss(loss: Any) -> str:
    """Name of a loss, equal on all ranks with the same one. Local."""
    if not isinstance(loss, (TokenLoss, GroupLoss)):
        return "" if loss is None else _name_of(loss)
    settings = [loss.temperature] + ([loss.per, loss.entropy] if isinstance(loss, TokenLoss) else [])
    return f"{type(loss).__name__} {_name_of(loss.function)} {list(loss.columns)} {settings}"


def _name_of(function: Any) -> str:
    text = repr(function)
    if hasattr(function, "__dataclass_fields__"):
        return text
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


def rollout(prompt: Any, answer: Any, **columns: Any) -> dict[str, Tensor]:
    """Result of ``fetch`` for a prompt and its answer: the answer's tokens are the labels. Local.

    Args:
        prompt: tokens, at least one.
        answer: tokens; may be empty.
        columns: one number for each token of the answer (its log-probability where it was sampled, an advantage), or
            one for the whole sequence.

    Raises: InvalidUsage for an empty prompt, or columns that do not fit the answer.

    Examples:
        >>> rollout([5, 6], [7, 8], advantages=0.5, old_log_probs=[-1.0, -2.0])["old_log_probs"].tolist()
        [0.0, -1.0, -2.0, 0.0]
    """
    before, after = (torch.as_tensor(x, dtype=torch.int64).cpu() for x in (prompt, answer))
    if before.dim() != 1 or after.dim() != 1 or not len(before):
        raise InvalidUsage(
            f"rollout(): prompt {tuple(before.shape)} and answer {tuple(after.shape)}; expected two lists of tokens, "
            "the prompt not empty (nothing predicts a first token)"
        )
    tokens = torch.cat((before, after))
    labels = torch.full_like(tokens, IGNORE)
    place = slice(len(before) - 1, len(tokens) - 1)
    labels[place] = after
    found = {"tokens": tokens, "labels": labels}
    for name, given in columns.items():
        value = torch.as_tensor(given).detach().cpu()
        if value.dim() == 0:
            found[name] = value
            continue
        if value.shape != after.shape:
            raise InvalidUsage(
                f"rollout(): {name} has the shape {tuple(value.shape)}; expected one number, or one for each of the "
                f"answer's {len(after)} tokens"
            )
        found[name] = value.new_zeros(len(tokens))
        found[name][place] = value
    return found


def sft(temperature: float = 1.0) -> TokenLoss:
    """The mean of the labels' negative log-probabilities: what a trainer does without a loss."""
    return TokenLoss(_negative_log_prob, temperature=temperature)


def ppo(
    clip: float = 0.2,
    clip_high: float | None = None,
    *,
    kl: float = 0.0,
    entropy: float = 0.0,
    dual_clip: float | None = None,
    per: str | float = "tokens",
    temperature: float = 1.0,
) -> TokenLoss:
    """The clipped surrogate of Proximal Policy Optimization, with a penalty for leaving a reference.

    For a label with the ratio ``r = exp(log_prob - old_log_prob)`` and the advantage A the loss is ``-min(r A, clip(r,
    1 - clip, 1 + clip_high) A)``, plus ``kl (exp(d) - d - 1)`` with ``d = ref_log_prob - log_prob``, less ``entropy``
    times the entropy. Columns: "advantages"; "old_log_probs", without which the policy is the one that sampled (r = 1);
    "ref_log_probs" where ``kl`` is not 0.

    Args:
        clip_high: default: ``clip``.
        dual_clip: for A < 0 the loss of a label is at most ``-dual_clip A`` (arXiv 1912.09729); above 1.
        per, temperature: see :class:`TokenLoss`.

    Source: arXiv 1707.06347, section 3; the estimate of the divergence: arXiv 2402.03300, equation 4.
    """
    for name, value in (("clip", clip), ("clip_high", clip_high), ("kl", kl), ("entropy", entropy)):
        if value is not None:
            check_number("ppo()", name, value, least=0)
    if dual_clip is not None:
        check_number("ppo()", "dual_clip", dual_clip, above=1)
    function = _ClippedRatio(clip, clip if clip_high is None else clip_high, kl, entropy, dual_clip)
    columns = ("advantages", "ref_log_probs") if kl else ("advantages",)
    return TokenLoss(function, columns, per=per, temperature=temperature, entropy=entropy > 0)


def grpo(clip: float = 0.2, *, kl: float = 0.04, temperature: float = 1.0) -> TokenLoss:
    """Group Relative Policy Optimization: :func:`ppo` with the mean over each answer, then over answers.

    The advantage of an answer is its reward less the mean of its group's, by their standard deviation; the caller makes
    it, since rewards need no model.

    Source: arXiv 2402.03300, equation 3.
    """
    return ppo(clip, kl=kl, per="sequences", temperature=temperature)


def dapo(clip: float = 0.2, clip_high: float = 0.28, *, temperature: float = 1.0) -> TokenLoss:
    """Decoupled Clip and Dynamic Sampling Policy Optimization: another clip above than below, no reference, the mean
    over all tokens. Which groups are left out, and what long answers lose, is up to the caller.

    Source: arXiv 2503.14476, equation 8.
    """
    return ppo(clip, clip_high, per="tokens", temperature=temperature)


def dr_grpo(longest: int, clip: float = 0.2, *, temperature: float = 1.0) -> TokenLoss:
    """GRPO without its bias for long answers: sums over answers are divided by the same number for all, ``longest``
    (tokens that an answer may have), then by the number of answers. Advantages are rewards less the group's mean.

    Source: arXiv 2503.20783, section 3.
    """
    return ppo(clip, per=longest, temperature=temperature)


def gspo(clip: float = 3e-4, clip_high: float = 4e-4, *, kl: float = 0.0, temperature: float = 1.0) -> GroupLoss:
    """Group Sequence Policy Optimization: the ratio is one of the whole answer, ``s = exp(mean(log_prob -
    old_log_prob))``, and so is its clip. Columns as of :func:`ppo`; each sequence is a group of its own.

    Source: arXiv 2507.18071, equations 5 and 7.
    """
    for name, value in (("clip", clip), ("clip_high", clip_high), ("kl", kl)):
        check_number("gspo()", name, value, least=0)
    columns = ("advantages", "ref_log_probs") if kl else ("advantages",)
    return GroupLoss(_ClippedSequenceRatio(clip, clip_high, kl), columns, temperature)


def dpo(
    beta: float = 0.1,
    *,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
    average: bool = False,
    temperature: float = 1.0,
) -> GroupLoss:
    """Direct Preference Optimization: groups are pairs, the chosen answer first; column "ref_log_probs".

    With h, the log-ratio (policy over reference, summed over labels) of the chosen answer less that of the rejected:

    Args:
        kind: "sigmoid": ``-log sigmoid(beta h)`` (arXiv 2305.18290, equation 7); "hinge": ``max(0, 1 - beta h)`` (arXiv
            2309.06657); "ipo": ``(h - 1 / (2 beta)) ** 2`` (arXiv 2310.12036); "robust": the sigmoid's, corrected for a
            share ``label_smoothing`` of labels that are the wrong way round (arXiv 2403.00409).
        label_smoothing: of "sigmoid" (conservative DPO) and "robust"; from 0 to below 0.5.
        average: log-ratios are means over an answer's labels in place of sums.
    """
    check_number("dpo()", "beta", beta, above=0)
    check_number("dpo()", "label_smoothing", label_smoothing, least=0)
    if kind not in ("sigmoid", "hinge", "ipo", "robust"):
        raise InvalidUsage(f"dpo(): kind is {kind!r}; expected sigmoid, hinge, ipo or robust")
    if label_smoothing >= 0.5 or (label_smoothing and kind not in ("sigmoid", "robust")):
        raise InvalidUsage(
            f"dpo(): label_smoothing is {label_smoothing} with kind={kind!r}; expected a share below 0.5, of sigmoid "
            "or robust"
        )
    return GroupLoss(_Preference(beta, kind, label_smoothing, average, None), ("ref_log_probs",), temperature)


def simpo(beta: float = 2.0, *, margin: float = 1.0, temperature: float = 1.0) -> GroupLoss:
    """Simple Preference Optimization: as :func:`dpo` without a reference, by means over an answer's labels and a
    margin; ``margin`` is the paper's gamma.

    Source: arXiv 2405.14734, equation 6.
    """
    check_number("simpo()", "beta", beta, above=0)
    check_number("simpo()", "margin", margin, least=0)
    return GroupLoss(_Preference(beta, "sigmoid", 0.0, True, margin), (), temperature)


def _negative_log_prob(log_probs: Tensor, _: Columns) -> Tensor:
    return -log_probs


@dataclass(frozen=True, slots=True)
class _ClippedRatio:
    low: float
    high: float
    kl: float
    entropy: float
    dual: float | None

    def __call__(self, log_probs: Tensor, columns: Columns) -> Tensor:
        advantages = columns["advantages"]
        ratio = (log_probs - columns.get("old_log_probs", log_probs.detach())).exp()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - self.low, 1.0 + self.high) * advantages)
        if self.dual is not None:
            losses = torch.where(advantages < 0, torch.minimum(losses, -self.dual * advantages), losses)
        if self.kl:
            losses = losses + self.kl * _divergence(log_probs, columns)
        return losses - self.entropy * columns["entropies"] if self.entropy else losses


@dataclass(frozen=True, slots=True)
class _ClippedSequenceRatio:
    low: float
    high: float
    kl: float

    def __call__(self, log_probs: Sequence[Tensor], columns: Sequence[Columns]) -> tuple[Tensor, float]:
        losses = [log_probs[0].new_zeros(())]
        for policy, own in zip(log_probs, columns, strict=True):
            if not len(policy):
                continue
            ratio = (policy - own.get("old_log_probs", policy.detach())).mean().exp()
            advantage = own["advantages"].mean()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1.0 - self.low, 1.0 + self.high) * advantage)
            losses.append(loss + self.kl * _divergence(policy, own).mean() if self.kl else loss)
        return torch.stack(losses).sum(), float(len(log_probs))


@dataclass(frozen=True, slots=True)
class _Preference:
    beta: float
    kind: str
    smoothing: float
    average: bool
    margin: float | None

    def __call__(self, log_probs: Sequence[Tensor], columns: Sequence[Columns]) -> Tensor:
        if len(log_probs) != 2:
            raise InvalidUsage(
                f"a preference is between two sequences, the chosen one first, and a group has {len(log_probs)}; give "
                "step(groups=[0, 0, 1, 1, ...])"
            )
        chosen, rejected = (self._reward(*each) for each in zip(log_probs, columns, strict=True))
        h = chosen - rejected
        if self.margin is not None:
            return -F.logsigmoid(self.beta * h - self.margin)
        if self.kind == "hinge":
            return (1.0 - self.beta * h).clamp(min=0.0)
        if self.kind == "ipo":
            return (h - 1.0 / (2.0 * self.beta)).square()
        right, wrong = -F.logsigmoid(self.beta * h), -F.logsigmoid(-self.beta * h)
        if self.kind == "robust":
            return ((1.0 - self.smoothing) * right - self.smoothing * wrong) / (1.0 - 2.0 * self.smoothing)
        return (1.0 - self.smoothing) * right + self.smoothing * wrong

    def _reward(self, log_probs: Tensor, columns: Columns) -> Tensor:
        terms = log_probs if self.margin is not None else log_probs - columns["ref_log_probs"]
        return terms.sum() / max(1, len(terms)) if self.average else terms.sum()


def _divergence(log_probs: Tensor, columns: Columns) -> Tensor:
    d = columns["ref_log_probs"] - log_probs
    return d.exp() - d - 1.0
