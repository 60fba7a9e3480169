"""Checksums of a checkpoint that a test has changed."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

__all__ = ["sign"]


def sign(step: Path) -> None:
    """Makes ``meta.json`` fit the files, as somebody who plants a checkpoint does."""
    facts = json.loads((step / "meta.json").read_text())
    facts.pop("sha256", None)
    for name in facts["files"]:
        data = (step / name).read_bytes()
        facts["files"][name] = [len(data), zlib.crc32(data)]
    facts["sha256"] = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    (step / "meta.json").write_text(json.dumps(facts))
