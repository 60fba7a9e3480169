"""HDP beside other kinds of parallelism: models cut for a mesh of ranks, and pipelines that run what was planned."""

from __future__ import annotations

from hdpcomm.parallel.expert import expert_parallel
from hdpcomm.parallel.program import Action, check_programs, make_program, make_programs
from hdpcomm.parallel.stages import LlamaStage, split_llama
from hdpcomm.parallel.tensor import tensor_parallel

__all__ = [
    "Action",
    "LlamaStage",
    "check_programs",
    "expert_parallel",
    "make_program",
    "make_programs",
    "split_llama",
    "tensor_parallel",
]
