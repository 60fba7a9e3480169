"""Muon on meshes: the weights of one process, whoever holds parts of a matrix and whoever owns it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.run import read_metrics
from hdpcomm.testing import run_threads
from hdpcomm.train import MatrixOwners, Trainer

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

CONFIG = LlamaConfig(vocabulary=48, layers=4, hidden=16, heads=4, kv_heads=2, ffn=24)
EXPERTS = LlamaConfig(vocabulary=48, layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, experts=4)
COST = CostModel(1e-9, 1e-6, 1e-4)
LENGTHS = [[31, 7, 12, 3], [9, 40, 2], [25, 25, 1, 8]]
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "hdp3": (3, {}),
    "tensor2": (2, {"tensor": 2}),
    "tensor4": (4, {"tensor": 4}),  # two ranks hold each KV head
    "hdp2xtensor2": (4, {"tensor": 2}),
    "pipeline2": (2, {"pipeline": 2}),
    "pipeline2xtensor2": (4, {"pipeline": 2, "tensor": 2}),
    "hdp2xpipeline2": (4, {"pipeline": 2}),
}


muon = partial(torch.optim.Muon, lr=0.02, weight_decay=0.1, momentum=0.9)


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.05)


def sequence(step: int, place: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + place)
    return torch.randint(0, 48, (LENGTHS[step][place],), generator=generator)


def freeze(model: torch.nn.Module, frozen: str) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and frozen and name.startswith(frozen):
            parameter.requires_grad_(False)


def trained(
    config: LlamaConfig, sizes: dict[str, int], *, resume: Any = None, steps: range = range(3), frozen: str = ""
) -> Any:
    """On a rank: the whole state after some steps."""
    torch.set_num_threads(1)
    with hdp.init(timeout=60.0) as comm:
        mesh = hdp.Mesh(comm, **sizes)
        whole = Llama(config, seed=2, dtype=torch.float64)
        freeze(whole, frozen)
        model: Any = whole
        if mesh.pipeline > 1:
            model = split_model(whole, mesh.pipeline)[mesh.stage]
        tensor_parallel(expert_parallel(model, mesh), mesh)
        optimizer = MatrixOwners(model, mesh, matrices=muon, others=adamw)
        shares = {"pipeline": mesh.pipeline, "tensor": mesh.tensor, "expert": mesh.expert}
        cluster = ClusterSpec(ranks=mesh.hdp, capacity=60, **shares)
        planner = Planner(None, cluster, cost_model=COST)
        trainer = Trainer(model, optimizer, planner, mesh)
        if resume is not None:
            trainer.load_state_dict(resume)
        for step in steps:
            trainer.step(LENGTHS[step], partial(sequence, step))
        trainer.check_replicas()
        return trainer.state_dict(), sum(bool(optimizer.owns(p)) for p in model.parameters())


def by_hand(config: LlamaConfig, frozen: str = "") -> dict[str, torch.Tensor]:
    """One process with torch's own optimizers and a loop of its own."""

    def rank() -> dict[str, torch.Tensor]:
        with hdp.init() as comm:
            model = Llama(config, seed=2, dtype=torch.float64)
            freeze(model, frozen)
            trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            matrices = [p for n, p in trained if p.dim() == 2 and n.startswith("blocks")]
            rest = [p for n, p in trained if not (p.dim() == 2 and n.startswith("blocks"))]
            optimizers = [muon(matrices), adamw(rest)]
            for step, lengths in enumerate(LENGTHS):
                model.zero_grad()
                for place, length in enumerate(lengths):
                    tokens = sequence(step, place)
                    labels = torch.cat((tokens[1:], torch.tensor([-100])))
                    bounds = torch.tensor([0, length], dtype=torch.int32)
                    loss = model(tokens, positions=torch.arange(length), cu_seqlens=bounds, comm=comm, labels=labels)
                    (loss / sum(n - 1 for n in lengths)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for each in optimizers:
                    each.step()
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    return run_threads(rank, 1)[0]


@pytest.fixture(scope="module")
def wanted() -> dict[str, torch.Tensor]:
    return by_hand(CONFIG)


def check(state: Any, wanted: dict[str, torch.Tensor], limit: float = 1e-10) -> None:
    for name, weight in wanted.items():
        error = (state["model"][name] - weight).norm() / weight.norm()
        assert error < limit, (name, float(error))


@pytest.mark.parametrize("mesh", MESHES)
def test_the_weights_of_one_process(mesh: str, wanted: dict[str, torch.Tensor]) -> None:
    ranks, sizes = MESHES[mesh]
    results = run_threads(lambda: trained(CONFIG, sizes), ranks)
    for state, _ in results:
        check(state, wanted)
    owned = [count for _, count in results]
    assert sum(owned) == 28  # every matrix has one owner
    assert max(owned) - min(owned) <= 3


def test_a_stage_without_trained_matrices() -> None:
    config = dataclasses.replace(CONFIG, layers=2)
    state, _ = run_threads(lambda: trained(config, {"pipeline": 2}, frozen="blocks.0"), 2)[0]
    check(state, by_hand(config, frozen="blocks.0"))


def test_experts_and_their_routers() -> None:
    results = run_threads(lambda: trained(EXPERTS, {"expert": 2}), 2)
    check(results[0][0], by_hand(EXPERTS))


@pytest.mark.parametrize("mesh", ["hdp3", "hdp2xtensor2", "pipeline2"])
def test_a_state_goes_on_on_another_mesh(mesh: str, wanted: dict[str, torch.Tensor]) -> None:
    ranks, sizes = MESHES[mesh]
    half = run_threads(lambda: trained(CONFIG, sizes, steps=range(2)), ranks)[0][0]
    momentum = half["optimizer"]["state"]["blocks.0.attention.q.weight"]["momentum_buffer"]
    assert momentum.shape == (16, 16)
    rest = run_threads(lambda: trained(CONFIG, {"tensor": 2}, resume=half, steps=range(2, 3)), 2)
    check(rest[0][0], wanted)


class TestRefusals:
    def refused(self, make: Any, **options: Any) -> None:
        def rank() -> None:
            with hdp.init() as comm:
                model = Llama(CONFIG)
                planner = Planner(None, ClusterSpec(ranks=comm.size, capacity=60), cost_model=COST)
                Trainer(model, make(model, comm), planner, comm, **options)

        run_threads(rank, 2)

    @staticmethod
    def owners(model: Llama, comm: Any) -> MatrixOwners:
        mesh = hdp.Mesh(comm, placement=range(comm.size))
        return MatrixOwners(model, mesh, matrices=muon, others=adamw)

    @pytest.mark.parametrize("options", [{"zero": 1}, {"dtype": torch.bfloat16}])
    def test_zero_and_masters(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidUsage, match="shared the matrices and their state among the ranks already"):
            self.refused(self.owners, **options)

    def test_another_mesh(self) -> None:
        def other(model: Llama, comm: Any) -> MatrixOwners:
            mesh = hdp.Mesh(comm.subset([comm.rank]))
            return MatrixOwners(model, mesh, matrices=muon, others=adamw)

        with pytest.raises(InvalidUsage, match="give MatrixOwners the trainer's mesh"):
            self.refused(other)

    def test_no_matrices(self) -> None:
        def rank() -> None:
            with hdp.init() as comm:
                model = torch.nn.Embedding(4, 4)
                MatrixOwners(model, hdp.Mesh(comm), matrices=muon, others=adamw)

        with pytest.raises(InvalidUsage, match="no trained matrices but embeddings and head"):
            run_threads(rank, 1)

    def test_a_closure(self) -> None:
        def rank() -> None:
            with hdp.init() as comm:
                self.owners(Llama(CONFIG), comm).step(lambda: 0.0)

        with pytest.raises(InvalidUsage, match="got a closure"):
            run_threads(rank, 1)


@pytest.mark.parametrize("mesh", [["--ranks", "2", "--tensor", "2"], ["--ranks", "3"]], ids=["tensor2", "hdp3"])
def test_the_command(mesh: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the losses of one rank, also when it goes on from a checkpoint."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    sizes = ["--hidden", "16", "--heads", "2", "--kv-heads", "2", "--ffn", "24", "--layers", "2", "--trackers", "none"]
    common = ["train", "--data", str(tmp_path / "a.txt"), "--context", "128", "--tokens-per-step", "512", *sizes]
    common += ["--optimizer", "Muon", "--schedule", "constant"]
    found = {}
    for name, ranks, steps in (("one", ["--ranks", "1"], (4,)), ("mesh", mesh, (2, 4))):
        for count in steps:
            out = ["--out", str(tmp_path / name), "--steps", str(count), "--resume", "auto"]
            assert main([*common, *ranks, *out]) == 0
        found[name] = [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]
    assert found["mesh"] == pytest.approx(found["one"], rel=2e-3)  # Muon orthogonalises in bfloat16
    assert found["one"][-1] < found["one"][0]


def test_the_command_refuses_what_would_not_be_muon(capfd: pytest.CaptureFixture[str]) -> None:
    for options in (["--zero", "1"], ["--dtype", "bf16"]):
        assert main(["train", "--ranks", "1", "--steps", "1", "--optimizer", "Muon", *options]) != 0
        assert f"leave out {' '.join(options)}" in " ".join(capfd.readouterr().err.split())
