"""No batch, draft or setting makes a kernel compile anew; no GPU is needed to know."""

import json
import os
import subprocess
import sys

import pytest

from tests.interpreted import needs_triton

pytestmark = needs_triton

VARIANTS = {
    "_thresholds._extremes_kernel": 2,
    "_thresholds._narrow_kernel": 4,
    "sample._race_kernel": 2,
    "sample._kept_mass_kernel": 2,
    "sample._probabilities_kernel": 2,
    "token_logprobs._logprobs_kernel": 2,
    "sample._draw_kernel": 1,
    "random._fill_kernel": 1,
    "logit_adjustments._adjust_kernel": 1,
    "verification._walk_kernel": 4,
    "verification._next_token_kernel": 4,
    "ngram._ngram_kernel": 1,
}
"""One for each dtype of the logits; thresholds one for each filter; verification with and without distributions of the
draft and parents of nodes."""


@pytest.mark.parametrize("vocabulary", [128_256, 49_152])
def test_sampling_kernels_have_one_variant_for_all_batches(vocabulary: int) -> None:
    """1 to 256 rows, 1 to 8 drafts, any penalties, any number of log-probabilities, any alignment of small tensors."""
    command = [sys.executable, "-m", "tests.compilations", str(vocabulary)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = json.loads(done.stdout)
    assert {".".join(name.split(".")[-2:]): count for name, count in counted.items()} == VARIANTS
