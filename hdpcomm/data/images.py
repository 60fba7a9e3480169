"""Images of conversations: where a record names or holds them, and what the model's processor makes of them."""

from __future__ import annotations

import base64
import io
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hdpcomm.errors import InvalidUsage, first_line

__all__ = ["EncodedImage", "ImageProcessor", "LazyPixels", "Picture", "take_pictures"]

_SOURCES = ("bytes", "image", "image_url", "url", "path", "base64")


class Picture(NamedTuple):
    """An image as its file has it; ``path``: of a file of its own."""

    data: bytes
    path: str = ""


EncodedImage = tuple[Picture, tuple[int, ...]]
"""An image, and its first token and :meth:`ImageProcessor.sizes`."""


def take_pictures(
    messages: Sequence[Any], images: Sequence[Any], where: object, folder: Path | None
) -> tuple[list[Any], list[Picture]]:
    """(messages with bare placeholders, the images for them). Local.

    Args:
        images: for the placeholders without one, in order; without any placeholder, they stand before the text of the
            first user, as TRL has them.
        folder: paths are relative to it; ``None``: there is none, so images are inside the record.

    Raises: InvalidUsage that begins with ``where``: an image that cannot be read, too few or too many, or a video.
    """
    taken = [dict(each) if isinstance(each, Mapping) else each for each in messages]
    known = [each for each in taken if isinstance(each, dict)]
    if images and not any(_is_image(part) for each in known for part in _parts(each)):
        asked = [each for each in known if each.get("role") == "user" and isinstance(each.get("content"), str)]
        for each in asked[:1]:
            each["content"] = [*[{"type": "image"}] * len(images), {"type": "text", "text": each["content"]}]
    empty = sum(_is_image(part) and _source(part) is None for each in known for part in _parts(each))
    if empty != len(images):
        raise InvalidUsage(
            f"{where}: {len(images)} images are given beside the messages, which have {empty} placeholders without "
            "one; give as many"
        )
    left, pictures = iter(images), []
    for each in known:
        each["content"] = list(_parts(each)) or each.get("content")
        for place, part in enumerate(_parts(each)):
            if isinstance(part, Mapping) and part.get("type") in ("video", "audio", "input_audio"):
                raise InvalidUsage(f"{where}: a message holds {part['type']}; leave it out, or give frames as images")
            if _is_image(part):
                source = next(left) if (source := _source(part)) is None else source
                pictures.append(_picture(source, part.get("base64") is not None, where, folder))
                each["content"][place] = {"type": "image"}
    return taken, pictures


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _source(part: Mapping[str, Any]) -> Any:
    return next((part[name] for name in _SOURCES if part.get(name) is not None), None)


def _picture(source: Any, encoded: bool, where: object, folder: Path | None) -> Picture:
    if isinstance(source, Mapping):
        encoded, source = isinstance(source.get("bytes"), str), _source(source)
    if isinstance(source, bytes):
        return Picture(source)
    if not isinstance(source, str) or source.startswith(("http://", "https://")):
        raise InvalidUsage(f"{where}: image {source!r:.80} is no path, base64 or bytes; fetch it, and give its path")
    path, inline = os.path.join(folder or "", source.removeprefix("file://")), source.startswith("data:")
    if folder and not encoded and not inline and os.path.isfile(path):
        return Picture(Path(path).read_bytes(), os.path.abspath(path))
    try:
        return Picture(base64.b64decode(source.partition(",")[2] if inline else source, validate=True))
    except ValueError:
        raise InvalidUsage(
            f"{where}: image {source:.80} is no file, and no base64; give "
            f"{f'a path relative to {folder}, or ' if folder else ''}the image"
        ) from None


class ImageProcessor:
    """The processor of a model's folder, for one image at a time. Raises: InvalidUsage: there is none.

    Args:
        token: that stands for images in the model's tokens; below 0: the processor's.
        patch: rows and columns of a patch, where the processor has none.
    """

    def __init__(self, folder: Path, token: int, patch: int) -> None:
        try:
            from transformers import AutoProcessor

            self._processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self.token = token if token >= 0 else int(self._processor.image_token_id)
            self._patch = int(getattr(self._processor, "patch_size", None) or patch)
            self._one_thread = threading.Lock()  # at a time, for tokenizers refuse several
        except Exception as error:  # of many kinds, as of what processors need
            raise InvalidUsage(
                f"{folder}: the data has images, and transformers loads no processor of images there "
                f"({first_line(error)}); pip install 'hdpcomm[images]' has what processors need; or give the whole "
                "folder of a model that takes images, or data of text alone"
            ) from None

    def __call__(self, picture: Picture, where: object) -> Mapping[str, Any]:
        """Tokens, pixels and grid of an image. Raises: InvalidUsage that begins with ``where``."""
        try:
            from PIL import Image, ImageOps

            with Image.open(io.BytesIO(picture.data)) as opened:
                image = ImageOps.exif_transpose(opened)
                with self._one_thread:
                    made: Mapping[str, Any] = self._processor([image], self._processor.image_token, return_tensors="pt")
        except Exception as error:  # of Pillow and of processors
            name, why = picture.path or f"of {len(picture.data):,} bytes", first_line(error)
            raise InvalidUsage(f"{where}: image {name} cannot be read ({why}); mend it, or leave it out") from None
        return made

    def sizes(self, picture: Picture, where: object) -> tuple[int, ...]:
        """Tokens, patches, and the grid of patches by frames, rows and columns; where the model has no grids 0, and
        height and width in pixels."""
        given = self(picture, where)
        tokens = int((given["input_ids"] == self.token).sum())
        if "image_grid_thw" in given:
            frames, height, width = given["image_grid_thw"][0].tolist()
            return tokens, height * width, frames, height, width
        *_, height, width = given["pixel_values"].shape
        return tokens, (height // self._patch) * (width // self._patch), 0, height, width

    def expanded(self, text: str) -> str:
        """A text of the chat template with all that stands for an image in the place of each placeholder."""
        return text.replace(self._processor.image_token, self._processor.full_image_sequence)


class LazyPixels:
    """The pixels of a sequence's images in the place of their tensor: made when rows are taken, so on the ranks that
    encode them, and of no other image.

    Args:
        grids: of each image, by :meth:`ImageProcessor.sizes`.
        read: ``read(i)`` gives the pixels of image i.
    """

    def __init__(self, grids: Sequence[Sequence[int]], read: Callable[[int], Tensor]) -> None:
        self._rows, self._read = [max(1, t * h * w) for t, h, w in grids], read
        self.shape = (sum(self._rows), *(() if grids[0][0] else (3, *grids[0][1:])))
        self._made: dict[int, Tensor] = {}  # an encoder that computes again asks twice

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Tensor:
        """The rows of one image, or some of them."""
        (start, stop, _), first, image = rows.indices(len(self)), 0, 0
        while first + self._rows[image] <= start:
            first, image = first + self._rows[image], image + 1
        return self.of_image(image)[start - first : stop - first]

    def of_image(self, number: int) -> Tensor:
        """The rows of an image."""
        if number not in self._made:
            self._made[number] = self._read(number)
        return self._made[number]
