"""C sources compiled for arm64 and called in an emulator, as ctypes calls those of this machine.

What the arguments point to is sent and comes back (`emulated.c`). How long it is nobody says, so `REACH` bytes are.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kernels.common.compiled import command

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"
REACH = 1 << 19
NAME, ARGUMENTS = 32, 9
is_there = shutil.which(COMPILER) is not None and shutil.which(EMULATOR) is not None


class EmulatedLibrary:
    """A source compiled for such a processor, and the process that runs it; functions are attributes."""

    def __init__(self, source: Path, folder: Path, processor: str, *more: str) -> None:
        library, program = folder / f"{source.stem}.so", folder / "emulated"
        _run(*command(COMPILER, str(source), str(library), f"-march={processor}"), *more)
        _run(COMPILER, str(Path(__file__).with_suffix(".c")), "-o", str(program))
        started = (EMULATOR, "-L", SYSTEM, str(program), str(library))
        self._process = subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name: str) -> "EmulatedFunction":
        function = EmulatedFunction(self._process, name)
        setattr(self, name, function)
        return function

    def __enter__(self) -> "EmulatedLibrary":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


class EmulatedFunction:
    argtypes: tuple[Any, ...]
    restype: Any

    def __init__(self, process: "subprocess.Popen[bytes]", name: str) -> None:
        self._to, self._from, self._name = process.stdin, process.stdout, name

    def __call__(self, *arguments: Any) -> int | None:
        words = (ctypes.c_int64 * ARGUMENTS)()
        pointers = list(_pointers_of_arguments(words, self.argtypes, arguments))
        segments = _segments(words, [target for _, target in pointers])
        sent = [ctypes.string_at(start, stop - start) for start, stop in segments]
        self._send(sent, [(*_place(segments, at), *_place(segments, target)) for at, target in pointers])
        for (start, _), before in zip(segments, sent, strict=True):
            _write_changes(start, before, self._receive(len(before)))
        result = ctypes.c_int.from_buffer_copy(self._receive(8)).value
        return None if self.restype is None else result

    def _send(self, segments: list[bytes], pointers: list[tuple[int, ...]]) -> None:
        parts = [self._name.encode().ljust(NAME, b"\0"), np.array([len(segments), len(pointers)]).tobytes()]
        for segment in segments:
            parts += np.array([len(segment)]).tobytes(), segment
        self._to.write(b"".join((*parts, np.array(pointers, dtype=np.int64).tobytes())))
        self._to.flush()

    def _receive(self, size: int) -> bytes:
        received = self._from.read(size)
        assert len(received) == size, f"{self._name} ended the emulated process"
        return received


def _pointers_of_arguments(words: Any, types: tuple[Any, ...], arguments: tuple[Any, ...]) -> Iterator[tuple[int, int]]:
    """Fill the words; yield where each pointer lies and where it points, those within what is pointed to as well."""
    for i, (kind, argument) in enumerate(zip(types, arguments, strict=True)):
        if isinstance(argument, ctypes.Structure):
            words[i] = ctypes.addressof(argument)
            yield from _pointers_of_structure(argument)
        else:
            words[i] = argument or 0
        if words[i] and (kind is ctypes.c_void_p or hasattr(kind, "contents")):
            yield ctypes.addressof(words) + 8 * i, words[i]


def _pointers_of_structure(structure: ctypes.Structure) -> Iterator[tuple[int, int]]:
    for name, kind in structure._fields_:  # type: ignore[misc]
        value, at = getattr(structure, name), ctypes.addressof(structure) + getattr(type(structure), name).offset
        if isinstance(value, ctypes.Structure):
            yield from _pointers_of_structure(value)
        elif hasattr(kind, "contents"):
            yield at, ctypes.addressof(value.contents)
            yield from _pointers_of_structure(value.contents)
        elif kind is ctypes.c_void_p and value:
            yield at, value


def _segments(words: Any, targets: list[int]) -> list[tuple[int, int]]:
    """The arguments, then what lies within reach of the targets, as far as it is memory at all: each byte once."""
    memory, merged = _memory(), []
    for start in sorted(targets):
        stop = min(start + REACH, next(stop for begin, stop in memory if begin <= start < stop))
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    start = ctypes.addressof(words)
    return [(start, start + ctypes.sizeof(words)), *merged]


def _memory() -> list[tuple[int, int]]:
    """What this process may read, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, rights = line.split()[:2]
        start, stop = (int(bound, 16) for bound in bounds.split("-"))
        if rights[0] != "r":
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _place(segments: list[tuple[int, int]], address: int) -> tuple[int, int]:
    """Number and offset; the arguments' own words come first, though reach may have them once more."""
    number, start = next((i, start) for i, (start, stop) in enumerate(segments) if start <= address < stop)
    return number, address - start


def _write_changes(start: int, before: bytes, after: bytes) -> None:
    """Nothing else: Python works in the memory around."""
    old, new = (np.frombuffer(part, dtype=np.uint8) for part in (before, after))
    changed = np.flatnonzero(old != new)
    np.ctypeslib.as_array((ctypes.c_uint8 * len(after)).from_address(start))[changed] = new[changed]


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
