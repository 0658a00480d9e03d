"""Which variants of kernels calls would compile: run as `python -m tests.compilations VOCABULARY`, no GPU needed.

Triton compiles a kernel anew for other constexprs, other types, and other classes of arguments: an integer that is 1,
one that 16 divides, one beyond 32 bits, a pointer that 16 divides. `note_instead_of_launching` keeps the key of each
launch as Triton computes it, and compiles nothing; so a day of batches takes seconds. It needs a process of its own:
where Triton interprets, there are no keys. Prints a line of JSON: the number of variants by kernel.

Memory is uncommitted until somebody writes it, and nobody does: large shapes cost nothing.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels.sampling.logit_adjustments import RequestState, adjust_scores
from kernels.sampling.ngram import find_ngrams
from kernels.sampling.random import Purpose, Stream, exponential
from kernels.sampling.sample import Filters, adjusted_probabilities, race, sample_tokens
from kernels.sampling.token_logprobs import token_logprobs
from kernels.sampling.verification import verify
from tests.native_compile import compile_instead_of_launching

Variants = defaultdict[str, set[str]]

SLOTS, MOST_DRAFTS, TEXT = 256, 8, 1024


def note_instead_of_launching(capability: int = 90) -> Variants:
    """For the rest of the process. Returns where the keys of launches are collected, by kernel."""
    compile_instead_of_launching(capability)
    variants: Variants = defaultdict(set)

    def at_grid(self: JITFunction, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            binder = self.device_caches[driver.active.get_current_device()][-1]
            _, specialization, launch_options = binder(*args, **options)
            variants[f"{self.fn.__module__}.{self.fn.__name__}"].add(f"{specialization} {launch_options}")

        return launch

    JITFunction.__getitem__ = at_grid
    return variants


def part(rows: int, dtype: torch.dtype, first: int) -> Tensor:
    """[rows], as a row of a table or as part of a longer one: at any alignment."""
    return torch.empty(first + rows, dtype=dtype)[first:]


def sample_batch(rows: int, vocabulary: int, dtype: torch.dtype, first: int) -> None:
    """What a step launches for rows without drafts, with and without what its requests may ask for."""
    stream = Stream(part(rows, torch.int64, first), part(rows, torch.int64, first), part(rows, torch.int64, first))
    floats = [part(rows, torch.float32, first) for _ in range(3)]
    filters = Filters(floats[0], part(rows, torch.int64, first), *floats[1:])
    logits = torch.empty(rows, vocabulary, dtype=dtype)
    tokens = sample_tokens(logits, filters, stream)
    for num_top in (0, 1, 5, 16, 20):
        token_logprobs(logits, tokens, num_top)
    race(adjusted_probabilities(logits, **filters._asdict()), stream, Purpose.DRAFT)
    exponential(stream, vocabulary - first, Purpose.TARGET)


def adjust_batch(rows: int, vocabulary: int, dtype: torch.dtype, first: int) -> None:
    """Biases in lists of every length that the batch state makes, behind every number of drafts."""
    numbers = part(rows, torch.int64, first)
    penalties = (part(SLOTS, torch.float32, first) for _ in range(3))
    counts, width = torch.empty(SLOTS, vocabulary, dtype=torch.int32), 2 ** (rows % 9)
    biases = (torch.empty(SLOTS, width, dtype=kind) for kind in (torch.int32, torch.float32, torch.int32))
    state, logits = RequestState(counts, *penalties, *biases), torch.empty(rows, vocabulary, dtype=dtype)
    for n in range(MOST_DRAFTS + 1):
        drafted = torch.empty(rows, n, dtype=torch.int64) if n else None
        adjust_scores(logits, state, slots=numbers, positions=numbers, drafted=drafted)


def verify_batch(rows: int, vocabulary: int, first: int) -> None:
    """Chains and trees of every number of drafts, with and without distributions; drafts from the text."""
    stream = Stream(*(part(rows, torch.int64, first) for _ in range(3)))
    numbers, text = part(rows, torch.int32, first), torch.empty(SLOTS, TEXT + MOST_DRAFTS + 1, dtype=torch.int32)
    for n in range(1, MOST_DRAFTS + 1):
        tokens, p = torch.empty(rows, n, dtype=torch.int64), torch.empty(rows, n + 1, vocabulary)
        for draft_p in (None, torch.empty(rows, n, vocabulary)):
            for parents in (None, part(rows * n, torch.int32, first).view(rows, n)):
                verify(p, draft_p, tokens, counts=numbers, lengths=numbers, stream=stream, parents=parents)
        find_ngrams(text, numbers, n, rows=stream.seeds)


def sampling(vocabulary: int) -> None:
    """A day of batches of all sizes, by what their requests may ask for, as tensors may lie in memory."""
    for rows in range(1, SLOTS + 1):
        first = rows % 5
        for dtype in (torch.bfloat16, torch.float32):
            sample_batch(rows, vocabulary, dtype, first)
        adjust_batch(rows, vocabulary, torch.bfloat16, first)
        verify_batch(rows, vocabulary, first)


if __name__ == "__main__":
    noted = note_instead_of_launching()
    sampling(int(sys.argv[1]))
    print(json.dumps({name: len(keys) for name, keys in noted.items()}))
