"""Steps that are launched before the one before them has been read: the output is the same, and little is wasted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.serve.decode_trace import find_gaps
from model.transformer import Transformer
from serve.engine.drafts.ngram import NgramDraft
from serve.engine.engine import Engine
from serve.sampling_params import SamplingParams
from tests.interpreted import interpreted
from tests.serve.test_speculation import noisy_twin
from tests.serve.toys import (
    EOS,
    CountingModel,
    TableModel,
    drain,
    end_with,
    generate,
    greedy,
    make_engine,
    random_prompts,
)
from tests.tiny import tiny_model

PROMPTS = random_prompts(12, seed=1)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


def overlapped(*args: Any, **options: Any) -> Engine:
    engine = make_engine(*args, **options)
    engine.max_pending = 1
    return engine


def mixed_params(max_tokens: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1, "top_p": 0.9},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 4},
        {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": {7: 3.0, 9: -4.0}},
        {"seed": 2, "n": 3, "logprobs": 2, "prompt_logprobs": 1, "stop": ("a", "qx")},
    ]
    return [
        SamplingParams(max_tokens=max_tokens + number, **kinds[number % len(kinds)]) for number in range(len(PROMPTS))
    ]


def news(engine: Engine) -> dict[tuple[str, int], tuple]:
    outputs = drain(engine)
    return {
        key: (o.new_token_ids, o.new_text, o.finish_reason, o.stop_reason, o.logprobs and len(o.logprobs))
        for key, o in outputs.items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_pages": 7, "max_model_len": 110},
        pytest.param({"max_num_batched_tokens": 9}, marks=pytest.mark.eager),  # parts of prompts: no graph has them
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.eager),  # graphs know of no prefix
    ],
    ids=str,
)
def test_the_output_is_that_of_synchronous_steps(model: Transformer, options: dict[str, Any]) -> None:
    results = []
    for make in (make_engine, overlapped):
        engine = make(model, **options)
        for number, (prompt, params) in enumerate(zip(PROMPTS, mixed_params(16), strict=True)):
            engine.add_request(str(number), prompt, params)
        results.append(news(engine))
        assert engine.stats().num_running == 0 and (engine.stats().num_preemptions > 0) == ("num_pages" in options)
    assert results[0] == results[1]


def test_the_next_step_is_launched_before_this_one_is_read(model: Transformer) -> None:
    counting = CountingModel(model)
    engine = overlapped(counting)
    engine.add_request("r", [5] * 20, greedy(4))
    assert engine.step() == [] and counting.num_passes == 1
    for number in range(3):
        (output,) = engine.step()
        assert counting.num_passes == 2 + number and output.num_output_tokens == 1 + number
    (output,) = engine.step()  # the last token was known to be the last: nothing more was launched
    assert counting.num_passes == 4 and output.finish_reason == "length" and not engine.has_work()


@pytest.mark.parametrize(("params", "num_wasted"), [({}, 1), ({"ignore_eos": True}, 0), ({"stop": ("c",)}, 1)])
def test_an_end_that_only_the_token_tells_wastes_one_token(params: dict[str, Any], num_wasted: int) -> None:
    table = torch.full((8, 8), 1e-9)
    for token in range(8):
        table[token, (token + 1) % 8] = 1.0  # 4 -> 5 -> 6 -> 7 -> 0 -> 1 (eos)
    counting = CountingModel(TableModel(table))
    engine = overlapped(counting)
    end_with(engine, EOS)
    params = {key: (engine.tokenizer.decode([7]),) if key == "stop" else value for key, value in params.items()}
    engine.add_request("r", [4], SamplingParams(temperature=0, max_tokens=9, **params))
    output = drain(engine)[("r", 0)]
    assert counting.num_tokens == output.num_output_tokens + num_wasted


def test_an_abort_in_flight_is_final(model: Transformer) -> None:
    engine = overlapped(model)
    engine.add_request("gone", PROMPTS[0], greedy(50, n=2))
    engine.add_request("stays", PROMPTS[1], greedy(9))
    for _ in range(4):
        engine.step()
    engine.abort("gone")
    outputs = drain(engine)
    assert outputs[("gone", 0)].finish_reason == outputs[("gone", 1)].finish_reason == "abort"
    assert outputs[("stays", 0)].num_output_tokens == 9


def test_a_failure_in_flight_hurts_one_request(model: Transformer) -> None:
    expected = generate(make_engine(model), PROMPTS, greedy(20))
    engine = overlapped(CountingModel(model, poison=511))
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, greedy(20))
    outputs = [engine.step() for _ in range(3)]
    engine.add_request("poison", [5, 511, 6], greedy(4))
    outputs.append(list(drain(engine).values()))
    (failed,) = (output for output in outputs[-1] if output.request_id == "poison")
    assert failed.finish_reason == "error"
    for number, tokens in enumerate(expected):
        told = [o.new_token_ids for step in outputs for o in step if o.request_id == str(number)]
        assert [token for part in told for token in part] == tokens


HOST_READS = {"tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
SYNCHRONISING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero"}


class NoReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in HOST_READS:
            raise AssertionError(f"the host reads the device: {func.__name__}")
        return func(*args, **(kwargs or {}))


class NoSynchronisation(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in SYNCHRONISING:
            raise AssertionError(f"the host waits for the device: {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def blind_host() -> Iterator[None]:
    """Whatever would make the host wait on a GPU raises."""
    with NoReads(), NoSynchronisation():
        yield


def blinded(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with blind_host():
            return call(*args)

    return run


def test_a_read_is_noticed() -> None:
    for read in (torch.Tensor.tolist, torch.Tensor.item, bool, int, torch.nonzero):
        with pytest.raises(AssertionError, match="the host"), blind_host():
            read(torch.ones(1, dtype=torch.int64))


@pytest.mark.parametrize("draft", [None, "twin", pytest.param("ngram", marks=pytest.mark.eager)])
def test_launching_a_step_reads_nothing(draft: str | None) -> None:
    """Through the interpreter, for the kernels of a GPU; on the CPU their wrappers may look at what is at hand."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_query_heads": 2, "num_kv_heads": 1}
    small = tiny_model(**sizes)
    source = tiny_model(seed=8, **sizes) if draft == "twin" else draft
    engine = make_engine(small, source, num_speculative_tokens=2, num_pages=64)
    if isinstance(engine.draft, NgramDraft):
        engine.draft.reads_counts = False
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=4, ignore_eos=True, top_p=0.9, repetition_penalty=1.2, logit_bias={5: 1.0}),
        SamplingParams(max_tokens=4, ignore_eos=True, seed=3, min_tokens=2, prompt_logprobs=1),
    ]
    for number, own in enumerate(params):
        engine.add_request(str(number), PROMPTS[number][:6] * 2, own)
    with interpreted():
        engine.step()
        engine.launch_pass = blinded(engine.launch_pass)  # type: ignore[method-assign]
        if engine.draft is not None:
            engine.draft.propose = blinded(engine.draft.propose)  # type: ignore[method-assign]
        drain(engine)
    assert engine.stats().num_generation_tokens == 12


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_counts_that_only_the_device_knows(num_drafts: int) -> None:
    """The target then looks at rows without a draft token, which must not matter."""
    table = torch.full((8, 8), 0.02)
    for token in range(8):
        table[token, (token + 1) % 8] = 0.86
    prompts = [[number, *range(number, 8), *range(number)] for number in range(6)]
    params = [
        SamplingParams(seed=n, temperature=0.5 * (n % 3), frequency_penalty=n % 2, max_tokens=20) for n in range(6)
    ]
    expected = generate(make_engine(TableModel(table)), prompts, params)
    engine = make_engine(TableModel(table), "ngram", num_speculative_tokens=num_drafts)
    assert isinstance(engine.draft, NgramDraft)
    engine.draft.reads_counts = False
    assert generate(engine, prompts, params) == expected
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_gaps_are_where_nothing_runs() -> None:
    assert find_gaps([(5, 6), (0, 2), (1, 4), (9, 10), (9.5, 9.75)]) == [1, 3]
    assert find_gaps([(0, 9), (2, 3)]) == find_gaps([]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("draft", [None, "twin", "ngram"])
def test_launching_a_step_on_a_gpu_waits_for_nothing(draft: str | None) -> None:
    model = tiny_model(seed=3)
    device = torch.device("cuda")
    source: Any = noisy_twin(model).to(device) if draft == "twin" else draft
    engine = make_engine(model.to(device), source, device="cuda", num_speculative_tokens=2)
    launch, propose = engine.launch_pass, engine.draft and engine.draft.propose

    def strict(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    engine.launch_pass = strict(launch)  # type: ignore[method-assign]
    if engine.draft is not None and propose is not None:
        engine.draft.propose = strict(propose)  # type: ignore[method-assign]
    for number, (prompt, params) in enumerate(zip(PROMPTS, mixed_params(20), strict=True)):
        engine.add_request(str(number), prompt, params)
    assert engine.max_pending
    assert len(drain(engine)) == sum(params.n for params in mixed_params(20))
