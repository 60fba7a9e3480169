"""From text and conversations to tokens: bytes, or the tokenizer of a model folder. Only what the assistant wrote in a
conversation counts for the loss."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hdpcomm.data.images import EncodedImage, ImageProcessor, Picture
from hdpcomm.errors import InvalidUsage, first_line
from hdpcomm.files import read_text

__all__ = [
    "ByteEncoder", "Encoder", "FolderEncoder", "assistant_spans", "check_tokens", "encoder_of", "has_tokenizer",
    "plain_chat",
]  # fmt: skip

Tokens = npt.NDArray[np.int64]
Counted = npt.NDArray[np.bool_]
Message = Mapping[str, Any]
Span = tuple[int, int]
_FILES = ("tokenizer*.json", "tokenizer*.model", "special_tokens_map.json", "added_tokens.json", "chat_template*")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_VOCABULARIES = ("vocab.*", "merges.txt", "spiece.model", "sentencepiece*.model")


class Encoder(Protocol):
    """Makes tokens.

    Attributes:
        name: for messages.
        fingerprint: equal ones mean equal tokens for equal texts.
        vocabulary: every token is below it.
    """

    name: str
    fingerprint: str
    vocabulary: int

    def text(self, text: str | bytes) -> Tokens:
        """The tokens of a document."""

    def chat(self, messages: Sequence[Any], where: object) -> tuple[Tokens, Counted]:
        """(tokens, which of them the assistant wrote) of a conversation. Raises: InvalidUsage, see ``where``."""


class ByteEncoder:
    """A token a byte of UTF-8."""

    name = "byte"
    fingerprint = "bytes"
    vocabulary = 256

    def text(self, text: str | bytes) -> Tokens:
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int64)

    def chat(self, messages: Sequence[Any], where: object) -> tuple[Tokens, Counted]:
        text, spans = plain_chat(checked_messages(messages, where))
        tokens = self.text(text)
        counted = np.zeros(len(tokens), dtype=np.bool_)
        for begin, end in spans:
            first = len(_utf8(text[:begin]))
            counted[first : first + len(_utf8(text[begin:end]))] = True
        return tokens, counted


class FolderEncoder:
    """The tokenizer of a model folder, by transformers. A document ends with the tokenizer's end of sequence.

    Args:
        folder: as ``save_pretrained`` writes it; nothing is downloaded, and no code of the folder is run.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise InvalidUsage("transformers is needed; pip install 'hdpcomm[huggingface]'") from error
        if not folder.is_dir():
            raise InvalidUsage(f"{folder}: no such folder; give the folder of a model with its tokenizer")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if not self._tokenizer.chat_template and (folder / "chat_template.json").is_file():  # of older processors
                self._tokenizer.chat_template = json.loads(read_text(folder / "chat_template.json"))["chat_template"]
            config = json.loads(read_text(folder / "config.json")) if (folder / "config.json").is_file() else {}
        except Exception as error:  # transformers and tokenizers raise many kinds, down to bare Exception
            raise InvalidUsage(f"{folder} holds no tokenizer that transformers can load: {first_line(error)}") from None
        self.name = folder.resolve().name
        self.fingerprint = _fingerprint(folder)
        self.vocabulary = len(self._tokenizer)
        template = self._tokenizer.chat_template
        self._marked = isinstance(template, str) and bool(re.search(r"{%-?\s*generation\b", template))
        self.folder, processors = folder, any((folder / name).is_file() for name in _PROCESSORS)
        self._lists = processors and isinstance(template, str) and "image" in template  # contents are lists of parts
        self._placeholder = int(config.get("image_token_id", config.get("image_token_index", -1)))
        self._patch = int(config.get("vision_config", {}).get("patch_size", 14))
        self._opening: str = getattr(self._tokenizer, "boi_token", None) or ""  # Gemma 3's template has this alone

    def text(self, text: str | bytes) -> Tokens:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        tokens = list(self._tokenizer(text, verbose=False)["input_ids"])
        end = self._tokenizer.eos_token_id
        if text and end is not None and (not tokens or tokens[-1] != end):
            tokens.append(end)
        return np.array(tokens, dtype=np.int64)

    def chat(self, messages: Sequence[Any], where: object) -> tuple[Tokens, Counted]:
        checked = checked_messages(messages, where, lists=self._lists)
        if not self._tokenizer.chat_template:
            return self._spans(*plain_chat(checked), where)
        if self._marked:
            out = self._template(
                checked, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, verbose=False
            )
            found = np.array(out["input_ids"], dtype=np.int64), np.array(out["assistant_masks"], dtype=np.bool_)
        else:
            spans = assistant_spans(lambda part, ask: self._render(part, where, ask), checked, where)
            found = self._spans(*spans, where)
        bos = self._tokenizer.bos_token_id  # which processors, unlike tokenizers, add where a template has none
        if not self._lists or list(found[0][:1]) == [bos] or self._tokenizer("")["input_ids"][:1] != [bos]:
            return found
        return np.insert(found[0], 0, bos), np.insert(found[1], 0, False)

    def with_images(
        self, tokens: Tokens, counted: Counted | None, pictures: Sequence[Picture], where: object
    ) -> tuple[Tokens, Counted | None, list[EncodedImage]]:
        """:meth:`chat` with as many tokens in the place of each placeholder as its image takes, and the images. Raises:
        InvalidUsage, see ``where``."""
        token = self.processor.token if pictures else self._placeholder
        places = np.flatnonzero(tokens == token)
        if not len(places) and not pictures:
            return tokens, counted, []
        sizes = [self.processor.sizes(picture, where) for picture in pictures]
        counts = np.array([each[0] for each in sizes], dtype=np.int64)
        repeats = np.ones(len(tokens), dtype=np.int64)
        if self._opening and len(places) == counts.sum():  # the text had all of each image
            places = places[np.cumsum(counts) - counts]
        elif len(places) == len(pictures):
            repeats[places] = counts
        else:
            raise InvalidUsage(
                f"{where}: {len(pictures)} images are given, and their token ({token}) is {len(places)} times in the "
                "text; give as many, and the placeholder nowhere as text"
            )
        starts = (np.cumsum(repeats) - repeats)[places].tolist()
        images = [(picture, (start, *each)) for picture, start, each in zip(pictures, starts, sizes, strict=True)]
        counted = None if counted is None else np.repeat(counted & (tokens != token), repeats)
        return np.repeat(tokens, repeats), counted, images

    @cached_property
    def processor(self) -> ImageProcessor:
        """Processor of the folder. Raises: InvalidUsage."""
        return ImageProcessor(self.folder, self._placeholder, self._patch)

    def _render(self, messages: Sequence[Message], where: object, ask: bool) -> str:
        text = str(self._template(messages, where, tokenize=False, add_generation_prompt=ask))
        return self.processor.expanded(text) if self._opening and self._opening in text else text

    def _template(self, messages: Sequence[Message], where: object, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:  # templates raise what they like, as for roles that do not alternate
            raise InvalidUsage(f"{where}: the chat template refuses this conversation: {error}") from None

    def _spans(self, text: str, spans: Sequence[tuple[int, int]], where: object) -> tuple[Tokens, Counted]:
        if not self._tokenizer.is_fast:
            raise InvalidUsage(
                f"{where}: the tokenizer of {self.name} does not tell which characters a token has; give one with a "
                "tokenizer.json, or a chat template that marks the assistant's turns by {% generation %}"
            )
        out = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        begins = np.array([begin for begin, _ in out["offset_mapping"]], dtype=np.int64)
        counted = np.zeros(len(begins), dtype=np.bool_)
        for begin, end in spans:
            counted |= (begins >= begin) & (begins < end)
        return np.array(out["input_ids"], dtype=np.int64), counted


def check_tokens(tokens: Tokens, name: str, vocabulary: int, where: object) -> None:
    """Raises InvalidUsage that begins with ``where`` unless the tokenizer ``name`` has all of these tokens."""
    if len(odd := tokens[(tokens < 0) | (tokens >= vocabulary)][:1]):
        raise InvalidUsage(
            f"{where}: token {int(odd[0]):,}, and {name} has {vocabulary:,}; give the tokenizer that made these tokens "
            "(--tokenizer)"
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder brings a tokenizer."""
    return any(any(folder.glob(name)) for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model"))


@lru_cache(maxsize=8)
def encoder_of(folder: Path | None) -> Encoder:
    """The encoder of a model folder; ``None``: bytes. Raises: InvalidUsage if the folder has no tokenizer."""
    return ByteEncoder() if folder is None else FolderEncoder(Path(folder))


def _fingerprint(folder: Path) -> str:
    import transformers

    digest = hashlib.sha256(transformers.__version__.encode())
    names = (*_FILES, *_VOCABULARIES, *_PROCESSORS)
    for path in sorted({path for name in names for path in folder.glob(name) if path.is_file()}):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _utf8(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def checked_messages(messages: Sequence[Any], where: object, *, lists: bool = False) -> list[Message]:
    """Messages with a role and a text each, or with ``lists`` a list of texts and images. Raises: InvalidUsage that
    begins with ``where``."""
    if not messages:
        raise InvalidUsage(f"{where}: this conversation has no message")
    checked: list[Message] = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidUsage(
                f"{where}: message {place} is {_short(message)}; an object with a 'role' and a 'content' was expected"
            )
        content = message.get("content")
        if isinstance(content, list) and all(_is_part(part, lists) for part in content):
            texts = [{"type": "text", "text": str(part["text"])} if "text" in part else part for part in content]
            content = texts if lists else "".join(part["text"] for part in texts)
        elif isinstance(content, str):
            content = [{"type": "text", "text": content}] if lists else content
        else:
            raise InvalidUsage(
                f"{where}: the content of message {place} is {_short(content)}; text was expected (images need the "
                "folder of a model with a processor and a chat template for them; tool calls are not supported)"
            )
        checked.append({"role": message["role"], "content": content})
    return checked


def _is_part(part: Any, images: bool) -> bool:
    return isinstance(part, Mapping) and (part.get("text") is not None or (images and part == {"type": "image"}))


def plain_chat(messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """The template for tokenizers without one: ``<|role|>``, the text, ``<|end|>``, each on a line of its own.

    Returns (text, spans of characters that the assistant wrote, with the end that it has to write, too).

    Examples:
        >>> plain_chat([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}])
        ('<|user|>\\nhi\\n<|end|>\\n<|assistant|>\\nyes\\n<|end|>\\n', [(34, 46)])
    """
    text, spans = "", []
    for message in messages:
        text += f"<|{message['role']}|>\n"
        begin = len(text)
        text += f"{message['content']}\n<|end|>\n"
        if message["role"] == "assistant":
            spans.append((begin, len(text)))
    return text, spans


def assistant_spans(
    render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message], where: object
) -> tuple[str, list[Span]]:
    """(text, spans of characters that the assistant wrote) of a conversation under a chat template.

    A turn begins where the text of all messages before it ends, with the header that asks for an answer, and ends where
    the text of all messages up to it ends. Templates that show an earlier turn in another way once others follow (as
    those that leave out its reasoning) break this; then the turn is found by its content and by what follows it.

    Args:
        render: ``render(messages, add_generation_prompt)``.

    Raises: InvalidUsage that begins with ``where``: a turn cannot be found in the text.
    """
    whole = render(messages, False)
    spans: list[Span] = []
    cursor = 0
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:place], True) if place else ""
        upto = render(messages[: place + 1], False)
        if whole.startswith(upto) and upto.startswith(before) and len(before) >= cursor:
            span = (len(before), len(upto))
        else:
            content = message["content"]
            text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            span = _by_content(whole, upto, text.strip(), cursor, place, where)
        spans.append(span)
        cursor = span[1]
    return whole, spans


def _by_content(whole: str, upto: str, content: str, cursor: int, place: int, where: object) -> Span:
    ending = upto[upto.rindex(content) + len(content) :] if content and content in upto else None
    begin = whole.find(content, cursor) if ending is not None else -1
    if ending is None or begin < 0 or not whole.startswith(ending, begin + len(content)):
        raise InvalidUsage(
            f"{where}: message {place} of the assistant cannot be found in what the chat template makes of the "
            "conversation; give a template that marks it by {% generation %}"
        )
    return begin, begin + len(content) + len(ending)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
