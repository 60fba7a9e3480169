"""Models made in parts: each rank's values are those of the whole model, and files are read once by a host."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import FolderWeights, Llama, LlamaConfig, NewWeights, adapt
from hdpcomm.models.weights import own_pages
from hdpcomm.offload import MemoryMeter
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.plan import CostModel
from hdpcomm.testing import run_threads
from hdpcomm.train import materialize
from hdpcomm.train.state.layout import layout_of, plain_name
from tests.harness.warm_python import run_python

transformers = pytest.importorskip("transformers", minversion="5.0")

LLAMA = LlamaConfig(vocabulary=48, layers=4, hidden=24, heads=4, kv_heads=2, ffn=40)
EXPERTS = LlamaConfig(vocabulary=48, layers=2, hidden=24, heads=4, kv_heads=2, ffn=40, experts=4, tied_embeddings=False)
SEED = 5
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "rope": lambda: transformers.LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "fused": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0
    ),
    "apertus": lambda: transformers.ApertusConfig(**SIZES),
    "mamba2": lambda: transformers.Mamba2Config(**{**SIZES, "head_dim": 8, "num_heads": 8, "n_groups": 1}),
    "falcon-h1": lambda: transformers.FalconH1Config(
        **SIZES, mamba_n_heads=8, mamba_n_groups=1, mamba_d_head=8, mamba_d_ssm=64, ssm_multipliers=[0.5] * 5
    ),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **SIZES, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=6, num_experts=4, moe_intermediate_size=24,
        shared_expert_intermediate_size=24, num_experts_per_tok=2,
    ),
}  # fmt: skip


def causal_lm(family: str, device: str = "cpu") -> Any:
    torch.manual_seed(1)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)


def on_meta(family: str) -> Any:
    return adapt(causal_lm(family, "meta"))


def saved(family: str, folder: Path, **options: Any) -> Path:
    causal_lm(family).save_pretrained(folder, **options)
    return folder


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_part(model: nn.Module, mesh: hdp.Mesh, whole: dict[str, torch.Tensor]) -> None:
    """Every tensor of this rank's part is what its placement says of the whole one."""
    layout = layout_of(model, mesh)
    for name, tensor in tensors_of(model).items():
        placement = layout.by_name[plain_name(name)]
        wanted = whole[placement.trained]
        assert placement.shape == tuple(wanted.shape), name
        own = wanted if placement.shard is None else placement.shard.take(wanted)
        assert torch.equal(tensor, own.to(tensor.dtype)), name


@pytest.mark.parametrize("config", [LLAMA, EXPERTS], ids=["tied", "experts"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"tensor": 2}, {"tensor": 4}, {"pipeline": 2}, {"pipeline": 2, "tensor": 2}, {"expert": 2}],
    ids=["1", "tensor2", "tensor4", "pipeline2", "pipeline2xtensor2", "expert2"],
)
def test_parts_of_a_new_llama(config: LlamaConfig, sizes: dict[str, int]) -> None:
    if "expert" in sizes and not config.experts:
        sizes = {"tensor": 2}
    whole = tensors_of(Llama(config, seed=SEED))

    def rank() -> None:
        with hdp.init() as comm:
            mesh = hdp.Mesh(comm, **sizes)
            model = Llama(config, device="meta")
            weights = NewWeights(model, SEED)
            stages = split_model(model, 2)[mesh.stage :: 2] if mesh.pipeline > 1 else [model]
            for each in stages:
                tensor_parallel(expert_parallel(each, mesh), mesh)
            part = nn.ModuleList(stages) if mesh.pipeline > 1 else model
            materialize(part, mesh, weights)
            check_part(part, mesh, whole)
            if mesh.pipeline == 1 and config.tied_embeddings:
                assert model.head.weight is model.embedding.weight

    run_threads(rank, 4)


def test_a_tensor_follows_from_its_name_and_the_seed() -> None:
    few, many = (Llama(LlamaConfig(layers=layers), seed=3).state_dict() for layers in (2, 2))
    assert all(torch.equal(few[name], many[name]) for name in few)
    other = Llama(LlamaConfig(layers=2), seed=4).state_dict()
    assert not torch.equal(few["blocks.0.attention.q.weight"], other["blocks.0.attention.q.weight"])
    assert not torch.equal(few["blocks.0.attention.q.weight"], few["blocks.1.attention.q.weight"])
    deviation = few["blocks.0.ffn.gate.weight"].std().item()
    assert 0.019 < deviation < 0.021


@pytest.mark.parametrize("family", FAMILIES)
def test_new_values_are_distributed_as_those_of_transformers(family: str) -> None:
    wanted, weights = tensors_of(adapt(causal_lm(family), check=False)), NewWeights(on_meta(family), 7)
    for name, tensor in wanted.items():
        found = weights.whole(name)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype), name
        if not isinstance(tensor, nn.Parameter) or tensor.numel() < 2 or tensor.std() == 0:  # computed, ones, zeros
            assert torch.equal(found, tensor), name
        else:
            assert abs(found.std() / tensor.std() - 1) < 6 / tensor.numel() ** 0.5, name
    name = next(name for name, tensor in wanted.items() if tensor.dim() == 2)
    again, other = NewWeights(on_meta(family), 7).whole(name), NewWeights(on_meta(family), 8).whole(name)
    assert torch.equal(weights.whole(name), again)
    assert not torch.equal(again, other)


@pytest.mark.parametrize("form", [{}, {"max_shard_size": "20KB"}, {"safe": False}], ids=["file", "files", "bin"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_a_folder(family: str, form: dict[str, Any], tmp_path: Path) -> None:
    model = causal_lm(family)
    if form.get("safe", True):
        model.save_pretrained(tmp_path, **form)
    else:
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    weights = FolderWeights(tmp_path, on_meta(family))
    for name, tensor in tensors_of(model).items():
        assert torch.equal(weights.whole(f"model.{name}"), tensor), name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"pipeline": 2}, {"expert": 2}], ids=str)
def test_parts_of_zero_3(sizes: dict[str, int], dtype: torch.dtype | None) -> None:
    """A trainer that takes over parts has the weights, masters and losses of one whose ranks had whole parameters."""
    config = EXPERTS if "expert" in sizes else LLAMA
    lengths = (20, 3, 9, 14)

    def run(*, parts: bool) -> Any:
        def rank() -> Any:
            torch.set_num_threads(1)
            comm = hdp.init()
            mesh = hdp.Mesh(comm, **sizes)
            model = Llama(config, device="meta")
            weights = NewWeights(model, SEED)
            model.blocks[0].attention.q.weight.requires_grad_(False)
            stages = split_model(model, 2)[mesh.stage :: 2] if mesh.pipeline > 1 else [model]
            for each in stages:
                tensor_parallel(expert_parallel(each, mesh), mesh)
            part = nn.ModuleList(stages) if mesh.pipeline > 1 else model
            materialize(part, mesh, weights, zero=3 if parts else 0)
            if parts:
                assert all(p.isnan().all() for p in part.parameters())
                assert sum(p.untyped_storage().nbytes() for p in part.parameters()) <= 4 * len(list(part.parameters()))
            cluster = mesh.cluster(capacity=64)
            planner = hdp.Planner(None, cluster, cost_model=CostModel(attention=1e-6, linear=1e-5, fixed=1e-4))
            optimizer = torch.optim.AdamW([p for p in part.parameters() if p.requires_grad], lr=1e-2)
            trainer = hdp.Trainer(stages if mesh.pipeline > 1 else model, optimizer, planner, mesh, zero=3, dtype=dtype)
            before = copy.deepcopy(trainer.state_dict())
            losses = [trainer.step(lengths, lambda i: torch.arange(lengths[i]) * (i + 3) % 41).loss for _ in range(2)]
            return before, losses

        return run_threads(rank, 4)

    for (found, losses), (wanted, other) in zip(run(parts=True), run(parts=False), strict=True):
        assert losses == other
        for kind in ("model", "masters"):
            assert found.get(kind, {}).keys() == wanted.get(kind, {}).keys()
            for name, tensor in wanted.get(kind, {}).items():
                assert torch.equal(found[kind][name], tensor), name
    if dtype is not None:  # masters keep what bf16 cannot
        new = Llama(config, seed=SEED)
        assert torch.equal(wanted["masters"]["norm.weight"], new.norm.weight)
        assert torch.equal(wanted["masters"]["embedding.weight"], new.embedding.weight)


def test_parts_of_parameters_that_were_frozen_later_are_refused() -> None:
    def rank() -> str:
        with hdp.init() as comm:
            mesh = hdp.Mesh(comm)
            model = Llama(LLAMA, device="meta")
            materialize(model, mesh, NewWeights(model, SEED), zero=3)
            model.blocks[0].attention.q.weight.requires_grad_(False)
            planner = hdp.Planner(None, mesh.cluster(capacity=64), cost_model=CostModel(1e-6, 1e-5))
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            try:
                hdp.Trainer(model, optimizer, planner, mesh, zero=3)
            except InvalidUsage as error:
                return str(error)
            return ""

    for told in run_threads(rank, 2):
        assert "freeze parameters, and cut the model, before materialize()" in told


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parts_of_zero_3_need_a_trainer_with_it(zero: int) -> None:
    def rank() -> str:
        with hdp.init() as comm:
            mesh = hdp.Mesh(comm)
            model = Llama(LLAMA, device="meta")
            materialize(model, mesh, NewWeights(model, SEED), zero=3)
            planner = hdp.Planner(None, mesh.cluster(capacity=64), cost_model=CostModel(1e-6, 1e-5))
            try:
                hdp.Trainer(model, torch.optim.AdamW(model.parameters()), planner, mesh, zero=zero)
            except InvalidUsage as error:
                return str(error)
            return ""

    for told in run_threads(rank, 2):
        assert "materialize(zero=3)" in told


SPLIT = ("llama", "tied", "mixtral", "qwen3-moe", "fused", "mamba2", "falcon-h1", "qwen3-next")


@pytest.mark.parametrize("family", SPLIT)
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"expert": 2}, {"tensor": 2, "expert": 2}], ids=str)
def test_parts_of_a_folder_are_read_once(family: str, sizes: dict[str, int], tmp_path: Path) -> None:
    if "expert" in sizes and family not in ("mixtral", "qwen3-moe", "qwen3-next"):
        sizes = {"tensor": 1 if family == "tied" else 4}
    saved(family, tmp_path)
    whole = {f"model.{name}": tensor for name, tensor in tensors_of(causal_lm(family)).items()}
    stored = sum(tensor.nbytes for tensor in causal_lm(family).parameters())

    def rank() -> int:
        with hdp.init() as comm:
            mesh = hdp.Mesh(comm, **sizes)
            model = on_meta(family)
            weights = FolderWeights(tmp_path, model)
            tensor_parallel(expert_parallel(model, mesh), mesh)
            materialize(model, mesh, weights)
            check_part(model, mesh, whole)
            return weights.bytes_read

    read = run_threads(rank, 4)
    assert sum(read) == stored
    assert max(read) < 0.6 * stored


def test_a_rank_holds_its_part_and_one_tensor() -> None:
    """Whole tensors are dropped before the next ones are read."""
    alive: list[int] = []

    class Noting(NewWeights):
        def whole(self, name: str) -> torch.Tensor:
            tensor = super().whole(name)
            alive.append(1)
            import weakref

            weakref.finalize(tensor, alive.append, -1)
            return tensor

    def rank() -> None:
        with hdp.init() as comm:
            model = Llama(LLAMA, device="meta")
            materialize(model, hdp.Mesh(comm), Noting(model, SEED))

    run_threads(rank, 1)
    most, now = 0, 0
    for each in alive:
        now += each
        most = max(most, now)
    assert (most, now) == (1, 0)


def test_a_rank_gets_its_part_of_zero_3_and_no_more() -> None:
    """Beside its part no rank holds more than a tensor, though each parameter is drawn as a whole."""
    config = LlamaConfig(vocabulary=400, layers=2, hidden=128, heads=4, kv_heads=2, ffn=300)

    def rank() -> tuple[int, int]:
        with hdp.init() as comm:
            model = Llama(config, device="meta")
            with MemoryMeter("cpu") as meter:
                materialize(model, hdp.Mesh(comm), NewWeights(model, SEED), zero=3)
            return meter.peak, sum(p._hdpcomm_part[1].nbytes for p in model.parameters())  # type: ignore[attr-defined]

    rows = run_threads(rank, 4)
    assert sum(own for _, own in rows) == sum(p.nbytes for p in Llama(config).parameters())
    assert all(own <= peak <= own + 4 * 300 * 128 / 8 for peak, own in rows)  # names and places, as text


def test_pages_of_a_tensor() -> None:
    made = own_pages((3, 5), torch.bfloat16)
    assert (made.shape, made.dtype, made.is_contiguous()) == ((3, 5), torch.bfloat16, True)
    assert not made.any()
    made.fill_(2)
    assert made.float().sum() == 30
    assert own_pages((0, 5), torch.float32).shape == (0, 5)
    assert own_pages((), torch.int64).shape == ()


def test_the_benchmark_of_loading(tmp_path: Path) -> None:
    script = str(Path(__file__).parents[3] / "benchmarks" / "large_model.py")
    sizes = ["--layers", "4", "--hidden", "256", "--vocabulary", "400", "--loading", "--folder", str(tmp_path)]
    done = run_python([script, *sizes, "--json", str(tmp_path / "found.json")], timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == ["pipeline 2 x tensor 2", "tensor 2 x expert 2", "zero 3"]
    for row in found.values():
        assert row["bytes_read"] == row["stored_bytes"]
        assert len(row["ratios"]) == len(row["own_bytes"]) == 4
    assert sum(found["zero 3"]["own_bytes"]) == pytest.approx(2 * found["zero 3"]["stored_bytes"], rel=1e-3)


def test_the_whole_model_runs_after_it(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    wanted = adapt(causal_lm("mixtral"), check=False)
    tokens = torch.arange(12)
    places = {"positions": tokens, "cu_seqlens": torch.tensor([0, 12], dtype=torch.int32), "comm": None}

    def rank() -> torch.Tensor:
        with hdp.init() as comm:
            model = on_meta("mixtral")
            materialize(model, hdp.Mesh(comm), FolderWeights(folder, model))
            return model(tokens, **places)

    (logits,) = run_threads(rank, 1)
    assert torch.equal(logits, wanted(tokens, **places))


class TestRefusals:
    def test_a_tensor_that_is_not_there(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        saved("llama", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(InvalidUsage, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
            FolderWeights(tmp_path, on_meta("llama"))

    def test_another_shape(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        saved("llama", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.norm.weight"] = torch.ones(31)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(InvalidUsage, match=r"model\.norm\.weight with the shape \[31\].*\[32\]"):
            FolderWeights(tmp_path, on_meta("llama"))  # on every rank, before anything is read

    def test_no_weights(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidUsage, match=r"has no weights: model\.safetensors or"):
            FolderWeights(tmp_path, on_meta("llama"))

    def test_a_truncated_file(self, tmp_path: Path) -> None:
        file = saved("llama", tmp_path) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(InvalidUsage, match=r"model\.safetensors cannot be read as"):
            FolderWeights(tmp_path, on_meta("llama"))

    def test_an_index_of_files_that_are_not_there(self, tmp_path: Path) -> None:
        folder = saved("llama", tmp_path, max_shard_size="20KB")
        next(folder.glob("model-00002*")).unlink()
        with pytest.raises(InvalidUsage, match=r"model-00002.* cannot be read"):
            FolderWeights(folder, on_meta("llama"))

    def test_code_in_a_bin(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch planted'\ntR.")
        with pytest.raises(InvalidUsage, match=r"pytorch_model\.bin cannot be read .* \(no plain tensors\)"):
            FolderWeights(tmp_path, on_meta("llama"))

    def test_quantised(self, tmp_path: Path) -> None:
        model = on_meta("llama")
        model.causal_lm.config.quantization_config = {"quant_method": "fp8"}
        with pytest.raises(InvalidUsage, match="quantised"):
            FolderWeights(saved("llama", tmp_path), model)

    def test_a_model_with_values(self) -> None:
        def rank() -> None:
            with hdp.init() as comm:
                model = Llama(LLAMA)
                materialize(model, hdp.Mesh(comm), NewWeights(model, SEED))

        with pytest.raises(InvalidUsage, match="all parameters have values already, on cpu"):
            run_threads(rank, 1)

    def test_another_kind_of_model(self) -> None:
        with pytest.raises(InvalidUsage, match="weights of a Linear were to be drawn"):
            NewWeights(nn.Linear(2, 2), 0)

    def test_what_the_initialisation_leaves_out(self) -> None:
        model = on_meta("llama")
        model.causal_lm.model.norm.register_buffer("extra", torch.empty(3, device="meta"))
        with pytest.raises(InvalidUsage, match=r"does not say how model\.norm\.extra begins"):
            NewWeights(copy.deepcopy(model), 0).whole("model.model.norm.extra")


def test_an_index_with_more_than_the_model(tmp_path: Path) -> None:
    """Tensors that the model does not have are left alone."""
    from safetensors.torch import load_file, save_file

    folder = saved("llama", tmp_path, max_shard_size="20KB")
    save_file({"mtp.layers.0.weight": torch.ones(3)}, folder / "model-more.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.layers.0.weight"] = "model-more.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = FolderWeights(folder, on_meta("llama"))
    first = next(folder.glob("model-00001*"))
    name, tensor = next(iter(load_file(first).items()))
    assert torch.equal(weights.whole(f"model.{name}"), tensor)
