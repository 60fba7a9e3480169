"""Texts of other ranks: whole characters that a terminal may show, whatever was raised, said or written there."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdpcomm as hdp
from hdpcomm.errors import plain_text
from hdpcomm.testing import spawn
from tests.faults.test_hostile_peers import FAILURE, GOODBYE, changed, framed_pair
from tests.harness.fault_cases import LONG_S, caught
from tests.harness.native import _testing

TEXTS = {
    "Chinese": "/数据/" * 150,
    "one byte before": "x" + "中" * 500,
    "two bytes before": "xx" + "中" * 500,
    "four bytes": "xyz" + "😀" * 300,
    "terminal": "\x1b[31mred\x1b]0;title\x07\x9b2J\r\x00 end \u202egnp.exe",
    "surrogates": "file \udce4\udcb8 \ud800",
    "lines": "first\n\tsecond",
}


def is_plain(text: str) -> bool:
    kinds = {unicodedata.category(each) for each in text if each not in "\n\t"}
    return not kinds & {"Cc", "Cs"} and "\u202e" not in text


def leaves(way: str, text: str) -> str:
    """What the others are told of rank 0, which raises, aborts or closes with a text; they go on without it."""
    comm = hdp.init(timeout=LONG_S)
    comm.barrier()
    if comm.rank == 0:
        if way == "abort":
            comm.abort(text)
        else:
            with pytest.raises(ValueError, match=r"."), comm:
                raise ValueError(text)
        return ""
    told = str(caught(lambda: comm.all_reduce(torch.zeros(4))))
    left = comm.shrink()
    left.barrier()
    left.close()
    return told


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", ["raise", "abort"])
@pytest.mark.parametrize("name", TEXTS)
def test_ranks_outlive_the_text_of_another(
    name: str, way: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HDPCOMM_TRANSPORT", transport)
    for told in spawn(leaves, 3, way, TEXTS[name])[1:]:
        assert is_plain(told), repr(told)
        assert TEXTS[name][:5].strip("\x1b") in told


ODD = st.sampled_from([b"\x1b[2J", b"\xe4\xb8", b"\xed\xa0\x80", b"\0", b"\xff", "中".encode(), b"ok", b"\xc2\x9b"])


@settings(deadline=None, max_examples=60)
@given(pieces=st.lists(ODD | st.binary(max_size=6), max_size=80), kind=st.sampled_from([FAILURE, GOODBYE]))
def test_texts_that_no_rank_sends(pieces: list[bytes], kind: int) -> None:
    text = b"".join(pieces)[:700]
    links, comms = framed_pair()
    work = comms[1].send(torch.ones(4), 0, async_op=True)
    frame: Any = _testing.next_frame(links[1], 0)
    changed(frame, kind=kind, piece=len(text), detail=5, flags=0, index=0)
    memoryview(frame.head)[80 : 80 + len(text)] = text
    _testing.deliver_frame(links[0], 1, frame)
    error = caught(lambda: comms[0].recv(torch.zeros(4), 1))
    assert is_plain(str(error)), repr(str(error))
    for comm in comms:
        comm.close()
    assert isinstance(caught(work.wait), hdp.Error)


@given(st.text() | st.binary())
def test_errors_made_in_python(text: str | bytes) -> None:
    assert is_plain(plain_text(text))
    assert plain_text(plain_text(text)) == plain_text(text)
    assert is_plain(str(hdp.Error(plain_text(text))))
    if isinstance(text, str):
        assert is_plain(str(hdp.PeerLost(text, rank=0)))
