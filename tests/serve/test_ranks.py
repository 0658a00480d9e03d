"""An engine over several ranks says what one process says, and ends when a rank does."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from model.collectives import RankError
from serve.llm import LLM
from serve.sampling_params import SamplingParams
from tests.serve.http_server import children_of, save_tiny_folder
from tests.serve.toys import greedy
from tests.tiny import tiny_model

PROMPTS = [list(range(20, 60)), [*range(20, 50), 7], [5, 6, 7, 5, 6, 7, 5, 6], [9]]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_pages": 8}
"""Prompts are computed in chunks, and there are too few pages for all."""


def serve(folder: Path, ranks: int = 1, **options: Any) -> LLM:
    return LLM(str(folder), **OPTIONS | options, tensor_parallel_size=ranks)


def said(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [choice.token_ids for generation in llm.generate(PROMPTS, params) for choice in generation.choices]


def test_two_processes_say_what_one_says_until_one_of_them_is_killed(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "model", tiny_model(seed=3))
    params, sampled = greedy(24), SamplingParams(seed=3, n=2, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    one, two = serve(folder), serve(folder, 2)
    assert said(two, params) == said(one, params)
    assert said(two, sampled) == said(one, sampled)
    assert two.engine.stats().num_preemptions > 0 and two.engine.cache.num_hit_tokens > 0
    (follower,) = children_of(os.getpid())
    os.kill(follower, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 has ended with code -9"):
        for _ in range(50):
            said(two, params)
