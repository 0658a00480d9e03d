"""The suite of small tasks: what passes, what the sandbox refuses, and how counts become shares."""

import ast
import os
import re
import socket
import time
from pathlib import Path

import msgspec
import pytest
from scipy.stats import binomtest

from pipeline.cli import main
from pipeline.measure.gates import wilson
from pipeline.measure.suite.ask import Marked, ask, prompts
from pipeline.measure.suite.rules import RULES, follows, is_answer, last_number, loops, mentions_any
from pipeline.measure.suite.sandbox import passes
from pipeline.measure.suite.tasks import TASKS, code_in, prompts_of
from pipeline.stages.base import read_result
from pipeline.stages.evaluate.report import ANSWERS_NAME, scores_of
from tests.pipeline.tiny_run import TinyRun, write_teacher

PROSE = (
    "The capital of France is Paris. It lies on the Seine, and it has been the seat of the kings and of the republic "
    "for most of the time since the year 987, when Hugh"
)
SUM = "def total(numbers):\n    return sum(numbers)"


@pytest.mark.parametrize(("passed", "total"), [(0, 44), (1, 2), (20, 45), (44, 45), (45, 45)])
def test_an_interval_is_that_of_wilson(passed: int, total: int) -> None:
    expected = binomtest(passed, total).proportion_ci(confidence_level=0.95, method="wilson")
    assert wilson(passed, total) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_scores_count_by_model_and_task() -> None:
    marked = [("a", "facts", True), ("a", "facts", False), ("a", "code", False), ("b", "facts", False)]
    counts = {(score.model, score.task): (score.passed, score.prompts) for score in scores_of(marked)}
    assert counts == {("a", "facts"): (1, 2), ("a", "code"): (0, 1), ("b", "facts"): (0, 1)}


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "finished", "expected"),
    [
        ("Paris.", True, True),
        (PROSE, False, True),
        ("", True, False),
        ("\n" * 9, True, False),
        ("#\n" * 24, False, False),
        ("# " * 24, True, False),
        ("It is Berlin.", True, False),
        ("Paris " * 20, False, False),
        ("The capital of France is Paris. " * 4, False, False),
        ("Paris aaaaaaaaaaaaaaaa", True, False),
        ("Paris rem Erem but similar buterately Linux Rem pygame Nou By Remcomp cl", False, False),
        ("La capitale de la France, Paris, se trouve sur la Seine, au nord du pays, et compte", False, False),
        ("\n".join(f"{number}. In Paris a sink" for number in range(9)), False, False),
    ],
)
def test_what_counts_as_an_answer(text: str, finished: bool, expected: bool) -> None:
    assert is_answer(text, ["Paris", "France"], finished=finished) is expected


def test_code_and_tables_do_not_loop() -> None:
    assert not loops(SUM) and not loops(PROSE)
    assert not loops("| a | b | c | d |\n| --- | --- | --- | --- |\n| 1 | 2 | 3 | 4 |\n" + " " * 40 + "x")
    assert loops("compcompcompcompcompcomp")


@pytest.mark.parametrize(
    ("rules", "keeps", "breaks"),
    [
        ({"words": [1, 1]}, "Rome.", "It is Rome."),
        ({"words": [3, 20]}, "A river's a well-known thing.", "Water."),
        ({"sentences": [2, 2]}, "A cat sleeps. It costs 3.50 a day!", "A cat sleeps."),
        ({"sentences": [1, 1]}, 'She said "no."', "One. Two."),
        ({"items": [3, 3]}, "Here are three:\n\n1. Apple\n2. Pear\n3. Plum", "- Apple\n- Pear"),
        ({"items": [3, 3]}, "Apple\nPear\n\nPlum", "Apple, pear, plum"),
        ({"one_of": ["yes", "no"]}, "Yes!", "Yes, it is."),
        ({"starts_with": "in short"}, "In short, a clock tells the time.", "A clock, in short."),
        ({"ends_with": "?"}, 'He asked: "Is there bread?"', "Is there bread? Yes."),
        ({"contains": ["moon", "dog"]}, "The dog saw the Moon.", "The dogs saw the moon."),
        ({"avoids": ["dog", "dogs"]}, "It barks and is dogged.", "A dog barks."),
        ({"spells": "HOUSE"}, "It is HOUSE.", "It is house."),
        ({"lower_case": True}, "all of it, 3 times", "Not all of it"),
        ({"upper_case": True}, "GRASS AND WATER.", "Grass"),
        ({"contains": ["a"], "words": [1, 2]}, "a word", "a word too many"),
    ],
)
def test_each_rule_tells_texts_apart(rules: dict[str, object], keeps: str, breaks: str) -> None:
    assert follows(keeps, rules) and not follows(breaks, rules)


def test_an_answer_that_loops_follows_nothing() -> None:
    assert not follows("the " * 30, {"lower_case": True})


@pytest.mark.parametrize(
    ("text", "number"),
    [("2 + 3 = 5", 5), ("It is 1,200.", 1200), ("12-5", 5), ("= -4.5", -4.5), ("none", None)],
)
def test_the_last_number_is_the_result(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_facts_are_whole_words() -> None:
    assert mentions_any("It's the Sun.", ["sun"]) and not mentions_any("Sunday", ["sun"])
    assert mentions_any("H2O, or water", ["H2O"]) and mentions_any("the gas CO₂", ["CO₂"])


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_many_and_no_empty_or_hashed_answer_passes(name: str) -> None:
    entries = prompts_of(name)
    prompts = [entry["prompt"] for entry in entries]
    assert len(prompts) >= 40 and len(set(prompts)) == len(prompts)
    for entry in entries[:: 8 if name == "code" else 1]:
        for text in ("", "#\n" * 24, "I do not know."):
            assert not TASKS[name].passes(entry, text, False) or (name, text[:1]) == ("instructions", "I"), entry


def test_what_answers_are_compared_with_can_be_met() -> None:
    for entry in prompts_of("instructions"):
        assert entry["rules"] and set(entry["rules"]) <= set(RULES)
    for entry in prompts_of("facts"):
        assert all(TASKS["facts"].passes(entry, f"It is {word}.", True) for word in entry["accepted"])
    for entry in prompts_of("arithmetic"):
        assert TASKS["arithmetic"].passes(entry, f"That makes {entry['answer']}.", True)
    for entry in prompts_of("answers"):
        assert all(TASKS["answers"].passes(entry, f"About {word}.", True) for word in entry["mentions"])
    for entry in prompts_of("code"):
        called = re.search(r"`(\w+)\(", entry["prompt"])
        assert called and all(called[1] in ast.unparse(ast.parse(test, mode="eval")) for test in entry["tests"])


def test_code_is_found_in_an_answer() -> None:
    assert code_in(f"Here it is:\n\n```python\n{SUM}\n```\nIt sums.") == SUM + "\n"
    assert code_in(f"```\n{SUM}") == SUM and code_in(SUM) == SUM
    (entry,) = [entry for entry in prompts_of("code") if "`total(" in entry["prompt"]]
    assert TASKS["code"].passes(entry, f"```python\n{SUM}\n```", True)
    assert not TASKS["code"].passes(entry, f"```python\n{SUM} + 1\n```", True)


# --- the sandbox ------------------------------------------------------------------------------------------------------


def test_ordinary_programs_pass() -> None:
    code = (
        "import collections, dataclasses, functools, itertools, json, math, random, re\n"
        "from typing import List, NamedTuple\n"
        "class Point(NamedTuple):\n    x: int\n"
        "@dataclasses.dataclass\nclass Pair:\n    a: int = 1\n"
        "open('notes', 'w').write('kept')\nprint('x' * 1000)\n"
        "def f():\n    return Point(2).x + Pair().a + len(open('notes').read()) + math.floor(random.random())\n"
    )
    assert passes(code, ["f() == 7"]) and not passes(code, ["f() == 7", "f() == 8"])


@pytest.mark.parametrize(
    "code",
    [
        "x = 1 +",
        "raise ValueError",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "x = bytearray(2**31)",
        "import os; os.fork()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.environ['HOME']",
        "import os; os.mkdir('/tmp/potstill-escaped')",
        "import os; os.open('x', os.O_WRONLY | os.O_CREAT)",
        "import subprocess; subprocess.run(['true'])",
        "import ctypes",
        "import torch",
        "open('/etc/passwd')",
        "open('../escaped', 'w')",
        "import os; os.symlink('/etc', 'etc')",
        "open('big', 'wb').write(bytes(2**22))",
        "print('x' * 2**22)",
    ],
)
def test_what_goes_wrong_or_reaches_outside_fails(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    assert passes("x = 1", ["x == 1"]) and not passes(code, ["True"])


def test_there_is_no_network() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.1)
        connect = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        assert not passes(connect, ["True"])
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "import signal\nwhile 1: pass"])
def test_a_program_that_does_not_end_is_ended(code: str) -> None:
    started = time.monotonic()
    assert not passes(code, ["True"], cpu_s=1)
    assert time.monotonic() - started < 10


def test_nothing_is_left_when_the_caller_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def interrupted(pid: int, *, within_s: float) -> None:
        started.append(pid)
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.measure.suite.sandbox._let_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        passes("while True: pass", ["True"])
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


# --- asking -----------------------------------------------------------------------------------------------------------


def test_a_stage_puts_the_suite_to_both_models(copied_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(copied_run.arguments("evaluate.suite=[facts, code]", "evaluate.speed.batch_sizes=[]")) == 0
    folder = copied_run.folder.path / "02-evaluate"
    result = read_result(folder)
    assert result is not None
    found = [(score.model, score.task, score.prompts) for score in result.details.suite]
    sizes = {name: len(prompts_of(name)) for name in ("facts", "code")}
    assert found == [(model, name, sizes[name]) for model in ("teacher", "student") for name in ("facts", "code")]
    answers = msgspec.json.decode((folder / ANSWERS_NAME).read_bytes(), type=list[Marked])
    assert len(answers) == 2 * sum(sizes.values()) and {one.model for one in answers} == {"teacher", "student"}
    shown, page = capsys.readouterr().out, copied_run.folder.report.read_text()
    for text in ("Suite", f"0 of {sizes['code']}, 0 – 8 %", "a simple fact"):
        assert text in shown and text in page


def test_an_unknown_task_is_one_sentence(copied_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(copied_run.arguments("evaluate.suite=[fact]")) == 2
    assert "suite is 'fact'; it can be answers" in capsys.readouterr().err


def test_a_model_without_a_template_is_asked_plainly(tmp_path: Path) -> None:
    folder = write_teacher(tmp_path / "teacher")
    settings = folder / "tokenizer_config.json"
    settings.write_text('{"eos_token": "<|im_end|>"}')
    marked = ask(folder, prompts(["arithmetic"]), label="plain")
    assert len(marked) == len(prompts_of("arithmetic")) and all(one.model == "plain" for one in marked)
