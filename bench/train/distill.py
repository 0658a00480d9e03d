"""Distillation step beside a plain transformers loop of the same losses: same models, same tokens, one run.

    python -m bench.train.distill          # CPU: SmolLM2-135M, 8 minutes on 2 cores; GPU: random weights of a 1B model
    python -m bench.train.distill --tiny   # a tiny model, to see whether it still runs; writes no result

A student of 12 layers (8 on a GPU) learns from its teacher with forward KL, micro-batches of 2 x 1,024 tokens (2,048 on
a GPU), bf16 autocast over fp32 weights, AdamW. The plain loop computes both models' logits and the divergence with
PyTorch's own functions. Each side runs in processes of its own, alternating; speeds are medians over steps and
processes, memory is the peak resident set of the process (on a GPU the peak of its tensors there) above what the two
loaded models take.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import DEVICE, DTYPE
from bench.models import LLAMA_1B, shaped
from bench.train.sides import Benchmark, Case, Side, train_ours, train_plainly
from compress.prune.depth import prune_depth
from model.files.checkpoint import load_config, load_model, save_model
from tests.tiny import tiny_config
from train.config import TrainingConfig
from train.objectives import Distillation

STUDENT_LAYERS, GPU_LAYERS, TINY_LAYERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 29), (*range(7), 15), (1,)


def _config(case: Case) -> TrainingConfig:
    return TrainingConfig(**case.budget, learning_rate=1e-3, schedule="constant", warmup_fraction=0.0)


def potstill(case: Case) -> Side:
    teacher = load_model(case.scratch / "teacher", dtype=DTYPE, device=DEVICE)
    student = load_model(case.scratch / "student", dtype=torch.float32, device=DEVICE)
    return Side(partial(train_ours, student, Distillation(teacher), case, _config(case)))


def plain_transformers(case: Case) -> Side:
    from transformers import AutoModelForCausalLM

    load = partial(AutoModelForCausalLM.from_pretrained, device_map={"": DEVICE})
    teacher = load(case.scratch / "teacher", dtype=DTYPE).eval()
    student = load(case.scratch / "student", dtype=torch.float32).train()

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            target = F.log_softmax(teacher(ids).logits.float(), dim=-1)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=torch.bfloat16 == DTYPE):
            logits = student(ids).logits
        return F.kl_div(F.log_softmax(logits.float(), dim=-1), target, reduction="sum", log_target=True) / ids.numel()

    return Side(partial(train_plainly, student, loss_of, torch.optim.AdamW, case, _config(case)))


SIDES = {"potstill": potstill, "transformers": plain_transformers}
BENCHMARK = Benchmark("bench.train.distill", SIDES, "peak_bytes_above_models", kept=["peak_bytes_above_models"])


def prepare_inputs(scratch: Path, *, tiny: bool) -> Case:
    """The teacher, the pruned student and enough text for every step."""
    length, steps = (64, 4) if tiny else (1024, 8) if DEVICE == "cpu" else (2048, 12)
    case = Case(scratch, length, sequences=2, steps=steps, warm_up=2)
    if tiny:
        shape, layers = tiny_config(), TINY_LAYERS
    else:
        shape, layers = (None, STUDENT_LAYERS) if DEVICE == "cpu" else (shaped(LLAMA_1B), GPU_LAYERS)
    save_model(prune_depth(load_model(case.prepare("teacher", shape)), layers), scratch / "student")
    return case


def compare(case: Case, rounds: int) -> dict[str, Any]:
    layers = load_config(case.scratch / "student").num_layers
    return {"student_layers": layers, **BENCHMARK.compare(case, rounds, known={})}


if __name__ == "__main__":
    BENCHMARK.main(__doc__, f"distill-{DEVICE}", 3, prepare_inputs=prepare_inputs, compare=compare)
