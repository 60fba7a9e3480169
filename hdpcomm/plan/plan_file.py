"""Plans as binary files, by the package safetensors.

The tensors are the columns of the plan's :class:`~hdpcomm.plan.table.PlanTable`. The metadata, all texts: ``format``
(``hdpcomm.plan``), ``version`` (``2``), the plan's values, ``fragments`` as JSON, and ``sha256`` over the rest of the
metadata (JSON with sorted keys), the lengths of the columns and their bytes, in the order of the table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdpcomm import files
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import open_regular, write_whole
from hdpcomm.plan.micro_batch import SequenceFragment
from hdpcomm.plan.plan_checks import check_values
from hdpcomm.plan.table import COLUMNS, PlanTable
from hdpcomm.plan.tree import TreeFragment

__all__ = ["check_plan_suffix", "plan_values", "read_plan", "read_text", "write_file", "write_plan"]

_SUFFIXES = (".json", ".safetensors")
_PLAN_BYTES = 1 << 31  # the most that is read
_FORMAT, _VERSION = "hdpcomm.plan", "2"
_TEXTS = ("format", "version", "policy", "num_ranks", "makespan_s", "lower_bound_s", "planning_s", "idle_share")
# Values that files may lack, and what they are there.
_LATER: dict[str, float | int | str] = {
    "queued": 0, "queue_pools": 1, "made_by": "", "key_limit": 0.0, "limited": 0.0,
}  # fmt: skip
_KINDS = {np.int64: "I64", np.int32: "I32", np.float64: "F64"}


def check_plan_suffix(path: Path) -> str:
    """The suffix of a plan's file, which tells its form. Raises: InvalidUsage for any but .json and .safetensors."""
    if path.suffix not in _SUFFIXES:
        raise InvalidUsage(f"{path}: a plan is a file that ends in {' or '.join(_SUFFIXES)}")
    return path.suffix


def write_file(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees either the old one or the complete new one.

    Raises:
        InvalidUsage: it cannot be written.
    """
    try:
        write_whole(path, content)
    except OSError as error:
        raise InvalidUsage(f"cannot write the plan {path}: {error.strerror or error}") from error


def read_text(path: Path) -> str:
    """The text of a file. Raises: InvalidUsage if it cannot be read."""
    try:
        return files.read_text(path, most=_PLAN_BYTES)
    except (OSError, ValueError) as error:
        raise InvalidUsage(f"cannot read the plan {path}: {error}") from error


def write_plan(
    path: Path, table: PlanTable, values: dict[str, Any], fragments: tuple[TreeFragment | SequenceFragment, ...]
) -> None:
    """Writes a plan; ``values``: its plain attributes by name. Raises: InvalidUsage if the file cannot be written."""
    from safetensors.numpy import save

    columns = dict(zip(COLUMNS, table.columns(), strict=True))
    texts = {name: value if isinstance(value, str) else repr(value) for name, value in values.items()}
    parts = [
        [each.tree, list(each.segments), list(map(int, each.repeated))]
        if isinstance(each, TreeFragment)
        else [each.sequence, each.start, each.stop]
        for each in fragments
    ]
    metadata = {"format": _FORMAT, "version": _VERSION, **texts, "fragments": json.dumps(parts)}
    write_file(path, save(columns, metadata | {"sha256": _checksum(metadata, columns)}))


def read_plan(path: Path) -> tuple[PlanTable, dict[str, Any], tuple[TreeFragment | SequenceFragment, ...]]:
    """Reads a file of :func:`write_plan`.

    Raises:
        InvalidUsage: a file that cannot be read, is no plan, or was changed; says what is wrong with it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path, most=_PLAN_BYTES).close()
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            written = metadata.get("format"), metadata.get("version")
            if written != (_FORMAT, _VERSION):
                raise ValueError(f"its format and version are {written}, this release reads {(_FORMAT, _VERSION)}")
            if {*file.keys()} != COLUMNS.keys():
                raise ValueError(f"it has the columns {sorted(file.keys())}, expected {sorted(COLUMNS)}")
            for name, kind in COLUMNS.items():
                stored = file.get_slice(name)
                if stored.get_dtype() != _KINDS[kind] or len(stored.get_shape()) != 1:
                    raise ValueError(
                        f"{name} is {stored.get_dtype()} {stored.get_shape()}, expected {_KINDS[kind]} [entries]"
                    )
            columns = {name: file.get_tensor(name) for name in COLUMNS}
        told = metadata.pop("sha256", None)
        if told != _checksum(metadata, columns):
            raise ValueError("its checksum is another one: it was changed since it was written")
        table = PlanTable(**columns)
        if metadata.keys() - _LATER.keys() != {*_TEXTS, "fragments"}:
            raise ValueError(
                f"its __metadata__ has {sorted(metadata)}, expected {sorted({*_TEXTS, 'fragments', 'sha256'})}"
            )
        values = plan_values(metadata)
        check_values(table, values)
        return table, values, _fragments(metadata["fragments"])
    except OSError as error:
        raise InvalidUsage(f"cannot read the plan {path}: {error.strerror or error}") from error
    except (SafetensorError, InvalidUsage, ValueError, TypeError, RecursionError) as error:
        raise InvalidUsage(
            f"{path} holds no step plan ({error}); write one with StepPlan.save() or hdpcomm plan --out FILE"
        ) from error


def _checksum(metadata: dict[str, str], columns: dict[str, NDArray[Any]]) -> str:
    lengths = [len(columns[name]) for name in COLUMNS]
    digest = hashlib.sha256(json.dumps([metadata, lengths], sort_keys=True).encode())
    for name in COLUMNS:
        digest.update(columns[name].tobytes())
    return digest.hexdigest()


def plan_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's plain attributes from numbers, or texts, by name. Raises: KeyError, TypeError, ValueError."""
    values: dict[str, Any] = {"policy": str(given["policy"]), "num_ranks": int(given["num_ranks"])}
    values |= {name: float(given[name]) for name in _TEXTS if name.endswith(("_s", "_share"))}
    return values | {name: type(before)(given.get(name, before)) for name, before in _LATER.items()}


def _fragments(text: str) -> tuple[TreeFragment | SequenceFragment, ...]:
    found: list[TreeFragment | SequenceFragment] = []
    for tree, segments, repeated in json.loads(text):
        if type(segments) is int:
            if not all(type(number) is int and number >= 0 for number in (tree, segments, repeated)):
                raise ValueError("its slices of sequences are not [sequence, start, stop]")
            found.append(SequenceFragment(tree, segments, repeated))
            continue
        whole = all(type(number) is int and number >= 0 for number in (tree, *segments, *repeated))
        if not whole or len(segments) != len(repeated) or not {*repeated} <= {0, 1}:
            raise ValueError("its fragments of trees are not [tree, segments, repeated]")
        found.append(TreeFragment(tree, tuple(segments), tuple(map(bool, repeated))))
    return tuple(found)
