"""The C sources compiled for arm64, in an emulator: to the bit what they compute on this machine, or against fp64."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels._rows_cpu as rows_cpu
import kernels.attention._decode_cpu as decode
import kernels.attention._prefill_cpu as prefill
import kernels.attention._rotary_write_cpu as rotary
import kernels.linear._rounded_cpu as rounded
import kernels.linear._skinny_cpu as skinny
import kernels.sampling._draws_cpu as draws
from kernels.linear.quantization import quantize_int8
from tests.kernels import emulated, test_prefill_cpu, test_rounded, test_rows_cpu, test_skinny_cpu
from tests.kernels.emulated import EmulatedLibrary
from tests.paged import make_case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulated.is_there, reason=f"no {emulated.COMPILER}, or no {emulated.EMULATOR}"),
    pytest.mark.skipif(rows_cpu._library() is None, reason="no C compiler, or a processor without AVX2"),
]
PLAIN, WITH_DOTS = "armv8-a", "armv8.2-a+dotprod"
QUICKLY = "-O1", "-fno-tree-loop-optimize"
"""How large sources compile in half the time."""
DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")
Emulate = Callable[..., None]


@pytest.fixture
def emulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulate]:
    """From now on a module's library is that of the source that `load` loads, compiled for arm64."""
    with ExitStack() as stack:

        def replace(module: Any, load: Any, *arguments: Any, how: Any = (PLAIN,), name: str = "_library") -> None:
            def compiled(source: Path, needs: Any) -> EmulatedLibrary:
                return stack.enter_context(EmulatedLibrary(source, tmp_path, *how))

            compiler = "compiled_by_one" if hasattr(module, "compiled_by_one") else "compiled"
            monkeypatch.setattr(module, compiler, compiled)
            library = getattr(load, "__wrapped__", load)(*arguments)
            monkeypatch.setattr(module, name, lambda *_: library)

        yield replace


def check_bits(here: list[Tensor], there: list[Tensor]) -> None:
    for one, other in zip(here, there, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)


def test_rows_and_rotation(emulate: Emulate) -> None:
    parts = test_rows_cpu.norm, test_rows_cpu.gate, test_rows_cpu.gelu, test_rows_cpu.rotate
    inputs = [(3 * torch.randn(5, 2 * test_rows_cpu.D)).to(dtype) for dtype in DTYPES]

    def compute() -> list[Tensor]:
        return [result for x in inputs for part in parts for result in part(x)]

    here = compute()
    emulate(rows_cpu, rows_cpu._library)
    emulate(rotary, rotary._library)
    check_bits(here, compute())
    test_rows_cpu.test_bf16_is_rounded_to_the_nearest_even()


def test_skinny_products(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format with one row, a few and many, and every number of rows there are registers for."""
    monkeypatch.setattr(skinny, "_library_of_outputs", lambda: None)
    x, numbers = torch.randn(11, 320), skinny.prepare_skinny_numbers(torch.randn(5, 320).bfloat16())
    makes = test_skinny_cpu.QUANTIZERS.values()
    weights = [test_skinny_cpu.prepared(test_skinny_cpu.with_random_codes(make(torch.randn(5, 320)))) for make in makes]

    def compute() -> list[Tensor]:
        whole = [skinny.expanded_rows(weight, torch.float32, slice(1, 5)) for weight in weights]
        few = [skinny.skinny_product(x[:rows], weight) for weight in (*weights, numbers) for rows in (1, 4, 11)]
        return whole + few + [skinny.skinny_product(x[:rows], weights[1]) for rows in range(1, 12)]

    here = compute()
    emulate(skinny, skinny._library, torch.float32, how=(PLAIN, *QUICKLY))
    check_bits(here, compute())


@pytest.mark.parametrize("processor", [PLAIN, WITH_DOTS])
def test_rounded_products(emulate: Emulate, monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    """With the largest numbers too, and what is none."""
    source, largest = "_rounded_lanes.c", quantize_int8(torch.full((13, 192), -1.0))
    largest.codes.fill_(-128)
    weights = [skinny.prepare_skinny(make(torch.randn(13, 192))) for make in test_rounded.INTEGERS.values()]
    x = torch.randn(11, 192)
    x[0], x[1, ::2], x[2] = -127.5, -1000, 0

    def compute() -> list[Tensor]:
        taken = [weight for weight in (*weights, skinny.prepare_skinny(largest)) if rounded.takes(weight, 32)]
        assert len(taken) == len(test_rounded.INTEGERS) - 1  # not "int4 fine" and "fp8"
        rows = [x[:count] for count in (1, 2, 4, 11)]
        return [rounded.rounded_product(x, weight, 32) for weight in taken for x in (*rows, rows[-1].bfloat16())]

    library = rounded.library_of(source)
    monkeypatch.setattr(rounded, "_library", lambda: library)
    here = compute()
    emulate(rounded, rounded.library_of, source, how=(processor, *QUICKLY))
    check_bits(here, compute())
    for wrong in (torch.nan, torch.inf):
        test_rounded.test_what_is_no_number_is_not_rounded_away("int8", wrong)


def test_rounded_rows(emulate: Emulate) -> None:
    x = 3 * torch.randn(5, 192).bfloat16()
    here = rounded.rounded_rows(x, 64)
    emulate(rounded, rounded._library_of_rows, name="_library_of_rows")
    check_bits([here], [rounded.rounded_rows(x, 64)])


def test_attention_of_decode(emulate: Emulate) -> None:
    case = make_case([(1, 17), (5, 5), (1, 256), (3, 258)], torch.float32, CPU, heads=(9, 3), head_dim=64)
    here = case.attend(window=200)
    emulate(decode, decode._library, torch.float32)
    check_bits([here], [case.attend(window=200)])


def test_attention_of_prefill(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators, of which each compiler makes what it likes, so bits may differ."""
    monkeypatch.setattr(test_prefill_cpu, "SEQUENCES", [(17, 17), (65, 65), (40, 120)])
    emulate(prefill, prefill._library)
    for dtype in DTYPES:
        make = partial(make_case, dtype=dtype, device=CPU, head_dim=64)
        test_prefill_cpu.test_against_fp64(make, (9, 3), 100)
    test_prefill_cpu.test_eight_bits_against_fp64(make, torch.int8)


def test_draws(emulate: Emulate) -> None:
    stream = torch.randint(1 << 40, (3,)), torch.arange(3), torch.arange(3) * 7
    scores = torch.randn(3, 1000)
    weights, limits = scores.softmax(1), torch.full((3,), 0.9)

    def compute() -> list[Tensor]:
        drawn = draws.draw_words(stream, 300, 1), draws.race(weights, stream, 2)
        ranked = draws.first_best(scores), draws.first_best(scores.bfloat16())
        return [*drawn, *ranked, draws.least_kept(scores, weights, limits)]

    here = compute()
    emulate(draws, draws._library)
    check_bits(here, compute())
