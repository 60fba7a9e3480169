"""Trainers whose gradients leave in small buckets, so that small models have several."""

from __future__ import annotations

from typing import Any

from hdpcomm.train import Trainer
from hdpcomm.train.zero.buckets import BUCKET_BYTES

__all__ = ["make_trainer"]


def make_trainer(*given: Any, bucket_bytes: int = BUCKET_BYTES, **options: Any) -> Trainer:
    """A trainer that reduces about so many bytes of gradients at a time."""
    kind = type("SmallBuckets", (Trainer,), {"bucket_bytes": bucket_bytes})
    made: Trainer = kind(*given, **options)
    return made
