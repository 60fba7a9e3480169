"""The memory of ranks that are not here: what is measured on ranks that are, for any model and mesh."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.comm.mesh import AbsentRanks
from hdpcomm.data import open_corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.offload import rank_pool
from hdpcomm.run import RunConfig, Saving, dry_run, folder_model, train
from hdpcomm.run.memory import measure_memory, memory_beside, predict_memory
from hdpcomm.run.peer_saves import PeerSaves
from hdpcomm.testing import run_threads, spawn
from hdpcomm.train.state.peer_copies import PeerCopies

SIZES = {"vocabulary": 500, "layers": 8, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, int]]] = {
    "hdp1": (1, {}, {}),
    "hdp4": (4, {}, {}),
    "hdp3 zero": (3, {"zero": 1}, {}),
    "hdp2 zero 2": (2, {"zero": 2}, {}),
    "tensor2 hdp2": (4, {"tensor": 2, "zero": 1}, {}),
    "pipeline4": (4, {"pipeline": 4}, {}),
    "pipeline2 tensor2": (4, {"pipeline": 2, "tensor": 2}, {}),
    "pipeline2 chunks2": (2, {"pipeline": 2, "chunks": 2}, {}),
    "pipeline2 split": (2, {"pipeline": 2, "split_backward": True}, {}),
    "expert2": (2, {"expert": 2}, {"experts": 4}),
    "pipeline2 expert2": (4, {"pipeline": 2, "expert": 2}, {"experts": 4}),
}


def config_of(options: dict[str, Any], model: dict[str, int], **changed: Any) -> RunConfig:
    return RunConfig(model=LlamaConfig(**SIZES | model), capacity=256, tokens_per_step=1024, **options, **changed)


def equal_routers(shares: torch.Tensor, count: int, *, dim: int) -> Any:
    """In place of ``Tensor.topk``: each expert gets as many tokens, whatever new weights choose."""
    assert dim == -1
    tokens, experts = shares.shape
    places = torch.arange(tokens * count, device=shares.device).view(tokens, count) % experts
    return SimpleNamespace(indices=places, values=shares.gather(1, places))


@pytest.mark.parametrize(
    ("mesh", "routers"),
    [(mesh, "") for mesh in MESHES if mesh != "hdp4"]
    + [(mesh, "equal") for mesh, (_, _, model) in MESHES.items() if model],
)
def test_the_prediction_is_what_is_measured(mesh: str, routers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts too, where each gets as many tokens: those of new weights give some ranks more."""
    ranks, options, model = MESHES[mesh]
    if routers:
        monkeypatch.setattr(torch.Tensor, "topk", equal_routers)
    config = config_of(options, model)

    def rank() -> Any:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            return measure_memory(comm, config)

    measured, predicted = run_threads(rank, ranks, timeout=300.0)[0], predict_memory(config, ranks)
    assert len(measured) == len(predicted) == config.pipeline
    close = 0.02 if routers else 0.09 if model else 0.005
    for found, wanted in zip(predicted, measured, strict=True):
        assert (found.states, found.weights, found.gradients) == (wanted.states, wanted.weights, wanted.gradients)
        assert found.layers == wanted.layers
        for tokens in (100, 256, 4096):
            for recompute in (0, 1, found.layers):
                both = [each.activation_bytes(tokens, recompute) for each in (found, wanted)]
                assert both[0] == pytest.approx(both[1], rel=close)


@pytest.mark.parametrize("lora", [None, "r=2,alpha=4,targets=q_proj+down_proj"], ids=["whole", "lora"])
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"pipeline": 2}], ids=["tensor2", "pipeline2"])
def test_models_of_transformers(tmp_path: Path, mesh: dict[str, int], lora: str | None) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "architectures": ["Qwen3ForCausalLM"],
    }  # fmt: skip
    transformers.Qwen3Config(**sizes).save_pretrained(tmp_path)
    if lora is not None:
        pytest.importorskip("peft")
    made = folder_model(tmp_path)
    config = RunConfig(model=made, lora=lora, capacity=256, tokens_per_step=1024, **mesh)  # type: ignore[arg-type]

    def rank() -> Any:
        with hdp.init() as comm:
            return measure_memory(comm, config)

    for measured, predicted in zip(run_threads(rank, 2, timeout=300.0)[0], predict_memory(config, 2), strict=True):
        assert predicted.states == measured.states
        for recompute in (0, 2, predicted.layers):
            peaks = [each.peak_bytes(256, recompute) for each in (predicted, measured)]
            assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


LATENT = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
SEVERAL_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "latents": ("DeepseekV3", LATENT | {"first_k_dense_replace": 1}),
    "chosen keys": (
        "DeepseekV32",
        LATENT
        | {"mlp_layer_types": ["dense", *4 * ["sparse"]], "index_topk": 8, "index_n_heads": 4, "index_head_dim": 32},
    ),
    "linear": (
        "Qwen3Next",
        {
            "vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
            "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "layer_types": [*2 * ["linear_attention"], "full_attention", *3 * ["linear_attention"]],
        },
    ),
}  # fmt: skip
"""Names of transformers' configuration classes and sizes, whose layers differ: a few of each kind are measured."""


@pytest.mark.parametrize("kind", SEVERAL_KINDS)
def test_layers_of_several_kinds(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.23")
    name, sizes = SEVERAL_KINDS[kind]
    made = getattr(transformers, f"{name}Config")(**sizes, architectures=[f"{name}ForCausalLM"])
    made.save_pretrained(tmp_path)
    config = RunConfig(model=folder_model(tmp_path), capacity=256, tokens_per_step=1024)

    def rank() -> Any:
        with hdp.init() as comm:
            return measure_memory(comm, config)

    (measured,), (predicted,) = run_threads(rank, 1, timeout=300.0)[0], predict_memory(config, 1)
    assert predicted.states == measured.states
    assert predicted.forward.token == pytest.approx(measured.forward.token, rel=0.03)
    for recompute in (0, predicted.layers):
        both = [each.activation_bytes(4096, recompute) for each in (predicted, measured)]
        assert both[0] == pytest.approx(both[1], rel=0.15)


def test_a_model_that_no_machine_here_could_hold() -> None:
    model = {
        "vocabulary": 128256, "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672,
    }  # fmt: skip
    config = RunConfig(
        model=LlamaConfig(**model, tied_embeddings=False), capacity=8192, tokens_per_step=1 << 20, pipeline=4, tensor=8,
        layers_per_stage="20,20,20,20", zero=1, dtype="bf16",
    )  # fmt: skip
    devices = predict_memory(config, 512)
    assert len(devices) == 4
    # 70.6 billion parameters: those of a device's layers, and of embedding or head, in bf16
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert devices[1].weights == pytest.approx(2 * 20 * layer / 8, rel=1e-3)
    assert devices[0].weights - devices[1].weights == pytest.approx(2 * 128256 * 8192 / 8, rel=1e-3)
    assert devices[0].gradients == 2 * devices[0].weights  # in fp32
    assert devices[0].activation_bytes(8192) > devices[3].activation_bytes(8192)  # more micro-batches are in flight


def mapped_bytes(transport: str) -> tuple[dict[str, set[int]], int]:
    """On a rank: by name the sizes of the shared memory that it has mapped, and its share of the pages in it."""
    with hdp.init(transport=transport) as comm:
        comm.all_reduce(torch.ones(1 << 18))
        found: dict[str, set[int]] = {}
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, *_, name = line.removesuffix(" (deleted)").split(" ")
            if name.startswith("/memfd:"):
                first, last = (int(each, 16) for each in place.split("-"))
                found.setdefault(name, set()).add(last - first)
        pages = Path("/proc/self/smaps_rollup").read_text().split("Pss_Shmem:")[1].split()[0]
        comm.barrier()
        return found, int(pages) * 1024


@pytest.mark.parametrize(("transport", "ranks"), [("shm", 3), ("sim", 2)])
def test_memory_for_messages_is_what_is_mapped(transport: str, ranks: int) -> None:
    beside = memory_beside(config_of({}, {}), ranks, on_devices=transport == "sim")
    for found, pages in spawn(mapped_bytes, ranks, transport, timeout=60.0):
        assert found["/memfd:hdpcomm"] == {ranks * beside.shared}
        if transport == "sim":
            assert found["/memfd:hdpcomm-sim"] == {beside.device}
        else:
            assert pages <= beside.shared + 4096
            assert beside.device == 0


def test_memory_of_the_pool_is_what_it_takes() -> None:
    config = config_of({}, {}, offload=32 << 20)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    with hdp.init() as comm:
        before = resident()
        pool = rank_pool(comm, config.offload)
        assert pool is not None
        beside = memory_beside(config, 1, on_devices=False)
        assert pool.stats().capacity == beside.pool
        assert resident() - before == pytest.approx(beside.pool, rel=0.05)
        assert memory_beside(config_of({}, {}), 1, on_devices=False).pool == 0


ELASTIC: dict[str, tuple[int, dict[str, Any], dict[str, int]]] = {
    **{name: MESHES[name] for name in ("hdp4", "pipeline2 tensor2", "expert2")},
    "bf16, zero 1": (3, {"zero": 1, "dtype": "bf16"}, {}),
    "muon": (2, {"optimizer": "Muon"}, {}),
}


@pytest.mark.parametrize("mesh", ELASTIC)
def test_copies_take_what_the_dry_run_says(mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, options, model = ELASTIC[mesh]
    taken: list[int] = []
    make = PeerCopies.__init__

    def noted(self: PeerCopies, *arguments: Any, **given: Any) -> None:
        make(self, *arguments, **given)
        taken.append(self.nbytes)

    monkeypatch.setattr(PeerCopies, "__init__", noted)
    config = config_of(options, model, steps=1)
    (tmp_path / "a.txt").write_text("some text " * 400)

    def rank() -> None:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            saving = Saving(tmp_path / "run", peers=PeerSaves())
            train(comm, open_corpus([str(tmp_path / "a.txt")], context=200), config, saving=saving)

    run_threads(rank, ranks, timeout=100.0)
    predicted = memory_beside(config, ranks, on_devices=False, elastic_ranks=ranks).copies
    assert len(taken) == ranks
    generators = 4 * torch.get_rng_state().numel()
    assert sum(taken) / ranks - generators == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("options", [{"pipeline": 2}, {"zero": 3, "dtype": "bf16"}], ids=str)
def test_a_step_takes_longer_than_its_passes(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 400)

    def rank() -> Any:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            return dry_run(comm, open_corpus([str(tmp_path / "a.txt")], context=200), config_of(options, {"layers": 2}))

    for report in run_threads(rank, 2, timeout=100.0)[0].reports["balanced"]:
        assert report.step_s == pytest.approx(report.compute_s + report.sync_s + report.optimizer_s)
        assert report.optimizer_s > 0


def test_absent_ranks() -> None:
    comm = AbsentRanks(6, 4, ranks_per_host=3)
    assert (comm.rank, comm.size, comm.ranks) == (4, 6, (0, 1, 2, 3, 4, 5))
    part = comm.subset([5, 4])
    assert part is not None
    assert (part.rank, part.size, part.ranks) == (1, 2, (5, 4))
    assert comm.subset([0, 1]) is None
    comm.all_reduce(comm.empty(3), async_op=True).wait()
    counts, ragged = torch.empty(6), torch.empty(12)
    comm.all_to_all(counts, torch.arange(6.0))
    comm.all_to_all(ragged, torch.arange(7.0), 6 * [2], [1, 1, 1, 1, 2, 1])
    assert (counts.tolist(), ragged.tolist()) == (6 * [4.0], 6 * [4.0, 5.0])
    with pytest.raises(InvalidUsage, match="rank is 6 of 6 ranks"):
        AbsentRanks(6, 6)


def test_more_ranks_than_this_machine_holds(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--ranks", "4096"]) == 6
    assert "or ask hdpcomm fit about devices that are not here" in " ".join(capfd.readouterr().err.split())
