"""Each key of a batch that transformers knows is carried, allowed or refused, and the docs say which."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations.huggingface_batch import CARRIED, REFUSED, WITHOUT_EFFECT, check_keys

TOP = Path(__file__).resolve().parents[3]
TOOL = runpy.run_path(str(TOP / "tools/batch_keys.py"))


def test_the_table_has_the_keys_of_the_installed_transformers() -> None:
    listed = [*CARRIED, *(name for names in (*WITHOUT_EFFECT, *REFUSED) for name in names)]
    assert len(listed) == len(set(listed)) > 60
    assert set(listed) == TOOL["keys_of_transformers"]()


def test_the_docs_show_the_table() -> None:
    page = TOP / "docs/how-to/hugging-face.md"
    assert TOOL["with_table"](page.read_text()) == page.read_text(), f"python tools/batch_keys.py --write {page}"


@pytest.mark.parametrize("names", REFUSED)
def test_refused_keys_are_told_with_their_reason(names: tuple[str, ...]) -> None:
    for name in names:
        check_keys({name: None})
        with pytest.raises(InvalidUsage, match=f"'{name}': ") as raised:
            check_keys({"input_ids": torch.ones(1, 1), name: torch.zeros(1, 1)})
        assert REFUSED[names] in str(raised.value)
