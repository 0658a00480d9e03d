"""Every kernel beside its peers on this GPU: correct first, then how fast, then how far from what the machine can do.

    python -m bench.kernels                                # all parts, each under 4 minutes
    python -m bench.kernels --parts decode,verify          # some of them; what is measured already is skipped
    python -m bench.kernels --parts quantized              # also `losses` and `sampling`: all parts of that family
    python -m bench.kernels --only d128 --again            # shapes whose names contain a text, measured anew
    python -m bench.kernels --merge                        # only join the parts that are there
    python -m bench.kernels --tiny                         # no GPU: every part on tiny shapes, through the interpreter

A part writes bench/results/kernels/PART.json after every shape and goes on where it stopped, as long as the sources of
kernels and benchmark, GPU, torch and Triton are the same. All parts of a GPU are joined in
bench/results/kernels-GPU.json and drawn in kernels-GPU.svg. A candidate that is not right gets no time; the exit code
is 1 when that is one of ours, and 2 when there is nothing to run on.

cases.py holds the parts, timing.py says how they are timed, goals.py what they should reach.
"""

import argparse
import gc
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.common import RESULTS, ROOT, gpu_name, machine, write_json
from bench.kernels import goals
from bench.kernels.plot import draw
from bench.parts import UnknownPart, asked_for
from pipeline.environment import package_versions
from pipeline.files import write_atomically

PART_S = 200.0
NO_GPU = (
    "There is no NVIDIA GPU here, so there is nothing to measure; "
    "`python -m bench.kernels --tiny` runs every part on tiny shapes through Triton's interpreter."
)
PEERS = ["flashinfer-python", "flash-attn-3", "vllm", "liger-kernel", "bitsandbytes", "gemlite", "torchao", "marlin"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="names, separated by commas (default: all)")
    parser.add_argument("--only", default="", help="only shapes whose names contain this")
    parser.add_argument("--again", action="store_true", help="measure again what is there already")
    parser.add_argument("--merge", action="store_true", help="measure nothing, only join the parts that are there")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes and no speeds: does everything run?")
    parser.add_argument("--out", type=Path, help="where results go (default: bench/results; --tiny: a new folder)")
    options = parser.parse_args(arguments)
    out = options.out or (Path(tempfile.mkdtemp(prefix="bench-kernels-")) if options.tiny else RESULTS)
    if options.merge:
        return merge(out, tiny=options.tiny)
    if not torch.cuda.is_available() and not options.tiny:
        print(NO_GPU, file=sys.stderr)
        return 2
    interpret_without_gpu()
    from bench.kernels.cases import PARTS, parts_named

    try:
        names = asked_for(options.parts, PARTS, parts_named)
    except UnknownPart as reason:
        print(reason, file=sys.stderr)
        return 2
    for name in names:
        path, cases = out / "kernels" / f"{name}.json", PARTS[name].cases(tiny=options.tiny)
        for _ in run_part(name, cases, path, tiny=options.tiny, only=options.only, again=options.again):
            pass
    return merge(out, tiny=options.tiny)


def interpret_without_gpu() -> None:
    """Triton reads this when a kernel is defined: call it before kernels, and so `cases`, are imported."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def run_part(
    name: str, cases: Sequence[Any], path: Path, *, tiny: bool, only: str = "", again: bool = False,
    seconds: float = PART_S,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Run the cases that `path` does not hold yet, for at most so many seconds; yield what it holds, first and then."""
    identity = identify(tiny=tiny)
    wanted = {case.shape.name: case for case in cases if only in case.shape.name}
    known = read_cases(path, identity)
    done = {shape: found for shape, found in known.items() if not (again and shape in wanted)}
    todo = [shape for shape in wanted if shape not in done]
    if wanted and not todo:
        print(f"{name}: already measured, see {path} (--again measures it anew)")
    if done:
        yield json.loads(path.read_text())
    if not todo:
        return
    from bench.kernels.timing import Lab, one_line, run_case, side_stream
    from kernels.common.triton_support import interpreted

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.monotonic()
    print(name if tiny else f"{name}: ours; the others with how many times as long as ours they take")
    with side_stream(device), interpreted() if device.type == "cpu" else nullcontext():
        lab = Lab.open(device)
        lab = replace(lab, rounds=2) if tiny else lab
        limits = {**vars(lab.limits), "l2_bytes": lab.l2_bytes}
        for number, shape in enumerate(todo):
            left_s = start + seconds - time.monotonic()
            if left_s <= 0:
                print(f"{name}: out of time; run it again for the other {len(todo) - number}", file=sys.stderr)
                break
            print(f"{name} {number + 1}/{len(todo)}, {left_s:.0f} s left: {shape}", file=sys.stderr, flush=True)
            try:
                found = run_case(wanted[shape], lab, left_s / (len(todo) - number))
            except Exception as error:  # a shape that cannot even be set up is written down, and no reason to stop
                found = {"name": shape, "failed": one_line(error), "candidates": {}}
            done[shape] = found
            line, complaints = describe(found, speeds=not tiny)
            print(line, flush=True)
            sys.stderr.writelines(f"{complaint}\n" for complaint in complaints)
            ordered = [done[case.shape.name] for case in cases if case.shape.name in done]
            part = {"part": name, "identity": identity, "limits": limits, "cases": ordered}
            write(path, part)
            yield part
            gc.collect()
            torch.cuda.empty_cache()


def merge(out: Path, *, tiny: bool) -> int:
    """Join all parts of the GPU measured last; say whether everything of ours is right."""
    found = [json.loads(path.read_text()) for path in (out / "kernels").glob("*.json")]
    parts = sorted((part for part in found if part["identity"]["tiny"] == tiny), key=lambda part: part["written"])
    if not parts:
        print(f"There are no parts in {out / 'kernels'}.", file=sys.stderr)
        return 2
    gpu = parts[-1]["identity"]["gpu"]
    for part in parts:
        if part["identity"]["gpu"] != gpu:
            print(f"{part['part']} was measured on {part['identity']['gpu']}: left out", file=sys.stderr)
    parts = [part for part in parts if part["identity"]["gpu"] == gpu]
    title = "tiny" if tiny else re.sub(r"[^a-z0-9]+", "-", str(gpu).lower()).strip("-")
    path = out / f"kernels-{title}.json"
    reached = [] if tiny else list(goals.compare(parts))
    joined = {"command": "python -m bench.kernels", "gpu": gpu, "tiny": tiny, "goals": reached, "parts": parts}
    write_json(path, joined)
    write_atomically(path.with_suffix(".svg"), draw(joined).encode())
    print(f"written to {path} and {path.with_suffix('.svg').name}")
    for goal in reached:
        print(goals.describe(goal))
    wrong = [f"{part['part']} {case['name']}" for part in parts for case in part["cases"] if not ours_right(case)]
    for name in wrong:
        print(f"NOT RIGHT: {name}", file=sys.stderr)
    return 1 if wrong else 0


def ours_right(case: dict[str, Any]) -> bool:
    return {found["status"] for found in case["candidates"].values() if found["role"] != "peer"} == {"measured"}


def describe(case: dict[str, Any], *, speeds: bool) -> tuple[str, list[str]]:
    """One line: ours with its rate and its fraction of the limit, then everybody else; and one for each that broke."""
    words, complaints = [f"FAILED {case['failed']}"] if "failed" in case else [], []
    for name, found in case["candidates"].items():
        status = found["status"]
        if status in ("red", "failed"):
            words.append(f"{name} {status.upper()}")
            error = f" error {found['error']}" if "error" in found else ""
            complaints.append(f"  {name}: {status}{error} {found.get('reason', '')}".rstrip())
        elif status != "measured":
            words.append(f"{name} {status}")
        elif not speeds:
            words.append(f"{name} right")
        elif found["role"] == "ours":
            compute = case["bound"] == "compute"
            rate = f"{found['tflop_per_s']:.0f} TFLOP/s" if compute else f"{found['gb_per_s']:.0f} GB/s"
            words.append(f"{found['median_s'] * 1e6:.1f} µs, {rate}, {found['roofline_fraction']:.0%} of the limit")
            words += [f"{found['peak_bytes'] / 1e9:.2f} GB"] if "peak_bytes" in found else []
        else:
            ratio = f"{found['times_ours']:.2f}x" if "times_ours" in found else f"{found['median_s'] * 1e6:.1f} µs"
            memory = f", {found['times_our_peak']:.1f}x the memory" if "times_our_peak" in found else ""
            words.append(f"{name} {ratio}{memory}")
    return f"  {case['name']:34} " + " | ".join(words), complaints


def identify(*, tiny: bool) -> dict[str, Any]:
    """What a measurement depends on; results of another identity are measured anew."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "kernels").rglob("*.py"), *(ROOT / "bench" / "kernels").rglob("*.py")]):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    packages = {"torch": torch.__version__, "triton": version("triton")}
    return {"sources": digest.hexdigest()[:16], "gpu": gpu_name(), **packages, "tiny": tiny}


def read_cases(path: Path, identity: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The cases of an earlier run of the same identity, except those in which something of ours was not right."""
    found = json.loads(path.read_text()) if path.exists() else {"identity": None}
    cases = found["cases"] if found["identity"] == identity else []
    return {case["name"]: case for case in cases if ours_right(case)}


def write(path: Path, part: dict[str, Any]) -> None:
    # There is no commit where there is no repository, as in a copy of the working tree.
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    peers = package_versions(PEERS)
    write_json(path, {**part, "written": time.time(), "commit": head, "machine": machine(), "peers": peers})


if __name__ == "__main__":
    sys.exit(main())
