"""Rows with images in verl's engine: ranks share the encoder's work, and log-probabilities, gradients and weights are
those of transformers' own model, row by row."""

from __future__ import annotations

import warnings
from typing import Any

from common import Figures, join, leave, main
from verl_engine import cpu_platform, refused
from verl_routes import everywhere

IMAGE, VOCABULARY, PATCH = 120, 128, 4
ROWS = (("tit", "t", "itiit"), ("tt", "tiiiiiit", "ti"))
"""Each rank's: stretches of text and images."""
STEPS, RATE, TEMPERATURE = 2, 0.2, 0.9


def model() -> Any:
    import torch
    import transformers

    torch.manual_seed(1)
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": PATCH,
        "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=121, vision_start_token_id=122,
        vision_end_token_id=123, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").float()


def rows(rank: int) -> list[dict[str, Any]]:
    """Tokens and pixels, as verl's agent loop gives them: a row without images has no inputs."""
    import torch

    draw, found = torch.Generator().manual_seed(70 + rank), []
    for parts in ROWS[rank]:
        tokens, grids = [], []
        for part in parts:
            if part == "t":
                tokens += torch.randint(3, 120, (7,), generator=draw).tolist()
                continue
            grids.append([1, *(2 * torch.randint(1, 4, (2,), generator=draw)).tolist()])
            tokens += [122, *[IMAGE] * (grids[-1][1] * grids[-1][2] // 4), 123]
        row: dict[str, Any] = {"tokens": torch.tensor(tokens), "media": {}}
        if grids:
            patches = sum(height * width for _, height, width in grids)
            pixels = torch.randn(patches, 3 * 2 * PATCH**2, generator=draw)
            row["media"] = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
        found.append(row)
    return found


def one_process() -> Figures:
    import torch

    plain, found = model(), {}
    every = [row for rank in range(2) for row in rows(rank)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for step in range(STEPS):
        log_probs = []
        for row in every:
            tokens = row["tokens"]
            kinds = (tokens == IMAGE).int()[None]
            out = plain(input_ids=tokens[None], mm_token_type_ids=kinds, use_cache=False, **row["media"])
            logits = out.logits[0, :-1] / TEMPERATURE
            log_probs.append(logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
        joined = torch.cat(log_probs)
        optimizer.zero_grad()
        (-joined.mean()).backward()
        norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
        optimizer.step()
        found[f"log-probabilities {step}"], found[f"norm {step}"] = joined.tolist(), [float(norm)]
    for name, parameter in plain.state_dict().items():
        found[f"weight {name}"] = parameter.flatten().tolist()
    return found


def batch(rank: int) -> Any:
    import torch
    from verl.utils import tensordict_utils

    own, reference = rows(rank), model()
    places = []
    for row in own:
        tokens = row["tokens"]
        kinds, grids = (tokens == IMAGE).int()[None], row["media"].get("image_grid_thw")
        three, _ = reference.model.get_rope_index(tokens[None], mm_token_type_ids=kinds, image_grid_thw=grids)
        places.append(torch.cat((torch.arange(len(tokens))[None], three[:, 0])))
    columns = {
        "input_ids": [row["tokens"] for row in own],
        "loss_mask": [(torch.arange(len(row["tokens"])) > 0).long() for row in own],
    }
    nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in columns.items()}
    offsets = nested["input_ids"].offsets()
    nested["position_ids"] = torch.nested.nested_tensor_from_jagged(torch.cat(places, 1), offsets, jagged_dim=2)
    media = [row["media"] | {"images_seqlens": None} if row["media"] else None for row in own]
    data = tensordict_utils.get_tensordict(nested | {"multi_modal_inputs": media})
    return tensordict_utils.assign_non_tensor(data, temperature=TEMPERATURE, global_token_num=None)


def engine() -> Any:
    from functools import partial

    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import sft_loss

    from hdpcomm.integrations.verl_engine import HdpEngineConfig

    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path="images", load_tokenizer=False),
            engine_config=HdpEngineConfig(
                mixed_precision=dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"),
                max_token_len_per_gpu=90, infer_max_token_len_per_gpu=120,
            ),
            optimizer_config=FSDPOptimizerConfig(
                optimizer="SGD", lr=RATE, weight_decay=0.0, clip_grad=1e9, total_training_steps=4
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )  # fmt: skip
    worker.reset()
    worker.set_loss_fn(partial(sft_loss, config=None))
    return worker


def work(backend: str) -> Figures:
    import torch.distributed as dist
    from verl.utils import tensordict_utils

    warnings.simplefilter("ignore")
    if backend == "one process":
        return one_process()
    rank, _ = join("gloo")
    cpu_platform()
    if rank == 0:
        model().save_pretrained("images")
    dist.barrier()
    worker, found = engine(), {}
    for step in range(STEPS):
        log_probs = tensordict_utils.get(worker.infer_batch(batch(rank)), "log_probs").unbind()
        found[f"log-probabilities {step}"] = everywhere([x for row in log_probs for x in row[:-1].tolist()])
        output = worker.train_batch(batch(rank))
        found[f"norm {step}"] = [float(tensordict_utils.get(output, "metrics")["grad_norm"])]
    for name, tensor in worker.engine.get_per_tensor_param()[0]:
        found[f"weight {name}"] = tensor.flatten().tolist()
    other = batch(rank)
    tensordict_utils.assign_non_tensor_stack(other, "multi_modal_inputs", [{"image_bound": [1]}] * len(other))
    refused("multi_modal_inputs with image_bound", lambda: worker.infer_batch(other))
    leave("gloo")
    return found


if __name__ == "__main__":
    main(work, against="one process", packages=["torch", "verl", "transformers"])
