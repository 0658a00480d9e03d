"""Distillation beside TRL's GKD trainer: same pair, same tokens in the same steps, same optimizer, one run.

    python -m bench.train.gkd --peer ENVIRONMENT/bin/python          # about 5 minutes

A 12-layer student learns from SmolLM2-135M-Instruct by forward KL on text alone (lmbda 0, beta 0), micro-batches of
4 x 256 tokens, AdamW at a constant learning rate, everything in fp32 on one thread, without recomputing activations.
Each side trains in a process of its own and writes a folder; both are opened here and compared with the teacher on the
same held-out tokens. Seconds and memory are those of training, without imports, loading and files: memory is the peak
above the two loaded models, and processor seconds hardly depend on what else the machine does.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.common import check_peer, run_side, write_result
from bench.train.distill import STUDENT_LAYERS
from bench.train.sides import Case
from compress.prune.depth import prune_depth
from model.files.checkpoint import load_model, save_model
from model.text.tokenizer import Tokenizer
from pipeline.measure.quality import HeldOut
from train.data import DataConfig, prepare
from train.sampler import Sampler

SETTINGS = {"learning_rate": 5e-4, "beta1": 0.9, "beta2": 0.95, "max_grad_norm": 1.0, "seed": 0, "threads": 1}
SEQUENCE_LENGTH, SEQUENCES, HELD_OUT_TOKENS = 256, 4, 2_048
INSTALL = "python -m venv ENVIRONMENT && ENVIRONMENT/bin/pip install torch==2.13.0 trl==1.16.0"


def in_order(case: Case) -> list[list[int]]:
    """The sequences, each with its last label, as our sampler draws them."""
    sampler = Sampler(
        case.documents(),
        sequence_length=case.sequence_length,
        micro_batch_tokens=case.step_tokens,
        seed=int(SETTINGS["seed"]),
    )
    batches = [sampler.batch(numbers) for numbers in sampler.take(case.steps)]
    return [
        [*tokens.tolist(), int(labels[-1])]
        for batch in batches
        for tokens, labels in zip(
            batch.tokens.view(case.sequences, -1), batch.labels.view(case.sequences, -1), strict=True
        )
    ]


def compare(interpreters: dict[str, str], case: Case, held_out: HeldOut) -> dict[str, Any]:
    """Both sides on models that lie in the case's folder; prints as it goes."""
    states = held_out.states(load_model(case.scratch / "teacher", dtype=torch.float32))
    started = held_out.quality(load_model(case.scratch / "student", dtype=torch.float32), states)
    told = {"scratch": str(case.scratch), "sequences": in_order(case), "steps": case.steps, **SETTINGS}
    sides: dict[str, dict[str, Any]] = {}
    for side, interpreter in interpreters.items():
        out = case.scratch / side
        cost = run_side(interpreter, f"bench.train.gkd.{side}", told | {"out": str(out)})
        quality = held_out.quality(load_model(out, dtype=torch.float32), states)
        tokens = case.steps * case.step_tokens
        speeds = {f"tokens_per_{name}": tokens / cost[name] for name in ("wall_s", "processor_s")}
        sides[side] = cost | speeds | {"kl": quality.kl.value if quality.kl else None, "perplexity": quality.perplexity}
        print(
            f"  {side}: KL {sides[side]['kl']:.4f}, {speeds['tokens_per_wall_s']:.1f} tokens/s, "
            f"{speeds['tokens_per_processor_s']:.1f} a second of the processor, {cost['peak_bytes'] / 2**20:,.0f} MiB",
            flush=True,
        )
    ours, theirs = sides.values()
    figures = ("kl", "tokens_per_wall_s", "tokens_per_processor_s", "peak_bytes")
    return {
        "settings": SETTINGS,
        "sequence_length": case.sequence_length,
        "micro_batch_tokens": case.step_tokens,
        "trained_tokens": case.steps * case.step_tokens,
        "held_out_tokens": sum(batch.num_labels for batch in held_out.batches),
        "kl_before": started.kl.value if started.kl else None,
        "sides": sides,
        **{f"ratio_{name}": ours[name] / theirs[name] for name in figures},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=sys.executable, help="Python of an environment with TRL")
    parser.add_argument("--steps", type=int, default=6, help="of 1,024 tokens; with others no result is written")
    options = parser.parse_args()
    check_peer(options.peer, "trl", INSTALL)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        case = Case(scratch, SEQUENCE_LENGTH, SEQUENCES, steps=options.steps, warm_up=0)
        teacher = case.prepare("teacher", None)
        save_model(prune_depth(load_model(teacher), STUDENT_LAYERS), scratch / "student")
        tokenizer = Tokenizer.load(teacher)
        for name in ("teacher", "student"):
            if not (scratch / name).is_symlink():
                tokenizer.save(scratch / name)
        source = DataConfig(source="python-stdlib/email", sequence_length=SEQUENCE_LENGTH, held_out=0.3)
        data = prepare(source, tokenizer, scratch / "held_out", progress=False)
        held_out = HeldOut.of(data, sequence_length=SEQUENCE_LENGTH, max_tokens=HELD_OUT_TOKENS)
        result = compare({"potstill": sys.executable, "trl": options.peer}, case, held_out)
    if options.steps == parser.get_default("steps"):
        write_result("gkd-cpu", "python -m bench.train.gkd", result)


if __name__ == "__main__":
    main()
