"""What a soak says of what it saw: nothing of processes that are flat, and a leak of any kind by its name."""

from dataclasses import replace

import pytest

from tests.soak import Held, Sample, growth, leaks

MINUTES = 30.0
TIMES = [minute / 30 for minute in range(int(30 * MINUTES))]


def held(minutes: float, rate: float, kind: str) -> Held:
    """Of a process that leaks so much a minute of one kind, and breathes as it works."""
    breath = int(minutes * 30) % 5
    working = Held(300.0 + breath / 10, 20, 9)
    grown = round(rate * minutes, 3)
    return replace(working, **{kind: getattr(working, kind) + (grown if kind == "mib" else int(grown))})


@pytest.mark.parametrize("kind", ["mib", "files", "threads"])
@pytest.mark.parametrize("leaking", ["http", "engine"])
def test_a_leak_is_named_and_a_flat_process_is_not(kind: str, leaking: str) -> None:
    def samples(rate: float) -> list[Sample]:
        flat = Sample(0.0, Held(300.0, 20, 9), Held(300.0, 20, 9))
        return [replace(flat, minutes=at, **{leaking: held(at, rate, kind)}) for at in TIMES]

    def found(rate: float) -> list[str]:
        seen = samples(rate)
        return leaks(growth(seen[0], seen, replace(seen[-1], minutes=MINUTES)))

    assert found(0.0) == []
    assert found(1.5) == [f"{'memory' if kind == 'mib' else kind} of the {leaking} process"]
