"""Publishing is all or nothing on a disk that fails, fills up or loses its power, at every change that is made to it.

Of three sorts: the first checkpoint, the next one, which purges an older, and one more of the same step; of artifacts,
a first and one that replaces another.
"""

import errno
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.files.artifact import ArtifactError, open_artifact, publish
from model.files.distributions import Sampled, write_shard
from model.files.safe_io import write_text
from pipeline.stages.shared.training import write_tensors
from tests.model.test_artifact import largest_file
from tests.train.faulty_disk import NO_NAMESPACE, REMOVALS, counted, killed_at, on_a_small_disk
from tests.trials import trials
from train.checkpoint import Files, newest_checkpoint, save_checkpoint

EACH = trials(23, 1)
"""Every how manieth change is tried, beside the renamings."""
ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT][: trials(2, 3)]
KEPT = 2


class Alone:
    """One process that writes all."""

    is_main, parts, part = True, 1, 0

    def together(self, work: Callable[[], None]) -> None:
        work()

    def moved(self, num_bytes: int) -> None:
        pass


def files_of(version: int) -> Files:
    generator = torch.Generator().manual_seed(version)
    moments = torch.randint(0, 256, (9, 256), generator=generator, dtype=torch.uint8)
    return {"model": {"a": torch.randn(20, 31, generator=generator)}, "optimizer": {"exp_avg.a": moments}}


def save(folder: Path, step: int, version: int) -> None:
    save_checkpoint(folder, step, files=files_of(version), state={"version": version}, keep=KEPT, writers=Alone())


class Checkpoints:
    """Steps that are there, as versions of the same numbers, and the step that the new version is to be saved as."""

    def __init__(self, *steps: int, new: int) -> None:
        self.steps, self.new = steps, new

    def prepare(self, folder: Path) -> None:
        for step in self.steps:
            save(folder, step, step)

    def publish(self, folder: Path) -> None:
        save(folder, self.new, 9)

    def found(self, folder: Path) -> int | None:
        """The version that training would go on from; it is whole, as its hashes say."""
        checkpoint = newest_checkpoint(folder)
        return None if checkpoint is None else checkpoint.state["version"]

    def leftovers(self, folder: Path) -> list[str]:
        names = (path.name for path in folder.iterdir()) if folder.exists() else ()
        return [name for name in names if not name.startswith("step-") or "damaged" in name]


class Artifact:
    """One that replaces another, or none."""

    def __init__(self, *old: int) -> None:
        self.steps = old

    def prepare(self, folder: Path) -> None:
        for version in self.steps:
            self._publish(folder, version)

    def publish(self, folder: Path) -> None:
        self._publish(folder, 9)

    def found(self, folder: Path) -> int | None:
        """Its version, as it is or as the next publication finds it again."""
        for name in ("model", ".model.retired"):
            try:
                return open_artifact(folder / name).recipe["version"]
            except ArtifactError:
                continue
        return None

    def leftovers(self, folder: Path) -> list[str]:
        return [path.name for path in folder.iterdir() if path.name != "model"] if folder.exists() else []

    def _publish(self, folder: Path, version: int) -> None:
        def write(staging: Path) -> None:
            for name in ("config.json", "weights/a"):
                (staging / name).parent.mkdir(exist_ok=True)
                write_text(staging / name, f"{version}" * 900)

        publish(folder / "model", write, stage="distill", recipe={"version": version})


SORTS: dict[str, Any] = {
    "first": Checkpoints(new=1),
    "next": Checkpoints(1, 2, new=3),
    "same step": Checkpoints(3, new=3),
    "artifact": Artifact(),
    "artifact again": Artifact(3),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.checkpoint.HASH_CHUNK_BYTES", 256)


@pytest.fixture(params=SORTS)
def sort(request: pytest.FixtureRequest) -> Any:
    return SORTS[request.param]


def prepared(sort: Any, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    sort.prepare(folder)
    return folder


def changes_of(sort: Any, folder: Path) -> list[str]:
    """Names of all changes that publishing makes."""
    names = list[str]()
    prepared(sort, folder)
    with counted(lambda name, number: names.append(name)):
        sort.publish(folder)
    assert sort.found(folder) == 9 and {"write", "fsync", "mkdir"} < set(names)
    return names


def tried(changes: list[str]) -> list[int]:
    """Numbers of changes, the last and every renaming among them."""
    renamings = [number for number, name in enumerate(changes, 1) if name in ("rename", "replace")]
    return sorted({*renamings, *range(1, len(changes), EACH), len(changes)})


def check(sort: Any, folder: Path, allowed: set[int | None]) -> int | None:
    """One of the versions that are allowed is found whole, and the next publication works and leaves nothing."""
    found = sort.found(folder)
    assert found in allowed
    sort.publish(folder)
    assert sort.found(folder) == 9 and not sort.leftovers(folder)
    return found


@pytest.mark.parametrize("power_cut", [True, False][: trials(1, 2)], ids=["power cut", "kill"][: trials(1, 2)])
def test_a_process_that_dies_before_any_change_leaves_the_old_or_the_new(
    sort: Any, power_cut: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = changes_of(sort, tmp_path / "dry")
    old = max(sort.steps, default=None)
    outcomes = list[int | None]()
    for number in tried(changes):
        folder = prepared(sort, tmp_path / "run")
        work = lambda: sort.publish(folder)  # noqa: B023, E731
        assert killed_at(number, work, power_cut=power_cut) == -signal.SIGKILL
        outcomes.append(check(sort, folder, {old, 9}))
    assert outcomes == sorted(outcomes, key=lambda version: version == 9), "once it is there it stays"
    assert old in outcomes and 9 in outcomes and not caplog.text  # nothing was damaged


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_a_change_that_fails_is_an_error_and_costs_nothing(sort: Any, number: int, tmp_path: Path) -> None:
    """A full disk stays full, but files can be removed from it; other errors come once."""
    changes = changes_of(sort, tmp_path / "dry")
    old = max(sort.steps, default=None)
    for failing in tried(changes):
        folder = prepared(sort, tmp_path / "run")

        def fail(name: str, change: int, failing: int = failing) -> None:
            stays = number != errno.EIO and change > failing and name in ("write", "open", "mkdir")
            if (change == failing and (number == errno.EIO or name not in REMOVALS)) or stays:
                raise OSError(number, os.strerror(number))

        failed = None
        with counted(fail):
            try:
                sort.publish(folder)
            except OSError as error:
                failed = error
        assert failed is not None or sort.found(folder) == 9
        assert len(sort.leftovers(folder)) <= 1
        check(sort, folder, {old, 9})


def test_no_file_may_grow_beyond_a_limit(sort: Any, tmp_path: Path) -> None:
    old = max(sort.steps, default=None)
    prepared(sort, tmp_path / "whole")
    sort.publish(tmp_path / "whole")
    largest = max(path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file())
    for limit in range(0, largest, largest // trials(2, 10) + 1):
        folder = prepared(sort, tmp_path / "run")
        with largest_file(limit), pytest.raises(OSError):
            sort.publish(folder)
        assert not sort.leftovers(folder)
        check(sort, folder, {old})


@pytest.mark.parametrize("kind", ["tensors", "shard"])
def test_what_a_stage_goes_on_from_is_on_the_disk_before_it_has_its_name(kind: str, tmp_path: Path) -> None:
    """Otherwise a power cut leaves a good name without contents."""
    changes = list[str]()
    with counted(lambda name, number: changes.append(name)):
        if kind == "tensors":
            write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(3)})
        else:
            said = Sampled(np.array([1]), np.array([5], np.uint32), np.array([2], np.uint16), np.zeros(1, np.float32))
            write_shard(tmp_path / "a.safetensors", np.arange(3), [(np.array([1]), said)])
    assert [name for name in changes if name != "mkdir"] == ["fsync", "rename"]


FULL, UNHARMED = 3, 0


@pytest.mark.parametrize("sort", ["next", "same step", "artifact again"], indirect=True)
@pytest.mark.parametrize("what", ["size", "nr_inodes"])
def test_a_disk_of_any_size_keeps_what_it_holds(sort: Any, what: str, tmp_path: Path) -> None:
    """A real one, in memory: from too small for two to large enough."""
    codes = list[int]()
    for number in range(count := trials(4, 40 if what == "size" else 10)):
        size = f"{16 + 40 * number // (count - 1)}k" if what == "size" else str(8 + 14 * number // (count - 1))

        def fill() -> None:
            folder = tmp_path / "disk"
            try:
                sort.prepare(folder)
            except OSError:
                raise SystemExit(FULL + 1) from None
            old = sort.found(folder)
            try:
                sort.publish(folder)
            except OSError:
                if sort.found(folder) != old or old is None or len(sort.leftovers(folder)) > 1:
                    raise
                raise SystemExit(FULL) from None
            if sort.found(folder) != 9:
                raise SystemExit(FULL + 2)

        (tmp_path / "disk").mkdir(exist_ok=True)
        codes.append(on_a_small_disk(tmp_path / "disk", f"{what}={size}", fill))
    if NO_NAMESPACE in codes:
        pytest.skip("the machine lets nobody mount a disk of his own")
    assert set(codes) <= {UNHARMED, FULL, FULL + 1} and {UNHARMED, FULL} <= set(codes), codes
    logging.getLogger(__name__).info("%s: %s", what, codes)
