"""The files of a folder of labels (model/files/labels.py), for whoever need not read them."""

import re
from pathlib import Path

INDEX_NAME = "labels.json"
SHARD_NAME = re.compile(r"labels-(\d{6,})\.([0-9a-f]{64})\.safetensors")


def is_label_folder(path: str | Path) -> bool:
    return (Path(path) / INDEX_NAME).is_file()


def label_shards(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted((path for path in folder.iterdir() if SHARD_NAME.fullmatch(path.name)), key=shard_number)


def shard_number(shard: Path) -> int:
    return int(shard.name.split("-")[1].split(".")[0])
