"""The order of the test files, and which of them run side by side; measured on two cores.

Files that compute come longest first: a long one at the end would leave the other processes of pytest-xdist without
work. Files that mostly wait for deadlines and for the deaths of ranks are run by one process at a time, beside two that
compute: three of them together would leave the cores idle, and three that compute make each other wait.
"""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["longest_first", "waits"]

LONGEST = (
    "ranks/run/test_dry_run.py",
    "ranks/parallel/test_sliced_experts.py",
    "ranks/run/test_elastic.py",
    "ranks/run/test_zero_runs.py",
    "ranks/parallel/test_pipeline_runs.py",
    "ranks/parallel/test_sliced.py",
    "ranks/run/test_joining_runs.py",
    "ranks/parallel/test_sharded_mesh.py",
    "ranks/train/test_memory.py",
    "ranks/run/test_resume.py",
    "unit/plan/test_slices.py",
    "ranks/run/test_lora_runs.py",
    "ranks/run/test_first_weights.py",
    "ranks/parallel/test_sliced_trees.py",
    "ranks/train/test_not_finite.py",
    "ranks/run/test_deaths_at_moments.py",
    "ranks/train/test_log_prob_losses.py",
    "ranks/scale/test_hosts.py",
    "ranks/parallel/test_pipeline.py",
    "ranks/train/test_sharded.py",
    "ranks/models/test_hybrid.py",
    "unit/kernels/test_small_messages_emulated.py",
    "ranks/parallel/test_mesh_memory.py",
    "ranks/nccl/test_paths.py",
    "unit/kernels/test_kernels_emulated.py",
    "ranks/test_examples.py",
    "ranks/train/test_train_command.py",
    "ranks/attention/test_slices.py",
    "faults/test_texts.py",
    "ranks/attention/test_slices_linear.py",
    "ranks/parallel/test_mesh_checkpoints.py",
    "ranks/train/test_host_reads.py",
    "ranks/parallel/test_pipeline_huggingface.py",
    "ranks/train/test_zero.py",
    "ranks/run/test_learning.py",
    "ranks/train/test_huggingface_trl.py",
    "ranks/models/test_gradient_checkpointing.py",
    "ranks/parallel/test_expert_runs.py",
    "unit/cli/test_without_drawing.py",
    "ranks/models/test_tree_models.py",
    "unit/test_readme.py",
    "ranks/attention/test_chosen.py",
    "unit/plan/test_optimum.py",
    "unit/test_docs_site.py",
    "ranks/parallel/test_expert.py",
    "ranks/parallel/test_materialize.py",
    "ranks/models/test_indexer_training.py",
    "ranks/comm/test_collectives.py",
    "unit/nccl/test_fake.py",
    "unit/plan/test_key_limit.py",
    "ranks/parallel/test_split_backward.py",
    "ranks/train/test_huggingface_options.py",
    "ranks/models/test_adapt.py",
    "ranks/scale/test_torch_faults.py",
    "ranks/scale/test_torch_transport.py",
    "ranks/train/test_huggingface_restarts.py",
    "ranks/train/test_matrix_owners.py",
    "ranks/run/test_loader_runs.py",
    "faults/test_live_loop_deaths.py",
    "ranks/attention/test_attention_exact.py",
)
WAITING = (
    "faults/test_after_errors.py",
    "faults/test_paths_errors.py",
    "faults/test_nccl_errors.py",
    "faults/test_liveness.py",
    "faults/test_counter_faults.py",
    "faults/test_device_liveness.py",
    "faults/test_fuzz.py",
    "faults/test_desync.py",
    "faults/test_who_may_join.py",
    "faults/test_train_kill.py",
    "faults/test_reshard_deaths.py",
    "faults/test_teardown.py",
    "faults/test_reasons.py",
    "faults/test_resources.py",
    "faults/test_bad_arguments.py",
    "faults/test_bad_runs.py",
    "faults/test_one_sided_errors.py",
    "faults/test_joining.py",
    "faults/test_hostile_peers.py",
    "faults/test_comm_errors.py",
    "faults/test_faults_benchmark.py",
    "faults/test_device_errors.py",
    "faults/test_shrink.py",
    "faults/test_unattended.py",
    "faults/test_stopped.py",
    "faults/test_processes.py",
    "unit/test_gpu_command.py",
)
_TESTS = Path(__file__).parents[1]


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts the tests by their files; those that are not named here come last, as they were collected."""
    places = {_TESTS / name: place for place, name in enumerate((*LONGEST, *WAITING))}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def waits(file: str) -> bool:
    return file.endswith(WAITING)
