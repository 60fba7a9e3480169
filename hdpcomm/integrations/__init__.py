"""The planner inside Megatron-Core's dynamic context parallelism, and doors to other trainers and engines.

:mod:`hdpcomm.integrations.huggingface`, which imports transformers, has its trainer, and the mixin for TRL's;
:mod:`hdpcomm.integrations.verl_engine`, which imports verl, is the engine that trains there;
:mod:`hdpcomm.integrations.vllm` brings trained weights into vLLM's workers.
"""

from hdpcomm.integrations.megatron import megatron_packing_scheduler

__all__ = ["megatron_packing_scheduler"]
