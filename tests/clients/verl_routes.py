"""Router replay by verl's engine: experts of the pass for old log-probabilities (R2) and of rollouts (R3), against
transformers' model that is told them, row by row."""

from __future__ import annotations

import warnings
from typing import Any

from common import Figures, join, leave, main
from verl_engine import cpu_platform, refused

LENGTHS = ((9, 30, 4), (12, 2, 17))
"""Tokens of each rank's rows."""
EXPERTS, TOP_K, LAYERS = 4, 2, 2
TEMPERATURE = 0.9


def model() -> Any:
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()


def rows(rank: int) -> tuple[list[Any], list[Any]]:
    """(tokens, the experts that a rollout would give) of each row."""
    import torch

    draw = torch.Generator().manual_seed(40 + rank)
    tokens = [torch.randint(1, 64, (count,), generator=draw) for count in LENGTHS[rank]]
    given = [torch.rand(n, LAYERS, EXPERTS, generator=draw).topk(TOP_K).indices for n in LENGTHS[rank]]
    return tokens, given


def told(plain: Any, tokens: Any, routes: Any) -> tuple[Any, Any]:
    """(log-probabilities of a row's next tokens, the experts that it would take) of the model that takes ``routes``;
    ``None``: its own."""
    import torch

    chosen, handles = [], []
    for layer, block in enumerate(each.mlp for each in plain.model.layers):

        def choose(_: Any, given: Any, block: Any = block, layer: int = layer) -> Any:
            hidden, index, _ = given
            taken = index if routes is None else routes[:, layer].long()
            weights = torch.nn.functional.linear(hidden, block.gate.weight).softmax(-1).gather(1, taken)
            chosen.append(index)
            return hidden, taken, weights / weights.sum(-1, keepdim=True)

        handles.append(block.experts.register_forward_pre_hook(choose))
    logits = plain(input_ids=tokens[None], use_cache=False).logits[0, :-1] / TEMPERATURE
    for handle in handles:
        handle.remove()
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0], torch.stack(chosen, dim=1)


def one_process() -> Figures:
    import torch

    plain, found = model(), {}
    for mode in ("R2", "R3"):
        log_probs, taken = [], []
        for rank in range(2):
            for tokens, given in zip(*rows(rank), strict=True):
                values, own = told(plain, tokens, given if mode == "R3" else None)
                log_probs.append(values)
                taken.append(own)
        every = torch.cat(log_probs)
        found[f"{mode} log-probabilities"] = every.tolist()
        if mode == "R2":
            found["R2 experts"] = torch.cat(taken).sort(-1).values.flatten().tolist()
        plain.zero_grad()
        (-every.mean()).backward()
        found[f"{mode} gradient"] = [float(torch.stack([p.grad.norm() for p in plain.parameters()]).norm())]
    return found


def batch(rank: int, routes: Any = None) -> Any:
    import torch
    from verl.utils import tensordict_utils

    tokens, _ = rows(rank)
    columns = {
        "input_ids": tokens, "position_ids": [torch.arange(len(each)) for each in tokens],
        "loss_mask": [(torch.arange(len(each)) > 0).long() for each in tokens],
    }  # fmt: skip
    nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in columns.items()}
    if routes is not None:
        nested["routed_experts"] = routes
    data = tensordict_utils.get_tensordict(nested)
    return tensordict_utils.assign_non_tensor(data, temperature=TEMPERATURE, global_token_num=None)


def engine_of(mode: str) -> Any:
    from functools import partial

    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import sft_loss

    from hdpcomm.integrations.verl_engine import HdpEngineConfig

    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path="experts", load_tokenizer=False),
            engine_config=HdpEngineConfig(
                mixed_precision=dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"),
                router_replay={"mode": mode}, max_token_len_per_gpu=50, infer_max_token_len_per_gpu=70,
            ),
            optimizer_config=FSDPOptimizerConfig(optimizer="SGD", lr=0.0, clip_grad=1e9, total_training_steps=4),
            checkpoint_config=CheckpointConfig(),
        )
    )  # fmt: skip
    worker.reset()
    worker.set_loss_fn(partial(sft_loss, config=None))
    return worker


def everywhere(rows: Any) -> list[float]:
    """Values of the rows of all ranks, one after the other."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows)
    return [value for own in everyone for value in own]


def work(backend: str) -> Figures:
    import torch
    import torch.distributed as dist
    from verl.utils import tensordict_utils

    warnings.simplefilter("ignore")
    if backend == "one process":
        return one_process()
    rank, _ = join("gloo")
    cpu_platform()
    if rank == 0:
        model().save_pretrained("experts")
    dist.barrier()
    found: Figures = {}
    for mode in ("R2", "R3"):
        worker = engine_of(mode)
        given = torch.nested.as_nested_tensor(rows(rank)[1], layout=torch.jagged)
        output = worker.infer_batch(batch(rank, given if mode == "R3" else None))
        rows_of_output = tensordict_utils.get(output, "log_probs")
        log_probs = [row[:-1].tolist() for row in rows_of_output.unbind()]
        found[f"{mode} log-probabilities"] = everywhere([value for row in log_probs for value in row])
        if mode == "R2":
            given = tensordict_utils.get(output, "routed_experts")
            assert given.values().dtype == torch.int16
            found["R2 experts"] = everywhere(given.values().sort(-1).values.flatten().tolist())
        output = worker.train_batch(batch(rank, given))
        found[f"{mode} gradient"] = [float(tensordict_utils.get(output, "metrics")["grad_norm"])]
    refused("router_replay.mode=R3 with a batch without routed_experts", lambda: worker.infer_batch(batch(rank)))
    leave("gloo")
    return found


if __name__ == "__main__":
    main(work, against="one process", packages=["torch", "verl", "transformers"])
