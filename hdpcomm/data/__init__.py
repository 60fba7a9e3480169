"""Corpora whose lengths are known before their tokens, and the sampling of global batches from them."""

from hdpcomm.data.corpus import Corpus, open_corpus, standard_library
from hdpcomm.data.sampler import BatchSampler, GlobalBatch

__all__ = ["BatchSampler", "Corpus", "GlobalBatch", "open_corpus", "standard_library"]
