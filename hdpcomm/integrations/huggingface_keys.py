"""Keys of a batch of transformers: carried, without effect, or refused; docs/how-to/hugging-face.md shows the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdpcomm.errors import InvalidUsage

__all__ = ["CARRIED", "REFUSED", "WITHOUT_EFFECT", "check_keys"]

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
        "pixel_values", "pixel_values_videos", "image_pixel_values", "image_patches", "image_sizes",
        "image_attention_mask", "image_position_ids", "video_position_ids", "num_frames_per_video",
        "interpolate_pos_encoding", "input_features", "input_features_mask", "audio_input_features",
        "audio_embed_sizes", "audio_attention_mask", "mm_encoder_outputs", "mm_token_type_ids",
    ): "images, videos or sound; train on text alone",
    ("logits_to_keep", "ignore_index", "vocab_size"): "another loss than that of all labels that are not -100",
    ("output_router_logits",): "the auxiliary loss of routers; set it in the model's configuration",
    ("num_hashes",): "another attention than that of the model's configuration; set it there",
}  # fmt: skip
"""Why, of keys that would change the result."""

_ALLOWED = {*CARRIED, *(name for names in WITHOUT_EFFECT for name in names)}
_REASONS = {name: reason for names, reason in REFUSED.items() for name in names}
_UNKNOWN = "no key that planned training knows; leave it out in the collator, or use transformers.Trainer"


def check_keys(batch: Mapping[str, Any]) -> None:
    """Raises InvalidUsage for a key that planned training would drop. Local."""
    for name, value in batch.items():
        if value is not None and name not in _ALLOWED:
            raise InvalidUsage(f"a batch has {name!r}: {_REASONS.get(name, _UNKNOWN)}")
