"""Images, videos and sound of transformers' models: the encoder's part of a step, which no pack of tokens knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import to_device
from hdpcomm.plan.items import Item

__all__ = ["FAMILIES", "MEDIA", "MediaEncoder", "TokensWithItems", "auto_class", "is_pixels", "items_of"]

_KINDS = {
    "image": ("pixel_values", "image_grid_thw", "image_token_id"),
    "video": ("pixel_values_videos", "video_grid_thw", "video_token_id"),
    "audio": ("input_features", "feature_attention_mask", "audio_token_id"),
}
"""For each kind of item the names of its pixels (of sound: its spectrum), of its grids and of its token."""
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_TAKEN = {
    **dict.fromkeys(_QWEN, (*_KINDS["image"][:2], *_KINDS["video"][:2], "second_per_grid_ts", "mm_token_type_ids")),
    "gemma3": ("pixel_values", "token_type_ids"),
    "llava": ("pixel_values",),
    "qwen2_audio": _KINDS["audio"][:2],
}
"""For each family what it takes of a processor's results for a sequence's items."""
FAMILIES = tuple(_TAKEN)
"""``config.model_type`` of models whose images, videos or sound are known. Their encoders look at an image, a frame or
a recording at a time."""
MEDIA = tuple(dict.fromkeys(name for names in _TAKEN.values() for name in names))
"""Names of the results of processors for a sequence's items: no columns of its tokens."""


def is_pixels(name: str) -> bool:
    """Whether what has this name is read by encoders alone."""
    return name.startswith("pixel_values") or name == "input_features"


def auto_class(model_type: str) -> Any:
    """The class of transformers by which models of this type with a head for tokens are made."""
    import transformers

    if model_type not in FAMILIES:
        return transformers.AutoModelForCausalLM
    return getattr(transformers, "AutoModelForMultimodalLM", transformers.AutoModelForImageTextToText)


@dataclass(frozen=True, slots=True, eq=False)
class TokensWithItems:
    """A shard some of whose tokens stand for items: what a model takes in the place of its tokens.

    Attributes:
        tokens: int64 ``[local tokens]``.
        rows: int64 ``[n]``, those that stand for items; with tensor ranks, of this one's block.
        embeddings: ``[n, width]``, or ``[n, (1 + k) width]`` where k layers add features of the encoder; ``None``: a
            later stage of a pipeline, whose ``tokens`` are hidden states.
        coordinates: int64 ``[3, local tokens]``, positions by time, height and width; ``None``: the model has none.
    """

    tokens: Tensor
    rows: Tensor
    embeddings: Tensor | None
    coordinates: Tensor | None


class _Part(NamedTuple):
    """An item as the encoder takes it: ``rows`` rows of its kind's pixels, from ``first`` on, and the rows and columns
    of its grid."""

    item: Item
    kind: str
    first: int
    rows: int
    grid: tuple[int, int]


class MediaEncoder:
    """The encoder of a model's images and videos, or of its sound.

    Args:
        causal_lm: of :data:`FAMILIES`.

    Attributes:
        width: of the embeddings of items, see :class:`TokensWithItems`.
        deepest: the first layers of the language model, so many, add features of the encoder.
        names: of what it takes of a batch, beside the tokens.
        two_way: the tokens of an image see all of each other in the language model.
        recompute: whether :meth:`encode` keeps no more than its inputs, and runs again in the backward pass.
    """

    recompute = False

    def __init__(self, causal_lm: Any) -> None:
        self._model, config = causal_lm.base_model, causal_lm.config
        self._config = config
        self.names: tuple[str, ...] = _TAKEN[config.model_type]
        self.two_way = config.model_type == "gemma3"
        self._kinds = {kind: names for kind, names in _KINDS.items() if names[0] in self.names}
        tower = getattr(config, "vision_config", None) or config.audio_config
        self.deepest = len(getattr(tower, "deepstack_visual_indexes", None) or ())
        self.width = config.get_text_config().hidden_size * (1 + self.deepest)
        # Now, as stages of a pipeline have parts of the model.
        language = sum(p.numel() for p in self._model.language_model.parameters())
        own = sum(p.numel() for p in self.parameters())
        depth = getattr(tower, "depth", None) or tower.num_hidden_layers
        width = getattr(tower, "embed_dim", None) or tower.hidden_size
        self._work: tuple[float, float] = own / language, 2.0 * width * depth / language

    @staticmethod
    def of(causal_lm: Any) -> MediaEncoder | None:
        """``None``: the model takes text alone."""
        return MediaEncoder(causal_lm) if causal_lm.config.model_type in FAMILIES else None

    def modules(self) -> Iterator[nn.Module]:
        """The parts of the model that are not its language model."""
        return (part for part in self._model.children() if part is not self._model.language_model)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights."""
        return (p for part in self.modules() for p in part.parameters())

    def tensors(self) -> Iterator[Tensor]:
        """Weights and buffers."""
        yield from self.parameters()
        yield from (buffer for part in self.modules() for buffer in part.buffers())

    def share_of_tokens(self, patches: int) -> float:
        """Work of encoding an item, in units of that of the language model's weights for a token."""
        linear, squared = self._work
        return patches * (linear + squared * patches)

    def items(self, given: Mapping[str, Any]) -> list[Item]:
        """The items of a sequence, by rising places. Local.

        Args:
            given: "tokens" int64 ``[length]`` and what the model's processor makes of the sequence's images and videos:
                "pixel_values" and "image_grid_thw", "pixel_values_videos" and "video_grid_thw"; or of its sound,
                "input_features" and "feature_attention_mask".

        Raises: InvalidUsage: the tokens that stand for them do not match.
        """
        return [part.item for part in self._parts(given)]

    def _parts(self, given: Mapping[str, Any]) -> list[_Part]:
        found: list[_Part] = []
        for kind, (pixels, _, token) in self._kinds.items():
            places = (given["tokens"] == getattr(self._config, token)).nonzero()[:, 0]
            frames = list(self._frames(kind, given))
            count = sum(tokens for *_, tokens in frames)
            if len(places) != count:
                raise InvalidUsage(
                    f"a sequence has {len(places)} tokens that stand for its {kind}s ({token}), and {pixels} makes "
                    f"{count} embeddings; give what the model's processor made of this sequence"
                )
            end = 0
            for first, rows, grid, tokens in frames:
                if not tokens:  # of a few milliseconds of sound
                    continue
                own = places[end : (end := end + tokens)]
                start = int(own[0])
                if int(own[-1]) - start + 1 != tokens:
                    raise InvalidUsage(
                        f"the {tokens} tokens of a {kind} from place {start} on have others between them; give what "
                        "the model's processor made of this sequence"
                    )
                found.append(_Part(Item(start, tokens, grid[0] * grid[1]), kind, first, rows, grid))
        return sorted(found, key=lambda part: part.item.start)

    def _frames(self, kind: str, given: Mapping[str, Any]) -> Iterator[tuple[int, int, tuple[int, int], int]]:
        """(first row of pixels, rows, (rows, columns) of patches, tokens) of each image or frame."""
        pixels, grids, token = self._kinds[kind]
        if given.get(pixels) is None:
            return
        if kind == "audio":
            tokens_of, most = self._audio_tokens(given[grids]), self._config.audio_config.max_source_positions
            if len(tokens_of) != len(given[pixels]):
                raise InvalidUsage(
                    f"{grids} tells of {len(tokens_of)} recordings, and {pixels} has {len(given[pixels])}; give both "
                    "as the model's processor made them"
                )
            yield from ((place, 1, (1, most), tokens) for place, tokens in enumerate(tokens_of))
            return
        vision = self._config.vision_config
        if self._config.model_type not in _QWEN:
            number, *_, height, width = given[pixels].shape
            grid = height // vision.patch_size, width // vision.patch_size
            tokens = int((given["tokens"] == getattr(self._config, token)).sum()) // max(1, number)
            yield from ((place, 1, grid, tokens) for place in range(number))
            return
        first = 0
        for frames, height, width in given[grids].tolist():
            for _ in range(frames):
                yield first, height * width, (height, width), height * width // vision.spatial_merge_size**2
                first += height * width
        if first != len(given[pixels]):
            raise InvalidUsage(
                f"{grids} tells of {first} patches, and {pixels} has {len(given[pixels])}; give both as the model's "
                "processor made them"
            )

    def _audio_tokens(self, mask: Tensor) -> list[int]:
        """Tokens of each recording; ``mask`` [recordings, columns] is not 0 where its spectrum has sound."""
        _, tokens = self._model.audio_tower._get_feat_extract_output_lengths(mask.sum(-1))
        return [max(0, count) for count in tokens.tolist()]

    def split(self, batch: Mapping[str, Any], sequences: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Deals the items of a collator's batch out to its sequences, by their tokens. Local.

        Raises: InvalidUsage: the tokens that stand for items do not match.
        """
        found: list[dict[str, Tensor]] = [{} for _ in sequences]
        for kind, (pixels, grids, token) in self._kinds.items():
            counts = [int((tokens == getattr(self._config, token)).sum()) for tokens in sequences]
            x = batch.get(pixels)
            pictures = 0 if x is None else len(x)
            if self._config.model_type in _QWEN:
                rows = [] if x is None else batch[grids].prod(1).tolist()
                tokens_of = [each // self._config.vision_config.spatial_merge_size**2 for each in rows]
            elif kind == "audio" and pictures:
                rows, tokens_of = [1] * pictures, self._audio_tokens(batch[grids])
            else:
                rows, tokens_of = [1] * pictures, [sum(counts) // max(1, pictures)] * pictures
            place = row = 0
            for number, (own, count) in enumerate(zip(found, counts, strict=True)):
                last, end = place, row
                while count > 0 and last < len(rows):
                    count, end, last = count - tokens_of[last], end + rows[last], last + 1
                if count:
                    raise InvalidUsage(
                        f"a row has {counts[number]} tokens that stand for {kind}s ({token}), which those of the "
                        "batch do not fill; give what the model's processor made, without cutting rows"
                    )
                if last > place:
                    own[pixels] = batch[pixels][row:end]
                    for name in (grids, "second_per_grid_ts" if kind == "video" else grids):
                        if batch.get(name) is not None:
                            own[name] = torch.as_tensor(batch[name])[place:last]
                place, row = last, end
            if place != len(rows):
                raise InvalidUsage(
                    f"a batch has {len(rows)} {kind}s, and its rows tokens of {place} ({token}); give what the model's "
                    "processor made, without cutting rows"
                )
        return found

    def encode(self, chosen: Sequence[tuple[Mapping[str, Any], Sequence[int]]], device: torch.device) -> Tensor:
        """Embeddings ``[rows, width]`` of items, one after the other. Differentiable. Local.

        Args:
            chosen: of sequences as of :meth:`items`, the numbers of the items.
        """
        if self.recompute and torch.is_grad_enabled():
            again: Tensor = checkpoint(self._encode, chosen, device, use_reentrant=False)
            return again
        return self._encode(chosen, device)

    def _encode(self, chosen: Sequence[tuple[Mapping[str, Any], Sequence[int]]], device: torch.device) -> Tensor:
        wanted = []
        for given, numbers in chosen:
            parts = self._parts(given)
            wanted += [(given, parts[number]) for number in numbers]
        order: list[int] = []
        rows: list[Tensor] = []
        for kind, (pixels, _, _) in self._kinds.items():
            own = [place for place, (_, part) in enumerate(wanted) if part.kind == kind]
            if own:
                taken = [wanted[place] for place in own]
                x = torch.cat([given[pixels][part.first : part.first + part.rows] for given, part in taken])
                rows += self._features(kind, to_device(x, device), taken)
                order += own
        by_place = dict(zip(order, rows, strict=True))
        return torch.cat([by_place[place] for place in range(len(wanted))])

    def _features(self, kind: str, pixels: Tensor, taken: Sequence[tuple[Mapping[str, Any], _Part]]) -> list[Tensor]:
        pixels = pixels.to(next(self.parameters()).dtype)
        if kind == "audio":
            return self._sounds(pixels, taken)
        options: dict[str, Any] = {_KINDS[kind][0]: pixels, "return_dict": True}
        if self._config.model_type in _QWEN:
            options[_KINDS[kind][1]] = torch.tensor([(1, *part.grid) for _, part in taken], device=pixels.device)
        features_of = self._model.get_image_features if kind == "image" else self._model.get_video_features
        out = features_of(**options)
        features = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
        return [torch.cat(each, -1) for each in zip(*features, strict=True)]

    def _sounds(self, spectra: Tensor, taken: Sequence[tuple[Mapping[str, Any], _Part]]) -> list[Tensor]:
        """transformers makes the mask of its encoder within the forward pass of the whole model."""
        tower, model = self._model.audio_tower, self._model
        heard = torch.stack([given[_KINDS["audio"][1]][part.first].sum() for given, part in taken])
        lengths, _ = tower._get_feat_extract_output_lengths(heard)
        places = torch.arange(tower.config.max_source_positions)
        seen = to_device(places < lengths.cpu()[:, None], spectra.device)[:, None, None]
        mask = torch.zeros(seen.shape, dtype=spectra.dtype, device=spectra.device)
        mask = mask.masked_fill(~seen, torch.finfo(spectra.dtype).min)
        out = model.multi_modal_projector(tower(spectra, attention_mask=mask).last_hidden_state)
        return [each[: part.item.tokens] for each, (_, part) in zip(out, taken, strict=True)]

    def coordinates(self, given: Mapping[str, Any]) -> Tensor | None:
        """int64 ``[3, length]``, the positions of a sequence's tokens by time, height and width; ``None``: the model
        counts tokens. Local."""
        tokens = given["tokens"]
        if self._config.model_type not in _QWEN:
            return None
        kinds = torch.zeros_like(tokens, dtype=torch.int32)
        for number, (_, _, token) in enumerate(self._kinds.values(), 1):
            kinds[tokens == getattr(self._config, token)] = number
        if not kinds.any():
            return torch.arange(len(tokens)).expand(3, -1)
        grids = {name: given[name] for _, name, _ in self._kinds.values() if given.get(name) is not None}
        if given.get("second_per_grid_ts") is not None:
            grids["second_per_grid_ts"] = given["second_per_grid_ts"]
        places, _ = self._model.get_rope_index(tokens[None], mm_token_type_ids=kinds[None], **grids)
        found: Tensor = places[:, 0]
        return found


def items_of(model: Any, fetched: Mapping[str, Any]) -> list[Item]:
    """The images, frames and recordings of a sequence, of what a plan is made beside its length. Local.

    Args:
        model: of :func:`hdpcomm.models.adapt`.
        fetched: "tokens" int64 ``[length]`` and what the processor of the model makes of the sequence's images and
            videos: "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"; or of its sound:
            "input_features", "feature_attention_mask".

    Raises: InvalidUsage: a model of text, or the tokens that stand for items do not match them.
    """
    encoder: MediaEncoder | None = getattr(model, "media", None)
    if encoder is None:
        raise InvalidUsage(f"{type(model).__name__} takes text alone; known are {', '.join(FAMILIES)}, by adapt()")
    return encoder.items(fetched)
