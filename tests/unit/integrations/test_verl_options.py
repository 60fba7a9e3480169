"""Each option of verl's that is refused has its error; ``make clients`` compares the table with the installed verl."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations.verl_options import REFUSED, check_options


def configurations(**options: Any) -> tuple[Any, Any, Any]:
    """The configurations of a model, an engine and a checkpoint, verl's defaults but for these options."""
    model = {
        "lora_rank": 0, "lora_adapter_path": None, "model_type": "language_model", "target_parameters": None,
        "lora": {}, "use_liger": False, "tiled_mlp": {"enabled": False}, "enable_activation_offload": False,
        "mtp": SimpleNamespace(enable=False),
    }  # fmt: skip
    engine = {
        "mixed_precision": None, "router_replay": {}, "ulysses_sequence_parallel_size": 1, "fsdp_size": -1,
        "offload_policy": False, "pad_to_length": False, "qat": SimpleNamespace(enable=False),
    }  # fmt: skip
    checkpoint = {"async_save": False}
    assert options.keys() <= {*model, *engine, *checkpoint}
    for each in (model, engine, checkpoint):
        each.update({name: value for name, value in options.items() if name in each})
    return SimpleNamespace(**model), SimpleNamespace(**engine), checkpoint


GIVEN: dict[str, dict[str, Any]] = {
    "lora_rank of a critic": {"lora_rank": 4, "model_type": "value_model"},
    "target_parameters=['mlp']": {"lora_rank": 4, "target_parameters": ["mlp"]},
    "lora.rank=8": {"lora": {"rank": 8}},
    "use_liger=True": {"use_liger": True},
    "tiled_mlp.enabled=True": {"tiled_mlp": {"enabled": True}},
    "enable_activation_offload=True": {"enable_activation_offload": True},
    "mtp.enable=True": {"mtp": SimpleNamespace(enable=True)},
    "offload_policy=True": {"offload_policy": True},
    "ulysses_sequence_parallel_size=2": {"ulysses_sequence_parallel_size": 2},
    "fsdp_size=2": {"fsdp_size": 2},
    "pad_to_length=True": {"pad_to_length": True},
    "qat.enable=True": {"qat": SimpleNamespace(enable=True)},
    "mixed_precision.param_dtype=fp16": {"mixed_precision": {"param_dtype": "fp16"}},
    "async_save=True": {"async_save": True},
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_refused(name: str) -> None:
    with pytest.raises(InvalidUsage) as told:
        check_options(*configurations(**GIVEN[name]), ranks=4)
    start, _, advice = str(told.value).partition("; ")
    assert start == f"strategy=hdpcomm does not support {name}"
    assert len(advice) > 10


def test_what_is_not_refused() -> None:
    check_options(*configurations(), ranks=4)
    check_options(*configurations(lora_rank=4, fsdp_size=4, mixed_precision={"param_dtype": "fp32"}), ranks=4)


def test_each_refusal_of_the_table_is_one() -> None:
    """``calculate_sum_pi_squared`` comes with a batch; an actor's others are its engine's."""
    kinds = ("FSDPEngineConfig", "HFModelConfig", "CheckpointConfig")
    listed = {name for kind in kinds for names in REFUSED[kind] for name in names.split()}
    assert listed <= {option for options in GIVEN.values() for option in options}
    assert {*REFUSED["FSDPActorConfig"]} - {*REFUSED["FSDPEngineConfig"]} == {"calculate_sum_pi_squared"}


def test_the_docs_have_a_page_of_it() -> None:
    tools = Path(__file__).resolve().parents[3] / "tools"
    tables: dict[str, Any] = runpy.run_path(str(tools / "trainer_options.py"))["VERL"]
    page: str = runpy.run_path(str(tools / "docs_pages.py"))["options_page"]()
    for kind in tables["works"]:
        assert f"## {kind}" in page
        listed = [name for table in tables.values() for names in table.get(kind, {}) for name in names.split()]
        assert len(listed) == len(set(listed))
        assert all(f"`{name}`" in page for name in listed)
    for table in tables.values():
        assert all(reason in page for groups in table.values() for reason in groups.values())
