"""The plugin that keeps results of tests on machines that are lent for minutes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_results import results_in

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
from pathlib import Path

import pytest

import tests.gpu_results

tests.gpu_results.gpu_is_lost = lambda: True


@pytest.mark.parametrize("number", range(6))
def test_of(number):
    with open(Path(__file__).with_name("ran"), "a") as ran:
        ran.write(f"{number}\\n")
    assert number != 2 or Path(__file__).with_name("mended").exists()
"""


@pytest.mark.parametrize("processes", [(), ("-n", "1")])
def test_what_has_passed_is_not_run_again_and_a_lost_gpu_takes_nothing_with_it(
    processes: tuple[str, ...], tmp_path: Path
) -> None:
    path, results = tmp_path / "test_some.py", tmp_path / "results.jsonl"
    path.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-p", "tests.gpu_results", "--results", str(results)]

    def run() -> tuple[list[str], dict[str, int]]:
        (tmp_path / "ran").unlink(missing_ok=True)
        subprocess.run([*command, *processes, f"--rootdir={tmp_path}", "-p", "no:cacheprovider"], cwd=ROOT)
        found = results_in(results)
        assert found.pop("")["count"] == 6
        outcomes = [one["outcome"] for one in found.values()]
        return (tmp_path / "ran").read_text().split(), {name: outcomes.count(name) for name in outcomes}

    _, outcomes = run()
    assert outcomes["failed"] == 1 and outcomes["passed"] >= 4
    (tmp_path / "mended").touch()
    ran, outcomes = run()
    assert "2" in ran and len(ran) <= 2 and outcomes == {"passed": 6}
