"""Multi-token prediction beside plain torch in fp64, sequence by sequence in one process, and transformers' own."""

import functools
import json
import math
import shutil

import pytest
import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.comm import Mesh
from hdpcomm.data import fold
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt, add_mtp, from_pretrained, set_recompute
from hdpcomm.models.export import write_folder
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, Planner, SequenceFragment
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from hdpcomm.train.losses import sft
from tests.harness.pipelines import COST, FixedPlanner

transformers = pytest.importorskip("transformers", minversion="5.23")
safetensors = pytest.importorskip("safetensors")

from tests.harness.families import model_of  # noqa: E402

LENGTHS = (1, 2, 3, 17, 64, 5)
WEIGHT, VOCABULARY = 0.3, 96
LR = 1.0


def tokens_of(i):
    return torch.randint(VOCABULARY, (LENGTHS[i],), generator=torch.Generator().manual_seed(i))


def labels_of(i):
    """The next tokens, some of them masked."""
    labels = torch.cat((tokens_of(i)[1:], torch.tensor([-100])))
    labels[torch.arange(LENGTHS[i]) % 7 == 5] = -100
    return labels


def fetch(i):
    return tokens_of(i), labels_of(i)


class Parts:
    """Reads parts of sequences."""

    def __call__(self, i):
        return fetch(i)

    def part(self, i, start, stop):
        return tokens_of(i)[start:stop], labels_of(i)[start:stop]


def plain(family="qwen3", depth=1, dtype=torch.float64, **changes):
    torch.manual_seed(1)
    model = model_of(family, vocab_size=VOCABULARY, **changes).to(dtype)
    add_mtp(model, depth, weight=WEIGHT)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(1.0)
    return model


def attended(x, p, before, config, rotary):
    """A layer of Qwen3 on one sequence."""

    def norm(x, name):
        return nn.functional.rms_norm(x, x.shape[-1:], p[f"{before}{name}.weight"], config.rms_norm_eps)

    def heads(x, name):
        return (x @ p[f"{before}self_attn.{name}_proj.weight"].T).view(len(x), -1, config.head_dim).transpose(0, 1)

    def turned(x):
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    normed = norm(x, "input_layernorm")
    cos, sin = (each[0] for each in rotary(x, torch.arange(len(x))[None]))
    q, k, v = (heads(normed, name) for name in "qkv")
    q, k = turned(norm(q, "self_attn.q_norm")), turned(norm(k, "self_attn.k_norm"))
    k, v = (each.repeat_interleave(len(q) // len(k), 0) for each in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(config.head_dim)
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
    x = x + out.transpose(0, 1).flatten(1) @ p[f"{before}self_attn.o_proj.weight"].T
    normed = norm(x, "post_attention_layernorm")
    gate, up = (normed @ p[f"{before}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + nn.functional.silu(gate) * up @ p[f"{before}mlp.down_proj.weight"].T


@functools.cache
def wanted(depth):
    """(main loss, mean loss ahead, gradients): of depth k the tokens that have one k places later, and no others."""
    model = plain(depth=depth)
    config, rotary = model.config, model.model.rotary_emb
    p = dict(model.named_parameters())
    embedding, head = p["model.embed_tokens.weight"], p["lm_head.weight"]
    losses, ahead, counts = [], [], [0, 0]

    def norm(x, name):
        return nn.functional.rms_norm(x, x.shape[-1:], p[name], config.rms_norm_eps)

    def embedded(tokens):
        return nn.functional.embedding(tokens, embedding, padding_idx=config.pad_token_id)

    for i in range(len(LENGTHS)):
        tokens, labels = fetch(i)
        x = embedded(tokens)
        for layer in range(2):
            x = attended(x, p, f"model.layers.{layer}.", config, rotary)
        x = norm(x, "model.norm.weight")
        losses.append(nn.functional.cross_entropy(x @ head.T, labels, reduction="sum"))
        counts[0] += int((labels >= 0).sum())
        for k in range(1, depth + 1):
            before = f"model.layers.{1 + k}."
            tokens, labels = tokens[1:], labels[1:]
            joined = [norm(embedded(tokens), f"{before}enorm.weight"), norm(x[:-1], f"{before}hnorm.weight")]
            if not len(tokens):
                break
            x = attended(torch.cat(joined, 1) @ p[f"{before}eh_proj.weight"].T, p, before, config, rotary)
            x = norm(x, f"{before}shared_head.norm.weight")
            ahead.append(nn.functional.cross_entropy(x @ head.T, labels, reduction="sum"))
            counts[1] += int((labels >= 0).sum())
    main, further = torch.stack(losses).sum(), torch.stack(ahead).sum()
    ((main + WEIGHT / depth * further) / counts[0]).backward()
    return main.item() / counts[0], further.item() / counts[1], {name: each.grad for name, each in p.items()}


def train(model, comm, planner, *, zero=0, recompute="none", steps=1, read=fetch, lr=LR):
    mesh = Mesh(comm, tensor=planner.cluster.tensor, expert=planner.cluster.expert)
    adapted = adapt(model, check=False)
    tensor_parallel(expert_parallel(adapted, mesh, check=False), mesh, check=False)
    set_recompute(adapted, recompute)
    optimizer = torch.optim.SGD(adapted.parameters(), lr=lr)
    trainer = Trainer(adapted, optimizer, planner, mesh, max_grad_norm=None, zero=zero)
    before = trainer.state_dict()["model"]
    before = {name: x.clone() for name, x in before.items()}
    metrics = [trainer.step(LENGTHS, read) for _ in range(steps)]
    after = trainer.state_dict()["model"]
    return metrics[-1], {name.removeprefix("model."): (before[name] - x) / lr for name, x in after.items()}, trainer


def planner_of(ranks, **options):
    sizes = {name: options.pop(name) for name in ("tensor", "expert") if name in options}
    hdp_ranks = ranks // sizes.get("tensor", 1)
    return Planner(None, ClusterSpec(hdp_ranks, 72 // hdp_ranks, **sizes), cost_model=COST, **options)


def sliced(ranks):
    """Slices, of one token among them, and a pack, all on all ranks."""
    every = tuple(range(ranks))
    slices = [
        (every, SequenceFragment(4, start, stop)) for start, stop in ((0, 1), (1, 2), (2, 40), (40, 63), (63, 64))
    ]
    more = [(every, SequenceFragment(1, start, start + 1)) for start in (0, 1)]
    return FixedPlanner(ranks, 1, [*slices, *more, (every, (0, 2, 3, 5))])


def check(ranks, planner, depth=1, **options):
    models = [plain(depth=depth) for _ in range(ranks)]

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            return train(models[comm.rank], comm, planner(), **options)[:2]

    loss, ahead, gradients = wanted(depth)
    for metrics, found in run_threads(rank, ranks):
        assert abs(metrics.loss - loss) < 1e-10
        assert abs(metrics.mtp_loss - ahead) < 1e-10
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10, msg=name)


def test_the_oracle_has_gradients_of_all_layers():
    for depth in (1, 2):
        assert all(gradient.abs().max() > 1e-6 for gradient in wanted(depth)[2].values())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_loss_and_gradients_are_those_of_plain_torch(ranks, depth):
    check(ranks, lambda: planner_of(ranks), depth)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("read", [fetch, Parts()], ids=["whole", "parts"])
def test_slices(ranks, depth, read):
    check(ranks, lambda: sliced(ranks), depth, read=read)


@pytest.mark.parametrize(
    "options",
    [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"recompute": "full"}, {"recompute": 1, "zero": 3}, {"read": Parts()}],
    ids=["zero 1", "zero 2", "zero 3", "recompute", "recompute and zero", "parts"],
)
def test_what_a_step_can(options):
    check(2, lambda: planner_of(2), 2, **options)


@pytest.mark.parametrize("options", [{"queue": True}, {"slices": 4}, {"tensor": 2}], ids=str)
def test_plans(options):
    check(2, lambda: planner_of(2, **options), 2)


def moe(family, depth=1):
    changes = {"output_router_logits": False} if "qwen" in family else {"n_group": 1, "topk_group": 1}
    return plain(family, depth, torch.float32, **changes)


@functools.cache
def of_transformers(family, depth):
    """(loss, mean loss ahead, gradients) of a mixture of experts by transformers' own layers, fp32."""
    model = moe(family, depth)
    decoder, config = model.model, model.config
    config.num_nextn_predict_layers = depth
    main, further, counts = 0.0, 0.0, [0, 0]
    for i in range(len(LENGTHS)):
        tokens, labels = fetch(i)
        x = decoder(input_ids=tokens[None], use_cache=False).last_hidden_state
        main = main + nn.functional.cross_entropy(model.lm_head(x)[0], labels, reduction="sum")
        counts[0] += int((labels >= 0).sum())
        for layer in decoder.layers[2:]:
            tokens, labels = tokens[1:], labels[1:]
            if not len(tokens):
                break
            block = transformers.modeling_layers.MtpLayer.__new__(transformers.modeling_layers.MtpLayer)
            nn.Module.__init__(block)
            block.config, block.use_post_norm, block.post_norm = config, True, layer.shared_head.norm
            block.enorm, block.hnorm, block.eh_proj = layer.enorm, layer.hnorm, layer.eh_proj
            block.mtp_block = Own(layer)
            positions = torch.arange(1, 1 + len(tokens))[None]
            embedded = decoder.embed_tokens(tokens[None])
            mask = torch.full((len(tokens), len(tokens)), -math.inf).triu(1)[None, None]
            rotary = decoder.rotary_emb(embedded, position_ids=positions)
            x = block(embedded, x[:, :-1], rotary, mask, positions, None)
            further = further + nn.functional.cross_entropy(model.lm_head(x)[0], labels, reduction="sum")
            counts[1] += int((labels >= 0).sum())
    ((main + WEIGHT / depth * further) / counts[0]).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return main.item() / counts[0], further.item() / counts[1], gradients


class Own(nn.Module):
    """A layer by the forward of its class."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **options):
        return type(self.layer).forward(self.layer, x, **options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek-v3", {"ranks": 1}), ("deepseek-v3", {"ranks": 3}), ("deepseek-v3", {"ranks": 2, "expert": 2}),
        ("deepseek-v3", {"ranks": 4, "expert": 2, "tensor": 2}), ("glm4-moe", {"ranks": 2}),
        ("qwen3-next", {"ranks": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_mixtures_of_experts_beside_transformers_own_layers(family, options):
    options = dict(options)
    ranks = options.pop("ranks")
    models = [moe(family) for _ in range(ranks)]

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            return train(models[comm.rank], comm, planner_of(ranks, **options))[:2]

    loss, ahead, gradients = of_transformers(family, 1)
    for metrics, found in run_threads(rank, ranks):
        assert abs(metrics.loss - loss) < 1e-5
        assert abs(metrics.mtp_loss - ahead) < 1e-5
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("family", "depth", "names"),
    [
        ("deepseek-v3", 1, ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.3.up_proj.weight")),
        ("deepseek-v3", 2, ("model.layers.3.shared_head.norm.weight", "model.layers.3.shared_head.head.weight")),
        ("glm4-moe", 1, ("model.layers.2.enorm.weight", "model.layers.2.embed_tokens.weight")),
        ("qwen3-next", 1, ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.experts.3.up_proj.weight")),
    ],
)
def test_names_in_checkpoints(tmp_path, family, depth, names):
    model = moe(family, depth)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    write_folder(model.config, state.items(), tmp_path / "saved", depths=depth)
    with safetensors.safe_open(tmp_path / "saved" / "model.safetensors", framework="pt") as file:
        keys = set(file.keys())
    assert keys >= set(names)
    assert not any("layers.2" in key for key in keys) or "qwen" not in family
    read = from_pretrained(tmp_path / "saved", mtp_weight=0.1, check=False).model
    assert read.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in read.state_dict().items())
    plain_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(x, state[name]) for name, x in plain_model.state_dict().items())


def test_transformers_generates_with_a_model_that_was_saved(tmp_path, monkeypatch):
    model = moe("deepseek-v3")
    write_folder(model.config, model.state_dict().items(), tmp_path / "saved", depths=1)
    kind = transformers.DeepseekV3ForCausalLM
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\..*"])
    ahead = transformers.modeling_layers.MtpModel.from_pretrained(kind.from_pretrained(tmp_path / "saved"))
    layer, own = model.model.layers[2], ahead.layers[0]
    assert torch.equal(own.eh_proj.weight, layer.eh_proj.weight)
    assert torch.equal(own.post_norm.weight, layer.shared_head.norm.weight)
    for name, x in own.mtp_block.state_dict().items():
        assert torch.equal(x, layer.state_dict()[name])


def test_layers_are_new_where_a_folder_has_none(tmp_path):
    config = model_of("deepseek-v3").config
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    one, two = (from_pretrained(tmp_path / "plain", mtp_weight=0.3, check=False, seed=7) for _ in range(2))
    assert all(torch.equal(x, two.state_dict()[name]) for name, x in one.state_dict().items())
    (layer,) = one.model.model.layers[2:]
    assert 0.005 < layer.eh_proj.weight.std() < 0.05
    assert not torch.equal(layer.self_attn.o_proj.weight, one.model.model.layers[1].self_attn.o_proj.weight)
    assert from_pretrained(config, mtp_weight=0.3, check=False, seed=7).mtp.depths == 1


def test_the_command(tmp_path):
    config = model_of("deepseek-v3", n_group=1, topk_group=1).config
    config.vocab_size, config.num_nextn_predict_layers = 256, 2
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog lay down\n" * 200)
    command = ["train", "--data", str(tmp_path / "text.txt"), "--tokenizer", "bytes", "--context", "64"]
    command += ["--tokens-per-step", "512", "--mtp-weight", "0.3", "--zero", "3", "--ranks", "2"]

    def run(name, steps, *more, model="model"):
        files = [f"--{each}={tmp_path / name / each}" for each in ("out", "export")]
        assert main([*command, *files, "--model", str(tmp_path / model), "--steps", str(steps), *more]) == 0
        rows = (tmp_path / name / "out" / "metrics.jsonl").read_text().splitlines()
        found = [row["mtp_loss"] for row in map(json.loads, rows) if "mtp_loss" in row]
        with safetensors.safe_open(tmp_path / name / "export" / "model.safetensors", framework="pt") as file:
            return found, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    losses, whole = run("whole", 4)
    assert len(losses) == 4
    assert abs(losses[0] - math.log(256)) < 0.3
    assert losses[-1] < losses[0] - 0.3
    assert json.loads((tmp_path / "whole" / "export" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    run("half", 2, "--save-every", "2", "--schedule", "constant")
    straight, again = run("straight", 4, "--schedule", "constant")[1], None
    shutil.rmtree(tmp_path / "half" / "export")
    again = run("half", 4, "--save-every", "2", "--schedule", "constant", "--resume", "auto")[1]
    assert again.keys() == straight.keys() == whole.keys()
    assert all(torch.equal(x, straight[name]) for name, x in again.items())
    (first, *_), _ = run("on", 1, model="whole/export")
    assert first < losses[-1] + 0.02
    assert main([*command, "--steps", "1"]) == 6  # the built-in Llama
    assert main([*command, "--steps", "1", "--model", str(tmp_path / "model"), "--pipeline", "2"]) == 6


def test_what_it_does_not_go_with():
    model = plain()
    with pytest.raises(InvalidUsage, match="already"):
        add_mtp(model)
    with pytest.raises(InvalidUsage, match="before adapt"):
        add_mtp(nn.Linear(2, 2))
    with pytest.raises(InvalidUsage, match="depth"):
        add_mtp(model_of("qwen3"), 0)
    adapted = adapt(model, check=False)
    with pytest.raises(InvalidUsage, match="embedding of tokens behind the last layer"):
        split_model(adapted, 2)
    changed = model_of("qwen3")
    adapt(changed, check=False)
    with pytest.raises(InvalidUsage, match="is adapted"):
        add_mtp(changed)
    with pytest.raises(InvalidUsage, match="runs all layers"):
        add_mtp(model_of("gpt-oss"))
    with hdp.init() as comm:
        planner = Planner(None, ClusterSpec(1, 200), cost_model=COST)
        optimizer = torch.optim.SGD(adapted.parameters(), lr=0.0)
        (tree,) = fold([tokens_of(4), torch.cat((tokens_of(4)[:9], tokens_of(3)))])
        trainer = Trainer(adapted, optimizer, planner, comm)
        with pytest.raises(InvalidUsage, match="a tree has several tokens"):
            trainer.step([tree.tree], lambda _: tree.tokens)
        losses = (sft(), lambda logits, labels: logits.sum() * labels.sum())
        for loss in losses:
            with pytest.raises(InvalidUsage, match="another loss= no labels"):
                Trainer(adapted, optimizer, planner, comm, loss=loss).step([17], lambda _: {"tokens": tokens_of(3)})
        assert trainer.step([17], lambda _: tokens_of(3)).mtp_loss > 0
        total, labels = trainer.evaluate([17], lambda _: tokens_of(3)).tolist()
        assert abs(total / labels - trainer.step([17], lambda _: tokens_of(3)).loss) < 1e-9
        log_probs, _ = trainer.log_probs([17], lambda _: tokens_of(3))
        assert abs(log_probs[0].sum() + total) < 1e-9


def test_sequences_without_a_token_ahead():
    ((metrics, gradients),) = run_threads(lambda: _short(plain(depth=2)), 1)
    assert metrics.mtp_loss == 0
    assert not gradients["model.layers.3.eh_proj.weight"].any()
    assert gradients["model.layers.1.self_attn.q_proj.weight"].any() or gradients["lm_head.weight"].any()


def _short(model):
    with hdp.init() as comm:
        trainer = Trainer(adapt(model, check=False), torch.optim.SGD(model.parameters(), lr=1.0), planner_of(1), comm)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        metrics = trainer.step([2, 1, 2], lambda i: tokens_of(4)[i : i + (1 if i == 1 else 2)])
        return metrics, {name: before[name] - p.detach() for name, p in model.named_parameters()}
