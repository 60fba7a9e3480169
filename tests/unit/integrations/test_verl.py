"""Micro-batches for verl: complete, within the tokens, of equal time; no more of them than verl's own. LoRA."""

from __future__ import annotations

import random

import pytest
import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations import split_micro_batches, verl_lora
from hdpcomm.models.lora_names import is_adapter


@pytest.mark.parametrize("group_size", [1, 2])
def test_micro_batches_are_complete_and_within_the_limit(group_size: int) -> None:
    rng = random.Random(group_size)
    for _ in range(50):
        lengths = [rng.randint(1, 1000) for _ in range(group_size * rng.randint(1, 60))]
        divisible = rng.choice([1, 2])
        if len(lengths) < 2 * group_size * divisible:
            continue
        bins = split_micro_batches(lengths, 2000, divisible_by=divisible, group_size=group_size, min_count=divisible)
        assert sorted(i for one in bins for i in one) == list(range(len(lengths)))
        assert all(one and sum(lengths[i] for i in one) <= 2000 for one in bins)
        assert len(bins) % divisible == 0
        for one in bins:
            assert all((i // group_size * group_size + k) in one for i in one for k in range(group_size))


def test_equal_time_not_equal_tokens() -> None:
    """Half of the work is the long sample and three short ones; half of the tokens would be four."""
    bins = split_micro_batches([8000, *[1000] * 16], 16_000, min_count=2)
    assert [len(one) for one in bins] == [1 + 3, 13]


def test_bad_input() -> None:
    assert split_micro_batches([], 100) == []
    with pytest.raises(InvalidUsage, match="samples of 5 to 101 tokens"):
        split_micro_batches([101, 5], 100)
    with pytest.raises(InvalidUsage, match="samples of 0 to 5 tokens"):
        split_micro_batches([0, 5], 100)
    with pytest.raises(InvalidUsage, match="cannot make 3 micro-batches"):
        split_micro_batches([5, 5], 100, min_count=3)
    with pytest.raises(InvalidUsage, match="group_size 2 for 3 samples"):
        split_micro_batches([5, 5, 5], 100, group_size=2)


def test_no_more_micro_batches_than_verl() -> None:
    balancing = pytest.importorskip("verl.utils.seqlen_balancing")
    rng = random.Random(0)
    ours = theirs = 0
    for _ in range(20):
        lengths = [max(16, int(4096 ** rng.random())) for _ in range(64)]
        bins = split_micro_batches(lengths, 4096)
        count = -(-sum(lengths) // 4096)
        while True:  # as rearrange_micro_batches does
            work = [24576 * length + length**2 for length in lengths]
            parts = balancing.get_seqlen_balanced_partitions(work, count, equal_size=False)
            if all(sum(lengths[i] for i in part) <= 4096 for part in parts):
                break
            count += 1
        assert len(bins) <= len(parts)
        ours, theirs = ours + len(bins), theirs + len(parts)
    assert ours <= theirs


def test_bins_in_the_place_of_nemo_rls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/how-to/other-trainers.md has it: as many bins, dealt in turn, and less work on the heaviest rank."""
    packing = pytest.importorskip("nemo_rl.data.packing.algorithms")
    rng = random.Random(0)
    shards, ratios = 8, []
    for _ in range(10):
        lengths = [int(min(16384, max(64, rng.lognormvariate(7, 1.2)))) for _ in range(256)]
        heaviest = []
        for planned in (False, True):
            with monkeypatch.context() as patch:
                if planned:
                    patch.setattr(
                        packing.ModifiedFirstFitDecreasingPacker,
                        "_pack_implementation",
                        lambda self, lengths: split_micro_batches(
                            lengths,
                            self.bin_capacity,
                            min_count=self.min_bin_count or 1,
                            divisible_by=self.bin_count_multiple or 1,
                        ),
                    )
                packer = packing.get_packer(
                    "modified_first_fit_decreasing", 16384, min_bin_count=shards, bin_count_multiple=shards
                )
                bins = packer.pack(lengths)
            assert sorted(i for one in bins for i in one) == list(range(len(lengths)))
            work = [sum(24576 * lengths[i] + lengths[i] ** 2 for i in one) for one in bins]
            heaviest.append((len(bins), max(sum(work[rank::shards]) for rank in range(shards))))
        assert heaviest[1][0] == heaviest[0][0]
        ratios.append(heaviest[1][1] / heaviest[0][1])
    assert sum(ratios) / len(ratios) < 1.0


def test_weights_with_adapters_in_them_are_those_of_peft() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    named = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapters = {name: tensor for name, tensor in named.items() if is_adapter(name)}
    base = [(name, tensor) for name, tensor in named.items() if name not in adapters]
    found = dict(verl_lora.merged_weights(model, base, adapters))
    assert len(adapters) == 8
    del adapters["base_model.model.model.layers.1.mlp.down_proj.lora_A.default.weight"]
    with pytest.raises(InvalidUsage, match=r"lora.merge=True with adapters of .*layers\.1\.mlp\.down_proj"):
        dict(verl_lora.merged_weights(model, base, adapters))
    expected = model.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.bfloat16(), rtol=0.01, atol=1e-6)  # one rounding may differ


def test_adapters_of_another_model() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    saved = {name.replace(".default", ""): torch.rand(tensor.shape) for name, tensor in model.state_dict().items()}
    verl_lora._load(model, saved, "folder")
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert torch.equal(parameter, saved[name.replace(".default", "")])
            assert parameter.requires_grad
    saved[next(name for name in saved if ".lora_B." in name)] = torch.rand(16, 3)
    with pytest.raises(InvalidUsage, match=r"lora_adapter_path=folder has no adapters .*lora_B.*of shape \[16, 2\]"):
        verl_lora._load(model, saved, "folder")
