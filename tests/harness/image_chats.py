"""Chats with images in files, the folder of a tiny Qwen2.5-VL, and plain transformers training on both."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.harness.tiny_media import WORDS, model_of, picture, processor, processor_class, tokenizer_of

RATE = 0.05
_BOT, _END, _IMAGE = 2, 3, 120


def save_model(folder: Path) -> Path:
    """A folder as users have them: weights, tokenizer, processor and chat template."""
    model_of("qwen2_5_vl", torch.float32).save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


def site_of(folder: Path) -> dict[str, str]:
    """Environment of processes in which AutoProcessor opens :func:`save_model`."""
    folder.mkdir()
    text = "from tests.harness.tiny_media import processor_class\nprocessor_class()\n"
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}


def png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def words(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


def write_chats(path: Path, counts: Sequence[int], seed: int = 0) -> Path:
    """A conversation for each of ``counts``, with so many images, whose files lie in ``images`` beside it, or which are
    in the line as base64; of one image every third time in a column of its own."""
    draw = random.Random(seed)
    (path.parent / "my images").mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number, count in enumerate(counts):
            parts: list[dict[str, Any]] = []
            for place in range(count):
                data = png(picture(100 * seed + 10 * number + place))
                name = f"my images/{path.stem} {number}-{place}.png"
                (path.parent / name).write_bytes(data)
                parts.append({"type": "text", "text": words(draw, 1, 4)})
                given = {"base64": base64.b64encode(data).decode()} if place % 2 else {"image": name}
                parts.append({"type": "image", **given})
            record: dict[str, Any] = {}
            if count == 1 and number % 3 == 0:
                record["images"] = [parts[1].pop("image")]
            asked = [*parts, {"type": "text", "text": words(draw, 1, 5)}] if count else words(draw, 1, 5)
            messages = [{"role": "user", "content": asked}]
            messages.append({"role": "assistant", "content": words(draw, 1, 8)})
            if number % 2:
                messages.append({"role": "user", "content": words(draw, 1, 3)})
                messages.append({"role": "assistant", "content": [{"type": "text", "text": words(draw, 1, 8)}]})
            file.write(json.dumps({"messages": messages, **record}) + "\n")
    return path


def samples_of(path: Path, folder: Path) -> list[dict[str, Any]]:
    """Each conversation by itself as the processor makes it; ``labels`` of the assistant's words."""
    import transformers
    from PIL import Image

    processor_class()
    made = transformers.AutoProcessor.from_pretrained(folder)
    found = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        beside = list(record.get("images", []))
        for message in record["messages"]:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            for part in message["content"]:
                if part["type"] == "image":
                    source = part.pop("base64", None)
                    name = part.get("image") or (None if source else beside.pop(0))
                    file = io.BytesIO(base64.b64decode(source)) if source else path.parent / name
                    part["image"] = Image.open(file)
        given = made.apply_chat_template(record["messages"], tokenize=True, return_dict=True, return_tensors="pt")
        tokens, said, labels = given["input_ids"][0].tolist(), False, []
        for token in tokens:
            labels.append(token if said else -100)
            said = (said or token == _BOT) and token != _END
        found.append(dict(given) | {"labels": torch.tensor([labels])})
    return found


def summed_loss(model: Any, sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    labels = sample["labels"][0, 1:]
    given = {name: value for name, value in sample.items() if name != "labels"}
    logits = model(**given, use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    return loss, int((labels != -100).sum())


def plain_run(
    folder: Path, samples: Sequence[dict[str, Any]], batches: Sequence[Sequence[int]],
    held_out: Sequence[dict[str, Any]] = (),
) -> tuple[list[float], list[float]]:  # fmt: skip
    """(loss of each step, mean loss of held-out samples after each) of a loop over one sample at a time."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses, evaluations = [], []
    for batch in batches:
        terms = [summed_loss(model, samples[number]) for number in batch]
        labels = sum(count for _, count in terms)
        mean = torch.stack([loss for loss, _ in terms]).sum() / labels
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
        with torch.no_grad():
            terms = [summed_loss(model, sample) for sample in held_out]
            evaluations.append(float(sum(loss for loss, _ in terms)) / max(1, sum(count for _, count in terms)))
    return losses, evaluations


def gemma_processor(folder: Path) -> Path:
    """Gemma 3's own processor, whose template has another token for an image than the model; the model beside it."""
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    template = (
        "{% for m in messages %}{{ '<bot> ' if m.role == 'assistant' else '<user> ' }}"
        "{% if m.content is string %}{{ m.content }} {% else %}{% for part in m.content %}"
        "{{ '<|vision_start|>' if part.type == 'image' else part.text + ' ' }}{% endfor %}{% endif %}<end> {% endfor %}"
        "{{ '<bot> ' if add_generation_prompt else '' }}"
    )
    names = {"boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>", "image_token": "<|image_pad|>"}
    tokenizer = tokenizer_of(extra_special_tokens=names)
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    made = transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    model_of("gemma3", torch.float32).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def llava_processor(folder: Path) -> Path:
    """A processor of Llava whose template takes contents as lists alone, and whose tokenizer begins a text."""
    import tokenizers
    import transformers

    template = (
        "{% for m in messages %}{{ '<bot> ' if m.role == 'assistant' else '<user> ' }}"
        "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<|image_pad|> {% endfor %}"
        "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }} {% endfor %}<end> "
        "{% endfor %}"
    )
    tokenizer = tokenizer_of(bos_token="<pad>")
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<pad> $A", pair="<pad> $A $B", special_tokens=[("<pad>", 0)]
    )
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    made = transformers.LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        image_token="<|image_pad|>", chat_template=template,
    )  # fmt: skip
    made.save_pretrained(folder)
    return folder
