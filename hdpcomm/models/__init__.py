"""Models that run on packed, sharded sequences: a reference Llama, and the models of others."""

from hdpcomm.models.adapt import AdaptedModule, adapt, from_pretrained
from hdpcomm.models.causal_lm import AdaptedCausalLM, Llama, LlamaConfig, apply_rope, rope_tables
from hdpcomm.models.compiled import compile_layers, use_float8
from hdpcomm.models.media import items_of
from hdpcomm.models.moe import RouterLosses, balance_routers
from hdpcomm.models.mtp import add_mtp
from hdpcomm.models.recompute import set_recompute
from hdpcomm.models.weights import FolderWeights, NewWeights, Weights

__all__ = [
    "AdaptedCausalLM",
    "AdaptedModule",
    "FolderWeights",
    "Llama",
    "LlamaConfig",
    "NewWeights",
    "RouterLosses",
    "Weights",
    "adapt",
    "add_mtp",
    "apply_rope",
    "balance_routers",
    "compile_layers",
    "from_pretrained",
    "items_of",
    "rope_tables",
    "set_recompute",
    "use_float8",
]
