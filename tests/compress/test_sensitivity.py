"""What layers cost when they are rounded, and who gets more bits."""

import copy
import itertools

import pytest
import torch

from compress.quantize.sensitivity import _surprise, choose_formats, output_gradients, rounding_costs
from compress.residual_stream import layers_of
from model.attention import PackedAttention
from model.formats.compressed_tensors import Int4, Int8
from model.quantized import set_quantized
from model.transformer import Transformer
from tests.compress.conversions import Text, texts
from tests.tiny import tiny_model
from tests.train.toy import batch_of
from train.objectives import hidden_states

SMALL, LARGE = Int4(32), Int8()
UNITS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def gentle_model() -> Transformer:
    """Random, but so that small errors stay small, as in a trained model."""
    return tiny_model(initializer_range=0.06)


def divergence(model: Transformer, other: Transformer, text: Text) -> float:
    """KL, nats a token."""
    with torch.no_grad():
        one, two = (
            m.logits(m(text.tokens, text.positions, PackedAttention(m.config, text.cu_seqlens)))
            .double()
            .log_softmax(-1)
            for m in (model, other)
        )
    return float((one.exp() * (one - two)).sum(-1).mean())


def test_costs_are_about_the_divergence_that_rounding_makes() -> None:
    """Each layer alone: the prediction lies near what is measured, and large ones are told from small ones."""
    model, text = gentle_model(), texts(300, 212)[0]
    costs = rounding_costs(model, [text], [SMALL, LARGE])
    assert len(costs) == 14
    measured = {}
    for name, predicted in costs.items():
        rounded = copy.deepcopy(model)
        set_quantized(rounded, name, SMALL.quantize(rounded.get_parameter(f"{name}.weight").detach()), SMALL)
        measured[name] = divergence(model, rounded, text)
        assert predicted[LARGE] < 0.02 * predicted[SMALL]
    # Attention adds up what the errors of v have in common over a text, which the prediction leaves out.
    ratios = [costs[name][SMALL] / measured[name] for name in costs if not name.endswith("v_proj")]
    assert all(0.5 < ratio < 2 for ratio in ratios), ratios
    assert 0.7 < sum(costs[name][SMALL] for name in costs) / sum(measured.values()) < 1.4


def test_gradients_of_the_last_projection_are_those_of_its_outputs() -> None:
    """Against autograd with the drawn tokens given: here the model is certain of one token, so they are known."""
    model, text = gentle_model(), texts(40)[0]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_(True)
    found = output_gradients(model, [text, text])
    assert found.keys() == {f"model.layers.{n}.{part}" for n in range(2) for part in _parts()}
    assert all((squares >= 0).all() and squares.sum() > 0 for squares in found.values())
    assert model.model.embed_tokens.weight.requires_grad and not model.model.norm.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer._forward_hooks for layer in model.modules())
    # E[g²] over draws is exact for the logits: Σ p (δ − p)²; the norm's slope carries it to down_proj.
    probabilities, squares = _exact_last_squares(model, text)
    assert probabilities.shape == (40, 512)
    many = [output_gradients(model, [text], seed=seed)["model.layers.1.mlp.down_proj"] for seed in range(150)]
    assert abs(float(torch.stack(many).mean(0).sum() / squares) - 1) < 0.05


def test_what_is_drawn_is_scored_as_the_model_scores_it() -> None:
    """A soft cap of logits included."""
    model, text = tiny_model("gemma2", seed=1), texts(40)[0]
    with torch.no_grad():
        hidden = hidden_states(model, batch_of([text.tokens.tolist()]))
        found = _surprise(model, hidden, generator=torch.Generator().manual_seed(3))
        log_p = model.logits(hidden).log_softmax(-1)
    drawn = torch.multinomial(log_p.exp(), 1, generator=torch.Generator().manual_seed(3))
    assert found.item() == pytest.approx(-log_p.gather(1, drawn).sum().item(), rel=1e-5)


def _parts() -> list[str]:
    return [("mlp." if unit in UNITS[2:] else "self_attn.") + name for unit in UNITS for name in unit]


def _exact_last_squares(model: Transformer, text: Text) -> tuple[torch.Tensor, float]:
    """Σ_n mean over tokens of E[g_n²] of the last down_proj: of every token, over every possible draw."""
    outputs = []
    hook = layers_of(model)[1].mlp.down_proj.register_forward_hook(lambda _, __, y: outputs.append(y))
    hidden = model(text.tokens, text.positions, PackedAttention(model.config, text.cu_seqlens))
    hook.remove()
    logits = model.logits(hidden)
    log_p = logits.log_softmax(-1)
    (y,) = outputs
    # Behind the last layer tokens do not meet, so each token's gradient comes from its own logits alone.
    jacobian = torch.stack([torch.autograd.grad(log_p[:, v].sum(), y, retain_graph=True)[0] for v in range(512)])
    total = float((log_p.detach().exp().T[..., None] * jacobian.square()).sum() / len(y))
    return log_p.exp().detach(), total


def test_who_gains_most_for_a_byte_gets_more_bits() -> None:
    shapes = {f"model.layers.{n}.{part}": (64, 64) for n in range(2) for part in _parts()}
    costs = {name: {SMALL: 1.0, LARGE: 0.0} for name in shapes}
    costs["model.layers.1.mlp.down_proj"] = {SMALL: 9.0, LARGE: 0.0}
    costs["model.layers.0.self_attn.k_proj"] = {SMALL: 12.0, LARGE: 0.0}
    elements = 64 * 64 * len(shapes)
    all_small = 8 * sum(SMALL.num_bytes(shape) for shape in shapes.values()) / elements
    assert set(choose_formats(costs, shapes, all_small).values()) == {SMALL}
    one_unit = (LARGE.num_bytes((64, 64)) - SMALL.num_bytes((64, 64))) * 8 / elements
    chosen = choose_formats(costs, shapes, all_small + 1.01 * one_unit)
    assert [name for name, format in chosen.items() if format == LARGE] == ["model.layers.1.mlp.down_proj"]
    chosen = choose_formats(costs, shapes, all_small + 4.01 * one_unit)
    larger = {name for name, format in chosen.items() if format == LARGE}
    assert larger == {"model.layers.1.mlp.down_proj", *(f"model.layers.0.self_attn.{name}" for name in UNITS[0])}
    assert set(choose_formats(costs, shapes, 9).values()) == {LARGE}
    with pytest.raises(ValueError, match=r"4 bits a weight are less than the smallest formats take, 5.00"):
        choose_formats(costs, shapes, 4)


def test_choices_are_near_the_best_of_all() -> None:
    """Of all that fit the budget, tried one by one, on random costs."""
    shapes = {f"model.layers.0.{part}": (32 * (n + 1), 64) for n, part in enumerate(_parts())}
    names = list(shapes)
    for seed in range(5):
        draws = torch.rand(7, generator=torch.Generator().manual_seed(seed)).tolist()
        costs = {name: {SMALL: draw, LARGE: draw / 100} for name, draw in zip(names, draws, strict=True)}
        budget_bits = 6.5
        found = choose_formats(costs, shapes, budget_bits)
        budget = budget_bits / 8 * sum(rows * columns for rows, columns in shapes.values())
        assert sum(found[name].num_bytes(shapes[name]) for name in names) <= budget
        best = float("inf")
        groups = [[name for name in names if name.rpartition(".")[2] in unit] for unit in UNITS]
        for formats in itertools.product((SMALL, LARGE), repeat=4):
            choice = {name: format for group, format in zip(groups, formats, strict=True) for name in group}
            if sum(choice[name].num_bytes(shapes[name]) for name in names) <= budget:
                best = min(best, sum(costs[name][choice[name]] for name in names))
        assert sum(costs[name][found[name]] for name in names) <= 1.5 * best
