"""What a draft is to the engine. Its kinds are listed in `serve.config.DRAFTS`; no other file knows any of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from kernels.common.cuda_graph import Graphs
from model.config import ModelConfig
from model.kv_format import KVFormat, KVPages
from serve.config import DRAFT_MODEL, DRAFTS
from serve.engine.drafts.length import PassTimer
from serve.engine.drafts.tree import AtHand, DraftTree, Wanted
from serve.engine.drafts.trial import Acceptance
from serve.engine.kv_cache import KVCache
from serve.engine.requests import Sequence
from serve.engine.runner import LanguageModel
from serve.engine.sampling import Sampler
from serve.engine.tables import Tables


@dataclass(frozen=True)
class DraftContext:
    """What an engine gives its draft to work with."""

    sampler: Sampler
    """The target's; its state holds the feed, into which draft tokens are written."""
    cache: KVCache
    """The pages of each sequence, under whose ids the draft may keep what it likes."""
    model: LanguageModel | None
    """What `Models.draft` holds, for kinds that need a model."""
    pages: KVPages | None
    """The target's, if the model's keys and values are as good as the target's and stand in their place; else None."""
    target: LanguageModel
    target_pages: KVPages
    num_layers: int | None
    """EngineConfig.draft_layers."""
    kv_format: KVFormat
    """The target's, for keys and values of its own."""
    max_tokens: int
    """Most rows of one pass."""
    timer: PassTimer
    """Measures the draft's passes."""
    tables: Tables
    """The target's block tables on the device."""
    graphs: Graphs | None
    """Where steps are captured, if they are."""


class Replaceable(Protocol):
    """A draft's model, whose weights may be replaced while requests run."""

    acceptance: Acceptance | None
    """Told what became of the tokens of its passes, where anybody wants to know."""

    @property
    def config(self) -> ModelConfig: ...

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Guess by other weights from the next step on. Raises ValueError, with nothing changed, where they misfit."""
        ...


class Draft(Protocol):
    """A source of guesses. What it guesses decides how fast the target is, never what it says."""

    model_use: ClassVar[Literal["needed", "optional", "target", "none"]]
    """Whether a model is to be loaded for it: EngineConfig.draft where that is its folder, else draft_model. "target":
    none is, it uses layers of the target, EngineConfig.draft_layers."""
    needs_text: ClassVar[bool]
    """Whether it looks into `BatchState.text`."""

    reads_tokens: ClassVar[bool]
    """Whether what it has at hand follows from a sequence's tokens, so that no step may be under way."""
    runs_passes: bool
    """Whether it guesses more than what it has at hand."""
    first_tokens: int
    """Most tokens of a sequence that its first pass of a step is fed when it has kept up; 0: it feeds no model."""

    replaceable: Replaceable | None
    """Its model, if that computes keys and values of its own."""

    def __init__(self, context: DraftContext) -> None: ...

    def at_hand(self, sequence: Sequence) -> AtHand | None:
        """What it could propose without a pass. A kind that only runs passes has nothing."""
        ...

    def propose(self, wanted: list[Wanted]) -> dict[int, DraftTree]:
        """Guess tokens for each. Keys are sequence ids; a sequence may be left out."""
        ...

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Hear what became of a proposal of its passes, before the accepted tokens join the sequence."""
        ...

    def moved(self, sequence: Sequence) -> None:
        """The pages from that of the sequence's last token on are others now: the target has taken another path."""
        ...

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy (source, destination) pages of its own, as the target's are copied."""
        ...

    def forget_captures(self) -> None:
        """The target has been given other weights."""
        ...

    def rehearse(self) -> None:
        """Before a request waits for it: run passes of one sequence that prepare for others, and measure them."""
        ...

    def num_missing(self, sequence: Sequence) -> int:
        """Tokens of a sequence that it has still to read before it can guess; what it costs is weighed."""
        ...


def draft_kind(name: str | None) -> type[Draft] | None:
    """The kind of draft that EngineConfig.draft asks for: one of the list by its name, or the folder of a model."""
    if name is None:
        return None
    module, _, kind = DRAFTS[name if name in DRAFTS else DRAFT_MODEL].rpartition(".")
    found: type[Draft] = getattr(import_module(module), kind)
    return found
