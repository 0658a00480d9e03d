"""A folder of checkpoints, whatever happens to it: damage is found and said, and the last whole one is never lost."""

import logging
import random
import signal
from pathlib import Path

import pytest

from model.files.sealed_folder import check
from tests.train.faulty_disk import killed_at
from tests.train.test_faulty_disk import KEPT, save
from tests.trials import trials
from train import checkpoint
from train.checkpoint import TrainingStateError, newest_checkpoint, published

FOREIGN = ("step-1", "my-step-00000042", "step-00000042-copy", "step-00000007.old", ".staging-step-7", "notes")
CHANGES = 60
"""More than a save makes."""


def test_all_damage_is_found_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        save(tmp_path, step, step)
    generator = random.Random(0)
    files = sorted((tmp_path / "step-00000002").iterdir())
    whole = {path: path.read_bytes() for path in files}
    assert len(files) == 4

    def check_found(*damaged: Path) -> None:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = newest_checkpoint(tmp_path, set_aside=False)
        assert found is not None and found.state == {"version": 1}
        assert "Falling back" in caplog.text and any(path.name in caplog.text for path in damaged)
        for path in damaged:
            path.write_bytes(whole[path])

    for _ in range(trials(50, 500)):
        path = generator.choice(files)
        bit = generator.randrange(8 * len(whole[path]))
        content = bytearray(whole[path])
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        check_found(path)
    for _ in range(trials(10, 100)):
        path = generator.choice(files)
        path.write_bytes(whole[path][: generator.randrange(len(whole[path]))])
        check_found(path)
    for path in files:
        path.unlink()
        check_found(path)
    for one, other in [(one, other) for one in files for other in files if one < other]:
        one.write_bytes(whole[other])
        other.write_bytes(whole[one])
        check_found(one, other)
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.step == 2


class Sequence:
    """What happens to one folder, by chance; `newest` is the version that must be found."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.step, self.version, self.newest = 0, 0, None

    def save(self) -> None:
        """The next step, or the last one once more."""
        self._next()
        save(self.folder, self.step, self.version)
        self.newest = self.version
        assert len(published(self.folder)) <= KEPT

    def kill(self) -> None:
        self._next()
        status = killed_at(
            self.chance.randrange(1, CHANGES),
            lambda: save(self.folder, self.step, self.version),
            power_cut=self.chance.random() < 0.5,
        )
        assert status in (0, -signal.SIGKILL)
        self._either()

    def fail_to_read_back(self) -> None:
        self._next()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingStateError):
            patch.setattr(checkpoint, "_verify", self._refuse)
            save(self.folder, self.step, self.version)
        self._either()

    def damage(self) -> None:
        """The newest, where another whole one is left."""
        steps = self._whole()
        if len(steps) > 1:
            (steps[0] / "model.safetensors").write_bytes(b"damaged")
            found = newest_checkpoint(self.folder)
            assert found is not None and found.folder == steps[1]
            self.newest, self.step = found.state["version"], max(self.step, found.step)

    def bring_something_foreign(self) -> None:
        (self.folder / self.chance.choice(FOREIGN)).mkdir(parents=True, exist_ok=True)

    def _next(self) -> None:
        self.version += 1
        self.step += self.chance.random() < 0.8 or self.step == 0

    def _refuse(self, *_: object) -> None:
        raise TrainingStateError("read back wrong")

    def _either(self) -> None:
        found = newest_checkpoint(self.folder)
        version = None if found is None else found.state["version"]
        assert version in (self.newest, self.version)
        self.newest = version

    def _whole(self) -> list[Path]:
        return [path for path in published(self.folder) if self._is_whole(path)]

    def _is_whole(self, path: Path) -> bool:
        """A kill may have left half of an older one."""
        try:
            check(path, TrainingStateError)
        except TrainingStateError:
            return False
        return True


def test_no_sequence_loses_the_last_whole_checkpoint(tmp_path: Path) -> None:
    for seed in range(trials(6, 500)):
        sequence = Sequence(tmp_path / str(seed), seed)
        for _ in range(6):
            action = sequence.chance.choice(
                [sequence.save, sequence.save, sequence.kill, sequence.kill, sequence.fail_to_read_back,
                 sequence.damage, sequence.bring_something_foreign]
            )  # fmt: skip
            action()
            found = newest_checkpoint(sequence.folder)
            assert (None if found is None else found.state["version"]) == sequence.newest
        sequence.save()
        left = {path.name for path in sequence.folder.iterdir()}
        assert not {name for name in left - set(FOREIGN) if name.startswith(".")}
