"""Checkpoints behind training: of one moment, whole whenever a process dies, never at the cost of the one before."""

import itertools
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.train.recorded_cuda import COMPUTATION, HOST, RaceError, RecordedCuda
from tests.train.toy import STEPS, toy_trainer, weights_hash
from train.checkpoint import Files, newest_checkpoint
from train.checkpoint_writer import SHARE, CheckpointWriter, HostCopy

COPYING = "stream 1"


def random_files(seed: int) -> Files:
    """Weights and moments as training has them: fp32, 8 bits, every other column of a matrix, a shard without rows."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (9, 256), generator=generator, dtype=torch.uint8)
    weights = {"a": torch.randn(20, 31, generator=generator)[:, ::2], "b": torch.randn(7, generator=generator)}
    return {"model": weights, "optimizer": {"exp_avg.a": codes, "exp_avg.b": torch.empty(0, 5)}}


def copied(files: Files) -> Files:
    return {name: {key: tensor.clone() for key, tensor in group.items()} for name, group in files.items()}


def check_published(folder: Path, step: int, files: Files) -> None:
    for name, tensors in files.items():
        found = load_file(folder / f"step-{step:08d}" / f"{name}.safetensors")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())


def writer_in(folder: Path, moved: Callable[[int], None] | None = None) -> CheckpointWriter:
    writer = CheckpointWriter(folder, keep=2, part=0, parts=1)
    if moved is not None:
        writer.moved = moved  # type: ignore[method-assign]
    return writer


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("model.files.safe_io", "train.checkpoint"):
        monkeypatch.setattr(f"{module}.HASH_CHUNK_BYTES", 256)


class Gate:
    """Holds up the thread after its first piece."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, num_bytes: int) -> None:
        self.reached.set()
        assert self.open.wait(30)


def test_whatever_moment_a_process_dies_at_the_last_whole_checkpoint_is_found(
    tmp_path: Path, small_pieces: None, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {step: random_files(step) for step in (1, 2)}
    moments = itertools.count()

    def die(num_bytes: int) -> None:
        """What a killed process would leave now."""
        shutil.copytree(tmp_path / "run", tmp_path / str(next(moments)))

    with writer_in(tmp_path / "run") as writer:
        writer.save(1, saved[1], {})
        writer.wait()
        writer.moved = die  # type: ignore[method-assign]
        writer.save(2, saved[2], {})
    found = []
    for moment in range(next(moments)):
        checkpoint = newest_checkpoint(tmp_path / str(moment))
        assert checkpoint is not None
        check_published(tmp_path / str(moment), checkpoint.step, saved[checkpoint.step])
        found.append(checkpoint.step)
    assert found == sorted(found) and found.count(1) > 20 and found.count(2) > 10
    assert not caplog.text  # nothing was damaged


def test_a_checkpoint_is_of_the_moment_of_its_save(tmp_path: Path, small_pieces: None) -> None:
    gate, files = Gate(), random_files(1)
    before = copied(files)
    with writer_in(tmp_path, gate) as writer:
        writer.save(1, files, {})
        assert gate.reached.wait(30)
        for tensor in itertools.chain.from_iterable(group.values() for group in files.values()):
            tensor.zero_()
        gate.open.set()
    check_published(tmp_path, 1, before)


def test_a_second_save_waits_for_the_first_and_the_end_for_both(tmp_path: Path, small_pieces: None) -> None:
    gate = Gate()
    with writer_in(tmp_path, gate) as writer:
        writer.save(1, random_files(1), {})
        assert gate.reached.wait(30)
        second = threading.Thread(target=writer.save, args=(2, random_files(2), {}))
        second.start()
        second.join(0.1)
        assert second.is_alive()
        gate.open.set()
        second.join()
    for step in (1, 2):
        check_published(tmp_path, step, random_files(step))


def test_an_interrupt_gives_up_what_is_being_written(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.checkpoint_writer.SHARE", 1e-9)  # it rests after its first piece
    with pytest.raises(KeyboardInterrupt), writer_in(tmp_path) as writer:
        writer.save(1, random_files(1), {})
        thread = writer._thread
        raise KeyboardInterrupt
    assert thread is not None and not thread.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_its_memory_is_allocated_once(tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        places = []
        for step in (1, 2):
            writer.save(step, random_files(step), {})
            places.append([tensor.data_ptr() for group in writer.copy.files.values() for tensor in group.values()])
    assert places[0] == places[1]


def test_a_first_save_finds_its_memory_made(tmp_path: Path) -> None:
    """Each page that is first written to is an interrupt, of a step where training copies to it."""
    files: Files = {"model": {str(number): torch.ones(1000, 1000) for number in range(50)}}
    with writer_in(tmp_path) as writer:
        writer.prepare(lambda: files)
        writer.wait()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        writer.save(1, files, {})
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 1000  # 200 MB are 48,828 pages
    check_published(tmp_path, 1, files)


@pytest.mark.parametrize(("waited_s", "made_before"), [(0, False), (600, True)])
def test_training_makes_the_memory_of_its_first_save_once_half_of_the_time_has_passed(
    waited_s: float, made_before: bool, tmp_path: Path
) -> None:
    trainer = toy_trainer(tmp_path, checkpoint_every_s=1000)
    trainer._saved_at -= waited_s
    made, taken = [], []

    def addresses() -> list[int]:
        return [tensor.data_ptr() for group in trainer.writer.copy.files.values() for tensor in group.values()]

    prepare, take = trainer.writer.prepare, trainer.writer.copy.take
    trainer.writer.prepare = lambda files: (prepare(files), made.append(addresses()))  # type: ignore[assignment]
    trainer.writer.copy.take = lambda files: (take(files), taken.append(addresses()))  # type: ignore[assignment]
    trainer.train()
    assert len(taken) == 1 and made == (STEPS - 1) * taken * made_before


def test_on_a_cpu_it_takes_a_tenth_of_a_core_until_somebody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, rests = itertools.count(step=0.25), []
    monkeypatch.setattr("train.checkpoint_writer.time.thread_time", lambda: next(clock))
    writer = writer_in(tmp_path)
    monkeypatch.setattr(writer._awaited, "wait", rests.append)
    writer.save(1, random_files(1), {})
    writer.wait()
    assert writer._awaited.is_set()
    _, _, *others = rests  # one for what the copy took, and one after a piece beside which it may have asked the clock
    assert others and all(0.25 / (0.25 + rest) == pytest.approx(SHARE) for rest in others)


def test_it_rests_first_for_what_the_copy_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which was work beside training, too: a step has one of both at a time."""
    files, rests = random_files(1), []
    monkeypatch.setattr("train.checkpoint_writer.time.thread_time", lambda: 0.5)
    writer = writer_in(tmp_path)
    monkeypatch.setattr(writer._awaited, "wait", lambda seconds: rests.append((seconds, list(tmp_path.iterdir()))))
    writer.save(1, files, {})
    writer.wait()
    (first, written), *others = rests
    assert 0.5 / (0.5 + first) == pytest.approx(SHARE) and not written
    assert others and all(seconds == 0 for seconds, _ in others)


# Training


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond it: writes fail half-way, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_stops_training_with_a_sentence_and_costs_no_checkpoint(tmp_path: Path) -> None:
    straight = toy_trainer(tmp_path / "straight")
    straight.train()
    trainer = toy_trainer(tmp_path / "failing", checkpoint_every_s=0.0)
    saved = trainer._save
    limited = file_limit(100_000)

    def save() -> None:
        if trainer.counters.step == 5:
            trainer.writer.wait()
            limited.__enter__()
        saved()

    trainer._save = save  # type: ignore[method-assign]
    try:
        with pytest.raises(OSError, match=r"The checkpoint of step 5 cannot be written to .*: File too large. The one"):
            trainer.train()
    finally:
        limited.__exit__(None, None, None)
    assert trainer.counters.step in (5, 6)  # noticed in the step after, or when that is to be saved
    names = sorted(path.name for path in (tmp_path / "failing" / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000004"]
    again = toy_trainer(tmp_path / "failing")
    assert again.train().steps == STEPS
    assert weights_hash(again.model) == weights_hash(straight.model)


class SlowCopy(HostCopy):
    """On a CPU; it copies once it may, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.error, self.begun, self.may_copy = error, threading.Event(), threading.Event()

    def _copy(self, files: Files) -> None:
        self.begun.set()
        assert self.may_copy.wait(30)
        if self.error is not None:
            raise self.error
        super()._copy(files)


def test_on_a_cpu_training_goes_on_beside_the_copy_until_an_update() -> None:
    copy, files = SlowCopy(), random_files(1)
    before = copied(files)
    copy.take(files)
    assert copy.begun.wait(30)
    threading.Timer(0.2, copy.may_copy.set).start()
    copy.update_may_begin()
    for tensor in itertools.chain.from_iterable(group.values() for group in files.values()):
        tensor.zero_()
    for name, tensors in before.items():
        assert all(torch.equal(copy.files[name][key], tensor) for key, tensor in tensors.items())
    copy.update_may_begin()  # nothing is on its way


def test_on_a_cpu_an_update_says_what_the_copy_failed_with() -> None:
    copy = SlowCopy(MemoryError("no room"))
    copy.may_copy.set()
    copy.take(random_files(1))
    with pytest.raises(MemoryError, match="no room"):
        copy.update_may_begin()


# On a GPU


def copy_and_update(copy: HostCopy, files: Files) -> list[Tensor]:
    """Twice, as the loop and the thread do; what the thread reads."""
    for _ in range(2):
        for tensor in files["model"].values():
            tensor.mul_(2.0)
        copy.take(files)
        arriving = copy.arriving
        copy.update_may_begin()
        for tensor in files["model"].values():
            tensor.add_(1.0)
        arriving.synchronize()
        read = [torch.zeros(tensor.shape).copy_(tensor) for tensor in copy.files["model"].values()]
    return read


def test_a_copy_to_pinned_memory_is_of_its_moment_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    files, expected = random_files(1), random_files(1)["model"].values()
    with RecordedCuda(monkeypatch) as cuda:
        copy = HostCopy(torch.device("cuda"))
        found = copy_and_update(copy, files)
        assert list(cuda.pinned.values()) == [sum(t.nbytes for group in files.values() for t in group.values())]
    for tensor, before in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, 2 * (2 * before + 1))


WAITS = [(COPYING, COMPUTATION), (COMPUTATION, COPYING), (HOST, COPYING)]


@pytest.mark.parametrize("wait", WAITS, ids=" for ".join)
def test_each_wait_of_a_copy_to_pinned_memory_is_needed(wait: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with RecordedCuda(monkeypatch, ignored_wait=wait), pytest.raises(RaceError):
        copy_and_update(HostCopy(torch.device("cuda")), random_files(1))
