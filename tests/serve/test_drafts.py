"""A kind of draft is one file and one line in a list: here is one more, and the engine serves it as the others."""

import re
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch

from serve.config import DRAFTS, EngineConfig
from serve.engine.drafts.base import DraftContext
from serve.engine.drafts.tree import DraftTree, Wanted
from serve.engine.engine import Engine
from serve.engine.loading import load_models
from serve.engine.requests import Sequence
from serve.sampling_params import SamplingParams
from tests.serve.http_server import save_tiny_folder
from tests.serve.toys import generate, greedy, greedy_oracle, make_engine, random_prompts
from tests.tiny import tiny_model

SERVE = Path(__file__).resolve().parents[2] / "serve"
PROMPTS = random_prompts(6, seed=1)


class EchoDraft:
    """Proposes the last tokens once more."""

    model_use: ClassVar[Literal["none"]] = "none"
    needs_text: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    runs_passes = True
    first_tokens = 1

    def __init__(self, context: DraftContext) -> None:
        self.state = context.sampler.state
        self.heard: list[tuple[int, int]] = []

    def at_hand(self, sequence: Sequence) -> None: ...

    def propose(self, wanted: list[Wanted]) -> dict[int, DraftTree]:
        trees = {}
        for sequence, k, _ in wanted:
            tokens = (sequence.tokens * k)[-k:]
            self.state.write_drafts(torch.tensor([sequence.batch_row]), torch.tensor([tokens]))
            trees[sequence.id] = DraftTree(k)
        return trees

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.heard.append((num_drafted, num_accepted))

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None: ...

    def rehearse(self) -> None: ...

    def forget_captures(self) -> None: ...

    def num_missing(self, sequence: Sequence) -> int:
        return 0


def test_a_new_kind_needs_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTS, "echo", f"{__name__}.EchoDraft")
    model = tiny_model(seed=3)
    for num_drafts in (3, None):
        engine = make_engine(model, "echo", num_speculative_tokens=num_drafts)
        assert generate(engine, PROMPTS, greedy(20)) == [greedy_oracle(model, prompt, 20) for prompt in PROMPTS]
        heard = engine.draft.heard  # type: ignore[union-attr]
        stats = engine.stats()
        assert stats.num_draft_tokens == sum(drafted for drafted, _ in heard) > 0
        assert stats.num_accepted_tokens == sum(accepted for _, accepted in heard)
    params = [SamplingParams(seed=number, max_tokens=20) for number in range(len(PROMPTS))]
    engine = make_engine(model, "echo", num_speculative_tokens=2)
    assert generate(engine, PROMPTS, params) == generate(make_engine(model), PROMPTS, params)


def test_a_folder_with_a_kind_of_draft_loads(tmp_path: Path) -> None:
    folder = str(save_tiny_folder(tmp_path / "model"))
    for draft, model in (("ngram", None), ("suffix", None), ("suffix", folder), (folder, None), (None, None)):
        config = EngineConfig(folder, draft, model, dtype="float32", num_pages=32, num_speculative_tokens=2)
        engine = Engine(config, load_models(config))
        assert len(generate(engine, [[5, 6, 5, 6, 5]], greedy(8))[0]) == 8
        assert (engine.draft is None) == (draft is None)
    with pytest.raises(ValueError, match="a draft model cannot be used beside the draft ngram"):
        load_models(EngineConfig(folder, "ngram", folder))


def test_no_kind_is_named_outside_its_file_and_the_list() -> None:
    """Also says that nobody asks a draft for its class."""
    kinds = {SERVE.parent.joinpath(*where.split(".")[:-1]).with_suffix(".py") for where in DRAFTS.values()}
    for path in set(SERVE.rglob("*.py")) - kinds:
        text = path.read_text()
        if path != SERVE / "config.py":
            assert not re.search(r"ngram|suffixdraft|ModelDraft", text, re.IGNORECASE), path
        assert SERVE / "engine" not in path.parents or not re.search(r"isinstance\([^)]*[Dd]raft", text), path
