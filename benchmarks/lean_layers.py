"""Operators of one layer, and the bytes that they read, write and keep: models of transformers beside the built-in one.

    python benchmarks/lean_layers.py
    python benchmarks/lean_layers.py --tokens 4096 --json FILE

Forward and backward in bfloat16 of a layer of 7B size, by the difference between models of two layers and of one, on
the meta device: nothing is computed. ``plain``: after ``adapt(lean=False)``; ``lean``: after ``adapt()``. Views and
allocations are not counted, matrix products and attention are; torch's fused norm and grouped products count as the
one kernel that each is on Hopper. The built-in layer has the sizes of Llama, and experts beside Mixtral.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hdpcomm as hdp
from hdpcomm.models import Llama, LlamaConfig, adapt, lean, moe

SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Qwen3": ("Qwen3Config", {"head_dim": 128}),
    "Gemma 3": ("Gemma3TextConfig", {"head_dim": 128}),
    "gpt-oss": ("GptOssConfig", {"head_dim": 128, **EXPERTS}),
    "Mixtral": ("MixtralConfig", EXPERTS),
}

_FUSED = ("_fused_rms_norm",)
"""Operators that are one kernel on CUDA and several operators elsewhere."""
_NO_KERNELS = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "_unsafe_view", "lift_fresh", "prims::promote_types", "promote_types"),
)
"""Allocations and views besides those that tell so."""


class _CountsFused(TorchFunctionMode):
    """Counts an operator of ``_FUSED`` in place of its parts."""

    def __init__(self, counts: OpCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        counts, kwargs = self._counts, kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _FUSED:
            return func(*args, **kwargs)
        counts.paused = True
        try:
            result = func(*args, **kwargs)
        finally:
            counts.paused = False
        counts.count(getattr(func, "default", func), name, args, kwargs, result)
        return result


class OpCounts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that this thread calls, on any device, ``meta`` included; those of a backward pass, too.

    Views and allocations launch nothing and are not counted. An operand is read once, and an expanded one as often as
    it has values of its own.

    Args:
        parameters: their memory is not counted among what is kept.

    Attributes:
        launches: by the operator's name.
        read, written: bytes, by the operator's name.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.paused = False
        self._fused = _CountsFused(self)
        self._kept: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._uncounted = {p.untyped_storage()._cdata for p in parameters}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    @property
    def kept_bytes(self) -> int:
        """Memory of the tensors that the graph keeps at the moment."""
        alive = (storage() for storage in self._kept.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._uncounted:
            self._kept[storage._cdata] = weakref.ref(storage)
        return x

    def __enter__(self) -> OpCounts:
        self._hooks.__enter__()
        self._fused.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._fused.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(kind, error, trace)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not self.paused and not func.is_view and name not in _NO_KERNELS:
            self.count(func, name, args, kwargs or {}, result)
        return result

    def count(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Adds one call of an operator."""
        self.launches[name] += 1
        storages = set()
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                if written:
                    self.written[name] += _bytes(tensor)
                    storages.add(tensor.untyped_storage()._cdata)
                if not (written and argument.is_out):
                    self.read[name] += _bytes(tensor)
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in storages:
                self.written[name] += _bytes(tensor)


def _bytes(tensor: Tensor) -> int:
    values = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        values *= size if stride else min(size, 1)
    return values * tensor.element_size()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def built_in(layers: int, experts: int) -> nn.Module:
    """The built-in model without memory."""
    config = LlamaConfig(
        vocabulary=64, layers=layers, hidden=SIZES["hidden_size"], heads=SIZES["num_attention_heads"],
        kv_heads=SIZES["num_key_value_heads"], ffn=SIZES["intermediate_size"], experts=experts, router_aux_loss=0.0,
    )  # fmt: skip
    return Llama(config, device="meta", dtype=torch.bfloat16)


def of_transformers(name: str, layers: int, *, lean: bool) -> nn.Module:
    """A model of transformers without memory, adapted."""
    kind, options = MODELS[name]
    config = getattr(transformers, kind)(vocab_size=64, num_hidden_layers=layers, pad_token_id=0, **SIZES, **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return adapt(model.train(), check=False, lean=lean)


def counted(model: nn.Module, tokens: int) -> dict[str, int]:
    """Launches and bytes of a forward and a backward pass."""
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    x, places = (torch.empty(tokens, dtype=torch.int64, device="meta") for _ in range(2))
    with OpCounts(model.parameters()) as counts:
        loss = model(x, positions=places, cu_seqlens=cu_seqlens, comm=None, labels=x)
        kept = counts.kept_bytes
        loss.backward()
    return {
        "launches": counts.launches.total(),
        "read_bytes": counts.read.total(),
        "written_bytes": counts.written.total(),
        "kept_bytes": kept,
    }


def of_a_layer(one: nn.Module, two: nn.Module, tokens: int) -> dict[str, int]:
    """Counts of one layer of two models, of which the second has one more."""
    first, second = counted(one, tokens), counted(two, tokens)
    return {name: second[name] - first[name] for name in second}


def rows(tokens: int) -> list[dict[str, Any]]:
    """The counts of all layers."""
    table = []
    for name, experts in (("built-in", 0), ("built-in, experts", EXPERTS["num_local_experts"])):
        counts = of_a_layer(built_in(1, experts), built_in(2, experts), tokens)
        table.append({"model": name, "form": "lean", **counts})
    for name in MODELS:
        for is_lean in (False, True):
            one, two = (of_transformers(name, layers, lean=is_lean) for layers in (1, 2))
            table.append({"model": name, "form": "lean" if is_lean else "plain", **of_a_layer(one, two, tokens)})
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    fused = patch.object(lean, "_has_fused_norm", lambda x: x.is_meta)
    grouped = patch.object(moe, "_multiplies_groups", lambda device: device.type == "meta")
    with fused, grouped:
        table = rows(args.tokens)
    print(f"{'model':>18} {'form':>6} {'launches':>9} {'read MB':>9} {'written MB':>11} {'kept MB':>9}")
    for row in table:
        megabytes = [row[f"{name}_bytes"] / 1e6 for name in ("read", "written", "kept")]
        print(
            f"{row['model']:>18} {row['form']:>6} {row['launches']:>9} {megabytes[0]:>9,.0f} {megabytes[1]:>11,.0f} "
            f"{megabytes[2]:>9,.0f}"
        )
    if args.json is not None:
        setting = {"tokens": args.tokens, "dtype": "bfloat16", "sizes": SIZES, "experts": EXPERTS}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "hdpcomm": hdp.__version__,
                    "date": time.strftime("%Y-%m-%d")}  # fmt: skip
        args.json.write_text(json.dumps({"setting": setting, "versions": versions, "rows": table}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
