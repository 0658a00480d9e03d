"""`potstill doctor`: what this environment is, and what in it would go wrong later."""

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pipeline.environment import ROOMS, memory_bytes, processor_name
from pipeline.report.table import size

OPTIONAL = {
    "datasets": "data sets from the hub, parquet files",
    "huggingface_hub": "models from the hub",
    "gguf": "GGUF files",
    "wandb": "tracking outside the run folder",
    "uvicorn": "serving over HTTP",
    "starlette": "serving over HTTP",
    "prometheus_client": "/metrics",
}
LOCK_NAME = "requirements.lock"
LOCKED = re.compile(r"^([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)[ \t]*$", re.MULTILINE)
"""A line that holds on every platform; one with a marker may rightly be missing here."""
LOW_DISK_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Finding:
    """One line: `bad` breaks something, `odd` may, `fine` is information."""

    level: str
    subject: str
    text: str


def run_doctor() -> int:
    """Prints every finding. Returns 1 when one is bad, else 0."""
    findings = list(examine())
    signs = {"fine": "  ", "odd": "? ", "bad": "! "}
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{signs[finding.level]}{finding.subject:<{width}}  {finding.text}")
    bad = sum(finding.level == "bad" for finding in findings)
    odd = sum(finding.level == "odd" for finding in findings)
    print(f"\n{bad} problems, {odd} things to know")
    return 1 if bad else 0


def examine() -> Iterator[Finding]:
    """All findings, the environment first."""
    yield Finding("fine", "potstill", f"{_version('potstill') or 'not installed'}, from {_home()}")
    too_old = sys.version_info < (3, 11)
    yield Finding("bad" if too_old else "fine", "python", f"{platform.python_version()} at {sys.executable}")
    yield from _libraries()
    yield from _machine()
    yield from _strangers()
    yield from _requirements()
    yield from _lock()
    yield from _optional()


def _libraries() -> Iterator[Finding]:
    torch = _version("torch")
    yield Finding("fine" if torch else "bad", "torch", torch or "not installed")
    if torch:
        yield _triton()


def _triton() -> Finding:
    """Whether it is there, and what its absence costs."""
    from torch import version

    found, is_for_gpus = importlib.util.find_spec("triton") is not None, bool(version.cuda or version.hip)
    if found:
        use = "for GPUs" if is_for_gpus else "not used: this torch is for CPUs"
        return Finding("fine", "triton", f"{_version('triton') or 'of unknown version'}, {use}")
    if is_for_gpus:
        return Finding("bad", "triton", "not installed: nothing runs on a GPU without it; pip install triton")
    return Finding("fine", "triton", "not installed, and not needed: this torch is for CPUs")


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("fine", "processor", f"{processor_name()}, {cores} cores, {size(memory_bytes())} memory")
    if _version("torch"):
        from kernels.linear.cpu_form import cpu_form
        from model.mesh import gpus

        yield Finding("fine", "products", f"with weights in 4 and 8 bits by {cpu_form()}")
        names = ", ".join(f"{gpu.name} ({size(gpu.total_memory)})" for gpu in gpus())
        yield Finding("fine", "GPU", names or "none: everything runs on the CPU")
    free = shutil.disk_usage(Path.cwd()).free
    yield Finding("odd" if free < LOW_DISK_BYTES else "fine", "disk", f"{size(free)} free in the current folder")


def _strangers() -> Iterator[Finding]:
    """Our import names are common words; a package of the same name in this environment would be imported instead."""
    owners = metadata.packages_distributions()
    for room in ROOMS:
        spec = importlib.util.find_spec(room)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or origin.parent.parent != _home():
            yield Finding("bad", room, f"is not ours but {origin}; install potstill into an environment of its own")
        for owner in sorted(set(owners.get(room, ())) - {"potstill"}):
            yield Finding("bad", room, f"the package {owner} brings a module of this name; uninstall it")


def _requirements() -> Iterator[Finding]:
    """Installed versions against the ranges that the package states."""
    try:
        from packaging.requirements import Requirement

        stated = metadata.requires("potstill") or []
    except (ImportError, metadata.PackageNotFoundError):
        return
    for requirement in map(Requirement, stated):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        if found is None and requirement.name.replace("-", "_") not in {"torch", "triton", *OPTIONAL}:
            yield Finding("bad", requirement.name, f"is not installed; potstill needs {requirement}")
        elif found is not None and not requirement.specifier.contains(found, prereleases=True):
            yield Finding("bad", requirement.name, f"is {found}; potstill needs {requirement.specifier}")


def _lock() -> Iterator[Finding]:
    """Installed versions against the lock file, where the source tree is at hand."""
    lock = _home() / LOCK_NAME
    if not lock.is_file():
        return
    pairs = LOCKED.findall(lock.read_text(encoding="utf-8"))
    others = [
        f"{name} {_version(name) or 'missing'} (locked {wanted})" for name, wanted in pairs if _differs(name, wanted)
    ]
    text = "all versions are the locked ones" if not others else f"differ from {LOCK_NAME}: {', '.join(others)}"
    yield Finding("odd" if others else "fine", "lock", text)


def _differs(name: str, wanted: str) -> bool:
    """Builds of one version, as in 2.13.0+cpu, are the same version."""
    return (_version(name) or "").partition("+")[0] != wanted.partition("+")[0]


def _optional() -> Iterator[Finding]:
    for name, purpose in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield Finding("odd", name, f"is not installed; needed for {purpose}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _home() -> Path:
    """The folder that holds our packages."""
    return Path(__file__).resolve().parent.parent
