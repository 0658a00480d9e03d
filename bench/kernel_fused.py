"""The small kernels around attention on the benchmark's shapes: ours, and who computes the same beside it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from bench import kernel_peers as peers
from bench.kernel_cases import Candidate, Case, Outputs, Run, gradients
from bench.kernel_shapes import (
    EPS,
    GateInputs,
    NormInputs,
    RotaryInputs,
    gate_reference,
    norm_reference,
    rotated_reference,
    written_reference,
)
from kernels.attention.rotary import apply_rotary
from kernels.attention.rotary_write import rotate_and_write
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
Prepare = Callable[[Any], Run | None]


def fused(tiny: bool) -> list[Case]:
    """Small kernels around attention, at decode's, verification's and training's numbers of tokens."""
    if tiny:
        return [
            _norm_case(32, 48),
            _norm_case(32, 48, backward=True),
            _gate_case(32, 80),
            _gate_case(32, 80, backward=True),
            _rotary_case(32, 4, 2, 64),
            _write_case(32, 4, 2, 64),
        ]
    return [
        *(_norm_case(tokens, 4096) for tokens in (16, 256, 8192)),
        _norm_case(8192, 4096, backward=True),
        *(_gate_case(tokens, 14_336) for tokens in (16, 256, 8192)),
        _gate_case(8192, 14_336, backward=True),
        _rotary_case(8192, HEADS, KV_HEADS, HEAD_DIM),
        *(_write_case(tokens, HEADS, KV_HEADS, HEAD_DIM) for tokens in (16, 256, 8192)),
    ]


def _norm_case(tokens: int, size: int, *, backward: bool = False) -> Case:
    def ours(inputs: NormInputs) -> Callable[..., Any]:
        return lambda x, residual, weight: rms_norm(x, weight, EPS, residual)

    def compiled(inputs: NormInputs) -> Callable[..., Outputs]:
        return peers.compiled(peers.plain_norm, inputs.x.device)

    wrap = partial(_with_leaves, names=("x", "residual", "weight"), grads=("grad_y", "grad_sum"), backward=backward)
    return Case(
        name=f"rms_norm {tokens}x{size}{' forward+backward' if backward else ''}",
        shape={"tokens": tokens, "size": size, "backward": backward},
        flops=0.0,
        num_bytes=2 * tokens * size * (4 + backward * 4) + 2 * size * (1 + backward * 2),
        make_inputs=partial(NormInputs.random, tokens, size, gradients=backward),
        reference=norm_reference,
        candidates=[
            Candidate("potstill", wrap(ours), role="ours"),
            Candidate("liger", wrap(peers.liger_norm)),
            *([] if backward else [Candidate("flashinfer", peers.flashinfer_norm, in_place=True)]),
            Candidate("torch_compile", wrap(compiled), compiles=True),
        ],
    )


def _gate_case(tokens: int, size: int, *, backward: bool = False) -> Case:
    def ours(inputs: GateInputs) -> Callable[..., Tensor]:
        return swiglu

    def compiled(inputs: GateInputs) -> Callable[..., Tensor]:
        return peers.compiled(peers.plain_swiglu, inputs.gate.device)

    wrap = partial(_with_leaves, names=("gate", "up"), grads=("grad",), backward=backward)
    return Case(
        name=f"swiglu {tokens}x{size}{' forward+backward' if backward else ''}",
        shape={"tokens": tokens, "size": size, "backward": backward},
        flops=0.0,
        num_bytes=2 * tokens * size * (3 + backward * 5),
        make_inputs=partial(GateInputs.random, tokens, size, gradients=backward),
        reference=gate_reference,
        candidates=[
            Candidate("potstill", wrap(ours), role="ours"),
            Candidate("liger", wrap(peers.liger_swiglu), in_place=backward),
            Candidate("torch_compile", wrap(compiled), compiles=True),
        ],
    )


def _with_leaves(
    adapt: Callable[[Any], Callable[..., Any] | None], *, names: Sequence[str], grads: Sequence[str], backward: bool
) -> Prepare:
    """Call a function of some of the inputs, and compute its gradients too if asked for."""

    def prepare(inputs: Any) -> Run | None:
        function = adapt(inputs)
        if function is None:
            return None
        leaves = [getattr(inputs, name).detach().requires_grad_(backward) for name in names]

        def run() -> Outputs:
            out = function(*leaves)
            outputs = out if isinstance(out, tuple) else (out,)
            if not backward:
                return outputs
            given = [getattr(inputs, name) for name in grads]
            return *(x.detach() for x in outputs), *gradients(outputs, leaves, given)

        return run

    return prepare


def _rotary_case(tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> Case:
    """The rotation alone, as training runs it; backward is the same kernel with other angles."""

    def ours(inputs: RotaryInputs) -> Run:
        return lambda: apply_rotary(inputs.q, inputs.k, inputs.cos, inputs.sin)

    def compiled(inputs: RotaryInputs) -> Run:
        rotate = peers.compiled(peers.plain_rotary, inputs.q.device)
        return lambda: rotate(inputs.q, inputs.k, inputs.cos, inputs.sin)

    heads = {"query_heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return Case(
        name=f"rotary {tokens}",
        shape={"tokens": tokens, **heads},
        flops=0.0,
        num_bytes=tokens * 4 * head_dim * (query_heads + kv_heads + 1),
        make_inputs=lambda device: RotaryInputs.random(tokens, **heads, device=device),
        reference=rotated_reference,
        candidates=[
            Candidate("potstill", ours, role="ours"),
            Candidate("liger", peers.liger_rotary, in_place=True),
            Candidate("torch_compile", compiled, compiles=True),
        ],
    )


def _write_case(tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> Case:
    heads = {"query_heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    moved = 2 * query_heads + 4 * kv_heads  # q, k and v are read and written
    return Case(
        name=f"rotary+write {tokens}",
        shape={"tokens": tokens, **heads},
        flops=0.0,
        num_bytes=tokens * (2 * moved * head_dim + 4 * head_dim + 8),
        make_inputs=lambda device: RotaryInputs.random(tokens, **heads, device=device),
        reference=written_reference,
        candidates=[
            Candidate("potstill", _our_rotary_write, role="ours", in_place=True),
            Candidate("liger + index_copy", peers.liger_rotary_write, in_place=True),
            Candidate("torch_compile", peers.plain_rotary_write, in_place=True, compiles=True),
        ],
    )


def _our_rotary_write(inputs: RotaryInputs) -> Run:
    new, pages = (inputs.q, inputs.k, inputs.v), (inputs.k_pages, inputs.v_pages)
    rotary = (inputs.cos, inputs.sin)
    return lambda: (rotate_and_write(*new, *pages, inputs.slots, rotary=rotary), *pages)
