"""One run per folder: of two that start together one wins, and a killed one leaves no stale lock."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import RunLockedError
from pipeline.run_folder import RunFolder
from tests.pipeline.tiny_run import ROOT

RACE = """
import os, sys
from pathlib import Path
from pipeline.errors import RunLockedError
from pipeline.run_folder import RunFolder

WON, LOST = b"w", b"l"

def contend(folder, start, answer, end):
    os.read(start, 1)
    try:
        with RunFolder(folder).locked():
            os.write(answer, WON)
            os.read(end, 1)  # holds the lock until the other one has tried
    except RunLockedError:
        os.write(answer, LOST)

for number in range(50):
    (start, begin), (answers, answer), (end, finish) = os.pipe(), os.pipe(), os.pipe()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            contend(Path(sys.argv[1]) / str(number), start, answer, end)
            os._exit(0)
        children.append(child)
    os.write(begin, b"go")
    told = sorted(os.read(answers, 1) for _ in children)
    os.write(finish, b"ok")
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(*(word.decode() for word in told), *codes)
    for pipe in (start, begin, answers, answer, end, finish):
        os.close(pipe)
"""
HOLD = """
import sys, time
from pathlib import Path
from pipeline.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(600)
"""


def test_of_two_that_race_one_wins(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines() == ["l w 0 0"] * 50


def test_a_killed_holder_leaves_no_stale_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunLockedError, match=f"in use by process {holder.pid}"), RunFolder(tmp_path).locked():
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with RunFolder(tmp_path).locked():
        pass


def test_a_held_run_changes_nothing(tmp_path: Path) -> None:
    from tests.pipeline.tiny_run import TinyRun

    tiny = TinyRun.prepare(tmp_path)
    with tiny.folder.locked(), pytest.raises(RunLockedError):
        tiny.run()
    assert [path.name for path in tiny.folder.path.iterdir()] == ["lock"]
