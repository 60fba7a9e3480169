"""Runs of consecutive tokens of a rank, cut into chunks of one size, and the scan over them, forward and backward, for
some of the heads. Local.

With the state S before a chunk, its outputs and the state after it are

    V' = U - W S        O = Q~ S + P V'        S' = E S + K~^T V'

For the delta rule, W and U are the WY form of the product of (I - beta k k^T) (UT transform, arXiv 2412.06464 section
3.3); without it (Mamba-2's ssd), W is 0 and U is V. All tensors are [chunks, chunk, ...], one chunk of one head each.

Decays inside a chunk are products of exp(g) between two tokens. g is summed up in float64, and differences of sums are
taken before they are rounded: a token that forgets all (g = -1000) must not blur the decay between its successors.
Exponents are never above the largest decay between two tokens, so nothing overflows that the result does not contain
(sub-chunks as in arXiv 2312.06635 section 4.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hdpcomm.attention.linear.state_plan import Links
from hdpcomm.attention.tiles import Int64
from hdpcomm.kernels.transfers import to_device

__all__ = ["ForestScan", "Inputs", "PartRuns", "Runs", "Scan", "chunked"]


_SUB = 16
"""Tokens of a sub-chunk of :class:`ChannelDecay`."""


class ScalarDecay:
    """One decay a token and head: g [chunks, chunk].

    ``from_start``, ``to_end`` [chunks, chunk, 1]: the decay from the start of the chunk to after the token, from the
    token to the end; ``total`` [chunks, 1, 1].
    """

    def __init__(self, g: Tensor, dtype: torch.dtype) -> None:
        sums = g.double().cumsum(1)
        self.from_start = torch.exp(sums).to(dtype)[..., None]
        self.to_end = torch.exp(sums[:, -1:] - sums).to(dtype)[..., None]
        self.total = self.from_start[:, -1:]
        above = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).triu_(1)
        between = (sums[:, :, None] - sums[:, None, :]).to(dtype)
        self._between = between.masked_fill_(above, -torch.inf).exp_()
        self._strict = torch.zeros_like(sums)

    def pairs(self, a: Tensor, b: Tensor) -> Tensor:
        """[chunks, chunk, chunk]: sum over d of a[i, d] b[j, d] exp(g[j + 1] + ... + g[i]) for j <= i, else 0."""
        return torch.bmm(a, b.mT).mul_(self._between)

    def pairs_backward(self, a: Tensor, b: Tensor, pairs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of a and b from that of ``pairs`` (its lower triangle counts); keeps the share of g."""
        weight = grad * self._between
        strict = (grad * pairs).tril_(-1)
        self._strict += strict.sum(2, dtype=torch.float64) - strict.sum(1, dtype=torch.float64)
        return torch.bmm(weight, b), torch.bmm(weight.mT, a)

    def backward(self, left: Tensor, right: Tensor, total: Tensor) -> Tensor:
        """The gradient of g; ``left``, ``right`` [chunks, chunk, dim]: products of ``from_start`` (``to_end``) with
        their gradients, ``total`` [chunks, dim, 1] likewise."""
        return _sum_up(
            self._strict + left.sum(-1, dtype=torch.float64),
            right.sum(-1, dtype=torch.float64),
            total.sum(-2, dtype=torch.float64),
        )


class ChannelDecay:
    """One decay a token, head and row of the state: g [chunks, chunk, dim].

    As :class:`ScalarDecay`, with ``from_start``, ``to_end`` [chunks, chunk, dim] and ``total`` [chunks, dim, 1]. Pairs
    of different sub-chunks are one product of matrices, both scaled to the start of the later one; the others are taken
    diagonal by diagonal.
    """

    def __init__(self, g: Tensor, dtype: torch.dtype) -> None:
        self._sums = g.double().cumsum(1)
        self._dtype = dtype
        self.from_start = torch.exp(self._sums).to(dtype)
        self.to_end = torch.exp(self._sums[:, -1:] - self._sums).to(dtype)
        self.total = self.from_start[:, -1:].mT
        self._strict = torch.zeros_like(self._sums)

    def _factors(self, start: int) -> tuple[Tensor, Tensor]:
        """(decay from before the sub-chunk at ``start`` to its tokens, from the tokens before it to there)."""
        middle = self._sums[:, start - 1 : start]
        after = torch.exp(self._sums[:, start : start + _SUB] - middle)
        return after.to(self._dtype), torch.exp(middle - self._sums[:, :start]).to(self._dtype)

    def _diagonal(self, distance: int) -> Tensor:
        """[chunks * subs, 16 - distance, dim]: decay between tokens of a sub-chunk that are ``distance`` apart."""
        sums = _by_sub(self._sums)
        return torch.exp(sums[:, distance:] - sums[:, : _SUB - distance]).to(self._dtype)

    @staticmethod
    def _blocks(x: Tensor) -> Tensor:
        """[chunks, subs, 16, 16]: the blocks on the diagonal of [chunks, chunk, chunk], a view."""
        subs = x.shape[1] // _SUB
        return x.view(x.shape[0], subs, _SUB, subs, _SUB).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    def pairs(self, a: Tensor, b: Tensor) -> Tensor:
        chunks, chunk, _ = a.shape
        products = a.new_zeros((chunks, chunk, chunk))
        for start in range(_SUB, chunk, _SUB):
            after, before = self._factors(start)
            rows = slice(start, start + _SUB)
            products[:, rows, :start] = torch.bmm(a[:, rows] * after, (b[:, :start] * before).mT)
        blocks = self._blocks(products)
        a_sub, b_sub = _by_sub(a), _by_sub(b)
        for distance in range(_SUB):
            row = a_sub[:, distance:] * b_sub[:, : _SUB - distance] * self._diagonal(distance)
            blocks.diagonal(-distance, 2, 3).copy_(row.sum(-1).view(chunks, chunk // _SUB, _SUB - distance))
        return products

    def pairs_backward(self, a: Tensor, b: Tensor, pairs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        del pairs
        chunk = a.shape[1]
        da, db = torch.zeros_like(a), torch.zeros_like(b)
        for start in range(_SUB, chunk, _SUB):
            after, before = self._factors(start)
            rows = slice(start, start + _SUB)
            part = grad[:, rows, :start]
            da[:, rows] += torch.bmm(part, b[:, :start] * before).mul_(after)
            db[:, :start] += torch.bmm(part.mT, a[:, rows] * after).mul_(before)
        self._strict += (a * da).double() - (b * db).double()  # the diagonal is not in them yet
        blocks = self._blocks(grad)
        a_sub, b_sub, da_sub, db_sub, strict = (_by_sub(x) for x in (a, b, da, db, self._strict))
        for distance in range(_SUB):
            weight = blocks.diagonal(-distance, 2, 3).flatten(0, 1)[..., None] * self._diagonal(distance)
            late, early = slice(distance, _SUB), slice(0, _SUB - distance)
            towards_a, towards_b = weight * b_sub[:, early], weight * a_sub[:, late]
            da_sub[:, late] += towards_a
            db_sub[:, early] += towards_b
            if distance:
                share = (towards_a * a_sub[:, late]).double()
                strict[:, late] += share
                strict[:, early] -= share
        return da_sub.view_as(a), db_sub.view_as(b)

    def backward(self, left: Tensor, right: Tensor, total: Tensor) -> Tensor:
        return _sum_up(self._strict + left.double(), right.double(), total.mT.double())


Decay = ScalarDecay | ChannelDecay


def _by_sub(x: Tensor) -> Tensor:
    """[chunks, chunk, dim] -> [chunks * subs, 16, dim]"""
    return x.reshape(x.shape[0] * (x.shape[1] // _SUB), _SUB, x.shape[2])


def _sum_up(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """The gradient of each g: of all later tokens' sums from the start, all earlier ones' to the end, and the total."""
    later = left.flip(1).cumsum(1).flip(1)
    earlier = right.cumsum(1) - right
    return later + earlier + total


@dataclass(slots=True)
class ChunkGrads:
    """Gradients of what :class:`Chunks` holds."""

    w: Tensor | None
    u: Tensor
    p: Tensor
    q: Tensor
    k: Tensor
    total: Tensor
    """[chunks, dk, 1]: the sum over columns of (gradient of E S) S."""


class Chunks:
    """``q``, ``k``: [chunks, chunk, dk], ``v``: [chunks, chunk, dv], ``g``: [chunks, chunk] or [chunks, chunk, dk],
    ``beta``: [chunks, chunk], or None for no delta rule. All in the type that is computed in."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> None:
        self._q, self._k, self._v, self._beta = q, k, v, beta
        decay: Decay = ScalarDecay(g, q.dtype) if g.ndim == 2 else ChannelDecay(g, q.dtype)
        self._decay = decay
        self.total = decay.total
        """E: [chunks, 1 or dk, 1]"""
        self.q = q * decay.from_start
        """Q~: [chunks, chunk, dk]"""
        self.k = k * decay.to_end
        """K~: [chunks, chunk, dk]"""
        self.p = decay.pairs(q, k)
        """P: [chunks, chunk, chunk], lower triangular"""
        self.w: Tensor | None = None
        """W: [chunks, chunk, dk]; None for 0"""
        self.u = v
        """U: [chunks, chunk, dv]"""
        if beta is not None:
            self._scaled = k * beta[..., None]
            self._mix = decay.pairs(self._scaled, k)  # its diagonal is not read
            sides = torch.cat((self._scaled * decay.from_start, v * beta[..., None]), dim=2)
            self._solved = torch.linalg.solve_triangular(self._mix, sides, upper=False, unitriangular=True)
            self.w, self.u = self._solved.split((k.shape[2], v.shape[2]), dim=2)

    def backward(self, grads: ChunkGrads) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k, v, g (float64) and beta. Changes ``grads``."""
        decay = self._decay
        dq, dk = decay.pairs_backward(self._q, self._k, self.p, grads.p.tril_())
        left = grads.q * self.q
        dq += grads.q.mul_(decay.from_start)
        right = grads.k * self.k
        dk += grads.k.mul_(decay.to_end)
        dv, dbeta = grads.u, None
        if self._beta is not None:
            assert grads.w is not None
            beta = self._beta[..., None]
            solved = torch.cat((grads.w, grads.u), dim=2)
            sides = torch.linalg.solve_triangular(self._mix.mT, solved, upper=True, unitriangular=True)
            dmix = torch.bmm(sides, self._solved.mT).neg_().tril_(-1)
            dscaled, dk_mix = decay.pairs_backward(self._scaled, self._k, self._mix, dmix)
            side, dv = sides.split((self._k.shape[2], self._v.shape[2]), dim=2)
            from_start = side * decay.from_start
            left += from_start * self._scaled
            dscaled += from_start
            dk += dk_mix
            dk.addcmul_(dscaled, beta)
            dbeta = (dscaled * self._k).sum(2) + (dv * self._v).sum(2)
            dv = dv * beta
        dg = decay.backward(left, right, grads.total * self.total)
        return dq, dk, dv, dg, dbeta


_CHUNKS = (16, 32, 64)


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of tokens (maybe empty ones), in chunks of ``chunk`` tokens.

    Chunks are ordered by their place in their run, and runs by their number of chunks, longest first: the i-th chunks
    of all runs that have one are neighbours, and step i of a scan over all runs at once is one range of chunks.
    """

    count: int
    """Runs, also empty ones."""
    chunk: int
    chunks: int
    active: tuple[int, ...]
    """For each step, the runs that have a chunk there."""
    _order: Int64
    _rows: Int64
    """[chunks * chunk]: the local row of each place, -1 where the last chunk of a run is filled up."""
    _on_device: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(order of runs, places that hold a token, their rows)."""
        if device not in self._on_device:
            places = np.flatnonzero(self._rows >= 0)
            tables = (self._order, places, self._rows[places])
            order, where, rows = (to_device(torch.from_numpy(table), device) for table in tables)
            self._on_device[device] = order, where, rows
        return self._on_device[device]

    def take(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[T_local, heads, ...] -> [chunks * heads, chunk, ...], zeros where no token is."""
        _, places, rows = self._tables(x.device)
        shape = (self.chunks * self.chunk, *x.shape[1:])
        if len(places) == shape[0]:
            flat = x.index_select(0, rows).to(dtype)
        else:
            flat = torch.zeros(shape, dtype=dtype, device=x.device)
            flat.index_copy_(0, places, x.index_select(0, rows).to(dtype))
        split = flat.view(self.chunks, self.chunk, *x.shape[1:]).transpose(1, 2)
        return split.reshape(self.chunks * x.shape[1], self.chunk, *x.shape[2:])

    def put(self, out: Tensor, x: Tensor) -> None:
        """Writes [chunks * heads, chunk, ...] to the rows of ``out`` [T_local, heads, ...]."""
        _, places, rows = self._tables(x.device)
        heads = out.shape[1]
        flat = x.view(self.chunks, heads, self.chunk, *x.shape[2:]).transpose(1, 2)
        flat = flat.reshape(self.chunks * self.chunk, heads, *x.shape[2:])
        if len(places) < flat.shape[0]:
            flat = flat.index_select(0, places)
        out.index_copy_(0, rows, flat.to(out.dtype))

    def take_states(self, states: Tensor) -> Tensor:
        """[runs, heads, ...] -> [runs that are not empty * heads, ...]; a copy."""
        order, _, _ = self._tables(states.device)
        return states.index_select(0, order).flatten(0, 1)

    def put_states(self, states: Tensor, x: Tensor) -> Tensor:
        """``states`` with those of the runs that are not empty replaced by ``x`` [such runs * heads, ...]."""
        order, _, _ = self._tables(x.device)
        return states.index_copy(0, order, x.view(len(order), *states.shape[1:]))


def chunked(start: Int64, lengths: Int64, dim: int) -> Runs:
    """The runs of ``lengths`` tokens from the local rows ``start`` on.

    ``dim``: the rows of the state, by which the size of chunks is chosen.
    """
    # The one with the least work: 5 chunk^2 dim products inside of it, and 3 chunk dim^2 with the state.
    work = [(-(-lengths // c)).sum() * (5 * c * c * dim + 3 * c * dim * dim) for c in _CHUNKS]
    chunk = _CHUNKS[int(np.argmin(work))]
    counts = -(-lengths // chunk)
    order = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
    first, tokens, counts = start[order], lengths[order], counts[order]
    run = np.repeat(np.arange(len(order)), counts)
    step = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    by_step = np.lexsort((run, step))
    run, step = run[by_step], step[by_step]
    inside = step[:, None] * chunk + np.arange(chunk)[None, :]
    rows = np.where(inside < tokens[run][:, None], first[run][:, None] + inside, -1)
    active = tuple(np.bincount(step).tolist()) if len(step) else ()
    return Runs(len(lengths), chunk, len(run), active, order, rows.reshape(-1))


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a call, [T_local, heads, ...]: q, k [.., dk], v [.., dv], g [..] or [.., dk], beta [..] or
    None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the computation and of the states."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def heads(self, chosen: slice) -> Inputs:
        beta = None if self.beta is None else self.beta[:, chosen]
        return Inputs(self.q[:, chosen], self.k[:, chosen], self.v[:, chosen], self.g[:, chosen], beta)


class Scan:
    """Runs of tokens, chunk by chunk, as products of matrices. States are [runs, heads, dk, dv]; an empty run leaves
    its state as it is."""

    def __init__(self, runs: Runs, inputs: Inputs) -> None:
        self.runs = runs
        self._heads = inputs.q.shape[1]
        self._dims = inputs.q.shape[2], inputs.v.shape[2]
        q, k, v = (runs.take(x, inputs.dtype) for x in (inputs.q, inputs.k, inputs.v))
        beta = None if inputs.beta is None else runs.take(inputs.beta, inputs.dtype)
        self._chunks = Chunks(q, k, v, runs.take(inputs.g, torch.float64), beta)
        self._states = self._values = self._dout = self._later = self._dvalues = inputs.q.new_empty(0)

    def _steps(self) -> list[slice]:
        """The chunks of each step, times heads."""
        steps, first = [], 0
        for active in self.runs.active:
            steps.append(slice(first, first + active * self._heads))
            first = steps[-1].stop
        return steps

    def _forward(self, state: Tensor, values: Tensor | None) -> Iterator[slice]:
        """Scans ``state`` [runs * heads, dk, columns] in place. Each step is yielded before it is taken.

        ``values``: receives V' of each chunk; else ``state`` may have more columns than U, for which U is 0.
        """
        chunks, dv = self._chunks, self._dims[1]
        for step in self._steps():
            yield step
            here = state[: step.stop - step.start]
            if chunks.w is None:
                new = chunks.u[step]
            elif values is not None:
                new = torch.baddbmm(chunks.u[step], chunks.w[step], here, alpha=-1, out=values[step])
            else:
                new = torch.bmm(chunks.w[step], here).neg_()
                new[..., :dv] += chunks.u[step]
            here.mul_(chunks.total[step]).baddbmm_(chunks.k[step].mT, new)

    def run(self, initial: Tensor) -> Tensor:
        """The final states, from the initial ones; keeps what :meth:`output` and the backward need."""
        state = self.runs.take_states(initial)
        count, (dk, dv) = self.runs.chunks * self._heads, self._dims
        self._states = state.new_empty((count, dk, dv))
        self._values = self._chunks.u
        if self._chunks.w is not None:
            self._values = state.new_empty((count, self.runs.chunk, dv))
        for step in self._forward(state, self._values):
            self._states[step] = state[: step.stop - step.start]
        return self.runs.put_states(initial, state)

    def output(self, out: Tensor) -> None:
        """Writes the outputs of :meth:`run` to their rows of ``out`` [T_local, heads, dv]."""
        if self.runs.chunks:
            outputs = torch.bmm(self._chunks.q, self._states)
            self.runs.put(out, outputs.baddbmm_(self._chunks.p, self._values))

    def summary(self, zero: Tensor) -> tuple[Tensor, Tensor]:
        """(transition, bias) of the runs: their final state is transition * initial + bias.

        ``zero``: states of zeros. The transition is [runs, heads, dk, dk], or without a delta rule [runs, heads, 1
        or dk, 1], a factor of the rows.
        """
        count, heads, dk, dv = zero.shape
        if self._chunks.w is None:
            state = self.runs.take_states(zero)
            factor = self.runs.take_states(zero.new_ones((count, heads, self._chunks.total.shape[1], 1)))
            for step in self._forward(state, None):
                factor[: step.stop - step.start] *= self._chunks.total[step]
            ones = zero.new_ones((count, heads, *factor.shape[1:]))
            return self.runs.put_states(ones, factor), self.runs.put_states(zero, state)
        unit = torch.eye(dk, dtype=zero.dtype, device=zero.device).expand(count, heads, dk, dk)
        both = torch.cat((zero, unit), dim=3)
        state = self.runs.take_states(both)
        for _ in self._forward(state, None):
            pass
        final = self.runs.put_states(both, state)
        return final[..., dv:], final[..., :dv]

    def take_grad(self, dout: Tensor) -> None:
        """``dout``: the gradient of the output [T_local, heads, dv]; call :meth:`run` before. Starts the backward."""
        self._dout = self.runs.take(dout, self._chunks.q.dtype)

    def _backward(self, state: Tensor, dvalues: Tensor | None) -> Iterator[slice]:
        """Scans the gradient of states backwards in place; each step is yielded before it is taken."""
        chunks = self._chunks
        for step in reversed(self._steps()):
            yield step
            here = state[: step.stop - step.start]
            if chunks.w is None:
                if dvalues is not None:
                    torch.bmm(chunks.k[step], here, out=dvalues[step])
                here.mul_(chunks.total[step]).baddbmm_(chunks.q[step].mT, self._dout[step])
                continue
            new = torch.bmm(chunks.k[step], here, out=None if dvalues is None else dvalues[step])
            new.baddbmm_(chunks.p[step].mT, self._dout[step])
            here.mul_(chunks.total[step]).baddbmm_(chunks.q[step].mT, self._dout[step])
            here.baddbmm_(chunks.w[step].mT, new, alpha=-1)

    def backward_bias(self, zero: Tensor) -> Tensor:
        """The gradient of the initial states if that of the final ones is 0."""
        state = self.runs.take_states(zero)
        for _ in self._backward(state, None):
            pass
        return self.runs.put_states(zero, state)

    def run_backward(self, final: Tensor) -> Tensor:
        """The gradient of the initial states from that of the final ones; keeps what :meth:`gradients` needs."""
        state = self.runs.take_states(final)
        self._later = torch.empty_like(self._states)
        self._dvalues = torch.empty_like(self._values)
        for step in self._backward(state, self._dvalues):
            self._later[step] = state[: step.stop - step.start]
        if self._chunks.w is None and self.runs.chunks:
            self._dvalues.baddbmm_(self._chunks.p.mT, self._dout)
        return self.runs.put_states(final, state)

    def gradients(self, grads: Inputs) -> None:
        """Writes the gradients of the inputs to the rows of ``grads``, whose tensors have the shapes of the inputs."""
        if not self.runs.chunks:
            return
        chunks = self._chunks
        chunk_grads = ChunkGrads(
            w=None if chunks.w is None else torch.bmm(self._dvalues, self._states.mT).neg_(),
            u=self._dvalues,
            p=torch.bmm(self._dout, self._values.mT),
            q=torch.bmm(self._dout, self._states.mT),
            k=torch.bmm(self._values, self._later.mT),
            total=(self._states * self._later).sum(2, keepdim=True),
        )
        dq, dk, dv, dg, dbeta = chunks.backward(chunk_grads)
        pairs = [(grads.q, dq), (grads.k, dk), (grads.v, dv), (grads.g, dg)]
        if grads.beta is not None and dbeta is not None:
            pairs.append((grads.beta, dbeta))
        for out, x in pairs:
            self.runs.put(out, x)


class ForestScan:
    """The scan of a rank's forest: like a :class:`Scan`, level by level, for runs whose final states nobody needs."""

    def __init__(self, levels: Sequence[tuple[Runs, Links]], inputs: Inputs) -> None:
        """``levels``: the runs of each level, and the links from what comes before to their initial states."""
        self._levels = [(runs, links, Scan(runs, inputs)) for runs, links in levels]

    def run(self, initial: Tensor) -> Tensor:
        """``initial``: [states from carriers, heads, dk, dv]; returned as it is, since nothing follows."""
        states = initial
        for runs, links, scan in self._levels:
            states = scan.run(links.add(_zeros(initial, runs.count), states))
        return initial

    def output(self, out: Tensor) -> None:
        for _, _, scan in self._levels:
            scan.output(out)

    def take_grad(self, dout: Tensor) -> None:
        for _, _, scan in self._levels:
            scan.take_grad(dout)

    def run_backward(self, final: Tensor) -> Tensor:
        """The gradient of the initial states; ``final``: what it is written to, zeros."""
        above = [final, *(_zeros(final, runs.count) for runs, _, _ in self._levels)]
        for depth in range(len(self._levels) - 1, -1, -1):
            _, links, scan = self._levels[depth]
            links.transposed.add(above[depth], scan.run_backward(above[depth + 1]))
        return above[0]

    def gradients(self, grads: Inputs) -> None:
        for _, _, scan in self._levels:
            scan.gradients(grads)


def _zeros(like: Tensor, count: int) -> Tensor:
    return like.new_zeros((count, *like.shape[1:]))


PartRuns = Runs | tuple[tuple[Runs, Links], ...]
"""The runs of a part: carriers, or the levels of a forest."""
