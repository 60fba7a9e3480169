"""The sequences in a batch of a collator of transformers, and what becomes of its keys: carried, without effect, or
refused; docs/how-to/hugging-face.md shows the table. And the stand-in for the model where TRL computes a loss: it gives
log-probabilities, or scores of sequences, that planned passes have made.

TRL's trainers of preferences and policies call ``model(input_ids=, attention_mask=, labels=, fused_lm_head=True)`` and
compute their losses, whatever these are, from ``log_probs`` and ``entropy`` of what it gives
(:class:`hdpcomm.integrations.row_passes.RowPasses`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.attention.packs import as_pack
from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations.row_passes import RowPasses, ScoredRows, Sequences
from hdpcomm.models.heads import NEXT_TOKEN, SEQUENCE, classified_token
from hdpcomm.models.media import MediaEncoder
from hdpcomm.train.losses.functions import IGNORE
from hdpcomm.train.losses.label_terms import LabelTerms
from hdpcomm.train.losses.shards import routes_of

__all__ = [
    "CARRIED",
    "ComputedLoss",
    "LogProbModel",
    "REFUSED",
    "ScoreModel",
    "WITHOUT_EFFECT",
    "check_keys",
    "sequences_of",
]

CARRIED = {
    "input_ids": "the tokens",
    "labels": "what they predict, shifted along their row as transformers does; those of classifiers are not",
    "shift_labels": "in their place, not shifted",
    "attention_mask": "ones and zeros: padding on either side of a row is dropped",
    "position_ids": "cut rows into sequences where they begin again with 0, without an attention_mask",
    "cu_seq_lens_q": "cuts a single row into sequences",
    "cu_seq_lens_k": "must be those of cu_seq_lens_q",
    "seq_idx": "cuts rows into sequences where the number changes",
}

WITHOUT_EFFECT = {
    ("max_length_q", "max_length_k"): "follow from cu_seq_lens_q",
    ("num_items_in_batch",): "the labels of a step are counted over all ranks",
    ("use_cache", "use_mems"): "training keeps no keys of tokens before",
    ("output_attentions", "output_hidden_states", "return_dict"): "of results that training does not read",
}

REFUSED = {
    ("label", "label_ids"): "labels of whole sequences; give labels of tokens",
    ("token_type_ids", "task_type_ids", "input_shape_ids", "input_pronunciation_ids", "langs", "lang_ids"): (
        "more than one number for a token; leave it out of the batch (of a tokenizer: return_token_type_ids=False)"
    ),
    ("inputs_embeds", "per_layer_inputs"): "embeddings; give input_ids",
    ("is_causal", "perm_mask", "target_mapping", "input_mask", "padding_mask", "lengths"): (
        "another order or mask of tokens than causal attention over sequences; give attention_mask or position_ids"
    ),
    ("past_key_values", "past_buckets_states", "cache", "cache_params", "mems", "state", "shared_kv_states"): (
        "tokens before the batch; give whole sequences"
    ),
    (
        "decoder_input_ids", "encoder_outputs", "encoder_hidden_states", "encoder_attention_mask",
        "cross_attention_states", "cross_attention_mask", "full_text_row_masked_out_mask",
    ): "states of an encoder; give a decoder and its tokens alone",
    (
        "image_pixel_values", "image_patches", "image_sizes",
        "image_attention_mask", "image_position_ids", "video_position_ids", "num_frames_per_video",
        "interpolate_pos_encoding", "input_features_mask", "audio_input_features",
        "audio_embed_sizes", "audio_attention_mask", "mm_encoder_outputs",
    ): "images, videos or sound in a form that planned training does not know",
    ("pixel_values", "pixel_values_videos", "mm_token_type_ids", "input_features"): (
        "images, videos or sound, of a model whose are not known; carried for those that docs/images.md names"
    ),
    ("logits_to_keep", "ignore_index", "vocab_size"): "another loss than that of all labels that are not -100",
    ("output_router_logits",): "the auxiliary loss of routers; set it in the model's configuration",
    ("num_hashes",): "another attention than that of the model's configuration; set it there",
}  # fmt: skip
"""Why, of keys that would change the result."""

_ALLOWED = {*CARRIED, *(name for names in WITHOUT_EFFECT for name in names)}
_REASONS = {name: reason for names, reason in REFUSED.items() for name in names}
_UNKNOWN = "no key that planned training knows; leave it out in the collator, or use transformers.Trainer"


def check_keys(batch: Mapping[str, Any], media: MediaEncoder | None = None) -> None:
    """Raises InvalidUsage for a key that planned training would drop. Local.

    Args:
        media: of a model with images, videos or sound.
    """
    known = _ALLOWED if media is None else _ALLOWED.union(media.names)
    for name, value in batch.items():
        if value is not None and name not in known:
            raise InvalidUsage(f"a batch has {name!r}: {_REASONS.get(name, _UNKNOWN)}")


def sequences_of(
    batch: Mapping[str, Any], labels_of: str = NEXT_TOKEN, *, padding: int | None = None, targets: int = 0,
    media: MediaEncoder | None = None,
) -> Sequences:  # fmt: skip
    """The sequences of a batch without padding. Local.

    Args:
        batch: ``input_ids`` and ``labels``, both ``[rows, tokens]``; the sequences are its rows, where
            ``attention_mask`` is not 0, or what ``cu_seq_lens_q`` (of a single row), ``seq_idx`` or ``position_ids``
            cut them into.
        labels_of: to what labels belong, see :mod:`hdpcomm.models.heads`. Those of sequences are ``[rows]``.
        padding: the token that classifies no sequence.
        targets: of each sequence, ``labels`` are ``[rows, targets]`` then; 0: a label is the number of a class.
        media: of a model with images and videos, which are those of the batch.

    Raises: InvalidUsage for other batches, and for keys that :mod:`hdpcomm.integrations.huggingface_batch` refuses.
    """
    check_keys(batch, media)
    tokens, labels = batch.get("input_ids"), batch.get("labels")
    if not isinstance(tokens, Tensor) or not isinstance(labels, Tensor) or tokens.ndim != 2:
        raise InvalidUsage(
            f"a batch has {', '.join(batch)}; input_ids [rows, tokens] and labels were expected: give a collator for "
            "such models, as DataCollatorWithFlattening for causal language models"
        )
    tokens = tokens.cpu()
    labelled = torch.full_like(tokens, IGNORE) if labels_of == SEQUENCE else _labelled(batch, tokens, labels_of)
    seen = _seen(batch, tokens, labelled, labels_of)
    begins = _begins(batch, tokens, seen)
    if not len(begins):
        raise InvalidUsage("a batch has no token; every rank needs at least one")
    starts = [*begins.nonzero()[:, 0].tolist(), len(begins)]
    own = Sequences([b - a for a, b in pairwise(starts)], tokens[seen].long(), labelled[seen].long())
    if media is not None:
        own = replace(own, media=media.split(batch, own.each()))
    return _classified(own, labels.cpu(), len(tokens), padding, targets) if labels_of == SEQUENCE else own


def _classified(own: Sequences, labels: Tensor, rows: int, padding: int | None, targets: int) -> Sequences:
    """With the label of each row at the token that classifies it, 0 if it has targets."""
    if len(own.lengths) != rows or len(labels) != rows or labels.numel() != rows * max(1, targets):
        raise InvalidUsage(
            f"labels has shape {tuple(labels.shape)}, and a batch {rows} rows with {len(own.lengths)} sequences; a "
            f"classifier of sequences takes one in each row, with {targets or 1} numbers: leave flattening out of the "
            "collator, and rows without tokens"
        )
    if not targets and labels.is_floating_point():
        raise InvalidUsage(f"labels are {labels.dtype}; expected numbers of classes, or another config.problem_type")
    places = [a + classified_token(own.tokens[a:b], padding) for a, b in pairwise(own.offsets)]
    own.labels[places] = 0 if targets else labels.flatten().long()
    return replace(own, targets=labels.view(rows, targets)) if targets else own


def _of_tokens(batch: Mapping[str, Any], name: str, tokens: Tensor) -> Tensor | None:
    """An entry of the batch with a number for each token. Raises InvalidUsage for another shape."""
    value = batch.get(name)
    if value is not None and value.shape != tokens.shape:
        raise InvalidUsage(
            f"{name} has shape {tuple(value.shape)} and input_ids {tuple(tokens.shape)}; give one number for each "
            "token (masks of pairs of tokens and positions with several axes are not supported)"
        )
    return None if value is None else value.cpu()


def _labelled(batch: Mapping[str, Any], tokens: Tensor, labels_of: str) -> Tensor:
    """Labels of next tokens in a row shifted by one, as transformers does it: over the ends of sequences, too."""
    labels, shifted = (_of_tokens(batch, name, tokens) for name in ("labels", "shift_labels"))
    assert labels is not None
    if labels_of != NEXT_TOKEN:
        return labels
    return shifted if shifted is not None else nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]


def _seen(batch: Mapping[str, Any], tokens: Tensor, labelled: Tensor, labels_of: str) -> Tensor:
    """Which tokens are no padding. Raises InvalidUsage where hidden ones would change the result."""
    mask = _of_tokens(batch, "attention_mask", tokens)
    if mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    seen = mask.bool()
    if not torch.equal(seen.to(mask.dtype), mask):
        raise InvalidUsage("attention_mask has other values than 0 and 1; number the sequences of a row by seq_idx")
    begins = seen & ~nn.functional.pad(seen, (1, 0))[:, :-1]
    if (begins.sum(1) > 1).any():
        raise InvalidUsage(
            "attention_mask hides tokens between others of a row, which still count in the positions of later ones; "
            "leave such tokens out of input_ids, or show them and set their labels to -100"
        )
    before = torch.zeros_like(begins)
    if labels_of == NEXT_TOKEN:  # transformers has the last padding predict a first token
        before[:, :-1] = begins[:, 1:]
    if ((labelled != IGNORE) & ~seen & ~before).any():
        raise InvalidUsage("tokens that attention_mask hides have labels; set the labels of padding to -100")
    return seen


def _begins(batch: Mapping[str, Any], tokens: Tensor, seen: Tensor) -> Tensor:
    """Which of the tokens that are seen, row after row, begin a sequence. Raises InvalidUsage where entries of the
    batch disagree, or positions do not count the tokens of a sequence from 0."""
    rows = torch.arange(len(tokens))[:, None].expand_as(tokens)[seen]
    new_row = rows.diff(prepend=rows.new_full((1,), -1)) != 0
    cuts: dict[str, Tensor] = {}
    if (bounds := batch.get("cu_seq_lens_q")) is not None:
        cuts["cu_seq_lens_q"] = _cut_at(bounds, tokens)[seen]
    if (other := batch.get("cu_seq_lens_k")) is not None and (bounds is None or list(other) != list(bounds)):
        raise InvalidUsage("cu_seq_lens_k differs from cu_seq_lens_q; keys of other tokens are not supported")
    if (numbers := _of_tokens(batch, "seq_idx", tokens)) is not None:
        cuts["seq_idx"] = numbers[seen].diff(prepend=numbers.new_zeros(1)) != 0
    if (places := _of_tokens(batch, "position_ids", tokens)) is not None:
        places = places[seen]
        cuts["position_ids"] = places.diff(prepend=places.new_zeros(1)) != 1
        if (places[cuts["position_ids"] | new_row] != 0).any():
            raise InvalidUsage(
                "position_ids are not those of each token in its own sequence, from 0 on; leave them out, or give "
                "positions that begin again with 0 where a sequence begins"
            )
    cuts = {name: cut | new_row for name, cut in cuts.items()}
    begins = next(iter(cuts.values()), new_row)
    if any(not torch.equal(cut, begins) for cut in cuts.values()):
        raise InvalidUsage(f"{' and '.join(cuts)} cut the rows into different sequences; give one of them")
    if batch.get("attention_mask") is not None and not torch.equal(begins, new_row):
        raise InvalidUsage(
            f"{' and '.join(cuts)} cut rows into sequences, and there is an attention_mask, with which transformers "
            "lets the sequences of a row see each other; leave the mask out"
        )
    return begins


def _cut_at(bounds: Any, tokens: Tensor) -> Tensor:
    """Where the sequences of a single row begin."""
    if tokens.shape[0] != 1:
        raise InvalidUsage(f"cu_seq_lens_q was given with {tokens.shape[0]} rows; flatten the batch to one row")
    cuts = as_pack(bounds, "cu_seq_lens_q").sequences().cu_seqlens.tolist()
    if cuts[-1] != tokens.shape[1]:
        raise InvalidUsage(f"cu_seq_lens_q ends with {cuts[-1]} and the row has {tokens.shape[1]} tokens")
    begins = torch.zeros(1, cuts[-1] + 1, dtype=torch.bool)
    begins[0, cuts] = True
    return begins[:, :-1]


_KEYS = {"input_ids", "attention_mask", "labels", "fused_lm_head", "use_cache"}


@dataclass(frozen=True, slots=True)
class ComputedLoss:
    """A loss of log-probabilities, before its derivatives go into the model.

    Attributes:
        loss: the scalar with its graph.
        leaf: its value, of which the backward pass of the trainer leaves the derivative of what the trainer made of it.
        calls: of the model, that the loss was made of.
    """

    loss: Tensor
    leaf: Tensor
    calls: list[ScoredRows]

    def terms(self, call: ScoredRows, comm: Communicator, *, more: bool) -> LabelTerms:
        """The losses of a call's labels whose derivatives are those of the mean loss over the ranks. Collective.

        Args:
            more: other calls follow.
        """
        slopes = None
        if self.loss.requires_grad and self.leaf.grad is not None:
            upstream = self.leaf.grad.to(self.loss.dtype) / comm.size
            [slopes] = torch.autograd.grad(self.loss, call.values, upstream, allow_unused=True, retain_graph=more)
        return call.terms(slopes, comm)


class LogProbModel:
    """Called in the model's place, by all ranks alike.

    Args:
        temperature: divides the logits.
        routes: the experts that the tokens of each row take, ``[tokens, layers, top_k]``, the last one's left out or
            not; ``None``: as routers choose.
        keeps: whether the experts that tokens took are kept.

    Attributes:
        kept: by row of all calls, ``[tokens, layers with routers, top_k]``.
    """

    def __init__(
        self, passes: RowPasses, temperature: float, *, routes: Sequence[Any] | None = None, keeps: bool = False
    ) -> None:
        self._passes, self._temperature, self._keeps = passes, temperature, keeps
        self._routes = None if routes is None else iter(routes)
        self.kept: list[Tensor] = []
        self.calls: list[ScoredRows] = []
        """Calls by whose results the loss may have gradients."""

    def __call__(self, **arguments: Any) -> Any:
        """An object with what TRL reads: ``log_probs``, ``entropy``, ``label_mask``; what it only logs is 0."""
        from trl.trainer.utils import FusedCausalLMOutput

        own, where = _rows(arguments, self._passes.media)
        scored = self._scored(own, temperature=self._temperature, entropy=True)
        device = arguments["input_ids"].device
        none = torch.zeros(where.shape, dtype=scored.values.dtype)
        log_probs, entropy = (none.masked_scatter(where, row).to(device) for row in scored.values)
        none = none.to(device)
        return FusedCausalLMOutput(
            log_probs=log_probs, entropy=entropy, mean_logits=none, is_top1=none.bool(), label_mask=where.to(device)
        )

    def _scored(self, own: Sequences, **asked: Any) -> ScoredRows:
        if self._routes is not None:
            given = enumerate(zip(own.lengths, self._routes, strict=False))  # the rows of other calls follow
            rows = [routes_of({"routes": row}, i, length) for i, (length, row) in given]
            own = replace(own, routes=torch.cat([row.to(torch.int16) for row in rows if row is not None]))
        scored = self._passes.score(own, **asked, routes=self._keeps)
        if scored.routes is not None:
            self.kept += torch.split(scored.routes.to(torch.int16), own.lengths)
        if scored.values.requires_grad:
            self.calls.append(scored)
        return scored

    def __getattr__(self, name: str) -> Any:
        raise InvalidUsage(
            f"the loss asks the model for {name!r}; with plans it gets log-probabilities by "
            "model(input_ids=, attention_mask=, labels=, fused_lm_head=True), or scores of sequences, only: this "
            "version of TRL, or this loss, does not work with HybridDataParallel"
        )


class ScoreModel(LogProbModel):
    """Called in the place of a model that scores sequences, by TRL's RewardTrainer.

    Args:
        padding: the token that ends no sequence.
    """

    def __init__(self, passes: RowPasses, padding: int | None) -> None:
        super().__init__(passes, 1.0)
        self._padding = padding

    def __call__(self, **arguments: Any) -> Any:
        """``logits`` ``[rows, 1]``: the score of each row."""
        from transformers.modeling_outputs import SequenceClassifierOutput

        tokens, mask = arguments["input_ids"], arguments.get("attention_mask")
        rows = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.new_zeros(len(tokens))}
        own = sequences_of(rows, SEQUENCE, padding=self._padding)
        scores = self._scored(own, temperature=None, entropy=False).values[0]
        return SequenceClassifierOutput(logits=scores[:, None].to(tokens.device))


def _rows(arguments: Mapping[str, Any], media: MediaEncoder | None) -> tuple[Sequences, Tensor]:
    """(the rows of a call as sequences, which labels ``[rows, tokens - 1]`` there are). Raises InvalidUsage."""
    given = {name for name, value in arguments.items() if value is not None and value is not False}
    tokens, mask, labels = (arguments.get(name) for name in ("input_ids", "attention_mask", "labels"))
    if (
        not arguments.get("fused_lm_head")
        or given - _KEYS - set(media.names if media is not None else ())
        or not all(isinstance(x, Tensor) and x.dim() == 2 for x in (tokens, mask, labels))
    ):
        raise InvalidUsage(
            f"the loss calls the model with {sorted(given)}; with plans it may ask for log-probabilities of padded "
            "rows only (input_ids, attention_mask, labels and fused_lm_head, as TRL 1.16 does, and images of models "
            "that take them): leave out padding_free and losses of logits"
        )
    assert isinstance(labels, Tensor)
    assert isinstance(mask, Tensor)
    seen = mask.cpu().bool()
    labels = labels.cpu().masked_fill(~seen, IGNORE)
    first = seen.long().argmax(1)
    labels[torch.arange(len(labels)), first] = IGNORE  # nothing predicts a first token
    rows: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    if media is not None:
        rows |= {name: arguments.get(name) for name in media.names}
    own = sequences_of(rows, media=media)
    return own, labels[:, 1:] != IGNORE
