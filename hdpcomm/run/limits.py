"""The batches of a run, and whether its sequences fit them, its ranks and its model."""

from __future__ import annotations

from hdpcomm.arguments import ranks_text
from hdpcomm.data import BatchSampler, Corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.models.media import FAMILIES
from hdpcomm.options import parse_ramp
from hdpcomm.run.config import RunConfig
from hdpcomm.run.model import FolderModel, read_config

__all__ = ["batch_sampler", "check_limits"]


def batch_sampler(corpus: Corpus, config: RunConfig) -> BatchSampler:
    """The batches of a run on a corpus. Local. Raises: InvalidUsage if a sequence fits none."""
    first = None if config.ramp is None else parse_ramp(config.ramp)
    return corpus.sampler(tokens=config.tokens_per_step, seed=config.seed, ramp=first)


def check_limits(corpus: Corpus, config: RunConfig, *, ranks: int) -> None:
    """Raises InvalidUsage if a sequence fits no batch, or not all ranks together; says which limit to raise. Local."""
    devices = config.pipeline * config.tensor
    if ranks % devices:
        raise InvalidUsage(
            f"{ranks} ranks cannot be pipelines of {config.pipeline} stages with {config.tensor} tensor ranks each: "
            f"the number of ranks (--ranks) must be a multiple of {devices}"
        )
    ranks //= devices
    if ranks % config.expert:
        raise InvalidUsage(
            f"{ranks} HDP ranks cannot be groups of {config.expert} that share experts: --ranks must be a multiple of "
            f"{devices * config.expert}"
        )
    longest, room = corpus.longest, config.capacity * ranks
    in_slices = config.slices > 1 and config.pipeline == 1
    if longest > room and not config.offload and not in_slices:  # else the planner knows, once it is measured
        raise InvalidUsage(
            f"the longest sequence has {longest:,} tokens, and {ranks_text(ranks)} with a capacity of "
            f"{config.capacity:,} tokens hold {room:,}; raise --capacity to at least {-(-longest // ranks):,} or "
            f"--ranks to {-(-longest // config.capacity) * devices:,}, or lower --context to {room:,}"
            + (", or give --slices auto" if config.slices == config.pipeline == 1 else "")
        )
    if corpus.vocabulary > config.model.vocabulary:
        raise InvalidUsage(
            f"the data has tokens up to {corpus.vocabulary - 1:,} ({corpus.encoder_name}), and the model has a "
            f"vocabulary of {config.model.vocabulary:,}; give the tokenizer that belongs to the model"
        )
    if corpus.num_images:
        others = {"--queue": config.queue, "--compare ddp": "ddp" in config.policies}
        _check_images(config.model, others | {"--memory (what encoders keep is not predicted)": config.memory > 0})
    batch_sampler(corpus, config)


def _check_images(model: LlamaConfig | FolderModel, options: dict[str, bool]) -> None:
    kind = read_config(model.folder).model_type if isinstance(model, FolderModel) else "the built-in Llama"
    options = {f"a model of text ({kind}; known with images are {', '.join(FAMILIES)})": kind not in FAMILIES} | options
    for name in (name for name, given in options.items() if given):
        raise InvalidUsage(f"the data has images, which do not go together with {name}; leave out either")
