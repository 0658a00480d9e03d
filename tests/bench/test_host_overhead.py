"""A replayed step asks little of the host, whatever the model's layers; bounds leave room for a busy machine.

In a process of its own: where Triton interprets, there are no launches to count.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json
from bench.host_overhead import LAYERS, measure, measure_pair
replayed = {batch: measure(batch, captures=True) for batch in (1, 256)}
launched = measure(1, captures=False)
pair = measure_pair(16, captures=True)
print(json.dumps({"layers": LAYERS, "replayed": replayed, "launched": launched, "pair": pair}))
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("batch", "most_microseconds"), [("1", 150), ("256", 300)])
def test_a_replayed_step_is_one_upload_and_little_time(
    measured: dict[str, Any], batch: str, most_microseconds: float
) -> None:
    replayed = measured["replayed"][batch]
    assert replayed["launches"] == 0 and replayed["uploads"] <= 3
    assert replayed["microseconds"] < 2 * most_microseconds


def test_a_step_of_a_pair_uploads_for_the_draft_once_and_for_the_target_once(measured: dict[str, Any]) -> None:
    assert measured["pair"]["uploads"] <= 3 and measured["pair"]["launches"] == 0


def test_without_graphs_every_layer_is_launched(measured: dict[str, Any]) -> None:
    """Norms, rotation, attention and gate: what is counted is there."""
    assert measured["launched"]["launches"] >= 5 * measured["layers"]
