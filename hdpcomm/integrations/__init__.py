"""The planner inside other trainers: Megatron-Core's dynamic context parallelism, verl's dynamic batch size."""

from hdpcomm.integrations.megatron import MegatronScheduler
from hdpcomm.integrations.verl import split_micro_batches

__all__ = ["MegatronScheduler", "split_micro_batches"]
