"""Drafts from the text: the kernel and its CPU form say what the reference says."""

import numpy as np
import pytest
import torch

from kernels.sampling.ngram import find_ngrams, find_ngrams_reference


def texts(count: int, alphabet: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens [count, longest], and lengths; what lies beyond them would match too."""
    generator = np.random.default_rng(alphabet)
    tokens = torch.from_numpy(generator.integers(0, alphabet, (count, longest)))
    return tokens, torch.from_numpy(generator.integers(0, longest + 1, count))


def expected(tokens: torch.Tensor, lengths: torch.Tensor, k: int, **options: int) -> list[list[int]]:
    pairs = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [find_ngrams_reference(row[:length], k, **options) for row, length in pairs]


def trimmed(drafts: torch.Tensor, counts: torch.Tensor) -> list[list[int]]:
    assert drafts.dtype == torch.int64 and counts.dtype == torch.int32
    for row, count in zip(drafts.tolist(), counts.tolist(), strict=True):
        assert set(row[count:]) <= {-1}
    return [row[:count] for row, count in zip(drafts.tolist(), counts.tolist(), strict=True)]


def test_the_latest_occurrence_is_quoted() -> None:
    assert find_ngrams_reference([1, 2, 3, 9, 1, 2, 3, 7, 8, 5, 1, 2, 3], 2) == [7, 8]
    assert find_ngrams_reference([4, 1, 2, 6, 3, 2], 3) == [6, 3, 2]
    assert find_ngrams_reference([1, 2, 3], 3) == find_ngrams_reference([5], 3) == []
    assert find_ngrams_reference([5, 5, 5], 4) == [5]


@pytest.mark.parametrize("options", [{}, {"max_ngram": 1}, {"max_ngram": 4, "searched": 9}], ids=str)
@pytest.mark.parametrize(("longest", "alphabet", "k"), [(40, 2, 1), (40, 3, 5), (2500, 12, 4), (2500, 300, 4)])
def test_equals_the_reference(
    device: torch.device, longest: int, alphabet: int, k: int, options: dict[str, int]
) -> None:
    """In texts that are one block of a program, and in texts of several."""
    tokens, lengths = texts(16 if longest < 100 else 6, alphabet, longest)
    tokens = tokens.to(torch.int32 if k == 1 else torch.int64)
    drafts, counts = find_ngrams(tokens.to(device), lengths.to(device), k, **options)
    assert trimmed(drafts, counts) == expected(tokens, lengths, k, **options)


@pytest.mark.parametrize("alphabet", [2, 4, 30])
def test_equals_the_reference_without_triton(alphabet: int) -> None:
    tokens, lengths = texts(100, alphabet, 50)
    for options in ({}, {"max_ngram": 2, "searched": 12}):
        assert trimmed(*find_ngrams(tokens, lengths, 4, **options)) == expected(tokens, lengths, 4, **options)


@pytest.mark.parametrize("runs_on", ["Triton", "torch"])
def test_rows_of_a_text_are_read_where_they_are(runs_on: str, request: pytest.FixtureRequest) -> None:
    """Also those of a text of which a copy would have no room: 64 GiB as seen, 4 KiB in memory."""
    device = request.getfixturevalue("device") if runs_on == "Triton" else "cpu"
    tokens, lengths = texts(8, 3, 40)
    rows = torch.tensor([5, 0, 7])
    wide = torch.zeros(1, 2**10, dtype=torch.int32, device=device).expand(2**24, -1)
    drafts, counts = find_ngrams(
        wide, torch.tensor([9, 1], device=device), 2, rows=torch.tensor([2**23, 3], device=device)
    )
    assert trimmed(drafts, counts) == [[0], []]
    drafts, counts = find_ngrams(tokens.to(device), lengths[rows].to(device), 4, rows=rows.to(device))
    assert trimmed(drafts, counts) == expected(tokens[rows], lengths[rows], 4)


@pytest.mark.parametrize("k", [31, 32, 33, 70])
def test_long_drafts(device: torch.device, k: int) -> None:
    tokens = torch.arange(50).repeat(2)[None]
    drafts, counts = find_ngrams(tokens.to(device), torch.tensor([53], device=device), k)
    assert trimmed(drafts, counts) == expected(tokens, torch.tensor([53]), k)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="k ≥ 1"):
        find_ngrams(torch.zeros(2, 3), torch.zeros(2), 0)
