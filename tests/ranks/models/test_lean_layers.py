"""Lean norms, gates and rotations inside models of transformers: what gets them, and that nothing else changes."""

import copy
import gc
import io
import json
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt
from hdpcomm.models.lean_layers import put_lean, take_lean_off
from hdpcomm.models.routes import RoutedBlock

transformers = pytest.importorskip("transformers", minversion="4.54")

from tests.harness.families import FAMILIES, model_of  # noqa: E402
from tests.harness.warm_python import run_python  # noqa: E402

BENCHMARK = Path(__file__).parents[3] / "benchmarks/lean_layers.py"

CU = torch.tensor([0, 5, 9], dtype=torch.int32)
PLACES = {"positions": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]), "cu_seqlens": CU, "comm": None}
IDS = torch.arange(9) + 3


def forms(model):
    """Names of the kinds of layers that have a lean form."""
    return {
        type(layer).__name__.replace(type(model).__name__.replace("ForCausalLM", ""), "")
        for layer in model.modules()
        if "_apply_gate" in vars(layer) or not isinstance(vars(layer).get("forward"), RoutedBlock | None)
    }


def step(model, **options):
    """Loss and gradients."""
    adapted = adapt(model, **options).train()
    loss = adapted(IDS, **PLACES, labels=IDS)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"RMSNorm", "MLP", "Attention"}),
        ("qwen3", {"RMSNorm", "MLP", "Attention"}),
        ("gemma3", {"RMSNorm", "MLP", "Attention"}),
        ("gpt-oss", {"RMSNorm", "Experts", "Attention"}),
        ("mixtral", {"RMSNorm", "Experts", "Attention"}),
        ("phi4", {"RMSNorm", "MLP", "Attention"}),
        ("gpt-neox", {"Attention"}),
    ],
)
def test_layers_that_get_a_lean_form(family, expected):
    model = model_of(family)
    names = list(model.state_dict())
    adapt(model)
    kinds = {name.removeprefix("Gemma3").removeprefix("Phi3") for name in forms(model)}
    assert kinds == expected
    assert list(model.state_dict()) == names
    layers = [m for m in model.modules() if type(m).__name__.endswith(tuple(expected))]
    assert all("forward" in vars(layer) or "_apply_gate" in vars(layer) for layer in layers)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt-oss", "mixtral", "phi4", "gpt-neox"])
def test_gradients_in_fp64_are_those_of_the_plain_layers(family, monkeypatch):
    """The norms of transformers compute in fp32 whatever they are given; here theirs are exact, too."""
    models = [model_of(family).double() for _ in range(2)]
    for model in models:
        model.set_experts_implementation("eager")  # torch's grouped product knows no fp64
    for kind in {type(m) for m in models[0].modules() if type(m).__name__.endswith("RMSNorm")}:

        def exact(self, x, offset=float("Gemma" in kind.__name__)):
            eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (self.weight + offset)

        monkeypatch.setattr(kind, "forward", exact)
    (loss, gradients), (plain_loss, plain) = step(models[0]), step(models[1], lean=False)
    assert forms(models[0])
    assert not forms(models[1])
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-11)
    for name, gradient in plain.items():
        assert float((gradients[name] - gradient).norm()) <= 1e-10 * float(gradient.norm()) + 1e-14, name


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_exact_as_the_plain_layers(family):
    """Errors of the loss in bf16 against fp32."""
    exact = step(model_of(family), lean=False)[0]
    lean, plain = (step(model_of(family).bfloat16(), lean=lean)[0] for lean in (True, False))
    assert abs(float(lean - exact)) <= 2 * abs(float(plain - exact)) + 4e-3 * float(exact)


def test_lean_off_takes_it_off_and_a_failed_check_too():
    model = model_of("llama")
    adapt(model)
    adapt(model)
    assert forms(model)
    adapt(model, lean=False)
    assert not forms(model)
    model.model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(InvalidUsage, match="does not run on a pack"):
        adapt(model)
    assert not forms(model)


CHANGES = {
    "a norm with another formula": (
        "LlamaRMSNorm", lambda self, x: x / (x.norm(dim=-1, keepdim=True) + 1) * self.weight,
    ),
    "a gate with a factor": (
        "LlamaMLP", lambda self, x: self.down_proj(self.act_fn(0.5 * self.gate_proj(x)) * self.up_proj(x)),
    ),
    "a gate that adds its input": (
        "LlamaMLP", lambda self, x: x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)),
    ),
    "values alone are equal": (
        "LlamaMLP", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x.detach())) * self.up_proj(x)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_computes_something_else_is_left(change, monkeypatch):
    name, forward = CHANGES[change]
    monkeypatch.setattr(getattr(transformers.models.llama.modeling_llama, name), "forward", forward)
    model = model_of("llama")
    adapt(model)
    assert forms(model) == {"RMSNorm", "MLP", "Attention"} - {name.removeprefix("Llama")}


def test_a_layer_with_dropout_is_left(monkeypatch):
    def forward(self, x):
        mixed = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(nn.functional.dropout(mixed, 0.5, self.training))

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", forward)
    model = model_of("llama").eval()
    put_lean(model)
    assert forms(model) == {"RMSNorm", "Attention"}


def test_gate_and_up_are_told_apart(monkeypatch):
    """The names and their order say nothing."""

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", forward)
    mlp, x = model_of("llama").model.layers[0].mlp, torch.randn(3, 32)
    plain = mlp(x)
    put_lean(mlp)
    assert mlp.forward.names == ("up_proj", "gate_proj", "down_proj")
    torch.testing.assert_close(mlp(x), plain)
    torch.testing.assert_close(mlp(x=x), plain)


def test_layers_of_one_class_with_other_activations():
    layers = model_of("llama").model.layers
    layers[1].mlp.act_fn = nn.GELU(approximate="tanh")
    put_lean(layers)
    assert [layer.mlp.forward.activation for layer in layers] == ["silu", "gelu_tanh"]


class Marked(torch.Tensor):
    """A tensor that is not plain, as a DTensor."""


def test_tensors_that_are_not_plain_go_to_the_layers_own_forward():
    layer = model_of("gpt-oss").model.layers[0]
    put_lean(layer)
    x = torch.randn(3, 32).as_subclass(Marked)
    assert type(layer.input_layernorm(x)) is Marked
    pairs = torch.randn(3, 8).as_subclass(Marked)
    assert type(layer.mlp.experts._apply_gate(pairs)) is Marked
    layer.input_layernorm.weight = nn.Parameter(torch.ones(32).as_subclass(Marked))
    assert type(layer.input_layernorm(torch.randn(3, 32))) is Marked
    q, table = torch.randn(1, 4, 3, 8).as_subclass(Marked), torch.randn(1, 3, 4)
    (rotation,) = layer.self_attn.forward.rotations.values()
    assert type(rotation(q, q, table, table)[0]) is Marked


def test_models_are_freed_without_the_garbage_collector():
    model = model_of("llama")
    put_lean(model)
    layers = [weakref.ref(m) for m in model.modules() if "forward" in vars(m)]
    gc.collect()
    gc.disable()
    try:
        del model
        assert layers
        assert not any(layer() for layer in layers)
    finally:
        gc.enable()


def test_a_rotation_that_computes_something_else_is_left(monkeypatch):
    module = transformers.models.llama.modeling_llama

    def other(q, k, cos, sin, unsqueeze_dim=1):
        return q * cos.unsqueeze(unsqueeze_dim), k * sin.unsqueeze(unsqueeze_dim)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", other)
    model = model_of("llama")
    adapt(model)
    assert forms(model) == {"RMSNorm", "MLP"}


def test_layers_on_the_meta_device_are_known_too():
    with torch.device("meta"):
        model = model_of("gemma3")
        adapt(model)
    assert {name.removeprefix("Gemma3") for name in forms(model)} == {"RMSNorm", "MLP", "Attention"}


def test_nothing_is_drawn_from_the_programs_random_numbers():
    model, before = model_of("phi4"), torch.get_rng_state()
    put_lean(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_with_a_forward_of_its_own_is_left():
    model = model_of("llama")
    norm = model.model.norm
    norm.forward = lambda x: type(norm).forward(norm, x)
    before = norm.forward
    adapt(model)
    assert norm.forward is before


def test_hooks_run_as_before():
    model = model_of("llama")
    layer = model.model.layers[0]
    called = []
    for name in ("mlp", "mlp.gate_proj", "mlp.act_fn", "input_layernorm", "self_attn.q_proj"):
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    adapted = adapt(model)
    called.clear()
    adapted(IDS, **PLACES)
    assert sorted(called) == ["input_layernorm", "mlp", "mlp.act_fn", "mlp.gate_proj", "self_attn.q_proj"]


def test_copies_have_layers_of_their_own():
    model = model_of("llama")
    put_lean(model)
    layer, x = model.model.layers[0], torch.randn(3, 32)
    parts = nn.ModuleList([layer.mlp, layer.input_layernorm])
    buffer = io.BytesIO()
    torch.save(parts, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(parts), torch.load(buffer, weights_only=False)):
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        for own, part in zip(parts, copied, strict=True):
            assert part.forward.layer is part
            assert own(x).any()
            assert not part(x).any()
    attention = copy.deepcopy(layer).self_attn
    assert attention.forward.layer is attention


def test_saved_models_are_those_of_transformers(tmp_path):
    model = model_of("qwen3")
    adapted = adapt(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not forms(loaded)
    assert type(loaded) is type(model)
    torch.testing.assert_close(adapted(IDS[:5], positions=torch.arange(5), cu_seqlens=CU[:2], comm=None),
                               loaded(input_ids=IDS[None, :5]).logits[0], rtol=1e-4, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_generation(family):
    model, plain = model_of(family).eval(), model_of(family).eval()
    put_lean(model)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS[None], **options), plain.generate(IDS[None], **options))


def test_a_weight_of_another_type_gives_the_type_that_it_gave():
    for family, wanted in (("llama", torch.float32), ("gemma3", torch.bfloat16), ("gpt-oss", torch.bfloat16)):
        norm = model_of(family).model.norm
        x = torch.randn(3, 32).bfloat16()
        plain = norm(x)
        put_lean(norm)
        assert norm(x).dtype == plain.dtype == wanted
        torch.testing.assert_close(norm(x), plain, rtol=2e-2, atol=2e-2)
        take_lean_off(norm)


def test_autocast_changes_no_gradient_of_a_norm():
    norm = model_of("gemma3").model.norm
    put_lean(norm)
    gradients = []
    for enabled in (False, True):
        norm.weight.grad = None
        x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            norm(x).square().sum().backward()
        gradients.append((x.grad, norm.weight.grad))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_second_derivatives_are_refused():
    model = model_of("gemma3")
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    put_lean(model)
    for layer in (norm, mlp):
        x = torch.randn(3, 32, requires_grad=True)
        with pytest.raises(InvalidUsage, match="create_graph"):
            torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_compiled_code_computes_as_the_class_does():
    model = model_of("llama")
    put_lean(model)
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 32)
    compiled = torch.compile(mlp, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), mlp(x))


def test_counted_layers_equal_the_built_in_one(tmp_path):
    file = tmp_path / "out.json"
    done = run_python([str(BENCHMARK), "--json", str(file)], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["model"], row["form"]): row for row in json.loads(file.read_text())["rows"]}
    counts = ("launches", "read_bytes", "written_bytes", "kept_bytes")
    own = rows["built-in", "lean"]
    for name in counts:
        assert rows["Llama", "lean"][name] <= 1.05 * own[name]
        assert rows["Llama", "plain"][name] > 1.2 * own[name]
    for name in counts[:3]:
        assert rows["Qwen3", "lean"][name] <= 1.05 * own[name]
