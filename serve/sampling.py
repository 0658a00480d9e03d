"""From rows of logits to tokens, each request by its own parameters and its own random stream.

Nothing here has state: a distribution depends on a sequence's tokens, a random draw on (seed, choice, position,
purpose). So a token does not depend on the batch company, on chunking or on preemption, and a failed step can be
computed again.

R rows, V vocabulary.
"""

import hashlib
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from kernels.sampling import adjusted_probabilities, sample
from serve.outputs import TokenLogprobs
from serve.sequence import Sequence

# Rows are processed in blocks: on a CPU large temporaries cost page faults that dwarf the arithmetic.
ROWS_PER_BLOCK = 4


class NonFiniteLogitsError(RuntimeError):
    """The model's scores for a request are not numbers."""


class Purpose(IntEnum):
    """What a random draw decides; different purposes are independent."""

    TARGET = 0
    """The target's token, and the draft's guess of it where both must follow the same seed."""
    DRAFT = 1
    """The draft's token under rejection sampling."""
    ACCEPT = 2
    """Whether a draft token is accepted."""
    RESIDUAL = 3
    """The token after the accepted ones."""


class Noise:
    """Counter-based randomness: the same key always gives the same draws.

    A device has its own generator, so a seed gives other tokens on a GPU than on a CPU.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._generator = None if device.type == "cpu" else torch.Generator(device)

    def exponential(self, sequence: Sequence, position: int, purpose: Purpose) -> Tensor:
        """`[V]` fp32 independent draws of the unit exponential distribution for output token number `position`."""
        if self._generator is not None:
            digest = hashlib.sha256(repr(_key(sequence, position, purpose)).encode()).digest()
            self._generator.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            return torch.empty(self.vocab_size, device=self.device).exponential_(generator=self._generator)
        # Drawn in fp64: fp32 draws are exactly 0 about once in 8 million, and then an arbitrary token would win.
        draws = _numpy_generator(sequence, position, purpose).standard_exponential(self.vocab_size)
        return torch.from_numpy(draws.astype(np.float32))

    def uniform(self, sequence: Sequence, position: int, count: int) -> Tensor:
        """`[count]` fp32 draws in [0, 1) that accept or reject draft tokens from output token `position` on."""
        draws = _numpy_generator(sequence, position, Purpose.ACCEPT).random(count, dtype=np.float32)
        return torch.from_numpy(draws).to(self.device)


def _key(sequence: Sequence, position: int, purpose: Purpose) -> tuple[int, int]:
    """Two words of 64 bits; a position has 32 bits, a choice 24, a purpose 8."""
    return sequence.seed % 2**64, sequence.index << 40 | position << 8 | purpose


def _numpy_generator(sequence: Sequence, position: int, purpose: Purpose) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(_key(sequence, position, purpose), dtype=np.uint64)))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits: what follows the tokens of `sequence` and then the draft tokens `drafted`."""

    sequence: Sequence
    drafted: Tokens[int] = ()

    @property
    def position(self) -> int:
        """Number of the output token that this row decides, from 0."""
        return self.sequence.num_output + len(self.drafted)

    @property
    def is_plain(self) -> bool:
        """The token is the argmax of the model's own logits."""
        params = self.sequence.params
        adjusts = params.has_penalties or params.logit_bias or self.position < params.min_tokens
        return params.is_greedy and not adjusts


class Sampler:
    """Draws tokens from rows of logits."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.noise = Noise(vocab_size, device)

    def draw(self, logits: Tensor, rows: list[Row], purpose: Purpose = Purpose.TARGET) -> list[int]:
        """One token a row; `logits [R, V]` of any float dtype. Raises NonFiniteLogitsError for any bad row."""
        plain = [number for number, row in enumerate(rows) if row.is_plain]
        if len(plain) == len(rows):
            return _argmax(logits)
        tokens = [0] * len(rows)
        for number, token in zip(plain, _argmax(logits[plain]), strict=True):
            tokens[number] = token
        for block in _blocks([number for number, row in enumerate(rows) if not row.is_plain]):
            drawn, _ = self.draw_with_probabilities(logits[block], [rows[number] for number in block], purpose)
            for number, token in zip(block, drawn, strict=True):
                tokens[number] = token
        return tokens

    def draw_with_probabilities(self, logits: Tensor, rows: list[Row], purpose: Purpose) -> tuple[list[int], Tensor]:
        """The same for few rows, and the distributions `[R, V]` fp32 that the tokens were drawn from."""
        probabilities = self.probabilities(logits, rows)
        noise = torch.stack([self._race(row, purpose) for row in rows])
        return sample(probabilities, noise).tolist(), probabilities

    def probabilities(self, logits: Tensor, rows: list[Row]) -> Tensor:
        """`[R, V]` fp32: each row's distribution after bias, penalties, temperature, top-k, top-p and min-p."""
        scores = logits.float() if logits.dtype != torch.float32 else logits.clone()
        for score, row in zip(scores, rows, strict=True):
            adjust_logits(score, row)
        if bool(scores.isnan().any()):
            raise NonFiniteLogitsError("logits are not finite")
        params = [row.sequence.params for row in rows]
        device = logits.device
        return adjusted_probabilities(
            scores,
            temperature=torch.tensor([float(p.temperature) for p in params], device=device),
            top_k=torch.tensor([p.top_k for p in params], device=device),
            top_p=torch.tensor([float(p.top_p) for p in params], device=device),
            min_p=torch.tensor([float(p.min_p) for p in params], device=device),
        )

    def _race(self, row: Row, purpose: Purpose) -> Tensor:
        if row.sequence.params.is_greedy:  # one-hot: any noise draws the same token
            return torch.ones(self.noise.vocab_size, device=self.noise.device)
        return self.noise.exponential(row.sequence, row.position, purpose)


def adjust_logits(scores: Tensor, row: Row) -> None:
    """Apply min_tokens, logit_bias and the penalties to `scores [V]` fp32 in place; definitions as in vLLM."""
    sequence, params = row.sequence, row.sequence.params
    if row.position < params.min_tokens:
        scores[list(sequence.end_token_ids)] = -torch.inf
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        scores[ids] += torch.tensor(list(params.logit_bias.values()), dtype=scores.dtype, device=scores.device)
    if params.has_penalties:
        _penalize(scores, row)


def _penalize(scores: Tensor, row: Row) -> None:
    sequence, params = row.sequence, row.sequence.params
    output = np.array([*sequence.tokens[sequence.num_prompt_tokens :], *row.drafted], dtype=np.int64)
    prompt = np.array(sequence.tokens[: sequence.num_prompt_tokens], dtype=np.int64)
    emitted, counts = np.unique(output, return_counts=True)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.union1d(prompt, emitted)).to(scores.device)
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    ids = torch.from_numpy(emitted).to(scores.device)
    penalty = params.frequency_penalty * counts + params.presence_penalty
    scores[ids] -= torch.from_numpy(penalty.astype(np.float32)).to(scores.device)


def token_logprobs(logits: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` and of the `num_top` best under `logits [R, V]`, one entry a row."""
    entries = []
    for block in _blocks(range(len(tokens))):
        logprobs = torch.log_softmax(logits[block].float(), dim=-1)
        chosen = logprobs.gather(1, torch.tensor([[tokens[number]] for number in block], device=logits.device))
        ranks = (logprobs > chosen).sum(dim=-1) + 1
        best = logprobs.topk(num_top, dim=-1)
        columns = zip(chosen[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
        for number, (logprob, rank, ids, values) in zip(block, columns, strict=True):
            entries.append(TokenLogprobs(tokens[number], logprob, rank, tuple(zip(ids, values, strict=True))))
    return entries


def _argmax(logits: Tensor) -> list[int]:
    """The best token of each row; fp32 first, because a CPU compares fp32 several times faster than bf16."""
    scores = logits.float()
    best = scores.argmax(dim=-1, keepdim=True)
    if bool(scores.gather(1, best).isnan().any()):
        raise NonFiniteLogitsError("logits are not finite")
    return best[:, 0].tolist()


def _blocks(numbers: Tokens[int]) -> list[list[int]]:
    return [list(numbers[at : at + ROWS_PER_BLOCK]) for at in range(0, len(numbers), ROWS_PER_BLOCK)]
