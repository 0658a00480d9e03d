"""Drafts that say some of the tokens only: what is left of the head, and that the target's output stays what it was."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.quantize.round_to_nearest import quantize_folder
from kernels.sampling.sample import adjusted_probabilities_reference
from model.config import ConfigError, ModelConfig
from model.files.checkpoint import load_config, load_model, save_model
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Int4, Int8
from model.transformer import Transformer
from serve import LLM
from serve.config import EngineConfig
from serve.engine.loading import load_models
from serve.engine.token_mask import PlainMask
from serve.sampling_params import SamplingParams
from tests.serve.test_speculation import PROMPTS, noisy_twin, p_value
from tests.serve.toys import drain, generate, greedy, make_engine, toy_tokenizer
from tests.tiny import full_logits, tiny_config, tiny_model

SOME = tuple(range(1, 512, 3))


def trimmed(model: Transformer, tokens: tuple[int, ...] = SOME) -> Transformer:
    model.config = replace(model.config, draft_vocabulary=tokens)
    return model.trim_head()


@given(st.sets(st.integers(0, 511), min_size=1))
def test_the_configuration_names_any_tokens(tokens: set[int]) -> None:
    config = tiny_config(draft_vocabulary=tuple(sorted(tokens)))
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("wrong", ["1-", "3,2", "2,2", "5-4", "0-512", "0-999999999", "a", [1, 2], None, "1,,2"])
def test_a_configuration_that_names_others_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="draft_vocabulary"):
        ModelConfig.from_hf(tiny_config().to_hf() | {"draft_vocabulary": wrong})


@pytest.mark.parametrize("tied", [True, False])
def test_a_trimmed_head_says_what_the_whole_one_says_of_its_tokens(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, prompt = tiny_model(tie_word_embeddings=tied), PROMPTS[0]
    model.config = replace(model.config, draft_vocabulary=SOME)
    save_model(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(full_logits(load_model(tmp_path), prompt), expected)
    for draft in (load_model(tmp_path).trim_head(), load_model(tmp_path).trim_head().fuse()):
        logits = full_logits(draft, prompt)
        torch.testing.assert_close(logits[:, SOME], expected[:, SOME])
        torch.testing.assert_close(logits.softmax(-1)[:, SOME], expected[:, SOME].softmax(-1))
        assert draft.lm_head is not None and draft.lm_head.weight.shape == (len(SOME), 64)


@pytest.mark.parametrize(("format", "tied"), [(Int4(32), True), (Int8(), True), (Int8(), False), (NF4(), False)])
def test_a_quantized_head_is_trimmed_in_its_format(format: Any, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    model.config = replace(model.config, draft_vocabulary=SOME)
    save_model(model, tmp_path / "dense")
    head = "embed_tokens" if tied else "lm_head"
    quantize_folder(tmp_path / "dense", tmp_path / "quantized", format, overrides={head: format})
    whole, draft = load_model(tmp_path / "quantized"), load_model(tmp_path / "quantized").trim_head()
    assert draft.lm_head is not None and draft.lm_head.format == format
    ours, expected = (full_logits(model, PROMPTS[0])[:, SOME] for model in (draft, whole))
    plain = full_logits(load_model(tmp_path / "dense"), PROMPTS[0])[:, SOME]
    assert float((ours - expected).norm()) < 0.3 * float((expected - plain).norm())


@pytest.mark.parametrize("num_drafts", [3, None])
def test_a_folder_that_names_its_draft_vocabulary_drafts_with_it(num_drafts: int | None, tmp_path: Path) -> None:
    target, draft = tiny_model(seed=3), noisy_twin(tiny_model(seed=3))
    draft.config = replace(draft.config, draft_vocabulary=SOME)
    for name, model in (("target", target), ("draft", draft)):
        save_model(model, tmp_path / name)
        toy_tokenizer().save(tmp_path / name)
    folders = {"model": str(tmp_path / "target"), "draft": str(tmp_path / "draft")}
    options: dict[str, Any] = {"dtype": "float32", "num_pages": 256, "max_num_seqs": 8}
    drafting: Any = load_models(EngineConfig(**folders, **options)).draft
    assert drafting.lm_head.weight.shape[0] == len(SOME)
    engine = LLM(folders["model"], draft=folders["draft"], num_speculative_tokens=num_drafts, **options)
    answers = [answer.choices[0] for answer in engine.generate(PROMPTS, greedy(24))]
    assert [answer.token_ids for answer in answers] == generate(make_engine(target), PROMPTS, greedy(24))
    accepted, drafted = (sum(getattr(one, name) for one in answers) for name in ("num_accepted", "num_drafted"))
    assert accepted < drafted
    assert accepted > 0 or num_drafts is None  # the few tries of one that learns may all be wrong
    alone = LLM(folders["draft"], **options).generate(PROMPTS, greedy(24))
    assert [answer.choices[0].token_ids for answer in alone] == generate(make_engine(draft), PROMPTS, greedy(24))


# Distributions, of a model that is small enough to know all that it may say.

V, INSIDE, OUTSIDE = 7, (0, 2, 3, 6), (1, 4, 5)
FIRST, LENGTH, NUM_SEQUENCES = 3, 3, 1200


def exact(model: Transformer, params: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Chances of each run of tokens, by the plain forms of model and sampling."""
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    bias = options.pop("logit_bias", {})
    filters = {name: torch.tensor([value]) for name, value in options.items()}
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for run, chance in chances.items():
            logits = full_logits(model, [FIRST, *run])[-1:].double()
            for token, value in bias.items():
                logits[0, token] += value
            for token, p in enumerate(adjusted_probabilities_reference(logits, **filters)[0].tolist()):
                longer[*run, token] = chance * p
        chances = longer
    return chances


@pytest.mark.parametrize(
    ("params", "num_drafts"),
    [
        ({}, 2),
        ({"temperature": 0.6, "top_k": 4}, 1),
        pytest.param({"top_p": 0.8}, 2, marks=pytest.mark.eager),  # as top_k in a graph
        pytest.param({"logit_bias": {4: 2.0, 3: -1.0}}, 1, marks=pytest.mark.eager),  # as the next in a graph
        ({"logit_bias": dict.fromkeys(INSIDE, -100.0)}, 2),
    ],
    ids=["plain", "top_k", "top_p", "bias", "none of its tokens"],
)
def test_sampled_tokens_have_the_targets_distribution(params: dict[str, Any], num_drafts: int) -> None:
    target = tiny_model(seed=5, vocab_size=V, initializer_range=0.12)
    draft = trimmed(tiny_model(seed=6, vocab_size=V, initializer_range=0.12), INSIDE)
    options = {"max_num_seqs": 50, "max_num_batched_tokens": 1000, "num_pages": 200, "max_model_len": 16}
    engine = make_engine(target, draft, num_speculative_tokens=num_drafts, **options)
    for number in range(NUM_SEQUENCES // 50):
        engine.add_request(str(number), [FIRST], SamplingParams(max_tokens=LENGTH, n=50, ignore_eos=True, **params))
    counts = Counter(tuple(output.new_token_ids) for output in drain(engine).values())
    expected = exact(target, params)
    assert len(expected) == V**LENGTH and math.isclose(sum(expected.values()), 1.0, rel_tol=1e-5)
    assert p_value(counts, expected) > 1e-4
    assert any(set(run) & set(OUTSIDE) for run in counts)
    assert engine.stats().num_draft_tokens > 0


class Only(PlainMask):
    """A mask that allows the same tokens everywhere."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def allowed(self, output: Any) -> np.ndarray:
        return np.isin(np.arange(V), self.tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_may_forbid_all_that_the_draft_says(temperature: float) -> None:
    target, draft = tiny_model(seed=5, vocab_size=V), trimmed(tiny_model(seed=6, vocab_size=V), INSIDE)
    engine = make_engine(target, draft, num_speculative_tokens=2)
    engine.add_request("r", [FIRST], SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True))
    engine.set_token_mask("r", Only(*OUTSIDE[:2]))
    [output] = drain(engine).values()
    assert output.error is None and output.num_output_tokens == 12
    assert set(output.new_token_ids) <= set(OUTSIDE[:2])


def test_a_quantized_draft_keeps_its_vocabulary(tmp_path: Path) -> None:
    model = tiny_model()
    model.config = replace(model.config, draft_vocabulary=SOME)
    save_model(model, tmp_path / "dense")
    quantize_folder(tmp_path / "dense", tmp_path / "quantized", Int8())
    assert load_config(tmp_path / "quantized").draft_vocabulary == SOME
