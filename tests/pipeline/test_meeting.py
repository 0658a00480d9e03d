"""Processes that do not come together, or fail: one sentence, once, and the exit code of all of them.

Started as torchrun starts them, without torchrun; who is away sleeps.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from pipeline import meeting, shared_exit
from pipeline.cli import main
from pipeline.errors import UserError
from pipeline.meeting import Address, difference, leaves, timeout_s
from pipeline.processes import Processes
from tests.forked import ranks
from tests.pipeline.tiny_run import RECIPE, write_teacher, write_text

HOUR_S = 3600
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
QUICKLY, PATIENTLY = (ON_CPU | {meeting.TIMEOUT_VARIABLE: seconds} for seconds in ("2", "30"))


def away(absent: int, words: Sequence[str]) -> int:
    """The command in all processes but one, which never comes."""
    if os.environ["RANK"] == str(absent):
        time.sleep(HOUR_S)
    os.environ["LOCAL_RANK"] = "0"  # the only one of its machine
    return main(words)


def with_other_torch(words: Sequence[str]) -> int:
    """The command, beside processes with the numbers 1 and 2 that have another torch."""
    found = meeting.versions()
    if os.environ["RANK"] in ("1", "2"):
        found["torch"] = "2.0.1"
    with mock.patch.object(meeting, "versions", lambda: found):
        return main(words)


def with_more_words(*of_each: Sequence[str]) -> int:
    """The command, with other words in each process."""
    return main(of_each[int(os.environ["RANK"])])


def with_a_death(words: Sequence[str]) -> int:
    """The command, whose second process is killed while the first waits for it."""

    def run_recipe(*_: object, processes: Processes, **__: object) -> None:
        processes.wait()
        if processes.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        processes.wait()

    with mock.patch("pipeline.run.run_recipe", run_recipe):
        return main(words)


def with_a_group_that_waits(words: Sequence[str]) -> int:
    """The command, whose main process is interrupted, and then cannot leave the others."""

    def run_recipe(*_: object, processes: Processes, **__: object) -> None:
        if processes.is_main:
            raise KeyboardInterrupt
        time.sleep(HOUR_S)

    waits = mock.patch.object(Processes, "close", lambda _: time.sleep(HOUR_S))
    with mock.patch("pipeline.run.run_recipe", run_recipe), waits, mock.patch.object(shared_exit, "LEAVE_S", 0.5):
        return main(words)


def ended(count: int, target: object, *arguments: object, folder: Path, variables: dict[str, str]) -> tuple[list, str]:
    """Exit codes, None of who is still there, and what was said."""
    log = folder / "log"
    with ranks(count, target, *arguments, log=log, environment=variables) as processes:  # type: ignore[arg-type]
        end = time.monotonic() + 60
        while time.monotonic() < end and sum(process.exitcode is None for process in processes) > (target is away):
            time.sleep(0.02)
        codes = [process.exitcode for process in processes]
    return codes, log.read_text()


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    write_teacher(tmp_path / "teacher")
    write_text(tmp_path / "text")
    models = [f"models.teacher.from={tmp_path / 'teacher'}", f"data.text.source={tmp_path / 'text'}"]
    return ["run", str(RECIPE), *models, "--folder", str(tmp_path / "run"), "--cache", str(tmp_path / "cache")]


def test_who_is_away_is_named_after_a_while(words: list[str], tmp_path: Path) -> None:
    """By the main process, which waits; or by one of a machine that cannot reach the main process."""
    codes, said = ended(3, away, 1, words, folder=tmp_path, variables=QUICKLY)
    assert codes == [1, None, 1]
    waits, *_, end = said.splitlines()
    assert waits.startswith("potstill: waits for process 1 of 3 at 127.0.0.1:") and waits.endswith(" s left")
    assert "2 of 3 processes came to 127.0.0.1:" in end and "process 1 did not" in end
    assert said.count("start the same command") == 1

    (tmp_path / "log").unlink()
    codes, said = ended(2, away, 0, words, folder=tmp_path, variables=QUICKLY)
    assert codes == [None, 1]
    waits, *_, end = said.splitlines()
    assert waits.startswith("potstill: waits for the main process at 127.0.0.1:") and "(Connection refused)" in waits
    assert "cannot reach the main process at 127.0.0.1:" in end and said.count("start the same command") == 1
    assert not (tmp_path / "run").exists()


def test_other_versions_and_other_recipes_end_all(words: list[str], tmp_path: Path) -> None:
    codes, said = ended(4, with_other_torch, words, folder=tmp_path, variables=PATIENTLY)
    assert codes == [2] * 4
    assert said.count("potstill:") == 1 and "processes 1–2 on " in said
    assert f" with torch 2.0.1 instead of {meeting.versions()['torch']}." in said

    (tmp_path / "log").unlink()
    more = [*words, "name=other"]
    codes, said = ended(2, with_more_words, words, more, folder=tmp_path, variables=PATIENTLY)
    assert codes == [2, 2]
    assert said.count("potstill:") == 1 and "with recipe.name other instead of tiny." in said


def test_a_mistake_is_told_once(words: list[str], tmp_path: Path) -> None:
    """One that all find, one that the main process finds while another waits for it, one that another finds alone."""
    told = {
        "dp_shard_size asks for shards over 3 processes": [[*words, "distill.dp_shard_size=3"]] * 2,
        "There is no model at": [[*words, f"models.teacher.from={tmp_path / 'nowhere'}"]] * 2,
        "process 1 on ": [words, ["run", str(tmp_path / "nowhere.yaml"), *words[2:]]],
        "every process of the launcher would do the same": [["serve", "model"]] * 2,
    }
    for sentence, each in told.items():
        codes, said = ended(
            2, with_more_words, *each, folder=tmp_path, variables=PATIENTLY | {"TORCHELASTIC_RUN_ID": "1"}
        )
        assert codes == [2, 2], said
        assert said.count("potstill:") == 1 and sentence in said and "Traceback" not in said
        (tmp_path / "log").unlink()


def test_a_process_that_is_killed_ends_the_others_with_a_sentence(words: list[str], tmp_path: Path) -> None:
    codes, said = ended(2, with_a_death, words, folder=tmp_path, variables=PATIENTLY)
    assert codes == [1, -signal.SIGKILL]
    assert said.count("potstill: the connection to another process is broken") == 1 and "Traceback" not in said


def test_who_has_failed_waits_for_no_library_that_waits_for_others(words: list[str], tmp_path: Path) -> None:
    codes, said = ended(2, with_a_group_that_waits, words, folder=tmp_path, variables=PATIENTLY)
    assert codes == [130, 130]
    assert said.count("potstill: interrupted") == 1


def test_differences_are_told_by_machine() -> None:
    ours = {"torch": "2", "python": "3.11"}
    assert difference([("a", ours), ("b", dict(ours))]) is None
    lacks = difference([("a", ours), ("a", ours), ("b", {"python": "3.12"}), ("b", {"python": "3.12"})])
    assert lacks is not None
    assert lacks.endswith("there is processes 2–3 on b with torch none instead of 2, python 3.12 instead of 3.11")
    many = {str(number): "0" for number in range(9)}
    assert "5 more" in str(difference([("a", {}), ("b", many)]))


def test_a_nest_has_leaves() -> None:
    assert dict(leaves({"a": [{"b": 1}, 2], "c": None}, "x")) == {"x.a.0.b": "1", "x.a.1": "2", "x.c": "None"}


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf", ""])
def test_a_timeout_is_a_number_of_seconds(given: str) -> None:
    with pytest.raises(UserError, match="POTSTILL_MEETING_TIMEOUT_S is a number of seconds"):
        timeout_s({meeting.TIMEOUT_VARIABLE: given})
    assert timeout_s({}) == meeting.TIMEOUT_S


@pytest.mark.parametrize("port", ["", "http", "0", "70000"])
def test_who_has_no_launcher_has_nowhere_to_meet(port: str) -> None:
    with pytest.raises(UserError, match="`accelerate launch` or torchrun"):
        Address.given({"MASTER_ADDR": "localhost", "MASTER_PORT": port})
