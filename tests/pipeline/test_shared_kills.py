"""Stages that two processes train, killed or asked to stop at random moments: the same command, the same bytes.

In full only: twenty signals of each kind. A few of them are tried in test_sharded.py, by one process in test_kill.py.
"""

import random
import signal
import time
from pathlib import Path

import pytest

from pipeline.cli import main
from tests import trials
from tests.forked import end_of, ranks
from tests.pipeline.test_sharded import IN_SHARDS_OF_TWO, STAGES, arguments, environment, forked, home

__all__ = ["home"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not trials.in_full, reason="tried with --all-trials")]

SIGNALS = 20
LIVES = 4
"""Signals to one run before it may finish."""
GRACE_S = 30.0
WRITTEN = ("metrics.jsonl", "model/model.safetensors", "model/adapter_model.safetensors")


def written(folder: Path, kind: str) -> dict[str, bytes]:
    files = [folder / f"01-{kind}" / name for name in WRITTEN]
    return {path.name: path.read_bytes() for path in files if path.exists()}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("kind", ["distill", "qlora", "gqa", "mod"])
def test_signals_at_random_moments_change_nothing(
    kind: str, number: signal.Signals, home: Path, tmp_path: Path
) -> None:
    """SIGKILL of either process, SIGTERM to both, as a launcher passes it on."""
    stage = {kind: STAGES[kind] | {"checkpoint_every_s": 0} | ({"model": "teacher"} if kind == "qlora" else {})}
    variables = environment(*IN_SHARDS_OF_TWO)
    for name in ("first", "straight"):  # the first one also starts what others are forked from
        begun = time.monotonic()
        forked(arguments(home, str(tmp_path / name), stage), 2, variables)
    seconds, expected = time.monotonic() - begun, written(tmp_path / "straight", kind)
    assert len(expected) == 2
    moments, sent = random.Random(0), 0
    for attempt in range(4 * SIGNALS):  # a run may be faster than the one that was timed
        if sent >= SIGNALS:
            break
        folder = tmp_path / str(attempt)
        words, log = arguments(home, str(folder), stage), tmp_path / f"log-{attempt}"
        for _ in range(LIVES):
            with ranks(2, main, words, log=log, environment=variables) as started:
                time.sleep(moments.uniform(0.02, 1) * seconds)
                signalled = [moments.choice(started)] if number == signal.SIGKILL else started
                for process in signalled:
                    process.kill() if number == signal.SIGKILL else process.terminate()
                codes = end_of(started, GRACE_S)
            if not any(codes):
                break
            if number == signal.SIGTERM:  # before it is caught, nothing has begun, and behind the end all is written
                assert set(codes) <= {0, 130, -signal.SIGTERM}, f"{codes}: {log.read_text()[-3000:]}"
            sent += 1
        forked(words, 2, variables)
        assert written(folder, kind) == expected, f"attempt {attempt}"
    assert sent >= SIGNALS
