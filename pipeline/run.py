"""Runs a recipe: stage after stage, each only when something that decides its result has changed.

    lock → recipe.yaml → for each stage: key → finished? skip : run → result.json → report.html

A stage's key is a digest of its settings, of the models and the data that go in, and of the format. A finished stage is
one whose result.json carries that key and whose published model still matches its own hashes. What decides the weights
has a key of its own: while that stays, training goes on from its last checkpoint. Whatever other settings made is moved
to previous/ and stays there.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from model.files.artifact import ArtifactError, open_artifact
from model.files.sealed_folder import folder_digest
from pipeline.errors import GateRefused, RunInterrupted
from pipeline.files import write_atomically
from pipeline.keys import StageKeys, digest, stage_keys
from pipeline.measure.gates import describe_parity
from pipeline.processes import Processes
from pipeline.results import Result, write_result
from pipeline.run_folder import RunFolder
from pipeline.schema import Recipe, Stage
from pipeline.stages.base import kind_of, read_result
from pipeline.stages.shared.context import Input, StageContext, prepare_data
from pipeline.tracking import show_result, tracked, wandb_mode
from train.data import DamagedCacheError
from train.sources import open_source, settings_of

log = logging.getLogger(__name__)

INPUTS_NAME = "inputs.json"
SKIP, RUN, FAILED = 0, 1, 2


class Run:
    """One run of a recipe in its folder, by this process as one of `processes`."""

    def __init__(self, recipe: Recipe, folder: RunFolder, *, cache: Path, processes: Processes) -> None:
        self.recipe, self.folder, self.cache, self.processes = recipe, folder, cache, processes
        self.finished: dict[str, Input] = {}
        """Verified models by their names in the recipe."""
        self._data_digests: dict[tuple[str, str], str] = {}
        self.results: list[Result[Any] | None] = []
        """Of the first stages, those that this object has come past: a recipe may grow behind them."""

    def execute(self) -> list[Result[Any]]:
        """Runs what has to run. Returns the results of all stages; in processes other than the main one, nothing.

        Raises UserError (also for a held lock), GateRefused or RunInterrupted; what was finished stays finished.
        """
        wandb_mode(self.recipe)  # what the environment says of it is wrong in every process, and before any work
        with self.folder.locked() if self.processes.is_main else nullcontext():
            if self.processes.is_main:
                self.folder.write_recipe(self.recipe)
            self.processes.wait()
            for stage in self.recipe.plan()[len(self.results) :]:
                self.results.append(self._stage(stage))
        return [result for result in self.results if result is not None]

    def _stage(self, stage: Stage) -> Result[Any] | None:
        keys = self._keys(stage)
        result = self._finished_result(stage, keys.result) if self.processes.is_main else None
        if self.processes.agree(SKIP if result else RUN) == SKIP:
            log.info("%s is finished, nothing has changed", stage.name)
        else:
            result = self._run(stage, keys)
        self._check_gate(stage, result)
        if stage.out:
            folder = self.folder.model(stage)
            self.finished[stage.out] = Input(folder, open_artifact(folder, verify=False).digest)
        return result

    def _run(self, stage: Stage, keys: StageKeys) -> Result[Any] | None:
        """Runs a stage in its folder, on top of what an interrupted attempt at the same work left there."""
        folder = self.folder.stage(stage)
        replaced = self._open_stage(stage, keys) if self.processes.is_main else None
        self.processes.wait()
        log.info("%s begins", stage.name)
        with (
            self._put_back(stage, replaced),
            tracked(self.recipe, stage, folder) if self.processes.is_main else nullcontext() as wandb,
        ):
            context = StageContext(
                stage=stage,
                recipe=self.recipe,
                folder=folder,
                cache=self.cache,
                inputs=self._inputs(stage),
                key=keys.result,
                identity=kind_of(stage.kind).identity,
                processes=self.processes,
                wandb=wandb,
            )
            result = kind_of(stage.kind).run(context)
            if result is not None:
                write_result(folder, result)
                if wandb is not None:
                    show_result(wandb, self.recipe, folder, result)
        self.processes.wait()
        return result

    @contextmanager
    def _put_back(self, stage: Stage, replaced: Path | None) -> Iterator[None]:
        """What a stage replaces stays in service where it ends by a user's mistake before it has made anything."""
        try:
            yield
        except ValueError:
            folder = self.folder.stage(stage)
            if replaced is not None and not any(path.name != INPUTS_NAME for path in folder.iterdir()):
                shutil.rmtree(folder)
                replaced.rename(folder)
                log.info("what %s had made before is back in its place", stage.name)
            raise

    def _open_stage(self, stage: Stage, keys: StageKeys) -> Path | None:
        """Makes the stage's folder ready: as it was left for the same work, empty for other work.

        Returns where what it had made for other work lies now.
        """
        aside, folder = None, self.folder.stage(stage)
        recorded = _read_inputs(folder)
        if folder.exists() and not keys.may_continue(recorded):
            if any(path.name != INPUTS_NAME for path in folder.iterdir()):
                aside = self.folder.move_aside(stage)
                log.info("%s has other settings or inputs now; what it had made moves to %s", stage.name, aside)
            else:
                shutil.rmtree(folder)
        elif folder.exists():
            self._go_on(stage, keys, recorded)
        folder.mkdir(exist_ok=True)
        (folder / "result.json").unlink(missing_ok=True)
        for made in (self.folder.model(stage), self.folder.data(stage)):
            shutil.rmtree(made, ignore_errors=True)
        write_atomically(folder / INPUTS_NAME, json.dumps(keys.record()).encode())
        return aside

    def _go_on(self, stage: Stage, keys: StageKeys, recorded: dict[str, Any]) -> None:
        """Readies what an earlier attempt left: a result of other settings moves aside, outdated figures go."""
        folder = self.folder.stage(stage)
        if recorded.get("full", recorded.get("key")) != keys.full and read_result(folder) is not None:
            aside = self.folder.move_aside(stage, result_only=True)
            log.info("%s is measured or trained further; its earlier result moves to %s", stage.name, aside)
        if not keys.keeps_figures(recorded):
            for name in kind_of(stage.kind).kept_figures:
                shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink(missing_ok=True)
        for name, value in keys.grows.items():
            before = recorded.get("grows", {}).get(name, value)
            if before < value:
                what = f"{name} grew from {before:,} to {value:,}"
                log.info("%s: %s; its work goes on, training under the longer schedule", stage.name, what)

    def _finished_result(self, stage: Stage, key: str) -> Result[Any] | None:
        """The stage's result if it has this key, passed, and what it published is whole."""
        result = read_result(self.folder.stage(stage))
        if result is None or result.key != key or not result.passed:
            return None
        try:
            made = self._made(stage)
        except (ArtifactError, DamagedCacheError) as error:
            log.warning("%s has to run again: %s", stage.name, error)
            return None
        return result if made in (None, result.output) else None

    def _made(self, stage: Stage) -> str | None:
        """Digest of the model or the data that a stage has made, every file verified; None where it makes nothing."""
        if stage.data_out is not None:
            return folder_digest(self.folder.data(stage), DamagedCacheError)
        return None if stage.out is None else open_artifact(self.folder.model(stage)).digest

    def _check_gate(self, stage: Stage, result: Result[Any] | None) -> None:
        """Stops every process when the main one's result was refused."""
        failed = self.processes.is_main and result is not None and not result.passed
        if self.processes.agree(FAILED if failed else RUN) == FAILED:
            reason = f"{stage.name} is below its gate"
            if result is not None and result.parity is not None and not result.parity.passed:
                reason = f"{stage.name} fails parity, {describe_parity(result.parity)}"
            raise GateRefused(f"{reason}: nothing was published, and the run stops here")

    def _keys(self, stage: Stage) -> StageKeys:
        kind = kind_of(stage.kind)
        return stage_keys(
            kind.identity,
            stage.config,
            models={name: entry.digest for name, entry in self._inputs(stage).items()},
            data=self._data_digest(stage),
            source=kind.stamp(stage.config),
        )

    def _inputs(self, stage: Stage) -> dict[str, Input]:
        return {name: self.finished[name] for name in kind_of(stage.kind).models(stage.config)}

    def _data_digest(self, stage: Stage) -> str | None:
        """Digest of the data set that a stage names: tokenized, split included. Known in every process."""
        kind = kind_of(stage.kind)
        name = kind.data(stage.config)
        if name is None:
            return None
        source = self.recipe.data_set(name, self.folder.path)
        if kind.reads_documents:
            return digest([open_source(source).fingerprint, settings_of(source)])
        folders = {model: entry.folder for model, entry in self._inputs(stage).items()}
        tokenizer = kind.tokenizer(stage.config, folders)
        if (name, tokenizer.digest) not in self._data_digests:
            prepared = prepare_data(source, tokenizer, self.cache, self.processes)
            both = digest([prepared.train.digest, prepared.held_out.digest])
            self._data_digests[name, tokenizer.digest] = both
        return self._data_digests[name, tokenizer.digest]


def run_recipe(recipe: Recipe, folder: RunFolder, *, cache: Path, processes: Processes) -> list[Result[Any]]:
    """`Run.execute`, and a report of whatever is there at the end, also of a run that stopped half-way."""
    from pipeline.report.page import write_report

    try:
        results = Run(recipe, folder, cache=cache, processes=processes).execute()
    except (GateRefused, RunInterrupted):
        if processes.is_main:
            write_report(folder)
        raise
    if processes.is_main:
        write_report(folder)
    return results


def _read_inputs(folder: Path) -> dict[str, Any]:
    """What the stage in this folder was begun with; nothing if it does not say."""
    path = folder / INPUTS_NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
