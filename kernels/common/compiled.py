"""C sources, compiled by the machine's own compiler when they are first needed.

The library lies in the user's cache under a hash of everything it was made from: source, headers, command, compiler,
processor.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernels.common.processor import Needs, is_arm64, processor_features, suits

log = logging.getLogger(__name__)


def compiled(source: Path, needs: Needs) -> ctypes.CDLL | None:
    """The library of a C source that needs these features of a processor, as Linux names them; else None, and a log."""
    try:
        return ctypes.CDLL(str(_library(source, needs)))
    except subprocess.CalledProcessError as error:
        reason = f"`{error.cmd[0]}` failed: {(error.stderr or str(error)).strip()}"
    except (OSError, RuntimeError) as error:
        reason = str(error)
    log.info("what %s makes faster runs in torch: %s", source.name, reason)
    return None


def _library(source: Path, needs: Needs) -> Path:
    """The compiled library. Raises RuntimeError where something is missing, and what the system and compiler raise."""
    features = processor_features()
    if not suits(features, needs):
        raise RuntimeError(f"the processor has not all of {' or of '.join(' '.join(sorted(each)) for each in needs)}")
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("there is no C compiler `cc`")
    headers = {*Path(__file__).parent.glob("*.h"), *source.parent.glob("*.h")}
    sources = [path.read_bytes() for path in (source, *sorted(headers))]
    made_from = (sources, command(compiler, source.name, ""), _run(compiler, "--version"), sorted(features))
    name = f"{source.stem}-{hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]}.so"
    library = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "potstill" / "compiled" / name
    if not library.exists():
        log.info("compiling %s for this processor, which takes some seconds, once", source.name)
        _compile(source, compiler, library)
    return library


def command(compiler: str, source: str, library: str, processor: str | None = None) -> tuple[str, ...]:
    """What compiles a source for a processor in the compiler's words; default: this machine's.

    Apple's compiler knows OpenMP but brings no library for it: torch does.
    """
    processor = processor or ("-mcpu=native" if is_arm64() else "-march=native")
    openmp: tuple[str, ...] = ("-fopenmp",)
    if sys.platform == "darwin":
        import torch

        brought = Path(torch.__file__).parent / "lib" / "libomp.dylib"
        openmp = ("-Xclang", "-fopenmp", str(brought), f"-Wl,-rpath,{brought.parent}")
    return (compiler, "-O3", processor, *openmp, "-shared", "-fPIC", source, "-lm", "-o", library)


def _compile(source: Path, compiler: str, library: Path) -> None:
    """Into a file of this process first: nobody ever loads half a library."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        _run(*command(compiler, str(source), str(made)))
        made.replace(library)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout
