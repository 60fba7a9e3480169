"""Corpora whose lengths are known before their tokens, sampling of global batches, and trees of trajectories."""

from hdpcomm.data.corpus import BatchReader, Corpus, CorpusSummary, standard_library
from hdpcomm.data.encoders import ByteEncoder, Encoder, FolderEncoder, encoder_of, has_tokenizer
from hdpcomm.data.fold import FoldedTree, fold
from hdpcomm.data.opening import build_data, is_indexed, open_corpus
from hdpcomm.data.sampler import BatchSampler, GlobalBatch
from hdpcomm.data.token_store import TokenStore, is_store, open_store

__all__ = [
    "BatchReader",
    "BatchSampler",
    "ByteEncoder",
    "Corpus",
    "CorpusSummary",
    "Encoder",
    "FoldedTree",
    "FolderEncoder",
    "GlobalBatch",
    "TokenStore",
    "build_data",
    "encoder_of",
    "fold",
    "has_tokenizer",
    "is_indexed",
    "is_store",
    "open_corpus",
    "open_store",
    "standard_library",
]
