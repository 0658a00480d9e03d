"""What a stage is given: its settings, its folder, the finished models before it, and how to publish its own."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from model.files.artifact import READERS, model_card, publish
from model.files.sealed_folder import folder_digest, seal
from model.text.tokenizer import Tokenizer
from pipeline.environment import hardware, peak_memory_bytes, versions
from pipeline.files import write_atomically
from pipeline.processes import Processes
from pipeline.results import NO_DETAILS, Answer, Check, Cost, ModelReport, Parity, Result
from pipeline.schema import DATA_NAME, DataSource, Recipe, Stage
from pipeline.settings import to_plain
from train.data import DamagedCacheError, PreparedData, prepare
from train.wandb_run import WandbRun

D = TypeVar("D")
T = TypeVar("T")

START_NAME = "start.json"


@dataclass(frozen=True)
class Input:
    """A finished model: verified against its manifest in this run."""

    folder: Path
    digest: str


@dataclass(frozen=True)
class StageContext:
    """Everything a stage may use. Complete when made; the stage changes only its own folder."""

    stage: Stage
    recipe: Recipe
    folder: Path
    cache: Path
    inputs: Mapping[str, Input]
    """By the names that the recipe uses."""
    key: str
    identity: str
    """Of the kind of stage, in manifests."""
    processes: Processes
    wandb: WandbRun | None = None
    """Where the stage is tracked besides its own files; in the main process."""
    started: float = field(default_factory=time.monotonic)

    def model(self, name: str) -> Path:
        """The folder of a finished model."""
        return self.inputs[name].folder

    @property
    def published(self) -> Path:
        """The folder of the model that the stage publishes."""
        return self.folder / "model"

    def data(self, name: str, tokenizer: Tokenizer) -> PreparedData:
        """The data set `name`, tokenized."""
        return prepare_data(self.data_set(name), tokenizer, self.cache, self.processes)

    def data_set(self, name: str) -> DataSource:
        """Where the data set `name` lies and how it is read."""
        return self.recipe.data_set(name, self.folder.parent)

    def start(self, kind: type[T], measure: Callable[[], T]) -> T:
        """What is known before the first step of training: `measured`, so that a stage that goes on has it already."""
        return self.measured(self.folder / START_NAME, kind, measure)

    def measured(self, path: Path, kind: type[T], measure: Callable[[], T]) -> T:
        """A `kind` that all processes measure together once, and the main one keeps at `path`."""
        if self.processes.agree(int(not path.exists())):
            found = measure()
            if self.processes.is_main:
                _keep(path, found)
        self.processes.wait()
        return msgspec.json.decode(path.read_bytes(), type=kind)

    def decided(self, path: Path, kind: type[T], decide: Callable[[], T]) -> T:
        """The same that the main process finds alone while the others wait."""
        if self.processes.is_main and not path.exists():
            _keep(path, decide())
        self.processes.wait()
        return msgspec.json.decode(path.read_bytes(), type=kind)

    def publish(
        self,
        write: Callable[[Path], None],
        *,
        reports: Sequence[ModelReport] = (),
        gates: Mapping[str, Any] | None = None,
        readers: Sequence[str] = READERS,
    ) -> str:
        """Publishes a model into the stage's folder; `write` fills it, the model card comes from `reports`.

        `readers`: other programs that open it. Returns the artifact's digest.
        """
        recipe = to_plain(self.stage.config)
        parents = {name: entry.digest for name, entry in self.inputs.items()}
        metrics = {
            f"{name} ({report.label})": value for report in reports for name, value in _card_metrics(report).items()
        }

        def write_all(folder: Path) -> None:
            write(folder)
            card = model_card(
                name=f"{self.recipe.name} {self.stage.out}",
                stage=self.identity,
                recipe=recipe,
                parents=parents or {self.stage.label: str(recipe.get("from"))},
                metrics=metrics,
                readers=readers,
            )
            (folder / "README.md").write_text(card, encoding="utf-8")

        manifest = publish(
            self.published,
            write_all,
            stage=self.identity,
            recipe=recipe,
            parents=tuple(parents.values()),
            gates=gates or {},
        )
        return manifest.digest

    def publish_data(self, write: Callable[[Path], None]) -> str:
        """Publishes a data set into the stage's folder, whole or not at all; `write` fills it. Returns its digest."""
        staging, target = self.folder / f"{DATA_NAME}.staging", self.folder / DATA_NAME
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        write(staging)
        seal(staging)
        staging.rename(target)
        return folder_digest(target, DamagedCacheError)

    def result(
        self,
        *,
        output: str | None = None,
        models: Sequence[ModelReport] = (),
        gate: Sequence[Check] = (),
        parity: Parity | None = None,
        skipped: Sequence[str] = (),
        answers: Sequence[Answer] = (),
        training: tuple[int, float] = (0, 0.0),
        details: D = NO_DETAILS,
    ) -> Result[D]:
        """The stage's result; `training` is tokens and seconds."""
        tokens, seconds = training
        return Result(
            stage=self.stage.name,
            kind=self.stage.kind,
            key=self.key,
            parents={name: entry.digest for name, entry in self.inputs.items()},
            output=output,
            models=tuple(models),
            cost=Cost(
                seconds=time.monotonic() - self.started,
                peak_memory_bytes=peak_memory_bytes(),
                trained_tokens=tokens,
                training_seconds=seconds,
                trained_tokens_per_s=tokens / seconds if seconds else 0.0,
                processes=self.processes.count,
            ),
            gate=tuple(gate),
            versions=versions(),
            hardware=hardware(),
            finished_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            parity=parity,
            skipped=tuple(skipped),
            answers=tuple(answers),
            details=details,
        )


def _keep(path: Path, found: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.encode(found))


def prepare_data(source: DataSource, tokenizer: Tokenizer, cache: Path, processes: Processes) -> PreparedData:
    """A recipe's data set: tokenized by the main process, opened from its cache by the others."""
    with processes.main_first():
        return prepare(source, tokenizer, cache / "data", progress=processes.is_main)


def _card_metrics(report: ModelReport) -> dict[str, float]:
    if report.quality is None:
        return {}
    found = {"perplexity": report.quality.perplexity, "bits a byte": report.quality.bits_per_byte.value}
    for name in ("kl", "agreement", "acceptance"):
        estimate = getattr(report.quality, name)
        if estimate is not None:
            found[name] = estimate.value
    return found
