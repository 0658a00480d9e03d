"""doctor works from anywhere and finds a stranger under one of our names."""

import os
import subprocess
import sys
from pathlib import Path

from tests.pipeline.tiny_run import ROOT


def doctor(cwd: Path, *paths: Path) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    code = "import sys; from pipeline.cli import main; sys.exit(main(['doctor']))"
    return subprocess.run([sys.executable, "-P", "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)


def test_a_good_environment_is_good_from_a_foreign_folder(tmp_path: Path) -> None:
    done = doctor(tmp_path, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 problems" in done.stdout
    for subject in ("potstill", "python", "torch", "processor", "GPU", "disk", "lock"):
        assert f"\n  {subject} " in "\n" + done.stdout or f"\n? {subject} " in "\n" + done.stdout


def test_a_stranger_is_named(tmp_path: Path) -> None:
    stranger = tmp_path / "strangers" / "kernels"
    stranger.mkdir(parents=True)
    (stranger / "__init__.py").write_text("__version__ = '1'\n")
    # The command itself must still start, so only rooms that it does not need at once can be taken.
    stranger.rename(stranger.with_name("train"))
    done = doctor(tmp_path, tmp_path / "strangers", ROOT)
    assert done.returncode == 1
    assert "! train" in done.stdout and "is not ours" in done.stdout and "environment of its own" in done.stdout
