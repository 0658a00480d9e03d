"""Fewer KV heads: turn a model into one whose key/value heads are each shared by more query heads.

    mean      average the keys and values of neighbouring heads (Ainslie et al., arXiv 2305.13245)
    first     keep the first head of each group
    aligned   group heads that are alike, turn each towards the others of its group, average, restore the norm
              (arXiv 2412.20677)
    subspace  group heads that are alike; of a group's keys and values keep the directions that matter most to scores
              and to the layer's output, and let every query head read them in its own way

All four are one form. With z the keys of a frequency pair (i, i + d/2) as complex numbers, which rope only rotates,

    shared key    z = Σ a_h z_h        query head of h:   conj(b_h) q     since  conj(q) b_h z ≈ conj(q) z_h
    shared value  v = Σ A_h v_h        output of h:       W_h B_h         since  B_h v ≈ v_h

over the heads h of a group. `mean` has a = 1/g and b = 1; alignment adds rotations, b_h = exp(iθ_h) and B_h orthogonal.
`subspace` takes the best there is: the leading eigenvectors of E[z_h conj(z_j)], weighted by the energy of the queries,
and of E[v_h v_jᵀ], weighted by the output projection. Unaligned heads are close to orthogonal, so that a plain mean is
mostly cancellation. Moments, plans and products are computed in fp64.

Legend: T tokens, D hidden size, Hq query heads, Hkv KV heads, d head dim, U units (heads before grouping),
g units a group.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from compress.prune.depth import PackedBatch, added_up
from compress.residual_stream import ResidualStream, passed_layers
from model.collectives import ALONE, Group
from model.config import ModelConfig
from model.layers import SelfAttention
from model.lazy import LazyModel, MakeWeight
from model.tensor_parallel import LAYERS
from model.transformer import Transformer

Method = Literal["mean", "first", "aligned", "subspace"]

_MOST_PARTITIONS = 3000
"""Up to this many ways to group the heads all are tried."""
_ANNEALING_STEPS = 20_000
_PROCRUSTES_STEPS = 200
_SMALLEST_WEIGHT = 1e-4
"""Directions that matter less than this part of the most important one count so much, lest their inverse explode."""
_TINY = 1e-30


class GroupingError(ValueError):
    """A model that cannot be converted as asked; the sentence says why."""


@dataclass(frozen=True)
class HeadMoments:
    """What one layer's heads do on the calibration text, and what the layer makes of it."""

    values: Tensor
    """[U, U, d, d] fp64: the sum over tokens of v_i v_jᵀ."""
    keys: Tensor
    """[U, U, d/2] complex128: the sum over tokens of z_i conj(z_j)."""
    queries: Tensor
    """[U, d/2] fp64: the sum over tokens, and over a unit's query heads, of |q|² of each pair."""
    outputs: Tensor
    """[U, d, d] fp64: WᵀW of the output projection, summed over a unit's query heads."""


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is converted."""

    groups: tuple[tuple[int, ...], ...]
    """Units of each new KV head."""
    key_in: Tensor
    """a, [U, d/2] complex128: what each unit's keys add to the shared ones."""
    key_out: Tensor
    """b, [U, d/2] complex128: how each unit's keys follow from the shared ones."""
    value_in: Tensor
    """A, [U, d, d] fp64."""
    value_out: Tensor
    """B, [U, d, d] fp64."""
    restore_norm: bool = False
    """Scale the shared weights to the mean norm of the group's: averaging shrinks what is not quite aligned."""
    similarity: Tensor | None = None
    """[U, U] fp64: 1 where two units differ by a rotation only."""

    @property
    def units(self) -> int:
        return len(self.key_in)

    @property
    def head_dim(self) -> int:
        return 2 * self.key_in.shape[1]

    @property
    def order(self) -> list[int]:
        """The units, group by group."""
        return [unit for group in self.groups for unit in group]

    def on(self, device: torch.device) -> "LayerPlan":
        """The same on another device."""
        parts = ("key_in", "key_out", "value_in", "value_out")
        return replace(self, **{name: getattr(self, name).to(device) for name in parts})


def check_convertible(config: ModelConfig, kv_heads: Sequence[int], method: Method) -> None:
    """Raise GroupingError unless a model of this shape can be given so many KV heads a layer by this method."""
    if len(kv_heads) != config.num_layers:
        raise GroupingError(f"kv_heads lists {len(kv_heads)} layers; the model has {config.num_layers}.")
    for before, wanted in zip(config.kv_heads, kv_heads, strict=True):
        if not 1 <= wanted <= before or config.num_query_heads % wanted:
            fit = [n for n in range(1, before + 1) if config.num_query_heads % n == 0]
            raise GroupingError(
                f"kv_heads is {wanted}; {config.num_query_heads} query and {before} KV heads can be "
                f"grouped into {', '.join(map(str, fit))}."
            )
    if config.kind.joins_projections:
        raise GroupingError(f"{config.family} keeps q, k and v in one matrix; its KV heads cannot be grouped.")
    if config.qk_norm and config.kind.norms_whole_projections:
        raise GroupingError(
            f"{config.family} normalises all keys of a token together, so fewer of them would be other keys; its KV "
            "heads cannot be grouped."
        )
    if config.qk_norm and method in ("aligned", "subspace"):
        raise GroupingError(
            f"{config.family} normalises each query and key with a weight per channel, which forbids the rotations of "
            f"method {method!r}; use 'mean' or 'first'."
        )


def num_units(config: ModelConfig, layer: int, kv_heads: int) -> int:
    """Heads of a layer that are grouped: its KV heads, or where they do not divide evenly, a copy a query head."""
    before = config.kv_heads[layer]
    return before if before % kv_heads == 0 else config.num_query_heads


# --- calibration -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def head_moments(
    model: Transformer,
    batches: Sequence[PackedBatch],
    units: Sequence[int],
    *,
    skip: int = 0,
    group: Group = ALONE,
) -> Iterator[HeadMoments | None]:
    """Yield each layer's moments on the text, in order; None for the first `skip` layers, which only pass it on.

    units: how many heads of each layer are grouped (`num_units`).
    group: the processes that do the same, each with the batches dealt to it, of which it may have none.

    One layer at a time sees all text, so that only the residual streams [T, D] and one layer's moments are held.
    """
    streams = [ResidualStream(model, batch) for batch in batches]
    for number, layer in enumerate(passed_layers(model)):
        moments = None if number < skip else _empty_moments(model.config, layer.self_attn, units[number])
        for stream in streams:
            if moments is not None:
                _add_moments(moments, layer.self_attn, stream.normed(layer), units[number])
            stream.pass_on(layer)
        if moments is not None:
            _add_up(moments, group, model.device)
        yield moments


def _empty_moments(config: ModelConfig, attention: SelfAttention, units: int) -> HeadMoments:
    d = config.head_dim
    output = _by_unit(attention.o_proj.weight.double().T, units, d).flatten(0, 1)
    return HeadMoments(
        values=torch.zeros(units, units, d, d, dtype=torch.float64),
        keys=torch.zeros(units, units, d // 2, dtype=torch.complex128),
        queries=torch.zeros(units, d // 2, dtype=torch.float64),
        outputs=(output @ output.mT).unflatten(0, (units, -1)).sum(1).cpu(),
    )


def _add_moments(moments: HeadMoments, attention: SelfAttention, normed: Tensor, units: int) -> None:
    queries, keys, values = (
        projection(normed).double().unflatten(1, (-1, attention.head_dim)).transpose(0, 1)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    keys, values = _complex_pairs(_as_units(keys, units), dim=-1), _as_units(values, units)
    moments.values.add_(torch.einsum("itd,jte->ijde", values, values).cpu())
    moments.keys.add_(torch.einsum("itp,jtp->ijp", keys, keys.conj()).cpu())
    energy = _complex_pairs(queries, dim=-1).abs().square().sum(1)
    moments.queries.add_(energy.unflatten(0, (units, -1)).sum(1).cpu())


def _add_up(moments: HeadMoments, group: Group, device: torch.device) -> None:
    """Over the processes of a group, which have had other tokens."""
    parts = moments.values, torch.view_as_real(moments.keys), moments.queries
    for part, whole in zip(parts, added_up(group, device, *parts), strict=True):
        part.copy_(whole)


def _as_units(heads: Tensor, units: int) -> Tensor:
    """[Hkv, ...] -> [U, ...]"""
    return heads.repeat_interleave(units // heads.shape[0], dim=0)


def _by_unit(rows: Tensor, units: int, d: int) -> Tensor:
    """The rows of all query heads, [Hq · d, n] -> [U, Hq/U, d, n]."""
    return rows.unflatten(0, (units, -1, d))


def _complex_pairs(x: Tensor, dim: int) -> Tensor:
    return torch.complex(*x.chunk(2, dim=dim))


def _real_pairs(z: Tensor, dim: int) -> Tensor:
    return torch.cat((z.real, z.imag), dim=dim)


# --- plan ------------------------------------------------------------------------------------------------------------


def plan_layer(method: Method, kv_heads: int, moments: HeadMoments, *, seed: int = 0) -> LayerPlan:
    """How to convert a layer; `mean` and `first` take of the moments only their shape."""
    units, d = moments.values.shape[0], moments.values.shape[-1]
    if method in ("mean", "first"):
        return _neighbours(method, units, kv_heads, d)
    similarity = head_similarity(moments)
    groups = best_groups(similarity, kv_heads, seed=seed)
    share = _aligned if method == "aligned" else _subspace
    shares = [share(moments, list(group)) for group in groups]
    # From the order of the groups to that of the units.
    place = torch.tensor([unit for group in groups for unit in group]).argsort()
    key_in, key_out, value_in, value_out = (torch.cat(parts)[place] for parts in zip(*shares, strict=True))
    return LayerPlan(groups, key_in, key_out, value_in, value_out, method == "aligned", similarity)


def _neighbours(method: Method, units: int, kv_heads: int, d: int) -> LayerPlan:
    """Groups of neighbouring heads, nothing turned."""
    size = units // kv_heads
    shares = torch.full((units,), 1 / size, dtype=torch.float64)
    if method == "first":
        shares = (torch.arange(units) % size == 0).double()
    one = torch.ones(units, d // 2, dtype=torch.complex128)
    identity = torch.eye(d, dtype=torch.float64).repeat(units, 1, 1)
    return LayerPlan(
        groups=tuple(tuple(range(start, start + size)) for start in range(0, units, size)),
        key_in=one * shares[:, None],
        key_out=one,
        value_in=identity * shares[:, None, None],
        value_out=identity,
    )


def head_similarity(moments: HeadMoments) -> Tensor:
    """Cosine of each two units after the best rotation, the mean of keys' and values', [U, U] fp64."""
    values = torch.linalg.matrix_norm(moments.values, ord="nuc")
    energy = moments.values.diagonal(dim1=-2, dim2=-1).sum(-1).diagonal()
    keys = moments.keys.abs().sum(-1)
    return (_normalized(values, energy) + _normalized(keys, keys.diagonal())) / 2


def _normalized(products: Tensor, energy: Tensor) -> Tensor:
    return products / (energy[:, None] * energy).sqrt().clamp_min(torch.finfo(torch.float64).tiny)


def best_groups(similarity: Tensor, count: int, *, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Split the units into `count` groups of one size so that those of a group are most alike, each in ascending order.

    All partitions are tried where they are few; else heads are exchanged at random under falling temperature.
    """
    units = len(similarity)
    size = units // count
    table = similarity.tolist()
    partitions = math.factorial(units) // (math.factorial(size) ** count * math.factorial(count))
    if partitions <= _MOST_PARTITIONS:
        return max(_partitions(tuple(range(units)), size), key=lambda groups: _likeness(table, groups))
    return tuple(sorted(tuple(sorted(group)) for group in _anneal(table, units, size, seed)))


def _likeness(table: list[list[float]], groups: Sequence[Sequence[int]]) -> float:
    return sum(table[i][j] for group in groups for i, j in itertools.combinations(group, 2))


def _partitions(units: tuple[int, ...], size: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to split the units into groups of `size`."""
    if not units:
        yield ()
        return
    for others in itertools.combinations(units[1:], size - 1):
        rest = tuple(unit for unit in units[1:] if unit not in others)
        for groups in _partitions(rest, size):
            yield ((units[0], *others), *groups)


def _anneal(table: list[list[float]], units: int, size: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    groups = [list(range(start, start + size)) for start in range(0, units, size)]
    likeness = best = _likeness(table, groups)
    best_groups_so_far = [list(group) for group in groups]
    for step in range(_ANNEALING_STEPS):
        temperature = 0.1 * (1 - step / _ANNEALING_STEPS) + 1e-9
        one, other = chance.sample(range(len(groups)), 2)
        i, j = chance.randrange(size), chance.randrange(size)
        gain = _exchange_gain(table, groups[one], i, groups[other], j)
        if gain < 0 and chance.random() >= math.exp(gain / temperature):
            continue
        groups[one][i], groups[other][j] = groups[other][j], groups[one][i]
        likeness += gain
        if likeness > best:
            best, best_groups_so_far = likeness, [list(group) for group in groups]
    return best_groups_so_far


def _exchange_gain(table: list[list[float]], one: list[int], i: int, other: list[int], j: int) -> float:
    a, b = one[i], other[j]
    gain = sum(table[b][unit] - table[a][unit] for unit in one if unit != a)
    return gain + sum(table[a][unit] - table[b][unit] for unit in other if unit != b)


_Share = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of the units of one group: key_in, key_out [g, d/2], value_in, value_out [g, d, d]."""


def _aligned(moments: HeadMoments, group: list[int]) -> _Share:
    """Rotations that bring the units of a group closest together: generalized Procrustes, keys pair by pair."""
    phases = _align_keys(moments.keys[group][:, group])
    turns = _align_values(moments.values[group][:, group])
    return phases.conj() / len(group), phases, turns.mT / len(group), turns


def _align_keys(moments: Tensor) -> Tensor:
    """Phases b [g, d/2] that maximise Σ conj(b_h) E[z_h conj(z_j)] b_j, from moments [g, g, d/2]."""
    matrices = moments.permute(2, 0, 1)
    # The best phases if amplitudes were free; from there each unit follows the others.
    phases = _phase_of(torch.linalg.eigh(matrices).eigenvectors[..., -1])
    for _ in range(_PROCRUSTES_STEPS):
        phases = _phase_of((matrices @ phases[..., None])[..., 0])
    return phases.T


def _phase_of(z: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(z.real), z.angle())


def _align_values(moments: Tensor) -> Tensor:
    """Orthogonal R [g, d, d] that maximise Σ tr(R_hᵀ E[v_h v_jᵀ] R_j), from moments [g, g, d, d]."""
    size, d = moments.shape[0], moments.shape[-1]
    turns = torch.eye(d, dtype=torch.float64).repeat(size, 1, 1)
    for member in range(1, size):
        turns[member] = _procrustes(moments[member, 0])
    for _ in range(_PROCRUSTES_STEPS if size > 2 else 0):
        before = turns.clone()
        for member in range(size):
            others = [other for other in range(size) if other != member]
            turns[member] = _procrustes((moments[member, others] @ turns[others]).sum(0))
        if (turns - before).abs().max() < 1e-9:
            break
    return turns


def _procrustes(cross: Tensor) -> Tensor:
    """The orthogonal R that maximises tr(Rᵀ cross)."""
    left, _, right = torch.linalg.svd(cross)
    return left @ right


def _subspace(moments: HeadMoments, group: list[int]) -> _Share:
    """The shared keys and values from which the group's own can be had back with the least error that matters."""
    keys = moments.keys[group][:, group].permute(2, 0, 1)
    weight = moments.queries[group].T.sqrt()
    weight = weight.clamp_min(_SMALLEST_WEIGHT * weight.amax(-1, keepdim=True)).clamp_min(_TINY)
    leading = torch.linalg.eigh(weight[:, :, None] * keys * weight[:, None, :]).eigenvectors[..., -1]
    key_in, key_out = leading.conj() * weight, leading / weight
    # The size of the shared keys is free: that of the group's own keeps them apt for 8-bit pages.
    scale = key_out.abs().square().mean(-1, keepdim=True).sqrt()
    value_in, value_out = _value_subspace(moments.values[group][:, group], moments.outputs[group])
    return (key_in * scale).T, (key_out / scale).T, value_in, value_out


def _value_subspace(values: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    size, d = values.shape[0], values.shape[-1]
    energies, directions = torch.linalg.eigh(outputs)
    energies = energies.clamp_min(_SMALLEST_WEIGHT**2 * energies.amax(-1, keepdim=True)).clamp_min(_TINY)
    weight, inverse = ((directions * energies[:, None] ** power) @ directions.mT for power in (0.5, -0.5))
    weighted = torch.einsum("iab,ijbc,jcd->iajd", weight, values, weight).reshape(size * d, size * d)
    leading = torch.linalg.eigh(weighted).eigenvectors[:, -d:].unflatten(0, (size, d))
    value_in, value_out = leading.mT @ weight, inverse @ leading
    scale = value_out.square().sum((0, 1)).mean().div(size).sqrt()
    return value_in * scale, value_out / scale


# --- conversion ------------------------------------------------------------------------------------------------------


def group_kv_heads(model: Transformer, plans: Sequence[LayerPlan]) -> Transformer:
    """A new model in which each layer has one KV head for each group of its plan; see `grouped`."""
    return grouped(LazyModel.of(model), plans).made()


def grouped(model: LazyModel, plans: Sequence[LayerPlan]) -> LazyModel:
    """A model with one KV head for each group of a layer's plan, projection by projection.

    Query heads and the columns of the output projection are reordered so that each group's stand together.
    """
    config, weights = model.config.with_kv_heads([len(plan.groups) for plan in plans]), dict(model.weights)
    for number, plan in enumerate(plans):
        attention = f"{LAYERS}{number}.self_attn."
        weights[f"{attention}o_proj.weight"] = partial(_outputs, weights[f"{attention}o_proj.weight"], plan)
        for name, turn in (("q_proj", _queries), ("k_proj", _keys), ("v_proj", _values)):
            parts = [path for leaf in ("weight", "bias") if (path := f"{attention}{name}.{leaf}") in weights]
            own = [weights[path] for path in parts]
            weights |= {path: partial(_turned, own, turn, plan, leaf) for leaf, path in enumerate(parts)}
    return replace(model, config=config, weights=weights)


def _turned(
    own: Sequence[MakeWeight], turn: Callable[[Tensor, LayerPlan], Tensor], plan: LayerPlan, leaf: int
) -> Tensor:
    """Weight (leaf 0) or bias (1) of a projection, both of which turn alike, as columns of one matrix in fp64."""
    weight, *bias = (make() for make in own)
    rows = turn(torch.cat([weight.double(), *(one.double()[:, None] for one in bias)], dim=1), plan.on(weight.device))
    part = rows[:, weight.shape[1]] if leaf else rows[:, : weight.shape[1]]
    return part.to(weight.dtype).contiguous()


def _queries(rows: Tensor, plan: LayerPlan) -> Tensor:
    queries = _complex_pairs(_by_unit(rows, plan.units, plan.head_dim), dim=2)
    return _real_pairs(queries * plan.key_out.conj()[:, None, :, None], dim=2)[plan.order].flatten(0, 2)


def _keys(rows: Tensor, plan: LayerPlan) -> Tensor:
    keys = _as_units(rows.unflatten(0, (-1, plan.head_dim)), plan.units)
    return _shared(_real_pairs(_complex_pairs(keys, dim=1) * plan.key_in[:, :, None], dim=1), keys, plan)


def _values(rows: Tensor, plan: LayerPlan) -> Tensor:
    values = _as_units(rows.unflatten(0, (-1, plan.head_dim)), plan.units)
    return _shared(plan.value_in @ values, values, plan)


def _outputs(own: MakeWeight, plan: LayerPlan) -> Tensor:
    """The output projection."""
    weight = own()
    plan = plan.on(weight.device)
    output = plan.value_out.mT[:, None] @ _by_unit(weight.double().T, plan.units, plan.head_dim)
    return output[plan.order].flatten(0, 2).T.to(weight.dtype).contiguous()


def _shared(contributions: Tensor, own: Tensor, plan: LayerPlan) -> Tensor:
    """The rows of all shared heads, [groups · d, n], from what each unit adds and what it was, [U, d, n]."""
    heads = []
    for group in plan.groups:
        head = contributions[list(group)].sum(0)
        if plan.restore_norm:
            head = head * (torch.linalg.matrix_norm(own[list(group)]).mean() / torch.linalg.matrix_norm(head))
        heads.append(head)
    return torch.cat(heads)
