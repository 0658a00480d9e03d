"""One pass of a model over a flat batch; on the CPU, over few tokens, without the Python around its arithmetic.

There a pass is captured once for each number of tokens and then replayed (`kernels.common.cpu_graph`): norms, products
and attention of all layers are a list of calls, whatever the model's code does between them.

T tokens of a pass, D hidden size.
"""

import logging
from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.attention.paged import MOST_QUERIES_TO_GROUP
from kernels.common.cpu_graph import CaptureError, CpuGraph, GraphMemory
from kernels.common.triton_support import runs_triton
from model.attention import PagedAttention, PagedBatch
from model.config import ModelConfig
from model.kv_format import KVPages

_MOST_TOKENS = 32
"""With more, what is computed takes far longer than the Python around it."""
log = logging.getLogger(__name__)


class PagedModel(Protocol):
    """What passes are made of; `model.transformer.Transformer` is one."""

    config: ModelConfig
    can_be_captured: bool
    """Whether its code decides nothing by what tensors hold, but for what raises CaptureError."""

    def __call__(
        self, tokens: Tensor, positions: Tensor, attention: PagedAttention, *, adapters: Tensor | None = None
    ) -> Tensor: ...


class Pass(NamedTuple):
    """What a model is given, on its device; what `PagedBatch` has it explains."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    cu_seqlens: Tensor
    kv_lengths: Tensor
    adapters: Tensor | None
    """[T] int32, each token's adapter; None when none has one, which spares the layers to look."""
    listing: Tensor | None = None
    """[2, B] int32; None where the model routes no token past attention."""
    num_busy: int | None = None
    """Sequences that have tokens, roughly, where others only fill up the batch; None: all B."""


class PassRunner:
    """Computes passes of one model over its pages."""

    def __init__(self, model: PagedModel, pages: KVPages) -> None:
        self.model, self.pages = model, pages
        self._captured: dict[tuple[int, bool], _CapturedPass | None] = {}
        """By the number of tokens and whether they name adapters; None: computed once."""
        self._refused: set[bool] = set() if model.can_be_captured else {False, True}
        """Whether passes with adapters, and those without, have turned out not to be captured."""
        self._memory = GraphMemory()
        self.has_prepared = False
        """Whether the latest pass also did what later ones of its shape need not do again."""

    def hidden(self, step: Pass) -> Tensor:
        """The hidden states `[T, D]`; nothing else uses their memory."""
        shape = len(step.tokens), step.adapters is not None
        self.has_prepared = False
        if shape[1] in self._refused or not _is_small(step):
            return self._compute(step)
        self.has_prepared = self._captured.get(shape) is None
        if shape not in self._captured:  # the first time fills what is computed once and kept
            self._captured[shape] = None
            return self._compute(step)
        captured = self._captured[shape]
        return self._capture(shape, step) if captured is None else captured.replay(step)

    def forget_captures(self) -> None:
        """Whoever gives weights other memory calls this."""
        self._captured.clear()

    def _compute(self, step: Pass) -> Tensor:
        return run_pass(self.model, self.pages, step)

    def _capture(self, shape: tuple[int, bool], step: Pass) -> Tensor:
        try:
            captured = _CapturedPass(self.model, self.pages, step, self._memory)
        except CaptureError as error:
            log.debug("passes %s adapters run operator by operator: %s", "with" if shape[1] else "without", error)
            self._refused.add(shape[1])
            return self._compute(step)
        self._captured[shape] = captured
        return captured.hidden()


def run_pass(model: PagedModel, pages: KVPages, step: Pass) -> Tensor:
    """The hidden states `[T, D]`, operator by operator."""
    return _run(model, pages, step, _plan(model, pages, step))


def _is_small(step: Pass) -> bool:
    if len(step.tokens) > _MOST_TOKENS or not step.tokens.is_cpu or runs_triton(step.tokens):
        return False
    return len(step.tokens) <= MOST_QUERIES_TO_GROUP or int(step.cu_seqlens.diff().max()) <= MOST_QUERIES_TO_GROUP


def _plan(model: PagedModel, pages: KVPages, step: Pass) -> PagedBatch:
    tables = {"block_tables": step.block_tables, "cu_seqlens": step.cu_seqlens, "kv_lengths": step.kv_lengths}
    return PagedBatch.plan(
        model.config, step.slots, page_size=pages.page_size, listing=step.listing, num_busy=step.num_busy, **tables
    )


def _run(model: PagedModel, pages: KVPages, step: Pass, batch: PagedBatch) -> Tensor:
    attention = PagedAttention(model.config, batch, pages)
    return model(step.tokens, step.positions, attention, adapters=step.adapters)


class _CapturedPass:
    """A pass over so many tokens, in tensors that later ones write their own into."""

    def __init__(self, model: PagedModel, pages: KVPages, step: Pass, memory: GraphMemory) -> None:
        self._step = Pass(*(part.clone() if isinstance(part, Tensor) else part for part in step))  # type: ignore[arg-type]
        self._batch, self._graph = _plan(model, pages, self._step), CpuGraph(memory)
        with self._graph.capture():
            hidden = _run(model, pages, self._step, self._batch)
        self._hidden = memory.unlent(hidden)

    def replay(self, step: Pass) -> Tensor:
        mine = self._step
        for old, new in ((mine.tokens, step.tokens), (mine.positions, step.positions), (mine.slots, step.slots)):
            old.copy_(new)
        if mine.adapters is not None and step.adapters is not None:
            mine.adapters.copy_(step.adapters)
        self._batch.renew(step.block_tables, step.cu_seqlens, step.kv_lengths)
        self._graph.replay()
        return self.hidden()

    def hidden(self) -> Tensor:
        """What the capture or the latest replay has computed, in memory of its own."""
        return self._hidden.clone()
