"""A teacher's distributions beside the documents they belong to: a few tokens for each position.

Of a distribution p over the vocabulary, N points at distances of 1/N, shifted together by one uniform number, are
looked up in its cumulative sums (systematic sampling). Token i is met n_i times, E n_i = N p_i, and n_i / N stands for
p_i: what is linear in p, as KL(p ‖ q) up to a constant and its gradient q - p, is right in expectation. Keeping the
most probable tokens instead is biased. arXiv 2503.16870 draws the N tokens independently; the mean is the same, the
variance of this is less: n_i is never farther than 1 from N p_i.

A teacher of which no more is known than the log-probabilities of some tokens, the most probable ones, is stored as it
is known: n_i / N is p_i rounded to parts of N = 65,535, and what is missing to 1 is the rest, of which only the sum is
known. The loss then counts all other tokens as one (kernels/losses/linear_sparse_distillation.py).

They are stored by document, so how documents are packed into batches does not matter, in shards of whole documents:

    starts     [P + 1] uint32   where the tokens of each position begin; none where there is no label
    ids        [E] uint16       tokens, their lower 16 bits
    high_ids   [E] uint8        the upper 8 bits; only in a shard that needs them
    counts     [E] uint8        n_i; uint16 where N is 65,535
    entropies  [P] float16      of p, nats
    tokens     [P] uint8        the token that stands at the position, its lowest 8 bits: a check

Legend: P positions of a shard (one for each token of its documents), T positions of a batch, E stored tokens,
V vocabulary, N draws.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from kernels.common.soft_cap import soft_cap_
from kernels.losses.linear_sparse_distillation import SparseTargets
from model.files.safe_io import read_json_object, sync_file, write_json
from model.files.sealed_folder import folder_digest

INDEX_NAME = "distributions.json"
MAX_DRAWS = 255
LISTED_PARTS = 2**16 - 1
"""N of distributions of which some tokens are listed, instead of drawn."""
SMALL_VOCABULARY = 2**16
LOGITS_PER_BLOCK = 2**21
OPEN_SHARDS = 64
"""Shards that are kept in memory; one of 32,768 tokens takes about 2 MB."""

Arrays = dict[str, np.ndarray]


class DistributionsError(ValueError):
    """Stored distributions that are damaged, or belong to other documents; the sentence names the folder."""


def shard_name(number: int) -> str:
    return f"distributions-{number:05d}.safetensors"


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampled:
    """Distributions of r positions, tokens in ascending order."""

    sizes: np.ndarray
    """[r] int64, different tokens of each."""
    ids: np.ndarray
    """[E] int64"""
    counts: np.ndarray
    """[E] uint8 or uint16"""
    entropies: np.ndarray
    """[r] fp32"""


@torch.no_grad()
def sample(hidden: Tensor, projection: Tensor, shifts: Tensor, draws: int, *, soft_cap: float | None = None) -> Sampled:
    """Draws from softmax(hidden projectionᵀ), a block of rows at a time.

    hidden [r, D]; projection [V, D]; shifts [r], uniform in [0, 1); `soft_cap`: what logits tend to, if anything.
    """
    rows = max(LOGITS_PER_BLOCK // len(projection), 1)
    blocks = zip(hidden.split(rows), shifts.to(hidden.device, torch.float64).split(rows), strict=True)
    products = ((block @ projection.t(), shift) for block, shift in blocks)
    return _joined([_sample_block(soft_cap_(logits, soft_cap), shift, draws) for logits, shift in products])


def _sample_block(logits: Tensor, shifts: Tensor, draws: int) -> Sampled:
    return counted(*draw(logits, shifts, draws))


def draw(logits: Tensor, shifts: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Tokens `[r, N]`, ascending, and entropies `[r]`, of `logits [r, V]`; the host waits for nothing.

    shifts [r] fp64, uniform in [0, 1), on the device of the logits.
    """
    log_p = torch.log_softmax(logits.float(), -1)
    p = log_p.exp()
    entropies = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    sums = p.double().cumsum_(-1)
    points = (torch.arange(draws, device=logits.device) + shifts[:, None]) / draws * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True).clamp_(max=logits.shape[1] - 1), entropies


def counted(met: Tensor, entropies: Tensor) -> Sampled:
    """What `draw` has met, each token once."""
    first = torch.ones_like(met, dtype=torch.bool)
    first[:, 1:] = met[:, 1:] != met[:, :-1]
    begins = first.flatten().nonzero()[:, 0]
    ends = torch.cat((begins[1:], begins.new_tensor([met.numel()])))
    return Sampled(
        sizes=first.sum(-1).cpu().numpy(),
        ids=met.flatten()[begins].cpu().numpy(),
        counts=(ends - begins).to(torch.uint8).cpu().numpy(),
        entropies=entropies.cpu().numpy(),
    )


def rounded(listed: Sequence[Mapping[int, float]]) -> Sampled:
    """Of positions with the log-probabilities of some tokens; the entropy is that of those and of the rest as one."""
    ids = [np.array(sorted(position), np.int64) for position in listed]
    p = [np.exp([position[token] for token in of.tolist()]) for position, of in zip(listed, ids, strict=True)]
    counts = [_rounded(position) for position in p]
    known = [np.append(of, LISTED_PARTS - of.sum()) / LISTED_PARTS for of in counts]
    return Sampled(
        sizes=np.array([np.count_nonzero(of) for of in counts]),
        ids=np.concatenate([of[number > 0] for of, number in zip(ids, counts, strict=True)]),
        counts=np.concatenate([of[of > 0] for of in counts]).astype(np.uint16),
        entropies=np.array([-np.sum(of[of > 0] * np.log(of[of > 0])) for of in known], np.float32),
    )


def _rounded(p: np.ndarray) -> np.ndarray:
    """Parts of LISTED_PARTS, not more than all of them."""
    counts = np.rint(p * LISTED_PARTS).astype(np.int64)
    counts[counts.argmax()] -= max(counts.sum() - LISTED_PARTS, 0)
    return counts


def _joined(parts: Sequence[Sampled]) -> Sampled:
    names = ("sizes", "ids", "counts", "entropies")
    return Sampled(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def write_shard(path: Path, tokens: np.ndarray, found: Sequence[tuple[np.ndarray, Sampled]]) -> None:
    """Writes a shard whole or not at all. tokens [P]; found: positions in it [r], and what was sampled there."""
    staging = path.with_suffix(".staging")
    save_file(shard_arrays(tokens, found), staging)
    sync_file(staging)
    staging.rename(path)


def shard_arrays(tokens: np.ndarray, found: Sequence[tuple[np.ndarray, Sampled]]) -> Arrays:
    """What is in a shard; arguments as `write_shard` has them."""
    nothing = Sampled(*(np.empty(0, dtype) for dtype in (np.int64, np.int64, np.uint8, np.float32)))
    positions = np.concatenate([np.empty(0, np.int64), *(at for at, _ in found)])
    sampled = _joined([nothing, *(one for _, one in found)])
    sizes, entropies = np.zeros(len(tokens), np.int64), np.zeros(len(tokens), np.float16)
    sizes[positions], entropies[positions] = sampled.sizes, sampled.entropies
    starts = np.concatenate([[0], np.cumsum(sizes)])
    ends = np.cumsum(sampled.sizes)
    inside = np.arange(len(sampled.ids)) - np.repeat(ends - sampled.sizes, sampled.sizes)
    order = np.repeat(starts[positions], sampled.sizes) + inside
    ids, counts = np.empty_like(sampled.ids), np.empty_like(sampled.counts)
    ids[order], counts[order] = sampled.ids, sampled.counts
    arrays: Arrays = {
        "starts": starts.astype(np.uint32),
        "ids": (ids % SMALL_VOCABULARY).astype(np.uint16),
        "counts": counts,
        "entropies": entropies,
        "tokens": (tokens % 256).astype(np.uint8),
    }
    if ids.max(initial=0) >= SMALL_VOCABULARY:
        arrays["high_ids"] = (ids // SMALL_VOCABULARY).astype(np.uint8)
    return arrays


def wide_ids(arrays: Arrays, own: slice) -> np.ndarray:
    """The tokens [E] of a part of a shard, int64."""
    ids = arrays["ids"][own].astype(np.int64)
    if "high_ids" in arrays:
        ids += arrays["high_ids"][own].astype(np.int64) * SMALL_VOCABULARY
    return ids


def write_index(folder: Path, *, first_tokens: Sequence[int], draws: int, documents: str, teacher: str) -> None:
    """What the shards of a folder are: where each begins, the digests of the documents and of the teacher."""
    index = {"first_tokens": list(first_tokens), "draws": draws, "documents": documents, "teacher": teacher}
    write_json(folder / INDEX_NAME, index)


# --- reading ----------------------------------------------------------------------------------------------------------


class Distributions:
    """Those of all documents of a data set's training split."""

    def __init__(self, folder: Path, documents: str) -> None:
        """`documents`: digest of the documents; every file is verified. Raises DistributionsError."""
        self.folder = folder
        self.digest = folder_digest(folder, DistributionsError)
        index = read_json_object(folder / INDEX_NAME, DistributionsError)
        if index["documents"] != documents:
            raise DistributionsError(
                f"{folder} holds distributions of other documents: the text, its tokenizer or what is held out differ."
            )
        self.teacher, self.draws = str(index["teacher"]), int(index["draws"])
        self._first_tokens = index["first_tokens"]

    def targets(self, pieces: Sequence[tuple[int, int]], tokens: np.ndarray) -> SparseTargets:
        """Of pieces (start, length) of the documents, which are `tokens` altogether, one after another."""
        parts = [self._read(start, length, tokens) for start, length in pieces]
        sizes, ids, counts, entropies = (np.concatenate(part) for part in zip(*parts, strict=True))
        ends = np.cumsum(sizes)
        sums = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        rest = 1 - (sums[ends] - sums[ends - sizes]) / self.draws
        return SparseTargets(
            ids=torch.from_numpy(ids),
            weights=torch.from_numpy(counts.astype(np.float32) / self.draws),
            starts=torch.from_numpy(ends - sizes),
            entropies=torch.from_numpy(entropies.astype(np.float32)),
            rest=torch.from_numpy(rest.astype(np.float32)) if self.draws == LISTED_PARTS else None,
        )

    def _read(self, start: int, length: int, tokens: np.ndarray) -> tuple[np.ndarray, ...]:
        """Sizes, ids, counts and entropies of `length` positions from the one of token `start` on."""
        number = bisect_right(self._first_tokens, start) - 1
        arrays, first = _load_shard(self.folder / shard_name(number)), start - self._first_tokens[number]
        here = slice(first, first + length)
        if not np.array_equal(arrays["tokens"][here], tokens[start : start + length] % 256):
            raise DistributionsError(f"{self.folder / shard_name(number)} does not fit its documents at token {start}.")
        starts = arrays["starts"][first : first + length + 1].astype(np.int64)
        own = slice(starts[0], starts[-1])
        return np.diff(starts), wide_ids(arrays, own), arrays["counts"][own], arrays["entropies"][here]


@lru_cache(maxsize=OPEN_SHARDS)
def _load_shard(path: Path) -> Arrays:
    return load_file(path)
