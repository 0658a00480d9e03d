"""The adaptive draft length: the textbook formula on measured costs, zero when drafting loses, and back."""

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from serve.engine.drafts.length import (
    KEPT_STEPS,
    MAX_DRAFT_TOKENS,
    MIN_GAIN,
    PLAIN_INTERVAL,
    PROBE_INTERVAL,
    READING_GAIN,
    SAMPLES,
    UNTRIED_GAIN,
    AdaptiveLength,
    PassCosts,
    PassTimer,
    best_length,
    expected_tokens,
)
from serve.engine.drafts.tree import AtHand
from serve.engine.engine import Engine
from serve.engine.requests import Sequence
from serve.engine.runner import LanguageModel
from serve.sampling_params import SamplingParams
from tests.serve.test_sampling import sequence as make_sequence
from tests.serve.toys import CountingModel, drain, greedy, make_engine, random_prompts
from tests.tiny import tiny_model


def a_sequence(num_output: int = 5, *, num_prompt: int = 1, max_tokens: int = 10_000, id: int = 0) -> Sequence:
    return make_sequence(SamplingParams(max_tokens=max_tokens), [2] * num_prompt, [3] * num_output, id=id)


@pytest.mark.parametrize(("acceptance", "k", "expected"), [(0.8, 4, 3.3616), (0.75, 7, 3.5995), (0.9, 10, 6.8619)])
def test_expected_tokens(acceptance: float, k: int, expected: float) -> None:
    assert expected_tokens(acceptance, k) == pytest.approx(expected, abs=5e-5)


@dataclass
class Reader:
    """A draft that is nothing but what it has read of each sequence, and what it has at hand for all."""

    read: dict[Sequence, int] = field(default_factory=dict)
    guess: AtHand | None = None
    runs_passes: bool = True
    first_tokens: int = 2

    def at_hand(self, sequence: Sequence) -> AtHand | None:
        return self.guess

    def num_missing(self, sequence: Sequence) -> int:
        return sequence.num_tokens - self.read.get(sequence, 0)


def adaptive_length(read: dict[Sequence, int] | None = None) -> AdaptiveLength:
    """A controller without an engine; `read`: tokens of each sequence that the draft has read."""
    return AdaptiveLength(PassCosts(), PassCosts(), Reader({} if read is None else read))


def trained(acceptance: float, *, draft_s: float, row_s: float = 0.0, num_decoding: int = 1) -> AdaptiveLength:
    """A controller that has seen many verifications, a target of 1 s + row_s a row, and a draft of draft_s."""
    adaptive = adaptive_length()
    for rows in range(1, 10 * num_decoding):
        adaptive.target_costs.record(rows, 1 + row_s * rows)
    adaptive.draft_costs.record(num_decoding, draft_s)
    random_, other = random.Random(0), a_sequence()
    for _ in range(2000):
        accepted = next((n for n in range(4) if random_.random() > acceptance), 4)
        adaptive.observe(other, 4, accepted)
    adaptive.begin_step([a_sequence() for _ in range(num_decoding)])
    return adaptive


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("draft_s", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("row_s", [0.0, 0.1])
def test_the_length_is_the_best_by_the_formula(acceptance: float, draft_s: float, row_s: float) -> None:
    adaptive = trained(acceptance, draft_s=draft_s, row_s=row_s)
    a = adaptive.acceptance(a_sequence())
    assert a == pytest.approx(acceptance, abs=0.06)
    rates = [expected_tokens(a, k) / (k * draft_s + 1 + row_s * (k + 1)) for k in range(MAX_DRAFT_TOKENS + 1)]
    chosen = adaptive(a_sequence())
    assert rates[chosen] >= max(rates) / (MIN_GAIN + 0.001)
    if chosen:
        assert rates[chosen] == max(rates)


def test_no_draft_when_it_loses() -> None:
    assert trained(0.9, draft_s=1.5)(a_sequence()) == 0  # a slow draft
    assert trained(0.02, draft_s=0.1)(a_sequence()) == 0  # a poor one
    busy = trained(0.7, draft_s=2.0, row_s=0.5, num_decoding=16)  # a target that is busy already
    assert busy(a_sequence()) == 0


def test_more_rows_than_ever_are_tried_for_more_gain() -> None:
    """What they cost is a guess, and to learn it costs a little: a small promise is not enough."""
    right = [1.0] * 8
    for gain in (1.1, 1.2):
        seconds = [1.0, 2 / gain]
        assert best_length(right, seconds) == 1
        assert best_length(right, seconds, num_tried=1) == (1 if gain > UNTRIED_GAIN else 0)
    adaptive = trained(0.9, draft_s=0.2, row_s=0.02, num_decoding=2)
    assert adaptive._num_tried(2, 2) == MAX_DRAFT_TOKENS + 1  # of up to 18 rows
    assert adaptive._num_tried(4, 4) == 1  # four have never drafted


def test_a_draft_without_a_model_is_tried_as_far_as_it_pays() -> None:
    """N-grams: nothing is known of passes that they do not run, which must not keep their drafts at one token."""
    adaptive, sequence = AdaptiveLength(PassCosts(), PassCosts(), Reader(first_tokens=0)), a_sequence()
    adaptive.target_costs.record(1, 1.0)
    lengths = []
    for _ in range(20):
        adaptive.begin_step([sequence])
        lengths.append(adaptive(sequence))
        adaptive.target_costs.record(1 + lengths[-1], 1 + 0.05 * lengths[-1])
        adaptive.observe(sequence, lengths[-1], lengths[-1])
    assert lengths[-1] == MAX_DRAFT_TOKENS, lengths


@dataclass
class Load:
    """Requests that follow one another, and what serving them takes; a target's pass takes 1 s + row_s a row."""

    acceptance: float
    draft_s: float
    row_s: float
    num_decoding: int
    num_prompt: int = 1
    max_tokens: int = 10_000
    slow_steps: int = 0
    """In so many steps at first a pass of the target takes half as long again."""
    num_preparing: int = 0
    """So many passes of the target over each number of rows take twice as long and are not recorded."""

    def target_pass_s(self, num_rows: int, step: int) -> float:
        return (1 + self.row_s * num_rows) * (1.5 if step < self.slow_steps else 1)

    def draft_pass_s(self, num_rows: int) -> float:
        return self.draft_s + self.row_s / 4 * num_rows

    def next_sequence(self, id: int) -> Sequence:
        return a_sequence(1, num_prompt=self.num_prompt, max_tokens=self.max_tokens, id=id)


def served(load: Load, length: int | None) -> float:
    """Tokens a second over 500 simulated steps; `length` None is adaptive, and only then the controller is told."""
    learns = length is None
    read: dict[Sequence, int] = {}
    adaptive, random_ = adaptive_length(read), random.Random(1)
    sequences = [load.next_sequence(number) for number in range(load.num_decoding)]
    num_tokens, seconds = 0, 0.0
    num_passes: Counter[int] = Counter()
    for step in range(500):
        if learns:
            adaptive.begin_step(sequences)
        lengths = [adaptive(sequence) if length is None else length for sequence in sequences]
        for number in range(max(lengths)):
            drafting = [s for s, own in zip(sequences, lengths, strict=True) if own > number]
            rows = len(drafting) if number else sum(map(adaptive.draft.num_missing, drafting))
            if learns:
                adaptive.draft_costs.record(rows, load.draft_pass_s(rows))
            seconds += load.draft_pass_s(rows)
        rows = load.num_decoding + sum(lengths)
        num_passes[rows] += 1
        is_preparing = num_passes[rows] <= load.num_preparing
        if learns and not is_preparing:
            adaptive.target_costs.record(rows, load.target_pass_s(rows, step))
        seconds += load.target_pass_s(rows, step) * (2 if is_preparing else 1)
        for sequence, own in zip(sequences, lengths, strict=True):
            accepted = next((n for n in range(own) if random_.random() > load.acceptance), own)
            if own:
                if learns:
                    adaptive.observe(sequence, own, accepted)
                read[sequence] = sequence.num_tokens + min(accepted, own - 1)
            sequence.tokens += [3] * (accepted + 1)
            num_tokens += accepted + 1
        ended = [number for number, sequence in enumerate(sequences) if sequence.num_tokens_left <= 0]
        for number in ended:
            sequences[number] = load.next_sequence(sequences[number].id + load.num_decoding)
    return num_tokens / seconds


@pytest.mark.parametrize("num_decoding", [1, 8])
@pytest.mark.parametrize("row_s", [0.0, 0.3])
@pytest.mark.parametrize("draft_s", [0.05, 0.4, 1.0])
@pytest.mark.parametrize("acceptance", [0.1, 0.6, 0.9])
def test_it_learns_to_serve_nearly_as_fast_as_the_best_fixed_length(
    acceptance: float, draft_s: float, row_s: float, num_decoding: int
) -> None:
    load = Load(acceptance, draft_s, row_s, num_decoding)
    fixed = [served(load, k) for k in range(MAX_DRAFT_TOKENS + 1)]
    learned = served(load, None)
    assert learned > 0.94 * max(fixed)
    assert learned > 0.95 * fixed[0]  # learning included


@pytest.mark.parametrize("acceptance", [0.8, 0.9, 0.97])
def test_a_draft_that_is_right_and_slow_costs_next_to_nothing(acceptance: float) -> None:
    """As four bits are beside their model at eight requests, where the first passes of a shape are dear."""
    load = Load(acceptance, draft_s=0.85, row_s=0.02, num_decoding=8, num_preparing=2)
    assert served(load, None) > 0.98 * served(load, 0)


@pytest.mark.parametrize(("draft_s", "share"), [(1.5, 0.0025), (0.05, 0.011)])
def test_what_probes_take_of_the_time_is_bounded(draft_s: float, share: float) -> None:
    """Less where drafting would lose with a draft that is always right than where a better one might pay."""
    adaptive, sequence = trained(0.02, draft_s=draft_s), a_sequence()
    num_steps, drafted = 4000, 0
    for _ in range(num_steps):
        adaptive.begin_step([sequence])
        if length := adaptive(sequence):
            drafted += length
            adaptive.observe(sequence, length, 0)
    assert 0 < drafted * draft_s <= share * num_steps


class CountedCosts(PassCosts):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def estimate(self, num_rows: int) -> float | None:
        self.num_asked += 1
        return super().estimate(num_rows)


@pytest.mark.parametrize("num_decoding", [1, 8])
def test_the_host_weighs_a_draft_that_does_not_pay_in_few_steps(num_decoding: int) -> None:
    """And at once, where other sequences decode."""
    costs = CountedCosts()
    adaptive = AdaptiveLength(costs, PassCosts(), Reader())
    for rows in range(1, 10 * num_decoding):
        costs.record(rows, 1 + 0.2 * rows)
    adaptive.draft_costs.record(num_decoding, 1.5)
    for _ in range(200):
        adaptive.observe(a_sequence(), 2, 0)
    sequences = [a_sequence() for _ in range(num_decoding)]
    asked = []
    for _ in range(PROBE_INTERVAL - 1):
        before = costs.num_asked
        adaptive.begin_step(sequences)
        assert not adaptive.is_drafting
        asked.append(costs.num_asked > before)
    assert sum(asked) == PROBE_INTERVAL // KEPT_STEPS
    before = costs.num_asked
    adaptive.begin_step([*sequences[1:], a_sequence()])
    assert costs.num_asked > before


def test_a_probe_is_bought_with_what_its_first_passes_take() -> None:
    """Rows that no pass had yet take far longer at first: then it waits until that is a small share of the time."""
    steps = []
    for most_rows in (9, 12):  # two sequences of eight probe two tokens each: 12 rows
        adaptive = adaptive_length()
        for rows in range(1, most_rows + 1):
            adaptive.target_costs.record(rows, 1.0)
        for rows in (1, 2):
            adaptive.draft_costs.record(rows, 0.5)
        for _ in range(200):
            adaptive.observe(a_sequence(), 2, 0)
        sequences = [a_sequence() for _ in range(8)]
        for step in range(1000):
            adaptive.begin_step(sequences)
            if adaptive.is_drafting:
                steps.append(step)
                break
    late, early = steps
    assert early < 200 <= late - early


def test_a_burst_on_the_machine_does_not_end_drafting() -> None:
    """While it lasts drafting may look dear; the next probe asks what was known before."""
    adaptive, sequence = trained(0.9, draft_s=0.05), a_sequence()
    assert adaptive(sequence)
    for _ in range(SAMPLES):
        adaptive.draft_costs.record(1, 0.05)
    for _ in range(SAMPLES - 1):
        adaptive.draft_costs.record(1, 3.0)
    adaptive.begin_step([sequence])
    assert not adaptive(sequence)
    for _ in range(PROBE_INTERVAL + KEPT_STEPS):
        adaptive.begin_step([sequence])
        if length := adaptive(sequence):
            for _ in range(length):
                adaptive.draft_costs.record(1, 0.05)
            adaptive.observe(sequence, length, length)
    assert adaptive(sequence) > 2


def test_reading_a_prompt_must_be_earned_with_something_over() -> None:
    """As much as the whole of it, reading and drafting, promises over plain steps."""
    adaptive = trained(0.8, draft_s=0.1)
    adaptive.draft_costs.record(100, 5.1)
    gains = {False: 0.0, True: 100.0}
    for num_left in range(1, PLAIN_INTERVAL):
        sequence = a_sequence(1, num_prompt=99, max_tokens=num_left + 1)
        adaptive.begin_step([sequence])
        seconds, reading = adaptive._step_seconds(1, 1), adaptive._catch_up_seconds(sequence)
        rate = max(expected_tokens(adaptive.acceptance(sequence), k) / s for k, s in enumerate(seconds))
        gain = num_left * seconds[0] / (reading + num_left / rate)
        drafts = adaptive(sequence) > 0
        gains[drafts] = min(gains[True], gain) if drafts else max(gains[False], gain)
    assert 1.0 < gains[False] <= READING_GAIN < gains[True] < 1.2


def test_a_draft_reads_no_prompt_while_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it would lose though it were always right, a hundred steps are not enough to probe again."""
    draft = CountingModel(tiny_model(seed=9))
    engine = engine_with_costs(monkeypatch, draft, 1.5)
    engine.add_request("first", [5, 6, 7], greedy(40))
    drain(engine)
    before = draft.num_tokens
    assert before
    for number, prompt in enumerate(random_prompts(6, seed=5, low=40, high=50)):
        engine.add_request(str(number), prompt, greedy(20))
        drain(engine)
    assert draft.num_tokens == before


def test_a_slow_beginning_is_forgotten() -> None:
    """Drafts pay as long as the target's passes are slow, and no longer."""
    load = Load(0.9, draft_s=0.95, row_s=0.02, num_decoding=8, slow_steps=12)
    plain, best = served(load, 0), max(served(load, k) for k in range(1, MAX_DRAFT_TOKENS + 1))
    assert best < 0.95 * plain and served(load, None) > 0.96 * plain


@pytest.mark.parametrize("num_decoding", [1, 8])
@pytest.mark.parametrize("max_tokens", [16, 64, 1000])
@pytest.mark.parametrize("num_prompt", [100, 2000])
@pytest.mark.parametrize("acceptance", [0.6, 0.9])
def test_drafts_are_weighed_against_reading_the_prompt(
    acceptance: float, num_prompt: int, max_tokens: int, num_decoding: int
) -> None:
    load = Load(acceptance, 0.2, 0.02, num_decoding, num_prompt, max_tokens)
    fixed = [served(load, k) for k in range(MAX_DRAFT_TOKENS + 1)]
    assert served(load, None) > 0.94 * max(fixed)


def test_a_sequence_that_is_harder_than_the_rest_drafts_less_where_rows_cost() -> None:
    adaptive = trained(0.8, draft_s=0.05, row_s=0.1, num_decoding=4)
    easy, hard = a_sequence(), a_sequence()
    for _ in range(30):
        adaptive.observe(easy, 4, 4)
        adaptive.observe(hard, 4, 0)
    adaptive.begin_step([easy, a_sequence(), hard, a_sequence()])
    assert adaptive(easy) >= adaptive(a_sequence()) > adaptive(hard)


def test_a_probe_now_and_then_and_recovery() -> None:
    adaptive, sequence = trained(0.02, draft_s=0.1), a_sequence()
    probes = []
    for step in range(1, 1200):
        adaptive.begin_step([sequence])
        if adaptive(sequence):
            probes.append(step)
            adaptive.observe(sequence, 2, 0)
    assert [late - early for early, late in pairwise(probes)] == [128, 256, 512]
    for _ in range(600):  # the text has become easy
        adaptive.begin_step([sequence])
        if adaptive(sequence):
            adaptive.observe(sequence, 2, 2)
    adaptive.begin_step([sequence])
    assert adaptive(sequence) > 2


def test_probes_are_few_in_a_large_batch() -> None:
    adaptive = trained(0.02, draft_s=0.1, num_decoding=32)
    sequences = [a_sequence() for _ in range(32)]
    drafting = 0
    for _ in range(100):
        adaptive.begin_step(sequences)
        lengths = [adaptive(sequence) for sequence in sequences]
        assert sum(lengths) in (0, 4)
        drafting += any(lengths)
    assert drafting == 1


def test_costs_are_interpolated_and_hiccups_ignored() -> None:
    costs = PassCosts()
    assert costs.estimate(4) is None
    costs.record(2, 1.0)
    costs.record(6, 3.0)
    assert [costs.estimate(rows) for rows in (1, 2, 4, 6, 100)] == pytest.approx([0.5, 1.0, 2.0, 3.0, 50.0])
    costs.record(2, 1000.0)
    assert costs.estimate(2) == pytest.approx(1.0)
    costs.record(3, 1000.0)  # the first pass of 3 rows was disturbed: it cannot cost more than 6 rows
    assert costs.estimate(3) == pytest.approx(3.0)
    for _ in range(20):
        costs.record(2, 0.5)
    assert costs.estimate(2) == pytest.approx(0.5)
    for _ in range(20):  # a change that stays is believed
        costs.record(2, 2.0)
    assert costs.estimate(2) == pytest.approx(2.0)


def test_a_rehearsal_that_was_slower_buys_no_drafts() -> None:
    """Passes of one sequence before anybody was served, while the machine did something else: eight sequences take the
    target less. They decode once without drafts, and what that takes counts from then on."""
    adaptive = AdaptiveLength(PassCosts(), PassCosts(), Reader(first_tokens=1))
    for rows in range(1, 10):
        for _ in range(3):
            adaptive.target_costs.record(rows, 1.3 * (1 + 0.02 * rows))
    adaptive.draft_costs.record(1, 0.4)
    adaptive.target_costs.only_rehearsed()
    assert adaptive.target_costs.has_measured(8) and not adaptive.target_costs.has_served(8)
    for _ in range(200):
        adaptive.observe(a_sequence(), 2, 2)
    sequences, steps = [a_sequence() for _ in range(8)], 100
    drafted, taken_s = 0, 0.0
    for _ in range(steps):
        adaptive.begin_step(sequences)
        rows = 8 + sum(adaptive(sequence) for sequence in sequences)
        passes = max(adaptive(sequence) for sequence in sequences)
        for _ in range(passes):
            adaptive.draft_costs.record(8, 0.58)
        adaptive.target_costs.record(rows, 1 + 0.04 * (rows - 8))
        taken_s += passes * 0.58 + 1 + 0.04 * (rows - 8)
        drafted += passes > 0
    assert not drafted and taken_s == pytest.approx(steps)


def engine_with_costs(monkeypatch: pytest.MonkeyPatch, draft: LanguageModel, draft_s: float) -> Engine:
    """An engine whose passes take fixed times: 1 s for the target."""
    engine = make_engine(tiny_model(seed=3), draft)
    for costs, seconds in ((engine.draft_length.target_costs, 1.0), (engine.draft_length.draft_costs, draft_s)):
        record = costs.record
        monkeypatch.setattr(costs, "record", lambda rows, _, record=record, seconds=seconds: record(rows, seconds))
    return engine


def test_an_engine_stops_drafting_with_a_draft_that_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with_costs(monkeypatch, tiny_model(seed=9), 0.3)
    for number, prompt in enumerate(random_prompts(4)):
        engine.add_request(str(number), prompt, greedy(150))
    drain(engine)
    stats = engine.stats()
    assert stats.num_draft_tokens < 0.1 * stats.num_generation_tokens


def test_an_engine_drafts_with_a_cheap_draft_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with_costs(monkeypatch, tiny_model(seed=3), 0.05)
    engine.add_request("r", [5, 6, 7], greedy(120))
    drain(engine)
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 90 and stats.num_steps < 25


class DeviceClock:
    """In place of a CUDA event: each that is recorded is a millisecond after the one before."""

    now_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        DeviceClock.now_ms += 1.0
        self.at_ms = DeviceClock.now_ms

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "DeviceClock") -> float:
        return end.at_ms - self.at_ms


@dataclass
class Launcher:
    has_prepared: bool


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_pass_that_prepares_for_later_ones_is_no_measure_of_them(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that is captured."""
    monkeypatch.setattr(torch.cuda, "Event", DeviceClock)
    costs = PassCosts()
    timer = PassTimer(costs, torch.device(device))
    for rows, has_prepared in ((1, True), (2, False)):
        with timer.measure(rows, Launcher(has_prepared)):
            pass
    assert not costs.has_measured(1) and costs.has_measured(2)
    if device == "cuda":
        assert costs.estimate(2) == pytest.approx(0.001)
