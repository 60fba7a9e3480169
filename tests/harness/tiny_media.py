"""Tiny models of transformers with images and videos, and samples as their processors make them."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch

IMAGE, VIDEO, START, END, VOCABULARY = 120, 121, 122, 123, 128
PATCH = 4
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "gemma3", "qwen2_audio")
MELS, COLUMNS = 8, 32  # of a recording
_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
    "tie_word_embeddings": False,
}  # fmt: skip


def config_of(family: str) -> Any:
    """A configuration with 4 layers of text and 3 of images; patches of 4 x 4, 2 x 2 of which are a token."""
    from transformers import (
        Gemma3Config,
        LlavaConfig,
        Qwen2_5_VLConfig,
        Qwen2AudioConfig,
        Qwen2VLConfig,
        Qwen3VLConfig,
        Qwen3VLMoeConfig,
    )

    text: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    if family == "llava":
        vision = {
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
            "num_attention_heads": 2, "image_size": 16, "patch_size": PATCH, "projection_dim": 16,
        }  # fmt: skip
        return LlavaConfig(
            text_config={"model_type": "llama", **text}, vision_config=vision, image_token_id=IMAGE,
            tie_word_embeddings=False,
        )  # fmt: skip
    if family == "gemma3":
        vision = {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
            "image_size": 16, "patch_size": PATCH,
        }  # fmt: skip
        return Gemma3Config(
            text_config={**text, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8,
                         "layer_types": ["sliding_attention", "full_attention"] * 2},
            vision_config=vision, mm_tokens_per_image=4, image_token_id=IMAGE, tie_word_embeddings=False,
        )  # fmt: skip
    if family == "qwen2_audio":
        audio = {
            "model_type": "qwen2_audio_encoder", "num_mel_bins": MELS, "d_model": 16, "encoder_layers": 3,
            "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "max_source_positions": COLUMNS // 2,
        }  # fmt: skip
        return Qwen2AudioConfig(
            audio_config=audio, text_config={"model_type": "qwen2", **text}, audio_token_id=IMAGE,
            tie_word_embeddings=False,
        )  # fmt: skip
    text["rope_parameters"] = rope
    if family == "qwen2_vl":
        vision = {"depth": 3, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": PATCH, "mlp_ratio": 2}
        return Qwen2VLConfig(text_config=text, vision_config=vision, **_TOKENS)
    vision = {
        "depth": 3, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": PATCH,
        "out_hidden_size": 32,
    }  # fmt: skip
    if family == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_TOKENS)
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
    text["head_dim"] = 8
    if family == "qwen3_vl_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
        return Qwen3VLMoeConfig(text_config=text, vision_config=vision, **_TOKENS)
    return Qwen3VLConfig(text_config=text, vision_config=vision, **_TOKENS)


def model_of(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    from hdpcomm.models.media import auto_class

    torch.manual_seed(seed)
    options = {"experts_implementation": "eager"} if "moe" in family else {}  # the others have no float64
    model = auto_class(family).from_config(config_of(family), dtype=torch.float32, **options)
    for parameter in model.parameters():  # new models have biases of 0, and positions near 0
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model.to(dtype).train()


def sample_of(family: str, parts: str, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """A sequence of text (``t``), images or recordings (``i``) and videos (``v``) in that order, with all that its
    model takes."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tokens: list[int] = []
    grids: dict[str, list[tuple[int, int, int]]] = {"i": [], "v": []}
    heard: list[int] = []
    for part in parts:
        if part == "t":
            tokens += [draw.randrange(3, 120) for _ in range(draw.randint(1, 9))]
            continue
        if family == "qwen2_audio":
            heard.append(draw.randint(7, COLUMNS))
            tokens += [START, *[IMAGE] * (((heard[-1] - 1) // 2 - 1) // 2 + 1), END]
            continue
        frames = 1 if part == "i" else draw.randint(1, 4)
        height, width = 2 * draw.randint(1, 3), 2 * draw.randint(1, 4)
        grids[part].append((frames, height, width))
        each, token = {"llava": 16, "gemma3": 4}.get(family, height * width // 4), IMAGE if part == "i" else VIDEO
        if "qwen3" in family:  # a time before each frame
            for _ in range(frames):
                tokens += [draw.randrange(3, 120), START, *[token] * each, END]
        else:
            tokens += [START, *[token] * each * frames, END]
    found = {"tokens": torch.tensor(tokens)}
    if heard:
        mask = (torch.arange(COLUMNS) < torch.tensor(heard)[:, None]).long()
        return found | {"input_features": noise(len(heard), MELS, COLUMNS), "feature_attention_mask": mask}
    if family in ("llava", "gemma3"):
        return found | ({"pixel_values": noise(len(grids["i"]), 3, 16, 16)} if grids["i"] else {})
    for part, pixels, name in (("i", "pixel_values", "image"), ("v", "pixel_values_videos", "video")):
        if grids[part]:
            patches = sum(t * h * w for t, h, w in grids[part])
            found[pixels], found[f"{name}_grid_thw"] = noise(patches, 3 * 2 * PATCH**2), torch.tensor(grids[part])
    if family == "qwen2_5_vl" and grids["v"]:
        found["second_per_grid_ts"] = torch.tensor([1.0] * len(grids["v"]))
    return found


def plain_losses(model: Any, samples: list[dict[str, torch.Tensor]]) -> tuple[float, int]:
    """(summed loss, labels) of transformers' own model, each sample by itself; backward leaves the gradient of the
    mean."""
    labels = sum(len(each["tokens"]) - 1 for each in samples)
    total = 0.0
    for each in samples:
        tokens = each["tokens"]
        given = {name: x[None] if name == "tokens" else x for name, x in each.items()}
        given["input_ids"] = given.pop("tokens")
        if "vl" in model.config.model_type:
            given["mm_token_type_ids"] = ((tokens == IMAGE) + 2 * (tokens == VIDEO)).int()[None]
        if model.config.model_type == "gemma3":
            given["token_type_ids"] = (tokens == IMAGE).int()[None]
        logits = model(**given, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
        (loss / labels).backward()
        total += loss.item()
    return total, labels


def collated(rows: list[dict[str, Any]], *, two_way: bool = False) -> dict[str, torch.Tensor]:
    """Padded rows with their pixels, as the processors of these families give them; ``two_way``: that of Gemma 3."""
    from hdpcomm.models.media import MEDIA
    from tests.harness.tiny_huggingface import padded_rows

    tokens = [torch.as_tensor(row["tokens"]) for row in rows]
    batch = padded_rows(tokens, [torch.where(row >= IMAGE, -100, row) for row in tokens])
    for name in MEDIA:
        if given := [row[name] for row in rows if name in row]:
            batch[name] = torch.cat(given)
    if "image_grid_thw" in batch or "video_grid_thw" in batch:
        ids = batch["input_ids"]
        batch["mm_token_type_ids"] = ((ids == IMAGE) + 2 * (ids == VIDEO)).int()
    elif two_way:
        batch["token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    return batch


TEMPLATE = (
    "{% for message in messages %}{{ '<bot> ' if message['role'] == 'assistant' else '<user> ' }}"
    "{% if message['content'] is string %}{{ message['content'] }} {% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|> <|image_pad|> <|vision_end|> ' if part['type'] == 'image' else part['text'] + ' ' }}"
    "{% endfor %}{% endif %}<end> {% endfor %}{{ '<bot> ' if add_generation_prompt else '' }}"
)
WORDS = [f"w{i}" for i in range(40)]


@functools.cache
def processor_class() -> Any:
    """The processor of Qwen2.5-VL without one of videos, which would need torchvision; AutoProcessor opens folders that
    it has saved in processes that have called this."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    class Processor(Qwen2_5_VLProcessor):  # type: ignore[misc]
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **_: Any
        ) -> None:
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id, self.video_token_id = IMAGE, VIDEO
            transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    Processor.__name__ = "ProcessorOfImages"
    PROCESSOR_MAPPING.register(transformers.Qwen2_5_VLConfig, Processor, exist_ok=True)
    return Processor


def tokenizer_of(**more: Any) -> Any:
    """A tokenizer of words, with ids as in :func:`config_of`."""
    import tokenizers
    import transformers

    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    ids = {word: i for i, word in enumerate(["<pad>", "<user>", "<bot>", "<end>", "<unk>", *WORDS])}
    ids |= {word: IMAGE + i for i, word in enumerate(special)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", unk_token="<unk>",
        additional_special_tokens=special, **more,
    )  # fmt: skip


def processor() -> Any:
    """A processor of Qwen2.5-VL; ids as in :func:`config_of`."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024
    )
    return processor_class()(images, tokenizer_of(), chat_template=TEMPLATE)


def picture(seed: int) -> Any:
    """An image of noise, 8 to 32 pixels wide and high."""
    from PIL import Image

    draw = random.Random(seed)
    width, height = 8 * draw.randint(1, 4), 8 * draw.randint(1, 4)
    return Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))
