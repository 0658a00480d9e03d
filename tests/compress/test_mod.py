"""Routers for a finished model: the start is the parent, thresholds select the capacity, work is counted right."""

import copy
from dataclasses import replace

import pytest
import torch

from compress.mod import (
    RoutingError,
    add_routers,
    calibrate,
    every_nth,
    least_important,
    measure_selections,
    set_thresholds,
)
from compress.token_costs import TokenCosts, fit_routers, mean_costs, skipping_costs
from kernels.attention.rotary_write import qk_norm_rope
from model.attention import PackedAttention
from model.collectives import ALONE, Group
from model.config import MixtureOfDepths
from model.cost import flops_per_token
from model.kv_format import NormRope
from model.transformer import Transformer
from tests.ranks import in_ranks
from tests.tiny import full_logits, tiny_config, tiny_model
from train.packing import Batch


def batches(count: int = 3, tokens: int = 200) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, 60, tokens], dtype=torch.int32)
    positions = torch.cat([torch.arange(60), torch.arange(tokens - 60)])
    found = [torch.randint(0, 512, (tokens,), generator=generator) for _ in range(count)]
    return [Batch(row, positions, ends, row, num_labels=tokens) for row in found]


def routed(capacity: float = 0.25, *, random: bool = True) -> Transformer:
    model = add_routers(tiny_model(num_layers=4), MixtureOfDepths("block", (1, 3), capacity))
    if random:
        for layer in (1, 3):
            torch.nn.init.normal_(model.model.layers[layer].router.weight)
    return model


def test_the_start_is_the_parent() -> None:
    parent, model = tiny_model(num_layers=4), routed(random=False)
    tokens = batches(1)[0].tokens[:50].tolist()
    assert not torch.equal(full_logits(model, tokens), full_logits(parent, tokens)), "scores of 0 are not above 0"
    set_thresholds(model, [-1.0, -1.0])
    assert torch.equal(full_logits(model, tokens), full_logits(parent, tokens))
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert torch.equal(parent.model.norm.weight, torch.ones(64)), "the parent's weights are its own"
    with pytest.raises(RoutingError, match="already"):
        add_routers(model, MixtureOfDepths("block", (1,), 0.5))


@pytest.mark.parametrize("capacity", [0.125, 0.5, 0.9])
def test_calibrated_thresholds_select_the_capacity(capacity: float) -> None:
    model = routed(capacity)
    calibrate(model, batches())
    selected = measure_selections(model, batches())
    assert selected.shape == (2, 600)
    # What the first layer leaves is what the second is calibrated on, so both are met.
    assert ((selected.float().mean(1) - capacity).abs() < 0.005).all()
    assert model.config.mixture_of_depths.thresholds == tuple(model.model.layers[n].threshold for n in (1, 3))


@pytest.mark.parametrize("route", ["attention", "block"])
def test_processes_with_a_part_of_the_text_each_find_the_routers_of_one_with_all(route: str) -> None:
    """One of the three has no text."""
    parent, text = tiny_model(num_layers=4), batches(2, tokens=100)

    def converted(group: Group) -> tuple[Transformer, list[float]]:
        own, part = copy.deepcopy(parent), text[group.index :: group.count]
        costs = skipping_costs(own, part, route, group)
        model = add_routers(own, MixtureOfDepths(route, (1, 3), 0.25))
        model.load_state_dict(fit_routers((1, 3), costs, own.device, group), strict=False)
        calibrate(model, part, group)
        return model, mean_costs(costs, own.device, group)

    one, means = converted(ALONE)
    for many, mean in in_ranks(3, converted):
        assert mean == pytest.approx(means, rel=1e-12)
        for name in ("weight", "bias"):
            found, expected = (getattr(model.model.layers[3].router, name) for model in (many, one))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        thresholds = [model.config.mixture_of_depths.thresholds for model in (many, one)]
        assert thresholds[0] == pytest.approx(thresholds[1], rel=1e-5, abs=1e-6) and 0 not in thresholds[1]


def test_which_layers() -> None:
    assert every_nth(6, 2) == (1, 3, 5) and every_nth(7, 3) == (2, 5)
    assert least_important([0.5, 0.1, 0.3, 0.2], 2) == (1, 3)


def test_work_is_counted_by_hand() -> None:
    config = tiny_config(num_layers=4, mixture_of_depths=MixtureOfDepths("block", (1, 3), 0.5))
    projections = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64)
    scores = 2 * 2 * 4 * 16 * 50  # of each query and half of 100 keys, two products
    mlp = 2 * 3 * 64 * 160
    dense = 4 * (projections + scores + mlp)
    assert flops_per_token(config, 100) == dense
    half = projections / 2 + scores * 0.75 + mlp / 2
    assert flops_per_token(config, 100, [0.5, 0.5]) == dense - 2 * half + 2 * 2 * 64
    attention = tiny_config(num_layers=4, mixture_of_depths=MixtureOfDepths("attention", (1, 3), 0.5))
    assert flops_per_token(attention, 100, [0.0, 1.0]) == dense - projections - scores + 2 * 2 * 64


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("route", ["attention", "mlp", "block"])
def test_costs_are_squared_slopes_of_each_tokens_part(route: str, family: str) -> None:
    """Against finite differences: the part of one token in one layer turned down a little, its key's weight with it."""
    model, layer, token, step = tiny_model(family, num_layers=2).double(), 1, 5, 1e-4
    batch = batches(1, tokens=70)[0]
    batch = replace(batch, tokens=batch.tokens[:24], positions=batch.positions[:24], cu_seqlens=torch.tensor([0, 24]))
    costs = skipping_costs(model, [batch], route)[layer].costs
    with torch.no_grad():
        logits = model.logits(forward(model, batch, PackedAttention(model.config, batch.cu_seqlens)))
        chances, generator = torch.softmax(logits.float(), -1), torch.Generator().manual_seed(0)
        drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
        losses = [turned_down(model, batch, drawn, route, layer, token, part) for part in (1 + step, 1 - step)]
    slope = (losses[0] - losses[1]) / (2 * step)
    assert float(costs[token]) == pytest.approx(slope**2 / 2, rel=1e-3)


def forward(model: Transformer, batch: Batch, attention: PackedAttention) -> torch.Tensor:
    return model(batch.tokens, batch.positions, attention)


def turned_down(
    model: Transformer, batch: Batch, drawn: torch.Tensor, route: str, layer: int, token: int, part: float
) -> float:
    """The loss when one token takes part in one layer with this weight."""

    class Part(PackedAttention):
        def __call__(
            self, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, norm_rope: NormRope
        ) -> torch.Tensor:
            if number != layer or route == "mlp":
                return super().__call__(number, q, k, v, norm_rope)
            q, k = qk_norm_rope(q, k, rotary=norm_rope.rotary, norms=norm_rope.norms)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            scores = torch.einsum("nhd,mhd->hnm", q, k) * (model.config.attention_scale or q.shape[2] ** -0.5)
            if (cap := model.config.attention_soft_cap) is not None:
                scores = cap * (scores / cap).tanh()
            weights = scores.exp().tril()
            weights[:, :, token] *= part
            mixed = torch.einsum("hnm,mhd->nhd", weights / weights.sum(-1, keepdim=True), v)
            mixed[token] *= part
            return mixed

    def scale(_: object, __: object, added: torch.Tensor) -> torch.Tensor:
        return torch.cat((added[:token], added[token : token + 1] * part, added[token + 1 :]))

    hook = model.model.layers[layer].mlp.register_forward_hook(scale) if route != "attention" else None
    logits = model.logits(forward(model, batch, Part(model.config, batch.cu_seqlens)))
    if hook:
        hook.remove()
    return float(torch.nn.functional.cross_entropy(logits, drawn, reduction="sum"))


def test_fitted_routers_keep_the_tokens_that_matter() -> None:
    """Costs that a router can express are ranked right; the scores are small, so gates begin near 1."""
    model = routed(0.5, random=False)
    inputs = torch.nn.functional.rms_norm(torch.randn(600, 64, generator=torch.Generator().manual_seed(3)), (64,))
    direction = torch.randn(64, generator=torch.Generator().manual_seed(4))
    costs = TokenCosts(inputs.bfloat16(), (inputs @ direction / 4).exp())
    model.load_state_dict(fit_routers((1, 3), [costs] * 4, model.device), strict=False)
    scores = model.model.layers[1].router(inputs).detach()
    ranks = torch.stack([scores, inputs @ direction]).argsort(1).argsort(1).double()
    assert torch.corrcoef(ranks)[0, 1] > 0.98
    assert abs(float(scores.mean())) < 0.01 and float(scores.std()) == pytest.approx(0.25, rel=0.02)
