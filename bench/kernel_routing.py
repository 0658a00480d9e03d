"""The tokens that a router selects, on the benchmark's shapes: ours, and PyTorch's indexing beside it.

Legend: T tokens, C places, D numbers a token.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.kernel_cases import Candidate, Case, Run
from kernels.token_routing import gather_rows, scatter_add_rows, select_tokens, select_tokens_reference

SIZE = 4096
TOKENS = (256, 8192)
SHARE = 8
"""One of so many tokens is routed."""


def sampling_routing(tiny: bool) -> list[Case]:
    """Find the selected tokens, gather them, add them back: what a mixture of depths does around a layer."""
    shapes = [(64, 48)] if tiny else [(tokens, SIZE) for tokens in TOKENS]
    return [case for tokens, size in shapes for case in _cases(tokens, tokens // SHARE, size)]


@dataclass
class RoutingInputs:
    """mask [T] bool, of which C are set; index [C] of these; x [T, D]; delta [C, D] and gate [C] to add."""

    mask: Tensor
    index: Tensor
    x: Tensor
    delta: Tensor
    gate: Tensor

    @classmethod
    def random(cls, tokens: int, capacity: int, size: int, device: torch.device) -> "RoutingInputs":
        index = torch.randperm(tokens, device=device)[:capacity].sort().values
        mask = torch.zeros(tokens, dtype=torch.bool, device=device).index_fill_(0, index, True)
        x, delta = (torch.randn(rows, size, device=device, dtype=torch.bfloat16) for rows in (tokens, capacity))
        return cls(mask, index, x, delta, torch.rand(capacity, device=device).bfloat16())


def selected_reference(inputs: RoutingInputs) -> tuple[Tensor, Tensor]:
    """The index, and how many places of it are used."""
    index, used = select_tokens_reference(inputs.mask.tolist(), len(inputs.index))
    return torch.tensor(index, device=inputs.mask.device), torch.tensor(used, device=inputs.mask.device)


def added_reference(inputs: RoutingInputs) -> tuple[Tensor]:
    """x with gate · delta added, in fp64."""
    added = inputs.gate.double()[:, None] * inputs.delta.double()
    return (inputs.x.double().index_add_(0, inputs.index, added),)


def _cases(tokens: int, capacity: int, size: int) -> list[Case]:
    case = partial(
        Case,
        shape={"tokens": tokens, "capacity": capacity, "size": size},
        flops=0.0,
        make_inputs=partial(RoutingInputs.random, tokens, capacity, size),
    )
    what = f"{capacity} of {tokens}"
    return [
        case(
            name=f"select {what}",
            num_bytes=tokens + 8 * capacity,
            reference=selected_reference,
            candidates=[Candidate("potstill", _our_selection, role="ours"), Candidate("torch", _torch_selection)],
        ),
        case(
            name=f"gather {what}",
            num_bytes=capacity * (4 * size + 8),
            reference=lambda inputs: (inputs.x.double()[inputs.index],),
            candidates=[Candidate("potstill", _our_rows, role="ours"), Candidate("torch", _torch_rows)],
        ),
        case(
            name=f"add {what}",
            num_bytes=capacity * (6 * size + 10),
            reference=added_reference,
            candidates=[
                Candidate("potstill", _our_sum, role="ours", in_place=True),
                Candidate("torch", _torch_sum, in_place=True),
            ],
        ),
    ]


def _our_selection(inputs: RoutingInputs) -> Run:
    return lambda: select_tokens(inputs.mask, len(inputs.index))


def _torch_selection(inputs: RoutingInputs) -> Run:
    """By a stable sort: the tokens set first, in order."""
    capacity, tokens = len(inputs.index), len(inputs.mask)
    places = torch.arange(capacity, device=inputs.mask.device)

    def run() -> tuple[Tensor, Tensor]:
        used = inputs.mask.sum().clamp(max=capacity)
        index = torch.argsort(inputs.mask.byte(), descending=True, stable=True)[:capacity]
        return index.masked_fill(places >= used, tokens), used

    return run


def _our_rows(inputs: RoutingInputs) -> Run:
    return lambda: (gather_rows(inputs.x, inputs.index),)


def _torch_rows(inputs: RoutingInputs) -> Run:
    return lambda: (inputs.x.index_select(0, inputs.index),)


def _our_sum(inputs: RoutingInputs) -> Run:
    return lambda: (scatter_add_rows(inputs.x, inputs.index, inputs.delta, inputs.gate, in_place=True),)


def _torch_sum(inputs: RoutingInputs) -> Run:
    return lambda: (inputs.x.index_add_(0, inputs.index, inputs.gate[:, None] * inputs.delta),)
