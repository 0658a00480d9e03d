"""The tokens that a student says where it drafts: those that its text has most of.

The output projection is a large part of a small model's step; with a third of the rows it takes a third of the time.
A draft never says other tokens, which the target then says itself. Sources: FR-Spec, https://arxiv.org/abs/2502.14856
(the idea), VocabTrim, https://arxiv.org/abs/2506.22694 (count what the target writes).
"""

import numpy as np

from model.text.tokenizer import Tokenizer
from train.data import TokenizedDocuments


def count_labels(documents: TokenizedDocuments, vocab_size: int) -> np.ndarray:
    """`[V]` int64: how often each token is a label."""
    tokens, mask = documents.tokens, documents.labels_mask
    return np.bincount(tokens if mask is None else tokens[mask != 0], minlength=vocab_size)


def most_common_tokens(counts: np.ndarray, size: int, tokenizer: Tokenizer) -> np.ndarray:
    """`size` tokens of `counts [V]`, ascending: those that end a text or control it, then the most common ones.

    Of equally common ones the first: byte-pair merges come in order of their use. ValueError for too few tokens.
    """
    counts = counts[: tokenizer.vocab_size]  # the rest is padding
    least = np.array(sorted({*tokenizer.eos_token_ids, *tokenizer.control_tokens}), dtype=np.int64)
    if not len(least) < size < len(counts):
        raise ValueError(f"is {size:,}; it must be above the {len(least):,} control tokens and below {len(counts):,}")
    ranks = counts.copy()
    ranks[least] = np.iinfo(ranks.dtype).max
    return np.sort(np.argsort(-ranks, kind="stable")[:size])
