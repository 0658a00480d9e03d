"""Levels in 32-bit words, the first in the lowest bits, and scales, as files hold them.

Legend: N rows, K levels of a row.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.quantization import pack_int4
from model.files.safe_io import CheckpointError

_WORD_BYTES = 4


def num_words(count: int, bits: int) -> int:
    """That hold so many levels."""
    return math.ceil(count * bits / (8 * _WORD_BYTES))


def pack_words(levels: Tensor, bits: int) -> Tensor:
    """Levels u8 [N, K] of 4, 6 or 8 bits -> i32 [N, ⌈K·bits/32⌉], zeros behind them; a word may end within a level."""
    codes = pack_int4(levels) if bits == 4 else levels if bits == 8 else _sixes_in_bytes(levels)
    codes = F.pad(codes, (0, -codes.shape[1] % _WORD_BYTES))
    return codes.flatten().view(torch.int32).view(len(levels), -1)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` levels of each row of words, u8 [N, count]."""
    levels = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        levels = torch.stack((levels & 15, levels >> 4), dim=-1).flatten(1)
    if bits == 6:
        levels = _bytes_in_sixes(levels)
    return levels[:, :count].contiguous()


def _sixes_in_bytes(levels: Tensor) -> Tensor:
    """Four levels in three bytes."""
    a, b, c, d = F.pad(levels, (0, -levels.shape[1] % 4)).unflatten(1, (-1, 4)).unbind(2)
    held = torch.stack((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2), dim=2).flatten(1)
    return held[:, : math.ceil(levels.shape[1] * 6 / 8)]


def _bytes_in_sixes(held: Tensor) -> Tensor:
    first, second, third = F.pad(held, (0, -held.shape[1] % 3)).unflatten(1, (-1, 3)).unbind(2)
    levels = first, first >> 6 | second << 2, second >> 4 | third << 4, third >> 2
    return torch.stack(levels, dim=2).flatten(1) & 63


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
