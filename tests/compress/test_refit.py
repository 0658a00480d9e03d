"""Refitted output projections: what linear least squares must give."""

import copy

import pytest
import torch

import compress.refit
from compress.gqa import group_kv_heads
from compress.refit import refit_outputs
from compress.residual_stream import ResidualStream, layers_of
from model.collectives import ALONE, Group
from model.transformer import Transformer
from tests.compress.conversions import difference, plans_for, texts
from tests.ranks import in_ranks
from tests.tiny import tiny_model

TEXT = [*texts(300, 200), *texts(400, 100)]


def distances(model: Transformer, parent: Transformer) -> list[float]:
    """How far the streams lie apart behind each layer's attention, squared and summed over the text."""
    pairs = [(ResidualStream(model, text), ResidualStream(parent, text)) for text in TEXT]
    found = []
    for one, two in zip(layers_of(model), layers_of(parent), strict=True):
        total = 0.0
        for own, other in pairs:
            own.pass_on(one)
            other.pass_on(two)
            total += float((own.before_mlp - other.before_mlp).double().square().sum())
        found.append(total)
    return found


def test_the_parent_itself_stays_as_it_is() -> None:
    parent = tiny_model()
    again = copy.deepcopy(parent)
    refit_outputs(again, parent, TEXT)
    assert difference(parent, again) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3", "granite"])
def test_what_a_layer_computes_linearly_comes_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any projection is found again from what it does, biases included."""
    monkeypatch.setattr(compress.refit, "RIDGE", 1e-9)
    parent = tiny_model(family, output_bias=family == "llama")
    other = copy.deepcopy(parent)
    with torch.no_grad():
        for layer in layers_of(other):
            layer.self_attn.o_proj.weight.mul_(0.1).add_(0.3)
    assert difference(parent, other) > 0.5
    refit_outputs(other, parent, TEXT)
    assert difference(parent, other) < 1e-3


def test_it_is_the_best_projection_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first layer, whose input is the parent's; and later layers come nearer too."""
    monkeypatch.setattr(compress.refit, "RIDGE", 1e-9)
    parent = tiny_model(num_kv_heads=4)
    converted = group_kv_heads(parent, plans_for(parent, 1, "subspace"))
    fitted = copy.deepcopy(converted)
    refit_outputs(fitted, parent, TEXT)
    before, after = distances(converted, parent), distances(fitted, parent)
    assert all(one < other for one, other in zip(after, before, strict=True))
    weight = layers_of(fitted)[0].self_attn.o_proj.weight
    for seed in range(3):
        step = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * 1e-3
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(sign * step)
                assert distances(fitted, parent)[0] > after[0]
                weight.sub_(sign * step)


def test_processes_with_a_part_of_the_text_each_fit_as_one_with_all() -> None:
    """One of the three has no text."""
    parent = tiny_model(num_kv_heads=4)
    converted = group_kv_heads(parent, plans_for(parent, 1, "subspace"))

    def fitted(group: Group) -> Transformer:
        own = copy.deepcopy(converted)
        refit_outputs(own, parent, TEXT[group.index :: group.count], group)
        return own

    assert len(TEXT) == 2
    one, many = fitted(ALONE), in_ranks(3, fitted)
    assert all(difference(one, other) < 1e-6 < difference(converted, other) for other in many)
    assert all(difference(many[0], other) == 0 for other in many)


def test_a_heavy_ridge_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tiny_model(num_kv_heads=4)
    converted = group_kv_heads(parent, plans_for(parent, 2, "mean"))
    fitted = copy.deepcopy(converted)
    monkeypatch.setattr(compress.refit, "RIDGE", 1e12)
    refit_outputs(fitted, parent, TEXT)
    assert difference(converted, fitted) < 1e-5


def test_other_parts_and_the_parent_are_left_alone() -> None:
    parent = tiny_model(num_kv_heads=4)
    converted = group_kv_heads(parent, plans_for(parent, 1, "subspace"))
    before = {name: weight.clone() for name, weight in converted.state_dict().items()}
    kept = {name: weight.clone() for name, weight in parent.state_dict().items()}
    refit_outputs(converted, parent, TEXT)
    changed = {name for name, weight in converted.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(2)}
    assert all(torch.equal(weight, kept[name]) for name, weight in parent.state_dict().items())
