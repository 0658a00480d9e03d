"""Parts one after the other, each in a process of its own, and a record of all of them after each."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from bench.gpu.figures import Figure, lines_of, table_of
from bench.gpu.parts import PARTS, Part
from bench.gpu.process import Ended, last_lines, run_limited
from bench.gpu.sources import ROOT, digest
from bench.gpu.task import NotDone, Skipped, Task, Unfinished, need, part_file
from pipeline.files import write_atomically

ASKING_S = 120.0
LEAST_S = 20.0
"""With less time than this left, no part is started."""
SHOWN_LINES = 5
Record = dict[str, Any]


class Hour:
    """What has been measured on this machine, and the time that is left for more."""

    def __init__(self, folder: Path, machine: dict[str, Any], *, tiny: bool, minutes: float) -> None:
        """`folder`: of results. `machine`: as `bench.common.machine` describes it."""
        self.folder, self.machine, self.tiny = folder, machine, tiny
        self.ends = time.monotonic() + 60 * minutes
        device = re.sub(r"[^a-z0-9]+", "-", str(machine["gpu"] or "cpu").lower()).strip("-")
        self.path = folder / (f"gpu-{device}-tiny.json" if tiny else f"gpu-{device}.json")
        self.records: dict[str, Record] = json.loads(self.path.read_text())["parts"] if self.path.exists() else {}
        """By the part's name; each stays until the part is measured anew."""

    def run(self, parts: Sequence[Part], *, again: bool) -> int:
        """Measures what is not done yet, first what was never tried. The exit code: 1 when a part failed."""
        (self.folder / "gpu").mkdir(parents=True, exist_ok=True)
        for part in PARTS.values():
            if self._is_current(part):  # where other parts look for it
                part_file(self.folder, part.name).write_text(json.dumps(self.records[part.name]))
        todo = [part for part in parts if again or self._status(part) != "done"]
        if len(todo) < len(parts):
            print(f"{len(parts) - len(todo)} of {len(parts)} parts are done already (--again measures them anew)")
        todo.sort(key=lambda part: self._status(part) in ("failed", "unfinished"))
        try:
            for number, part in enumerate(todo):
                self._run_part(part, again, Progress(number, todo, self.ends, sys.stderr))
        except KeyboardInterrupt:
            print("\ninterrupted; the same command goes on", file=sys.stderr)
        self._write()
        if self.tiny:
            print("tiny models and shapes: that they run is what counts here, not how fast")
        for line in self._summary(parts):
            print(line)
        return 1 if any(self._status(part) == "failed" for part in parts) else 0

    def _is_current(self, part: Part) -> bool:
        """Whether there is a record of it, of this GPU, these libraries and the sources as they are."""
        return part.name in self.records and self.records[part.name]["identity"] == self.identify(part)

    def _status(self, part: Part) -> str:
        if self._is_current(part):
            return str(self.records[part.name]["status"])
        return "not measured since its sources changed" if part.name in self.records else "not measured"

    def _run_part(self, part: Part, again: bool, progress: "Progress") -> None:
        limit_s = min(part.limit_s, self.ends - time.monotonic())
        if limit_s < LEAST_S and limit_s < part.limit_s:
            return
        try:
            need(*part.needs)
        except Skipped as reason:
            self._keep(part, {"status": "skipped", "reason": str(reason), "figures": []})
            progress.end(part, self.records[part.name])
            return
        task = Task(str(self.folder), self.tiny, limit_s, again, dict(part.options))
        path, log = part_file(self.folder, part.name), self.folder / "gpu" / f"{part.name}.log"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.gpu.worker", part.measure, str(path), json.dumps(asdict(task))]
        progress.show(part, 0.0, limit_s)
        ended = run_limited(command, log, limit_s, cwd=ROOT, tick=lambda passed: progress.show(part, passed, limit_s))
        record = ended_record(path, log, ended, limit_s)
        if ended.code is None and limit_s < part.limit_s:
            record |= {"status": Unfinished.status, "reason": f"the hour was over after {limit_s:.0f} s"}
        self._keep(part, record)
        progress.end(part, self.records[part.name])

    def _keep(self, part: Part, record: Record) -> None:
        source = {"commit": commit(), "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self.records[part.name] = {**record, **source, "identity": self.identify(part)}
        self._write()

    def _write(self) -> None:
        """Everything that is known; nothing else."""
        ordered = {name: self.records[name] for name in PARTS if name in self.records}
        content = {"command": "python -m bench.gpu", "tiny": self.tiny, "machine": self.machine}
        content |= {"table": table_of(self._figures()), "parts": ordered}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, (json.dumps(content, indent=1) + "\n").encode())

    def _figures(self) -> Iterator[Figure]:
        for part in PARTS.values():
            for plain in self.records[part.name]["figures"] if self._is_current(part) else ():
                yield replace(Figure.from_plain(plain), part=part.name)

    def _summary(self, parts: Iterable[Part]) -> Iterator[str]:
        yield from lines_of(table_of(self._figures()))
        for part in parts:
            record = self.records[part.name] if self._is_current(part) else {}
            if record.get("status") == "done":
                continue
            yield f"{part.name}: {self._status(part)}" + (f": {record['reason']}" if record.get("reason") else "")
            yield from (f"    {line}" for line in record.get("last_lines", ())[-SHOWN_LINES:])
        yield f"written to {self.path}"

    def identify(self, part: Part) -> dict[str, Any]:
        """What the figures of a part depend on."""
        packages = {"torch": self.machine["packages"]["torch"], "triton": self.machine["packages"]["triton"]}
        what = {"measure": part.measure, "options": json.loads(json.dumps(dict(part.options)))}
        return {**what, "sources": digest(part.sources), "gpu": self.machine["gpu"], **packages, "tiny": self.tiny}


class Progress:
    """One line: which part, how long it has run, how much time is left. Redrawn on a terminal, else once a part."""

    def __init__(self, number: int, todo: Sequence[Part], ends: float, stream: TextIO) -> None:
        self.number, self.todo, self.ends, self.stream = number, todo, ends, stream
        self._lasts_s = sum(part.limit_s for part in todo[number + 1 :])
        """At most, all parts behind this one."""

    def show(self, part: Part, passed: float, limit_s: float) -> None:
        if passed and not self.stream.isatty():
            return
        left_s = min(limit_s - passed + self._lasts_s, self.ends - time.monotonic())
        now = f"{part.name}, {passed:.0f} of at most {limit_s:.0f} s; everything at most {left_s / 60:.0f} min more"
        self._draw(now, "" if self.stream.isatty() else "\n")

    def end(self, part: Part, record: Record) -> None:
        took = f" in {record['seconds']:.0f} s" if "seconds" in record else ""
        reason = f": {record['reason']}" if record["reason"] else ""
        self._draw(f"{part.name}: {record['status']}{took}, {len(record['figures'])} figures{reason}", "\n")

    def _draw(self, text: str, end: str) -> None:
        start, clear = ("\r", "\x1b[K") if self.stream.isatty() else ("", "")
        line = f"[{self.number + 1:2}/{len(self.todo)}] {text}"
        if not end:
            line = line[: shutil.get_terminal_size().columns - 1]
        print(f"{start}{line}{clear}", end=end, file=self.stream, flush=True)


def ended_record(path: Path, log: Path, ended: Ended, limit_s: float) -> Record:
    """What a part has left behind, and why it ended where it did not say so itself."""
    record: Record = json.loads(path.read_text()) if path.exists() else {"status": "running", "figures": []}
    if record["status"] == "running":
        why = f"killed after {limit_s:.0f} s" if ended.code is None else f"it ended with exit code {ended.code}"
        record |= {"status": NotDone.status, "reason": why}
    if record["status"] == NotDone.status:
        record["last_lines"] = last_lines(log)
    return record | {"seconds": round(ended.seconds, 1)}


def ask_machine() -> dict[str, Any]:
    """`bench.common.machine`, asked in another process: this one must not hold a part of the GPU."""
    command = [sys.executable, "-c", "import json, bench.common; print(json.dumps(bench.common.machine()))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=ASKING_S, check=True)
    machine: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return machine


def commit() -> str | None:
    """None where there is no repository, as in a copy of the working tree; with a mark where files differ from it."""
    asked = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
