import itertools
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from compress.gqa import (
    GroupingError,
    Method,
    best_groups,
    check_convertible,
    group_kv_heads,
    head_moments,
    num_units,
)
from compress.prune.depth import prune_depth
from kernels.attention.rotary import apply_rotary, rope_frequencies, rotary_tables
from model.families.registry import FAMILIES
from model.files.checkpoint import load_model, save_model
from model.kv_format import KV_FORMATS
from model.transformer import Transformer
from tests.compress.conversions import Text, convert, difference, plans_for, texts
from tests.ranks import in_ranks
from tests.tiny import tiny_model

METHODS = get_args(Method)
TURNING = ("aligned", "subspace")


def with_equal_heads(model: Transformer, group: list[int]) -> Transformer:
    """Makes the KV heads of `group` copies of its first, turned at random: keys pair by pair, values by any matrix."""
    config, generator = model.config, torch.Generator().manual_seed(3)
    d = config.head_dim
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for head in group[1:]:
                own, first = slice(head * d, head * d + d), slice(group[0] * d, group[0] * d + d)
                angles = torch.rand(d // 2, generator=generator) * 6
                turn = torch.diag_embed(torch.cat((angles.cos(), angles.cos())))
                turn += torch.diag(-angles.sin(), d // 2) + torch.diag(angles.sin(), -(d // 2))
                other = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
                for projection, matrix in ((attention.k_proj, turn), (attention.v_proj, other)):
                    projection.weight[own] = matrix @ projection.weight[first]
                    if projection.bias is not None:
                        projection.bias[own] = matrix @ projection.bias[first]
    return model


def can_group(family: str, method: Method) -> bool:
    """Whether norms of keys allow it."""
    return family not in ("olmo2", "phi3") and not (
        family in ("qwen3", "qwen3_moe", "gemma3_text") and method in TURNING
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("method", METHODS)
def test_as_many_heads_as_before_are_the_same_model(method: Method, family: str) -> None:
    model = tiny_model(family)
    if not can_group(family, method):
        with pytest.raises(GroupingError, match=f"{family} (normalises|keeps q, k and v in one matrix)"):
            check_convertible(model.config, [2, 2], method)
        return
    check_convertible(model.config, [2, 2], method)
    assert difference(model, convert(model, 2, method)) < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "smollm3"])
@pytest.mark.parametrize("method", TURNING)
def test_heads_that_differ_by_a_rotation_become_one_without_loss(method: Method, family: str) -> None:
    model = with_equal_heads(tiny_model(family, num_kv_heads=4), [0, 2])
    model = with_equal_heads(model, [1, 3])
    converted = convert(model, 2, method)
    assert converted.config.num_kv_heads == 2
    assert difference(model, converted) < 1e-4
    assert difference(model, convert(model, 2, "mean")) > 0.1


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("method", METHODS)
def test_equal_heads_become_one_without_loss(method: Method, family: str) -> None:
    if not can_group(family, method):
        return  # refused, as above
    model = tiny_model(family, num_kv_heads=4)
    with torch.no_grad():
        for layer, name in itertools.product(model.model.layers, ("k_proj", "v_proj")):
            for parameter in getattr(layer.self_attn, name).parameters():
                parameter.copy_(torch.cat([parameter[: model.config.head_dim]] * 4))
    assert difference(model, convert(model, 1, method)) < 1e-4


def test_the_rotations_of_alignment_alone_change_nothing() -> None:
    """Each head turned as it would be, but kept for itself."""
    model = tiny_model(num_kv_heads=4)
    for plan in (plans := plans_for(model, 1, "aligned")):
        assert not torch.allclose(plan.key_out, torch.ones_like(plan.key_out))
        assert torch.allclose(plan.key_out.abs(), torch.ones_like(plan.key_out.abs()))
        assert torch.allclose(plan.value_out.mT @ plan.value_out, torch.eye(16, dtype=torch.float64).expand(4, 16, 16))
    alone = tuple((unit,) for unit in range(4))
    turned = [
        replace(plan, groups=alone, key_in=plan.key_in * 4, value_in=plan.value_in * 4, restore_norm=False)
        for plan in plans
    ]
    assert difference(model, group_kv_heads(model, turned)) < 1e-5


def test_heads_may_stand_in_another_order(tmp_path: Path) -> None:
    """Query heads and the columns of the output projection follow their KV heads, also through a file."""
    model = tiny_model(num_kv_heads=4)
    plans = [replace(plan, groups=((2,), (0,), (3,), (1,))) for plan in plans_for(model, 4, "first")]
    moved = group_kv_heads(model, plans)
    before, after = (one.model.layers[0].self_attn.q_proj.weight for one in (model, moved))
    assert torch.equal(after[:16], before[32:48])
    save_model(moved, tmp_path, dtype=torch.float32)
    assert difference(model, load_model(tmp_path)) < 1e-6


def test_plane_rotations_commute_with_rope_and_others_do_not() -> None:
    d, generator = 16, torch.Generator().manual_seed(2)
    cos, sin = rotary_tables(torch.arange(40), rope_frequencies(d, 10_000.0))
    x = torch.randn(40, 1, d, generator=generator)
    angle = torch.rand(d // 2, generator=generator)
    plane = torch.diag(torch.cat((angle.cos(), angle.cos())))
    plane += torch.diag(-angle.sin(), d // 2) + torch.diag(angle.sin(), -(d // 2))
    generic = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
    for matrix, commutes in ((plane, True), (generic, False)):
        turned_first, _ = apply_rotary(x @ matrix.T, x, cos, sin)
        turned_last = apply_rotary(x, x, cos, sin)[0] @ matrix.T
        assert torch.allclose(turned_first, turned_last, atol=1e-5) is commutes


def test_the_subspace_loses_less_than_alignment_and_alignment_less_than_the_mean() -> None:
    """On heads that share most of what they do: random ones, half of each the same up to a rotation."""
    model = tiny_model(num_kv_heads=4, seed=2)
    noise = tiny_model(num_kv_heads=4, seed=3)
    with_equal_heads(model, [0, 1, 2, 3])
    with torch.no_grad():
        for layer, other in zip(model.model.layers, noise.model.layers, strict=True):
            for name in ("k_proj", "v_proj"):
                getattr(layer.self_attn, name).weight += 0.3 * getattr(other.self_attn, name).weight
    losses = {method: difference(model, convert(model, 1, method)) for method in METHODS}
    assert losses["subspace"] < losses["aligned"] < 0.7 * min(losses["mean"], losses["first"])


def test_the_norm_of_a_mean_follows_from_the_cosine() -> None:
    """|mean| / |member| = √((1 + (g − 1) ρ) / g): what restoring the norm makes up for."""
    model = tiny_model(num_kv_heads=4)
    plan = plans_for(model, 1, "mean")[0]
    heads = model.model.layers[0].self_attn.v_proj.weight.detach().double().unflatten(0, (4, -1)).flatten(1)
    pooled = group_kv_heads(model, [plan] * 2).model.layers[0].self_attn.v_proj.weight.double()
    rho = (heads @ heads.T).fill_diagonal_(0).sum() / 12 / heads.square().sum(1).mean()
    expected = (heads.square().sum(1).mean() * (1 + 3 * rho) / 4).sqrt()
    assert torch.isclose(pooled.norm(), expected, rtol=1e-5)


def test_alignment_restores_the_norm() -> None:
    model = tiny_model(num_kv_heads=4)
    converted = convert(model, 2, "aligned")
    for before, after in zip(model.model.layers, converted.model.layers, strict=True):
        for name in ("k_proj", "v_proj"):
            own = getattr(before.self_attn, name).weight.unflatten(0, (4, -1))
            shared = getattr(after.self_attn, name).weight.unflatten(0, (2, -1))
            norms = torch.linalg.matrix_norm(own)
            assert norms.min() <= torch.linalg.matrix_norm(shared).min() <= norms.max()


def test_like_heads_are_grouped_by_trying_all_and_by_annealing() -> None:
    for units, count in ((6, 2), (24, 8)):
        order = torch.randperm(units, generator=torch.Generator().manual_seed(4))
        similarity = torch.rand(units, units, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * 0.3
        similarity = (similarity + similarity.T) / 2
        wanted = order.unflatten(0, (count, -1))
        for group in wanted:
            similarity[group[:, None], group] = 0.9
        found = best_groups(similarity, count)
        assert sorted(found) == sorted(tuple(sorted(group.tolist())) for group in wanted)


def test_query_heads_are_grouped_where_kv_heads_do_not_divide() -> None:
    model = tiny_model(num_query_heads=12, num_kv_heads=6, hidden_size=96)
    assert num_units(model.config, 0, 4) == 12
    assert num_units(model.config, 0, 3) == 6
    converted = convert(model, 4, "subspace")
    assert converted.config.num_kv_heads == 4
    assert difference(model, converted) < difference(model, convert(model, 4, "mean"))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "smollm3"])
def test_layers_may_differ(family: str, tmp_path: Path) -> None:
    """Layer by layer what a uniform conversion makes of it; saved, loaded, and converted again."""
    model = tiny_model(family, num_kv_heads=4)
    mixed, plans = convert(model, [1, 2], "subspace"), plans_for(model, 1, "subspace")
    assert mixed.config.kv_heads == (1, 2) and mixed.config.num_kv_heads == 2
    assert KV_FORMATS[torch.bfloat16].bytes_per_token(mixed.config) == 2 * (1 + 2) * 16 * 2
    assert mixed.config.num_parameters() == sum(parameter.numel() for parameter in mixed.parameters())
    alone = group_kv_heads(model, plans).model.layers[0].self_attn
    assert torch.equal(mixed.model.layers[0].self_attn.k_proj.weight, alone.k_proj.weight)
    save_model(mixed, tmp_path, dtype=torch.float32)
    loaded = load_model(tmp_path)
    assert loaded.config == mixed.config
    assert difference(mixed, loaded) == 0
    assert convert(loaded, [1, 1], "subspace").config.kv_heads == (1, 1)
    assert prune_depth(loaded, (1,)).config.kv_heads == (2,)


def test_calibration_skips_what_is_known_and_packs_documents_apart() -> None:
    model = tiny_model()
    both = [moments for moments in head_moments(model, texts(50, 30), [2, 2]) if moments is not None]
    skipped, second = head_moments(model, texts(50, 30), [2, 2], skip=1)
    assert skipped is None and second is not None
    assert torch.equal(second.values, both[1].values)
    alone = list(head_moments(model, [text_of(texts(50, 30)[0], 0), text_of(texts(50, 30)[0], 1)], [2, 2]))[1]
    assert alone is not None
    for name in ("values", "keys", "queries"):
        assert torch.allclose(getattr(alone, name), getattr(second, name), rtol=1e-5, atol=1e-4), name


def test_processes_with_a_part_of_the_text_each_find_the_moments_of_all() -> None:
    """One of the three has no text."""
    model, text = tiny_model(), [*texts(50, 30), *texts(40, 7)]
    one = list(head_moments(model, text, [4, 2]))
    for many in in_ranks(3, lambda group: list(head_moments(model, text[group.index :: 3], [4, 2], group=group))):
        for expected, moments in zip(one, many, strict=True):
            assert expected is not None and moments is not None
            for name in ("values", "keys", "queries", "outputs"):
                torch.testing.assert_close(getattr(moments, name), getattr(expected, name), rtol=1e-12, atol=1e-12)


def text_of(text: Text, document: int) -> Text:
    start, stop = text.cu_seqlens[document : document + 2].tolist()
    rows = slice(start, stop)
    bounds = torch.tensor([0, stop - start], dtype=torch.int32)
    return Text(text.tokens[rows], text.positions[rows], bounds, text.labels[rows])


def test_a_converted_model_survives_saving(tmp_path: Path) -> None:
    converted = convert(tiny_model(num_kv_heads=4), 2, "subspace")
    save_model(converted, tmp_path, dtype=torch.float32)
    loaded = load_model(tmp_path)
    assert loaded.config.num_kv_heads == 2
    assert difference(converted, loaded) == 0


@pytest.mark.parametrize("kv_heads", [0, 3, 4, 5])
def test_impossible_numbers_of_heads_are_refused(kv_heads: int) -> None:
    with pytest.raises(GroupingError, match=rf"kv_heads is {kv_heads}; .* can be grouped into 1, 2\."):
        check_convertible(tiny_model().config, [2, kv_heads], "mean")


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(GroupingError, match="kv_heads lists 3 layers; the model has 2"):
        check_convertible(tiny_model().config, [1, 1, 1], "mean")
