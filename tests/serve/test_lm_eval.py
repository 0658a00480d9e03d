"""lm-eval's own client for `local-completions`, unmodified: it scores a served model as it scores transformers'."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.http_server import RunningServer, running_server, save_tiny_folder

for name in ("tenacity", "aiohttp", "tiktoken"):
    pytest.importorskip(name, reason=f"lm-eval's client needs {name}, which is not installed")
pytest.importorskip("lm_eval")
PAIRS = [("The quick brown", " fox jumps over"), ("def main", "(argument: str)"), ("The dog", " sleeps")]
LONG = "The dog sleeps on. " * 30
"""Of more tokens than one window has."""
MAX_LENGTH = 128
"""The windows of lm-eval's clients are two tokens shorter than those of its local models."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("lm_eval") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder, folder.parent / "log", "--served-model-name", "tiny", "--dtype", "float32") as running:
        yield running


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def test_it_scores_as_with_transformers(server: RunningServer, folder: Path) -> None:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    served: Any = LocalCompletionsAPI(
        model="tiny",
        base_url=f"{server.url}/v1/completions",
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        max_length=MAX_LENGTH + 2,
        batch_size=2,
    )
    theirs: Any = HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=MAX_LENGTH)
    pairs, long = requests("loglikelihood", *PAIRS), requests("loglikelihood_rolling", (LONG,))
    for (score, greedy), (wanted, wanted_greedy) in zip(
        served.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True
    ):
        assert score == pytest.approx(wanted, rel=1e-5) and greedy == wanted_greedy
    assert served.loglikelihood_rolling(long) == pytest.approx(theirs.loglikelihood_rolling(long), rel=1e-5)
    asked = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    texts = [
        model.generate_until(requests("generate_until", *((start, asked) for start, _ in PAIRS)))
        for model in (served, theirs)
    ]
    assert texts[0] == texts[1]
