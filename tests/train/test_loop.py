"""The loop: gradients of any split agree, a resumed run is the same run, and nothing bad is saved."""

import itertools
import json
import logging
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.transformer import Transformer
from tests.tiny import tiny_model
from tests.train.test_routed_training import routed_model
from tests.train.toy import (
    STEPS,
    adapted_model,
    batch_of,
    documents,
    random_sequences,
    toy_config,
    toy_pairs,
    toy_trainer,
    weights_hash,
)
from tests.trials import trials
from train.checkpoint import Files
from train.evaluate import compare, compute_teacher_states
from train.loop import DivergedError, Trainer
from train.objectives import Distillation, LanguageModelling, ObjectiveOutput, RoutedTraining, RoutingConfig
from train.packing import Batch
from train.preference import PreferenceTuning
from train.tracking import read_metrics


class Calls:
    """Language modelling that does something special at the n-th micro-batch (0 is the first)."""

    def __init__(self, special: dict[int, Callable[[ObjectiveOutput], ObjectiveOutput]]) -> None:
        self.special, self.count = special, itertools.count()

    def __call__(self, model: Transformer, batch: Batch, progress: float) -> ObjectiveOutput:
        output = LanguageModelling()(model, batch)
        return self.special.get(next(self.count), lambda found: found)(output)


def stop(output: ObjectiveOutput) -> ObjectiveOutput:
    signal.raise_signal(signal.SIGTERM)
    return output


def spoil(output: ObjectiveOutput) -> ObjectiveOutput:
    return output._replace(loss_sum=output.loss_sum * math.nan)


def first_gradients(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Gradients as the first update sees them."""
    seen: dict[str, Tensor] = {}

    def capture() -> None:
        if not seen:
            seen.update({name: p.grad.clone() for name, p in trainer.model.named_parameters()})

    monkeypatch.setattr(trainer.optimizer, "step", capture)
    trainer.train()
    return seen


@pytest.mark.parametrize("labelled", [None, 0.3])
def test_accumulation_gives_the_gradient_of_one_big_batch(
    labelled: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sixteen documents of 16 positions fill one batch of 256, two of 128, or eight of 32. With few labels, and not
    # the same number in each micro-batch, a mean of means would be another gradient.
    data = documents([17] * 16, labelled=labelled)
    found = []
    for micro_batch_tokens in (256, 128, 32):
        trainer = toy_trainer(
            tmp_path / str(micro_batch_tokens),
            data=data,
            tokens=256,
            batch_tokens=256,
            micro_batch_tokens=micro_batch_tokens,
            max_grad_norm=1e9,
        )
        found.append(first_gradients(trainer, monkeypatch))
    for name, expected in found[0].items():
        for other in found[1:]:
            assert (other[name] - expected).norm() / expected.norm() < 1e-5, name


def test_the_gradient_is_that_of_the_mean_loss_and_is_clipped_by_its_global_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = documents([17] * 8)
    sequences = [data.tokens[17 * n : 17 * n + 17].tolist() for n in range(8)]
    model = tiny_model(seed=1)
    output = LanguageModelling()(model, batch_of(sequences))
    (output.loss_sum / output.num_labels).backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    trainer = toy_trainer(tmp_path, data=data, tokens=128, max_grad_norm=norm / 3)
    found = first_gradients(trainer, monkeypatch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad / 3, rtol=1e-4, atol=1e-7)
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def test_activation_checkpointing_trains_the_same_weights(tmp_path: Path) -> None:
    plain, recomputed = (toy_trainer(tmp_path / str(on), activation_checkpointing=on) for on in (False, True))
    plain.train()
    recomputed.train()
    assert weights_hash(plain.model) == weights_hash(recomputed.model)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_bf16_trains_fp32_weights_close_to_fp32_or_in_it(
    has_instructions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for feature in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, feature, lambda: has_instructions)
    losses = []
    for precision in ("fp32", "bf16"):
        trainer = toy_trainer(tmp_path / precision, precision=precision)
        trainer.train()
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
        losses.append([line["loss"] for line in read_metrics(tmp_path / precision / "metrics.jsonl")])
    assert (losses[0] != losses[1]) is has_instructions
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_distilling_brings_a_student_closer_to_its_teacher(tmp_path: Path) -> None:
    teacher, student = tiny_model(seed=2, num_layers=3), tiny_model(seed=1)
    held_out = [batch_of(random_sequences(30, 20, seed=9))]
    states = compute_teacher_states(teacher, held_out)
    before = compare(student, states, held_out)
    trainer = toy_trainer(tmp_path, model=student, objective=Distillation(teacher), tokens=60 * 128)
    trainer.train()
    after = compare(student, states, held_out)
    assert after.kl < 0.6 * before.kl
    assert after.acceptance > before.acceptance + 0.05
    kl = [line["kl"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert sum(kl[-5:]) < 0.6 * sum(kl[:5])


def test_fifty_and_fifty_resumed_steps_are_a_hundred(tmp_path: Path) -> None:
    straight = toy_trainer(tmp_path / "straight", tokens=100 * 128)
    result = straight.train()
    assert (result.steps, result.interrupted) == (100, False)
    first = toy_trainer(tmp_path / "parts", tokens=100 * 128, objective=Calls({99: stop}))
    stopped = first.train()
    assert (stopped.steps, stopped.interrupted) == (50, True)
    second = toy_trainer(tmp_path / "parts", tokens=100 * 128, model=tiny_model(seed=77))
    resumed = second.train()
    assert (resumed.steps, resumed.tokens, resumed.interrupted) == (100, result.tokens, False)
    assert weights_hash(second.model) == weights_hash(straight.model)
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("straight", "parts")]
    assert lines[0] == lines[1] and len(lines[0].splitlines()) == 100


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    first = toy_trainer(tmp_path, evaluate=lambda model: {"held_out_loss": 1.5})
    result = first.train()
    lines = (tmp_path / "metrics.jsonl").read_text()
    again = toy_trainer(
        tmp_path, model=tiny_model(seed=77), objective=Calls({0: lambda _: pytest.fail("trained again")})
    )
    assert again.train() == result
    assert weights_hash(again.model) == weights_hash(first.model)
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_evaluation_runs_when_its_tokens_are_crossed_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen: list[bool] = []

    def evaluate(model: Transformer) -> dict[str, float]:
        seen.append(model.training)
        return {"held_out_loss": float(len(seen))}

    result = toy_trainer(tmp_path, evaluate=evaluate, evaluate_every_tokens=600).train()
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "held_out_loss" in line]
    assert [line["step"] for line in lines] == [5, 10, STEPS]
    assert seen == [False] * 3
    assert result.metrics["held_out_loss"] == 3.0
    assert f"held-out text after step 5 of {STEPS}: loss 1.000" in caplog.messages


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Weights and metrics of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("straight")
    trainer = toy_trainer(folder)
    trainer.train()
    return weights_hash(trainer.model), (folder / "metrics.jsonl").read_text()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    for _ in range(2):
        toy_trainer(folder, objective=Calls({5: stop})).train()
    assert checkpoint_names(folder) == ["step-00000003", "step-00000006"]
    return folder


@pytest.fixture
def stopped_run(stopped: Path, tmp_path: Path) -> None:
    """A run of twelve steps that stopped after six, with checkpoints of steps 3 and 6."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_damaged_checkpoint_falls_back_loudly_to_the_one_before(
    name: str,
    damage: Callable[[Path], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stopped_run: None,
    straight: tuple[str, str],
) -> None:
    damage(tmp_path / "checkpoints" / "step-00000006" / name)
    trainer = toy_trainer(tmp_path, model=tiny_model(seed=77))
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert name in caplog.text and "Falling back" in caplog.text and "Resuming from step 3" in caplog.text
    assert (weights_hash(trainer.model), (tmp_path / "metrics.jsonl").read_text()) == straight


def test_without_any_valid_checkpoint_training_starts_over(tmp_path: Path, stopped_run: None) -> None:
    for step in (3, 6):
        flip(tmp_path / "checkpoints" / f"step-0000000{step}" / "model.safetensors")
    assert toy_trainer(tmp_path).train().steps == STEPS
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))


def test_only_the_newest_checkpoints_are_kept_and_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    foreign = ["step-00000099.damaged", "step-1", "my-step-00000042", "step-00000042-copy"]
    for name in foreign:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / ".staging-step-00000007").mkdir()
    toy_trainer(tmp_path, checkpoint_every_s=0.0).train()
    assert checkpoint_names(tmp_path) == sorted([*foreign, "step-00000011", "step-00000012"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 64}, "is step 6 of a run with batch_tokens=128"),
        ({"tokens": 128}, "this one has 1 steps"),
        ({"seed": 5}, "belongs to other data or settings"),
        ({"model": tiny_model(num_layers=3)}, "is of another model: .* is only here"),
        (
            {"model": tiny_model(intermediate_size=128)},
            r"is of another model: .* is \(160, 64\) instead of \(128, 64\)",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, stopped_run: None
) -> None:
    trainer = toy_trainer(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_run: None
) -> None:
    monkeypatch.setattr("train.checkpoint.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match="1,000 bytes are free"):
        toy_trainer(tmp_path).train()
    assert checkpoint_names(tmp_path) == ["step-00000003", "step-00000006"]


def test_steps_with_a_non_finite_gradient_are_skipped_and_counted(tmp_path: Path) -> None:
    # Micro-batches 4 and 8 are parts of steps 3 and 5.
    trainer = toy_trainer(tmp_path, objective=Calls({4: spoil, 8: spoil}))
    result = trainer.train()
    assert (result.steps, result.skipped) == (STEPS, 2)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    norms = [line["gradient_norm"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert [step for step, norm in enumerate(norms, 1) if norm is None] == [3, 5]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_training_that_stays_non_finite_stops_and_saves_nothing_of_it(tmp_path: Path, stopped_run: None) -> None:
    objective = Calls(dict.fromkeys(range(24), spoil))
    trainer = toy_trainer(tmp_path, objective=objective)
    with pytest.raises(DivergedError, match="in 4 steps in a row, up to step 10"):
        trainer.train()
    assert next(objective.count) == 8
    assert checkpoint_names(tmp_path) == ["step-00000003", "step-00000006"]
    saved = toy_trainer(tmp_path, objective=Calls({0: stop}))
    saved._resume()
    assert weights_hash(saved.model) == weights_hash(trainer.model)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "language": dict,
    "distillation": lambda: {"objective": Distillation(tiny_model(seed=2, num_layers=3))},
    "pairs": lambda: {"model": adapted_model(), "objective": PreferenceTuning(), "data": toy_pairs()},
    "routed": lambda: {
        "model": routed_model(),
        "objective": RoutedTraining(LanguageModelling(), RoutingConfig(0.25, 0.5)),
    },
}


@pytest.mark.parametrize("in_a_row", [1, 3, 4])
@pytest.mark.parametrize("kind", list(KINDS)[: trials(1, 4)])
def test_wherever_a_gradient_is_not_finite_no_checkpoint_is(
    kind: str, in_a_row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From each of the first steps on, in so many of them: three are skipped, the fourth ends training."""
    saved: list[int] = []

    def save(folder: Path, step: int, *, files: Files, **options: Any) -> None:
        assert all(tensor.isfinite().all() for tensors in files.values() for tensor in tensors.values())
        saved.append(step)

    monkeypatch.setattr("train.checkpoint_writer.save_checkpoint", save)
    for first in range(1, trials(1, 20) + 1):
        saved.clear()
        steps = STEPS if first + in_a_row <= STEPS else 2 * STEPS
        trainer = toy_trainer(tmp_path / str(first), checkpoint_every_s=0.0, tokens=steps * 128, **KINDS[kind]())
        weight = next(parameter for parameter in trainer.model.parameters() if parameter.requires_grad)

        def spoil_steps(gradient: Tensor, first: int = first, trainer: Trainer = trainer) -> Tensor:
            is_bad = first <= trainer.counters.step + 1 < first + in_a_row
            return gradient * (math.nan if first % 2 else math.inf) if is_bad else gradient

        weight.register_hook(spoil_steps)
        if in_a_row > 3:
            with pytest.raises(DivergedError, match=f"in 4 steps in a row, up to step {first + 3}"):
                trainer.train()
            assert trainer.counters.skipped == 4
        else:
            assert trainer.train().skipped == in_a_row
        assert max(saved, default=0) == (steps if in_a_row <= 3 else first + 2)
        assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_tokens": 48}, "batch_tokens is 128; it must be a multiple of micro_batch_tokens, which is 48"),
        ({"tokens": 0}, "tokens is 0; it must lie between 1 and"),
        ({"schedule": "linear"}, "schedule is 'linear'; it can be cosine, wsd, constant"),
        ({"precision": "fp16"}, "precision is 'fp16'; it can be bf16, fp32"),
    ],
)
def test_settings_that_make_no_sense_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy_config(**changes)


def test_master_weights_must_be_fp32(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight is torch.bfloat16; load the model as float32"):
        toy_trainer(tmp_path, model=tiny_model().to(torch.bfloat16))


def test_metrics_are_strict_json_lines_of_means(tmp_path: Path) -> None:
    result = toy_trainer(tmp_path).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert 4 < lines[0]["loss"] < 9  # about ln 512 and the spread of random logits: a mean, not a sum
    assert lines[-1]["tokens"] == result.tokens <= STEPS * 128


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_repeat_their_bits_while_a_training_that_asks_for_it_lasts(tmp_path: Path, deterministic: bool) -> None:
    seen = set()

    def look(output: ObjectiveOutput) -> ObjectiveOutput:
        seen.add(torch.are_deterministic_algorithms_enabled())
        return output

    toy_trainer(tmp_path, objective=Calls({0: look, 3: look}), deterministic=deterministic).train()
    assert seen == {deterministic}
    assert not torch.are_deterministic_algorithms_enabled()
