"""Routers in training: the capacity falls as told, the losses add up, thresholds learn to predict the choice."""

from pathlib import Path

import pytest
import torch

from compress.mod import add_routers
from model.config import MixtureOfDepths
from model.routed import ExpertChoice
from model.transformer import Transformer
from tests.tiny import tiny_model
from tests.train.toy import batch_of, random_sequences, toy_trainer, weights_hash
from train.objectives import Distillation, LanguageModelling, RoutedTraining, RoutingConfig, hidden_states


def routed_model() -> Transformer:
    model = add_routers(tiny_model(seed=1, num_layers=4), MixtureOfDepths("attention", (1, 3), 0.25))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in (1, 3):
            model.model.layers[layer].router.weight.copy_(0.1 * torch.randn(1, 64, generator=generator))
    return model.train()


def test_the_capacity_falls_to_its_goal_and_stays() -> None:
    config = RoutingConfig(capacity=0.25, anneal_fraction=0.5)
    assert [config.at(progress) for progress in (0.0, 0.25, 0.5, 0.9)] == [1.0, 0.625, 0.25, 0.25]
    assert RoutingConfig(capacity=0.25, anneal_fraction=0.0).at(0.0) == 0.25


@pytest.mark.parametrize("inner", [LanguageModelling(), Distillation(tiny_model(seed=1, num_layers=4))])
def test_the_loss_is_the_objective_under_expert_choice_and_the_auxiliary_loss(inner: LanguageModelling) -> None:
    model, batch = routed_model(), batch_of(random_sequences(30, 12, 21))
    output = RoutedTraining(inner, RoutingConfig(0.25, 0.5, auxiliary_weight=0.3))(model, batch, 0.25)
    choice = ExpertChoice(batch.cu_seqlens, 63, 0.625)
    plain = inner(model, batch, routing=choice)
    expected = plain.loss_sum + 0.3 * choice.auxiliary_loss() * batch.num_labels / 63
    assert output.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
    assert output.num_labels == batch.num_labels
    metrics = {name: value.item() / batch.num_labels for name, value in output.metrics.items()}
    assert metrics["capacity"] == pytest.approx(0.625)
    share = sum(int(mask.sum()) for mask in choice.selected.values()) / 126
    assert 0.625 <= share < 0.66  # each document's share is rounded up
    for layer, scores in choice.logits.items():
        assert metrics[f"passing_{layer}"] == pytest.approx((scores > 0).float().mean().item())


def test_a_router_learns_to_predict_its_own_choice(tmp_path: Path) -> None:
    model = routed_model()
    objective = RoutedTraining(LanguageModelling(), RoutingConfig(0.25, 0.0, auxiliary_weight=1.0))
    result = toy_trainer(tmp_path, model=model, objective=objective, tokens=100 * 128, learning_rate=1e-2).train()
    assert result.metrics["router_accuracy"] > 0.85
    shares = [result.metrics[f"passing_{layer}"] for layer in (1, 3)]
    assert all(share == pytest.approx(0.25, abs=0.12) for share in shares)


def test_a_resumed_run_ends_alike(tmp_path: Path) -> None:
    """Where the capacity is in its fall must survive, too."""

    class Stumbling(RoutedTraining):
        calls = 0

        def __call__(self, *arguments: object, **options: object) -> object:  # type: ignore[override]
            Stumbling.calls += 1
            if Stumbling.calls == 12:
                raise KeyboardInterrupt
            return super().__call__(*arguments, **options)  # type: ignore[arg-type]

    config = RoutingConfig(0.25, 0.8)
    whole, parts = routed_model(), routed_model()
    toy_trainer(tmp_path / "whole", model=whole, objective=RoutedTraining(LanguageModelling(), config)).train()
    stumbling = Stumbling(LanguageModelling(), config)
    with pytest.raises(KeyboardInterrupt):
        toy_trainer(tmp_path / "parts", model=parts, objective=stumbling, checkpoint_every_s=0.0).train()
    again = routed_model()
    toy_trainer(tmp_path / "parts", model=again, objective=RoutedTraining(LanguageModelling(), config)).train()
    assert weights_hash(again) == weights_hash(whole)


def test_routers_alone_can_be_trained(tmp_path: Path) -> None:
    model = routed_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".router." in name)
    objective = RoutedTraining(Distillation(tiny_model(seed=1, num_layers=4)), RoutingConfig(0.25))
    toy_trainer(tmp_path, model=model, objective=objective).train()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {f"model.layers.{layer}.router.{part}" for layer in (1, 3) for part in ("weight", "bias")}


def test_without_a_rule_the_model_is_as_it_is_served() -> None:
    model, batch = routed_model(), batch_of(random_sequences(30, 12))
    with torch.no_grad():
        free = hidden_states(model, batch)
        told = hidden_states(model, batch, lambda _, scores: scores > 0)
    assert torch.equal(free, told)
