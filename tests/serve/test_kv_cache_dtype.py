"""Keys and values in 8 bits: the engine says what full passes with rounded keys and values say, whatever else it does.

The oracle spells the two roundings out. An engine rounds each key once, when it is written, and every reader sees the
rounded one, the prompt's own tokens among them; so chunks, prefixes, preemption and drafts must change nothing.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.rotary_write import qk_norm_rope
from model.attention import PackedAttention
from model.config import ModelConfig
from model.kv_format import NormRope
from model.transformer import Transformer
from serve.config import EngineConfig
from serve.engine.engine import Engine
from serve.llm import LLM
from tests.serve.http_server import REAL, ROOT, running_server, save_tiny_folder
from tests.serve.test_feature_pairs import essence, random_requests
from tests.serve.test_routed import routed_model
from tests.serve.test_speculation import noisy_twin
from tests.serve.toys import drain, generate, greedy, make_engine, random_prompts
from tests.tiny import tiny_model

PROMPTS = random_prompts(6, seed=1)
NUM_TOKENS = 16


def rounded_to_int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def rounded_to_fp8(x: Tensor) -> Tensor:
    """Three bits behind the leading one, exponents from -6: steps of 2^(exponent - 3)."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    _, exponent = torch.frexp(x / scale)
    step = torch.exp2((exponent - 1).clamp(min=-6) - 3.0)
    return (x / scale / step).round() * step * scale


ROUNDED = {"int8": rounded_to_int8, "fp8": rounded_to_fp8}


class RoundedAttention(PackedAttention):
    """Attention of whole documents over rounded keys and values."""

    def __init__(self, config: ModelConfig, cu_seqlens: Tensor, name: str) -> None:
        super().__init__(config, cu_seqlens)
        self.rounded = ROUNDED[name]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norm_rope: NormRope) -> Tensor:
        q, k = qk_norm_rope(q, k, rotary=norm_rope.rotary, norms=norm_rope.norms)
        return super().__call__(layer, q, self.rounded(k), self.rounded(v), NormRope(norms=None, rotary=None))


def rounded_greedy(model: Transformer, prompt: list[int], num_tokens: int, name: str) -> list[int]:
    return greedy_through(lambda starts: RoundedAttention(model.config, starts, name), model, prompt, num_tokens)


def greedy_through(
    attention_of: Callable[[Tensor], PackedAttention], model: Transformer, prompt: list[int], num_tokens: int
) -> list[int]:
    """A full forward pass over everything for each token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        attention = attention_of(torch.tensor([0, len(tokens)], dtype=torch.int32))
        with torch.no_grad():
            hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attention)
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


@pytest.fixture(scope="module", params=ROUNDED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(model: Transformer, name: str) -> list[list[int]]:
    return [rounded_greedy(model, prompt, NUM_TOKENS, name) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        pytest.param({"max_num_seqs": 4, "max_num_batched_tokens": 5}, marks=pytest.mark.eager),
        pytest.param({"max_num_batched_tokens": 2048, "enable_prefix_caching": False}, marks=pytest.mark.eager),
    ],
    ids=str,
)
def test_greedy_output_is_that_of_full_passes(
    model: Transformer, name: str, expected: list[list[int]], options: dict[str, Any]
) -> None:
    engine = make_engine(model, kv_cache_dtype=name, **options)
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) == expected
    page_bytes = sum(part[0].nbytes for part in engine.runner.pages.tensors())
    assert page_bytes == 16 * engine.kv_bytes_per_token == 16 * 2 * 2 * 2 * (16 + 4)


def test_rounding_is_noticed(model: Transformer, expected: list[list[int]]) -> None:
    """Or equal tokens would say nothing."""
    assert generate(make_engine(model), PROMPTS, greedy(NUM_TOKENS)) != expected


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_windows_and_head_norms(family: str, name: str) -> None:
    other = tiny_model(family, seed=3)
    engine = make_engine(other, kv_cache_dtype=name, max_num_batched_tokens=24)
    expected = [rounded_greedy(other, prompt, 8, name) for prompt in PROMPTS[:3]]
    assert generate(engine, PROMPTS[:3], greedy(8)) == expected


@pytest.mark.parametrize("draft", ["equal", "twin", "ngram"])
def test_drafts_change_nothing(model: Transformer, name: str, expected: list[list[int]], draft: str) -> None:
    drafts = {"equal": model, "twin": noisy_twin(model), "ngram": "ngram"}
    engine = make_engine(model, drafts[draft], num_speculative_tokens=3, kv_cache_dtype=name)
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) == expected
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    if draft == "equal":  # its pages hold the same, else it would be wrong now and then
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens
        assert engine.kv_bytes_per_token == 2 * 2 * 2 * 2 * (16 + 4)


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_running_out_of_pages_changes_nothing(model: Transformer, name: str, draft: str | None) -> None:
    prompts = random_prompts(8, seed=4, high=14)
    expected = generate(make_engine(model, kv_cache_dtype=name), prompts, greedy(34))
    engine = make_engine(model, draft, kv_cache_dtype=name, num_pages=6, max_model_len=None, max_num_batched_tokens=24)
    assert generate(engine, prompts, greedy(34)) == expected
    assert engine.stats().num_preemptions >= 2


def test_a_cached_prefix_changes_nothing(model: Transformer, name: str) -> None:
    """Forks copy a page with its scales: the second choice writes behind a prompt that both share."""
    shared = random_prompts(1, low=60, high=61)[0]
    prompts = [shared + tail for tail in random_prompts(3, seed=2, low=1, high=20)]
    engine = make_engine(model, kv_cache_dtype=name)
    generate(engine, [shared], greedy(1))
    expected = [rounded_greedy(model, prompt, 8, name) for prompt in prompts]
    assert generate(engine, prompts, greedy(8, n=2)) == expected
    assert engine.stats().prefix_cache_hits >= 3 * 48


@pytest.mark.eager  # as in test_routed.py
@pytest.mark.parametrize("draft", [None, "twin"])
def test_routed_layers(name: str, draft: str | None) -> None:
    routed = routed_model("block")
    expected = [rounded_greedy(routed, prompt, 10, name) for prompt in PROMPTS[:4]]
    twin = None if draft is None else routed_model("block", noise=0.02)
    options: dict[str, Any] = {} if twin is None else {"num_speculative_tokens": 3}
    engine = make_engine(routed, twin, kv_cache_dtype=name, max_num_batched_tokens=24, **options)
    assert generate(engine, PROMPTS[:4], greedy(10)) == expected


def test_requests_do_not_notice_each_other(model: Transformer, name: str) -> None:
    """Forks that copy pages with their scales, shared prefixes, penalties, stops and preemption, all at once."""
    requests = random_requests(2)[:9]
    alone = {}
    for number, (prompt, params) in enumerate(requests):
        engine = make_engine(model, kv_cache_dtype=name, max_num_batched_tokens=256, enable_prefix_caching=False)
        engine.add_request(str(number), prompt, params)
        alone |= drain(engine)
    for draft in (None, noisy_twin(model)):
        options = {"num_pages": 14, "max_model_len": 110, "max_num_batched_tokens": 33}
        engine = make_engine(model, draft, kv_cache_dtype=name, **options)
        for number, (prompt, params) in enumerate(requests):
            engine.add_request(str(number), prompt, params)
        together = drain(engine)
        assert {key: essence(output) for key, output in together.items()} == {
            key: essence(output) for key, output in alone.items()
        }


class FixedAttention(PackedAttention):
    """Attention of whole documents over keys and values in e4m3 with the same scales for all tokens."""

    def __init__(self, config: ModelConfig, cu_seqlens: Tensor, scales: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(config, cu_seqlens)
        self.scales, self.sizes = scales, {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norm_rope: NormRope) -> Tensor:
        q, k = qk_norm_rope(q, k, rotary=norm_rope.rotary, norms=norm_rope.norms)
        self.sizes[layer] = tuple(x.abs().amax(dim=(0, 2)) for x in (k, v))
        if self.scales:
            k, v = (self._rounded(x, scale[:, None]) for x, scale in zip((k, v), self.scales[layer], strict=True))
        return super().__call__(layer, q, k, v, NormRope(norms=None, rotary=None))

    @staticmethod
    def _rounded(x: Tensor, scale: Tensor) -> Tensor:
        cut = (x.double() / scale).clamp(-448, 448)
        step = torch.exp2((torch.frexp(cut).exponent - 1).clamp(min=-6) - 3.0)
        return ((cut / step).round() * step * scale).to(x.dtype)


def fixed_greedy(model: Transformer, prompt: list[int], num_tokens: int) -> list[int]:
    scales = model.cache_scales
    return greedy_through(lambda starts: FixedAttention(model.config, starts, scales), model, prompt, num_tokens)


@pytest.fixture(scope="module")
def calibrated() -> Transformer:
    """With scales, of each head, that cut off the largest keys and values by a fifth."""
    model = tiny_model(seed=3)
    tokens = torch.tensor([token for prompt in PROMPTS for token in prompt])
    attention = FixedAttention(model.config, torch.tensor([0, len(tokens)], dtype=torch.int32), ())
    with torch.no_grad():
        model(tokens, torch.arange(len(tokens)), attention)
    layers = range(model.config.num_layers)
    model.cache_scales = [(0.8 * attention.sizes[n][0] / 448, 0.8 * attention.sizes[n][1] / 448) for n in layers]
    return model


@pytest.mark.parametrize("draft", [None, "twin"])
def test_scales_of_the_checkpoint_are_used(calibrated: Transformer, draft: str | None) -> None:
    """In chunks, with shared prefixes, verified and not, through copied pages."""
    prompts = [*PROMPTS, *(PROMPTS[0] + [7, number] for number in range(2))]
    expected = [fixed_greedy(calibrated, prompt, NUM_TOKENS) for prompt in prompts]
    twin = None if draft is None else noisy_twin(calibrated)
    options: dict[str, Any] = {} if twin is None else {"num_speculative_tokens": 3}
    engine = make_engine(calibrated, twin, kv_cache_dtype="fp8", max_num_batched_tokens=24, **options)
    assert generate(engine, prompts, greedy(NUM_TOKENS)) == expected
    assert generate(engine, prompts, greedy(NUM_TOKENS)) == expected and engine.stats().prefix_cache_hits > 0
    assert [rounded_greedy(calibrated, prompt, NUM_TOKENS, "fp8") for prompt in prompts] != expected
    int8 = make_engine(calibrated, kv_cache_dtype="int8")
    assert generate(int8, prompts[:2], greedy(4)) == [rounded_greedy(calibrated, p, 4, "int8") for p in prompts[:2]]


def test_a_wrong_name_is_found_before_weights_are_read() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be auto, int8 or fp8, not 'int4'"):
        Engine(EngineConfig(model="nowhere", kv_cache_dtype="int4"))


def test_fp8_is_refused_where_the_gpu_cannot_convert_it(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.attention.write_pages.compute_capability", lambda device: (8, 6))
    with pytest.raises(ValueError, match=r"need a GPU of compute capability 8\.9"):
        make_engine(model, kv_cache_dtype="fp8")
    make_engine(model, kv_cache_dtype="int8")


def test_over_http(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "model")
    options = ("--dtype", "float32", "--kv-cache-dtype", "int8", "--kv-cache-bytes", "1M", "--max-model-len", "128")
    llm = LLM(str(folder), dtype="float32", kv_cache_dtype="int8", num_pages=16)
    (alone,) = llm.generate("hello there", greedy(12))
    with running_server(folder, tmp_path / "log", *options) as server:
        pages = 2**20 // (16 * llm.engine.kv_bytes_per_token)
        assert f"{pages} KV pages = {16 * pages} tokens of 160 bytes in int8" in server.lines[-1]
        answer = server.client().completions.create(
            model=str(folder), prompt="hello there", max_tokens=12, temperature=0.0, extra_body={"ignore_eos": True}
        )
    assert answer.choices[0].text == alone.text


def test_a_wrong_name_ends_the_server_with_one_sentence(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "model")
    command = [sys.executable, *REAL, str(folder), "--port", "0", "--kv-cache-dtype", "int4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "kv_cache_dtype must be auto, int8 or fp8, not 'int4'" in done.stderr.splitlines()[-1]
