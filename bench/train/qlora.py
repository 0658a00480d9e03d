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

import argparse
import json
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from bench.common import ROOT, run_alone, teacher_folder, write_result
from bench.train.distill import Recorder, documents_of
from compress.lora import inject
from compress.quantize.round_to_nearest import quantize_folder
from model.config import ModelConfig
from model.cost import Setup
from model.files.checkpoint import load_config, load_model, tensor_shapes, write_checkpoint
from model.formats.bitsandbytes import NF4
from model.quantized import quantized_layers
from model.text.tokenizer import Tokenizer
from pipeline.stages.qlora.config import Adapter, Qlora
from tests import memory
from tests.tiny import tiny_config
from train.data import DataConfig, TokenizedDocuments, prepare
from train.loop import Trainer
from train.objectives import LanguageModelling
from train.sampler import Sampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECKED_STEPS, WARM_UP = 2, 1
LOSS_TOLERANCE = 5e-3
"""Largest relative difference of the first step's losses: they add up residuals in fp32, we in bf16."""
LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_layers": 32, "num_query_heads": 32,
    "num_kv_heads": 8, "head_dim": 128, "initializer_range": 0.02,
}  # fmt: skip

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_query_heads": 8, "initializer_range": 0.05}


@dataclass(frozen=True)
class Case:
    """What both sides train."""

    scratch: str
    """Holds `dense`, `nf4` and `tokens.npy`."""
    sequence_length: int
    sequences: int
    steps: int

    @property
    def step_tokens(self) -> int:
        return self.sequence_length * self.sequences

    def stage(self, steps: int) -> Qlora:
        """The recipe's stage: its defaults, but rank 16 and no dropout, which would draw other numbers on each side."""
        return Qlora(
            model="base", data="text", tokens=steps * self.step_tokens, batch_tokens=self.step_tokens,
            micro_batch_tokens=self.step_tokens, warmup_fraction=0.0, adapter=Adapter(rank=16, alpha=32.0, dropout=0.0),
        )  # fmt: skip

    def documents(self) -> TokenizedDocuments:
        return documents_of(np.load(Path(self.scratch) / "tokens.npy"), self.sequence_length)


@dataclass
class Side:
    """A side with its model loaded, ready to take steps."""

    weight_bytes: int
    train: Callable[[Recorder], None]


def potstill(case: Case, steps: int, folder: Path) -> Side:
    stage = case.stage(steps)
    model = load_model(Path(case.scratch) / "nf4", dtype=torch.bfloat16, device=DEVICE)
    inject(model, stage.adapter, seed=stage.seed)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    weight_bytes += sum(layer.weight_bytes for layer in quantized_layers(model).values())

    def train(recorder: Recorder) -> None:
        _UnsavedTrainer(
            model,
            LanguageModelling(),
            case.documents(),
            stage,
            folder=folder,
            sequence_length=case.sequence_length,
            tracker=recorder,  # type: ignore[arg-type]
        ).train()

    return Side(weight_bytes, train)


class _UnsavedTrainer(Trainer):
    """Does not measure the disk."""

    def _save(self) -> None: ...


def peft(case: Case, steps: int, folder: Path) -> Side:
    stage = case.stage(steps)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    dense = Path(case.scratch) / "dense"
    model = AutoModelForCausalLM.from_pretrained(
        dense, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": DEVICE}
    )
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=stage.activation_checkpointing)
    adapter = stage.adapter
    settings = LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=adapter.dropout, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(model, settings).train()
    model.config.use_cache = False
    states = [parameter.quant_state for parameter in model.parameters() if hasattr(parameter, "quant_state")]
    scales = [tensor for state in states for tensor in (state.absmax, state.state2.absmax)]
    weight_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *scales))
    return Side(weight_bytes, lambda recorder: _train_peft(model, case, stage, recorder))


def _train_peft(model: Any, case: Case, stage: Qlora, recorder: Recorder) -> None:
    """Steps over the batches that our sampler draws."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _peft_optimizer(trained, lr=stage.learning_rate, betas=(stage.beta1, stage.beta2))
    sampler = Sampler(
        case.documents(), sequence_length=case.sequence_length, micro_batch_tokens=case.step_tokens, seed=stage.seed
    )
    for step in range(stage.steps):
        began = time.perf_counter()
        batch = sampler.batch(sampler.take(1)[0]).to(DEVICE)
        ids, labels = (tensor.view(case.sequences, -1) for tensor in (batch.tokens, batch.labels))
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=ids, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, stage.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        seconds = time.perf_counter() - began
        recorder.log(step, {"loss": value}, {"tokens_per_s": len(batch.tokens) / seconds})


def _peft_optimizer(trained: list[Any], **settings: Any) -> torch.optim.Optimizer:
    """AdamW with fp32 moments; on a GPU paged, as QLoRA's recipe has it and as our stage does."""
    if DEVICE == "cpu":
        return torch.optim.AdamW(trained, weight_decay=0.0, fused=True, **settings)
    from bitsandbytes.optim import PagedAdamW32bit

    optimizer: torch.optim.Optimizer = PagedAdamW32bit(trained, weight_decay=0.0, **settings)
    return optimizer


SIDES = {"potstill": potstill, "peft": peft}


# --- one process ------------------------------------------------------------------------------------------------------


def check_side(name: str, case: Case) -> dict[str, Any]:
    """Losses of a few steps, and the most memory that weights and tensors took at one moment."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        side = SIDES[name](case, CHECKED_STEPS, Path(folder))
        peak = _tensor_peak(side, recorder)
    return {"losses": recorder.losses, "weight_bytes": side.weight_bytes, "peak_bytes": peak}


def _tensor_peak(side: Side, recorder: Recorder) -> int:
    if DEVICE == "cpu":
        return side.weight_bytes + memory.peak_bytes(lambda: side.train(recorder))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    side.train(recorder)
    return torch.cuda.max_memory_allocated()


def time_side(name: str, case: Case) -> dict[str, Any]:
    """Speed of each step after the first, and how far the process grew."""
    recorder, start = Recorder(), _resident_bytes()
    with tempfile.TemporaryDirectory() as folder:
        SIDES[name](case, case.steps, Path(folder)).train(recorder)
    process = {"process_bytes": recorder.peak_bytes - start} if DEVICE == "cpu" else {}
    return {"tokens_per_s": recorder.tokens_per_s[WARM_UP:], "losses": recorder.losses, **process}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() if DEVICE == "cpu" else 0


PARTS = {"check": check_side, "time": time_side}


def run_part(part: str, side: str, case: Case) -> dict[str, Any]:
    return run_alone("bench.train.qlora", "--part", part, side, json.dumps(asdict(case)))


# --- all of it --------------------------------------------------------------------------------------------------------


def prepare_inputs(scratch: Path, *, tiny: bool) -> Case:
    """Base and text: a real model's on the CPU, random ones on a GPU and in tests."""
    length, steps = (64, 4) if tiny else (512, 4) if DEVICE == "cpu" else (2048, 12)
    case = Case(str(scratch), length, sequences=2, steps=steps)
    dense, count = scratch / "dense", case.steps * case.sequences * (case.sequence_length + 1)
    if DEVICE == "cpu" and not tiny:
        dense.symlink_to(teacher_folder())
        config = DataConfig(source="python-stdlib", sequence_length=case.sequence_length, max_documents=60)
        tokens = prepare(config, Tokenizer.load(dense), scratch / "cache", progress=False).train.tokens[:count]
    else:
        shape = tiny_config(**(SMALL if tiny else LLAMA_8B))
        write_random(shape, dense)
        tokens = np.random.default_rng(0).integers(0, shape.vocab_size, count).astype(np.int32)
    np.save(scratch / "tokens.npy", tokens)
    quantize_folder(dense, scratch / "nf4", NF4())
    return case


def write_random(config: ModelConfig, folder: Path) -> None:
    """A bf16 model with random weights, made and written tensor by tensor."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def make(shape: torch.Size) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        return config.initializer_range * torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

    sources = {name: partial(make, shape) for name, shape in tensor_shapes(config).items()}
    write_checkpoint(folder, config, sources, dtype=torch.bfloat16)


def check(case: Case) -> dict[str, dict[str, Any]]:
    """Both sides' first steps. Raises RuntimeError unless the first losses agree."""
    sides = {name: run_part("check", name, case) for name in SIDES}
    ours, theirs = (side["losses"][0] for side in sides.values())
    if not math.isclose(ours, theirs, rel_tol=LOSS_TOLERANCE):
        raise RuntimeError(f"The first losses are {ours:.4f} and {theirs:.4f}: these are not the same step.")
    return sides


def planned(case: Case) -> dict[str, int]:
    """What `potstill plan` says of this step."""
    stage = case.stage(case.steps)
    setup = Setup(
        load_config(Path(case.scratch) / "dense"), stage, adapter=stage.adapter, quantization="nf4",
        on_gpu=DEVICE != "cpu",
    )  # fmt: skip
    return asdict(setup.memory())


def time_sides(case: Case, rounds: int) -> dict[str, dict[str, Any]]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name, of_side in runs.items():
            of_side.append(run_part("time", name, case))
            print(f"  {name}: {statistics.median(of_side[-1]['tokens_per_s']):,.0f} tokens/s", flush=True)
    return {name: summary(of_side) for name, of_side in runs.items()}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = [speed for run in runs for speed in run["tokens_per_s"]]
    medians = {"tokens_per_s": statistics.median(speeds), "all_tokens_per_s": speeds, "losses": runs[0]["losses"]}
    if DEVICE == "cpu":
        medians["process_bytes"] = statistics.median(run["process_bytes"] for run in runs)
    return medians


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """Checks, plans, times; prints as it goes."""
    checked, plan = check(case), planned(case)
    losses = {name: side.pop("losses")[0] for name, side in checked.items()}
    ours, theirs = checked["potstill"]["peak_bytes"], checked["peft"]["peak_bytes"]
    print(f"  first losses {losses['potstill']:.4f} and {losses['peft']:.4f}; tensors at most {ours / 2**20:,.0f} MiB")
    print(f"  and {theirs / 2**20:,.0f} MiB, {ours / theirs:.2f}x; planned {plan['peak'] / 2**20:,.0f} MiB", flush=True)
    timed = time_sides(case, rounds)
    result = {
        "device": DEVICE, "sequence_length": case.sequence_length, "micro_batch_tokens": case.step_tokens,
        "first_losses": losses, "sides": {name: checked[name] | timed[name] for name in SIDES}, "planned_bytes": plan,
        "planned_over_measured": plan["peak"] / ours,
        "ratio_speed": timed["potstill"]["tokens_per_s"] / timed["peft"]["tokens_per_s"],
        "ratio_peak_memory": ours / theirs,
    }  # fmt: skip
    print(f"  speed {result['ratio_speed']:.2f}x")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for tests; writes no result")
    parser.add_argument("--part", nargs=3, metavar=("PART", "SIDE", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part, side, case = options.part
        print(json.dumps(PARTS[part](side, Case(**json.loads(case)))))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = compare(prepare_inputs(Path(folder), tiny=options.tiny), options.rounds)
    if not options.tiny:
        path = write_result(f"qlora-{DEVICE}", "python -m bench.train.qlora", result)
        print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
