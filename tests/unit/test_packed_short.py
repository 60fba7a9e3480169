"""Compiled attention on packs of a few tokens: gradients are those of eager calls."""

from __future__ import annotations

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention.pack_context import packed_attention, packing


def gradients(call: object, lengths: list[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    given = [torch.randn(tokens, heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    weight = torch.randn(tokens, 4, 8, generator=generator)
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    with hdp.init() as comm, packing(comm, boundaries):
        out = call(*given)  # type: ignore[operator]
        (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in given if x.grad is not None)]


@pytest.mark.parametrize("lengths", [[1], [1] * 8, [2, 1], [1, 4]], ids=str)
def test_packs_of_one_to_eight_tokens(lengths: list[int]) -> None:
    """dv of a sequence of one token is dout itself, which an operator may not return."""
    torch._dynamo.reset()
    compiled = torch.compile(packed_attention, backend="aot_eager", fullgraph=True)
    for eager, got in zip(gradients(packed_attention, lengths, 5), gradients(compiled, lengths, 5), strict=True):
        torch.testing.assert_close(got, eager, rtol=1e-6, atol=1e-6)
