"""The engine on tiny models: its output is the model's own, whatever the company, the chunks, the cache, the memory."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.collectives import RankError
from model.families.registry import FAMILIES
from model.files.checkpoint import save_model
from model.transformer import Transformer
from serve import LLM
from serve.config import EngineConfig
from serve.engine.engine import Engine
from serve.engine.loading import Models
from serve.sampling_params import SamplingParams
from serve.tenant import Tenant
from tests.serve.failing_device import FATAL_TOKEN, FailingModel, on_failing_device
from tests.serve.toys import (
    EOS,
    CountingModel,
    TableModel,
    drain,
    end_with,
    generate,
    greedy,
    greedy_oracle,
    join,
    make_engine,
    random_prompts,
    toy_tokenizer,
)
from tests.tiny import tiny_model

PROMPTS = random_prompts(12, seed=1)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


@pytest.fixture(scope="module")
def expected(model: Transformer) -> list[list[int]]:
    return [greedy_oracle(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 32, "max_num_batched_tokens": 2048},
        pytest.param({"max_num_seqs": 4, "max_num_batched_tokens": 5}, marks=pytest.mark.eager),
        pytest.param(
            {"max_num_seqs": 16, "max_num_batched_tokens": 17, "enable_prefix_caching": False}, marks=pytest.mark.eager
        ),
    ],
    ids=str,
)
def test_greedy_output_is_that_of_full_passes(model: Transformer, expected: list[list[int]], options: dict) -> None:
    assert generate(make_engine(model, **options), PROMPTS, greedy(NUM_TOKENS)) == expected


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama", "qwen2"}))
def test_other_families_too(family: str) -> None:
    other = tiny_model(family, seed=5)
    expected = [greedy_oracle(other, prompt, 20) for prompt in PROMPTS[:4]]
    assert generate(make_engine(other, max_num_batched_tokens=16), PROMPTS[:4], greedy(20)) == expected


def test_greedy_output_is_that_of_transformers(model: Transformer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_model(model, tmp_path)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for prompt, tokens in zip(PROMPTS[:3], generate(make_engine(model), PROMPTS[:3], greedy(12)), strict=True):
        told = peer.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert told[0, len(prompt) :].tolist() == tokens


def mixed_params(count: int, max_tokens: int) -> list[SamplingParams]:
    return [
        greedy(max_tokens) if number % 2 else SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True)
        for number in range(count)
    ]


def test_running_out_of_pages_changes_nothing(model: Transformer) -> None:
    prompts, params = random_prompts(16, seed=4, high=14), mixed_params(16, 40)
    roomy = make_engine(model)
    expected = generate(roomy, prompts, params)
    assert roomy.stats().num_preemptions == 0
    for caching in (True, False):
        engine = make_engine(model, num_pages=8, max_model_len=None, enable_prefix_caching=caching)
        assert generate(engine, prompts, params) == expected
        assert engine.stats().num_preemptions >= 5


@pytest.mark.eager  # no graph knows who was preempted; the test above has it beside graphs
def test_five_hundred_preemptions_change_nothing(model: Transformer) -> None:
    prompts, params = random_prompts(32, seed=5, high=30), mixed_params(32, 24)
    expected = generate(make_engine(model), prompts, params)
    engine = make_engine(model, num_pages=32, max_num_batched_tokens=24, max_model_len=None)
    for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, own)
    random_, joined, num_preempted = random.Random(6), {}, 0
    while engine.has_work():
        for output in engine.step():
            join(joined, output)
        if engine.scheduler.running and num_preempted < 500:
            for sequence in random_.sample(engine.scheduler.running, k=min(3, len(engine.scheduler.running))):
                engine.scheduler.preempt(sequence)
                num_preempted += 1
    assert num_preempted >= 500
    assert [joined[(str(number), 0)].new_token_ids for number in range(32)] == expected


def test_a_cached_prefix_changes_nothing_and_is_not_computed_again(model: Transformer) -> None:
    shared = random_prompts(1, low=100, high=101)[0]
    prompts = [shared + tail for tail in random_prompts(5, seed=2, low=1, high=20)]
    counting = CountingModel(model)
    engine = make_engine(counting)
    generate(engine, [shared], greedy(1))
    counting.num_tokens = 0
    outputs = generate(engine, prompts, greedy(8))
    assert outputs == [greedy_oracle(model, prompt, 8) for prompt in prompts]
    assert counting.num_tokens == sum(len(prompt) - 96 + 7 for prompt in prompts)
    assert engine.stats().prefix_cache_hits == 5 * 96
    again = generate(engine, prompts, greedy(8))
    assert again == outputs


@pytest.mark.eager
def test_requests_that_come_together_compute_a_common_prefix_once(model: Transformer) -> None:
    """Eight with 1,500 common tokens cost at most 1.3 of one, and nothing waits for one that is gone."""
    shared = random_prompts(1, low=1500, high=1501)[0]
    prompts = [shared + tail for tail in random_prompts(8, seed=2, low=10, high=20)]
    counting = CountingModel(model)
    engine = make_engine(counting, max_num_batched_tokens=2048, num_pages=1024, max_model_len=2048)
    engine.add_request("leaves", prompts[0], greedy(4))
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, greedy(4))
    engine.add_request("other", prompts[0][::-1], greedy(4))
    engine.step()
    assert [sequence.request_id for sequence in engine.scheduler.running] == ["leaves", "other"]
    engine.abort("leaves")
    engine.abort("other")
    counting.num_tokens = 0
    joined = drain(engine)
    assert counting.num_tokens <= 1.3 * len(prompts[0])
    alone = generate(make_engine(model, num_pages=1024, max_model_len=2048), prompts[:2], greedy(4))
    assert [joined[(str(number), 0)].new_token_ids for number in range(2)] == alone


def test_cached_prefixes_are_not_shared_across_salts(model: Transformer) -> None:
    engine = make_engine(model)
    prompt = random_prompts(1, low=50, high=51)[0]
    for number, salt in enumerate(["a", "a", "b", None]):
        engine.add_request(str(number), prompt, greedy(2), tenant=Tenant(cache_salt=salt))
        (output,) = drain(engine).values()
        assert output.num_cached_tokens == (48 if number == 1 else 0)


def test_choices_share_one_computation_of_the_prompt(model: Transformer) -> None:
    prompt = random_prompts(1, low=37, high=38)[0]
    counting = CountingModel(model)
    engine = make_engine(counting)
    engine.add_request("r", prompt, SamplingParams(n=4, seed=5, max_tokens=10, ignore_eos=True))
    joined = drain(engine)
    assert counting.num_tokens == 37 + 4 * 9
    choices = [joined[("r", index)].new_token_ids for index in range(4)]
    assert len({tuple(tokens) for tokens in choices}) == 4
    # The same choices, each computed with every page preempted again and again.
    small = make_engine(model, num_pages=4, max_model_len=None, enable_prefix_caching=False)
    small.add_request("r", prompt, SamplingParams(n=4, seed=5, max_tokens=10, ignore_eos=True))
    again = drain(small)
    assert small.stats().num_preemptions > 0
    assert [again[("r", index)].new_token_ids for index in range(4)] == choices


@pytest.mark.parametrize("num_pages", [256, pytest.param(10, marks=pytest.mark.eager)])
def test_a_seed_gives_the_same_tokens_in_any_company(model: Transformer, num_pages: int) -> None:
    params = [
        SamplingParams(seed=number, max_tokens=16, temperature=0.7 + 0.1 * number, top_p=0.95, top_k=50 * (number % 2))
        for number in range(len(PROMPTS))
    ]
    alone = [generate(make_engine(model), [prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    engine = make_engine(model, num_pages=num_pages, max_model_len=160, max_num_batched_tokens=19)
    assert generate(engine, PROMPTS, params) == alone
    assert generate(make_engine(model), PROMPTS[:1], SamplingParams(seed=99, max_tokens=16)) != alone[:1]


def test_requests_without_a_seed_differ_but_an_engine_repeats_itself(model: Transformer) -> None:
    prompts = [PROMPTS[0]] * 3
    outputs = generate(make_engine(model), prompts, SamplingParams(max_tokens=8))
    assert outputs[0] != outputs[1] != outputs[2]
    assert generate(make_engine(model), prompts, SamplingParams(max_tokens=8)) == outputs
    assert generate(make_engine(model, seed=1), prompts, SamplingParams(max_tokens=8)) != outputs


def test_the_end_of_a_sequence() -> None:
    table = torch.full((8, 8), 1e-9)
    for token in range(8):
        table[token, (token + 1) % 8] = 1.0  # 2 -> 3 -> ... -> 7 -> 0 -> 1 (eos) -> 2
    engine = make_engine(TableModel(table))
    end_with(engine, EOS)
    cases = {
        "eos": (SamplingParams(temperature=0, max_tokens=50), [5, 6, 7, 0, 1], "stop", None),
        "length": (SamplingParams(temperature=0, max_tokens=3), [5, 6, 7], "length", None),
        "stop id": (SamplingParams(temperature=0, stop_token_ids=(7,)), [5, 6, 7], "stop", 7),
        "ignored": (
            SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
            [5, 6, 7, 0, 1, 2, 3],
            "length",
            None,
        ),
    }
    for name, (params, _, _, _) in cases.items():
        engine.add_request(name, [4], params)
    joined = drain(engine)
    for name, (_, tokens, finish_reason, stop_reason) in cases.items():
        output = joined[(name, 0)]
        assert (output.new_token_ids, output.finish_reason, output.stop_reason) == (tokens, finish_reason, stop_reason)
        assert output.num_output_tokens == len(tokens)


def test_the_longest_sequence_ends_by_length(model: Transformer) -> None:
    engine = make_engine(model, num_pages=3, max_model_len=None)
    assert engine.max_model_len == 48
    engine.add_request("r", [5] * 20, greedy(1000))
    output = drain(engine)[("r", 0)]
    assert output.finish_reason == "length" and output.num_output_tokens == 28


def test_min_tokens_keeps_every_end_away() -> None:
    table = torch.full((8, 8), 0.01)
    table[:, EOS] = 1.0
    engine = make_engine(TableModel(table))
    end_with(engine, EOS)
    engine.add_request("r", [4], SamplingParams(temperature=0, min_tokens=5, max_tokens=9))
    tokens = drain(engine)[("r", 0)].new_token_ids
    assert len(tokens) == 6 and tokens[-1] == EOS and EOS not in tokens[:-1]


def test_stop_strings_cut_the_text_across_tokens(model: Transformer) -> None:
    tokenizer = toy_tokenizer()
    free = generate(make_engine(model), PROMPTS[:1], greedy(40))[0]
    text = tokenizer.decode(free)
    stop = text[20:26]
    engine = make_engine(model)
    engine.add_request("r", PROMPTS[0], greedy(40, stop=("never in it", stop)))
    shown = ""
    while engine.has_work():
        for output in engine.step():
            shown += output.new_text
            assert text.startswith(shown) and stop not in shown
    assert shown == text[: text.find(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.num_output_tokens < 40


def test_text_is_that_of_the_tokens(model: Transformer) -> None:
    engine = make_engine(model)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, SamplingParams(seed=number, max_tokens=30, stop=("zzzz",)))
    for output in drain(engine).values():
        tokens = [token for token in output.new_token_ids if token != EOS]
        assert output.new_text == toy_tokenizer().decode(tokens)


@pytest.mark.eager
def test_an_abort_at_any_time_frees_everything_and_hurts_nobody(model: Transformer, expected: list[list[int]]) -> None:
    random_ = random.Random(0)
    for _ in range(8):
        engine = make_engine(model, num_pages=20, max_num_batched_tokens=16, max_model_len=None)
        victims = {str(number) for number in range(len(PROMPTS)) if random_.random() < 0.5}
        times = {victim: random_.randint(0, 60) for victim in victims}
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), prompt, greedy(NUM_TOKENS, n=1 + number % 2))
        joined: dict = {}
        for step in range(1000):
            for victim in [victim for victim in victims if times[victim] == step]:
                engine.abort(victim)
            if not engine.has_work():
                break
            for output in engine.step():
                join(joined, output)
        assert engine.cache.num_used == 0 and not engine.has_work()
        for number, tokens in enumerate(expected):
            output = joined[(str(number), 0)]
            if output.finish_reason == "abort":
                assert str(number) in victims and output.new_token_ids == tokens[: output.num_output_tokens]
            else:
                assert output.new_token_ids == tokens


def test_deadlines_hold_queued_and_running(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    engine = make_engine(model, max_num_seqs=2)
    engine.add_request("running", PROMPTS[0], greedy(200, n=2), deadline=110.0)
    engine.add_request("queued", PROMPTS[1], greedy(4), deadline=109.0)
    engine.add_request("unhurried", PROMPTS[2], greedy(4), deadline=1000.0)
    engine.add_request("late before it came", PROMPTS[3], greedy(4), deadline=99.0)
    (late,) = (output for output in engine.step() if output.finished)
    assert (late.request_id, late.finish_reason) == ("late before it came", "deadline")
    for _ in range(5):
        assert not any(output.finished for output in engine.step())
    clock[0] = 109.5
    (queued,) = (output for output in engine.step() if output.finished)
    assert (queued.request_id, queued.finish_reason, queued.num_output_tokens) == ("queued", "deadline", 0)
    clock[0] = 110.0
    joined = drain(engine)
    for index in (0, 1):
        assert joined[("running", index)].finish_reason == "deadline"
        assert joined[("running", index)].num_output_tokens == 7
    assert joined[("unhurried", 0)].finish_reason == "length"


def test_a_poisoned_request_fails_alone(model: Transformer, expected: list[list[int]]) -> None:
    engine = make_engine(CountingModel(model, poison=511))
    clean = [[token for token in prompt if token != 511] for prompt in PROMPTS]
    assert clean == PROMPTS
    engine.add_request("poison", [5, 511, 6], greedy(4, n=2))
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, greedy(NUM_TOKENS))
    joined = drain(engine)
    for index in (0, 1):
        assert joined[("poison", index)].finish_reason == "error"
        assert "poisoned" not in (joined[("poison", index)].error or "poisoned")
    assert [joined[(str(number), 0)].new_token_ids for number in range(len(PROMPTS))] == expected


class RefusingTogether(FailingModel):
    """Fails for a batch of sequences as a request may make it fail; the device works on."""

    def __call__(self, tokens: Tensor, *rest: Any, **more: Any) -> Tensor:
        if len(tokens) > 3:
            raise RuntimeError("together they do not fit")
        return super().__call__(tokens, *rest, **more)


@pytest.mark.parametrize("kind", [FailingModel, RefusingTogether], ids=["together", "one by one"])
def test_a_failed_device_ends_the_process_and_not_one_request_after_the_other(
    kind: type[FailingModel], model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA error stays: what comes after raises too. Leaving `step` it ends the process; a fresh one starts."""
    failing = kind(model)
    engine = on_failing_device(make_engine(failing))
    monkeypatch.setattr(torch.cuda, "synchronize", failing.synchronize)
    engine.add_request("fine", [5, 6], greedy(4))
    engine.step()
    engine.add_request("kills the device", [5, FATAL_TOKEN, 6], greedy(4))
    engine.add_request("comes after", [7, 8], greedy(4))
    with pytest.raises(RuntimeError, match="device-side assert"):
        engine.step()
    assert failing.has_failed and failing.num_launched_after == 0


def test_a_rank_that_is_lost_while_requests_are_computed_one_by_one_ends_the_engine(model: Transformer) -> None:
    """No request is to blame, and none is told that it failed."""
    calls = iter([RuntimeError("together they do not fit"), RankError("rank 1 has ended")])

    class Lost(CountingModel):
        def __call__(self, *_: Any, **__: Any) -> Tensor:
            raise next(calls)

    engine = make_engine(Lost(model))
    engine.add_request("one", [5, 6], greedy(4))
    with pytest.raises(RankError, match="rank 1 has ended"):
        engine.step()
    assert engine.stats().num_running == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_not_numbers_fail_one_request(temperature: float) -> None:
    table = torch.full((8, 8), 1 / 8)
    table[3] = float("nan")
    engine = make_engine(TableModel(table))
    params = SamplingParams(temperature=temperature, max_tokens=1)
    for name, token in {"bad": 3, "good": 4}.items():
        engine.add_request(name, [token], params)
    joined = drain(engine)
    assert joined[("bad", 0)].finish_reason == "error" and "not numbers" in str(joined[("bad", 0)].error)
    assert joined[("good", 0)].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(1), "no tokens"),
        ([512], greedy(1), "512"),
        ([-1], greedy(1), "-1"),
        ([True], greedy(1), "True"),
        ([5] * 256, greedy(1), "256 tokens"),
        ([5], greedy(1, n=9), "n is 9"),
        ([5], SamplingParams(temperature=-1.0), "temperature"),
        ([5], SamplingParams(logit_bias={512: 1.0}), "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_refused(
    model: Transformer, prompt: list[int], params: SamplingParams, message: str
) -> None:
    engine = make_engine(model)
    with pytest.raises(ValueError, match=message):
        engine.add_request("r", prompt, params)
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 5000}, "2048 positions"),
        ({"max_model_len": 512, "num_pages": 4}, "hold 64 tokens"),
        ({"num_pages": 0}, "num_pages must be at least 1"),
        ({"num_pages": None, "kv_cache_bytes": 100}, "no memory for KV pages"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
    ],
)
def test_options_that_do_not_fit_are_refused(model: Transformer, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(model, **options)


@pytest.mark.parametrize(
    ("options", "message"), [({"dtype": "int8"}, "dtype must be auto"), ({"device": "tpu9"}, "device must be")]
)
def test_a_machine_that_does_not_exist_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(EngineConfig(model="nowhere", **options))


def test_stats_count_what_happened(model: Transformer) -> None:
    engine = make_engine(model)
    engine.add_request("a", [5] * 20, greedy(6, n=2))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_used, stats.num_pages) == (2, 0, 2, 256)
    drain(engine)
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens, stats.num_steps) == (20, 12, 6)
    assert stats.num_running == stats.num_pages_used == 0


def test_llm_serves_a_folder(model: Transformer, expected: list[list[int]], tmp_path: Path) -> None:
    save_model(model, tmp_path)
    toy_tokenizer().save(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", num_pages=64, max_model_len=256)
    generations = llm.generate(PROMPTS, greedy(NUM_TOKENS))
    assert [generation.choices[0].token_ids for generation in generations] == expected
    assert generations[0].text == llm.tokenizer.decode(expected[0])
    early = dict(llm.as_completed(PROMPTS, [greedy(NUM_TOKENS - 2 * number) for number in range(len(PROMPTS))]))
    assert next(iter(early)) == len(PROMPTS) - 1, "the shortest is there first"
    for number, generation in early.items():
        assert generation.choices[0].token_ids == expected[number][: NUM_TOKENS - 2 * number]
    some = llm.as_completed(PROMPTS, greedy(NUM_TOKENS))
    next(some)
    some.close()
    assert not llm.engine.has_work(), "what nobody waits for is given up"
    (by_text,) = llm.generate("hello", greedy(5))
    assert by_text.prompt == "hello" and by_text.choices[0].finish_reason == "length"
    with pytest.raises(ValueError, match="2 prompts"):
        llm.generate(["a", "b"], [greedy(1)])
    with pytest.raises(ValueError, match="no tokens"):
        llm.generate([[5], []], greedy(1))
    assert not llm.engine.has_work()


def test_a_draft_of_another_vocabulary_is_refused(model: Transformer, tmp_path: Path) -> None:
    for name, size in {"target": 512, "draft": 511}.items():
        save_model(model, tmp_path / name)
        toy_tokenizer(size).save(tmp_path / name)
    with pytest.raises(ValueError, match="their vocabularies differ: the target has 512 tokens, the draft 511"):
        Engine(EngineConfig(model=str(tmp_path / "target"), draft=str(tmp_path / "draft"), dtype="float32"))


def test_a_padded_draft_vocabulary_is_no_obstacle(model: Transformer, expected: list[list[int]]) -> None:
    for size in (500, 530):
        draft = tiny_model(seed=3, vocab_size=size)
        config = EngineConfig(model="toy", num_pages=64, num_speculative_tokens=2, max_model_len=256)
        engine = Engine(config, Models(model, toy_tokenizer(), draft))
        prompts = [[token % 500 for token in prompt] for prompt in PROMPTS[:3]]
        assert generate(engine, prompts, greedy(8)) == [greedy_oracle(model, prompt, 8) for prompt in prompts]
