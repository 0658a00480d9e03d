"""Products with weights in 4 and 8 bits, with adapters, and gate and up as one.

Everybody gets one matrix: the same codes, with scales that are bf16 numbers (NF4: doubly quantized), so that one
reference serves all. Every adapter repacks these into its peer's layout; nobody quantizes anew.

Legend: T tokens, K input features, N output features, S adapters, R rank, I intermediate size.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.case import BF16, Call, Inputs, NotItsTask, Outputs, Shape, in_fp64, installed, needs, normal
from kernels.linear import quantization
from kernels.linear.leading_rows import linear_of_leading_rows, linear_of_leading_rows_reference
from kernels.linear.lora import LoraWeights, lora_reference
from kernels.swiglu import swiglu, swiglu_reference

GROUP, RANK = 128, 16
QUANTIZERS: dict[str, Callable[[Tensor], quantization.QuantizedWeight]] = {
    "nf4": quantization.quantize_nf4,
    "int4": partial(quantization.quantize_int4, group=GROUP),
    "int8": quantization.quantize_int8,
    "fp8": quantization.quantize_fp8,
}


def weight_bytes(format_name: str, n: int, k: int) -> float:
    """Codes and scales as a file holds them; 16 bits a scale where it is not part of the format."""
    if format_name == "nf4":
        blocks = n * k / quantization.NF4_BLOCK
        return n * k / 2 + blocks + 4 * blocks / quantization.NESTED_BLOCK
    return n * k / 2 + 2 * n * k / GROUP if format_name == "int4" else n * k + 2 * n


def _random(format_name: str, k: int, n: int, rows: int, backward: bool = False) -> dict[str, Any]:
    """x [T, K], weight [N, K], and for the gradient of x that of the result, [T, N]."""
    grad = {"grad": normal(rows, n)} if backward else {}
    weight = QUANTIZERS[format_name](normal(n, k) * k**-0.5)
    if not isinstance(weight, quantization.NF4Weight):
        weight = replace(weight, scales=weight.scales.to(BF16).float())
    return {"x": normal(rows, k), "weight": weight, **grad}


def product(format_name: str, k: int, n: int, rows: int, backward: bool = False) -> Shape:
    """Backward: the gradient of x, which does not depend on x."""
    return Shape(
        name=f"{f'{format_name} ' if backward else ''}{k}x{n} rows {rows}",
        fields={"format": format_name, "k": k, "n": n, "rows": rows},
        make=partial(_random, format_name, k, n, rows, backward), reference=in_fp64(_product),
        num_bytes=weight_bytes(format_name, n, k) + 2 * rows * (n + k), flops=2.0 * rows * n * k, leaves=("x",),
        grads=("grad",), mode="backward" if backward else "forward",
    )  # fmt: skip


def _product(x: Tensor, weight: quantization.QuantizedWeight) -> Tensor:
    return x @ weight.dequantize(x.dtype).t()


def adapted(k: int, n: int, rows: int, adapters: int) -> Shape:
    """A product in NF4; adapters `lora`, and the one of each row, `slots` [T] int32, −1 for none."""

    def make() -> dict[str, Any]:
        a = normal(adapters, RANK, k) * k**-0.5
        b = normal(adapters, n, RANK) * RANK**-0.5
        weights = LoraWeights(a, b, torch.rand(adapters) + 0.5)
        slots = torch.randint(-1, adapters, (rows,), dtype=torch.int32)
        return _random("nf4", k, n, rows) | {"lora": weights, "slots": slots}

    return Shape(
        name=f"{adapters} adapters {k}x{n} rows {rows}",
        fields={"k": k, "n": n, "rows": rows, "adapters": adapters, "rank": RANK}, make=make,
        reference=in_fp64(_adapted),
        num_bytes=weight_bytes("nf4", n, k) + 2 * (adapters * RANK + rows) * (n + k),
        flops=2.0 * rows * (n * k + RANK * (n + k)), leaves=("x",),
    )  # fmt: skip


def _adapted(x: Tensor, weight: quantization.QuantizedWeight, lora: LoraWeights, slots: Tensor) -> Outputs:
    """The product with adapters, and without."""
    plain, wide = _product(x, weight), LoraWeights(lora.a.double(), lora.b.double(), lora.scales)
    return lora_reference(plain, x, wide, slots), plain


def gated(k: int, n: int, rows: int) -> Shape:
    """x [T, K], W [N = 2·I, K] in NF4: gate's rows come first."""
    return Shape(
        name=f"gate+up {k}x{n} rows {rows}", fields={"k": k, "n": n, "rows": rows},
        make=partial(_random, "nf4", k, n, rows),
        reference=in_fp64(lambda x, weight: swiglu_reference(*_product(x, weight).chunk(2, dim=1))),
        num_bytes=weight_bytes("nf4", n, k) + 2 * rows * (n // 2 + k), flops=2.0 * rows * n * k, leaves=("x",),
    )  # fmt: skip


def leading(k: int, n: int, rows: int, used: int) -> Shape:
    """x [T, K], whose first `used` rows mean something; their number on the device, `count`; W [N, K] in bf16."""

    def make() -> dict[str, Any]:
        return {"x": normal(rows, k), "dense": normal(n, k) * k**-0.5, "count": torch.tensor(used, dtype=torch.int32)}

    return Shape(
        name=f"{k}x{n} rows {used} of {rows}", fields={"k": k, "n": n, "rows": rows, "used": used}, make=make,
        reference=in_fp64(lambda x, dense, used: linear_of_leading_rows_reference(x, dense, None, used)),
        num_bytes=2 * (n * k + used * (n + k)), flops=2.0 * used * n * k, leaves=("x",),
    )  # fmt: skip


def of_leading_rows(x: Tensor, dense: Tensor, count: Tensor, used: int) -> Tensor:
    return linear_of_leading_rows(x, dense, None, count)[:used]


def wait_and_multiply(x: Tensor, dense: Tensor, count: Tensor) -> Tensor:
    """The host reads the number; its wait counts."""
    return F.linear(x[: int(count)], dense)


def all_rows(x: Tensor, dense: Tensor, used: int) -> Tensor:
    return F.linear(x, dense)[:used]


TORCH_INNER_TILES = 8
GEMLITE_CONFIGURATION = "h100.json"
"""The tuning that GemLite ships for Hopper; it knows its GPUs by name, and an H200 by none."""


def _need_gpu(inputs: Inputs) -> None:
    if not inputs.x.is_cuda:
        raise NotItsTask("only on a GPU")


def cublas(inputs: Inputs) -> Call:
    """The same matrix in bf16: what quantization must beat."""
    weight = inputs.weight.dequantize(BF16)
    return lambda x: F.linear(x, weight)


def cublas_adapters(inputs: Inputs) -> Call:
    """The matrix in bf16, and every row's adapter gathered and multiplied."""
    weight, lora, slots = inputs.weight.dequantize(BF16), inputs.lora, inputs.slots.clamp_min(0).long()
    scales = torch.where(inputs.slots >= 0, lora.scales[slots], 0.0).to(BF16)[:, None]

    def multiply(x: Tensor) -> Tensor:
        low = torch.bmm(lora.a[slots], x[:, :, None])
        return F.linear(x, weight) + scales * torch.bmm(lora.b[slots], low)[:, :, 0]

    return multiply


def cublas_gate(inputs: Inputs) -> Call:
    """The matrix in bf16, then our gate."""
    multiply = cublas(inputs)
    return lambda x: swiglu(*multiply(x).chunk(2, dim=1))


@needs("bitsandbytes")
def bitsandbytes(package: Any, inputs: Inputs) -> Call:
    """Picks its kernel by the number of rows, or expands W, as backward always does; absmax doubly quantized."""
    weight, code = inputs.weight, quantization.dynamic_table(inputs.x.device)
    nested = package.functional.QuantState(weight.nested_absmax, code=code, blocksize=256, dtype=torch.float32)
    state = _nf4_state(package, inputs, weight.absmax, offset=weight.offset, state2=nested)
    codes = weight.codes.view(-1, 1)
    return lambda x: package.matmul_4bit(x, codes, quant_state=state)


def bitsandbytes_gemv(inputs: Inputs) -> Call:
    """Its older kernel for one row, with absmax in fp32: it would expand doubly quantized ones in every call."""
    _need_gpu(inputs)  # on a CPU it takes another layout
    package, codes = installed("bitsandbytes"), inputs.weight.codes.view(-1, 1)
    state = _nf4_state(package, inputs, inputs.weight.block_scales().clone())
    return lambda x: package.functional.gemv_4bit(x, codes, state=state)


def _nf4_state(package: Any, inputs: Inputs, absmax: Tensor, **nested: Any) -> Any:
    shape, code = torch.Size(inputs.weight.shape), quantization.nf4_table(inputs.x.device)
    fixed = {"blocksize": quantization.NF4_BLOCK, "quant_type": "nf4", "dtype": BF16}
    return package.functional.QuantState(absmax, shape=shape, code=code, **fixed, **nested)


def torch_int4(inputs: Inputs) -> Call:
    """torch's int4 operation (tinygemm): W = (code − 8) · scale + 0."""
    packed, scales_and_zeros = _tinygemm(inputs)
    group = inputs.weight.group
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, group, scales_and_zeros)


def _tinygemm(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The codes, the even one of a byte in its high nibble, packed; scales and zeros [G, N, 2]."""
    _need_gpu(inputs)
    codes, scales = inputs.weight.codes, inputs.weight.scales.to(BF16).t()
    packed = torch.ops.aten._convert_weight_to_int4pack((codes << 4 | codes >> 4).contiguous(), TORCH_INNER_TILES)
    return packed, torch.stack((scales, torch.zeros_like(scales)), dim=-1).contiguous()


def torch_int8(inputs: Inputs) -> Call:
    """torch's int8 operation."""
    codes, scales = inputs.weight.codes, inputs.weight.scales[:, 0].to(BF16)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scales)


@needs("torchao.quantization")
def torchao(package: Any, inputs: Inputs) -> Call:
    """The tensors of its Int8- and Float8WeightOnlyConfig; of Int4WeightOnlyConfig, without further packages, the one
    with torch's operation inside. x stays in bf16."""
    name, shape = inputs.shape["format"], torch.Size(inputs.weight.shape)
    if name == "int4":
        weight = package.Int4TilePackedTo4dTensor(*_tinygemm(inputs), [1, inputs.weight.group], shape)
    else:
        kind, scales = package.Int8Tensor if name == "int8" else package.Float8Tensor, inputs.weight.scales.to(BF16)
        weight = kind(inputs.weight.codes, scales.view(-1, 1), [1, shape[1]], dtype=BF16)
    return lambda x: F.linear(x, weight)


def gemlite(inputs: Inputs) -> Call:
    """For shapes that its configuration lacks, the first call tunes it."""
    _need_gpu(inputs)  # the package asks for the name of the GPU when it is imported
    weight, name = inputs.weight, inputs.shape["format"]
    names = {"int4": "A16W4_HQQ_INT", "int8": "A16W8_INT8", "fp8": "A16W8_FP8"}
    layer = getattr(_tuned_gemlite().helper, names[name])(device=inputs.x.device, dtype=BF16)
    if name != "int4":
        return layer.from_weights(weight.codes, scales=weight.scales.view(-1, 1))
    scales = weight.scales.to(BF16)
    return layer.from_weights(weight.elements(), scales, torch.full_like(scales, 8))


@cache
def _tuned_gemlite() -> Any:
    package = installed("gemlite")
    if "h200" in torch.cuda.get_device_name().lower():
        package.load_config(str(Path(package.__file__).parent / "configs" / GEMLITE_CONFIGURATION))
    return package


@needs("vllm.model_executor.layers.quantization.utils.marlin_utils", "vllm._custom_ops", "vllm.scalar_type")
def vllm_marlin(utilities: Any, operations: Any, types: Any, inputs: Inputs) -> Call:
    """vLLM's build of Marlin, for symmetric INT4 and INT8, bf16 activations."""
    weight, (n, k), device = inputs.weight, inputs.weight.shape, inputs.x.device
    is_int4 = isinstance(weight, quantization.Int4Weight)
    kind = types.scalar_types.uint4b8 if is_int4 else types.scalar_types.uint8b128
    codes = weight.codes if is_int4 else weight.codes.view(torch.uint8) ^ 128
    # 32 bits hold neighbours in K, the first in the lowest: [K · bits / 32, N], as GPTQ stores them.
    words = codes.view(torch.int32).t().contiguous()
    empty = utilities.marlin_make_empty_g_idx(device)
    words = operations.gptq_marlin_repack(words, empty, k, n, 4 if is_int4 else 8)
    scales = weight.scales.to(BF16).view(n, -1).t().contiguous()
    scales = utilities.marlin_permute_scales(scales, k, n, weight.group if is_int4 else -1)
    workspace = utilities.marlin_make_workspace_new(device)
    multiply = utilities.apply_gptq_marlin_linear
    return lambda x: multiply(x, words, scales, empty, empty, empty, workspace, kind, n, k, True)


@needs("marlin")
def marlin(package: Any, inputs: Inputs) -> Call:
    """The original package: fp16 scales, and activations that were converted before."""
    weight, (n, k) = inputs.weight, inputs.weight.shape
    linear = torch.nn.Linear(k, n, bias=False, dtype=torch.float16, device=inputs.x.device)
    linear.weight.data = weight.dequantize(torch.float16)
    layer = package.Layer(k, n, groupsize=weight.group).to(inputs.x.device)
    layer.pack(linear, weight.scales.half())
    x_half = inputs.x.half()
    return lambda x: layer(x_half)
