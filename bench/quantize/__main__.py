"""GPTQ and AWQ beside llm-compressor: same model, same calibration text, same settings, one run.

    python -m bench.quantize --peer ENVIRONMENT/bin/python

SmolLM2-135M-Instruct's linear layers in INT4, symmetric groups of 64, on text of `configs/quantize-demo.yaml`; GPTQ
with act-order and a damping of at least 0.01, which we raise where tokens are few. What else a method does is what each
side does by itself. Each side rounds in a process of its own, in fp32 on one thread, and writes a folder of
compressed-tensors; both are opened here and compared with the dense model on the same held-out tokens. Seconds and
memory are those of calibration and rounding, without imports and files; processor seconds do not depend on what else
the machine does.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.common import ROOT, check_peer, run_side, teacher_folder, write_result
from compress.quantize.gptq import DAMPING
from model.files.checkpoint import load_model
from model.text.tokenizer import Tokenizer
from pipeline.measure.quality import HeldOut
from pipeline.recipe import load_recipe
from train.data import PreparedData, prepare
from train.evaluate import TeacherStates
from train.packing import held_out_batches

METHODS = ("gptq", "awq")
SETTINGS = {"bits": 4, "group": 64, "symmetric": True, "damping": DAMPING, "act_order": True, "threads": 1}
INSTALL = "python -m venv ENVIRONMENT && ENVIRONMENT/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1"


def documents_of(data: PreparedData, sequence_length: int, max_tokens: int) -> list[list[int]]:
    """The first tokens of the training text, one list for each sequence."""
    batches = held_out_batches(
        data.train, sequence_length=sequence_length, batch_tokens=sequence_length, max_tokens=max_tokens
    )
    pieces = [piece for batch in batches for piece in batch.tokens.split(batch.cu_seqlens.diff().tolist())]
    return [piece.tolist() for piece in pieces]


def measure(folder: Path, held_out: HeldOut, states: TeacherStates) -> dict[str, Any]:
    quality = held_out.quality(load_model(folder, dtype=torch.float32), states)
    return {"kl": asdict(quality.kl) if quality.kl else None, "perplexity": quality.perplexity}


def compare(
    method: str, interpreters: dict[str, str], case: dict[str, Any], against: tuple[Any, Any]
) -> dict[str, Any]:
    """Both sides by one method; prints as it goes."""
    sides = {}
    for side, interpreter in interpreters.items():
        folder = Path(case["scratch"], f"{side}-{method}")
        cost = run_side(interpreter, f"bench.quantize.{side}", case | {"method": method, "out": str(folder)})
        sides[side] = cost | measure(folder, *against)
        kl, seconds, peak = sides[side]["kl"]["value"], cost["processor_s"], cost["peak_bytes"] / 2**20
        print(f"  {method} by {side}: KL {kl:.4f}, {seconds:,.0f} s, {peak:,.0f} MiB", flush=True)
    ours, theirs = sides.values()
    ratios = {f"ratio_{name}": ours[name] / theirs[name] for name in ("processor_s", "peak_bytes")}
    return {"sides": sides, "ratio_kl": ours["kl"]["value"] / theirs["kl"]["value"], **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=sys.executable, help="Python of an environment with llm-compressor")
    parser.add_argument("--tokens", type=int, default=2048, help="of calibration, and of the held-out text")
    options = parser.parse_args()
    check_peer(options.peer, "llmcompressor", INSTALL)
    folder, text = teacher_folder(), load_recipe(ROOT / "configs" / "quantize-demo.yaml").data["text"]
    parent = load_model(folder, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as scratch:
        data = prepare(text, Tokenizer.load(folder), Path(scratch) / "data", progress=False)
        documents = documents_of(data, text.sequence_length, options.tokens)
        held_out = HeldOut.of(data, sequence_length=text.sequence_length, max_tokens=options.tokens)
        against = held_out, held_out.states(parent)
        case = {"model": str(folder), "documents": documents, "scratch": scratch, **SETTINGS}
        interpreters = {"potstill": sys.executable, "llm_compressor": options.peer}
        result: dict[str, Any] = {
            "settings": SETTINGS,
            "calibration_tokens": sum(map(len, documents)),
            "held_out_tokens": sum(batch.num_labels for batch in held_out.batches),
        }
        for method in METHODS:
            result[method] = compare(method, interpreters, case, against)
            write_result("quantize-peers", "python -m bench.quantize", result)


if __name__ == "__main__":
    main()
