"""C sources compiled when needed: once, whole for every process, and with one sentence in the log where that fails."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.common.compiled import compiled

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin" / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "potstill" / "compiled").iterdir())


@needs_compiler
def test_compiles_once_until_the_source_changes_and_says_so(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    library = compiled(source, needs=(frozenset(),))
    assert library is not None and library.answer() == 42
    (first,) = kept(tmp_path)
    made_at = first.stat().st_mtime_ns
    assert compiled(source, needs=(frozenset(),)) is not None
    assert kept(tmp_path) == [first] and first.stat().st_mtime_ns == made_at
    source.write_text("int answer(void) { return 43; }\n")
    changed = compiled(source, needs=(frozenset(),))
    assert changed is not None and changed.answer() == 43
    assert len(kept(tmp_path)) == 2
    assert caplog.messages == ["compiling answer.c for this processor, which takes some seconds, once"] * 2


@needs_compiler
def test_a_header_is_part_of_the_source(source: Path, tmp_path: Path) -> None:
    source.write_text('#include "number.h"\nint answer(void) { return NUMBER; }\n')
    for number in (1, 2):
        (tmp_path / "number.h").write_text(f"#define NUMBER {number}\n")
        library = compiled(source, needs=(frozenset(),))
        assert library is not None and library.answer() == number


@needs_compiler
@pytest.mark.parametrize("function", ["compiled.compiled", "compiled_by_one_cpu.compiled_by_one"])
def test_several_processes_at_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Where it takes long, one compiles and the others wait."""
    counted, path = tmp_path / "counted", os.environ["PATH"]
    compiler = f'[ "$1" = --version ] || {{ echo once >> {counted}; sleep 1; }}; exec {shutil.which("cc")} "$@"'
    fake_compiler(tmp_path, monkeypatch, compiler)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{path}")
    module, _, name = function.rpartition(".")
    program = (
        f"import sys; from pathlib import Path; from kernels.common.{module} import {name}\n"
        f"print({name}(Path(sys.argv[1]), needs=(frozenset(),)).answer())"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(source)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [process.communicate()[0] for process in processes] == ["42\n"] * 4
    assert len(kept(tmp_path)) == 1
    assert counted.read_text() == "once\n" or name == "compiled"


def test_no_compiler(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled(source, needs=(frozenset(),)) is None
    assert caplog.messages == ["what answer.c makes faster runs in torch: there is no C compiler `cc`"]


@pytest.mark.parametrize(
    "script", ["echo no floppy >&2; exit 1", '[ "$1" = --version ] || { echo no floppy >&2; exit 1; }']
)
def test_a_compiler_that_fails(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str
) -> None:
    fake_compiler(tmp_path, monkeypatch, script)
    assert compiled(source, needs=(frozenset(),)) is None
    message = caplog.messages[-1]
    assert message.startswith("what answer.c makes faster runs in torch: ") and message.endswith("no floppy")


def test_a_compiler_that_makes_something_else(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(tmp_path, monkeypatch, 'for last; do :; done; [ "$last" = --version ] || echo hello > "$last"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert compiled(source, needs=(frozenset(),)) is None
    begins, fails = caplog.messages
    assert begins.startswith("compiling answer.c") and fails.startswith("what answer.c makes faster runs in torch: ")


def test_a_processor_without_the_instructions(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert compiled(source, needs=(frozenset({"warp", "flux"}), frozenset({"impulse"}))) is None
    assert caplog.messages == [
        "what answer.c makes faster runs in torch: the processor has not all of flux warp or of impulse"
    ]


@needs_compiler
def test_a_cache_that_cannot_be_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiled(source, needs=(frozenset(),)) is None
    message = caplog.messages[-1]
    assert str(tmp_path / "file") in message
