"""Verification of drafted tokens: which are accepted, and what follows them. Chains and trees, wholly on the device.

At a node of the tree of drafts, with the target's distribution p and the draft's q, the children are tested in turn:

    accept child x if u · q(x) < p(x);   else  p ← norm(max(p − q, 0)),  and the next child is tested
    a draft without q (it was certain of its tokens): accept if u < p(x);   else p(x) ← 0, renormalised

An accepted child is the next node. Where no child is left, the token that follows is drawn from what p has become, so
all tokens together follow the target's distribution exactly. Strictly less: a token of p = 0 is rejected even at u = 0.

The repeated residuals need no memory, since they are all of one form: after m rejections p is max(p₀ − c·q, 0) / D with
c₀ = 0, D₀ = 1, and then c ← c + D, D = Σ max(p₀ − c·q, 0). Where rounding leaves nothing, p₀ itself is drawn from.

Node 0 is the last committed token; nodes 1 … n are the drafted ones, parents before children. Siblings are drawn
independently from one q, or certain and different. A chain is the tree in which node i follows node i − 1.

Sources: https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2305.09781 (trees).
Legend: B sequences, n drafted tokens a sequence at most, V vocabulary.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.common.triton import tl, triton
from kernels.common.triton_support import runs_triton
from kernels.sampling import _race
from kernels.sampling.random import (
    Purpose,
    Stream,
    check_stream,
    draw_uniform,
    load_key,
    philox_words,
    to_exponential,
    uniform,
)
from kernels.sampling.sample import race

_ACCEPT, _RESIDUAL = tl.constexpr(int(Purpose.ACCEPT)), tl.constexpr(int(Purpose.RESIDUAL))

_NODE_LANES = 32
# Small tensors, read or written a number at a time: how they lie in memory makes no variant of a kernel.
_ASKED = ("p_tokens", "p_parents", "p_counts", "p_seeds", "p_choices", "p_positions")
_WALKED = ("p_lengths", "p_accepted", "p_out", "p_path", "p_new_lengths", "p_node", "p_shift", "p_arrived")
_DRAWN = ("p_accepted", "p_node", "p_shift", "p_values", "p_indices", "p_arrived", "p_out", "p_next")


class VerifyOutput(NamedTuple):
    """What a round commits, one row a sequence."""

    num_accepted: Tensor
    """[B] int32"""
    next_tokens: Tensor
    """[B] int64: the target's own token behind the accepted ones; −1 where p holds no number above 0."""
    tokens: Tensor
    """[B, n + 1] int64: the accepted tokens, the next token, then −1."""
    path: Tensor
    """[B, n + 1] int32: the accepted nodes, then −1. Their keys and values stay."""
    lengths: Tensor
    """[B] int32: the given lengths + accepted tokens + 1."""


def verify_reference(
    target_p: np.ndarray,
    draft_p: np.ndarray | None,
    tokens: list[int],
    parents: list[int],
    *,
    u: np.ndarray,
    exponential: np.ndarray,
) -> tuple[list[int], int]:
    """The algorithm for one sequence, as the papers write it. Returns (accepted nodes, next token)."""
    path = [0]
    p = first = target_p[0].astype(np.float64)
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
        if parent != path[-1]:
            continue
        q = np.eye(len(p))[token] if draft_p is None else draft_p[parent].astype(np.float64)
        if u[node - 1] * q[token] < p[token]:
            path.append(node)
            p = first = target_p[node].astype(np.float64)
        else:
            p = np.where(np.arange(len(p)) == token, 0, p) if draft_p is None else np.maximum(p - q, 0)
            p = p / p.sum() if p.sum() > 0 else np.zeros_like(p)
    return path[1:], int(((p if p.sum() > 0 else first) / exponential).argmax())


@triton.jit
def _parent(p_parents, row, node, nodes):
    """The parent of a node; p_parents is None for chains."""
    parent = node - 1
    if p_parents is not None:
        parent = tl.load(p_parents + row * nodes + node - 1).to(tl.int32)
    return parent


@triton.jit
def _residual_mass(p_target, p_draft, shift, vocabulary, BLOCK: tl.constexpr):
    """Σ max(p − shift · q, 0)."""
    b_mass = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        b_p = tl.load(p_target + columns, mask=columns < vocabulary, other=0.0)
        b_q = tl.load(p_draft + columns, mask=columns < vocabulary, other=0.0)
        b_mass += tl.maximum(b_p - shift * b_q, 0.0)
    return tl.sum(b_mass, axis=0)


@triton.jit
def _remaining(p_tokens, p_parents, row, node, last, token, p, nodes):
    """p(token), 0 if one of the children of the node before `last` is this token."""
    for other in range(node + 1, last):
        if _parent(p_parents, row, other, nodes) == node:
            p = tl.where(tl.load(p_tokens + row * nodes + other - 1) == token, 0.0, p)
    return p


@triton.jit(do_not_specialize=["nodes"], do_not_specialize_on_alignment=[*_ASKED, *_WALKED])
def _walk_kernel(
    p_target, p_draft, p_tokens, p_parents, p_counts, p_seeds, p_choices, p_positions, p_lengths,
    p_accepted, p_out, p_path, p_new_lengths, p_node, p_shift, p_arrived,
    target_row, target_node, draft_row, draft_node, vocabulary,
    nodes, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence: from the root down while a child is accepted. Keeps the last node and its c."""
    row = tl.program_id(0).to(tl.int64)
    seed, choice, position = load_key(p_seeds, p_choices, p_positions, row)
    p_out += row * (nodes + 1)
    p_path += row * (nodes + 1)
    for first in range(0, nodes + 1, LANES):
        o_node = first + tl.arange(0, LANES)
        tl.store(p_out + o_node, tl.full([LANES], -1, tl.int64), mask=o_node <= nodes)
        tl.store(p_path + o_node, tl.full([LANES], -1, tl.int32), mask=o_node <= nodes)
    tl.debug_barrier()
    at, depth = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    shift, mass = tl.full([], 0.0, tl.float32), tl.full([], 1.0, tl.float32)
    count = tl.minimum(tl.load(p_counts + row).to(tl.int32), nodes)
    for node in range(1, count + 1):
        if _parent(p_parents, row, node, nodes) == at:
            token = tl.load(p_tokens + row * nodes + node - 1).to(tl.int64)
            m_token = (token >= 0) & (token < vocabulary)
            p_row = p_target + row * target_row + at.to(tl.int64) * target_node
            p = tl.load(p_row + token, mask=m_token, other=0.0)
            u = draw_uniform(seed, choice, position, node - 1, _ACCEPT)
            if p_draft is not None:
                p_q = p_draft + row * draft_row + at.to(tl.int64) * draft_node
                if shift > 0:
                    mass = _residual_mass(p_row, p_q, shift, vocabulary, BLOCK)
                q = tl.load(p_q + token, mask=m_token, other=0.0)
                is_accepted = u * q * mass < tl.maximum(p - shift * q, 0.0)
                next_shift, next_mass = shift + mass, mass
            else:
                p = _remaining(p_tokens, p_parents, row, at, node, token, p, nodes)
                is_accepted = u * mass < p
                next_shift, next_mass = shift + 1.0, tl.maximum(mass - p, 0.0)
            if is_accepted:
                tl.store(p_out + depth, token)
                tl.store(p_path + depth, node)
            at, depth = tl.where(is_accepted, node, at), depth + is_accepted.to(tl.int32)
            shift, mass = tl.where(is_accepted, 0.0, next_shift), tl.where(is_accepted, 1.0, next_mass)
    tl.store(p_accepted + row, depth)
    tl.store(p_node + row, at)
    tl.store(p_shift + row, shift)
    tl.store(p_arrived + row, 0)
    tl.store(p_new_lengths + row, tl.load(p_lengths + row).to(tl.int32) + depth + 1)


@triton.jit(do_not_specialize=["nodes"], do_not_specialize_on_alignment=[*_ASKED, *_DRAWN])
def _next_token_kernel(
    p_target, p_draft, p_tokens, p_parents, p_counts, p_seeds, p_choices, p_positions,
    p_accepted, p_node, p_shift, p_values, p_indices, p_arrived, p_out, p_next,
    target_row, target_node, draft_row, draft_node, vocabulary,
    nodes, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (sequence, split): every so many blocks of the race for the token after the accepted ones."""
    row, splits = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    seed, choice, position = load_key(p_seeds, p_choices, p_positions, row)
    at, shift = tl.load(p_node + row), tl.load(p_shift + row)
    count = tl.minimum(tl.load(p_counts + row).to(tl.int32), nodes)
    p_row = p_target + row * target_row + at.to(tl.int64) * target_node
    b_best, b_index = _race.start(BLOCK)
    for first in range(tl.program_id(1) * BLOCK, vocabulary, splits * BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < vocabulary
        b_p = tl.load(p_row + columns, mask=mask, other=0.0)
        b_left = b_p
        if shift > 0:
            if p_draft is not None:
                p_q = p_draft + row * draft_row + at.to(tl.int64) * draft_node
                b_left = tl.maximum(b_p - shift * tl.load(p_q + columns, mask=mask, other=0.0), 0.0)
            else:
                for node in range(at + 1, count + 1):
                    if _parent(p_parents, row, node, nodes) == at:
                        token = tl.load(p_tokens + row * nodes + node - 1)
                        b_left = tl.where(columns == token, 0.0, b_left)
        b_e = to_exponential(philox_words(seed, choice, position, first, _RESIDUAL, BLOCK))
        # What p₀ itself would give counts only where nothing is left of p: below all else, in the same order.
        b_else = tl.where(b_p > 0, -b_e / tl.where(b_p > 0, b_p, 1.0), float("-inf"))
        b_value = tl.where(b_left > 0, b_left / b_e, b_else)
        b_best, b_index = _race.advance(b_best, b_index, b_value, columns)
    is_last, token = _race.finish(p_values, p_indices, p_arrived, row, b_best, b_index, LANES)
    if is_last:
        tl.store(p_next + row, token)
        tl.store(p_out + row * (nodes + 1) + tl.load(p_accepted + row), token)


def verify(
    target_p: Tensor,
    draft_p: Tensor | None,
    tokens: Tensor,
    *,
    counts: Tensor,
    lengths: Tensor,
    stream: Stream,
    parents: Tensor | None = None,
) -> VerifyOutput:
    """Verify the drafted tokens of each sequence; exact whatever the drafts.

    target_p [B, n + 1, V] fp32: the target's distribution after each node; draft_p [B, n or n + 1, V] fp32: what the
    children of each node were drawn from, None for a draft that was certain; tokens [B, n] integers; counts [B] how
    many of them are drafted; parents [B, n] the parent of each node 1 … n, None for chains; lengths [B] committed
    tokens so far; stream [B] with the position of the first token of the round. Rows and nodes beyond the counts may
    hold anything. On CUDA this takes two kernels and the host reads nothing. Raises ValueError for wrong shapes.
    """
    _check(target_p, draft_p, tokens, parents, (counts, lengths))
    stream = check_stream(stream, len(tokens))
    if not runs_triton(target_p):
        return verify_in_torch(target_p, draft_p, tokens, counts, lengths, stream, parents)
    (batch, n), vocabulary, device = tokens.shape, target_p.shape[2], target_p.device
    output = VerifyOutput(
        *(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in (
            (batch, torch.int32), (batch, torch.int64), ((batch, n + 1), torch.int64),
            ((batch, n + 1), torch.int32), (batch, torch.int32),
        ))
    )  # fmt: skip
    if batch == 0:
        return output
    nodes, arrived = torch.empty(2, batch, dtype=torch.int32, device=device)
    shifts = torch.empty(batch, dtype=torch.float32, device=device)
    asked = (
        target_p, draft_p, tokens.contiguous(), None if parents is None else parents.contiguous(),
        counts.contiguous(), *stream,
    )  # fmt: skip
    strides = (*target_p.stride()[:2], *((0, 0) if draft_p is None else draft_p.stride()[:2]))
    splits, block = _race.num_splits(batch, vocabulary, device), _race.block_size(vocabulary)
    _walk_kernel[(batch,)](
        *asked, lengths.contiguous(), output.num_accepted, output.tokens, output.path, output.lengths,
        nodes, shifts, arrived, *strides, vocabulary,
        n, LANES=_NODE_LANES, BLOCK=block, num_warps=_race.WARPS,
    )  # fmt: skip
    _next_token_kernel[(batch, splits)](
        *asked, output.num_accepted, nodes, shifts, *_race.partial_results(batch, splits, device), arrived,
        output.tokens, output.next_tokens, *strides, vocabulary,
        n, LANES=_race.num_lanes(vocabulary), BLOCK=block, num_warps=_race.WARPS,
    )  # fmt: skip
    return output


def match_drafts(own_tokens: Tensor, tokens: Tensor, *, counts: Tensor, lengths: Tensor) -> VerifyOutput:
    """Accept drafted tokens while they are the target's own draws: for greedy requests and for those with a seed.

    own_tokens [B, n + 1] int64: the target's token after each node of a chain, drawn as without drafts; the rest as in
    `verify`.
    """
    n = tokens.shape[1]
    columns = torch.arange(n + 1, device=tokens.device)
    matches = (own_tokens[:, :n] == tokens) & (columns[:n] < counts[:, None])
    accepted = matches.cumprod(dim=1).sum(dim=1)[:, None]
    committed = torch.where(columns <= accepted, own_tokens, -1)
    path = torch.where(columns < accepted, columns + 1, -1).int()
    next_tokens = own_tokens.gather(1, accepted)[:, 0]
    return VerifyOutput(accepted[:, 0].int(), next_tokens, committed, path, (lengths + accepted[:, 0] + 1).int())


def _check(
    target_p: Tensor, draft_p: Tensor | None, tokens: Tensor, parents: Tensor | None, rows: tuple[Tensor, ...]
) -> None:
    if target_p.dim() != 3 or tokens.shape != (target_p.shape[0], target_p.shape[1] - 1):
        raise ValueError(f"target_p and tokens must be [B, n + 1, V] and [B, n], not {target_p.shape}, {tokens.shape}")
    batch, n = tokens.shape
    if draft_p is not None and draft_p.shape not in ((batch, n, target_p.shape[2]), target_p.shape):
        raise ValueError(f"draft_p must be [B, n or n + 1, V] for target_p {target_p.shape}, not {draft_p.shape}")
    for x in (target_p, draft_p):
        if x is not None and (x.dtype != torch.float32 or x.stride(-1) != 1):
            raise ValueError(f"distributions must be fp32 and contiguous in their last dimension, not {x.dtype}")
    if parents is not None and parents.shape != tokens.shape:
        raise ValueError(f"parents must have the shape of tokens, {tokens.shape}, not {parents.shape}")
    if any(x.shape != (batch,) for x in rows):
        raise ValueError(f"counts and lengths must have one number a sequence, {batch}")


def verify_in_torch(
    target_p: Tensor,
    draft_p: Tensor | None,
    tokens: Tensor,
    counts: Tensor,
    lengths: Tensor,
    stream: Stream,
    parents: Tensor | None,
) -> VerifyOutput:
    """`verify` of all sequences at once, node after node."""
    batch, n = tokens.shape
    u = uniform(stream, n, Purpose.ACCEPT)
    draft_p = draft_p if n else None
    rows = torch.arange(batch, device=tokens.device)
    node = torch.zeros_like(rows)
    depth = torch.zeros_like(rows)
    committed = torch.full((batch, n + 1), -1, device=tokens.device)
    path = torch.full((batch, n + 1), -1, dtype=torch.int32, device=tokens.device)
    p, left = target_p[:, 0], _Left(target_p[:, 0], None if draft_p is None else draft_p[:, 0])
    for number in range(1, n + 1):
        is_tested = number <= counts
        is_tested &= node == (number - 1 if parents is None else parents[:, number - 1])
        accepted = left.accepts(tokens[:, number - 1], u[:, number - 1]) & is_tested
        left.reject(tokens[:, number - 1], is_tested & ~accepted)
        committed[rows[accepted], depth[accepted]] = tokens[accepted, number - 1].long()
        path[rows[accepted], depth[accepted]] = number
        node = torch.where(accepted, number, node)
        depth += accepted
        p = torch.where(accepted[:, None], target_p[:, number], p)
        left.enter(accepted, target_p[:, number], None if draft_p is None else draft_p[:, min(number, n - 1)])
    next_tokens = _draw_next(p, left.weights(), stream)
    committed[rows, depth] = next_tokens
    return VerifyOutput(depth.int(), next_tokens, committed, path, (lengths + depth + 1).int())


class _Left:
    """What the rejections at each sequence's node have left of its p: max(p − shift · q, 0) / mass."""

    def __init__(self, p: Tensor, q: Tensor | None) -> None:
        self.p, self.q = p.clone(), q
        self.shift, self.mass = torch.zeros_like(p[:, 0]), torch.ones_like(p[:, 0])

    def weights(self) -> Tensor:
        return self.p if self.q is None else (self.p - self.shift[:, None] * self.q).clamp_min(0)

    def accepts(self, tokens: Tensor, u: Tensor) -> Tensor:
        is_token, chosen = self._chosen(tokens)
        p = torch.where(is_token, self.p.gather(1, chosen)[:, 0], 0)
        if self.q is None:
            return u * self.mass < p
        q = torch.where(is_token, self.q.gather(1, chosen)[:, 0], 0)
        return u * q * self.mass < (p - self.shift * q).clamp_min(0)

    def reject(self, tokens: Tensor, rejected: Tensor) -> None:
        is_token, chosen = self._chosen(tokens)
        if self.q is not None:
            self.shift = self.shift + torch.where(rejected, self.mass, 0)
            if bool(rejected.any()):
                self.mass = torch.where(rejected, self.weights().sum(dim=1), self.mass)
            return
        rejected = rejected & is_token
        p = self.p.gather(1, chosen)
        self.mass = torch.where(rejected, (self.mass - p[:, 0]).clamp_min(0), self.mass)
        self.p.scatter_(1, chosen, torch.where(rejected[:, None], 0, p))

    def _chosen(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each is a token of the vocabulary, [B], and where p and q have it, [B, 1]."""
        chosen = tokens.long().clamp(0, self.p.shape[1] - 1)
        return chosen == tokens, chosen[:, None]

    def enter(self, accepted: Tensor, p: Tensor, q: Tensor | None) -> None:
        """Go on to a child: nothing is rejected there yet."""
        self.p = torch.where(accepted[:, None], p, self.p)
        if self.q is not None and q is not None:
            self.q = torch.where(accepted[:, None], q, self.q)
        self.shift, self.mass = self.shift.masked_fill(accepted, 0), self.mass.masked_fill(accepted, 1)


def _draw_next(p: Tensor, left: Tensor, stream: Stream) -> Tensor:
    """From what is left, from p where rounding left nothing; −1 where p has no number above 0 either."""
    weights = torch.where((left > 0).any(dim=1, keepdim=True), left, p)
    return torch.where((weights > 0).any(dim=1), race(weights, stream, Purpose.RESIDUAL), -1)
