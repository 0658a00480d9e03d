"""A draft without a model: what followed the latest earlier occurrence of the last few tokens of the same sequence."""

from typing import ClassVar, Literal

import numpy as np

from kernels.sampling.ngram import find_ngrams
from serve.engine.batch_state import upload
from serve.engine.drafts.base import DraftContext
from serve.engine.drafts.tree import DraftTree, Wanted
from serve.engine.requests import Sequence


class NgramDraft:
    """Free, and good at quoting."""

    model_use: ClassVar[Literal["none"]] = "none"
    needs_text: ClassVar[bool] = True
    replaceable: ClassVar[None] = None
    reads_tokens: ClassVar[bool] = False
    runs_passes = True
    first_tokens = 0

    def __init__(self, context: DraftContext) -> None:
        self.state = context.sampler.state
        self.reads_counts = self.state.device.type == "cpu"
        """In the memory of the host a count is there to be read, and saves the rows of tokens that were not found."""

    def at_hand(self, sequence: Sequence) -> None:
        """How far an occurrence goes is known on the device."""

    def propose(self, wanted: list[Wanted]) -> dict[int, DraftTree]:
        if self.state.text is None:
            raise ValueError("n-grams are looked up in the text of the batch state, and this one keeps none")
        table = np.array([(s.batch_row, s.num_tokens) for s, _, _ in wanted], dtype=np.int64)
        rows, lengths = upload(table.T.copy(), self.state.device)
        drafts, counts = find_ngrams(self.state.text, lengths, max(k for _, k, _ in wanted), rows=rows)
        self.state.write_drafts(rows, drafts)
        if self.reads_counts:
            pairs = zip(wanted, counts.tolist(), strict=True)
            return {sequence.id: DraftTree(min(k, count)) for (sequence, k, _), count in pairs if count > 0}
        self.state.draft_counts[rows] = counts.int()
        return {sequence.id: DraftTree(k, is_counted=True) for sequence, k, _ in wanted}

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """The text is all it knows."""

    def moved(self, sequence: Sequence) -> None:
        """It has no pages."""

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        """It has no pages."""

    def rehearse(self) -> None:
        """It runs no passes."""

    def forget_captures(self) -> None:
        """It captures nothing."""

    def num_missing(self, sequence: Sequence) -> int:
        return 0
