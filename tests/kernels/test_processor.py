"""What a processor is found to have, by stand-ins for what each system says of it, and what C is compiled for."""

import platform
import shutil
import sys
from pathlib import Path

import pytest
import torch

import kernels.common.processor as module
from kernels.common.compiled import command
from kernels.common.processor import features_on_macos, processor_features, suits
from kernels.linear.cpu_form import cpu_form

RASPBERRY_PI = "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU part\t: 0xd08\n"
GRAVITON = RASPBERRY_PI.replace("crc32", "crc32 asimdhp asimddp sve i8mm bf16")
XEON = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 fma f16c\nvmx flags\t: vnmi\n"


def on_linux(text: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> frozenset[str]:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(module, "_CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(text)
    return processor_features()


def test_linux_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_linux(XEON, "x86_64", tmp_path, monkeypatch) == {"fpu", "avx2", "fma", "f16c"}
    assert on_linux(RASPBERRY_PI, "aarch64", tmp_path, monkeypatch) == {"fp", "asimd", "evtstrm", "crc32", "cpuid"}
    assert {"asimd", "asimddp", "i8mm", "bf16"} <= on_linux(GRAVITON, "aarch64", tmp_path, monkeypatch)
    assert not on_linux("", "aarch64", tmp_path, monkeypatch)


def test_macos_is_asked_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    m1 = {"hw.optional.arm.FEAT_DotProd"}
    assert features_on_macos(m1.__contains__) == {"asimd", "asimddp"}
    assert features_on_macos(lambda name: True) == {"asimd", "asimddp", "i8mm", "bf16"}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(module, "_says_yes", m1.__contains__)
    assert processor_features() == {"asimd", "asimddp"}
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert not processor_features()


def test_all_of_one_of_the_needs() -> None:
    needs = frozenset({"avx2", "fma"}), frozenset({"asimd"})
    assert suits(frozenset({"asimd", "fp"}), needs) and suits(frozenset({"avx2", "fma"}), needs)
    assert not suits(frozenset({"avx2"}), needs)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_doctor_names_the_form_of_the_processor_that_it_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux(GRAVITON, "aarch64", tmp_path, monkeypatch)
    assert cpu_form() == "C for NEON in fp32; rounded activations: dot products of NEON"
    on_linux(RASPBERRY_PI, "aarch64", tmp_path, monkeypatch)
    assert cpu_form() == "C for NEON in fp32; rounded activations: NEON"


def test_each_compiler_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for machine, flag in (("x86_64", "-march=native"), ("aarch64", "-mcpu=native")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        words = command("cc", "a.c", "a.so")
        assert words[:4] == ("cc", "-O3", flag, "-fopenmp")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    words, library = command("cc", "a.c", "a.so"), Path(torch.__file__).parent / "lib" / "libomp.dylib"
    assert words[2:6] == ("-mcpu=native", "-Xclang", "-fopenmp", str(library))
