"""The C sources compiled for arm64, in an emulator: by the checks that they pass on x86, and by its bits."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels._rows_cpu as rows_cpu
import kernels.attention._decode_cpu as decode
import kernels.attention._prefill_cpu as prefill
import kernels.attention._rotary_write_cpu as rotary
import kernels.linear._rounded_cpu as rounded
import kernels.linear._skinny_cpu as skinny
import kernels.sampling._draws_cpu as draws
from kernels.linear.rounded import Rounding, round_activations
from tests.compare import check_close
from tests.kernels import emulated, test_decode_cpu, test_prefill_cpu, test_rounded, test_rows_cpu, test_skinny_cpu
from tests.kernels.emulated import EmulatedLibrary
from tests.paged import make_case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulated.is_there, reason=f"no {emulated.COMPILER}, or no {emulated.EMULATOR}"),
]
PLAIN, WITH_DOTS = "armv8-a", "armv8.2-a+dotprod"
DTYPES = (torch.float32, torch.bfloat16)
Emulate = Callable[..., EmulatedLibrary]


@pytest.fixture
def emulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulate]:
    """What a function of a module that loads a C source loads then; `_library` of the module is that."""
    with ExitStack() as stack:

        def load(module: Any, function: Callable[..., Any], *arguments: Any, processor: str = PLAIN) -> EmulatedLibrary:
            def compiled(source: Path, needs: Any) -> EmulatedLibrary:
                return stack.enter_context(EmulatedLibrary(source, tmp_path, processor))

            monkeypatch.setattr(module, "compiled", compiled)
            library = getattr(function, "__wrapped__", function)(*arguments)
            monkeypatch.setattr(module, "_library", lambda *_: library)
            return library

        yield load


def test_rows_and_rotation(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(rows_cpu, rows_cpu._library)
    emulate(rotary, rotary._library)
    for dtype in DTYPES:
        for part in (test_rows_cpu.norm, test_rows_cpu.gate, test_rows_cpu.gelu, test_rows_cpu.rotate):
            with monkeypatch.context() as patches:
                test_rows_cpu.test_torch_takes_over_without_a_compiler(part, dtype, patches)
    test_rows_cpu.test_bf16_is_rounded_to_the_nearest_even()


def test_skinny_products(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulate(skinny, skinny._library, torch.float32)
    monkeypatch.setattr(skinny, "_library", lambda dtype: library if dtype == torch.float32 else None)
    monkeypatch.setattr(skinny, "_library_of_outputs", lambda: None)
    for name, quantize in test_skinny_cpu.QUANTIZERS.items():
        weight, x = test_skinny_cpu.with_random_codes(quantize(torch.randn(5, 320))), torch.randn(11, 320)
        prepared, w = test_skinny_cpu.prepared(weight), weight.dequantize(torch.float32)
        assert torch.equal(skinny.expanded_rows(prepared, torch.float32, slice(1, 5)), w[1:])
        for rows in range(1, 12) if name == "int4" else (1, 4, 11):
            check_close(skinny.skinny_product(x[:rows], prepared), x[:rows].double() @ w.double().t())
    x, w = torch.randn(1, 64), torch.randn(3, 64).bfloat16()
    numbers = skinny.prepare_skinny_numbers(w)
    assert numbers is not None
    check_close(skinny.skinny_product(x, numbers), x.double() @ w.double().t())


@pytest.mark.parametrize("processor", [PLAIN, WITH_DOTS])
def test_rounded_products(emulate: Emulate, processor: str) -> None:
    emulate(rounded, rounded.library_of, "_rounded_lanes.c", processor=processor)
    for name in test_rounded.INTEGERS:
        test_rounded.test_integers_multiply_as_their_values_do(name, 32)
    for bits in (4, 8):
        test_rounded.test_integer_products_are_exact(bits)
    test_rounded.test_what_is_no_number_is_not_rounded_away("int8", torch.inf)


def test_rounded_rows(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    library = emulate(rounded, rounded._library_of_rows)
    monkeypatch.setattr(rounded, "_library_of_rows", lambda: library)
    x = 3 * torch.randn(5, 192).bfloat16()
    q, scales = round_activations(x, Rounding(torch.int8, 64))
    expected = (q.float().unflatten(-1, (-1, 64)) * scales[..., None]).flatten(1).bfloat16()
    assert torch.equal(rounded.rounded_rows(x, 64), expected)


def test_attention_of_decode(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(decode, decode._library, torch.float32)
    monkeypatch.setattr(test_decode_cpu, "SEQUENCES", [(1, 17), (5, 5), (1, 256), (3, 258)])
    make = partial(make_case, dtype=torch.float32, device=torch.device("cpu"), head_dim=64)
    test_decode_cpu.test_against_fp64(make, (9, 3), 300)
    test_decode_cpu.test_what_is_not_finite_stays_with_its_sequence_and_shows(make, "k_pages", torch.nan)


def test_attention_of_prefill(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(prefill, prefill._library)
    monkeypatch.setattr(test_prefill_cpu, "SEQUENCES", [(17, 17), (65, 65), (40, 120)])
    for dtype in DTYPES:
        make = partial(make_case, dtype=dtype, device=torch.device("cpu"), head_dim=64)
        test_prefill_cpu.test_against_fp64(make, (9, 3), 100)
    test_prefill_cpu.test_eight_bits_against_fp64(make, torch.int8)


def test_draws(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are the same bits; which token is best, and the threshold, too."""
    stream = tuple(torch.randint(1 << 40, (3,)) for _ in range(3))
    scores = torch.randn(3, 1000)
    weights = scores.softmax(1)

    def results() -> list[torch.Tensor]:
        words, winners = draws.draw_words(stream, 300, 1), draws.race(weights, stream, 2)
        return [words, winners, draws.first_best(scores), draws.least_kept(scores, weights, torch.full((3,), 0.9))]

    ours = results()
    emulate(draws, draws._library)
    assert all(map(torch.equal, results(), ours))
