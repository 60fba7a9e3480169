"""Tensor parallelism of transformers' models by their own plans: gradients of the whole model on one process."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import expert_parallel, tensor_parallel
from hdpcomm.plan import ClusterSpec, Planner
from hdpcomm.run import open_checkpoint
from hdpcomm.testing import run_threads
from hdpcomm.train import MatrixOwners, Reshard, Trainer
from tests.harness.pipelines import COST, part_of

pytest.importorskip("transformers", minversion="4.54")

from tests.harness.families import LENGTHS, model_of, sequences, unsharded
from tests.harness.small_buckets import make_trainer
from tests.ranks.parallel.test_mesh_checkpoints import folder_of

MODELS = {
    "llama": {"num_key_value_heads": 1, "mlp_bias": True, "attention_bias": True},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {},
    "gemma3": {},
    "one-key-head": {"linear_num_key_heads": 1, "num_key_value_heads": 1},
    "one-kv-head": {"num_key_value_heads": 1},
}
SAME = {"one-key-head": "qwen3-next", "one-kv-head": "phi4"}
EXPERTS = (
    "mixtral", "qwen3-moe", "deepseek-v3", "deepseek-v32", "qwen3-next", "granite-hybrid", "nemotron-h", "gpt-oss",
)  # fmt: skip


def model(family, **changes):
    changes = {"vocab_size": 100, **MODELS.get(family, {}), **changes}
    family = SAME.get(family, family)
    made = model_of(family, **changes)
    if family in EXPERTS:
        made.set_experts_implementation("eager")  # the other ways know fp32 and bf16 only
    return made.double()


def step(family, ranks, tensor, how="plain", expert=1):
    """On each rank, a thread: metrics and gradients of one step, by (name, part)."""
    models = [model(family) for _ in range(ranks)]  # transformers makes models of one thread at a time

    def main():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            mesh = Mesh(comm, tensor=tensor, expert=expert)
            cut = tensor_parallel(expert_parallel(adapt(models[comm.rank]), mesh), mesh)
            set_recompute(cut, "full" if how == "recompute" else "none")
            cluster = ClusterSpec(mesh.hdp, 160 // mesh.hdp, tensor=tensor)
            offload = None
            if how == "offload":
                pool = PinnedPool(8 << 20, device="cpu")
                offload = ActivationOffload(pool, cut, resident_layers=0, min_bytes=1)
            planner = Planner(None, cluster, cost_model=COST)
            optimizer = torch.optim.SGD(cut.parameters(), lr=0.0)
            trainer = Trainer(cut, optimizer, planner, mesh, max_grad_norm=None, offload=offload)
            done = trainer.step(LENGTHS, lambda i: sequences()[i])
            state = trainer.state_dict()["model"]
            shards = {} if cut.expert is None else cut.expert.shards
            learning = {name: p.grad for name, p in cut.named_parameters() if p.grad is not None}  # indexers do not
            gradients = {(name, part_of(cut, name) or shards.get(name)): g.clone() for name, g in learning.items()}
            return done, gradients, copy.deepcopy(state)

    return run_threads(main, ranks)


# transformers computes norms, rotary tables and losses in fp32: no 1e-10 here.
@pytest.mark.parametrize(
    ("family", "ranks", "tensor", "how", "expert"),
    [
        ("llama", 4, 2, "plain", 1),
        ("llama", 2, 2, "recompute", 1),
        ("llama", 2, 2, "offload", 1),
        ("qwen3", 4, 2, "plain", 1),
        ("qwen3", 4, 4, "recompute", 1),
        ("mistral", 4, 2, "plain", 1),
        ("gemma3", 4, 2, "plain", 1),
        ("granite", 2, 2, "plain", 1),
        ("cohere", 2, 2, "plain", 1),
        ("gemma3", 2, 2, "recompute", 1),
        ("mixtral", 2, 2, "plain", 1),
        ("mixtral", 4, 2, "recompute", 2),
        ("mixtral", 4, 4, "offload", 1),
        ("qwen3-moe", 4, 2, "plain", 1),
        ("qwen3-moe", 4, 2, "plain", 2),
        ("qwen3-moe", 2, 2, "offload", 1),
        ("deepseek-v3", 4, 2, "plain", 1),
        ("deepseek-v3", 2, 2, "recompute", 1),
        ("deepseek-v32", 4, 2, "plain", 1),
        ("deepseek-v32", 2, 2, "offload", 1),
        ("deepseek-v32", 4, 2, "recompute", 2),
        ("qwen3-next", 4, 2, "plain", 2),
        ("qwen3-next", 4, 4, "recompute", 1),
        ("qwen3.5", 4, 2, "offload", 1),
        ("qwen3.5", 4, 4, "plain", 1),
        ("kimi-linear", 4, 2, "recompute", 1),
        ("mamba2", 4, 2, "offload", 1),
        ("mamba2", 4, 4, "recompute", 1),
        ("bamba", 4, 2, "plain", 1),
        ("falcon-h1", 4, 2, "recompute", 1),
        ("granite-hybrid", 4, 2, "plain", 2),
        ("granite-hybrid", 4, 4, "offload", 1),
        ("nemotron-h", 4, 2, "recompute", 2),
        ("nemotron-h", 4, 4, "plain", 1),
        ("phi4", 4, 2, "plain", 1),
        ("phi4", 4, 4, "recompute", 1),
        ("glm4", 2, 2, "offload", 1),
        ("gpt-neox", 4, 2, "plain", 1),
        ("gpt-oss", 4, 4, "recompute", 1),
        ("one-key-head", 4, 4, "plain", 1),
        ("one-kv-head", 4, 2, "offload", 1),
        ("olmo2", 4, 4, "recompute", 1),
        ("olmo-hybrid", 4, 2, "plain", 1),
        ("olmo-hybrid", 4, 4, "offload", 1),
    ],
)
def test_gradients_are_those_of_the_whole_model(family, ranks, tensor, how, expert):
    whole = model(family)
    loss, gradients = unsharded(whole)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    results = step(family, ranks, tensor, how, expert)
    found = {key: gradient for _, own, _ in results for key, gradient in own.items()}
    for done, own, state in results:
        assert done.loss == pytest.approx(loss, rel=1e-5)
        assert done.grad_norm == pytest.approx(float(norm), rel=1e-5)
        for (name, part), gradient in own.items():
            assert torch.equal(gradient, found[name, part]), f"{name} differs between ranks"
            want = gradients[name.removeprefix("model.")]
            error = (gradient - (want if part is None else part.take(want))).norm()
            assert error <= 1e-5 * want.norm() + 1e-9, f"{name}: {error:.1e} of {want.norm():.1e}"
        for name, tensor_ in whole.state_dict().items():
            assert torch.equal(state[f"model.{name}"], tensor_), name
    assert {name for name, _ in found} == {f"model.{name}" for name in gradients}


def trained(family, ranks, tensor, steps, *, zero=0, state=None, folder=None):
    """On each rank, a thread: losses and norms of some steps with momentum, and the state after them; ``folder``: where
    the state is written before the last one, by parts, and read again."""
    models = [model(family) for _ in range(ranks)]

    def main():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            mesh = Mesh(comm, tensor=tensor)
            cut = tensor_parallel(adapt(models[comm.rank]), mesh)
            planner = Planner(None, ClusterSpec(mesh.hdp, 160 // mesh.hdp, tensor=tensor), cost_model=COST)
            optimizer = torch.optim.SGD(cut.parameters(), lr=0.05, momentum=0.9)
            trainer = make_trainer(cut, optimizer, planner, mesh, zero=zero, max_grad_norm=0.5, bucket_bytes=5000)
            if state is not None:
                trainer.load_state_dict(copy.deepcopy(state))
            done = []
            for step in steps:
                if folder is not None and step == steps[-1]:
                    saved = folder_of(comm, folder)
                    saved.save(step, {"trainer": trainer.checkpoint_state()}, {})
                    saved.wait()
                    comm.barrier()
                    other = {"trainer": trainer.checkpoint_state()}
                    for each in cut.parameters() if zero == 0 else ():
                        each.data.fill_(torch.nan)
                    open_checkpoint(folder / f"step-{step}").load_into(other)
                    trainer.load_state_dict(other["trainer"])
                done.append(trainer.step(LENGTHS[step % 2 :], lambda i, step=step: sequences()[i + step % 2]))
            trainer.check_replicas()
            found = [(each.loss, each.grad_norm) for each in done]
            return found, copy.deepcopy(trainer.state_dict()), trainer.num_parameters()

    return run_threads(main, ranks)


@pytest.mark.parametrize("family", ["phi4", "falcon-h1"])
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_owners_of_matrices_that_ranks_share_in_part(family):
    """Other ranks have copies of some rows of a matrix, and none of the others."""
    size = model(family).config.num_attention_heads

    def weights(ranks, tensor):
        models = [model(family) for _ in range(ranks)]

        def main():
            torch.set_num_threads(1)
            with hdp.init() as comm:
                mesh = Mesh(comm, tensor=tensor)
                cut = tensor_parallel(adapt(models[comm.rank]), mesh)
                planner = Planner(None, ClusterSpec(mesh.hdp, 160 // mesh.hdp, tensor=tensor), cost_model=COST)
                muon, sgd = partial(torch.optim.Muon, lr=0.02), partial(torch.optim.SGD, lr=0.05)
                trainer = Trainer(cut, MatrixOwners(cut, mesh, matrices=muon, others=sgd), planner, mesh)
                for _ in range(2):
                    trainer.step(LENGTHS, lambda i: sequences()[i])
                return copy.deepcopy(trainer.state_dict()["model"])

        return run_threads(main, ranks)

    (whole,) = weights(1, 1)
    for found in weights(size, size):
        for name, tensor_ in whole.items():
            assert (found[name] - tensor_).norm() <= 1e-3 * tensor_.norm(), name  # Muon computes in bf16


@pytest.mark.parametrize("family", ["qwen3.5", "falcon-h1", "mamba2", "phi4"])
def test_a_run_goes_on_with_other_tensor_ranks(family, tmp_path):
    ((wanted, whole, size),) = trained(family, 1, 1, range(4))
    first = trained(family, 4, 2, range(2), zero=1, folder=tmp_path / "2")
    then = trained(family, 4, 4, range(2, 3), state=first[0][1], folder=tmp_path / "4")
    last = trained(family, 4, 2, range(3, 4), zero=3, state=then[0][1])
    for ranks in zip(first, then, last, strict=True):
        assert [each for found, _, _ in ranks for each in found] == [pytest.approx(each, rel=1e-5) for each in wanted]
        assert {count for *_, count in ranks} == {size}
        for name, tensor_ in whole["model"].items():
            error = (ranks[-1][1]["model"][name] - tensor_).norm()
            assert error <= 1e-5 * tensor_.norm(), f"{name}: {error:.1e} of {tensor_.norm():.1e}"


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("family", ["falcon-h1", "phi4", "qwen3-next"])
def test_parts_of_rows_go_to_ranks_that_want_whole_tensors(family, zero):
    """As those of an engine that generates do."""
    models, wanted = [model(family) for _ in range(4)], model(family).state_dict()

    def main():
        with hdp.init() as comm:
            mesh = Mesh(comm, tensor=4)
            cut = tensor_parallel(adapt(models[comm.rank]), mesh)
            planner = Planner(None, ClusterSpec(1, 160, tensor=4), cost_model=COST)
            trainer = Trainer(cut, torch.optim.SGD(cut.parameters(), lr=0.0), planner, mesh, zero=zero)
            target = (
                {f"model.{name}": torch.zeros_like(each) for name, each in wanted.items()} if comm.rank == 1 else {}
            )
            Reshard(trainer.checkpoint_state()["model"], target, comm).run()
            return target

    for name, tensor_ in run_threads(main, 4)[1].items():
        assert torch.equal(tensor_, wanted[name.removeprefix("model.")]), name


@pytest.mark.parametrize(
    ("family", "changes", "size", "message"),
    [
        ("deepseek-v3", {}, 3, "self_attn has 4 heads, which 3 tensor ranks cannot share evenly"),
        ("llama4", {}, 2, "feed_forward.experts of Llama4ForCausalLM has matrices"),
        ("qwen3.5", {}, 3, "linear_attn has 4 value heads and 2 key heads, which 3 tensor ranks cannot share evenly"),
        ("qwen3-next", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}, 2, "6 value heads and 3 key heads"),
        ("kimi-linear", {"linear_num_heads": 3}, 2, "self_attn has 3 heads, which 2 tensor ranks cannot share evenly"),
        ("mamba2", {"num_heads": 6, "n_groups": 3, "head_dim": 8, "hidden_size": 24}, 2, "has 6 heads and 3 groups"),
        ("phi4", {"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "has 6 query heads and 3 KV heads"),
        (
            "glm4",
            {"intermediate_size": 47},
            2,
            "mlp.down_proj takes 47 columns, which 2 tensor ranks cannot",
        ),
        ("gpt-neox", {"num_attention_heads": 1}, 2, "has 1 query heads"),
    ],
)
def test_what_is_refused(family, changes, size, message):
    models = [model(family, **changes) for _ in range(size)]

    def main():
        with hdp.init() as comm:
            with pytest.raises(InvalidUsage) as caught:
                tensor_parallel(adapt(models[comm.rank], check=False), Mesh(comm, tensor=size))
            comm.barrier()
            return str(caught.value)

    assert all(message in told for told in run_threads(main, size))


def test_projections_that_no_name_tells_are_refused():
    models = [model("qwen3.5") for _ in range(2)]

    def main():
        with hdp.init() as comm:
            adapted = adapt(models[comm.rank])
            layer = adapted.causal_lm.base_model.layers[0].linear_attn
            layer.side_proj = torch.nn.Linear(32, 4).double()
            with pytest.raises(InvalidUsage, match=r"linear_attn\.side_proj of .* has matrices"):
                tensor_parallel(adapted, Mesh(comm, tensor=2))

    run_threads(main, 2)


def test_a_layer_that_does_more_than_its_plan_tells_is_found():
    models = [model("llama") for _ in range(2)]

    def main():
        with hdp.init() as comm:
            adapted = adapt(models[comm.rank])
            mlp = adapted.causal_lm.base_model.layers[0].mlp
            mlp.register_forward_hook(lambda _module, _args, out: out + out.shape[1])
            with pytest.raises(InvalidUsage, match="gives other logits than whole"):
                tensor_parallel(adapted, Mesh(comm, tensor=2))

    run_threads(main, 2)
