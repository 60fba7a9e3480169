"""Runs on chats with images: the losses of plain transformers on each conversation alone, on any number of ranks."""

from __future__ import annotations

import base64
import functools
import importlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.data import build_data, encoder_of, open_corpus, open_store
from hdpcomm.data.corpus import content_digest
from hdpcomm.data.images import ImageProcessor
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.media import MediaEncoder, auto_class
from hdpcomm.run import MetricsLog, RunConfig, RunResult, Saving, Watching, folder_model, read_metrics, train
from tests.harness.image_chats import (
    RATE,
    gemma_processor,
    llava_processor,
    plain_run,
    png,
    samples_of,
    save_model,
    site_of,
    summed_loss,
    write_chats,
)
from tests.harness.tiny_media import model_of, picture, processor_class

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

Ranks = Callable[..., list[Any]]
COUNTS = [0, 1, 2, 1, 0, 5, 1, 3, 20, 0, 1, 1]
STEPS, CONTEXT, BATCH = 6, 900, 300


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    processor_class()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("with spaces") / "chat.jsonl", COUNTS)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("held") / "held.jsonl", [1, 0, 2], seed=1)


def config_of(folder: str, **changed: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": folder_model(Path(folder)), "steps": STEPS, "capacity": 1000, "tokens_per_step": BATCH, "lr": RATE,
        "optimizer": "SGD", "weight_decay": 0.0, "eval_every": 1, "max_grad_norm": None,
        "schedule": hdp.run.Schedule("constant", 0),
    }  # fmt: skip
    return RunConfig(**given | changed)


def trained(
    model: str, data: str, held: str | None, out: str, cache: str, resume: str | None = None, **changed: Any
) -> RunResult:
    torch.set_num_threads(1)
    processor_class()
    saving = Saving(Path(out) / "checkpoints", every=2, keep=9, resume=resume)
    with hdp.init() as comm, MetricsLog(Path(out) / f"metrics-{comm.rank}.jsonl") as log:
        reading: dict[str, Any] = {
            "context": CONTEXT, "encoder": encoder_of(Path(model)), "cache": Path(cache), "comm": comm
        }  # fmt: skip
        corpus = open_corpus([data], **reading)
        held_out = None if held is None else open_corpus([held], **reading)
        config = config_of(model, **changed)
        return train(comm, corpus, config, saving=saving, held_out=held_out, watching=Watching(on_step=log.write))


def losses(out: Path) -> list[float]:
    return [float(str(row["loss"])) for row in read_metrics(out / "metrics-0.jsonl")]


def opened(data: Path, model: Path, context: int = CONTEXT) -> Any:
    return open_corpus([data], context=context, encoder=encoder_of(model))


@pytest.fixture(scope="module")
def expected(model: Path, chats: Path, held: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(losses, evaluations) of a plain loop over the same batches."""
    processor_class()
    corpus = open_corpus([chats], context=CONTEXT, encoder=encoder_of(model), cache=tmp_path_factory.mktemp("cache"))
    sampler = corpus.sampler(tokens=BATCH, seed=0)
    batches = [sampler.batch(step) for step in range(STEPS)]
    assert batches[-1].epoch > 0  # the second time, images are read again
    return plain_run(model, samples_of(chats, model), [batch.ids for batch in batches], samples_of(held, model))


def test_tokens_labels_and_pixels_are_those_of_the_processor(model: Path, chats: Path) -> None:
    corpus = opened(chats, model)
    assert corpus.num_images == sum(COUNTS)
    assert f"; {sum(COUNTS)} images" in corpus.describe()
    samples = samples_of(chats, model)
    assert len(corpus) == len(samples)
    for sequence, sample in enumerate(samples):
        tokens, labels = corpus.part(sequence, 0, int(corpus.lengths[sequence]))
        torch.testing.assert_close(tokens, sample["input_ids"][0])
        torch.testing.assert_close(labels[:-1], sample["labels"][0, 1:])
        media = pickle.loads(pickle.dumps(corpus)).media(sequence)
        assert bool(media) == ("pixel_values" in sample)
        if media:
            torch.testing.assert_close(media["image_grid_thw"], sample["image_grid_thw"])
            assert len(media["pixel_values"]) == len(sample["pixel_values"])
            first = 0
            for frames, height, width in sample["image_grid_thw"].tolist():
                rows = slice(first, first + frames * height * width)
                torch.testing.assert_close(media["pixel_values"][rows], sample["pixel_values"][rows])
                first = rows.stop


@pytest.mark.parametrize("size", [1, 2, 4])
def test_losses_are_those_of_a_plain_loop(
    ranks: Ranks, model: Path, chats: Path, held: Path, expected: Any, tmp_path: Path, size: int
) -> None:
    run = functools.partial(trained, capacity={1: 1000, 2: 150, 4: 70}[size])
    results = ranks(size, run, str(model), str(chats), str(held), str(tmp_path), str(tmp_path / "c"))
    assert losses(tmp_path) == pytest.approx(expected[0], rel=1e-5)
    found = [each.loss for each in results[0].evaluations["balanced"]]
    assert found == pytest.approx(expected[1], rel=1e-5)


def decoding(model: str, data: str, cache: str) -> tuple[list[str], list[int]]:
    """(the thread that made each image's pixels, images of each step) of a run."""
    threads: list[str] = []
    made = ImageProcessor.__call__

    def noted(processor: ImageProcessor, *given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return made(processor, *given)

    with pytest.MonkeyPatch.context() as patch:
        torch.set_num_threads(1)
        processor_class()
        with hdp.init() as comm:
            reading: dict[str, Any] = {"context": CONTEXT, "encoder": encoder_of(Path(model)), "cache": Path(cache)}
            corpus = open_corpus([data], comm=comm, **reading)
            patch.setattr(ImageProcessor, "__call__", noted)
            train(comm, corpus, config_of(model, capacity=150, eval_every=0))
            sampler = corpus.sampler(tokens=BATCH, seed=0)
            counts = [sum(len(corpus.items(i)) for i in sampler.batch(step).ids) for step in range(STEPS)]
    return threads, counts


def test_images_are_decoded_while_the_step_before_runs(ranks: Ranks, model: Path, chats: Path, tmp_path: Path) -> None:
    """But for those of the first step; each once, by the rank that encodes it."""
    found = ranks(2, decoding, str(model), str(chats), str(tmp_path / "cache"))
    counts = found[0][1]
    threads = [name for own, _ in found for name in own]
    assert len(threads) == sum(counts)
    assert sum(name.startswith("hdpcomm-images") for name in threads) == sum(counts[1:]) > 10


def seconds_of_dry_run(model: str, data: str, cache: str) -> float:
    module = importlib.import_module("hdpcomm.run.dry_run")  # its package has a function of that name
    processor_class()
    with hdp.init() as comm:
        reading: dict[str, Any] = {"context": CONTEXT, "encoder": encoder_of(Path(model)), "cache": Path(cache)}
        corpus = open_corpus([data], comm=comm, **reading)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "encoding_s", lambda *_: 1000.0)
            found = module.dry_run(comm, corpus, config_of(model, capacity=150))
        return float(found.reports["balanced"][0].step_s)


def test_a_dry_run_counts_the_encoder(ranks: Ranks, model: Path, chats: Path, tmp_path: Path) -> None:
    assert 1000 < ranks(2, seconds_of_dry_run, str(model), str(chats), str(tmp_path / "cache"))[0] < 1100


def test_a_run_goes_on_on_other_ranks(
    ranks: Ranks, model: Path, chats: Path, held: Path, expected: Any, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    for folder in (whole, out):
        folder.mkdir()
    common = (str(tmp_path / "c"),)
    ranks(2, functools.partial(trained, steps=4), str(model), str(chats), str(held), str(whole), *common)
    found = ranks(3, trained, str(model), str(chats), str(held), str(out), *common, str(whole / "checkpoints/step-4"))
    assert losses(out) == pytest.approx(expected[0][4:], rel=1e-5)
    assert [each.loss for each in found[0].evaluations["balanced"]] == pytest.approx(expected[1][4:], rel=1e-5)


OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (2, {"pipeline": 2}), (4, {"pipeline": 2, "zero": 2, "recompute": "full"}), (2, {"tensor": 2, "recompute": "full"}),
    (2, {"zero": 3}), (2, {"recompute": 2, "offload": 1 << 20}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "options"), OPTIONS, ids=lambda each: "-".join(each) if isinstance(each, dict) else str(each)
)
def test_with_other_options(
    ranks: Ranks, model: Path, chats: Path, expected: Any, tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    given = (str(model), str(chats), None, str(tmp_path), str(tmp_path / "c"))
    ranks(size, functools.partial(trained, steps=2, **options), *given)
    assert losses(tmp_path) == pytest.approx(expected[0][:2], rel=1e-5)
    again = functools.partial(trained, steps=4, offload=options.get("offload", 0))
    ranks(1, again, *given, str(tmp_path / "checkpoints/step-2"))
    assert losses(tmp_path)[-2:] == pytest.approx(expected[0][2:4], rel=1e-5)


def test_documents_whose_images_would_be_cut_are_left_out(model: Path, chats: Path) -> None:
    whole = opened(chats, model)
    (item, *_) = whole.items(int(whole.lengths.argmax()))[9:]
    context = item.start + 1
    corpus = opened(chats, model, context)
    assert len(corpus.left_out) == corpus.summary().left_out > 0
    names = [corpus.sources[0].name_of(document) for document in corpus.left_out]
    assert f"; {len(names)} document" in corpus.describe()
    assert names[0] in corpus.describe()
    for sequence in range(len(corpus)):
        length = int(corpus.lengths[sequence])
        tokens = corpus.read(sequence)
        marked = torch.zeros(length, dtype=torch.bool)
        for item in corpus.items(sequence):
            marked[item.start : item.start + item.tokens] = True
        torch.testing.assert_close(tokens == 120, marked)
    cut = {whole.documents[document, 2] for document in corpus.left_out}
    assert min(cut) > context
    assert 0 < len(corpus) < len(whole)
    with pytest.raises(InvalidUsage, match="a context of 3 tokens cuts an image of each document; raise --context"):
        opened(write_chats(chats.parent / "all.jsonl", [1, 2]), model, 3)


def test_a_long_document_is_cut_between_images(model: Path, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "long.jsonl", [1] * 12)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    turns = [message for row in rows for message in row["messages"]]
    images = [image for row in rows for image in row.get("images", [])]
    path.write_text(json.dumps({"messages": turns, "images": images}) + "\n")
    whole = opened(path, model)
    items = whole.items(0)
    context = next(
        context for context in range(80, int(whole.lengths[0]))
        if all(item.start // context == (item.start + item.tokens - 1) // context for item in items)
    )  # fmt: skip
    corpus = opened(path, model, context)
    assert len(corpus) > 1
    assert sum(len(corpus.items(piece)) for piece in range(len(corpus))) == len(items) == 12
    encoder = MediaEncoder.of(model_of("qwen2_5_vl", torch.float32))
    assert encoder is not None
    every, first = {"tokens": whole.read(0), **whole.media(0)}, 0
    for piece in range(len(corpus)):
        given = {"tokens": corpus.read(piece), **corpus.media(piece)}
        assert encoder.items(given) == corpus.items(piece)
        numbers = range(len(corpus.items(piece)))
        found = encoder.encode([(given, numbers)], torch.device("cpu"))
        wanted = encoder.encode([(every, [first + number for number in numbers])], torch.device("cpu"))
        torch.testing.assert_close(found, wanted)
        first += len(numbers)


def one(tmp_path: Path, content: Any, *, beside: Any = None, answer: str = "w1 w2", **more: Any) -> Path:
    """A file of one conversation, behind a line of text."""
    path = tmp_path / "chat.jsonl"
    rows = [{"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}]
    rows.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}], **more})
    if beside is not None:
        rows[1]["images"] = beside
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "good.png").write_bytes(png(picture(1)))
    (tmp_path / "broken.png").write_bytes(png(picture(1))[:60])
    (tmp_path / "text.png").write_text("no image")
    return path


IMAGE: dict[str, Any] = {"type": "image", "image": "good.png"}
WRONG: dict[str, tuple[Any, Any, str]] = {
    "a missing file": ([{**IMAGE, "image": "no.png"}], None, ":2: image no.png is no file, and no base64; give a path"),
    "a broken image": ([{**IMAGE, "image": "broken.png"}], None, r":2: image .*/broken.png cannot be read \("),
    "no image": ([{**IMAGE, "image": "text.png"}], None, r":2: image .*/text.png cannot be read \(cannot identify"),
    "broken base64": ([{"type": "image", "base64": "AAAA"}], None, ":2: image of 3 bytes cannot be read"),
    "no base64": ([{"type": "image", "base64": "good.png"}], None, "good.png is no file, and no base64"),
    "from a network": ([{"type": "image", "url": "https://x/y.png"}], None, "image 'https://x/y.png' is no path"),
    "a number": ([{**IMAGE, "image": 7}], None, "image 7 is no path, base64 or bytes"),
    "a placeholder without": ([{"type": "image"}], None, ":2: 0 images are given beside the messages, which have 1"),
    "one too many": ([{"type": "image"}], ["good.png"] * 2, "2 images are given beside the messages, which have 1"),
    "none of the user": ([{"type": "text", "text": "w1"}], ["good.png"], "1 images are given .* which have 0"),
    "no list": ("w1", "good.png", ":2: the field 'images' holds a str, a list of images was expected"),
    "a placeholder as text": ("w1 <|image_pad|>", None, r":2: 0 images are given, and their token \(120\) is 1 times"),
    "one more as text": (
        [IMAGE, {"type": "text", "text": "<|image_pad|>"}], None, r"1 images are given, and their token \(120\) is 2"
    ),
    "a video": ([{"type": "video", "video": "a.mp4"}], None, ":2: a message holds video; leave it out, or give frames"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_with_its_line(case: str, model: Path, tmp_path: Path) -> None:
    content, beside, message = WRONG[case]
    with pytest.raises(InvalidUsage, match=message):
        opened(one(tmp_path, content, beside=beside), model)


def test_forms_of_an_image(model: Path, tmp_path: Path) -> None:
    data = png(picture(1))
    text = base64.b64encode(data).decode()
    url = {"url": f"data:image/png;base64,{text}"}
    forms: list[dict[str, Any]] = [
        {"image": "good.png"}, {"image": str(tmp_path / "good.png")}, {"url": f"file://{tmp_path}/good.png"},
        {"path": "./good.png"}, {"base64": text}, {"image": text}, url, {"image": {"path": "good.png", "bytes": None}},
        {"image": {"bytes": text}}, {"type": "image_url", "image_url": url}, {"text": None, "image": "good.png"},
    ]  # fmt: skip
    corpus = opened(one(tmp_path, [{"type": "image", **form} for form in forms]), model)
    pixels = corpus.media(1)["pixel_values"]
    rows = len(pixels) // len(forms)
    for number in range(1, len(forms)):
        torch.testing.assert_close(pixels[rows * number : rows * (number + 1)], pixels[:rows])
    beside = opened(one(tmp_path, "w1", beside=["good.png"] * 2), model)  # as TRL has them
    explicit = opened(one(tmp_path, [IMAGE, IMAGE, {"type": "text", "text": "w1"}]), model)
    torch.testing.assert_close(beside.read(1), explicit.read(1))


def test_images_of_odd_kinds(model: Path, tmp_path: Path) -> None:
    wide = Image.effect_noise((3000, 2000), 50)
    kinds = [
        Image.new("RGB", (1, 1)),
        picture(3).convert("RGBA"),
        picture(4).convert("L"),
        picture(5).convert("P"),
        wide,
    ]
    kinds += [Image.new("1", (9, 31)), Image.new("I;16", (20, 8)), Image.new("CMYK", (8, 8)), Image.new("LA", (8, 3))]
    for number, image in enumerate(kinds):
        suffix = "jpg" if image.mode == "CMYK" else "png"
        image.save(tmp_path / f"{number}.{suffix}")
    files = sorted(tmp_path.glob("[0-9].*"))
    path = one(tmp_path, [{"type": "image", "image": file.name} for file in files])
    (sample,) = samples_of(path, model)[1:]
    corpus = opened(path, model)
    torch.testing.assert_close(corpus.read(1), sample["input_ids"][0])
    first = 0
    for frames, height, width in corpus.media(1)["image_grid_thw"].tolist():
        rows = slice(first, first + frames * height * width)
        torch.testing.assert_close(corpus.media(1)["pixel_values"][rows], sample["pixel_values"][rows])
        first = rows.stop
    Image.new("RGB", (500, 2)).save(tmp_path / "flat.png")
    with pytest.raises(InvalidUsage, match=r":2: image .*/flat.png cannot be read \(absolute aspect ratio"):
        opened(one(tmp_path, [{"type": "image", "image": "flat.png"}]), model)


def test_parquet_and_datasets(model: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = []
    for number in range(4):
        parts = [*[{"type": "image", "text": None}] * number, {"type": "text", "text": "w1 w2"}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"w{number}"}]}
        pictures = [picture(10 * number + place) for place in range(number)]
        rows.append({"messages": [{"role": "user", "content": parts}, answer], "images": pictures})
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(str(tmp_path / "set"))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    lines = [{**row, "images": [{"bytes": base64.b64encode(png(x)).decode()} for x in row["images"]]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = sorted((tmp_path / "set").iterdir())
    one, *others = [opened(tmp_path / name, model) for name in ("rows.jsonl", "set", "rows.parquet")]
    assert sorted((tmp_path / "set").iterdir()) == before  # nothing is written into the user's folder
    assert one.num_images == 6
    for other in others:
        for sequence in range(4):
            torch.testing.assert_close(other.read(sequence), one.read(sequence))
            assert other.items(sequence) == one.items(sequence)
        rows_of = slice(0, one.items(1)[0].patches)
        torch.testing.assert_close(other.media(1)["pixel_values"][rows_of], one.media(1)["pixel_values"][rows_of])


def test_a_store_of_any_number_of_ranks_is_the_same(ranks: Ranks, model: Path, chats: Path, tmp_path: Path) -> None:
    alone = opened(chats, model)
    ranks(3, built, str(chats), str(tmp_path / "store"), str(model))
    corpus = opened(tmp_path / "store", model)
    assert open_store(tmp_path / "store").check() > 0
    torch.testing.assert_close(torch.tensor(corpus.images[:, :7]), torch.tensor(alone.images[:, :7]))
    for sequence in range(len(alone)):
        torch.testing.assert_close(corpus.read(sequence), alone.read(sequence))


def built(chats: str, out: str, model: str) -> None:
    processor_class()
    with hdp.init() as comm:
        build_data([chats], Path(out), encoder=encoder_of(Path(model)), comm=comm)


def test_images_that_moved_or_changed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = write_chats(tmp_path / "a/chat.jsonl", [1, 1])
    store = build_data([path], tmp_path / "store", encoder=encoder_of(model))
    corpus = opened(store.path, model)
    shutil.move(tmp_path / "a", tmp_path / "b")
    with pytest.raises(InvalidUsage, match=r"image .*chat 1-0.png cannot be read any more \(No such file"):
        corpus.media(1)["pixel_values"][0:4]
    with pytest.raises(InvalidUsage, match=r"put it back, or delete .*/store and build it again"):
        store.check()
    shutil.move(tmp_path / "b", tmp_path / "a")
    assert len(corpus.media(1)["pixel_values"][0:4]) == 4
    image = next((tmp_path / "a/my images").glob("chat 1-0.png"))
    image.write_bytes(png(picture(77)))
    with pytest.raises(InvalidUsage, match=r"image .*chat 1-0.png has changed; put it back"):
        opened(store.path, model).media(1)["pixel_values"][0:4]


def test_models_and_folders_that_take_no_images(model: Path, chats: Path, tmp_path: Path) -> None:
    from hdpcomm.models import LlamaConfig
    from hdpcomm.run.limits import check_limits

    with pytest.raises(InvalidUsage, match=r"chat.jsonl:2: the content of message 0 .*images need the folder"):
        open_corpus([chats], context=CONTEXT)
    plain = tmp_path / "text"
    shutil.copytree(model, plain)
    (plain / "processor_config.json").unlink()
    with pytest.raises(InvalidUsage, match=r"chat.jsonl:2: the content of message 0 .*images need the folder"):
        opened(chats, plain)
    (plain.rename(tmp_path / "other") / "processor_config.json").write_text("{}")
    with pytest.raises(InvalidUsage, match=r"the data has images, and transformers loads no processor of images there"):
        opened(chats, tmp_path / "other")
    corpus = opened(chats, model)
    for changed, name in (
        ({"model": LlamaConfig()}, "a model of text (the built-in Llama; known with images are qwen2_vl"),
        ({"queue": True}, "--queue"), ({"policies": ("balanced", "ddp")}, "--compare ddp"),
        ({"memory": 1 << 30, "recompute": "auto"}, "--memory"),
    ):  # fmt: skip
        with pytest.raises(InvalidUsage, match=re.escape(f"the data has images, which do not go together with {name}")):
            check_limits(corpus, config_of(str(model), **changed), ranks=1)


@pytest.mark.timeout(300)  # three interpreters import transformers, twice
def test_the_command_trains_evaluates_and_goes_on_after_a_kill(
    model: Path, chats: Path, held: Path, tmp_path: Path
) -> None:
    out, env = tmp_path / "run", os.environ | site_of(tmp_path / "site")
    arguments = ["-m", "hdpcomm.cli.main", "train", "--model", str(model), "--data", str(chats), "--out", str(out)]
    arguments += ["--eval-data", str(held), "--eval-every", "4", "--steps", "12", "--lr", "0.01", "--context", "900"]
    arguments += ["--tokens-per-step", "300", "--save-every", "3", "--trackers", "none", "--ranks", "2"]
    start = functools.partial(subprocess.Popen, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with start([sys.executable, *arguments]) as process:  # a new interpreter, which reads sitecustomize
        lines = []
        while not (lines := [*lines, process.stderr.readline()])[-1].startswith("hdpcomm: step 5/"):
            assert process.poll() is None, lines
        process.kill()
        process.communicate(timeout=60)
    exported = tmp_path / "exported"
    with start([sys.executable, *arguments, "--resume", "auto", "--export", str(exported)]) as process:
        printed, told = process.communicate(timeout=100)
    assert process.returncode == 0, told
    assert f"; {sum(COUNTS)} images" in printed
    rows = read_metrics(out / "metrics.jsonl")
    found = [float(str(row["loss"])) for row in rows]
    assert len(found) == 12
    assert found[-1] < found[0]
    evaluations = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    assert evaluations[-1]["step"] == 12
    weights = auto_class("qwen2_5_vl").from_pretrained(exported)
    assert any(
        not torch.equal(a, b) for a, b in zip(weights.parameters(), model_of("qwen2_5_vl").parameters(), strict=True)
    )
    assert type(weights).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert (exported / "processor_config.json").exists()
    with torch.no_grad():
        terms = [summed_loss(weights, sample) for sample in samples_of(held, exported)]
    loss = float(sum(loss for loss, _ in terms)) / sum(count for _, count in terms)
    assert evaluations[-1]["loss"] == pytest.approx(loss, rel=1e-4)


def test_data_that_moved_goes_on_in_a_run(model: Path, tmp_path: Path) -> None:
    digests = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        if name == "b":
            shutil.move(tmp_path / "a", tmp_path / "b")
        path = write_chats(tmp_path / "a/chat.jsonl", [1, 2]) if name == "a" else tmp_path / "b/a/chat.jsonl"
        digests.append(content_digest(opened(path, model)))
    assert digests[0] == digests[1]
    image = next((tmp_path / "b/a/my images").glob("chat 0-0.png"))
    image.write_bytes(png(picture(77).resize(Image.open(image).size)))
    os.utime(tmp_path / "b/a/chat.jsonl", (1, 1))  # built again
    assert content_digest(opened(tmp_path / "b/a/chat.jsonl", model)) != digests[0]


def test_llava(tmp_path: Path) -> None:
    folder = llava_processor(tmp_path / "llava")
    path = one(tmp_path, [IMAGE, {"type": "text", "text": "w1"}, IMAGE])
    corpus = opened(path, folder)
    made = transformers.AutoProcessor.from_pretrained(folder)
    messages = json.loads(path.read_text().splitlines()[1])["messages"]
    for message in messages:
        parts = (
            message["content"]
            if isinstance(message["content"], list)
            else [{"type": "text", "text": message["content"]}]
        )
        message["content"] = [
            part | ({"image": Image.open(tmp_path / "good.png")} if "image" in part else {}) for part in parts
        ]
    given = made.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    torch.testing.assert_close(corpus.read(1), given["input_ids"][0])
    media = corpus.media(1)
    assert media.keys() == {"pixel_values"}
    assert media["pixel_values"].shape == given["pixel_values"].shape
    torch.testing.assert_close(media["pixel_values"][1:2], given["pixel_values"][1:2])
    encoder = MediaEncoder.of(model_of("llava", torch.float32))
    assert encoder is not None
    assert encoder.items({"tokens": corpus.read(1), **media}) == corpus.items(1)
    assert corpus.media(0) == {}
    assert "w1" in made.tokenizer.decode(corpus.read(0))  # text alone, of a template that takes lists only


def gemma_losses(model: str, data: str, cache: str) -> list[float]:
    with hdp.init() as comm:
        reading: dict[str, Any] = {"context": CONTEXT, "encoder": encoder_of(Path(model)), "cache": Path(cache)}
        corpus = open_corpus([data], comm=comm, **reading)
        found = train(comm, corpus, config_of(model, capacity=200, steps=3, eval_every=0))
        return [step.loss for step in found.steps["balanced"]]


def test_gemma_3(ranks: Ranks, chats: Path, tmp_path: Path) -> None:
    """Its template has one token for an image, and its processor others; images see all of themselves."""
    folder = gemma_processor(tmp_path / "gemma3")
    samples = samples_of(chats, folder)
    corpus = opened(chats, folder)
    assert corpus.num_images == sum(COUNTS)
    for number, sample in enumerate(samples):
        tokens, labels = corpus.part(number, 0, int(corpus.lengths[number]))
        torch.testing.assert_close(tokens, sample["input_ids"][0])
        assert torch.equal(labels[:-1], sample["labels"][0, 1:])
        if "pixel_values" in sample:
            torch.testing.assert_close(corpus.media(number)["pixel_values"][0:1], sample["pixel_values"][:1])
    sampler = corpus.sampler(tokens=BATCH, seed=0)
    expected, _ = plain_run(folder, samples, [sampler.batch(step).ids for step in range(3)])
    for found in ranks(2, gemma_losses, str(folder), str(chats), str(tmp_path / "cache")):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_template_that_marks_what_the_assistant_wrote(model: Path, chats: Path, tmp_path: Path) -> None:
    marked = Path(shutil.copytree(model, tmp_path / "marked"))
    (marked / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<bot> ' }}{% generation %}{% for part in m.content %}"
        "{{ part.text + ' ' }}{% endfor %}<end>{% endgeneration %}{% else %}{{ '<user> ' }}{% for part in m.content %}"
        "{{ '<|vision_start|> <|image_pad|> <|vision_end|> ' if part.type == 'image' else part.text + ' ' }}"
        "{% endfor %}<end>{% endif %}{{ ' ' }}{% endfor %}"
    )
    found, expected = opened(chats, marked), opened(chats, model)
    for sequence in range(len(expected)):
        length = int(expected.lengths[sequence])
        for one, other in zip(found.part(sequence, 0, length), expected.part(sequence, 0, length), strict=True):
            torch.testing.assert_close(one, other)
