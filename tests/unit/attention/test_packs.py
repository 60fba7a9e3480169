"""A pack is made once of any form of ``cu_seqlens``, never changes, and answers all that depends on its kind."""

import copy
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import hdpcomm
from hdpcomm.attention import BalancedPack, KVStore, Pack, SlicedSequence, SpanPack, Tree, as_pack
from hdpcomm.errors import InvalidUsage

FORMS = {
    "list": [0, 5, 12],
    "array": np.array([0, 5, 12]),
    "tensor": torch.tensor([0, 5, 12], dtype=torch.int32),
    "balanced": BalancedPack([0, 5, 12], key_limit=3),
    "tree": Tree([-1, 0, 0], [5, 4, 3]),
    "spans": SpanPack([0, 5, 12], [(1, 4)]),
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


@pytest.mark.parametrize("make", [as_pack, lambda lengths: BalancedPack(lengths, 3)], ids=["plain", "balanced"])
@pytest.mark.parametrize(
    "lengths",
    [[0, 5, 12], np.array([0, 5, 12]), torch.tensor([0, 5, 12]), torch.tensor([0, 5, 12], dtype=torch.int32)],
    ids=["list", "array", "int64", "int32"],
)
def test_a_pack_outlasts_changes_of_its_lengths(lengths, make):
    given = copy.deepcopy(lengths)
    pack = make(given)
    given[1] = 7
    assert pack.cu_seqlens.tolist() == [0, 5, 12]
    assert pack.places(0, 1).tolist() == list(range(12))
    with pytest.raises(ValueError, match="read-only"):
        pack.cu_seqlens[1] = 7


@pytest.mark.parametrize(
    ("form", "name"),
    [("list", "cu_seqlens"), ("array", "limit"), ("balanced", "limit"), ("tree", "tree"), ("spans", "spans"),
     ("slice", "number")],
)  # fmt: skip
def test_a_pack_does_not_change(form, name):
    pack = as_pack(FORMS[form])
    with pytest.raises(AttributeError):
        setattr(pack, name, 1)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda pack: pickle.loads(pickle.dumps(pack))])
@pytest.mark.parametrize("form", ["list", "balanced", "tree", "slice"])
def test_a_copy_has_the_same_tokens(form, way):
    pack = as_pack(FORMS[form])
    copied = way(pack)
    assert copied.layout(3).facts == pack.layout(3).facts
    for rank in range(3):
        assert torch.equal(copied.places(rank, 3), pack.places(rank, 3))


def test_packs_at_one_address_are_told_apart():
    """Each is dropped before the next is made, whose id is then often the same."""

    def packs(n):
        spans = SpanPack([0, n, 12], [(1, 3)])
        yield from (lambda: spans, lambda: as_pack([0, n, 12]), lambda: BalancedPack([0, n, 12], 3))
        yield from (lambda: as_pack(Tree([-1, 0], [n, 12 - n])), lambda: SlicedSequence([0, n, 12]).slice(1))

    facts = {(i, n): make().layout(2).facts for n in (3, 5) for i, make in enumerate(packs(n))}
    assert len(set(facts.values())) == 10
    for _ in range(20):
        for i, n in facts:
            assert list(packs(n))[i]().layout(2).facts == facts[i, n]


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
    for form in ("tree", "slice"):
        with pytest.raises(InvalidUsage, match="only packs of plain sequences are possible"):
            as_pack(FORMS[form]).sequences()


def test_nothing_but_the_door_asks_for_the_kind():
    kinds = r"isinstance\([^)]*\b(Pack|Tree|TreePack|BalancedPack|SpanPack|SequenceSlice|\w*Layout)\b"
    asked = [
        f"{path.name}: {line.strip()}"
        for path in sorted((Path(hdpcomm.__file__).parent / "attention").rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(kinds, line)
    ]
    assert len(asked) == 2, asked  # as_pack()
    assert all(line.startswith("packs.py") for line in asked)
