"""Folders of labels: what was written is read, whoever dies meanwhile, and never more than may be kept."""

from pathlib import Path

import numpy as np
import pytest

from model.files import labels
from model.files.distributions import Sampled
from model.files.label_shards import label_shards
from model.files.labels import LabelFolder, LabelledDocument, LabelsError, Origin, read_labels

ORIGIN = Origin("teacher", "vocabulary", 50)


def document(seed: int, tokens: int = 40) -> LabelledDocument:
    random = np.random.default_rng(seed)
    positions = np.sort(random.choice(tokens - 1, 7, replace=False)).astype(np.int64)
    sizes = random.integers(1, 5, len(positions))
    ids = np.concatenate([np.sort(random.choice(100_000, size, replace=False)) for size in sizes])
    counts, entropies = random.integers(1, 50, len(ids)).astype(np.uint8), random.random(len(positions))
    sampled = Sampled(sizes, ids, counts, entropies.astype(np.float16).astype(np.float32))
    return LabelledDocument(random.integers(0, 100_000, tokens).astype(np.int32), positions, sampled)


def same(found: LabelledDocument, wanted: LabelledDocument) -> bool:
    pairs = [*zip(found[:2], wanted[:2], strict=True)]
    pairs += zip(vars(found.sampled).values(), vars(wanted.sampled).values(), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


def test_documents_come_back_and_the_oldest_go_first(tmp_path: Path) -> None:
    written = [[document(10 * shard + number, 30 + shard) for number in range(3)] for shard in range(6)]
    folder = LabelFolder(tmp_path / "labels", ORIGIN, max_bytes=1 << 30)
    for some in written:
        folder.write(some)
    shards = label_shards(folder.folder)
    for shard, wanted in zip(shards, written, strict=True):
        assert all(map(same, read_labels(shard), wanted))
    assert folder.num_bytes == sum(shard.stat().st_size for shard in shards)
    folder.close()

    kept = LabelFolder(tmp_path / "labels", ORIGIN, max_bytes=2 * shards[0].stat().st_size)
    kept.write([document(99)])
    left = label_shards(kept.folder)
    assert [labels.shard_number(shard) for shard in left] == [5, 6]
    assert kept.num_bytes == sum(shard.stat().st_size for shard in left) <= kept.max_bytes


def test_a_death_leaves_no_half_and_damage_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LabelFolder(tmp_path, ORIGIN, max_bytes=1 << 30)
    folder.write([document(0)])

    def dies(path: Path) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(labels, "sha256_of", dies)
        folder.write([document(1)])
    [shard] = label_shards(tmp_path)
    folder.close()
    LabelFolder(tmp_path, ORIGIN, max_bytes=1 << 30).write([document(2)])
    assert not list(tmp_path.glob("*.staging")) and len(label_shards(tmp_path)) == 2
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(LabelsError, match=f"{shard.name} has been altered"):
        list(read_labels(shard))
    shard.unlink()
    with pytest.raises(LabelsError, match="was removed by the server"):
        list(read_labels(shard))


def test_a_folder_is_one_servers_and_one_models(tmp_path: Path) -> None:
    folder = LabelFolder(tmp_path, ORIGIN, max_bytes=1)
    with pytest.raises(LabelsError, match="another server stores its labels there"):
        LabelFolder(tmp_path, ORIGIN, max_bytes=1)
    folder.close()
    with pytest.raises(LabelsError, match="holds labels of another model; name another folder"):
        LabelFolder(tmp_path, Origin("other", "vocabulary", 50), max_bytes=1)
    LabelFolder(tmp_path, ORIGIN, max_bytes=1).close()
