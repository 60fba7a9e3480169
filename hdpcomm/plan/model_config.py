"""A model as planners read it from files: its shape and its mix of layers, from a configuration of Hugging Face, for
which transformers is not needed; and its measured costs on a cluster (:class:`Calibration`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text, write_whole
from hdpcomm.plan.cost import CostModel, CostSample
from hdpcomm.plan.memory import MemoryModel
from hdpcomm.plan.specs import ClusterSpec, ModelSpec, cluster_from_dict, cluster_to_dict
from hdpcomm.plan.token_mixing import (
    TokenMixing,
    delta_mixing,
    indexed_mixing,
    latent_mixing,
    softmax_mixing,
    ssd_mixing,
)

__all__ = ["ARCHITECTURES", "Calibration", "load_model", "model_from_config"]

_MOST_LAYERS = 100_000  # each has an entry in a list


class _Config:
    """The entries of a configuration; a missing or wrong one is an error that names it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of ``names`` that has a value: a positive number."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidUsage(f"{name} is {value!r}, expected a positive number")
            return value
        if default is None:
            raise InvalidUsage(f"{' or '.join(names)} is missing")
        return default

    def optional(self, *names: str) -> int | None:
        """:meth:`size`, or None where no name has a value other than 0."""
        return self.size(*names) if any(self.values.get(name) for name in names) else None

    @property
    def layers(self) -> int:
        layers = self.size("num_hidden_layers", "n_layer")
        if layers > _MOST_LAYERS:
            raise InvalidUsage(f"num_hidden_layers is {layers}, expected at most {_MOST_LAYERS}")
        return layers

    def layer_types(self, default: Callable[[int], str]) -> list[str]:
        """For each layer its type, by default that of its index."""
        given = self.values.get("layer_types")
        if given is None:
            return [default(i) for i in range(self.layers)]
        if not isinstance(given, list) or len(given) != self.layers:
            raise InvalidUsage(f"layer_types is {given!r}, expected a list of {self.layers} names")
        return given


_FULL, _WINDOW, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_CHUNKED = "chunked_attention"


def _every(interval: int) -> Callable[[int], str]:
    """Full attention in every so manieth layer, windows in the others."""
    return lambda i: _WINDOW if (i + 1) % interval else _FULL


def _window_types(config: _Config, model_type: str) -> list[str]:
    """Where the windows of a softmax model are, for configurations that do not list their layers' types."""
    pattern = config.optional("sliding_window_pattern", "_sliding_window_pattern")
    if model_type in ("gemma2", "gpt_oss"):
        return config.layer_types(_every(2))
    if model_type in ("gemma3_text", "cohere2", "olmo3"):
        return config.layer_types(_every(pattern or (6 if model_type == "gemma3_text" else 4)))
    if "use_sliding_window" in config.values:
        first = config.optional("max_window_layers") or 0
        used = bool(config.values["use_sliding_window"])
        return config.layer_types(lambda i: _WINDOW if used and i >= first else _FULL)
    return config.layer_types(lambda _: _WINDOW if config.values.get("sliding_window") else _FULL)


def _softmax(config: _Config, window: int | None, *, gated: bool = False) -> TokenMixing:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=heads)
    head_dim = config.size("head_dim", default=hidden // heads)
    return softmax_mixing(hidden, heads, kv_heads, head_dim, window=window, gated=gated)


def _latent(config: _Config) -> TokenMixing:
    return latent_mixing(
        config.size("hidden_size"), config.size("num_attention_heads"), q_rank=config.optional("q_lora_rank"),
        kv_rank=config.size("kv_lora_rank"), nope_dim=config.size("qk_nope_head_dim"),
        rope_dim=config.size("qk_rope_head_dim"), v_dim=config.size("v_head_dim"),
    )  # fmt: skip


def _indexed(config: _Config) -> TokenMixing:
    width = config.size("qk_nope_head_dim") + config.size("qk_rope_head_dim") + config.size("v_head_dim")
    return indexed_mixing(
        config.size("hidden_size"), _latent(config), heads=config.size("index_n_heads"),
        dim=config.size("index_head_dim"), q_rank=config.size("q_lora_rank"),
        width=config.size("num_attention_heads") * width, kv_rank=config.size("kv_lora_rank"),
        top_k=config.size("index_topk"),
    )  # fmt: skip


def _gated_delta(config: _Config) -> TokenMixing:
    hidden, heads = config.size("hidden_size"), config.size("linear_num_value_heads")
    value_dim = config.size("linear_value_head_dim")
    return delta_mixing(
        hidden, key_heads=config.size("linear_num_key_heads"), key_dim=config.size("linear_key_head_dim"), heads=heads,
        value_dim=value_dim, gates=hidden * (2 * heads + heads * value_dim),
    )  # fmt: skip


def _kda(config: _Config) -> TokenMixing:
    nested = config.values.get("linear_attn_config")
    linear = config if nested is None else _Config(nested)
    hidden = config.size("hidden_size")
    heads, dim = linear.size("linear_num_heads", "num_heads"), linear.size("linear_head_dim", "head_dim")
    low_rank = 2 * dim * (hidden + heads * dim)  # of the decay, and of the output's gate
    return delta_mixing(
        hidden, key_heads=heads, key_dim=dim, heads=heads, value_dim=dim, gates=low_rank + hidden * heads
    )


def _mamba2(config: _Config) -> TokenMixing:
    hidden, heads = config.size("hidden_size"), config.size("num_heads")
    return ssd_mixing(
        hidden, inner=heads * config.size("head_dim"), heads=heads, groups=config.size("n_groups"),
        state_dim=config.size("state_size"),
    )  # fmt: skip


def _of_softmax(config: _Config, model_type: str) -> list[TokenMixing]:
    types = _window_types(config, model_type)
    return _of_types(
        types,
        {_FULL: lambda: _softmax(config, None), _WINDOW: lambda: _softmax(config, config.size("sliding_window"))},
    )


def _of_chunked(config: _Config, _: str) -> list[TokenMixing]:
    """A token sees half of a chunk in the mean: the work of a window of that length."""
    chunk, interval = config.optional("attention_chunk_size"), config.size("no_rope_layer_interval", default=4)
    types = config.layer_types(lambda i: _CHUNKED if chunk and (i + 1) % interval else _FULL)
    half = max(1, (chunk or 0) // 2)
    return _of_types(types, {_FULL: lambda: _softmax(config, None), _CHUNKED: lambda: _softmax(config, half)})


def _of_indexed(config: _Config, _: str) -> list[TokenMixing]:
    """Layers without an indexer of their own take the choice of the one before."""
    types = config.values.get("indexer_types")
    own = [config.values.get("index_topk") is not None] * config.layers if types is None else types
    if not isinstance(own, list) or len(own) != config.layers:
        raise InvalidUsage(f"indexer_types is {types!r}, expected a list of {config.layers} names")
    whole = _indexed(config)
    shared = replace(whole, weights=_latent(config).weights, index_flops=0.0)
    return [whole if each in (True, "full") else shared for each in own]


def _of_gated_delta(config: _Config, _: str) -> list[TokenMixing]:
    interval = config.size("full_attention_interval", default=4)
    types = config.layer_types(lambda i: _LINEAR if (i + 1) % interval else _FULL)
    return _of_types(types, {_FULL: lambda: _softmax(config, None, gated=True), _LINEAR: lambda: _gated_delta(config)})


def _of_kimi_linear(config: _Config, _: str) -> list[TokenMixing]:
    nested = config.values.get("linear_attn_config") or {}
    full = set(nested.get("full_attn_layers", ()))  # counted from 1
    types = config.layer_types(lambda i: _FULL if i + 1 in full else _LINEAR)
    return _of_types(types, {_FULL: lambda: _latent(config), _LINEAR: lambda: _kda(config)})


def _of_types(types: list[str], known: Mapping[str, Callable[[], TokenMixing]]) -> list[TokenMixing]:
    """Token mixing of each layer, by its type."""
    for layer_type in types:
        if layer_type not in known:
            raise InvalidUsage(f"a layer is of the type {layer_type!r}, expected one of {', '.join(known)}")
    made = {layer_type: known[layer_type]() for layer_type in set(types)}
    return [made[layer_type] for layer_type in types]


_SOFTMAX = (
    "cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe",
    "llama", "minimax_m2", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3",
)  # fmt: skip
ARCHITECTURES: dict[str, Callable[[_Config, str], list[TokenMixing]]] = {
    **dict.fromkeys(_SOFTMAX, _of_softmax),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"), lambda config, _: [_latent(config)] * config.layers
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _of_indexed),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _of_gated_delta),
    "kimi_linear": _of_kimi_linear,
    "llama4_text": _of_chunked,
    "mamba2": lambda config, _: [_mamba2(config)] * config.layers,
}
"""By ``model_type``: what mixes tokens in each layer."""


def _mlp(config: _Config) -> dict[str, int]:
    """The arguments of :class:`ModelSpec` for the MLPs."""
    values = config.values
    experts = config.optional("n_routed_experts", "num_local_experts", "num_experts")
    if experts is None:
        return {"ffn": config.size("intermediate_size")}
    ffn = config.size("moe_intermediate_size", "intermediate_size")
    shared = config.optional("shared_expert_intermediate_size", "shared_intermediate_size")
    if shared is None:
        shared = ffn * (config.optional("n_shared_experts", "num_shared_experts") or 0)
    kinds, with_experts = values.get("mlp_layer_types"), values.get("moe_layers")
    dense_ffn = config.optional("intermediate_size_mlp", "intermediate_size") or 0
    if isinstance(with_experts, list):  # Llama 4, whose experts have a shared one of their size
        dense, shared = config.layers - len(with_experts), ffn
    elif isinstance(kinds, list):
        dense = kinds.count("dense")
    else:
        dense = config.optional("first_k_dense_replace") or len(values.get("mlp_only_layers") or ())
    return {
        "ffn": ffn, "experts": experts, "top_k": config.size("num_experts_per_tok", "num_experts_per_token"),
        "shared_ffn": shared, "dense_layers": dense,
        "dense_ffn": dense_ffn if dense else 0,
    }  # fmt: skip


def model_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The shape of a causal LM from the entries of its ``config.json``, or of that of its text model.

    Raises:
        InvalidUsage: an architecture (``model_type``) that is not in :data:`ARCHITECTURES`, with those that are; an
            entry that is missing or wrong.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise InvalidUsage(
            f"the model_type {model_type!r} is unknown to the planner; known are {', '.join(sorted(ARCHITECTURES))}. "
            "Give a preset, or a --calibration of the model"
        )
    read = _Config(config)
    try:
        layers = ARCHITECTURES[model_type](read, model_type)
        heads = read.size("num_attention_heads", "num_heads")
        return ModelSpec(
            layers=read.layers,
            hidden=read.size("hidden_size"),
            heads=heads,
            kv_heads=heads if model_type == "mamba2" else read.size("num_key_value_heads", default=heads),
            vocab=read.size("vocab_size"),
            head_dim=read.optional("head_dim"),
            name=model_type,
            mixing=tuple(each.over(len(list(run))) for each, run in groupby(layers)),
            **({"ffn": 0} if model_type == "mamba2" else _mlp(read)),
        )
    except InvalidUsage as error:
        raise InvalidUsage(f"a configuration of {model_type}: {error}") from error


def load_model(path: str | Path) -> ModelSpec:
    """:func:`model_from_config` of a ``config.json``, or of the one in a folder. Raises InvalidUsage."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        values = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidUsage(f"cannot read the model {file}: {error}") from error
    if not isinstance(values, dict):
        raise InvalidUsage(f"{file} holds a {type(values).__name__}; expected a configuration of Hugging Face")
    try:
        return model_from_config(values)
    except InvalidUsage as error:
        raise InvalidUsage(f"{file}: {error}") from error


_SCHEMA = "hdpcomm-calibration-1"


@dataclass(frozen=True, slots=True)
class Calibration:
    """A model on a cluster, measured by ``hdpcomm calibrate``; ``plan``, ``simulate`` and ``train`` take its file.

    Attributes:
        cost_model: of a micro-batch, fitted to ``samples``.
        cluster: the ranks as they were, and a device whose rates are those measured. Links and memory bandwidth are
            what makes the reduction of the gradients and the optimizer take as long as they did.
        memory: what a rank holds; its capacity is that of the cluster.
        model: ``None`` for one that is no plain decoder.
        facts: what was measured: ``model`` (its sizes), ``parameters``, ``dtype``, ``recompute``, ``longest`` (tokens
            of a rank), ``transport``, ``hosts``, ``date``, versions. A run with another model is refused.
        reduction_s, optimizer_s: seconds of a step's reduction of gradients, and of the optimizer.
        samples: micro-batches as measured, means over the ranks.
    """

    cost_model: CostModel
    cluster: ClusterSpec
    memory: MemoryModel
    model: ModelSpec | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    reduction_s: float = 0.0
    optimizer_s: float = 0.0
    samples: tuple[CostSample, ...] = ()

    def errors(self) -> list[float]:
        """Relative error of the cost model's prediction for each sample."""
        return [
            self.cost_model.seconds(
                sample.lengths, sample.ranks, one_node=sample.one_node, one_domain=sample.one_domain
            )
            / sample.seconds
            - 1
            for sample in self.samples
        ]

    def with_capacity(self, capacity: int) -> Calibration:
        """This calibration for ranks that hold ``capacity`` tokens without offload."""
        return replace(
            self,
            cluster=replace(self.cluster, capacity=capacity),
            memory=replace(self.memory, capacity=capacity),
        )

    def with_ranks(
        self, ranks: int, ranks_per_node: int | None = None, ranks_per_domain: int | None = None
    ) -> Calibration:
        """This calibration for another number of ranks of this kind, on hosts and in domains of as many ranks as before
        unless these are given; without domains where hosts do not fill them.

        Ranks that shared processors do so in the same proportion. Raises: InvalidUsage for more than one host where
        the links between hosts were not measured.
        """
        cluster = self.cluster
        cores = None if cluster.cores is None else max(1, round(cluster.cores * ranks / cluster.ranks))
        local = ranks_per_node or cluster.node_ranks
        if local < ranks and not (self.cost_model.kv_inter or self.cost_model.latency_inter):
            raise InvalidUsage(
                f"{ranks} ranks on hosts of {local} send between hosts, and the calibration was made on "
                f"{cluster.ranks} ranks of one host: give ranks_per_node={ranks} (--ranks-per-node), or calibrate on "
                "two hosts"
            )
        cores = None if cores is not None and cores >= ranks else cores
        near = ranks_per_domain
        if near is None and cluster.ranks_per_domain is not None and cluster.ranks_per_domain % local == 0:
            near = cluster.ranks_per_domain
        cluster = replace(cluster, ranks=ranks, ranks_per_node=local, ranks_per_domain=near, cores=cores, speeds=None)
        return replace(self, cluster=cluster)

    def save(self, path: Path) -> None:
        """Writes :meth:`to_json`. Raises: OSError."""
        write_whole(path, self.to_json().encode())

    def to_json(self) -> str:
        """One JSON object, in lines."""
        content = {
            "schema": _SCHEMA,
            "facts": self.facts,
            "cost_model": asdict(self.cost_model),
            "cluster": cluster_to_dict(self.cluster),
            "memory": asdict(self.memory),
            "model": None if self.model is None else asdict(self.model),
            "reduction_s": self.reduction_s,
            "optimizer_s": self.optimizer_s,
            "samples": [asdict(sample) for sample in self.samples],
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Reads what :meth:`save` wrote. Raises: InvalidUsage for a file that cannot be read or is none."""
        try:
            content = json.loads(read_text(path))
            if not isinstance(content, dict) or content.get("schema") != _SCHEMA:
                raise ValueError(f"its schema is not {_SCHEMA!r}")
            model = content["model"]
            return cls(
                cost_model=CostModel.from_json(json.dumps(content["cost_model"])),
                cluster=cluster_from_dict(content["cluster"]),
                memory=_memory(content["memory"]),
                model=None if model is None else _model(model),
                facts=dict(content["facts"]),
                reduction_s=float(content["reduction_s"]),
                optimizer_s=float(content["optimizer_s"]),
                samples=tuple(CostSample(**each | {"lengths": tuple(each["lengths"])}) for each in content["samples"]),
            )
        except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise InvalidUsage(
                f"{path} holds no calibration ({type(error).__name__}: {error}); write one with hdpcomm calibrate "
                "--out FILE"
            ) from error


def _model(values: dict[str, Any]) -> ModelSpec:
    mixing = tuple(TokenMixing(**each) for each in values.get("mixing", ()))
    return ModelSpec(**values | {"mixing": mixing})


def _memory(values: dict[str, Any]) -> MemoryModel:
    memory = MemoryModel(**values)
    for name, value in values.items():
        if value is not None and not 0 <= float(value) < float("inf"):
            raise ValueError(f"memory.{name} is {value}")
    return memory
