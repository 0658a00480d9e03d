"""`potstill export`: a finished model in the layout of another program.

What can be written is one line of TARGETS; the module that it names is imported when it is asked for.
"""

import argparse
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from model.files.artifact import MANIFEST_NAME, open_artifact
from model.formats.registry import FOREIGN_FORMATS
from pipeline.errors import UserError
from pipeline.run_folder import resolve_served


@dataclass(frozen=True)
class Target:
    """A layout that models can be written in."""

    function: str
    """"module:name"; takes a model folder, a path that is not there yet, a type and the model's name."""
    default_type: str
    suffix: str
    """Of what is written."""


QUANTIZED = "model.formats.convert:export_quantized"
TARGETS = {
    "gguf": Target("model.formats.gguf.writer:export_gguf", "bf16", ".gguf"),
    "compressed-tensors": Target(QUANTIZED, "compressed-tensors", ""),
    **{name: Target(QUANTIZED, name, "") for name in FOREIGN_FORMATS},
}


def export(options: argparse.Namespace) -> str:
    """Writes the model that the options name; returns the sentence that says what was written.

    Raises UserError where nothing can be written so, and ArtifactError where a published file was altered.
    """
    target_name, _, wanted = options.to.partition(":")
    if target_name not in TARGETS:
        raise UserError(f"Nothing can be exported to {target_name!r}; known are {', '.join(TARGETS)}.")
    target, served = TARGETS[target_name], resolve_served(options.model)
    folder, type = Path(served.model), wanted or target.default_type
    if (folder / MANIFEST_NAME).exists():
        open_artifact(folder)
    name = served.name or _name_of(folder)
    out = options.out or Path(f"{name}-{type}{target.suffix}")
    module, _, function = target.function.partition(":")
    getattr(import_module(module), function)(folder, out, type=type, name=name)
    return _sentence(folder, out, type)


def _name_of(folder: Path) -> str:
    """Of a model folder; the stage's in a run, where each is called "model"."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "model" else folder.name


def _sentence(folder: Path, out: Path, type: str) -> str:
    from model.files.checkpoint import load_config
    from pipeline.report.table import count, size

    files = out.glob("*.safetensors") if out.is_dir() else [out]
    parameters, num_bytes = load_config(folder).num_parameters(), sum(file.stat().st_size for file in files)
    held = f"{count(parameters)} parameters in {size(num_bytes)}, {8 * num_bytes / parameters:.2f} bits a weight"
    return f"{out} holds {folder} in {type}: {held}, tokenizer included."
