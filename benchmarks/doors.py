"""Memory and host time of models that transformers' and TRL's trainers train with plans.

    python benchmarks/doors.py [--doors transformers sft grpo] [--zero 0 3] [--json FILE] [--folder FOLDER]
    python benchmarks/doors.py --doors verl --zero 3 [--json FILE] [--folder FOLDER]
    python benchmarks/doors.py --host [--doors transformers sft] [--json FILE]

Both put their figures beside those of other doors that FILE has.

Each door (:data:`DOORS`) gets a Llama by its folder (337 million parameters in bf16, fp32 masters, AdamW), trains some
steps of short sequences, saves a checkpoint, and goes on from it for one more. GRPO generates its answers. The first
run of ``transformers`` measures costs; the others know them, which takes less time and as much memory. A rank of
``zero=0`` holds the same on any number of ranks, so it runs on 2, ``zero=3`` on 4. ``verl`` is verl's worker of
supervised training, with ``zero=3`` only, in an environment of its own (docs/clients.md).

A rank's peak is that of :class:`large_model.Peak` (its anonymous memory and its share of the shared memory, above what
it had when all was imported), from the making of the trainer to the last step, while it saves, and when it goes on. The
prediction is :func:`hdpcomm.run.memory.predict_memory` of ``hdpcomm train`` with the same settings. glibc gives back at
once what is freed (:func:`give_back`); as it comes it keeps freed tensors of up to 32 MiB, which are most of them here.

With ``--host``, on one rank and a model so small that the host is what takes time: processor time of a step of the
door, less that of the same trainer of the other base whose ``training_step`` computes nothing (its batches, collator,
clipping, schedule and callbacks), over that of :meth:`hdpcomm.Trainer.step` on the same sequences in the same plan. All
three in turns in one process; the fastest steps are compared.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from large_model import Peak, write_model

import hdpcomm as hdp
from hdpcomm.plan import CostModel
from hdpcomm.run import RunConfig, folder_model
from hdpcomm.run.memory import predict_memory
from hdpcomm.testing import spawn

DOORS = ("transformers", "sft", "grpo", "verl")
RANKS = {0: 2, 2: 2, 3: 4}
"""By stage of ZeRO; 2 is verl's engine with ``reshard_after_forward=False``, which has no 0."""
CAPACITY = 64  # tokens of a rank in a micro-batch
BATCH = 48  # sequences of a step of --host
STEPS, TURNS, WARM_UP = 25, 5, 5
COST = CostModel(attention=1e-9, linear=1e-6, fixed=1e-4)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LENGTHS = (9, 31, 5, 14, 22, 3, 28, 17)
WORDS = 50


def tokenizer() -> Any:
    import tokenizers
    import transformers

    words = {word: i for i, word in enumerate(["<pad>", "<end>", *(f"w{i}" for i in range(WORDS))])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>")


def rows(count: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(2, WORDS, (LENGTHS[i % len(LENGTHS)],), generator=draw).tolist() for i in range(count)]


def spread(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(set(completion.split())) % 5) for completion in completions]


def bases(door: str) -> tuple[type[Any], type[Any]]:
    """The trainer of others, and its arguments."""
    import transformers
    import trl

    return {
        "transformers": (transformers.Trainer, transformers.TrainingArguments),
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    }[door]


def planned(base: type[Any]) -> type[Any]:
    from hdpcomm.integrations.huggingface import HybridDataParallel

    return type(f"Planned{base.__name__}", (HybridDataParallel, base), {})


def arguments(config: type[Any], folder: Path, **changed: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"), "use_cpu": True, "per_device_train_batch_size": 4, "learning_rate": 1e-4,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "train_sampling_strategy": "sequential",
        "disable_tqdm": True, "bf16": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    if "gradient_checkpointing" in config.__dataclass_fields__:  # TRL's default is to recompute all
        settings["gradient_checkpointing"] = False
    return config(**(settings | changed))


def trainer_of(
    door: str, folder: Path, settings: dict[str, Any], plans: dict[str, Any] | None, **more: Any
) -> Callable[[], Any]:
    """Makes a trainer of the model in a folder, when called; all imports are done.

    Args:
        settings: arguments of the trainer besides those that all have.
        plans: arguments of plans; ``None``: the trainer of the other base.
        more: what else the trainer is given.
    """
    import datasets
    import transformers

    base, config = bases(door)
    kind, given = base if plans is None else planned(base), {"train_dataset": [{"input_ids": row} for row in rows(96)]}
    if door == "transformers":
        given["data_collator"] = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        if plans is None:
            given["data_collator"] = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    if door == "grpo":
        settings = {"num_generations": 2, "max_completion_length": 8, "temperature": 1.0} | settings
        prompts = [" ".join(f"w{token}" for token in row) for row in rows(96)]
        given = {"train_dataset": datasets.Dataset.from_dict({"prompt": prompts}), "reward_funcs": spread}
    elif door == "sft":
        given["train_dataset"] = datasets.Dataset.from_list(given["train_dataset"])
    if door != "transformers":
        given["processing_class"] = tokenizer()

    def make() -> Any:
        model: Any = str(folder / "model")
        if plans is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return kind(model=model, args=arguments(config, folder, **settings), **given, **(plans or {}), **more)

    return make


def give_back() -> None:
    """From now on this process gives the memory of freed tensors back to the system."""
    libc = ctypes.CDLL("libc.so.6")
    for option, size in ((_M_MMAP_THRESHOLD, 1 << 20), (_M_TRIM_THRESHOLD, 8 << 20)):
        if not libc.mallopt(option, size):
            raise OSError(f"mallopt({option}, {size}) failed")


def run_rank(door: str, folder: str, zero: int, steps: int, resume: bool) -> dict[str, Any]:
    give_back()
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate takes more
    torch.set_num_threads(1)
    measures = door == "transformers" and not resume
    plans: dict[str, Any] = {"capacity": CAPACITY, "cost_model": None if measures else COST}
    plans |= {"zero": zero, "dtype": torch.bfloat16}
    make = trainer_of(door, Path(folder), {"max_steps": steps}, plans)
    with Peak(RANKS[zero]) as peak:
        started = time.perf_counter()
        trainer = make()
        trainer.train(resume_from_checkpoint=f"{folder}/out/checkpoint-{steps - 1}" if resume else None)
        seconds, before_saving = time.perf_counter() - started, peak.bytes
        if not resume:
            trainer._save_checkpoint(trainer.model, trial=None)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "peak": before_saving, "peak_saved": peak.bytes, "seconds": seconds, "losses": [row["loss"] for row in logs],
        "micro_batches": logs[-1]["hdp_micro_batches"],
    }  # fmt: skip


def verl_client(strategy: str) -> Any:
    """verl's workers on CPUs; it has no engine of its own for these, and that for CUDA runs there."""
    os.environ |= {"OMP_NUM_THREADS": "1", "VERL_ENGINE_DEVICE": "cpu" if strategy == "hdpcomm" else "cuda"}
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/clients"))
    client = importlib.import_module("verl_engine")
    client.cpu_platform()
    return client


def verl_rows(client: Any, rank: int, ranks: int) -> Any:
    """A rank's part of 32 rows, with what verl's loss asks for."""
    from verl.utils import tensordict_utils

    columns: dict[str, Any] = {}
    for name in ("input_ids", "position_ids"):
        every = [row for place in range(4) for row in client.trajectories(place % 2)[name].unbind()]
        own = every[len(every) * rank // ranks : len(every) * (rank + 1) // ranks]
        columns[name] = torch.nested.as_nested_tensor(own, layout=torch.jagged)
    columns["loss_mask"] = (columns["position_ids"] > 0).long()  # the first token is no label
    return tensordict_utils.get_tensordict(columns)


def verl_step(client: Any, worker: Any, data: Any) -> dict[str, Any]:
    """The metrics of one."""
    from verl.utils import tensordict_utils

    output = worker.train_batch(client.asked(data, update_lr_scheduler=True, global_token_num=None))
    found: dict[str, Any] = tensordict_utils.get(output, "metrics")
    return found


def verl_rank(folder: str, steps: int, resume: bool) -> dict[str, Any]:
    """Micro-batches are of a rank's own rows there."""
    give_back()
    client = verl_client("hdpcomm")
    from verl.workers.utils.losses import sft_loss

    with hdp.init() as comm:
        dist.init_process_group("gloo", f"file://{folder}/store-{resume}", rank=comm.rank, world_size=comm.size)
        data = verl_rows(client, comm.rank, comm.size)
        losses = []
        with Peak(comm.size) as peak:
            started = time.perf_counter()
            loss = partial(sft_loss, config=None)
            settings = {"optimizer": "AdamW", "precision": "bf16"}
            worker = client.worker_of("hdpcomm", "language_model", f"{folder}/model", loss, 1e-4, **settings)
            if resume:
                worker.load_checkpoint(f"{folder}/out")
            for _ in range(1 if resume else steps):
                losses.append(float(verl_step(client, worker, data)["loss"]))
            seconds, before_saving = time.perf_counter() - started, peak.bytes
            if not resume:
                worker.save_checkpoint(f"{folder}/out")
        dist.destroy_process_group()
    return {"peak": before_saving, "peak_saved": peak.bytes, "seconds": seconds, "losses": losses, "micro_batches": 0}


def memory(options: argparse.Namespace, where: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Peaks of each door beside the prediction."""
    parameters = write_model(options, where / "model")
    for zero in options.zero:
        config = RunConfig(model=folder_model(where / "model"), capacity=CAPACITY, zero=zero, dtype="bf16")
        (step,) = predict_memory(config, RANKS[zero])
        predicted = step.peak_bytes(CAPACITY)
        for door in options.doors:
            run, own = (verl_rank, [str(where)]) if door == "verl" else (run_rank, [door, str(where), zero])
            if door == "verl" and zero != 3:
                continue
            row: dict[str, Any] = {"parameters": parameters, "ranks": RANKS[zero], "predicted": predicted}
            first = spawn(run, RANKS[zero], *own, options.steps, False, timeout=3600.0)
            row |= {name: first[0][name] for name in ("seconds", "losses", "micro_batches")}
            row["peaks"] = {"training": [each["peak"] for each in first]}
            row["peaks"]["saving"] = [each["peak_saved"] for each in first]
            yield f"{door}, zero {zero}", row | {"ratios": ratios(row)}
            then = spawn(run, RANKS[zero], *own, options.steps + 1, True, timeout=3600.0)
            row["peaks"]["resumed"] = [each["peak"] for each in then]
            shutil.rmtree(where / "out")
            yield f"{door}, zero {zero}", row | {"ratios": ratios(row)}


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """The largest of the ranks' peaks over the prediction."""
    return {when: max(peaks) / row["predicted"] for when, peaks in row["peaks"].items()}


def tiny() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def host_rank(door: str, folder: str) -> dict[str, Any]:
    """Fastest steps of the door, of its base without computation, and of hdpcomm's Trainer, in each turn."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    import datasets
    import transformers

    base, config = bases(door)
    sequences = [{"input_ids": row} for row in rows(4 * BATCH)]
    given: dict[str, Any] = {"train_dataset": sequences}
    if door == "transformers":
        given["data_collator"] = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    else:
        given = {"train_dataset": datasets.Dataset.from_list(sequences), "processing_class": tokenizer()}

    class Bare(base):  # type: ignore[misc]
        def training_step(self, *_: Any, **__: Any) -> torch.Tensor:
            return torch.zeros(())

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.process_time())

    def steps_of(kind: type[Any], **options: Any) -> tuple[list[float], Any]:
        clock = Clock()
        changed = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "logging_steps": 1000}
        args = arguments(config, Path(folder), optim="adamw_torch", **changed)
        trainer = kind(model=tiny(), args=args, callbacks=[clock], **given, **options)
        trainer.train()
        return [b - a for a, b in pairwise(clock.ends[WARM_UP:])], trainer

    def own_steps(comm: hdp.Communicator) -> tuple[list[float], int]:
        model = hdp.adapt(tiny())
        planner = hdp.Planner(None, hdp.ClusterSpec(1, CAPACITY), cost_model=COST)
        trainer = hdp.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-4), planner, comm)
        tokens = [torch.tensor(row["input_ids"]) for row in sequences]
        ends = []
        for step in range(STEPS):
            own = tokens[BATCH * (step % 4) :][:BATCH]
            done = trainer.step([len(each) for each in own], own.__getitem__)
            ends.append(time.process_time())
        return [b - a for a, b in pairwise(ends[WARM_UP:])], done.micro_batches

    found: dict[str, Any] = {name: [] for name in ("door_s", "base_s", "trainer_s")}
    for _ in range(TURNS):
        door_s, trainer = steps_of(planned(base), capacity=CAPACITY, cost_model=COST)
        own_s, found["micro_batches"] = own_steps(trainer.comm)
        for name, times in zip(found, (door_s, steps_of(Bare)[0], own_s), strict=False):
            found[name].append(min(times))
    return found


def host(options: argparse.Namespace, where: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Processor time of steps, and what the door's own share is of that of hdpcomm's Trainer."""
    for door in options.doors:
        if door in ("transformers", "sft"):  # GRPO's loss is another one
            (row,) = spawn(host_rank, 1, door, str(where), timeout=3600.0)
            own, base, trainer = (min(row[name]) for name in ("door_s", "base_s", "trainer_s"))
            each_us = [1e6 * time / row["micro_batches"] for time in (own - base, trainer)]
            row |= {"door_us": each_us[0], "trainer_us": each_us[1], "ratio": each_us[0] / each_us[1]}
            yield f"{door}, host", row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 20), ("hidden", 1024), ("vocabulary", 32000), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=DOORS[:3])
    parser.add_argument("--zero", nargs="+", type=int, choices=tuple(RANKS), default=(0, 3))
    parser.add_argument("--host", action="store_true", help="host time of one rank, in place of memory")
    parser.add_argument("--folder", type=Path, help="where everything is written (a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures, too")
    options = parser.parse_args()
    options.ranks = 1  # key and value heads of the model need not be cut
    packages = ("torch", "transformers", "verl" if "verl" in options.doors else "trl")
    here = {
        "date": date.today().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **{name: importlib.metadata.version(name) for name in packages},
    }  # fmt: skip
    found = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, row in (host if options.host else memory)(options, Path(folder)):
            found[name] = here | row
            print(name, row.get("ratios") or row["ratio"], flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
