"""Products of tokens with the weights of the experts that they chose, in bf16.

Legend: T tokens, K input features, N output features, E experts, k of them a token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.case import Call, Inputs, NotItsTask, Shape, in_fp64, normal
from kernels.linear.dense import PreparedWeight
from kernels.linear.experts import (
    arrange_rows,
    expert_products,
    expert_products_reference,
    sort_by_expert,
    stack_experts,
)


def experts(k: int, n: int, num_experts: int, per_token: int, rows: int) -> Shape:
    """x [T, K], `weights` [E, N, K], `chosen` int64 [T, k], each expert as likely: [T, k, N]."""
    read = min(num_experts, rows * per_token)

    def make() -> dict[str, Any]:
        chosen = torch.rand(rows, num_experts).topk(per_token).indices
        return {"x": normal(rows, k), "weights": normal(num_experts, n, k) * k**-0.5, "chosen": chosen}

    return Shape(
        name=f"{per_token} of {num_experts} experts {k}x{n} rows {rows}",
        fields={"k": k, "n": n, "experts": num_experts, "per_token": per_token, "rows": rows}, make=make,
        reference=in_fp64(lambda x, weights, chosen: expert_products_reference(x, weights, chosen)),
        num_bytes=2 * (read * n * k + rows * (per_token * n + k)), flops=2.0 * rows * per_token * n * k, leaves=("x",),
    )  # fmt: skip


def in_one_launch(inputs: Inputs) -> Call:
    """Ours, with the rows arranged each time."""
    stacked, chosen = stack_experts([PreparedWeight(one) for one in inputs.weights]), inputs.chosen
    if stacked is None:
        raise NotItsTask("Triton runs on a GPU")

    def multiply(x: Tensor) -> Tensor:
        rows = arrange_rows(chosen, len(inputs.weights), x.dtype)
        return expert_products(x, stacked, rows)[rows.back]

    return multiply


def one_after_the_other(inputs: Inputs) -> Call:
    """The host waits for the number of each expert's rows; the wait counts."""
    weights, chosen = inputs.weights, inputs.chosen

    def multiply(x: Tensor) -> Tensor:
        sources, back, sizes = sort_by_expert(chosen, len(weights))
        rows = x[sources].split(sizes.tolist())
        return torch.cat([F.linear(mine, weight) for mine, weight in zip(rows, weights, strict=True)])[back]

    return multiply


def torch_grouped(inputs: Inputs) -> Call:
    """torch's own grouped product, of rows that were gathered."""
    if not hasattr(torch, "_grouped_mm") or not inputs.x.is_cuda:
        raise NotItsTask("only on a GPU, in a torch that has it")
    weights, chosen = inputs.weights.transpose(1, 2), inputs.chosen

    def multiply(x: Tensor) -> Tensor:
        sources, back, sizes = sort_by_expert(chosen, len(weights))
        return torch._grouped_mm(x[sources], weights, offs=sizes.cumsum(0).int())[back]

    return multiply
