"""Levels in 32-bit words, the first in the lowest bits, and scales, as files hold them.

Legend: N rows, K levels of a row.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.quantization import pack_int4
from model.files.safe_io import CheckpointError

_WORD_BITS = 32


def num_words(count: int, bits: int) -> int:
    """That hold so many levels."""
    return math.ceil(count * bits / _WORD_BITS)


def pack_words(levels: Tensor, bits: int) -> Tensor:
    """Levels u8 [N, K] of 4 or 8 bits -> i32 [N, ⌈K·bits/32⌉], zeros behind them."""
    padded = F.pad(levels, (0, -levels.shape[1] % (_WORD_BITS // bits)))
    codes = padded if bits == 8 else pack_int4(padded)
    return codes.flatten().view(torch.int32).view(len(levels), -1)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` levels of each row of words, u8 [N, count]."""
    levels = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        levels = torch.stack((levels & 15, levels >> 4), dim=-1).flatten(1)
    return levels[:, :count].contiguous()


def stored_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales fp32 in `dtype` where they are numbers of it, as those made for it are; others keep their bits."""
    rounded = scales.to(dtype)
    return (rounded if torch.equal(rounded.float(), scales) else scales).contiguous()


def check_stored(name: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    """CheckpointError unless the file holds this."""
    if tensor.dtype != dtype or list(tensor.shape) != shape:
        raise CheckpointError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {shape}.")


def check_scales(name: str, scales: Tensor, shape: list[int]) -> None:
    """CheckpointError unless the file holds floats of this shape."""
    if not scales.is_floating_point() or list(scales.shape) != shape:
        raise CheckpointError(f"{name} is {scales.dtype} {list(scales.shape)}, not floats {shape}.")
