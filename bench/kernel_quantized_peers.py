"""Who else multiplies with weights in 4 and 8 bits, each behind a few lines, as in bench/kernel_peers.py.

Every adapter repacks the codes and scales that it is given into its peer's layout; nobody quantizes anew.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernel_cases import NotItsTask, Run, installed
from kernels.linear.quantization import NF4_BLOCK, Int4Weight, dynamic_table, nf4_table

if TYPE_CHECKING:
    from bench.kernel_quantized import LinearInputs

Product = Callable[[Tensor], Tensor]
BF16 = torch.bfloat16
TORCH_INNER_TILES = 8
GEMLITE_CONFIGURATION = "h100.json"
"""The tuning that GemLite ships for Hopper; it knows its GPUs by name, and an H200 by none."""


def _need_gpu(inputs: "LinearInputs") -> None:
    if not inputs.x.is_cuda:
        raise NotItsTask("only on a GPU")


# bitsandbytes


def bitsandbytes_product(inputs: "LinearInputs") -> Product | None:
    """Its fused product, forward; backward it expands W and multiplies."""
    if (package := installed("bitsandbytes")) is None:
        return None
    weight, device = inputs.weight, inputs.x.device
    state_of = package.functional.QuantState
    nested = state_of(weight.nested_absmax, code=dynamic_table(device), blocksize=256, dtype=torch.float32)
    state = _nf4_state(package, inputs, weight.absmax, offset=weight.offset, state2=nested)
    codes = weight.codes.view(-1, 1)
    return lambda x: package.matmul_4bit(x, codes, quant_state=state)


def bitsandbytes(inputs: "LinearInputs") -> Run | None:
    """Picks its kernel by the number of rows, or expands W; absmax doubly quantized."""
    return _run(bitsandbytes_product(inputs), inputs)


def bitsandbytes_gemv(inputs: "LinearInputs") -> Run | None:
    """Its older kernel for one row, with absmax in fp32: it would expand doubly quantized ones in every call."""
    _need_gpu(inputs)  # on a CPU it takes another layout
    if (package := installed("bitsandbytes")) is None:
        return None
    state = _nf4_state(package, inputs, inputs.weight.block_scales().clone())
    codes = inputs.weight.codes.view(-1, 1)
    return _run(lambda x: package.functional.gemv_4bit(x, codes, state=state), inputs)


def _nf4_state(package: Any, inputs: "LinearInputs", absmax: Tensor, **nested: Any) -> Any:
    return package.functional.QuantState(
        absmax,
        shape=torch.Size(inputs.weight.shape),
        code=nf4_table(inputs.x.device),
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=BF16,
        **nested,
    )


# torch


def torch_int4(inputs: "LinearInputs") -> Run:
    """torch's int4 operation (tinygemm): W = (code − 8) · scale + 0."""
    packed, scales_and_zeros = _tinygemm(inputs)
    group = inputs.weight.group
    return _run(lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, group, scales_and_zeros), inputs)


def _tinygemm(inputs: "LinearInputs") -> tuple[Tensor, Tensor]:
    """The codes, the even one of a byte in its high nibble, packed; scales and zeros [G, N, 2]."""
    _need_gpu(inputs)
    codes, scales = inputs.weight.codes, inputs.weight.scales.to(BF16).t()
    packed = torch.ops.aten._convert_weight_to_int4pack((codes << 4 | codes >> 4).contiguous(), TORCH_INNER_TILES)
    return packed, torch.stack((scales, torch.zeros_like(scales)), dim=-1).contiguous()


def torch_int8(inputs: "LinearInputs") -> Run:
    """torch's int8 operation."""
    codes, scales = inputs.weight.codes, inputs.weight.scales.to(BF16)
    return _run(lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scales), inputs)


# torchao: its tensors, given our codes


def torchao_int4(inputs: "LinearInputs") -> Run | None:
    """The tensor that its Int4WeightOnlyConfig makes for GPUs without further packages: torch's operation inside."""
    if (package := installed("torchao.quantization")) is None:
        return None
    packed, scales_and_zeros = _tinygemm(inputs)
    shape, block = torch.Size(inputs.weight.shape), [1, inputs.weight.group]
    weight = package.Int4TilePackedTo4dTensor(packed, scales_and_zeros, block, shape)
    return _run(lambda x: F.linear(x, weight), inputs)


def torchao_int8(inputs: "LinearInputs") -> Run | None:
    """The tensor of its Int8WeightOnlyConfig."""
    if (package := installed("torchao.quantization")) is None:
        return None
    weight = package.Int8Tensor(*_row_scaled(inputs), dtype=BF16)
    return _run(lambda x: F.linear(x, weight), inputs)


def torchao_fp8(inputs: "LinearInputs") -> Run | None:
    """The tensor of its Float8WeightOnlyConfig; x stays in bf16."""
    if (package := installed("torchao.quantization")) is None:
        return None
    weight = package.Float8Tensor(*_row_scaled(inputs), dtype=BF16)
    return _run(lambda x: F.linear(x, weight), inputs)


def _row_scaled(inputs: "LinearInputs") -> tuple[Tensor, Tensor, list[int]]:
    """Codes [N, K], scales [N, 1], and the block that shares one."""
    return inputs.weight.codes, inputs.weight.scales.to(BF16)[:, None], [1, inputs.weight.shape[1]]


# GemLite: for shapes that its configuration lacks, the first call tunes it


def gemlite_int4(inputs: "LinearInputs") -> Run | None:
    if (package := _gemlite(inputs)) is None:
        return None
    scales = inputs.weight.scales.to(BF16)
    layer = package.helper.A16W4_HQQ_INT(device=inputs.x.device, dtype=BF16).from_weights(
        inputs.weight.elements(), scales, torch.full_like(scales, 8)
    )
    return _run(layer, inputs)


def gemlite_int8(inputs: "LinearInputs") -> Run | None:
    if (package := _gemlite(inputs)) is None:
        return None
    layer = package.helper.A16W8_INT8(device=inputs.x.device, dtype=BF16)
    return _run(layer.from_weights(inputs.weight.codes, scales=inputs.weight.scales[:, None]), inputs)


def gemlite_fp8(inputs: "LinearInputs") -> Run | None:
    if (package := _gemlite(inputs)) is None:
        return None
    layer = package.helper.A16W8_FP8(device=inputs.x.device, dtype=BF16)
    return _run(layer.from_weights(inputs.weight.codes, scales=inputs.weight.scales[:, None]), inputs)


def _gemlite(inputs: "LinearInputs") -> Any | None:
    # The package asks for the name of the GPU when it is imported.
    _need_gpu(inputs)
    return _tuned_gemlite()


@cache
def _tuned_gemlite() -> Any | None:
    package = installed("gemlite")
    if package is not None and "h200" in torch.cuda.get_device_name().lower():
        package.load_config(str(Path(package.__file__).parent / "configs" / GEMLITE_CONFIGURATION))
    return package


# Marlin


def vllm_marlin(inputs: "LinearInputs") -> Run | None:
    """vLLM's build of Marlin, for symmetric INT4 and INT8, bf16 activations."""
    utilities = installed("vllm.model_executor.layers.quantization.utils.marlin_utils")
    operations, types = installed("vllm._custom_ops"), installed("vllm.scalar_type")
    if utilities is None or operations is None or types is None:
        return None
    weight, (n, k), device = inputs.weight, inputs.weight.shape, inputs.x.device
    is_int4 = isinstance(weight, Int4Weight)
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
    return _run(lambda x: multiply(x, words, scales, empty, empty, empty, workspace, kind, n, k, True), inputs)


def marlin(inputs: "LinearInputs") -> Run | None:
    """The original package: fp16 activations and scales."""
    if (package := installed("marlin")) is None:
        return None
    weight, (n, k) = inputs.weight, inputs.weight.shape
    linear = torch.nn.Linear(k, n, bias=False, dtype=torch.float16, device=inputs.x.device)
    linear.weight.data = weight.dequantize(torch.float16)
    layer = package.Layer(k, n, groupsize=weight.group).to(inputs.x.device)
    layer.pack(linear, weight.scales.half())
    x = inputs.x.half()
    return lambda: (layer(x),)


def _run(multiply: Product | None, inputs: "LinearInputs") -> Run | None:
    return None if multiply is None else lambda: (multiply(inputs.x),)
