"""The data of ``hdpcomm train``: what its options name, opened by all ranks together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdpcomm.errors import InvalidUsage
from hdpcomm.options import BadOption, count, positive

if TYPE_CHECKING:
    from hdpcomm.cli.train_options import TrainOptions
    from hdpcomm.comm import Communicator
    from hdpcomm.data import Corpus, Encoder

__all__ = ["TrainData", "train_data"]


@dataclass(frozen=True, slots=True)
class TrainData:
    """Where the text is, and what turns it into tokens.

    Attributes:
        paths: empty: Python's standard library.
        weights: of the tokens of each path in a mixture, by the first step that has them; empty: each sequence once an
            epoch.
        tokenizer: folder of a model; ``None``: bytes.
    """

    paths: tuple[str, ...]
    context: int
    text_field: str = "text"
    messages_field: str = "messages"
    tokenizer: Path | None = None
    cache: Path | None = None
    weights: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def encoder(self) -> Encoder:
        """Makes the tokens. Raises: InvalidUsage if the folder holds no tokenizer."""
        from hdpcomm.data import encoder_of

        return encoder_of(self.tokenizer)

    def in_place(self) -> bool:
        """Whether :meth:`open` has nothing to build. Raises: InvalidUsage for what cannot be read."""
        from hdpcomm.data import is_indexed

        return self._library() or is_indexed(self.paths, **self._reading(), cache=self.cache)

    def open(self, comm: Communicator | None = None, on_progress: Callable[[int, int], None] | None = None) -> Corpus:
        """The corpus, whose tokens are made now if they are not there. Collective over ``comm``, if there is one.
        Raises: InvalidUsage, see ``open_corpus``."""
        from hdpcomm.data import open_corpus, standard_library

        if self._library():
            return standard_library(context=self.context, whole_every=8)
        places: dict[str, Any] = {"cache": self.cache, "comm": comm, "on_progress": on_progress}
        return open_corpus(self.paths, **self._reading(), context=self.context, weights=self.weights, **places)

    def _reading(self) -> dict[str, Any]:
        """How documents become tokens."""
        return {"text_field": self.text_field, "messages_field": self.messages_field, "encoder": self.encoder()}

    def _library(self) -> bool:
        return not self.paths and self.tokenizer is None


def train_data(options: TrainOptions, paths: tuple[str, ...]) -> TrainData:
    """The data at ``paths``, read as the options say: with the model's own tokenizer, if it has one."""
    tokenizer = None if options.tokenizer in (None, "bytes") else Path(str(options.tokenizer))
    if options.tokenizer is None and options.model is not None:
        from hdpcomm.data import has_tokenizer

        tokenizer = options.model if has_tokenizer(options.model) else None
    plain, weights = _weighted(paths)
    later = dict(map(_later_weights, options.mixture_at))
    if len(later) < len(options.mixture_at):
        raise InvalidUsage(f"--mixture-at {' '.join(options.mixture_at)}: a step is there twice; leave out one")
    if later and not weights and paths is options.data:
        raise InvalidUsage("--mixture-at was given, and the data has no weights; give PATH=WEIGHT for each")
    return TrainData(
        paths=plain,
        weights={0: weights, **later} if weights else {},
        context=options.context,
        text_field=options.text_field,
        messages_field=options.messages_field,
        tokenizer=tokenizer,
        cache=options.data_cache,
    )


def _weighted(given: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Paths, and the weight of each that is written as PATH=WEIGHT. Raises: InvalidUsage if some have none."""
    found = [_weight_of(each) for each in given]
    weights = tuple(weight for _, weight in found if weight is not None)
    if weights and len(weights) != len(given):
        path = next(path for path, weight in found if weight is None)
        raise InvalidUsage(f"{path} has no weight, and other data has; give PATH=WEIGHT for each, or for none")
    return tuple(path for path, _ in found), weights


def _later_weights(given: str) -> tuple[int, tuple[float, ...]]:
    step, _, weights = given.partition("=")
    try:
        return count(step), tuple(float(weight) for weight in weights.split(","))
    except (BadOption, ValueError):
        raise InvalidUsage(f"--mixture-at {given}: STEP=WEIGHT,WEIGHT... was expected, as 1000=0.5,0.5") from None


def _weight_of(given: str) -> tuple[str, float | None]:
    from hdpcomm.data.remote import is_url

    path, equals, weight = given.rpartition("=")
    own = "=" not in re.split("[?&]", path)[-1] if "?" in given else not weight.replace(".", "").isdecimal()
    if not equals or Path(given).exists() or (own and is_url(given)):  # the value of a query, or part of a name
        return given, None
    try:
        return path, 0.0 if weight == "0" else positive(weight)
    except BadOption as error:
        raise InvalidUsage(f"{given}: {error}; PATH=WEIGHT was expected") from None
