"""Passes that are captured and replayed: the bits of the model's own code, for whatever they are given."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernels.attention._decode_cpu as decode_cpu
import kernels.linear.dense as linear
from kernels.attention.paged import MOST_QUERIES_TO_GROUP
from model.config import MixtureOfDepths
from model.formats.registry import format_named
from model.kv_format import KVPages, choose_kv_format
from model.passes import Pass, PassRunner
from model.quantized import set_quantized
from model.transformer import Transformer
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(
    decode_cpu._library(torch.float32) is None, reason="no C compiler, or a processor without AVX2"
)
PAGE, TABLE = 16, 8
"""Tokens of a page, pages of a sequence."""
# New tokens and tokens in the cache of each sequence. All of two tokens, as two sequences or as one.
STEPS = [[(1, 7), (1, 100)], [(1, 8), (1, 101)], [(1, 120), (1, 1)], [(2, 60)], [(1, 9), (1, 102)]]


class Counted:
    """A model that knows how often its code has run."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.config, self.can_be_captured, self.runs = model, model.config, True, 0

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        self.runs += 1
        return self.model(*arguments, **named)


def pages_of(model: Transformer, kind: str = "auto") -> KVPages:
    form, device = choose_kv_format(kind, torch.float32), torch.device("cpu")
    return form.allocate(model.config, 8 * TABLE, PAGE, device, num_rows=8)


def step_of(sequences: list[tuple[int, int]], seed: int, **changes: Any) -> Pass:
    generator, tables = torch.Generator().manual_seed(seed), torch.arange(len(sequences) * TABLE).view(-1, TABLE)
    places = [torch.arange(length - new, length) for new, length in sequences]
    slots = [table[at // PAGE] * PAGE + at % PAGE for table, at in zip(tables, places, strict=True)]
    positions = torch.cat(places)
    starts = torch.tensor([0] + [new for new, _ in sequences]).cumsum(0)
    listing = torch.tensor([[row, length - new] for row, (new, length) in enumerate(sequences)]).T.int()
    return Pass(
        torch.randint(512, positions.shape, generator=generator), positions, torch.cat(slots), tables.int(),
        starts.int(), torch.tensor([length for _, length in sequences], dtype=torch.int32), None, listing,
    )._replace(**changes)  # fmt: skip


def dense(**changes: Any) -> Transformer:
    return tiny_model(head_dim=64, **changes)


def quantized(**changes: Any) -> Transformer:
    model = dense(tie_word_embeddings=True, **changes)
    for name, module in list(model.model.named_modules(prefix="model")):
        if isinstance(module, nn.Linear | nn.Embedding):
            form: Any = format_named("int4", group=32) if isinstance(module, nn.Linear) else format_named("int8")
            set_quantized(model, name, form.quantize(module.weight.detach()), form)
    return model


MODELS: dict[str, Callable[[], Transformer]] = {
    "dense": dense,
    "norms of heads": lambda: dense(family="qwen3"),
    "biases": lambda: dense(family="qwen2"),
    "windows": lambda: dense(family="mistral", windows=(12, None)),
    "int4": quantized,
}


@pytest.mark.parametrize("kind", [*MODELS, "packed by oneDNN", "in bf16 for C"])
@torch.inference_mode()
def test_replays_are_the_models_own_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MODELS.get(kind, MODELS["biases"])()
    if kind not in MODELS:
        monkeypatch.setattr(linear, "_SMALLEST_FP32_WEIGHT_TO_PREPARE", 1)
    if kind == "in bf16 for C":
        whole = whole.bfloat16().float()
    model = Counted(whole.fuse())
    captured, plain = PassRunner(model, pages_of(model.model)), PassRunner(model.model, pages_of(model.model))
    plain._refused = {False, True}
    seen: list[Tensor] = []
    for seed, sequences in enumerate(STEPS):
        step = step_of(sequences, seed)
        hidden = captured.hidden(step)
        assert torch.equal(hidden, plain.hidden(step))
        seen.append(hidden.clone())
        assert all(torch.equal(*pair) for pair in zip(captured.pages.tensors(), plain.pages.tensors(), strict=True))
    assert model.runs == 2, "the code ran again"
    assert torch.equal(seen[-1], hidden)


@torch.inference_mode()
def test_long_prompts_run_the_code() -> None:
    model = Counted(dense().fuse())
    runner = PassRunner(model, pages_of(model.model))
    for new in (MOST_QUERIES_TO_GROUP + 1, 100):
        for seed in range(4):
            runner.hidden(step_of([(new, new)], seed))
    assert model.runs == 8


@torch.inference_mode()
def test_other_weights_are_seen() -> None:
    model = dense().fuse()
    runner = PassRunner(model, pages_of(model))
    steps = [step_of([(1, 3)], seed) for seed in range(3)]
    for step in steps:
        runner.hidden(step)
    other = dense(seed=5)
    model.update_weights(dict(other.named_parameters()))
    runner.forget_captures()
    expected = PassRunner(other.fuse(), pages_of(other))
    for step in steps:  # the cache is as old weights have left it, but for what the step writes
        fresh = step._replace(kv_lengths=torch.ones(1, dtype=torch.int32))
        assert torch.equal(runner.hidden(fresh), expected.hidden(fresh))


@pytest.mark.parametrize(
    ("model", "cache"),
    [
        (lambda: tiny_model(head_dim=16), "auto"),
        (dense, "int8"),
        (lambda: dense(mixture_of_depths=MixtureOfDepths("block", layers=(1,), capacity=0.5)), "auto"),
    ],
)
@torch.inference_mode()
def test_what_cannot_be_captured_runs_as_ever(
    model: Callable[[], Transformer], cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    counted = Counted(model().fuse())
    captured, plain = (PassRunner(each, pages_of(counted.model, cache)) for each in (counted, counted.model))
    plain._refused = {False, True}
    for seed, sequences in enumerate(STEPS):
        step = step_of(sequences, seed)
        assert torch.equal(captured.hidden(step), plain.hidden(step))
    assert counted.runs == len(STEPS) + 1  # the attempt, which writes what is then written again
    (message,) = [record.getMessage() for record in caplog.records if "operator by operator" in record.getMessage()]
    assert message.startswith("passes without adapters run operator by operator: ")
