"""Publishing is all or nothing, and an altered artifact never opens."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import model.files.artifact
import model.files.safe_io
from model.files.artifact import MANIFEST_NAME, ArtifactError, is_artifact, model_card, open_artifact, publish
from model.files.checkpoint import save_model
from tests.tiny import tiny_model
from tests.trials import trials

CONTENTS = {"config.json": "{}", "model.safetensors": "weights" * 50, "adapters/one/weights.bin": "x" * 300}


def write_contents(folder: Path, contents: dict[str, str] = CONTENTS) -> None:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def publish_contents(folder: Path, **changes: Any) -> model.files.artifact.Manifest:
    fields = {"stage": "distill", "recipe": {"tokens": 20, "α": 0.1}, "parents": ["p1"], "gates": {"kl": 0.5}} | changes
    return publish(folder, fields.pop("write", write_contents), **fields)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    publish_contents(tmp_path / "student")
    return tmp_path / "student"


def test_what_is_published_opens_with_its_lineage(tmp_path: Path) -> None:
    published = publish_contents(tmp_path / "runs" / "demo" / "student")
    opened = open_artifact(tmp_path / "runs" / "demo" / "student")
    assert opened == published
    assert (opened.stage, opened.recipe, opened.parents, opened.gates) == (
        "distill",
        {"tokens": 20, "α": 0.1},
        ("p1",),
        {"kl": 0.5},
    )
    assert opened.files.keys() == CONTENTS.keys()
    assert {"python", "torch", "safetensors", "tokenizers"} <= opened.versions.keys()
    assert [path.name for path in (tmp_path / "runs" / "demo").iterdir()] == ["student"]


def test_the_digest_is_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = publish_contents(tmp_path / "a")
    monkeypatch.setattr(model.files.artifact, "_versions", lambda: {"torch": "9.9"})
    same = publish_contents(tmp_path / "b", gates={"kl": 0.4})
    assert same.digest == first.digest == open_artifact(tmp_path / "a").digest
    within = [replace(one, created=str(number)).repeatable() for number, one in enumerate((first, same))]
    assert within[0].to_json() == within[1].to_json() and within[0].digest == first.digest
    others = [
        publish_contents(tmp_path / "c", stage="prune"),
        publish_contents(tmp_path / "d", recipe={"tokens": 21}),
        publish_contents(tmp_path / "e", parents=["p2"]),
        publish_contents(tmp_path / "f", write=lambda folder: write_contents(folder, CONTENTS | {"config.json": "[]"})),
    ]
    assert len({manifest.digest for manifest in [first, *others]}) == 5


def test_publishing_again_replaces_the_old(artifact: Path) -> None:
    publish_contents(artifact, write=lambda folder: write_contents(folder, {"only.txt": "new"}))
    assert open_artifact(artifact).files.keys() == {"only.txt"}
    assert not (artifact / "config.json").exists()
    assert [path.name for path in artifact.parent.iterdir()] == ["student"]


def test_a_recipe_must_be_plain_json(tmp_path: Path) -> None:
    for value in (object(), float("nan")):
        with pytest.raises(ArtifactError, match="recipe of an artifact must be plain JSON"):
            publish_contents(tmp_path / "student", recipe={"value": value})
    assert list(tmp_path.iterdir()) == []


# Damage


def test_every_missing_file_is_named(artifact: Path) -> None:
    for name in CONTENTS:
        text = (artifact / name).read_text()
        (artifact / name).unlink()
        for verify in (True, False):
            with pytest.raises(ArtifactError, match=f"{name} is missing"):
                open_artifact(artifact, verify=verify)
        assert not is_artifact(artifact)
        (artifact / name).write_text(text)
    assert is_artifact(artifact)


def test_every_extra_file_is_named(artifact: Path) -> None:
    for name in ("extra.txt", "adapters/two.bin", ".hidden"):
        (artifact / name).write_text("")
        with pytest.raises(ArtifactError, match=f"{name} is not named"):
            open_artifact(artifact)
        (artifact / name).unlink()
    open_artifact(artifact)


def test_links_are_refused(artifact: Path, tmp_path: Path) -> None:
    weights = artifact / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"model.safetensors is not a regular file"):
        open_artifact(artifact)


def test_every_flipped_bit_is_found(artifact: Path) -> None:
    rng = random.Random(0)
    for name in [*CONTENTS, MANIFEST_NAME]:
        whole = (artifact / name).read_bytes()
        for _ in range(150):
            bit = rng.randrange(8 * len(whole))
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            (artifact / name).write_bytes(flipped)
            with pytest.raises(ArtifactError, match=name):
                open_artifact(artifact)
        (artifact / name).write_bytes(whole)
    open_artifact(artifact)


def test_every_truncation_is_found(artifact: Path) -> None:
    rng = random.Random(0)
    for name in [*CONTENTS, MANIFEST_NAME]:
        whole = (artifact / name).read_bytes()
        for size in {0, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(30))}:
            (artifact / name).write_bytes(whole[:size])
            with pytest.raises(ArtifactError, match=name):
                open_artifact(artifact, verify=False)
        (artifact / name).write_bytes(whole)


def test_swapped_files_are_found(tmp_path: Path) -> None:
    publish_contents(
        tmp_path / "m", write=lambda folder: write_contents(folder, {"shard-1": "aaaa", "shard-2": "bbbb"})
    )
    (tmp_path / "m" / "shard-1").write_text("bbbb")
    (tmp_path / "m" / "shard-2").write_text("aaaa")
    with pytest.raises(ArtifactError, match="shard-1 is damaged"):
        open_artifact(tmp_path / "m")


@pytest.mark.parametrize("edit", ["stage", "created", "recipe", "versions", "gates", "parents", "files", "new"])
def test_every_edited_field_of_the_manifest_is_found(edit: str, artifact: Path) -> None:
    raw = json.loads((artifact / MANIFEST_NAME).read_text())
    value = raw.get(edit)
    raw[edit] = {"tampered": "1"} if isinstance(value, dict) else ["p9"] if isinstance(value, list) else "tampered"
    (artifact / MANIFEST_NAME).write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    with pytest.raises(ArtifactError, match=f"{MANIFEST_NAME} is damaged"):
        open_artifact(artifact)


def test_every_changed_character_of_the_manifest_is_found(artifact: Path) -> None:
    rng = random.Random(0)
    whole = (artifact / MANIFEST_NAME).read_text()
    for _ in range(trials(20, 100)):
        at = rng.randrange(len(whole))
        other = rng.choice([c for c in '0123456789abcdef"{},: ' if c != whole[at]])
        edited = rng.choice(
            [whole[:at] + other + whole[at + 1 :], whole[:at] + other + whole[at:], whole[:at] + whole[at + 1 :]]
        )
        (artifact / MANIFEST_NAME).write_text(edited)
        with pytest.raises(ArtifactError, match=MANIFEST_NAME):
            open_artifact(artifact)


def test_other_formats_are_refused(artifact: Path, tmp_path: Path) -> None:
    raw = json.loads((artifact / MANIFEST_NAME).read_text())
    (artifact / MANIFEST_NAME).write_text(json.dumps(raw | {"format_version": 2}))
    with pytest.raises(ArtifactError, match="format version 2; this release reads version 1"):
        open_artifact(artifact)
    for folder in (tmp_path / "nowhere", tmp_path, artifact / "config.json"):
        with pytest.raises(ArtifactError, match=f"is not an artifact: it has no {MANIFEST_NAME}"):
            open_artifact(folder)
        assert not is_artifact(folder)


# Faults while publishing


class FaultyDisk:
    """Counts the calls that reach the disk and fails from the given one on, as a full or dying disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int | None) -> None:
        self.calls, self.fails_at = 0, fails_at
        for name in ("fsync", "replace"):
            monkeypatch.setattr(os, name, self._guard(getattr(os, name)))

    def _guard(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.fails_at is not None and self.calls == self.fails_at:
                raise OSError(28, "No space left on device")
            return call(*arguments, **options)

        return guarded


def new_contents(folder: Path) -> None:
    write_contents(folder, CONTENTS | {"config.json": '{"new": true}'})


@pytest.mark.parametrize("replaces", [False, True], ids=["first", "again"])
def test_a_fault_at_any_point_leaves_the_old_or_the_new(
    replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        disk = FaultyDisk(patch, None)
        publish_contents(tmp_path / "dry", write=new_contents)
        points = disk.calls + (1 if replaces else 0)
    assert points >= 10
    failures = 0
    for fails_at in range(1, points + 1):
        target = tmp_path / f"case-{fails_at}" / "student"
        target.parent.mkdir()
        old = publish_contents(target) if replaces else None
        with monkeypatch.context() as patch:
            FaultyDisk(patch, fails_at)
            try:
                publish_contents(target, write=new_contents)
            except OSError:
                failures += 1
        if target.exists():
            found = open_artifact(target)
            assert found == old or (target / "config.json").read_text() == '{"new": true}'
        assert target.exists() or not replaces
        assert publish_contents(target, write=new_contents) == open_artifact(target)
        assert [path.name for path in target.parent.iterdir()] == ["student"]
    assert failures == points


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """The system refuses to let any file grow beyond the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_keeps_the_old_artifact(tmp_path: Path) -> None:
    """Real refusals of the system, at every stage of writing a real model; the error is always an OSError."""
    target = tmp_path / "student"

    def write_model(folder: Path) -> None:
        save_model(tiny_model("llama"), folder, max_shard_bytes=200_000)

    old = publish_contents(target, write=write_model)
    largest = max(record.size for record in old.files.values())
    for limit in [0, 1, 20, 200, 800, 2000, 10_000, *range(20_000, largest, 30_000), largest - 1]:
        with largest_file(limit), pytest.raises(OSError):
            publish_contents(target, write=write_model)
        assert open_artifact(target) == old
        assert [path.name for path in tmp_path.iterdir()] == ["student"]
    with largest_file(largest):
        publish_contents(target, write=write_model)


def test_an_error_while_writing_reaches_the_caller_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write_contents(folder)
        raise RuntimeError("gate not met")

    with pytest.raises(RuntimeError, match="gate not met"):
        publish_contents(tmp_path / "student", write=fail)
    assert list(tmp_path.iterdir()) == []


KILLED_PUBLISH = """
import os, sys
from pathlib import Path
from model.files.artifact import publish

target, kills_at = Path(sys.argv[1]), int(sys.argv[2])
calls = 0

def deadly(call):
    def guarded(*arguments, **options):
        global calls
        calls += 1
        if calls == kills_at:
            os.kill(os.getpid(), 9)
        return call(*arguments, **options)
    return guarded

for name in ("fsync", "replace"):
    setattr(os, name, deadly(getattr(os, name)))

def write(folder):
    (folder / "config.json").write_text('{"new": true}')

publish(target, write, stage="distill", recipe={})
"""


def test_sigkill_at_any_point_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """A real SIGKILL; what it leaves beside the target is gone after the next publish."""
    target = tmp_path / "student"
    outcomes = []
    for kills_at in range(1, 40):
        old = publish_contents(target)
        process = subprocess.run([sys.executable, "-c", KILLED_PUBLISH, str(target), str(kills_at)], check=False)
        retired = target.with_name(".student.retired")
        survivor = target if target.exists() else retired
        found = open_artifact(survivor)
        assert found == old or (survivor / "config.json").read_text() == '{"new": true}'
        outcomes.append((process.returncode, target.exists()))
        if process.returncode == 0:
            break
    assert outcomes[-1] == (0, True)
    assert (-signal.SIGKILL, False) in outcomes, "no kill fell between the two renames"
    assert len(outcomes) >= 6
    publish_contents(target)
    assert [path.name for path in tmp_path.iterdir()] == ["student"]


def test_a_kill_between_the_renames_is_undone_by_the_next_publish(artifact: Path) -> None:
    """Even when that publish fails: the old artifact is back before the new one is tried."""
    old = open_artifact(artifact)
    os.replace(artifact, artifact.with_name(".student.retired"))
    with pytest.raises(RuntimeError):
        publish_contents(artifact, write=lambda folder: (_ for _ in ()).throw(RuntimeError("stop")))
    assert open_artifact(artifact) == old


def test_folders_of_similar_names_are_left_alone(artifact: Path) -> None:
    neighbours = [".student.staging.bak", ".student2.staging", "student.staging", ".student.retired2"]
    for name in neighbours:
        (artifact.parent / name).mkdir()
    publish_contents(artifact)
    assert all((artifact.parent / name).is_dir() for name in neighbours)


def test_the_model_card_says_how_to_serve() -> None:
    card = model_card(
        name="smollm2-small",
        stage="distill",
        recipe={"tokens": 20},
        parents={"teacher": "92598896"},
        metrics={"perplexity": 12.345678, "parameters": 60_000_000},
    )
    assert card.startswith("---\nlibrary_name: transformers\n")
    for expected in (
        "# smollm2-small",
        "| teacher | 92598896 |",
        "| perplexity | 12.3457 |",
        "| parameters | 60000000 |",
        "potstill serve PATH",
        '"tokens": 20',
    ):
        assert expected in card
