"""The planner inside other trainers: Megatron-Core's dynamic context parallelism, verl's dynamic batch size.

:mod:`hdpcomm.integrations.huggingface`, which imports transformers, has its trainer, and the mixin for TRL's;
:mod:`hdpcomm.integrations.verl_engine`, which imports verl, is the engine that trains there;
:mod:`hdpcomm.integrations.vllm` brings trained weights into vLLM's workers.
"""

from hdpcomm.integrations.megatron import megatron_packing_scheduler
from hdpcomm.integrations.verl import split_micro_batches

__all__ = ["megatron_packing_scheduler", "split_micro_batches"]
