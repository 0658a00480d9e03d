"""Block tables on the device, where captured steps read them. S batch rows, P pages of a row."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from serve.engine.batch_state import upload
from serve.engine.kv_cache import PAGE_SIZE, BlockTable
from serve.engine.requests import Sequence

_NO_PAGES = np.empty((3, 0), dtype=np.int32)


class Tables:
    """Block tables by batch row, on the device: a step brings only the pages that they lack."""

    def __init__(self, num_rows: int, max_tokens: int, device: torch.device) -> None:
        """`max_tokens`: up to the last that a step may compute for a sequence."""
        self.pages = torch.zeros(num_rows, max_tokens // PAGE_SIZE + 1, dtype=torch.int32, device=device)
        """[S, P]"""

    @property
    def num_rows(self) -> int:
        """S."""
        return self.pages.shape[0]

    @property
    def most_tokens(self) -> int:
        """That a row's pages hold."""
        return self.pages.shape[1] * PAGE_SIZE

    @property
    def list_sizes(self) -> dict[str, int]:
        """As `KVFormat.allocate` asks for them: lists of visible slots are by batch row too."""
        return {"num_rows": self.num_rows, "most_tokens": self.most_tokens}

    def missing(self, tables: Iterable[tuple[int, BlockTable]], room: int = 0) -> np.ndarray:
        """Rows, columns and ids of pages of these that the device lacks, `[3, m]`, m ≤ room; more are uploaded here."""
        entries = [entry for row, table in tables for entry in _new_pages(table, row)]
        if not entries:
            return _NO_PAGES
        columns = np.array(entries, dtype=np.int32).T
        if len(entries) <= room:
            return columns
        self.take(upload(columns.copy(), self.pages.device))
        return columns[:, :0]

    def take(self, entries: Tensor) -> None:
        """Write pages `[3, m]`."""
        rows, columns = entries[:2].long()
        self.pages.index_put_((rows, columns), entries[2])

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Of these the device may know anything."""
        for sequence in sequences:
            sequence.table.changes_from(0)


def _new_pages(table: BlockTable, row: int) -> list[tuple[int, int, int]]:
    first, table.num_uploaded = table.num_uploaded, table.num_pages
    return [(row, first + n, page) for n, page in enumerate(table.ids[first : table.num_pages].tolist())]
