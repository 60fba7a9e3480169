"""Plans of training steps: who runs which sequences, on how many ranks, in which order. Imports no torch."""

from hdpcomm.plan.ahead import PlanAhead, PlannedStep
from hdpcomm.plan.cluster_file import load_cluster, save_cluster
from hdpcomm.plan.cost import CostModel, CostSample, MemoryModel
from hdpcomm.plan.planner import POLICIES, Planner
from hdpcomm.plan.presets import DEVICES, MODELS
from hdpcomm.plan.specs import ClusterSpec, DeviceSpec, ModelSpec
from hdpcomm.plan.step import MicroBatch, SequenceInfo, StepPlan

__all__ = [
    "DEVICES",
    "MODELS",
    "POLICIES",
    "ClusterSpec",
    "CostModel",
    "CostSample",
    "DeviceSpec",
    "MemoryModel",
    "MicroBatch",
    "ModelSpec",
    "PlanAhead",
    "PlannedStep",
    "Planner",
    "SequenceInfo",
    "StepPlan",
    "load_cluster",
    "save_cluster",
]
