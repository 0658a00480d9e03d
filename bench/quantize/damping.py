"""What GPTQ's damping and more calibration text are worth on other text: errors of a few layers' outputs.

    python -m bench.quantize.damping          # writes bench/results/gptq-damping-cpu.json; 3 minutes

Layers of SmolLM2-135M-Instruct in INT4, asymmetric groups of 64, calibrated on text of `configs/quantize-demo.yaml` and
measured on its held-out text: squared error of what a projection puts out, over its square, at the least damping and at
the one that goes by the number of tokens. Layer 11 has features a thousand times larger than the others. Inputs are the
dense model's; quality alone counts, so the machine may be busy.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.common import ROOT, teacher_folder, write_result
from compress.quantize.calibrated import quantized_matrix
from compress.quantize.gptq import compensation, output_error
from compress.quantize.inputs import InputMoments, input_moments, projection
from compress.quantize.methods import METHODS
from compress.residual_stream import ResidualStream, layers_of
from model.files.checkpoint import load_model
from model.formats.registry import format_named
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from pipeline.recipe import load_recipe
from train.data import prepare
from train.packing import Batch, calibration_batches, held_out_batches

LAYERS, INPUTS, SEED = (6, 11), {"self_attn.v_proj": "self_attn.q_proj", "mlp.down_proj": "mlp.down_proj"}, 1
MOST_TOKENS, SHARES, HELD_OUT_TOKENS = 24_000, (6, 2, 1), 4_000
"""Of the calibration text every sixth, every second and every sequence."""


def before(model: Transformer, batches: Sequence[Batch], layer: int) -> list[ResidualStream]:
    """What the dense layers before make of a text."""
    streams = [ResidualStream(model, batch) for batch in batches]
    for number in range(layer):
        for stream in streams:
            stream.pass_on(layers_of(model)[number])
    return streams


def measured(weight: torch.Tensor, seen: InputMoments, others: InputMoments) -> dict[str, Any]:
    """Relative errors on other text, by how GPTQ is damped."""
    method, whole = METHODS["gptq"], torch.zeros_like(weight)
    format: Any = format_named("int4", group=64, symmetric=False)
    found: dict[str, Any] = {"tokens": seen.tokens}
    for name, tokens in (("least damping", None), ("by tokens", seen.tokens)):
        seen.__dict__["compensation"] = compensation(seen.hessian, tokens=tokens)
        rounded = quantized_matrix(weight, format, seen, method, torch.bfloat16).dequantize()
        found[name] = output_error(weight, rounded, others.hessian) / output_error(weight, whole, others.hessian)
    return found


@torch.no_grad()
def main() -> None:
    text = replace(load_recipe(ROOT / "configs" / "quantize-demo.yaml").data["text"], seed=SEED)
    model, length, result = load_model(teacher_folder(), dtype=torch.float32), text.sequence_length, {}
    with tempfile.TemporaryDirectory() as scratch:
        data = prepare(text, Tokenizer.load(teacher_folder()), Path(scratch), progress=False)
        seen = calibration_batches(data.train, sequence_length=length, max_tokens=MOST_TOKENS)
        sizes = {"sequence_length": length, "batch_tokens": length, "max_tokens": HELD_OUT_TOKENS}
        other = held_out_batches(data.held_out, **sizes)
        for number in LAYERS:
            layer, first = layers_of(model)[number], sorted(set(INPUTS.values()), reverse=True)
            calibration, held_out = (before(model, batches, number) for batches in (seen, other))
            others = input_moments(held_out, layer, first)
            for share in SHARES:
                moments = input_moments(calibration[share // 2 :: share], layer, first)
                for name, key in INPUTS.items():
                    row = measured(projection(layer, name).weight, moments[key], others[key])
                    result.setdefault(f"layers.{number}.{name}", []).append(row)
                    print(f"  layers.{number}.{name}: {row}", flush=True)
    write_result("gptq-damping-cpu", "python -m bench.quantize.damping", {"seed": SEED, "projections": result})


if __name__ == "__main__":
    main()
