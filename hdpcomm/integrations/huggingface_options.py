"""Options of transformers' and TRL's trainers that are refused with plans; tools/trainer_options.py has all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hdpcomm.arguments import check_whole
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.train.step.runner import StepSettings

__all__ = [
    "REFUSED", "check_options", "check_replay", "compile_options", "is_trainer_of", "mesh_sizes", "mesh_text",
    "scores_old",
]  # fmt: skip

Reasons = Mapping[str, Mapping[str, str]]

_SHARDED = "leave it out, and give zero=3: ranks share weights, gradients and the optimizer's state"
_NO_LOGITS = "leave it out: planned passes make no whole logits"
_LEAVE = "leave it out, or use transformers.Trainer"
REFUSED: Reasons = {
    "TrainingArguments": {
        "fp16": "give bf16=True",
        "deepspeed": _SHARDED,
        "parallelism_config": "leave it out: mesh={'tensor': N} cuts layers, and zero=3 weights",
        "auto_find_batch_size": "leave it out, and give capacity=, the most tokens of a rank at once",
        "torch_empty_cache_steps": "leave it out, and call torch.cuda.empty_cache() in a callback",
        "use_liger_kernel liger_kernel_config": _NO_LOGITS,
    },
    "SFTConfig": {"activation_offloading": "leave it out, and give offload= and capacity="},
    "DPOConfig": {
        "activation_offloading": "leave it out, and give offload= and capacity=",
        "padding_free": "leave it out: planned passes drop padding",
        "use_weighting": _LEAVE,
        "router_aux_loss_coef": "leave it out where the model has routers, or give 0",
    },
    "GRPOConfig": {
        "cast_lm_head_to_fp32": _LEAVE,
        "router_aux_loss_coef": "leave it out where the model has routers, or give 0",
    },
}
"""Advice beside each option that is refused where it is given."""

_LOG_PROB_TRAINERS = {f"trl.trainer.{name}_trainer" for name in ("dpo", "grpo", "kto", "reward", "rloo")}
_ADVICE = {name: text for group in REFUSED.values() for names, text in group.items() for name in names.split()} | {
    "fsdp": _SHARDED,
    "mixed precision fp8": "give bf16=True, and fp8='rowwise'",
    "a model that was loaded with tp_plan": "load it without, and give mesh={'tensor': N}",
}


def check_options(trainer: Any, kept: StepSettings, cut: Mapping[str, int]) -> bool:
    """Whether the loss is one of log-probabilities. Local.

    Raises: InvalidUsage for what would be wrong in silence, with what takes its place.
    """
    import transformers

    kinds = [kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind) and not _plans(kind)]
    owner = kinds[0]
    of_log_probs = not trainer.computes_token_loss and any(kind.__module__ in _LOG_PROB_TRAINERS for kind in kinds)
    known = owner is transformers.Trainer or owner.__module__ == "trl.trainer.sft_trainer" or of_log_probs
    if not known and not trainer.computes_token_loss:
        raise InvalidUsage(
            f"{owner.__name__}.compute_loss is not called with plans; if its loss is the mean of the labelled tokens' "
            "cross-entropy, set computes_token_loss = True in your class, else use it without HybridDataParallel"
        )
    for name in _given(trainer, kept, cut, owner.__name__ if of_log_probs else None):
        advice = _ADVICE.get(name.partition("=")[0], _LEAVE)
        raise InvalidUsage(f"Trainer: {name} is not supported with plans; {advice}")
    return of_log_probs


def scores_old(trainer: Any) -> bool:
    """Whether TRL's GRPOTrainer asks for the log-probabilities of the policy that has sampled, before it trains."""
    args = trainer.args
    apart = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations)
    return bool(apart or (trainer.use_vllm and trainer.vllm_importance_sampling_correction))


def check_replay(trainer: Any, replay: str) -> None:
    """Raises InvalidUsage where routes cannot be replayed."""
    if replay not in ("R2", "R3") or not is_trainer_of(trainer, "grpo"):
        raise InvalidUsage(f"Trainer: router_replay={replay!r}; expected 'R2' or 'R3', with TRL's GRPOTrainer")
    if replay == "R3" and trainer.rollout_func is None:
        raise InvalidUsage("Trainer: router_replay='R3' takes routed_experts of rollout_func; give one, or 'R2'")
    if replay == "R2" and not scores_old(trainer):
        raise InvalidUsage(
            "Trainer: router_replay='R2', and each optimizer step trains on samples of its own policy, so that no pass "
            "before it has routes; leave it out, or give more num_iterations or steps_per_generation"
        )


def _plans(kind: type) -> bool:
    return kind.__module__ == "hdpcomm.integrations.huggingface"


def _given(trainer: Any, kept: StepSettings, cut: Mapping[str, int], log_probs: str | None) -> Iterator[str]:
    """Options that are given and refused, with their values.

    Args:
        log_probs: the trainer's name, where its loss is one of log-probabilities.
    """
    import transformers

    args = trainer.args
    mesh, accelerator = mesh_text(cut), trainer.accelerator
    parts = mesh or ("zero=3" if kept.zero == 3 else "")
    precision, loss_type = accelerator.mixed_precision, getattr(args, "loss_type", "nll")
    updates = any(word in str(getattr(args.optim, "value", args.optim)) for word in ("lomo", "layerwise"))
    of_log_probs, clips_itself = log_probs is not None, not hasattr(transformers.Trainer, "_clip_grad_norm")
    wrong = {
        f"label_smoothing_factor={args.label_smoothing_factor} with {parts or log_probs}": (
            args.label_smoothing_factor and (mesh or of_log_probs)
        ),
        f"compute_loss_func with {parts or log_probs}": trainer.compute_loss_func and (mesh or of_log_probs),
        f"neftune_noise_alpha={args.neftune_noise_alpha} with {mesh or log_probs}": (
            args.neftune_noise_alpha and (cut["tensor"] > 1 or of_log_probs)
        ),
        "fp16=True": args.fp16 or precision == "fp16",
        f"mixed precision {precision}": precision == "fp8",
        "deepspeed": args.deepspeed,
        f"fsdp={args.fsdp or 'of accelerate'!r}": args.fsdp or trainer.is_fsdp_enabled,
        f"{args.n_gpu} GPUs in one process (start a process for each)": args.n_gpu > 1,
        f"torch_compile=True with {mesh}": mesh and compile_options(accelerator),
        "auto_find_batch_size=True": args.auto_find_batch_size,
        f"torch_empty_cache_steps={args.torch_empty_cache_steps}": args.torch_empty_cache_steps,
        "use_liger_kernel=True": args.use_liger_kernel,
        f"optim={args.optim!s} (updates in the backward pass)": updates,
        f"loss_type={loss_type!r}": not of_log_probs and loss_type not in ("nll", "dft"),
        f"loss_type={loss_type!r} with {mesh}": not of_log_probs and loss_type == "dft" and mesh,
        "activation_offloading": getattr(args, "activation_offloading", False),
        f"{parts or 'zero= or dtype='} with transformers {transformers.__version__} (it clips by itself)": (
            kept.masters or parts
        )
        and clips_itself,
        f"load_best_model_at_end=True of adapters with {parts}": (
            parts and args.load_best_model_at_end and hasattr(trainer.model, "peft_config")
        ),
        f"{mesh} with {log_probs}": of_log_probs and mesh,
        f"queue=True with {mesh}": cut["expert"] > 1 and trainer._plans.queue,
        "use_vllm=True with zero=3": kept.zero == 3 and getattr(args, "use_vllm", False),
        "sync_ref_model=True with zero=3": kept.zero == 3 and getattr(args, "sync_ref_model", False),
        "a model that was loaded with tp_plan": (getattr(trainer.model, "_tp_size", None) or 1) > 1,
        "the auxiliary loss of routers": of_log_probs and getattr(trainer, "aux_loss_enabled", False),
        "padding_free=True": of_log_probs and getattr(args, "padding_free", False),
        "use_weighting=True": of_log_probs and getattr(trainer, "use_weighting", False),
        "cast_lm_head_to_fp32=True": of_log_probs and getattr(args, "cast_lm_head_to_fp32", False),
    }
    return (name for name, given in wrong.items() if given)


def compile_options(accelerator: Any) -> dict[str, Any]:
    """Arguments of :func:`hdpcomm.models.compile_layers` that are asked for; none: layers are not compiled."""
    plugin = accelerator.state.dynamo_plugin
    known = ("backend", "mode", "fullgraph")
    asked = {} if plugin.backend.value.upper() == "NO" else plugin.to_kwargs()
    return {name: value for name, value in asked.items() if name in known}


def is_trainer_of(trainer: object, name: str) -> bool:
    """Whether it is TRL's trainer of that name, as "sft" or "reward"."""
    return any(kind.__module__ == f"trl.trainer.{name}_trainer" for kind in type(trainer).__mro__)


def mesh_sizes(mesh: Mapping[str, int]) -> dict[str, int]:
    """The sizes of a mesh as a trainer is given it, 1 for those left out. Raises: InvalidUsage."""
    cut = {"tensor": 1, "expert": 1, "expert_replicas": 0}
    if not isinstance(mesh, Mapping) or not mesh.keys() <= cut.keys():
        raise InvalidUsage(
            f"Trainer: mesh={mesh!r}; expected sizes by name, as {{'tensor': 2, 'expert': 2}} (pipelines need stages, "
            "which transformers' trainers do not run: hdpcomm.Trainer)"
        )
    for name, size in mesh.items():
        check_whole("Trainer", f"mesh[{name!r}]", size, least=min(cut[name], 1))
    return {**cut, **mesh}


def mesh_text(cut: Mapping[str, int]) -> str:
    """The argument that says so; empty where nothing is cut."""
    sizes = {name: size for name, size in cut.items() if size > (name != "expert_replicas")}
    return f"mesh={sizes}" if sizes else ""
