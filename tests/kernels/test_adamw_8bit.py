"""8-bit AdamW: codes and steps against their definition, against bitsandbytes and against fp32 AdamW."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import adamw_8bit as module
from kernels.adamw_8bit import BLOCK, Moments, adamw_8bit, adamw_8bit_reference
from kernels.linear.quantization import dynamic_table
from tests.compare import check_close

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SIZES = [1, 256, 1000, 4096, 256 * BLOCK + 5]


def gradients(size: int, steps: int, *, spread: float = 2.0) -> list[Tensor]:
    """Of very different sizes, each weight's own, as a model's are; some are zero."""
    scale = torch.exp(spread * torch.randn(size)) * (torch.rand(size) > 0.1)
    return [scale * torch.randn(size) for _ in range(steps)]


def decoded(codes: Tensor, absmax: Tensor, signed: bool, count: int) -> Tensor:
    values = dynamic_table(codes.device, signed)[codes.long()] * absmax[:, None]
    return values.view(-1)[:count]


def run(size: int, steps: int, device: torch.device) -> tuple[Tensor, Moments]:
    weight, moments = torch.ones(size, device=device), Moments.zeros(size, device=device)
    for step, grad in enumerate(gradients(size, steps), 1):
        adamw_8bit(weight, grad.to(device), moments, step=step, **SETTINGS)
    return weight, moments


def check_steps(size: int, device: torch.device) -> None:
    weight, moments = torch.ones(size, device=device), Moments.zeros(size, device=device)
    for step, grad in enumerate(gradients(size, 3), 1):
        grad = grad.to(device)
        expected, expected_moments = adamw_8bit_reference(weight, grad, moments, step=step, **SETTINGS)
        adamw_8bit(weight, grad, moments, step=step, **SETTINGS)
        check_close(weight, expected)
        for kind in ("exp_avg", "exp_avg_sq"):
            check_close(getattr(moments, f"{kind}_absmax"), getattr(expected_moments, f"{kind}_absmax"))
            # The last bit of a value may decide between two neighbouring codes.
            apart = (getattr(moments, kind).int() - getattr(expected_moments, kind).int()).abs()
            assert apart.max() <= 1 and apart.float().mean() < 1e-3


@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_does_what_the_reference_does(size: int, device: torch.device) -> None:
    check_steps(size, device)


@pytest.mark.parametrize("size", SIZES)
def test_without_triton_too(size: int) -> None:
    check_steps(size, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [4096, 1_000_003])
def test_on_a_gpu_it_equals_the_cpu(size: int) -> None:
    torch.manual_seed(1)
    weight, moments = run(size, 5, torch.device("cuda"))
    torch.manual_seed(1)
    expected, expected_moments = run(size, 5, CPU)
    check_close(weight.cpu(), expected)
    check_close(moments.exp_avg_absmax.cpu(), expected_moments.exp_avg_absmax)


@pytest.mark.parametrize("signed", [True, False])
def test_leading_bits_find_the_nearest_code_of_every_value(signed: bool) -> None:
    # Every 16 leading bits with several ends, and the bounds themselves with both of their neighbours.
    high = torch.arange(0, 0x3F81, dtype=torch.int32) << 16
    values = torch.cat([(high | low).view(torch.float32) for low in (0, 1, 0x1234, 0x8000, 0xFFFF)])
    bounds = module._bounds(CPU, signed)
    near = torch.cat([bounds, bounds.nextafter(torch.tensor(2.0)), bounds.nextafter(torch.tensor(-2.0))])
    values = torch.cat([values, near.abs()]).clamp(max=1.0)
    values = torch.cat([values, -values]) if signed else values
    values = torch.cat([values, torch.zeros(-len(values) % (BLOCK - 1))]).view(-1, BLOCK - 1)
    values = torch.cat([values, torch.ones(len(values), 1)], dim=1)  # absmax 1: nothing is scaled
    codes, absmax = torch.empty(values.shape, dtype=torch.uint8), torch.empty(len(values))
    module._store_codes(values.clone(), codes, absmax, signed)
    assert torch.equal(codes.int(), torch.bucketize(values, bounds, out_int32=True))


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_and_its_codes_are_those_of_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    table = functional.create_dynamic_map(signed=signed)
    assert torch.equal(dynamic_table(CPU, signed), table)
    values = torch.randn(64, BLOCK) * torch.exp(3 * torch.randn(64, BLOCK))
    values = values if signed else values.abs()
    codes, absmax = torch.empty(values.shape, dtype=torch.uint8), torch.empty(len(values))
    module._store_codes(values.clone(), codes, absmax, signed)
    theirs, state = functional.quantize_blockwise(values, code=table, blocksize=BLOCK)
    assert torch.equal(absmax, state.absmax)
    # Their CPU search is approximate: where it finds another code, ours is nearer.
    error, their_error = (
        (values - table[found.view(-1).long()].view(values.shape) * absmax[:, None]).abs() for found in (codes, theirs)
    )
    others = (codes != theirs.view(codes.shape)) & (signed | (codes > 1))
    assert (error <= their_error)[others].all()
    assert error.norm() <= their_error.norm() < 2 * error.norm()


def test_it_goes_where_the_8_bit_adamw_of_bitsandbytes_goes() -> None:
    optim = pytest.importorskip("bitsandbytes.optim")
    size, steps = 64 * BLOCK, 40
    theirs = torch.nn.Parameter(torch.ones(size))
    ours, full = torch.ones(size), torch.nn.Parameter(torch.ones(size))
    moments = Moments.zeros(size, device=CPU)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = [optim.AdamW8bit([theirs], **settings), torch.optim.AdamW([full], **settings)]
    for step, grad in enumerate(gradients(size, steps), 1):
        theirs.grad, full.grad = grad.clone(), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        adamw_8bit(ours, grad, moments, step=step, **SETTINGS)
    moved = (full.detach() - 1).norm()
    error, their_error = ((x.detach() - full.detach()).norm() / moved for x in (ours, theirs))
    assert error < 1.05 * their_error
    assert (ours - theirs.detach()).norm() / moved < 2 * their_error


def test_a_positive_second_moment_never_becomes_zero() -> None:
    """Else a weight whose gradient has been 1e-4 of its block's largest, and is 0 now, would jump by lr·m/ε."""
    size = 2 * BLOCK
    grad = torch.full((size,), 1e-4)
    grad[::BLOCK] = 1.0
    weight, moments = torch.zeros(size), Moments.zeros(size, device=CPU)
    adamw_8bit(weight, grad, moments, step=1, **SETTINGS)
    assert (decoded(moments.exp_avg_sq, moments.exp_avg_sq_absmax, False, size) > 0).all()
    before = weight.clone()
    grad[1::BLOCK] = 0.0
    adamw_8bit(weight, grad, moments, step=2, **SETTINGS)
    assert (weight - before).abs().max() < 2 * SETTINGS["learning_rate"]


def test_moments_take_two_bytes_a_weight_and_an_absmax_a_block() -> None:
    moments = Moments.zeros(1_000_000, device=CPU)
    assert sum(tensor.nbytes for tensor in moments) / 1_000_000 == pytest.approx(2 + 8 / BLOCK, rel=1e-3)
    assert decoded(moments.exp_avg, moments.exp_avg_absmax, True, 10).abs().max() == 0
    assert math.isclose(len(moments.exp_avg) * BLOCK, 1_000_000, abs_tol=BLOCK)


@pytest.mark.parametrize(
    ("weight", "grad"),
    [
        (torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(4, 4)),
        (torch.zeros(4, 4).t()[:, :2], torch.zeros(4, 2)),
        (torch.zeros(4, 4), torch.zeros(16)),
    ],
)
def test_other_weights_are_refused(weight: Tensor, grad: Tensor) -> None:
    with pytest.raises(ValueError, match="takes a contiguous fp32 weight"):
        adamw_8bit(weight, grad, Moments.zeros(weight.numel(), device=CPU), step=1, **SETTINGS)
