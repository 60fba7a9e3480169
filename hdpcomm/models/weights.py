"""Where the values of a model's tensors come from, one tensor at a time: :class:`NewWeights`, :class:`FolderWeights`.

A model of 70 billion parameters is 280 GB in fp32, and a rank of a mesh holds a part of it. So models are made on
torch's meta device, where they take no memory, and :func:`hdpcomm.train.materialize` asks for the values of the tensors
that a host holds.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hdpcomm.errors import InvalidUsage
from hdpcomm.files import open_regular, read_text
from hdpcomm.models.causal_lm import AdaptedCausalLM, Llama, initial_value, inner_causal_lm, seed_of
from hdpcomm.models.lora_names import base_name, first_value, is_adapter
from hdpcomm.models.mtp import model_name, tensors_ahead

__all__ = ["FolderWeights", "NewWeights", "Weights", "by_tensor", "making", "own_pages", "weight_files"]

making = threading.Lock()
"""While transformers makes, fills or loads a model it changes its own class, torch's default dtype and the random state
for the whole process. If two threads did so at once, the second would put back what the first had set, and later models
had no tied weights."""

_SMALL = 1 << 16
"""Elements of a tensor that a constructor may fill."""
_UNTOUCHED = -12345.0
"""Value of a tensor before its model's initialisation, to see whether that leaves it out."""


class Weights(Protocol):
    """The values of a whole model's tensors."""

    def whole(self, name: str) -> Tensor:
        """The tensor of that name in the whole model, in host memory; not to be written to. Local."""


class NewWeights:
    """Drawn anew. A tensor follows from the seed and its name alone, so it is the same whoever draws it.

    Args:
        model: the whole model, on any device (``meta`` is enough): a :class:`hdpcomm.models.Llama`, or a causal LM of
            transformers after :func:`hdpcomm.models.adapt`, drawn by its own ``_init_weights``. It may be cut later.
        seed: of the values.

    Attributes:
        model: a Llama as it is; of a model of transformers a copy on the meta device.

    Raises: InvalidUsage for another kind of model.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        if not isinstance(model, (Llama, AdaptedCausalLM)):
            raise InvalidUsage(
                f"weights of a {type(model).__name__} were to be drawn; a hdpcomm.models.Llama, or a causal LM of "
                "transformers after hdpcomm.models.adapt() was expected"
            )
        self._seed = seed
        self.model: Any = model if isinstance(model, Llama) else _on_meta(model.model)
        self._constructed: dict[str, Tensor] | None = None
        self._shapes = {name: p.shape for name, p in model.named_parameters()}

    def whole(self, name: str) -> Tensor:
        if isinstance(self.model, Llama):
            return initial_value(name, self._shapes[name], layers=self.model.config.layers, seed=self._seed)
        if is_adapter(name):
            return first_value(name, self._shapes[name], seed_of(name, self._seed))
        return self._drawn(name.removeprefix(_ADAPTED))

    @torch.no_grad()
    def _drawn(self, name: str) -> Tensor:
        place, _, leaf = name.rpartition(".")
        chain = list(_modules_on_the_way(self.model, place))
        tensors: Any = chain[-1]._parameters if leaf in chain[-1]._parameters else chain[-1]._buffers
        before = tensors[leaf]
        value = torch.full(before.shape, _UNTOUCHED, dtype=before.dtype, device="cpu")
        tensors[leaf] = nn.Parameter(value, requires_grad=False) if isinstance(before, nn.Parameter) else value
        try:
            with making, torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(base_name(name), self._seed))
                for at in range(len(chain), 0, -1):  # those around it may fill it again, as transformers lets them
                    owner: Any = next(each for each in reversed(chain[:at]) if hasattr(each, "_init_weights"))
                    owner._init_weights(chain[at - 1])
        finally:
            tensors[leaf] = before
        return self._from_constructor(name) if value.numel() and bool((value == _UNTOUCHED).all()) else value

    def _from_constructor(self, name: str) -> Tensor:
        """Value of a small tensor as constructors of transformers' modules leave it: slopes, masks, factors."""
        if self._constructed is None:
            causal_lm: Any = inner_causal_lm(self.model)
            kind, config = type(causal_lm), copy.deepcopy(causal_lm.config)
            with making, torch.random.fork_rng(devices=[]), _LargeOnMeta():
                torch.manual_seed(self._seed)
                made = kind(config)
            self._constructed = {**dict(made.named_parameters()), **dict(made.named_buffers())}
        value = self._constructed.get(base_name(name))
        if value is None or value.is_meta:
            raise InvalidUsage(
                f"{type(self.model).__name__} does not say how {name} begins (its _init_weights leaves it out), so it "
                "cannot be made in parts; load it whole, by hdpcomm.models.from_pretrained, and give it to Trainer"
            )
        return value.detach()


class _LargeOnMeta(TorchFunctionMode):
    """Large tensors are made on the meta device, small ones where they are asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn):
            size = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
            if torch.Size(size).numel() > _SMALL:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


class FolderWeights:
    """Weights of a folder as ``save_pretrained`` writes it: each is read when it is asked for, by its place in the
    files, and put together as transformers does where the folder has a tensor for each expert.

    Args:
        folder: with ``model.safetensors`` or ``pytorch_model.bin``, or several files and their index.
        model: the whole causal LM after :func:`hdpcomm.models.adapt`, on any device (``meta`` is enough); with adapters
            of LoRA or without.
        seed: of the adapters, which the folder has not.

    Raises: InvalidUsage: no weights, quantised ones, or a tensor of the model that the folder lacks or has in another
        shape.
    """

    def __init__(self, folder: Path, model: AdaptedCausalLM, *, seed: int = 0) -> None:
        self.folder = folder
        if getattr(model.causal_lm.config, "quantization_config", None) is not None:
            raise InvalidUsage(f"{folder} has quantised weights, which are not trained; give those in bf16 or fp32")
        self._new = NewWeights(model, seed)  # for what is computed and not stored
        self._files = _Files(folder)
        made = _on_meta(model.model)  # without memory, and without what peft has put into it
        self._causal_lm: Any = made
        if made is not inner_causal_lm(made):
            self._causal_lm = made.unload()
        self._sources = _sources(self._causal_lm, self._files)
        self._names: dict[str, str] = {}
        computed = {id(b) for b in _buffers_not_saved(self._causal_lm)}
        ahead, known = set(map(id, tensors_ahead(self._causal_lm))), list(by_tensor(self._causal_lm))
        if not any(id(tensor) in ahead and not self._sources.keys().isdisjoint(names) for names, tensor in known):
            computed |= ahead  # the folder has no such layers: they are new
        for names, tensor in known:
            found = next((name for name in names if name in self._sources), None)
            if found is not None:
                self._names.update(dict.fromkeys(names, found))
                if isinstance(source := self._sources[found], _Read):
                    self._check_shape(found, source.shape, tensor.shape)
            elif id(tensor) not in computed:
                raise InvalidUsage(
                    f"{folder} has no tensor {names[0]}, which its config.json asks for; give the folder of a causal "
                    "LM with all of its weights"
                )

    @property
    def bytes_read(self) -> int:
        """Bytes of the files, so far."""
        return self._files.bytes_read

    def whole(self, name: str) -> Tensor:
        plain = base_name(name.removeprefix(_ADAPTED))
        if plain not in self._names or is_adapter(name):
            return self._new.whole(name)
        plain = self._names[plain]
        tensor = self._sources[plain]()
        place, _, leaf = plain.rpartition(".")
        self._check_shape(plain, list(tensor.shape), getattr(self._causal_lm.get_submodule(place), leaf).shape)
        return tensor

    def _check_shape(self, name: str, shape: list[int], wanted: torch.Size) -> None:
        if shape != list(wanted):
            raise InvalidUsage(
                f"{self.folder} has {name} with the shape {shape}, and its config.json asks for {list(wanted)}; the "
                "files and the configuration are of two models"
            )


_ADAPTED = "model."
"""Before the names of a transformers model in an :class:`AdaptedCausalLM`."""

_Source = Callable[[], Tensor]


def _on_meta(model: Any) -> Any:
    """A copy of a model without memory. Local."""
    if not any(t.device.type != "meta" for t in (*model.parameters(), *model.buffers())):
        return copy.deepcopy(model)
    memo = {id(t): torch.empty_like(t, device="meta") for t in model.buffers()}
    memo |= {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _modules_on_the_way(model: nn.Module, place: str) -> Iterator[nn.Module]:
    yield model
    for part in place.split(".") if place else ():
        model = model.get_submodule(part)
        yield model


def _buffers_not_saved(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            if isinstance(buffer := module._buffers.get(name), Tensor):
                yield buffer


def by_tensor(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """Each parameter and buffer of a model, with all names that it has. Local."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in every:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    yield from found.values()


def own_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host memory for a large tensor that is needed for a moment, in pages of its own, which the system gets back with
    it. In the heap it may leave a gap that nothing else fits into (glibc finds no aligned block in one of the same
    size), so that a model's tensors one after the other add up. Local."""
    size = math.prod(shape)
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize), dtype=dtype).view(tuple(shape))


def weight_files(folder: Path) -> set[Path]:
    """The files with the weights of a folder as transformers writes it. Local.

    Raises: InvalidUsage: there are none, or of :func:`_listed`.
    """
    for plain in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{plain}.index.json"
        if not index.is_file():
            if (folder / plain).is_file():
                return {folder / plain}
            continue
        return _listed(index)
    raise InvalidUsage(
        f"{folder} has no weights: model.safetensors or pytorch_model.bin, or several files and their index, were "
        "expected"
    )


class _Files:
    """The tensors of a folder by name; nothing is read before :meth:`read`."""

    def __init__(self, folder: Path) -> None:
        self._opened: dict[Path, Any] = {}
        self.bytes_read = 0
        files = weight_files(folder)
        self._file_of = {name: file for file in sorted(files) for name in self._open(file).keys()}  # noqa: SIM118

    def names(self) -> list[str]:
        return list(self._file_of)

    def read(self, name: str) -> Tensor:
        opened = self._open(self._file_of[name])
        tensor: Tensor = opened[name] if isinstance(opened, Mapping) else opened.get_tensor(name)
        self.bytes_read += tensor.nbytes
        return tensor

    def shape(self, name: str) -> list[int]:
        opened = self._open(self._file_of[name])
        return list(opened[name].shape if isinstance(opened, Mapping) else opened.get_slice(name).get_shape())

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            try:
                open_regular(file).close()
                if file.suffix == ".safetensors":
                    self._opened[file] = importlib.import_module("safetensors").safe_open(file, framework="pt")
                else:
                    found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
                    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
                        raise TypeError("no tensors by name")
                    self._opened[file] = found
            except Exception as error:  # each has kinds of its own for a damaged file
                # torch's own text says how to let such a file run code.
                text = " ".join(str(error).split())[:300] if file.suffix == ".safetensors" else "no plain tensors"
                raise InvalidUsage(f"{file} cannot be read as a model's weights ({text})") from error
        return self._opened[file]


def _listed(index: Path) -> set[Path]:
    """The files that an index names. Raises: InvalidUsage: it is damaged, or one of them is outside of its folder."""
    try:
        names = {Path(name) for name in json.loads(read_text(index))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidUsage(f"{index}: no index of a model's weights ({type(error).__name__}: {error!s:.100})") from None
    for name in names:
        if name.is_absolute() or ".." in name.parts:
            raise InvalidUsage(f"{index}: names {name}, which is outside of this folder; fetch the model again")
    return {index.parent / name for name in names}


def _sources(causal_lm: Any, files: _Files) -> dict[str, _Source]:
    """How to get each tensor of the model from the files; what the model does not have is left out."""
    known = causal_lm.state_dict()
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(causal_lm)
    except (ImportError, AttributeError):  # before release 5, where names are the same on both sides
        return {name: _Read(files, key) for key in files.names() if (name := model_name(causal_lm, key)) in known}
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, _Source] = {}
    conversions: dict[str, _Conversion] = {}
    prefix = causal_lm.base_model_prefix
    for key in sorted(files.names(), key=loading.dot_natural_key):
        own = model_name(causal_lm, key)
        name, pattern = loading.rename_source_key(own, renamings, converters, prefix, known)
        if name not in known and own in known:
            name, pattern = own, None
        if name not in known:
            continue
        if pattern is None:
            found[name] = _Read(files, key)
            continue
        if name not in conversions:
            conversions[name] = _Conversion(files, name, converter_of[pattern], causal_lm)
        conversions[name].parts.setdefault(pattern, []).append(key)
    for name, conversion in conversions.items():
        patterns = conversion.converter.target_patterns
        for pattern in patterns:
            target = name.replace(patterns[0], pattern)
            if target in known:
                found[target] = partial(conversion.read, target)
    return found


class _Read:
    """A tensor that stands in the files as it is."""

    def __init__(self, files: _Files, key: str) -> None:
        self._files, self._key = files, key

    @property
    def shape(self) -> list[int]:
        return self._files.shape(self._key)

    def __call__(self) -> Tensor:
        return self._files.read(self._key)


class _Conversion:
    """A tensor that transformers makes of several in the files, or several of one.

    Attributes:
        parts: by pattern of the converter, the keys in the files.
    """

    def __init__(self, files: _Files, name: str, converter: Any, model: Any) -> None:
        self._files, self._name, self.converter, self.model = files, name, converter, model
        self.parts: dict[str, list[str]] = {}

    def read(self, target: str) -> Tensor:
        kinds = [type(operation).__name__ for operation in self.converter.operations]
        dims = [getattr(operation, "dim", None) for operation in self.converter.operations]
        one = kinds == ["MergeModulelist"] and dims == [0] and len(self.parts) == 1
        if one or (kinds == ["MergeModulelist", "Concatenate"] and dims == [0, 1]):
            return self._stacked()
        converter = copy.deepcopy(self.converter)
        for pattern, keys in self.parts.items():
            for key in keys:
                converter.add_tensor(self._name, key, pattern, partial(self._files.read, key))
        made = converter.convert(self._name, model=self.model, config=self.model.config)[target]
        tensor: Tensor = made[0] if isinstance(made, list) else made
        return tensor

    def _stacked(self) -> Tensor:
        """One tensor for all experts of a layer, filled one expert at a time, so that nothing exists twice."""
        patterns = [pattern for pattern in self.converter.source_patterns if pattern in self.parts]
        rows = [self._files.shape(self.parts[pattern][0])[0] for pattern in patterns]
        inner = self._files.shape(self.parts[patterns[0]][0])[1:]
        whole: Tensor | None = None
        begin = 0
        for pattern, height in zip(patterns, rows, strict=True):
            for expert, key in enumerate(self.parts[pattern]):
                part = self._files.read(key)
                if whole is None:
                    whole = own_pages((len(self.parts[pattern]), sum(rows), *inner), part.dtype)
                whole[expert, begin : begin + height] = part
            begin += height
        assert whole is not None
        return whole
