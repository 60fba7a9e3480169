"""The loader service: documents are read and tokenised while the run trains."""

from hdpcomm.data.loader.order import LoadedBatch
from hdpcomm.data.loader.service import LoaderService, StepReader, check_budget
from hdpcomm.data.loader.stream import DocumentStream, open_stream

__all__ = [
    "DocumentStream",
    "LoadedBatch",
    "LoaderService",
    "StepReader",
    "check_budget",
    "open_stream",
]
