"""Doors to other trainers and engines; each module is imported by its own name.

:mod:`hdpcomm.integrations.huggingface`, which imports transformers, has its trainer, and the mixin for TRL's;
:mod:`hdpcomm.integrations.verl_engine`, which imports verl, is the engine that trains there;
:mod:`hdpcomm.integrations.vllm` brings trained weights into vLLM's workers.
"""
