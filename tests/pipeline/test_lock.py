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
import os, sys, time
from pathlib import Path
from pipeline.errors import RunLockedError
from pipeline.run_folder import RunFolder

def contend(folder, start):
    os.read(start, 1)
    try:
        with RunFolder(folder).locked():
            time.sleep(0.05)
            return 0
    except RunLockedError:
        return 3

for number in range(50):
    read_end, write_end = os.pipe()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            os._exit(contend(Path(sys.argv[1]) / str(number), read_end))
        children.append(child)
    os.write(write_end, b"go")
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    print(*codes)
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
        [sys.executable, "-c", RACE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["0 3"] * 50


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
