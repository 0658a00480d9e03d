"""Objectives against the dense formulas, and evaluation against its definitions."""

import math
import operator
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.prune.depth import matching_layers
from kernels.losses.linear_distillation import DivergenceKind
from model.transformer import Transformer
from tests.tiny import full_logits, tiny_model
from tests.train.toy import batch_of, random_sequences
from train.config import Loss, LossName
from train.evaluate import compare, compute_teacher_states, mean_nll, mean_nll_of_states
from train.objectives import Distillation, LanguageModelling, evenly, hidden_states, objective_of
from train.packing import Batch

SEQUENCES = random_sequences(9, 23, 4)
KINDS = get_args(DivergenceKind)


def dense_logits(model: Transformer) -> Tensor:
    """Logits of every position that has a label, in fp64."""
    return torch.cat([full_logits(model, sequence)[:-1] for sequence in SEQUENCES]).double()


def next_tokens() -> Tensor:
    return torch.tensor([token for sequence in SEQUENCES for token in sequence[1:]])


def divergence(kind: str, teacher: Tensor, student: Tensor, alpha: float) -> float:
    """From log-probabilities, by torch's own kl_div: KL(target ‖ input)."""
    p, q = teacher.exp(), student.exp()
    forward, reverse = alpha * p + (1 - alpha) * q, (1 - alpha) * p + alpha * q
    variation = 1 - torch.minimum(p, q).sum(-1)
    share = torch.exp(-3 * (1 - variation))
    sums: dict[str, Any] = {
        "forward_kl": lambda: F.kl_div(student, p, reduction="sum"),
        "reverse_kl": lambda: F.kl_div(teacher, q, reduction="sum"),
        "jsd": lambda: (
            alpha * F.kl_div(forward.log(), p, reduction="sum")
            + (1 - alpha) * F.kl_div(forward.log(), q, reduction="sum")
        ),
        "skewed_forward_kl": lambda: F.kl_div(forward.log(), p, reduction="sum"),
        "skewed_reverse_kl": lambda: F.kl_div(reverse.log(), q, reduction="sum"),
        "total_variation": lambda: variation.sum(),
        "acceptance": lambda: (share * F.kl_div(student, p, reduction="none").sum(-1) + (1 - share) * variation).sum(),
    }
    return sums[kind]().item()


@pytest.mark.parametrize("families", [("llama", "llama"), ("gemma2", "llama"), ("llama", "gemma2")], ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "hard_weight"), [(1.0, 0.0), (2.0, 0.25), (0.7, 1.0)])
def test_distillation_equals_the_dense_formulas(
    kind: Any, temperature: float, hard_weight: float, families: tuple[str, str]
) -> None:
    """Also where one of the two caps its logits."""
    student, teacher = tiny_model(families[0], seed=1), tiny_model(families[1], seed=2, num_layers=3)
    config = Loss(kind=kind, temperature=temperature, alpha=0.3, hard_weight=hard_weight)
    output = Distillation(teacher, config)(student, batch_of(SEQUENCES))
    z, w = dense_logits(student), dense_logits(teacher)
    soft = divergence(kind, F.log_softmax(w / temperature, -1), F.log_softmax(z / temperature, -1), 0.3)
    hard = F.cross_entropy(z, next_tokens(), reduction="sum").item()
    assert output.num_labels == len(next_tokens())
    expected = (1 - hard_weight) * temperature**2 * soft + hard_weight * hard
    assert output.loss_sum.item() == pytest.approx(expected, rel=1e-4)
    p, q = F.softmax(w, -1), F.softmax(z, -1)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics == pytest.approx(
        {
            "kl": F.kl_div(q.log(), p, reduction="sum").item(),
            "cross_entropy": hard,
            "total_variation": 0.5 * (p - q).abs().sum().item(),
            "agreement": float((p.argmax(-1) == q.argmax(-1)).sum()),
        },
        rel=1e-4,
    )


def streams_of(model: Transformer) -> list[Tensor]:
    """Behind each layer, in fp64, of every position that has a label."""
    labelled, states = batch_of(SEQUENCES).labels >= 0, list[Tensor]()
    hidden_states(model, batch_of(SEQUENCES), states=states)
    return [state[labelled].double() for state in states]


@pytest.mark.parametrize("matching", [None, (0, 3)])
def test_the_distance_of_hidden_states_is_that_of_what_norms_make_of_them(matching: tuple[int, int] | None) -> None:
    student, teacher = tiny_model(seed=1), tiny_model(seed=2, num_layers=4)
    alone = Distillation(teacher)(student, batch_of(SEQUENCES))
    output = Distillation(teacher, Loss(hidden_weight=3.0), matching)(student, batch_of(SEQUENCES))
    taught = streams_of(teacher)
    pairs = zip(streams_of(student), [taught[layer] for layer in matching or (1, 3)], strict=True)
    normed = [[state / state.square().mean(-1, keepdim=True).sqrt() for state in pair] for pair in pairs]
    expected = torch.stack([(mine - other).square().mean(-1).sum() for mine, other in normed]).mean()
    torch.testing.assert_close(output.metrics["hidden_distance"].double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(output.loss_sum.double(), alone.loss_sum.double() + 3 * expected, rtol=1e-5, atol=0)


def test_it_pulls_every_layer_and_vanishes_at_the_teacher() -> None:
    student, teacher = tiny_model(seed=1), tiny_model(seed=2)
    (Distillation(teacher, Loss(hidden_weight=1.0))(student, batch_of(SEQUENCES)).loss_sum).backward()
    with_states = [layer.mlp.down_proj.weight.grad for layer in student.model.layers]
    student.zero_grad()
    Distillation(teacher)(student, batch_of(SEQUENCES)).loss_sum.backward()
    without = [layer.mlp.down_proj.weight.grad for layer in student.model.layers]
    assert not any(map(torch.equal, with_states, without))
    same = Distillation(tiny_model(seed=1), Loss(hidden_weight=1.0))(student, batch_of(SEQUENCES))
    assert abs(same.metrics["hidden_distance"].item()) < 1e-4


def test_layers_that_stay_are_matched_by_what_the_next_one_reads() -> None:
    assert matching_layers((0, 1, 4, 7), 9) == (0, 3, 6, 8)
    assert matching_layers(range(5), 5) == evenly(5, 5) == (0, 1, 2, 3, 4)
    assert evenly(2, 6) == (2, 5) and evenly(3, 4) == (0, 1, 3)


def test_the_teacher_gets_no_gradient_and_the_student_does() -> None:
    student, teacher = tiny_model(seed=1), tiny_model(seed=2)
    Distillation(teacher)(student, batch_of(SEQUENCES)).loss_sum.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_a_bf16_teacher_keeps_its_dtype_inside_the_trainers_autocast() -> None:
    student, teacher = tiny_model(seed=1), tiny_model(seed=2).to(torch.bfloat16)
    expected = compute_teacher_states(teacher, [batch_of(SEQUENCES)]).hidden[0]
    with torch.autocast("cpu", torch.bfloat16):
        inside = compute_teacher_states(teacher, [batch_of(SEQUENCES)]).hidden[0]
        output = Distillation(teacher)(student, batch_of(SEQUENCES))
    output.loss_sum.backward()
    assert inside.dtype == torch.bfloat16 and torch.equal(inside, expected)
    assert output.loss_sum.dtype == torch.float32
    assert all(parameter.grad.dtype == torch.float32 for parameter in student.parameters())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_language_modelling_is_the_cross_entropy(family: str) -> None:
    model = tiny_model(family, seed=1)
    output = LanguageModelling()(model, batch_of(SEQUENCES))
    expected = F.cross_entropy(dense_logits(model), next_tokens(), reduction="sum").item()
    assert output.loss_sum.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("field", "value"), [("kind", "kl"), ("temperature", 0.0), ("alpha", 1.5), ("hard_weight", -0.1)]
)
def test_settings_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        Loss(**{field: value})


def test_a_loss_is_every_divergence_or_the_text_alone() -> None:
    assert get_args(LossName) == (*KINDS, "cross_entropy")
    teacher = tiny_model(seed=2)
    assert isinstance(objective_of(Loss(kind="cross_entropy"), teacher), LanguageModelling)
    assert isinstance(objective_of(Loss(kind="jsd"), teacher), Distillation)
    with pytest.raises(ValueError, match="cross_entropy is no divergence"):
        Distillation(teacher, Loss(kind="cross_entropy"))


def batches() -> list[Batch]:
    return [batch_of(SEQUENCES[:1]), batch_of(SEQUENCES[1:])]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_loss_follows_its_definition(family: str) -> None:
    model = tiny_model(family, seed=1)
    nll = F.cross_entropy(dense_logits(model), next_tokens()).item()
    assert mean_nll(model, batches()) == pytest.approx(nll, rel=1e-5)
    labels = [batch.num_labels for batch in batches()]
    each = mean_nll_of_states(compute_teacher_states(model, batches()), batches())
    assert sum(map(operator.mul, each, labels)) / sum(labels) == pytest.approx(nll, rel=1e-5)


def test_a_model_that_knows_nothing_finds_every_token_equally_likely() -> None:
    model = tiny_model(seed=1)
    model.lm_head.weight.data.zero_()
    assert mean_nll(model, batches()) == pytest.approx(math.log(512), rel=1e-5)


def test_how_text_is_batched_does_not_change_its_score() -> None:
    model = tiny_model(seed=1)
    assert mean_nll(model, batches()) == pytest.approx(mean_nll(model, [batch_of(SEQUENCES)]))


def test_a_model_agrees_with_itself() -> None:
    model = tiny_model(seed=1)
    comparison = compare(model, compute_teacher_states(model, batches()), batches())
    assert comparison.kl == pytest.approx(0, abs=1e-5)
    assert comparison.agreement == 1.0
    assert comparison.acceptance == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("families", [("llama", "llama"), ("gemma2", "llama"), ("llama", "gemma2")], ids="-".join)
def test_a_comparison_follows_its_definitions(families: tuple[str, str]) -> None:
    student, teacher = tiny_model(families[0], seed=1), tiny_model(families[1], seed=2)
    states = compute_teacher_states(teacher, batches())
    comparison = compare(student, states, batches())
    z, w = dense_logits(student), dense_logits(teacher)
    kl = F.kl_div(F.log_softmax(z, -1), F.softmax(w, -1), reduction="sum").item()
    assert comparison.kl == pytest.approx(kl / len(next_tokens()), rel=1e-4)
    assert comparison.nll == pytest.approx(mean_nll(student, batches()), rel=1e-6)
    with pytest.raises(ValueError, match="states of 2 batches cannot be compared on 1"):
        compare(student, states, batches()[:1])


def test_nothing_to_evaluate_on_is_an_error() -> None:
    with pytest.raises(ValueError, match="no label"):
        mean_nll(tiny_model(), [])
