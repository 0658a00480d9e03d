"""New weights under a running engine: from then on it answers as a fresh engine of them would."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.files.checkpoint import save_model
from model.transformer import Transformer
from serve.engine.engine import Engine
from tests.serve.test_speculation import noisy_twin
from tests.serve.toys import drain, generate, greedy, greedy_oracle, join, make_engine, random_prompts
from tests.tiny import tiny_model

SHARED = random_prompts(1, low=40, high=41)[0]
PROMPTS = [SHARED + tail for tail in random_prompts(5, seed=1, low=1, high=20)]
NUM_TOKENS = 16


def old() -> Transformer:
    return tiny_model(seed=3).fuse()


def new() -> Transformer:
    return tiny_model(seed=4)


def tensors(folder: Path) -> dict[str, Tensor]:
    return dict(new().named_parameters())


def saved(folder: Path) -> Path:
    save_model(new(), folder)
    return folder


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(make_engine(new()), PROMPTS, greedy(NUM_TOKENS))


@pytest.mark.parametrize("source", [tensors, saved])
@pytest.mark.parametrize("draft", [None, "twin"])
def test_it_answers_as_a_fresh_engine(
    expected: list[list[int]], source: Callable[[Path], dict[str, Tensor] | Path], draft: str | None, tmp_path: Path
) -> None:
    engine = make_engine(old(), noisy_twin(old()) if draft else None, num_speculative_tokens=2 if draft else None)
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) != expected  # and leaves cached prefixes of old weights
    engine.update_weights(source(tmp_path / "new"))
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) == expected
    engine.update_weights(dict(tiny_model(seed=3).named_parameters()))
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) == generate(make_engine(old()), PROMPTS, greedy(NUM_TOKENS))


@pytest.mark.parametrize("overlapped", [False, True])
def test_running_requests_go_on_from_what_they_have_said(overlapped: bool) -> None:
    engine = make_engine(old())
    engine.max_pending = int(overlapped)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, greedy(NUM_TOKENS))
    joined: dict = {}
    for _ in range(8):
        for output in engine.step():
            join(joined, output)
    engine.update_weights(dict(new().named_parameters()))
    for output in engine.step():  # with overlap it reports first what the old weights had said
        join(joined, output)
    for number, prompt in enumerate(PROMPTS):
        said = joined[(str(number), 0)].new_token_ids
        before = generate(make_engine(old()), [prompt], greedy(NUM_TOKENS))[0]
        num_old = max(n for n in range(len(said) + 1) if said[:n] == before[:n])
        assert num_old >= 4
    rest = drain(engine)
    fresh = new()
    for number, prompt in enumerate(PROMPTS):
        said, more = joined[(str(number), 0)].new_token_ids, rest[(str(number), 0)].new_token_ids
        assert more == greedy_oracle(fresh, prompt + said, len(more)) and len(said) + len(more) == NUM_TOKENS


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    engine = make_engine(old())
    expected = generate(engine, PROMPTS, greedy(NUM_TOKENS))
    save_model(tiny_model(seed=4, rms_norm_eps=1e-3), tmp_path)
    for weights in ({"nobody": torch.zeros(2)}, {"model.norm.weight": torch.zeros(3)}, tmp_path):
        with pytest.raises(ValueError):
            engine.update_weights(weights)
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) == expected


def test_no_work_is_left_over() -> None:
    engine: Engine = make_engine(old())
    engine.max_pending = 1
    engine.add_request("r", PROMPTS[0], greedy(2))
    engine.step()
    engine.step()
    engine.update_weights(dict(new().named_parameters()))
    (output,) = engine.step()
    assert output.finish_reason == "length" and not engine.has_work() and engine.cache.num_used == 0
