"""A pack is made once of any form of ``cu_seqlens``, never changes, and answers all that depends on its kind."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import hdpcomm
from hdpcomm.attention import BalancedPack, BlockMask, KVStore, Pack, SlicedSequence, Tree, as_pack
from hdpcomm.errors import InvalidUsage

FORMS = {
    "list": [0, 5, 12],
    "array": np.array([0, 5, 12]),
    "tensor": torch.tensor([0, 5, 12], dtype=torch.int32),
    "balanced": BalancedPack([0, 5, 12], key_limit=3),
    "tree": Tree([-1, 0, 0], [5, 4, 3]),
    "mask": BlockMask(lambda b, h, q, kv: kv <= q, 12, block=2),  # noqa: ARG005
    "slice": SlicedSequence([0, 12]).slice(0),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_a_pack(form):
    pack = as_pack(FORMS[form])
    assert isinstance(pack, Pack)
    assert as_pack(pack) is pack
    for size in (1, 3):
        places = [pack.places(rank, size) for rank in range(size)]
        assert torch.cat(places).sort().values.tolist() == list(range(12))
        assert [len(x) for x in places] == [pack.layout(size).rows(rank) for rank in range(size)]
        reads = [pack.reads(rank, size) for rank in range(size)]
        assert [sum(stop - start for _, start, stop in own) for own in reads] == [len(x) for x in places]
        assert max(int(pack.positions(rank, size).max()) for rank in range(size)) + 1 == pack.longest
    assert pack.branched == (form == "tree")
    assert pack.keeps == (form == "slice")


def test_a_pack_does_not_change():
    lengths = np.array([0, 5, 12])
    pack = as_pack(lengths)
    lengths[1] = 7
    assert pack.sequences().cu_seqlens.tolist() == [0, 5, 12]
    with pytest.raises(ValueError, match="read-only"):
        pack.sequences().cu_seqlens[1] = 7
    for frozen in (as_pack(FORMS["tree"]), FORMS["slice"]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frozen.number = 1


def test_a_store_knows_the_layers_of_each_forward_pass():
    """Two passes take turns, as the stages of a pipeline do, and a slice runs again."""
    sliced = SlicedSequence([0, 4, 8])
    first, second, again = sliced.slice(0), sliced.slice(1), sliced.slice(0)
    store = sliced.store
    assert isinstance(store, KVStore)
    one = store.entry(first.forward_pass, lambda _: ["layer 0"])
    assert store.entry(second.forward_pass, lambda _: ["other"]) is one
    two = store.entry(first.forward_pass, lambda _: ["layer 1"])
    assert two is not one
    assert [store.entry(again.forward_pass, list) for _ in range(2)] == [["layer 0"], ["layer 1"]]


def test_what_needs_sequences_says_so():
    for form in ("tree", "mask", "slice"):
        with pytest.raises(InvalidUsage, match="only packs of plain sequences are possible"):
            as_pack(FORMS[form]).sequences()


def test_nothing_but_the_door_asks_for_the_kind():
    kinds = r"isinstance\([^)]*\b(Pack|Tree|TreePack|BalancedPack|BlockMask|SequenceSlice|\w*Layout)\b"
    asked = [
        f"{path.name}: {line.strip()}"
        for path in sorted((Path(hdpcomm.__file__).parent / "attention").rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(kinds, line)
    ]
    assert len(asked) == 2, asked  # as_pack()
    assert all(line.startswith("packs.py") for line in asked)
