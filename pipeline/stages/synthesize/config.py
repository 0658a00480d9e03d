"""Settings of the stage `synthesize`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.schema import DataSource, Recipe
from pipeline.settings import COUNTS, FRACTION, redeclared, setting
from pipeline.stages.shared.config import Server

FILE_NAME = "conversations.jsonl"


@dataclass(frozen=True)
class Sampling:
    """How text is drawn from the model."""

    temperature: float = setting(0.8, range=(0.0, 100.0))
    """0 is greedy. Small models drift off the subject at 1 and above."""
    top_p: float = setting(0.95, range=(1e-6, 1.0))
    """Keep the smallest set of most probable tokens whose mass reaches this."""
    max_tokens: int = setting(128, count=True, range=(1, 1e6))
    """Text that has not ended by then is dropped."""


@dataclass(frozen=True)
class Filter:
    """What is not worth training on, besides what loops, has no end, or leaves its role."""

    near_duplicates: float = setting(0.6, range=FRACTION)
    """Drop a text that shares at least this part of its pairs of words with an earlier one; 1 drops equal ones only."""
    min_words: int = setting(3, range=(1, 1e6))
    """Of an answer, and of a prompt that the model wrote."""
    cut: bool = setting(False, later=True)
    """Keep answers that did not end in time too, as unfinished ones: for distillation, where every token has a label
    of its own. Of other training a student would learn beginnings only."""


@dataclass(frozen=True)
class Synthesize:
    """Stage: let a model answer prompts, and keep the conversations that are worth training on as a data set."""

    model: str = setting(refers="model")
    prompts: str | None = setting(None, refers="data")
    """Data set whose documents are the prompts: of a conversation all that comes before its last answer, of plain text
    each document. Nothing: the model writes them itself, from the opening of its chat template (Magpie, arXiv
    2406.08464)."""
    server: Server | None = setting(None, later=True)
    """Where the model that answers runs instead: any OpenAI-compatible server. Of `model` only the tokenizer is used,
    which may be another one, and `prompts` must be given."""
    count: int = setting(1_000, grows=True, count=True, range=COUNTS)
    """Prompts to write, or to take from the data set at most; fewer conversations are kept."""
    asking: Sampling = field(default_factory=Sampling)
    """How the model writes prompts of its own."""
    answering: Sampling = field(default_factory=lambda: Sampling(temperature=0.5, max_tokens=384))
    filter: Filter = field(default_factory=Filter, metadata={"weights": False})
    sequence_length: int = redeclared(DataSource, "sequence_length", 1024)
    """Of the data set that is made. Prompts that leave no room for an answer within it are dropped."""
    held_out: float = redeclared(DataSource, "held_out", 0.05)
    """Fraction of the conversations that training never sees."""
    seed: int = 0
    """Decides what is drawn, whatever runs beside it and however often the stage was interrupted."""
    out: str = setting("answers", makes="data")
    """Name under which later stages find the conversations; only the answers are labels."""

    def data_set(self, recipe: Recipe, run: Path, folder: Path) -> DataSource:
        """How what it made is read."""
        source, length = str(folder / FILE_NAME), self.sequence_length
        return DataSource(source=source, chat=True, sequence_length=length, held_out=self.held_out)


def mistakes(config: Synthesize, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Answers for which a sequence has no room, and a server that is to ask itself."""
    if config.server and config.prompts is None:
        yield "prompts", "is not given, but a server answers prompts alone; name a data set of them"
    if config.answering.max_tokens >= config.sequence_length:
        room = f"it must be below sequence_length, which is {config.sequence_length:,}, to leave room for the prompt"
        yield "answering.max_tokens", f"is {config.answering.max_tokens:,}; {room}"
