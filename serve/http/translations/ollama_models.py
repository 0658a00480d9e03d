"""What Ollama's clients ask of the models themselves: GET /api/tags, POST /api/show."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from model.files.safe_io import read_json_object
from serve.http.generation import Service
from serve.messages import Ready


class ShowRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /api/show."""

    model: str
    verbose: bool | None = None


class ModelDetails(msgspec.Struct, frozen=True):
    """What kind of model it is; `quantization_level` is the type that it computes in."""

    parent_model: str
    family: str
    families: list[str]
    quantization_level: str
    format: str = "safetensors"


class OllamaModel(msgspec.Struct, frozen=True):
    """One entry of /api/tags; the digest changes with the files' names, sizes and times."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class OllamaModels(msgspec.Struct, frozen=True):
    models: list[OllamaModel]


class ShownModel(msgspec.Struct, frozen=True):
    modified_at: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modelfile: str = ""
    parameters: str = ""


def tags(service: Service, info: Ready) -> OllamaModels:
    """The model and its adapters."""
    options = service.options
    own = [_entry(name, Path(options.engine.model), _details(service, info, "")) for name in options.model_names]
    details = _details(service, info, options.model_names[0])
    return OllamaModels(
        [*own, *(_entry(name, Path(at), details) for name, at in service.engine.adapters.folders.items())]
    )


def show(service: Service, info: Ready, name: str) -> ShownModel:
    """One of those, closer."""
    options = service.options
    adapter, family = service.engine.adapters.folders.get(name), _family(service)
    template = service.tokenizer.templates.get("default")
    return ShownModel(
        _modified(_files(Path(adapter or options.engine.model))),
        "" if template is None else template.source,
        _details(service, info, options.model_names[0] if adapter else ""),
        {"general.architecture": family, f"{family}.context_length": info.max_model_len},
        _capabilities(service),
    )


def _capabilities(service: Service) -> list[str]:
    """What Ollama's clients look for before they send tools, or ask for thoughts."""
    formats = service.formats
    calls = formats.shows_tools and formats.tools is not None
    found = {"completion": True, "tools": calls, "thinking": formats.reasoning is not None}
    return [name for name, has in found.items() if has]


def _family(service: Service) -> str:
    path = Path(service.options.engine.model) / "config.json"
    return str(read_json_object(path, ValueError).get("model_type", "unknown"))


def _details(service: Service, info: Ready, parent: str) -> ModelDetails:
    family = _family(service)
    return ModelDetails(parent, family, [family], info.dtype)


def _entry(name: str, folder: Path, details: ModelDetails) -> OllamaModel:
    files = _files(folder)
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    size = sum(bytes_ for _, bytes_, _ in stats)
    return OllamaModel(name, name, _modified(files), size, hashlib.sha256(repr(stats).encode()).hexdigest(), details)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _modified(files: list[Path]) -> str:
    latest = max((path.stat().st_mtime for path in files), default=0.0)
    return datetime.fromtimestamp(latest, UTC).isoformat()
