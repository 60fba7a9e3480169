"""Losses that are functions of log-probabilities: of each label alone, or of groups of sequences together.

A :class:`hdpcomm.train.Trainer` takes one as ``loss=``. What such a loss knows beside log-probabilities are columns,
which ``fetch`` gives with the tokens: ``fetch(i)`` is then a dictionary with "tokens" (int64 ``[length]``), "labels"
(as always; default: the next tokens) and for each column a tensor ``[length]``, or a number for the whole sequence.
Element t of a column belongs to label t, to what token t is to predict. :func:`rollout` makes such a dictionary of a
prompt and an answer.
"""

from hdpcomm.train.losses.functions import (
    GroupLoss,
    TokenLoss,
    dapo,
    dpo,
    dr_grpo,
    grpo,
    gspo,
    name_of_loss,
    ppo,
    rollout,
    sft,
    simpo,
)

__all__ = [
    "GroupLoss",
    "TokenLoss",
    "dapo",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "name_of_loss",
    "ppo",
    "rollout",
    "sft",
    "simpo",
]
