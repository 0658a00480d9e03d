"""On-policy distillation: what is written from which prompts, what of it is learnt, and that a resumed run agrees."""

from pathlib import Path

import pytest
import torch

from model.transformer import Transformer
from pipeline.stages.shared.rollouts import EngineRollouts
from tests.serve.toys import toy_tokenizer
from tests.tiny import full_logits, tiny_model
from tests.train.toy import SEQUENCE_LENGTH, batch_of, random_sequences, toy_documents, toy_trainer, weights_hash
from train.config import Loss, OnPolicy
from train.objectives import Distillation
from train.packing import IGNORE_LABEL
from train.rollouts import OnPolicyDistillation, answers_batch, prompts_of
from train.tracking import Tracker

SEQUENCES = random_sequences(30, 23, 14)


class Echo:
    """Writes each prompt once more, to the length asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[tuple[list[list[int]], list[int]]] = []

    def write(self, model: Transformer, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        self.asked.append((prompts, seeds))
        return [(prompt * self.count)[: self.count] for prompt in prompts]


def test_only_what_was_written_is_a_label() -> None:
    batch = answers_batch([[7, 8, 9], [5]], [[1, 2], [3, 4, 6]])
    assert batch.tokens.tolist() == [7, 8, 9, 1, 5, 3, 4]
    assert batch.labels.tolist() == [IGNORE_LABEL, IGNORE_LABEL, 1, 2, 3, 4, 6]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2] and batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.num_labels == 5


def test_prompts_end_where_the_first_answer_begins() -> None:
    batch = batch_of(SEQUENCES)
    assert prompts_of(batch, 6) == [sequence[:6] for sequence in SEQUENCES]
    batch.labels[:10] = IGNORE_LABEL  # token 11 is the first that is learnt
    assert prompts_of(batch, 6) == [SEQUENCES[0][:11], SEQUENCES[1][:6], SEQUENCES[2][:6]]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_loss_is_the_dense_one_on_what_is_trained(share: float) -> None:
    """With the weight of the batch that it stands for."""
    student, teacher, batch, echo = tiny_model(seed=1), tiny_model(seed=2), batch_of(SEQUENCES), Echo(5)
    loss = Loss(kind="reverse_kl")
    objective = OnPolicyDistillation(teacher, loss, OnPolicy(share, prompt_tokens=4, max_tokens=5), echo)
    output = objective(student, batch)
    prompts = [sequence[:4] for sequence in SEQUENCES]
    trained = answers_batch(prompts, [(prompt * 2)[:5] for prompt in prompts]) if share else batch
    expected = Distillation(teacher, loss)(student, trained)
    weight = batch.num_labels / trained.num_labels
    assert output.num_labels == batch.num_labels
    assert output.loss_sum.item() == pytest.approx(weight * expected.loss_sum.item(), rel=1e-6)
    assert output.metrics["kl"].item() == pytest.approx(weight * expected.metrics["kl"].item(), rel=1e-6)
    assert output.metrics["on_policy"].item() == share * batch.num_labels
    assert [asked for asked, _ in echo.asked] == ([prompts] if share else [])


def test_no_more_is_written_than_fits_the_batch_and_seeds_follow_from_the_generator() -> None:
    batch, echo = batch_of(SEQUENCES), Echo(26)
    objective = OnPolicyDistillation(tiny_model(seed=2), Loss(), OnPolicy(1.0, 4, 26), echo)
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        objective(tiny_model(seed=1), batch)
    (prompts, one), (_, same), (_, other) = echo.asked
    assert len(prompts) == 2 and len(batch.tokens) == 67  # 2 · (4 + 26) fit
    assert one == same != other


def test_the_engine_writes_with_the_weights_of_the_moment() -> None:
    """In the dtype that the machine multiplies fast: in bf16 the best of near equals may be another."""
    rollouts = EngineRollouts(toy_tokenizer(), OnPolicy(1.0, 4, 6, temperature=0.0), sequence_length=32)
    for seed in (1, 2, 3):
        model, prompts = tiny_model(seed=seed), [sequence[:4] for sequence in SEQUENCES]
        written = rollouts.write(model, prompts, [0, 0, 0])
        for prompt, answer in zip(prompts, written, strict=True):
            scores = full_logits(model, prompt + answer)[len(prompt) - 1 : -1]
            lost = scores.amax(1) - scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert answer and lost.max() < 0.02 * scores.std()


class StopsAtStep(Tracker):
    """As if killed while step 7 is noted."""

    def log(self, step: int, *rest: object) -> None:
        if step == 7:
            raise KeyboardInterrupt
        super().log(step, *rest)  # type: ignore[arg-type]


def test_a_resumed_run_writes_and_learns_the_same(tmp_path: Path) -> None:
    def train(folder: Path, stops: bool = False) -> Transformer:
        model, policy = tiny_model(seed=1), OnPolicy(0.5, 4, 6)
        rollouts = EngineRollouts(toy_tokenizer(), policy, sequence_length=SEQUENCE_LENGTH)
        objective = OnPolicyDistillation(tiny_model(seed=2), Loss(), policy, rollouts)
        trainer = toy_trainer(folder, model=model, objective=objective, data=toy_documents(), checkpoint_every_s=0.0)
        if stops:
            trainer.tracker = StopsAtStep(folder)
        trainer.train()
        return model

    whole = weights_hash(train(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "again", stops=True)
    assert weights_hash(train(tmp_path / "again")) == whole
    assert (tmp_path / "again/metrics.jsonl").read_text().count('"on_policy"') == 12
