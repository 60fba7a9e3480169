"""Are all decoder families of the installed transformers exact here, or refused with the right reason?

    python tools/model_families.py                      # all families, on the terminal
    python tools/model_families.py --only llama mamba2  # these
    python tools/model_families.py --markdown docs/model-families.md

Every configuration class that transformers lists for a causal LM is made small by the names of its settings, with each
window and chunk much shorter than the sequences. The model is then trained by ``adapt`` on 1 to 3
ranks (threads), in float32 and bfloat16, and its loss and gradients are compared with those of the model as it came, on
one process and sequence by sequence. bfloat16 is compared with float32 on the same weights, beside the error that the
model as it came has there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import json
import logging
import multiprocessing
import os
import re
import sys
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LENGTHS = (29, 1, 50, 12, 3)
WINDOW = 8
"""Size of windows and chunks: far shorter than the longest sequences."""
LAYERS = 8
"""Most layers of a model; as few as show each kind of layer once."""
EXACT = 1e-4
"""Largest relative difference of loss or gradients in float32 that counts as exact."""
LOW = 2.0
"""Largest error in bfloat16, in multiples of that of the model as it came. A router that takes another expert makes a
jump, in either of the two, so the least of a few draws of weights counts."""
DRAWS = (2, 5, 6, 7)
DTYPES, RANKS = ("float32", "bfloat16"), (1, 2, 3)
SECONDS = 180.0


# Small configurations ------------------------------------------------------------------------------------------------

_SMALL = (  # (pattern of a setting's name, its small value); the first that matches
    (r"^(vocab_size|vocab_size_per_layer_input|text_vocab_size|audio_vocab_size)$", 97),
    (r"(dropout|_pdrop|layerdrop|jitter_noise|z_loss\w*|drop_path\w*)(_prob|_rate)?$", 0.0),
    (r"^(pad|bos|eos|decoder_start|sep|cls|mask)_token_id$", None),
    (r"(sliding_window|window_size|attention_window\w*|local_attention)$", WINDOW),
    (r"(chunk_size|block_size|floor_scale|chunk_len\w*)$", WINDOW),
    (r"^(num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers)$", "layers"),
    (r"(_offset|max_window_layers)$", 1),
    (r"(period|interval|every_n_layers?|_step|frequency)$", 2),
    (r"^(mamba_n_heads|n_mamba_heads|mamba_d_head|mamba_headdim|mamba_head_dim|mamba_num_heads|rotary_dim)$", 8),
    (r"^(num_key_value_heads|multi_query_group_num|num_kv_heads|n_groups|mamba_n_groups|linear_num_key_heads)$", 2),
    (r"index_n_heads$", 32),  # scores of exactly 0 are rare then; torch.topk takes any of them
    (r"(num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|linear_num_value_heads)$", 4),
    (r"^(hidden_size|n_embd|d_model|dim|emb_dim|embedding_size|lru_width)$", 32),
    (r"^attention_hidden_size$", 64),
    (r"^(qk_head_dim|attention_head_dim)$", 16),  # both parts of a latent query; a head of attention_hidden_size
    (r"(head_dim|head_size|d_kv|d_head|key_head_dim|value_head_dim)$", 8),
    (r"(num_experts_per_tok|top_?k\w*|moe_k|num_experts_per_token)$", 2),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)$", 4),
    (r"^(n_group|topk_group|n_shared_experts)$", 1),
    (r"(intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden_size|intermediate_dim)$", 48),
    (r"(state_size|ssm_state_size|d_state)$", 8),
    (r"(conv_kernel|d_conv|conv_kernel_size|conv_l_cache)$", 4),
    (r"(lora_rank|lora_dim|q_rank|kv_rank|_rank)$", 12),
    (r"^(max_position_embeddings|n_positions|max_seq_len\w*|seq_length)$", 256),
)  # fmt: skip


_ABSENT = (  # the same where the setting is None
    (r"sliding_window$", WINDOW),
    (r"^head_dim$", 8),
    (r"^n_routed_experts$", 4),
    (r"^num_experts_per_tok$", 2),
    (r"^(n_shared_experts|n_group|topk_group)$", 1),
)
_SAME_HEADS = {"num_key_value_heads": 4}
"""Some families have as many heads of keys as of queries, as those with multi-head latent attention."""
_KEPT = ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype")


def small_value(name: str, value: Any, layers: int) -> Any:
    """The small value of a setting, or the value that it has."""
    if name == "use_sliding_window":
        return True
    if name == "attention_types":  # [[kinds, repeated], ...]
        return [[value[0][0], layers // len(value[0][0])]]
    if re.search(r"(idxs|indices|layer_ids)$", name) and value:
        return [place for place in value if place < layers] or [1]
    for pattern, small in _ABSENT if value in (None, 0) and not isinstance(value, bool) else ():
        if re.search(pattern, name):
            return small
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    for pattern, chosen in _SMALL:
        if re.search(pattern, name):
            if chosen == "layers":
                return min(layers, int(value))
            if chosen is None:
                return value if 0 <= value < 97 else 1
            return chosen if isinstance(chosen, float) else min(chosen, value) if value > 0 else value
    return value


def small_configs(config_class: Any) -> Iterator[Any]:
    """Small configurations of a class by the names of its settings, those that show most of the family first."""
    given = config_class().to_dict()
    depth = given.get("num_hidden_layers")
    named = [name for name, value in given.items() if isinstance(value, list) and len(value) == depth]
    of_layers = [name for name in named if all(isinstance(kind, str) for kind in given[name])]
    kinds = given[of_layers[0]] if of_layers else []
    layers = max(2, min(LAYERS, 1 + max((kinds.index(kind) for kind in set(kinds)), default=1)))
    changed = {name: small_value(name, value, layers) for name, value in given.items() if name not in _KEPT}
    changed |= {name: given[name][:layers] for name in named}
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if isinstance(given.get(name), dict) and hasattr(part, "to_dict"):
            with contextlib.suppress(Exception):
                changed[name] = next(small_configs(part)).to_dict()
    if "is_decoder" in given:
        changed["is_decoder"] = True
    if "expand" in given:  # state-space layers are as wide as their heads
        changed["num_heads"] = 8
    changed = {name: value for name, value in changed.items() if value != given.get(name)}
    own_kinds = {name: value for name, value in changed.items() if name not in of_layers}
    no_windows = {name: given[name] for name in changed if re.search(r"sliding_window$", name) and not given[name]}
    made: list[Any] = []
    problem: Exception | None = None
    for base, heads, windows in itertools.product((own_kinds, changed), ({}, _SAME_HEADS), ({}, no_windows)):
        try:
            made.append(config_class(**{**base, **heads, **windows}))
        except Exception as error:
            problem = problem or error
    if not made and problem is not None:
        raise problem
    yield from sorted(made, key=lambda config: -len(set(getattr(config, "layer_types", None) or ())))


# One family ----------------------------------------------------------------------------------------------------------


def sequences() -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (length,), generator=generator) for length in LENGTHS]


def new_model(config: Any, dtype: str, draw: int = DRAWS[0]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_((parameter + noise).to(torch.bfloat16))  # the same weights in both types
    return model.to(getattr(torch, dtype)).eval()


Found = tuple[float, dict[str, Any]]


def as_it_came(config: Any, dtype: str, draw: int = DRAWS[0]) -> Found:
    """Sum of the losses and its gradients by the model itself, a sequence at a time."""
    model = new_model(config, dtype, draw)
    loss = 0.0
    for tokens in sequences():
        if len(tokens) > 1:
            own = model(input_ids=tokens[None], labels=tokens[None], use_cache=False).loss * (len(tokens) - 1)
            own.backward()
            loss += own.item()
    return loss, {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def by_adapt(config: Any, dtype: str, ranks: int, draw: int = DRAWS[0]) -> Found:
    """Loss and gradients as :func:`adapt` gives them on several ranks."""
    import torch

    import hdpcomm as hdp
    from hdpcomm.attention import positions, shard
    from hdpcomm.models import adapt
    from hdpcomm.testing import run_threads

    ids, cu = torch.cat(sequences()), torch.tensor([0, *itertools.accumulate(LENGTHS)])
    labels = torch.cat([torch.nn.functional.pad(each[1:], (0, 1), value=-100) for each in sequences()])
    models = [new_model(config, dtype, draw) for _ in range(ranks)]
    adapted = [adapt(model) for model in models]

    def main() -> float:
        comm = hdp.init()
        where: dict[str, Any] = {"rank": comm.rank, "size": comm.size}
        loss = adapted[comm.rank](
            shard(ids, cu, **where), positions=positions(cu, **where), cu_seqlens=cu, comm=comm,
            labels=shard(labels, cu, **where),
        )  # fmt: skip
        loss.backward()
        return float(loss.item())

    loss = sum(run_threads(main, ranks, timeout=60))
    total: dict[str, Any] = {}
    for model in models:
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] = total.get(name, 0) + p.grad.double()
    return loss, total


def difference(found: Found, wanted: Found) -> float:
    """The larger of the relative differences of loss and of all gradients."""
    import torch

    zero = torch.zeros((), dtype=torch.float64)
    names = {*found[1], *wanted[1]}
    apart = sum(float((found[1].get(n, zero) - wanted[1].get(n, zero)).square().sum()) for n in names) ** 0.5
    norm = sum(float(x.square().sum()) for x in wanted[1].values()) ** 0.5
    error = max(abs(found[0] - wanted[0]) / max(abs(wanted[0]), 1e-30), apart / max(norm, 1e-30))
    return error if error == error else float("inf")


def reason_of(error: BaseException) -> str:
    while error.__cause__ is not None and type(error).__name__ == "PeerLost":
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def first_that_runs(configs: list[Any]) -> tuple[Any, Found]:
    """The first configuration whose model runs as it comes, and what it gives; raises what the first one raised."""
    problem: Exception | None = None
    for config in configs:
        try:
            return config, as_it_came(config, "float32")
        except Exception as error:
            problem = problem or error
    assert problem is not None
    raise problem


def examine(family: str) -> dict[str, Any]:
    """The error on each number of ranks and in each type, or the reason of a refusal."""
    import torch
    from transformers import CONFIG_MAPPING

    torch.set_num_threads(1)
    try:
        configs = list(small_configs(CONFIG_MAPPING[family]))
        if getattr(configs[0], "is_encoder_decoder", False):
            return {"skipped": "encoder and decoder"}
        config, wanted = first_that_runs(configs)
    except Exception as error:
        return {"skipped": f"not made small: {reason_of(error)}"}
    text = config.get_text_config()
    result: dict[str, Any] = {
        "kinds": sorted(set(getattr(text, "layer_types", None) or ())),
        "windows": sorted(
            name for name, value in text.to_dict().items() if value == WINDOW and re.search("window|chunk|block", name)
        ),
    }
    for dtype, ranks in itertools.product(DTYPES, RANKS):
        key = f"{dtype} {ranks}"
        if ranks > 1 and isinstance(result.get(f"{dtype} 1"), str):
            continue  # refused
        try:
            if dtype == "float32":
                result[key] = difference(by_adapt(config, dtype, ranks), wanted)
            else:
                result[key] = low_ratio(config, ranks)
        except Exception as error:
            result[key] = reason_of(error)
    return result


def low_ratio(config: Any, ranks: int) -> float:
    """The error in bfloat16 by that of the model as it came, both beside float32."""
    least = float("inf")
    for draw in DRAWS:
        wanted = as_it_came(config, "float32", draw)
        own = difference(as_it_came(config, "bfloat16", draw), wanted)
        least = min(least, difference(by_adapt(config, "bfloat16", ranks, draw), wanted) / max(own, 1e-12))
        if least <= LOW:
            break
    return least


# All families --------------------------------------------------------------------------------------------------------


def worker(jobs: Connection) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        family = jobs.recv()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            answer = examine(family)
        jobs.send(answer)


class Worker:
    """A process that examines one family after the other; one that takes too long or dies is replaced."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.ours, theirs = context.Pipe()
        self.process = context.Process(target=worker, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def examine(self, family: str) -> dict[str, Any]:
        try:
            self.ours.send(family)
            if self.ours.poll(SECONDS):
                answer: dict[str, Any] = self.ours.recv()
                return answer
            problem = f"no answer within {SECONDS:.0f} s"
        except (EOFError, OSError):
            problem = "its process died"
        self.process.kill()
        self.process.join()
        self.start()
        return {"failed": problem}


def examined(families: list[str], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    workers = [Worker() for _ in range(jobs)]
    free = list(workers)

    def one(family: str) -> tuple[str, dict[str, Any]]:
        mine = free.pop()
        try:
            return family, mine.examine(family)
        finally:
            free.append(mine)

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(one, families)
    for each in workers:
        each.process.kill()


def verdict(result: dict[str, Any]) -> str:
    """ "exact", or the reason of the refusal, or what is wrong."""
    if "skipped" in result or "failed" in result:
        return str(result.get("skipped") or result.get("failed"))
    found = {key: value for key, value in result.items() if key.partition(" ")[0] in ("float32", "bfloat16")}
    reasons = [value for value in found.values() if isinstance(value, str)]
    wide = max((v for k, v in found.items() if k.startswith("float32") and isinstance(v, float)), default=0.0)
    low = max((v for k, v in found.items() if k.startswith("bfloat16") and isinstance(v, float)), default=0.0)
    if wide > EXACT or low > LOW:
        return f"WRONG: {wide:.1e} in float32, {low:.1f} times the own error in bfloat16"
    if reasons and not reasons[0].startswith("InvalidUsage"):
        return f"WRONG: {reasons[0]}"
    if reasons and len(reasons) < len(found):
        return f"refused in part: {reasons[0].removeprefix('InvalidUsage: ')}"
    return f"refused: {reasons[0].removeprefix('InvalidUsage: ')}" if reasons else "exact"


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The page: families that are exact, by layers; those that are refused or were not tried, by reasons."""
    import torch
    import transformers

    built = {name: result for name, result in results.items() if "skipped" not in result and "failed" not in result}
    verdicts = {name: verdict(result) for name, result in built.items()}
    right = [name for name, text in verdicts.items() if text == "exact"]
    about = (
        f"`python tools/model_families.py --markdown docs/model-families.md`, transformers {transformers.__version__}, "
        f"torch {torch.__version__.partition('+')[0]} on CPU, {datetime.now(timezone.utc):%Y-%m-%d}. Every family that "
        "transformers lists for causal LMs, made small from its configuration class, is trained by `adapt` on 1, "
        f"2 and 3 ranks: sequences of {', '.join(map(str, LENGTHS))} tokens, windows and chunks of "
        f"{WINDOW}. *Exact*: loss and gradients differ from the unsharded model's by at most {EXACT:.0e} in float32, "
        f"and in bfloat16 by at most {LOW:.0f} times the difference of that model between bfloat16 and float32.",
        f"{len(right)} of {len(results)} families are exact, {len(built) - len(right)} are refused, "
        f"{len(results) - len(built)} were not tried.",
    )
    lines = ["# Model families"]
    for paragraph in about:
        lines += ["", *textwrap.wrap(paragraph, 120)]
    exact: dict[str, list[str]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    skipped: dict[str, list[str]] = defaultdict(list)
    for name, result in results.items():
        if name in right:
            exact[", ".join(each.removesuffix("_attention") for each in result["kinds"]) or "full"].append(name)
        elif name in built:
            refused[short_reason(verdicts[name])].append(name)
        else:
            skipped[verdict(result).partition(":")[0]].append(name)
    for title, groups in (("Exact, by layers", exact), ("Refused", refused), ("Not tried", skipped)):
        lines += ["", f"## {title}", ""]
        for reason, names in groups.items():
            lines += textwrap.wrap(
                f"- {reason}: {', '.join(names)}",
                120,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines) + "\n"


def short_reason(text: str) -> str:
    """The first clause of a refusal, without class names, figures and lists of arguments."""
    if text.startswith("WRONG"):
        return text
    text = re.sub(r"\b\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel)\b", "it", text)
    text = re.sub(r" \([^)]*\)", "", text.removeprefix("refused: "))
    return re.split(r"; |, so its|: (?!it gives)", text)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FAMILY")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    options = parser.parse_args()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    results = {}
    for family, result in examined(options.only or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), options.jobs):
        results[family] = result
        print(f"{family:24} {verdict(result)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.markdown:
        options.markdown.write_text(markdown(results))
    return int(any(verdict(result).startswith("WRONG") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
