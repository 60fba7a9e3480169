"""Plans of training steps: which ranks run which sequences, and in which order. Imports no torch."""

from hdpcomm.plan.ahead import PlanAhead, PlannedStep
from hdpcomm.plan.cost import CostModel, CostSample
from hdpcomm.plan.items import Item
from hdpcomm.plan.learn import CostLearner, RankTimes
from hdpcomm.plan.memory import MemoryModel
from hdpcomm.plan.model_config import ARCHITECTURES, Calibration, load_model, model_from_config
from hdpcomm.plan.planner import POLICIES, Planner
from hdpcomm.plan.specs import DEVICES, MODELS, ClusterSpec, DeviceSpec, ModelSpec
from hdpcomm.plan.stage_cut import stage_layers, stage_work
from hdpcomm.plan.step import MicroBatch, SequenceFragment, SequenceInfo, StepPlan
from hdpcomm.plan.table import PlanTable
from hdpcomm.plan.token_mixing import TokenMixing
from hdpcomm.plan.tree import TrajectoryTree, Tree, TreeFragment, join_trees, trees_of_prompts
from hdpcomm.plan.waves import Pass, PipelineSchedule

__all__ = [
    "ARCHITECTURES",
    "Calibration",
    "DEVICES",
    "MODELS",
    "POLICIES",
    "ClusterSpec",
    "CostLearner",
    "CostModel",
    "CostSample",
    "DeviceSpec",
    "Item",
    "MemoryModel",
    "MicroBatch",
    "ModelSpec",
    "Pass",
    "PipelineSchedule",
    "PlanAhead",
    "PlanTable",
    "PlannedStep",
    "Planner",
    "RankTimes",
    "SequenceFragment",
    "SequenceInfo",
    "StepPlan",
    "TokenMixing",
    "TrajectoryTree",
    "Tree",
    "TreeFragment",
    "join_trees",
    "trees_of_prompts",
    "load_model",
    "model_from_config",
    "stage_layers",
    "stage_work",
]
