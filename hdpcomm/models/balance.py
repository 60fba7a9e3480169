"""Routers that balance themselves without a loss: a bias on the scores by which a router chooses, moved after each step
against its experts' loads (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al., arXiv 2408.15664)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hdpcomm.arguments import check_number
from hdpcomm.attention.pack_context import find_pack
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.expert_group import ExpertLoad, counts_of
from hdpcomm.models.moe import holds_experts

if TYPE_CHECKING:
    from hdpcomm.comm import Mesh

__all__ = ["balance_routers", "loads_on_mesh", "settle_loads"]

_NAMES = ("e_score_correction_bias", "expert_bias")
"""Names of the bias in the models of transformers: a buffer, or a parameter that is not trained."""


@dataclass(frozen=True, slots=True, eq=False)
class RouterBias:
    """A router's bias, and by how much a step moves it."""

    router: nn.Module
    name: str
    rate: float

    def move(self, counts: Tensor) -> None:
        """Up for experts with fewer tokens than the mean, down for those with more.

        Args:
            counts: int64 ``[experts]`` on the CPU.
        """
        bias = getattr(self.router, self.name)
        direction = torch.sign(counts.sum() - counts.numel() * counts).to(bias.device, bias.dtype)
        bias.detach().view(-1).add_(direction, alpha=self.rate)


def balance_routers(model: nn.Module, rate: float = 0.001) -> int:
    """Lets each training step move the biases of routers that have one by ``rate``, against the loads of their experts
    in the whole step; returns how many there are. Local.

    For DeepSeek-V3 and models like it (GLM-4.5, Kimi-K2, MiniMax-M2, ...), in transformers 5. A bias only chooses: the
    weights of a token's experts are made of scores without it. Biases are in fp32 at least from then on, are saved with
    the model, and are the same on all ranks to the bit. Call it before the trainer is made, on a model of transformers
    or after :func:`hdpcomm.models.adapt`, and once more for another rate; 0: biases stay as they are.

    Raises:
        InvalidUsage: a negative rate, or no router with a bias.
    """
    check_number("balance_routers()", "rate", rate, least=0)
    count = 0
    for block in model.modules():
        experts = next((each for each in block.children() if holds_experts(each)), None)
        place = None if experts is None else _bias_of(block)
        if experts is None or place is None:
            continue
        router, name = place
        values = getattr(router, name)
        values.data = values.data.to(torch.promote_types(values.dtype, torch.float32))
        load: Any = getattr(experts, "load", None)
        if not isinstance(load, ExpertLoad):
            experts.load = load = ExpertLoad(values.numel())  # type: ignore[assignment]
            experts.register_forward_pre_hook(_count_rows, with_kwargs=True)
        load.bias = RouterBias(router, name, float(rate)) if rate else None
        count += 1
    if not count:
        raise InvalidUsage(
            f"{type(model).__name__} has no router with a bias ({', '.join(_NAMES)}) beside experts in one module, as "
            "DeepSeek-V3 of transformers 5 has; train it without a rate for the biases"
        )
    return count


def _bias_of(block: nn.Module) -> tuple[nn.Module, str] | None:
    for module in block.modules():
        for name in _NAMES:
            if isinstance(getattr(module, name, None), Tensor):
                return module, name
    return None


def _count_rows(experts: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Pre-hook of a module of experts: counts the rows of tokens, wherever an exchange does not count them."""
    load: ExpertLoad = experts.load
    if load.group is not None or torch.compiler.is_compiling():
        return
    pack = find_pack()
    chosen = args[1] if len(args) > 1 else options["top_k_index"]
    counts = counts_of(chosen[: None if pack is None else pack.token_rows], load.routed.shape[0])
    load.add(counts, counts, 0)


def loads_on_mesh(loads: Sequence[ExpertLoad], mesh: Mesh) -> Tensor:
    """Rows sent to the experts of layers and got by them, of all ranks that share the layers: int64 ``[layers, 2,
    experts]`` on the CPU. Collective over the ranks of a stage."""
    table = torch.stack([torch.stack((load.routed, load.computed)) for load in loads]).cpu()
    for comm in (mesh.hdp_comm, mesh.tensor_comm):  # over both together lie the tokens of a batch
        comm.all_reduce(table)
    return table


def settle_loads(loads: Sequence[ExpertLoad], rows: Tensor) -> None:
    """Moves the biases of routers by their experts' loads in a step, as of :func:`loads_on_mesh`, and chooses the
    replicas of the next one. Local."""
    for load, counts in zip(loads, rows[:, 0], strict=True):
        if load.bias is not None:
            load.bias.move(counts)
        load.place(counts)
