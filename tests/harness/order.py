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
    "ranks/test_examples.py",
    "unit/kernels/test_kernels_emulated.py",
    "ranks/parallel/test_mesh_memory.py",
    "ranks/parallel/test_pipeline_runs.py",
    "ranks/scale/test_hosts.py",
    "ranks/train/test_train_command.py",
    "ranks/run/test_elastic.py",
    "ranks/train/test_memory.py",
    "ranks/parallel/test_pipeline.py",
    "ranks/run/test_lora_runs.py",
    "ranks/train/test_huggingface_trl.py",
    "ranks/train/test_log_prob_losses.py",
    "ranks/train/test_huggingface_options.py",
    "unit/test_readme.py",
    "ranks/train/test_huggingface_trainer.py",
    "ranks/run/test_resume.py",
    "unit/offload/test_activations.py",
    "ranks/parallel/test_sharded_mesh.py",
    "ranks/parallel/test_mesh_checkpoints.py",
    "ranks/train/test_sharded.py",
    "unit/cli/test_without_drawing.py",
    "ranks/parallel/test_expert_runs.py",
    "ranks/nccl/test_paths.py",
    "ranks/models/test_adapt.py",
    "unit/test_docs_site.py",
    "ranks/parallel/test_expert.py",
    "ranks/run/test_folder_models.py",
    "ranks/run/test_watching.py",
    "ranks/attention/test_attention_exact.py",
    "ranks/attention/test_tree_linear.py",
    "ranks/attention/test_linear.py",
    "ranks/torch_backend/test_training.py",
    "ranks/train/test_huggingface_sft.py",
    "ranks/train/test_log_prob_models.py",
    "ranks/scale/test_torch_transport.py",
    "ranks/run/test_loader_runs.py",
    "ranks/perf/test_calibration.py",
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
