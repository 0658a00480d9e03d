"""A QLoRA training step beside transformers + peft + bitsandbytes: same base, tokens and settings, in one run.

    python -m bench.train.qlora    # CPU: SmolLM2-135M, 3 minutes; GPU: random weights shaped as Llama-3-8B
    python -m bench.train.qlora --tiny    # a tiny model, to see whether it still runs; writes no result

The base is frozen in NF4 with double quantization, rank-16 adapters sit on all linear layers, products are in bf16,
layers are computed again in the backward pass, gradients are clipped, AdamW updates. Our side is the training loop of
stage `qlora` with its defaults; theirs is built as their documentation says, and runs under autocast as in their
trainer. Each side runs in processes of its own, alternating. First both take two steps: the losses of the first one
must agree, and the memory of all tensors is counted, which is what `potstill plan` predicts. Only then is anything
timed. Speeds are medians over steps and processes; on the CPU the growth of the process is measured beside them.

(bitsandbytes says that it finds no kernel of Hugging Face's package `kernels`; that one would be for inference alone.)
"""

import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import DEVICE, DTYPE, gpu_peak_bytes
from bench.models import LLAMA_8B, shaped
from bench.train.sides import Benchmark, Case, Load, Recorder, Side, train_ours, train_plainly
from compress.lora import inject
from compress.quantize.round_to_nearest import quantize_model
from model.files.checkpoint import load_config, load_model, save_model
from model.formats.bitsandbytes import NF4
from model.lora_config import LoraConfig
from model.quantized import quantized_layers
from model.training_memory import Setup
from tests import memory
from train.config import TrainingConfig
from train.objectives import LanguageModelling

CHECKED_STEPS = 2
LOSS_TOLERANCE = 5e-3
"""Largest relative difference of the first step's losses: they add up residuals in fp32, we in bf16."""
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_query_heads": 8, "initializer_range": 0.05}


ADAPTER = LoraConfig(rank=16, alpha=32.0)


def config_of(case: Case) -> TrainingConfig:
    """The defaults of stage `qlora`, without its warm-up; and no dropout, which would draw other numbers on each side.

    They stand here once more because a stage's settings need libraries of recipes that a GPU machine may lack.
    """
    return TrainingConfig(
        **case.budget, learning_rate=2e-4, schedule="constant", warmup_fraction=0.0, beta2=0.999, max_grad_norm=0.3,
        optimizer="paged_adamw", activation_checkpointing=True,
    )  # fmt: skip


def potstill(case: Case) -> Side:
    config = config_of(case)
    model = load_model(case.scratch / "nf4", dtype=DTYPE, device=DEVICE)
    inject(model, ADAPTER, seed=config.seed)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    weight_bytes += sum(layer.weight_bytes for layer in quantized_layers(model).values())
    return Side(partial(train_ours, model, LanguageModelling(), case, config), weight_bytes)


def beside_peft(case: Case) -> Side:
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = config_of(case)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPE,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        case.scratch / "dense", quantization_config=quantization, dtype=DTYPE, device_map={"": DEVICE}
    )
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=config.activation_checkpointing)
    settings = peft.LoraConfig(
        r=ADAPTER.rank, lora_alpha=ADAPTER.alpha, lora_dropout=ADAPTER.dropout, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(model, settings).train()
    model.config.use_cache = False
    states = [parameter.quant_state for parameter in model.parameters() if hasattr(parameter, "quant_state")]
    scales = [tensor for state in states for tensor in (state.absmax, state.state2.absmax)]
    weight_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *scales))

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=torch.bfloat16 == DTYPE):
            loss: Tensor = model(input_ids=ids, labels=labels, shift_labels=labels).loss
        return loss

    return Side(partial(train_plainly, model, loss_of, _peft_optimizer, case, config), weight_bytes)


def _peft_optimizer(trained: list[Any], **settings: Any) -> torch.optim.Optimizer:
    """AdamW with fp32 moments; on a GPU paged, as QLoRA's recipe has it and as our stage does."""
    if DEVICE == "cpu":
        return torch.optim.AdamW(trained, fused=True, **settings)
    from bitsandbytes.optim import PagedAdamW32bit

    optimizer: torch.optim.Optimizer = PagedAdamW32bit(trained, **settings)
    return optimizer


def check_side(load: Load, case: Case) -> dict[str, Any]:
    """Losses of a few steps, and the most memory that weights and tensors took at one moment."""
    recorder, side = Recorder(), load(replace(case, steps=CHECKED_STEPS))
    train = partial(side.train, recorder)
    peak = gpu_peak_bytes(train) if DEVICE == "cuda" else side.weight_bytes + memory.peak_bytes(train)
    return {"losses": recorder.losses, "weight_bytes": side.weight_bytes, "peak_bytes": peak}


SIDES = {"potstill": potstill, "peft": beside_peft}
BENCHMARK = Benchmark("bench.train.qlora", SIDES, "peak_bytes", kept=["process_bytes"] if DEVICE == "cpu" else [])


def prepare_inputs(scratch: Path, *, tiny: bool) -> Case:
    """Base and text: a real model's on the CPU, random ones on a GPU and in tests."""
    length, steps = (64, 4) if tiny else (512, 4) if DEVICE == "cpu" else (2048, 12)
    case = Case(scratch, length, sequences=2, steps=steps, warm_up=1)
    shape = None if DEVICE == "cpu" and not tiny else shaped(SMALL if tiny else LLAMA_8B)
    # On the device: a GPU rounds in seconds what takes a CPU minutes.
    dense = load_model(case.prepare("dense", shape), dtype="auto", device=DEVICE)
    save_model(quantize_model(dense, NF4()), scratch / "nf4")
    return case


def check(case: Case) -> dict[str, dict[str, Any]]:
    """Both sides' first steps. Raises RuntimeError unless the first losses agree."""
    sides = {name: BENCHMARK.run(check_side, name, case) for name in SIDES}
    ours, theirs = (side["losses"][0] for side in sides.values())
    if not math.isclose(ours, theirs, rel_tol=LOSS_TOLERANCE):
        raise RuntimeError(f"The first losses are {ours:.4f} and {theirs:.4f}: these are not the same step.")
    return sides


def planned(case: Case) -> dict[str, int]:
    """Bytes, as `potstill plan` predicts them."""
    model = load_config(case.scratch / "dense")
    return asdict(Setup(model, config_of(case), adapter=ADAPTER, quantization="nf4", on_gpu=DEVICE != "cpu").memory())


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """Checks, plans as `potstill plan` does, times; prints as it goes."""
    checked, plan = check(case), planned(case)
    losses = {name: side.pop("losses")[0] for name, side in checked.items()}
    ours, theirs = (side["peak_bytes"] for side in checked.values())
    print(f"  first losses {losses['potstill']:.4f} and {losses['peft']:.4f}; tensors at most {ours / 2**20:,.0f} MiB")
    print(f"  and {theirs / 2**20:,.0f} MiB; planned {plan['peak'] / 2**20:,.0f} MiB", flush=True)
    found = {"device": DEVICE, "first_losses": losses, "planned_bytes": plan}
    return {**found, "planned_over_measured": plan["peak"] / ours, **BENCHMARK.compare(case, rounds, checked)}


if __name__ == "__main__":
    BENCHMARK.main(__doc__, f"qlora-{DEVICE}", 2, prepare_inputs=prepare_inputs, compare=compare)
