"""Router replay in TRL's GRPOTrainer, beside a plain one whose routers are made to take what they took before."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("trl", minversion="1.16")

from trl import GRPOTrainer  # noqa: E402

from hdpcomm.errors import InvalidUsage  # noqa: E402
from hdpcomm.integrations.row_passes import RowPasses  # noqa: E402
from tests.harness.families import model_of  # noqa: E402
from tests.harness.pipelines import COST  # noqa: E402
from tests.harness.tiny_huggingface import leave, weights  # noqa: E402
from tests.ranks.train.test_huggingface_trl import PlannedDPO, PlannedGRPO, rollouts, trainer_of  # noqa: E402

SEVERAL = {"num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 4}
"""Two optimizer steps on each half of what was generated."""
EXPERTS, LAYERS = 4, 2


def mixture() -> Any:
    changes = {"mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.0}
    model = model_of("qwen3-moe", vocab_size=64, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name:
                parameter.mul_(0.1)  # so that a step changes what is chosen
    return model


class Routers:
    """The routers of a model, whose choices are kept, or told. It wraps their forward passes."""

    def __init__(self, model: Any) -> None:
        self.kept: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
        self.told: list[torch.Tensor] | None = None
        self.keeps = False
        gates = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
        for place, gate in enumerate(gates):
            gate.forward = self._forward(place, gate, gate.forward)

    def _forward(self, place: int, gate: Any, own: Any) -> Any:
        def forward(x: torch.Tensor) -> Any:
            logits, scores, chosen = own(x)
            if self.keeps:
                self.kept[place].append(chosen)
            if self.told is None:
                return logits, scores, chosen
            chosen = self.told[place]
            scores = logits.float().softmax(-1).gather(1, chosen)
            return logits, scores / scores.sum(-1, keepdim=True) if gate.norm_topk_prob else scores, chosen

        return forward

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        self.kept, self.keeps = [[] for _ in range(LAYERS)], True
        yield
        self.keeps = False

    def rows(self, shape: torch.Size) -> torch.Tensor:
        """``[rows, tokens, layers, top_k]`` of what was kept."""
        return torch.stack([torch.cat(each).view(*shape, -1) for each in self.kept], 2)


class PlainReplay(GRPOTrainer):  # type: ignore[misc]
    """Takes the routes of the old policy's pass, or of the rollout, again."""

    given: list[Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.of_rollout = kwargs.pop("router_replay", "R2") == "R3"
        super().__init__(*args, **kwargs)
        self.routers, self.replay = Routers(self.model), True

    def _generate(self, *args: Any) -> Any:
        generated = super()._generate(*args)
        self.given = generated[5].pop("routed_experts", None)
        return generated

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.first = True
        scored = super()._generate_and_score_completions(inputs)
        scored["routes"] = self.routes
        return scored

    def _get_per_token_logps_and_entropies(self, model: Any, tokens: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.first:
            return super()._get_per_token_logps_and_entropies(model, tokens, mask, *args, **kwargs)
        self.first = False
        if self.given is not None:
            self.routes = torch.zeros(*tokens.shape, LAYERS, 2, dtype=torch.int64)
            for row, own in enumerate(self.given):
                self.routes[row, mask[row].bool()] = torch.as_tensor(own).long()
            kwargs["batch_size"] = len(tokens)
            self.routers.told = list(self.routes.flatten(0, 1).unbind(1))
        with self.routers.keeping():
            found = super()._get_per_token_logps_and_entropies(model, tokens, mask, *args, **kwargs)
        self.routers.told = None
        if self.given is None:
            self.routes = self.routers.rows(tokens.shape)
        return found

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.routers.told = list(inputs["routes"].flatten(0, 1).unbind(1)) if self.replay else None
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.routers.told = None


class NoReplay(PlainReplay):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replay = False


def rollouts_with_routes(prompts: list[str], trainer: Any) -> dict[str, Any]:
    made = rollouts(prompts, trainer)
    draw = torch.Generator().manual_seed(100 * trainer.calls + trainer.accelerator.process_index)
    lengths = [len(a) + len(b) for a, b in zip(made["prompt_ids"], made["completion_ids"], strict=True)]
    made["routed_experts"] = [
        torch.rand(length, LAYERS, EXPERTS, generator=draw).argsort(-1)[..., :2].to(torch.int16).numpy()
        for length in lengths
    ]
    return made


def train(kind: Any, out: str, changed: dict[str, Any], given: dict[str, Any]) -> Any:
    """(weights, what was taken in training and recorded before, by row)."""
    torch.manual_seed(7)
    taken: list[Any] = []
    try:
        trainer = trainer_of(kind, out, changed, **given)
        run, again = RowPasses.train, RowPasses.score

        def trained(passes: Any, planned: Any, batch: Any, **more: Any) -> Any:
            taken.append(batch.routes)
            return run(passes, planned, batch, **more)

        def scored(passes: Any, own: Any, **more: Any) -> Any:
            """The routes of a training pass are those that its own passes choose when they are told these."""
            found = again(passes, own, **more)
            if own.routes is not None and torch.is_grad_enabled():
                with torch.no_grad():
                    assert torch.equal(again(passes, own, **{**more, "routes": True}).routes, own.routes)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowPasses, "train", trained)
            patch.setattr(RowPasses, "score", scored)
            patch.setattr("hdpcomm.measure.memory.profile_cost_model", lambda *_, **__: COST)
            trainer.train()
        trainer.accelerator.wait_for_everyone()
        return weights(trainer.model), taken
    finally:
        gc.collect()
        leave()


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((x - other[name]).abs().max()) for name, x in one.items())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_training_takes_the_routes_again(ranks: Any, tmp_path: Path, size: int, replay: str) -> None:
    mixture().save_pretrained(tmp_path / "model")
    given: dict[str, Any] = {"rollout_func": rollouts_with_routes} if replay == "R3" else {}
    names = {PlannedGRPO: "planned", PlainReplay: "plain", NoReplay: "free"}
    changed = SEVERAL | {"learning_rate": 4.0}
    found = {
        name: ranks(size, train, kind, str(tmp_path / name), changed, given | {"router_replay": replay})
        for kind, name in names.items()
    }
    for (planned, taken), (plain, _), (free, _) in zip(*found.values(), strict=True):
        assert len(taken) == 8  # two passes in each of four steps
        assert all(routes is not None and routes.shape[1:] == (LAYERS, 2) for routes in taken)
        assert furthest(planned, plain) < 2e-6
        assert furthest(free, plain) > 2e-5, "routers would choose otherwise"


@pytest.mark.parametrize(
    ("kind", "changed", "given", "refused"),
    [
        (PlannedGRPO, SEVERAL, {"router_replay": "R1"}, "expected 'R2' or 'R3'"),
        (PlannedDPO, {}, {"router_replay": "R2"}, "with TRL's GRPOTrainer"),
        (PlannedGRPO, {}, {"router_replay": "R2"}, "no pass before it has routes"),
        (PlannedGRPO, SEVERAL, {"router_replay": "R3", "rollout_func": None}, "takes routed_experts of rollout_func"),
    ],
)
def test_what_is_refused(tmp_path: Path, kind: Any, changed: Any, given: Any, refused: str) -> None:
    mixture().save_pretrained(tmp_path / "model")
    with pytest.raises(InvalidUsage, match=refused):
        trainer_of(kind, str(tmp_path / "run"), changed, **given)
    leave()


def test_rollouts_without_routes(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path / "model")
    try:
        with pytest.raises(InvalidUsage, match="routed_experts of 0 rows of 16"):
            trainer_of(PlannedGRPO, str(tmp_path / "run"), SEVERAL, router_replay="R3").train()
    finally:
        leave()
