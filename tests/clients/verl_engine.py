"""verl's own workers with ``strategy=hdpcomm``, beside themselves with FSDP2 over gloo: the same trajectories."""

from __future__ import annotations

import os
import runpy
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

from common import Figures, join, leave, main, tiny_llama

ANSWERS = ((7, 1, 12, 3, 5, 2, 9, 4), (1, 24, 2, 6, 1, 3, 8, 2))
"""Tokens of the answers of each rank."""
CASES: dict[str, tuple[str, ...]] = {
    "plain": (
        "optim.optimizer=SGD", "optim.lr=1.0", "ppo_micro_batch_size_per_gpu=2",
        "checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    ),
    "tokens": (
        "use_dynamic_bsz=True", "ppo_max_token_len_per_gpu=40", "optim.lr=1e-3",
        "fsdp_config.reshard_after_forward=False",
    ),
    "long": ("use_dynamic_bsz=True", "ppo_max_token_len_per_gpu=40", "optim.optimizer=SGD", "optim.lr=0.5"),
    "sequences": (
        "optim.optimizer=SGD", "optim.lr=0.5", "ppo_micro_batch_size_per_gpu=1", "loss_agg_mode=seq-mean-token-mean",
        "entropy_coeff=0.03", "calculate_entropy=True", "use_kl_loss=True", "kl_loss_coef=0.2", "grad_clip=0.1",
        "optim.clip_grad=0.1", "optim.lr_scheduler_type=cosine", "optim.total_training_steps=3",
    ),
}  # fmt: skip
"""Options of the actor."""


def cpu_platform() -> None:
    """verl has none; its own documentation says to make one so."""
    import torch
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    nothing = types.SimpleNamespace(
        empty_cache=lambda: None, synchronize=lambda *_: None, is_available=lambda: False,
        max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0, memory_allocated=lambda: 0,
        memory_reserved=lambda: 0, set_device=lambda *_: None, manual_seed=lambda *_: None,
        mem_get_info=lambda *_: (0, 0), current_device=lambda: 0, is_initialized=lambda: False,
        get_device_name=lambda *_: "CPU", get_rng_state=lambda: None, set_rng_state=lambda _: None,
    )  # fmt: skip

    class CPU(PlatformCUDA):  # type: ignore[misc]
        device_name = "cpu"
        vendor_name = "none"
        device_module = nothing

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

        def communication_backend_name(self) -> str:
            return "gloo"

        def ray_noset_envvars(self) -> list[str]:
            return []

        def set_allocator_settings(self, settings: str) -> None:
            pass

    set_platform(CPU())


def config_of(strategy: str, options: tuple[str, ...]) -> Any:
    """What ``python -m verl.trainer.main_ppo`` gets, by verl's own files."""
    import pathlib

    import hydra
    import verl

    actor, model = "actor_rollout_ref.actor", "actor_rollout_ref.model"
    dynamic = "use_dynamic_bsz=True" in options
    given = [
        f"{actor}.strategy={strategy}", f"{model}.path=model", f"+{model}.load_tokenizer=False",
        f"+{model}.override_config.attn_implementation=sdpa", f"{model}.use_remove_padding={dynamic}",
        *([f"{model}.external_lib=hdpcomm.integrations.verl_engine"] if strategy == "hdpcomm" else []),
        f"{actor}.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=60",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        f"{actor}.fsdp_config.use_torch_compile=False",
        *(f"+{each}.fsdp_config.mixed_precision.{part}_dtype=fp32"
          for each in (actor, "actor_rollout_ref.ref") for part in ("param", "reduce", "buffer")),
        *(f"{actor}.{option}" for option in options),
    ]  # fmt: skip
    folder = str(pathlib.Path(verl.__file__).parent / "trainer/config")
    with hydra.initialize_config_dir(folder, version_base=None):
        return hydra.compose("ppo_trainer", given).actor_rollout_ref


def trajectories(rank: int) -> Any:
    """A rank's rows as verl's trainer gives them to its workers, without reference."""
    import torch
    from verl.utils import tensordict_utils

    draw = torch.Generator().manual_seed(50 + rank)

    def nested(rows: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def ids(count: int) -> Any:
        return torch.randint(1, 64, (count,), generator=draw)

    answers = ANSWERS[rank]
    prompts = [ids(2 + 3 * place % 7) for place in range(len(answers))]
    responses = [ids(count) for count in answers]
    rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.ones(count, dtype=torch.int64) for count in answers]
    advantages = [torch.full((count,), 0.0 if rank else float(torch.randn((), generator=draw))) for count in answers]
    columns = {
        "input_ids": rows, "position_ids": [torch.arange(len(row)) for row in rows], "prompts": prompts,
        "responses": responses, "response_mask": masks, "loss_mask": masks, "advantages": advantages,
    }  # fmt: skip
    return tensordict_utils.get_tensordict({name: nested(value) for name, value in columns.items()})


def asked(data: Any, **more: Any) -> Any:
    """A copy of the rows with what verl's trainer tells beside them."""
    from verl.utils import tensordict_utils

    return tensordict_utils.assign_non_tensor(data.copy(), temperature=0.9, **more)


def answers_of(output: Any, data: Any, name: str) -> Any:
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import response_from_nested

    return response_from_nested(tensordict_utils.get(output, name), data["response_mask"])


def everywhere(rows: Any) -> list[float]:
    """The values of all ranks."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows.values().tolist())
    return [value for own in everyone for value in own]


def offload(worker: Any) -> None:
    """The CPU stands for another device from now on in what verl's contexts and calls say to this worker's engine."""
    from unittest.mock import patch

    from verl.workers.engine import base

    base.get_device_name = lambda: "device"
    worker.actor.engine._device_name = "device"
    worker.to("cpu")
    check_away(worker.actor.engine)
    with patch("verl.workers.engine_workers.get_device_name", base.get_device_name):
        worker.to("device")
    assert worker.actor.engine._runner.stored == (False, False)
    worker.to("cpu", grad=False)


def check_away(engine: Any) -> None:
    """The optimizer's state takes no memory, but for small tensors, and a step says where weights are."""
    import torch

    from hdpcomm.errors import InvalidUsage

    assert engine._runner.stored == (True, True)
    state = [each for values in engine.optimizer.state.values() for each in values.values()]
    assert all(each.untyped_storage().nbytes() < 4096 for each in state if isinstance(each, torch.Tensor))
    told = "nothing"
    try:
        engine.optimizer_zero_grad()
    except InvalidUsage as error:
        told = str(error)
    assert told.startswith("weights are in host memory"), told


def case(strategy: str, options: tuple[str, ...], rank: int, found: Figures, name: str) -> None:
    import torch
    import torch.distributed as dist
    from verl.utils import tensordict_utils
    from verl.workers.engine_workers import ActorRolloutRefWorker

    longer = name == "long" and dist.get_world_size() == 2
    if longer and strategy == "hdpcomm":  # than a rank holds: the longest rows take both; verl's must fit one
        options = tuple(option.replace("per_gpu=40", "per_gpu=20") for option in options)
    if name == "tokens" and strategy == "hdpcomm":
        options = (*options, "fsdp_config.param_offload=True", "fsdp_config.optimizer_offload=True")
    config = config_of(strategy, options)
    actor = ActorRolloutRefWorker(config, "actor")
    actor.init_model()
    offloads = name == "tokens" and strategy == "hdpcomm"
    if offloads:
        offload(actor)
    data = trajectories(rank)
    scored = actor.compute_log_prob(asked(data, compute_loss=False, calculate_entropy=True))
    reference = scored
    if strategy == "hdpcomm":  # verl's own reference is always offloaded to pinned memory, which takes a GPU
        other = ActorRolloutRefWorker(config_of(strategy, options), "ref")
        other.init_model()
        reference = other.compute_ref_log_prob(asked(data, compute_loss=False, calculate_entropy=False))
    shifts = torch.Generator().manual_seed(rank)
    columns = [("old_log_probs", scored, 0.3), ("ref_log_prob", reference, 0.1)]
    for column, output, apart in columns:
        rows = answers_of(output, data, "log_probs")
        shift = torch.randn(rows.values().shape, generator=shifts) * apart
        data[column] = torch.nested.nested_tensor_from_jagged(rows.values() + shift, rows.offsets())
        found[f"{name} {column}"] = everywhere(rows)
    found[f"{name} entropies"] = everywhere(answers_of(scored, data, "entropy"))
    folder, rows_a_step = f"checkpoint-{name}", 4 * dist.get_world_size()
    for step in range(3):
        if step == 2 and strategy == "hdpcomm":  # goes on in a new worker, of ranks that have it read
            actor.save_checkpoint(folder, global_step=step)
            if name == "plain":
                check_saved(actor.actor.engine, f"{folder}/huggingface")
            actor = ActorRolloutRefWorker(config_of(strategy, options), "actor")
            actor.init_model()
            actor.load_checkpoint(folder)
            if offloads:
                offload(actor)
        told = {"global_batch_size": rows_a_step, "mini_batch_size": rows_a_step, "epochs": 2, "seed": 4}
        told |= {"dataloader_kwargs": {"shuffle": True}, "calculate_entropy": "calculate_entropy=True" in options}
        metrics = tensordict_utils.get(actor.update_actor(asked(data, **told)), "metrics")
        if offloads:
            check_away(actor.actor.engine)
        for key, values in metrics.items():
            # The last two are means over micro-batches, whichever there are.
            if not key.startswith(("perf/", "mfu", *(("actor/ppo_kl", "actor/pg_clipfrac") if longer else ()))):
                found[f"{name} {step} {key}"] = [float(each) for each in values]
    for key, tensor in actor.actor.engine.get_per_tensor_param()[0]:
        found[f"{name} {key}"] = tensor.flatten().tolist()
    if strategy == "hdpcomm" and dist.get_world_size() > 1:
        masters = actor.actor.engine._runner.masters
        assert masters.shared
        assert masters.pulled == (name != "tokens")
        assert actor.actor.engine.comm.stats()["bytes_sent"] > 1000


def adapters() -> None:
    """A folder with adapters of the model that change what it computes."""
    import peft
    import torch

    config = peft.LoraConfig(task_type=peft.TaskType.CAUSAL_LM, r=4, lora_alpha=8, target_modules="all-linear")
    made = peft.get_peft_model(tiny_llama(), config)
    for name, parameter in made.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained("adapters")


def lora(strategy: str, rank: int, found: Figures) -> None:
    """Adapters of a folder are trained, the model without them is the reference, and rollouts get what verl's get."""
    import peft
    import torch
    import torch.distributed as dist
    from omegaconf import open_dict
    from verl.utils import tensordict_utils
    from verl.workers.engine_workers import ActorRolloutRefWorker

    def worker(**options: Any) -> Any:
        config = config_of(strategy, ("optim.lr=1e-3", "use_dynamic_bsz=True", "ppo_max_token_len_per_gpu=40"))
        with open_dict(config):
            config.model.update(lora_rank=4, **options)
            config.actor.checkpoint.update(
                save_lora_only=True, save_contents=["model", "optimizer", "extra", "hf_model"]
            )
        made = ActorRolloutRefWorker(config, "actor")
        made.init_model()
        return made

    data = trajectories(rank)
    actor = worker(target_modules=["q_proj", "up_proj"], exclude_modules=".*layers.1.mlp.*")
    scored = actor.compute_log_prob(asked(data, compute_loss=False, calculate_entropy=False))
    found["lora new"] = everywhere(answers_of(scored, data, "log_probs"))
    for key, tensor in actor.actor.engine.get_per_tensor_param(base_sync_done=True)[0]:
        found[f"lora new {key}"] = [float(each) for each in tensor.shape]
    actor = worker(lora_adapter_path="adapters")
    scored = actor.compute_log_prob(asked(data, compute_loss=False, calculate_entropy=False))
    data["old_log_probs"] = answers_of(scored, data, "log_probs")
    told = {"compute_loss": False, "calculate_entropy": False, "no_lora_adapter": True}
    data["ref_log_prob"] = answers_of(actor.compute_log_prob(asked(data, **told)), data, "log_probs")
    for column in ("old_log_probs", "ref_log_prob"):
        found[f"lora {column}"] = everywhere(data[column])
    rows = 4 * dist.get_world_size()
    more = {"global_batch_size": rows, "mini_batch_size": rows, "epochs": 1, "seed": 4, "calculate_entropy": False}
    for step in range(2):
        if step and strategy == "hdpcomm":
            actor.save_checkpoint("checkpoint-lora", global_step=step)
            kept = peft.load_peft_weights("checkpoint-lora/huggingface")
            for key, tensor in actor.actor.engine.get_per_tensor_param(base_sync_done=True)[0]:
                assert torch.equal(kept.pop(key), tensor), key
            assert not kept
            actor = worker(lora_adapter_path="adapters")
            actor.load_checkpoint("checkpoint-lora")
        metrics = actor.update_actor(asked(data, dataloader_kwargs={"shuffle": False}, **more))
        metrics = tensordict_utils.get(metrics, "metrics")
        found[f"lora {step}"] = [float(each) for key in ("loss", "grad_norm") for each in metrics[key]]
    engine = actor.actor.engine
    for done in (True, False):
        weights, config = engine.get_per_tensor_param(base_sync_done=done)
        assert (config["r"], config["lora_alpha"]) == (4, 8)
        for key, tensor in weights:
            found[f"lora {done} {key}"] = tensor.flatten().tolist()
    engine.model_config.lora.update(merge=True)
    weights, config = engine.get_per_tensor_param()
    assert config is None
    for key, tensor in weights:
        found[f"lora merged {key}"] = tensor.flatten().tolist()


def check_saved(engine: Any, folder: str) -> None:
    """transformers reads the weights that the ranks have together."""
    import torch
    import transformers

    read = dict(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())
    for key, tensor in engine.get_per_tensor_param()[0]:
        assert torch.equal(read.pop(key).detach(), tensor), key
    assert not read


def worker_of(
    strategy: str,
    kind: str,
    path: str,
    loss: Any,
    lr: float,
    *,
    optimizer: str = "SGD",
    precision: str = "fp32",
    reshard_after_forward: bool = True,
) -> Any:
    """One of verl's workers for a model that is no policy, in micro-batches by tokens."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    model = HFModelConfig(path=path, load_tokenizer=False, override_config={"attn_implementation": "sdpa"})
    given: dict[str, Any] = {
        "mixed_precision": dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), precision)
    }
    given |= {"use_torch_compile": False, "max_token_len_per_gpu": 50, "infer_max_token_len_per_gpu": 70}
    given["reshard_after_forward"] = reshard_after_forward
    if strategy == "hdpcomm":
        from hdpcomm.integrations.verl_engine import HdpEngineConfig

        engine = HdpEngineConfig(**given)
    else:
        engine = FSDPEngineConfig(strategy=strategy, **given)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type=kind, model_config=model, engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(optimizer=optimizer, lr=lr, total_training_steps=4),
            checkpoint_config=CheckpointConfig(),
        )
    )  # fmt: skip
    worker.reset()
    worker.set_loss_fn(loss)
    return worker


def critic(strategy: str, rank: int, found: Figures) -> None:
    """As verl's trainer of PPO does: values of tokens, and updates by verl's loss of them."""
    from functools import partial

    import torch
    import transformers
    import verl.utils.model
    from verl.utils import tensordict_utils
    from verl.workers.utils.losses import value_loss

    def load(local_path: str, torch_dtype: Any, model_config: Any, **_: Any) -> Any:
        auto = transformers.AutoModelForTokenClassification
        return auto.from_pretrained(local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa")

    verl.utils.model.load_valuehead_model = load  # its own takes a GPU
    config = types.SimpleNamespace(cliprange_value=0.3, loss_agg_mode="token-mean", loss_scale_factor=None)
    worker = worker_of(strategy, "value_model", "critic", partial(value_loss, config=config), 0.05)
    data = trajectories(rank)
    more = {"global_token_num": None, "global_batch_size": len(ANSWERS[0]) * torch.distributed.get_world_size()}
    scored = worker.infer_batch(asked(data, compute_loss=False, **more))
    values = answers_of(scored, data, "values")
    found["critic values"] = everywhere(values)
    data["values"] = values
    shift = torch.randn(values.values().shape, generator=torch.Generator().manual_seed(rank))
    data["returns"] = torch.nested.nested_tensor_from_jagged(values.values() + shift, values.offsets())
    for step in range(3):
        output = worker.train_batch(asked(data, update_lr_scheduler=True, **more))
        metrics = tensordict_utils.get(output, "metrics")
        found[f"critic {step}"] = [float(metrics[key]) for key in ("loss", "grad_norm", "lr")]
    for key, tensor in worker.engine.get_per_tensor_param()[0]:
        found[f"critic {key}"] = tensor.flatten().tolist()


def supervised(strategy: str, rank: int, found: Figures) -> None:
    """As verl's SFT trainer does: prompts are not trained, rows in micro-batches by tokens."""
    from functools import partial

    import torch
    from verl.utils import tensordict_utils
    from verl.workers.utils.losses import sft_loss

    worker = worker_of(strategy, "language_model", "model", partial(sft_loss, config=None), 1.0)
    rows = trajectories(rank)
    lengths = zip(rows["prompts"].offsets().diff(), rows["responses"].offsets().diff(), strict=True)
    masks = [torch.cat((torch.zeros(int(a)), torch.ones(int(b)))).long() for a, b in lengths]
    columns = {name: rows[name] for name in ("input_ids", "position_ids")}
    columns["loss_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    data = tensordict_utils.get_tensordict(columns)
    for step in range(3):
        output = worker.train_batch(asked(data, update_lr_scheduler=True, global_token_num=None))
        metrics = tensordict_utils.get(output, "metrics")
        found[f"supervised {step}"] = [float(metrics[key]) for key in ("loss", "grad_norm", "lr")]
    output = worker.infer_batch(asked(data, global_token_num=None))
    found["supervised evaluation"] = [float(tensordict_utils.get(output, "metrics")["loss"])]
    for key, tensor in worker.engine.get_per_tensor_param()[0]:
        found[f"supervised {key}"] = tensor.flatten().tolist()


def check_bf16(rank: int, expected: list[float]) -> None:
    """verl's default: parameters in bf16, weights of the optimizer in fp32."""
    import torch
    from verl.workers.engine_workers import ActorRolloutRefWorker

    config = config_of("hdpcomm", CASES["plain"])
    config.actor.fsdp_config.mixed_precision = None
    actor = ActorRolloutRefWorker(config, "actor")
    actor.init_model()
    data = trajectories(rank)
    output = actor.compute_log_prob(asked(data, compute_loss=False, calculate_entropy=True))
    engine = actor.actor.engine
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    assert {p.dtype for group in engine.optimizer.param_groups for p in group["params"]} == {torch.float32}
    found = everywhere(answers_of(output, data, "log_probs"))
    apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert 0 < apart < 0.05, apart


REFUSED = {
    "model.lora.rank": 4,
    "model.use_liger": True,
    "model.enable_activation_offload": True,
    "model.tiled_mlp": {"enabled": True, "num_shards": 2},
    "actor.ulysses_sequence_parallel_size": 2,
    "actor.fsdp_config.offload_policy": True,
    "actor.fsdp_config.pad_to_length": True,
    "actor.fsdp_config.qat.enable": True,
    "actor.checkpoint.async_save": True,
    "actor.fsdp_config.mixed_precision.param_dtype": "fp16",
}
"""Options that the error names."""


def check_table() -> None:
    """The table of options has each of verl's once."""
    import dataclasses

    import verl.workers.config
    from verl.trainer.config import CheckpointConfig

    tools = Path(__file__).resolve().parents[2] / "tools"
    tables: dict[str, Any] = runpy.run_path(str(tools / "trainer_options.py"))["VERL"]
    for kind in tables["works"]:
        config = CheckpointConfig if kind == "CheckpointConfig" else getattr(verl.workers.config, kind)
        known = sorted({each.name for each in dataclasses.fields(config)} - {"_target_"})
        listed = [name for table in tables.values() for names in table.get(kind, {}) for name in names.split()]
        assert sorted(listed) == known, (kind, {*listed} ^ {*known})


def check_refusals(rank: int) -> None:
    import torch
    from omegaconf import OmegaConf, open_dict
    from verl.workers.engine_workers import ActorRolloutRefWorker

    def actor_with(option: str, value: Any) -> Any:
        config = config_of("hdpcomm", CASES["plain"])
        with open_dict(config):
            OmegaConf.update(config, option, value)
        actor = ActorRolloutRefWorker(config, "actor")
        actor.init_model()
        return actor

    for option, value in REFUSED.items():
        name = next(part for part in reversed(option.split(".")) if part not in ("enable", "param_dtype"))
        refused(name, lambda: actor_with(option, value))  # noqa: B023 (called now)
    engine = actor_with("actor.optim.optimizer", "SGD").actor.engine
    several = trajectories(rank)
    several["temperature"] = torch.arange(1.0, 1.0 + len(several))
    shifted = trajectories(rank)
    rows = shifted["position_ids"]
    shifted["position_ids"] = torch.nested.nested_tensor_from_jagged(rows.values() + 1, rows.offsets())
    summed = asked(trajectories(rank), calculate_sum_pi_squared=True)
    refused("temperatures", lambda: engine.infer_batch(several))
    refused("position_ids", lambda: engine.infer_batch(asked(shifted)))
    refused("calculate_sum_pi_squared", lambda: engine.infer_batch(summed))
    refused("delta_sharded", engine.get_per_tensor_param_shard)
    refused("to('cuda')", lambda: engine.to("cuda"))
    check_planted(engine, rank)


class Planted:
    """What runs code where it is unpickled with any globals."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def check_planted(engine: Any, rank: int) -> None:
    """A checkpoint that somebody else has made runs nothing."""
    import torch

    from hdpcomm.errors import InvalidUsage

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(Planted(folder / "marker"), folder / f"extra_rank_{rank}.pt")
        engine.checkpoint_config = {"load_contents": ["extra"]}
        told = "nothing"
        try:
            engine.load_checkpoint(name)
        except InvalidUsage as error:
            told = str(error)
        assert f"expected on rank {rank} what strategy=hdpcomm has saved" in told, told
        assert not (folder / "marker").exists()


def refused(name: str, call: Any) -> None:
    from hdpcomm.errors import InvalidUsage

    told = "nothing"
    try:
        call()
    except InvalidUsage as error:
        told = str(error)
    assert told.startswith("strategy=hdpcomm does not support"), (name, told)
    assert name in told, (name, told)


def work(backend: str) -> Figures:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    rank, _ = join("gloo")  # as in a job of verl, which makes a group of its own kind
    cpu_platform()
    os.environ["VERL_ENGINE_DEVICE"] = "cuda" if backend == "gloo" else "cpu"  # where its engine is registered
    if rank == 0:
        tiny_llama().save_pretrained("model")
        import transformers

        config = tiny_llama().config
        config.num_labels = 1
        transformers.AutoModelForTokenClassification.from_config(config).save_pretrained("critic")
        adapters()
    dist.barrier()
    found: Figures = {}
    strategy = "hdpcomm" if backend == "hdpcomm" else "fsdp2"
    for name, options in CASES.items():
        case(strategy, options, rank, found, name)
    lora(strategy, rank, found)
    supervised(strategy, rank, found)
    critic(strategy, rank, found)
    if backend == "hdpcomm":
        check_bf16(rank, found["plain old_log_probs"])
        check_table()
        check_refusals(rank)
    leave("gloo")
    return found


if __name__ == "__main__":
    for ranks in (1, 2):
        main(work, against="gloo", packages=["torch", "verl", "transformers"], ranks=ranks)
