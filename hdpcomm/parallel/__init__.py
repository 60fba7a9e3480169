"""HDP beside other kinds of parallelism: models cut for a mesh of ranks, and pipelines that run what was planned."""

from __future__ import annotations

from hdpcomm.parallel.expert import expert_parallel
from hdpcomm.parallel.program import Action, StepProgram, pipeline_program, plan_program
from hdpcomm.parallel.stages import Stage, split_model
from hdpcomm.parallel.tensor_plans import tensor_parallel

__all__ = [
    "Action",
    "Stage",
    "StepProgram",
    "expert_parallel",
    "pipeline_program",
    "plan_program",
    "split_model",
    "tensor_parallel",
]
