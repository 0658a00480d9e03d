"""What the C forms for AVX2 give on a processor without AVX-512: the 4-bit teacher, one request, beside torch.

    python -m bench.serve.instructions          # writes bench/results/instructions-cpu.json; 4 minutes

SmolLM2-135M in Q4_1, served as it is stored, in fp32, on one thread of a processor that hides all but AVX2 from kernels
and from torch (tests/masked.py):

    c_avx2            as it is
    c_avx2_rounded    and with activations rounded to 8 bits (`--activations int8`)
    torch             as if there were no C compiler: torch's own operators expand the weights and multiply
    dense             the same weights in fp32, of which torch multiplies

Each is a process of its own, by turns; tokens/s are of whole steps, the median of some.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import run_side, teacher_folder, write_result
from kernels.linear.cpu_form import cpu_form
from model.files.checkpoint import load_model
from model.formats.gguf.reader import import_gguf, import_gguf_blocks
from model.formats.gguf.writer import export_gguf
from model.quantized import round_activations
from model.text.tokenizer import Tokenizer
from serve import LLM, SamplingParams
from serve.engine.loading import Models

FORMS = ("c_avx2", "c_avx2_rounded", "torch", "dense")
TURNS, STEPS, PROMPT = 3, 40, 32


def measured(form: str, folder: str) -> dict[str, Any]:
    """In a process that has compiled no kernels yet: tokens/s of one request, and what runs."""
    import tests.masked  # noqa: F401

    if form == "torch":
        os.environ["PATH"] = ""  # where `cc` is looked for
    model = load_model(Path(folder), dtype=torch.float32)
    if form == "c_avx2_rounded":
        round_activations(model)
    models = Models(target=model.fuse(), tokenizer=Tokenizer.load(folder), dtype=torch.float32)
    engine = LLM(folder, models=models, num_pages=64, max_num_seqs=1, max_num_batched_tokens=PROMPT).engine
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    engine.add_request("0", list(range(100, 100 + PROMPT)), params)
    engine.step()
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
    return {"tokens_per_s": 1 / statistics.median(seconds), "cpu_form": cpu_form()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case = json.loads(options.case.read_text())
        print(json.dumps(measured(case["form"], case["folder"])))
        return
    os.environ["ATEN_CPU_CAPABILITY"] = "avx2"  # torch reads it when it is imported: in the sides
    with tempfile.TemporaryDirectory() as scratch:
        write_result("instructions-cpu", "python -m bench.serve.instructions", compare(Path(scratch)))


def compare(scratch: Path) -> dict[str, Any]:
    file, folder, dense = (scratch / name for name in ("teacher.gguf", "teacher", "dense"))
    export_gguf(teacher_folder(), file, type="q4_1")
    import_gguf_blocks(file, folder)
    import_gguf(file, dense, dtype=torch.float32)
    found: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
    for _ in range(TURNS):
        for form in FORMS:
            model = dense if form == "dense" else folder
            case = {"form": form, "folder": str(model), "threads": 1, "out": str(scratch / form)}
            found[form].append(run_side(sys.executable, "bench.serve.instructions", case))
    speeds = {form: statistics.median(one["tokens_per_s"] for one in turns) for form, turns in found.items()}
    for form, speed in speeds.items():
        print(f"  {form}: {speed:.1f} tokens/s, {speed / speeds['torch']:.2f} times torch's operators", flush=True)
    return {
        "threads": 1,
        "tokens_per_s": speeds,
        "ratio_to_torch": {form: speed / speeds["torch"] for form, speed in speeds.items()},
        "ratio_to_dense": {form: speed / speeds["dense"] for form, speed in speeds.items()},
        "turns": found,
    }


if __name__ == "__main__":
    main()
