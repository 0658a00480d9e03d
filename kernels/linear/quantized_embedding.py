"""Rows of a quantized weight: y[t] = W[token t], dequantized. An embedding and the head tied to it share one weight.

A prepared weight is read as it lies: on the CPU its rows, on CUDA the rows of its tiles. INT4, INT8 and FP8; NF4's
blocks run across rows.

Legend: T tokens, V rows of the weight, K columns.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.linear._quantized_cpu import CpuWeight, rows_on_cpu
from kernels.linear.quantization import QuantizedWeight
from kernels.linear.quantized import PreparedQuantizedWeight, expand


def quantized_embedding_reference(tokens: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """`quantized_embedding` in its plainest form, of the weight before it was prepared."""
    return weight.dequantize(dtype)[tokens]


def quantized_embedding(tokens: Tensor, weight: PreparedQuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return rows `tokens` [T] int64 of a prepared weight [V, K]: [T, K] of `dtype`. ValueError for NF4."""
    if isinstance(weight, CpuWeight):
        return rows_on_cpu(weight, tokens, dtype)
    if weight.format == "nf4":
        raise ValueError("blocks of NF4 run across rows: it holds no embeddings")
    groups = {name: getattr(weight, name) for name in ("scales", "zeros", "minima")}
    groups = {name: part.index_select(1, tokens) for name, part in groups.items() if part is not None}
    words = weight.words.index_select(1, tokens)
    return expand(replace(weight, words=words, shape=(len(tokens), weight.shape[1]), **groups), dtype)
