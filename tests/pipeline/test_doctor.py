"""doctor works from anywhere and finds a stranger under one of our names."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.doctor import examine
from tests.pipeline.tiny_run import ROOT


def doctor(cwd: Path, *paths: Path) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    code = "import sys; from pipeline.cli import main; sys.exit(main(['doctor']))"
    return subprocess.run([sys.executable, "-P", "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)


def test_a_good_environment_is_good_from_a_foreign_folder(tmp_path: Path) -> None:
    done = doctor(tmp_path, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 problems" in done.stdout
    for subject in ("potstill", "python", "torch", "triton", "processor", "products", "GPU", "disk", "lock"):
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


@pytest.mark.parametrize(
    ("cuda", "level", "words"),
    [(None, "fine", "not needed: this torch is for CPUs"), ("13.0", "bad", "pip install triton")],
)
def test_what_a_missing_triton_costs(monkeypatch: pytest.MonkeyPatch, cuda: str | None, level: str, words: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (finding,) = (finding for finding in examine() if finding.subject == "triton")
    assert finding.level == level and words in finding.text
