"""Compile Triton kernels for a GPU that is not there: types, layouts and shared memory, which the interpreter ignores.

`python -m tests.native_compile 90 around losses` calls public wrappers on CPU tensors of a model's shapes, in bf16;
`flash:float32` in another dtype. Each launch is compiled for an H100 (`80`: an A100, `89`: a 4090) as it would be on
one, and not run: down to PTX, and the first of each kernel down to machine code, which takes a third of the time and
finds nothing more in the others. `--floats-in-fp64`: as torch.compile launches it. Prints a line of JSON a kernel. It
needs a process of its own: where Triton interprets, it cannot compile.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels.adamw_8bit import Moments, adamw_8bit
from kernels.attention.flash import flash_attention
from kernels.attention.paged import paged_attention, plan_paged_attention
from kernels.attention.rotary import apply_rotary, rope_frequencies, rotary_tables
from kernels.attention.rotary_write import HeadNorms, rotate_and_write
from kernels.attention.visible_slots import VisibleSlots, list_visible_slots, plan_visible_slots
from kernels.attention.write_pages import write_pages
from kernels.linear.dense import PreparedWeight
from kernels.linear.experts import arrange_rows, expert_products, stack_experts
from kernels.linear.leading_rows import linear_of_leading_rows
from kernels.linear.lora import LoraWeights, lora_add
from kernels.linear.quantization import quantize_fp8, quantize_int4, quantize_int6, quantize_int8, quantize_nf4
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear, quantized_linear_in_fp32
from kernels.linear.quantized_swiglu import quantized_swiglu
from kernels.linear.rounded import Rounding, rounded_linear
from kernels.losses import _streamed_projection
from kernels.losses.linear_cross_entropy import linear_cross_entropy
from kernels.losses.linear_distillation import DivergenceKind, linear_distillation
from kernels.rms_norm import rms_norm
from kernels.sampling.logit_adjustments import RequestState, adjust_scores
from kernels.sampling.ngram import find_ngrams
from kernels.sampling.random import Purpose, Stream, exponential, uniform
from kernels.sampling.sample import Filters, adjusted_probabilities, race, sample_tokens
from kernels.sampling.token_logprobs import token_logprobs
from kernels.sampling.verification import verify
from kernels.swiglu import swiglu
from kernels.token_routing import gather_rows, scatter_add_rows, select_tokens

TOKENS, PAGES, PAGE = 48, 8, 16
# (query heads, key/value heads, head dim) of a Llama 8B, a SmolLM2 135M, and a head dim that is no power of two.
HEADS = ((32, 8, 128), (9, 3, 64), (8, 8, 80))

ONLY_PTX = "--only-ptx"
FLOATS_IN_FP64 = "--floats-in-fp64"
MOST_SHARED_BYTES = {90: 227 * 1024, 89: 99 * 1024, 80: 163 * 1024}
"""What one program may use, by compute capability, times ten."""


class AbsentGpu:
    """Stands in for the driver of a GPU, as far as compiling asks for one."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead_of_launching(capability: int, *, only_ptx: bool = False) -> dict[str, CompiledKernel]:
    """For the rest of the process. Returns where the compiled kernels are collected, by name and a number."""
    compiled: dict[str, CompiledKernel] = {}
    begun: list[str] = []
    assemble = CUDABackend.make_cubin

    def at_grid(self: JITFunction, grid: Any) -> Callable[..., None]:
        name = f"{self.fn.__module__}.{self.fn.__name__}"

        def launch(*args: Any, **options: Any) -> None:
            begun.append(name)
            kernel = self.run(*args, grid=grid, warmup=True, **options)
            compiled[f"{name} {kernel.hash[:8]}"] = kernel

        return launch

    def assemble_the_first(*args: Any) -> bytes:
        return assemble(*args) if begun.count(begun[-1]) == 1 and not only_ptx else b""

    driver.set_active(AbsentGpu(capability))
    JITFunction.__getitem__ = at_grid
    CUDABackend.make_cubin = assemble_the_first
    answers: dict[str, Callable[..., Any]] = {
        "runs_triton": lambda x: True,
        "is_interpreted": lambda x: False,
        "num_processors": lambda device: 132,
        "shared_memory_bytes": lambda device: MOST_SHARED_BYTES[capability],
        "l2_bytes": lambda device: 50 * 2**20,
        "compute_capability": lambda device: divmod(capability, 10),
    }
    for name, module in list(sys.modules.items()):
        for function in vars(module).keys() & answers.keys() if name.startswith(("kernels.", "model.")) else ():
            setattr(module, function, answers[function])
    return compiled


def widen_floats() -> None:
    """As torch.compile launches kernels: a float of Python's comes in fp64. For the rest of the process."""
    begin = ASTSource.__init__

    def widened(self: ASTSource, fn: JITFunction, signature: dict[str, str], *others: Any, **named: Any) -> None:
        kinds = {name: "fp64" if kind == "fp32" else kind for name, kind in signature.items()}
        begin(self, fn, kinds, *others, **named)

    ASTSource.__init__ = widened


def rows(*shape: int, dtype: torch.dtype, differentiable: bool = True) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=differentiable)


def backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])


def around(dtype: torch.dtype) -> None:
    """What stands around attention, in training and in serving."""
    for size in (576, 4096, 16_384):
        x, weight = rows(TOKENS, size, dtype=dtype), rows(size, dtype=torch.float32)
        backward(*rms_norm(x, weight, 1e-5, rows(TOKENS, size, dtype=torch.float32)))
        backward(*rms_norm(x, weight, 1e-5, x))
        backward(rms_norm(x, weight.detach(), 1e-5))
    for size in (1536, 14_336):
        backward(swiglu(*rows(TOKENS, 2 * size, dtype=dtype).chunk(2, dim=-1)))
    for q_heads, kv_heads, d in HEADS:
        q, k, v = rows(TOKENS, q_heads + 2 * kv_heads, d, dtype=dtype).split((q_heads, kv_heads, kv_heads), dim=1)
        weight = rows(d, dtype=dtype)
        tables = rotary_tables(torch.arange(TOKENS), rope_frequencies(d, 1e4))
        backward(*apply_rotary(rms_norm(q, weight, 1e-6), k, *tables))
        norms, slots = HeadNorms(weight, weight, 1e-6), torch.arange(TOKENS)
        options = [(tables, norms), (tables, None), (None, norms), (None, None)]
        for page_dtype in (dtype, torch.int8, torch.float8_e4m3fn):
            pages = torch.zeros(2, PAGES, PAGE, kv_heads, d).to(page_dtype)
            scales = None if page_dtype == dtype else tuple(torch.zeros(2, PAGES, PAGE, kv_heads))
            for rotary, normed in options if d == 64 else options[:1]:
                rotate_and_write(q, k, v, *pages, slots, rotary=rotary, norms=normed, scales=scales)
            k_scales, v_scales = scales or (None, None)
            write_pages(k, v, *pages, slots, k_scales=k_scales, v_scales=v_scales)
            if scales is not None and d == 64:
                fixed = tuple(torch.ones(2, kv_heads))
                rotate_and_write(q, k, v, *pages, slots, rotary=tables, norms=norms, scales=scales, fixed=fixed)
                write_pages(k, v, *pages, slots, k_scales=k_scales, v_scales=v_scales, fixed=fixed)


def flash(dtype: torch.dtype) -> None:
    """Packed attention in training: every width of tiles, every option at one of them."""
    cu_seqlens = torch.tensor([0, 20, TOKENS], dtype=torch.int32)
    usual: list[dict[str, Any]] = [{}]
    others = {
        64: [{"causal": False}],
        128: [*usual, {"window": 16, "deterministic": True}],
        256: [*usual, {"soft_cap": 50.0}],
    }
    for q_heads, kv_heads, d in (*HEADS, (4, 1, 256)):
        q, k, v = (rows(TOKENS, heads, d, dtype=dtype) for heads in (q_heads, kv_heads, kv_heads))
        for options in others.get(d, usual):
            backward(flash_attention(q, k, v, cu_seqlens, **options))


def hopper(dtype: torch.dtype) -> None:
    """What packed attention in Gluon takes, forward and backward."""
    cu_seqlens = torch.tensor([0, 20, TOKENS], dtype=torch.int32)
    for d in (64, 128):
        q, k, v = (rows(TOKENS, heads, d, dtype=dtype) for heads in (8, 2, 2))
        for causal in (True, False):
            backward(flash_attention(q, k, v, cu_seqlens, causal=causal))


def paged(dtype: torch.dtype) -> None:
    """Attention over pages: decoding, a few rows and a prompt, in 16 and 8 bits; every case at one head dim."""
    tables = torch.arange(PAGES, dtype=torch.int32).view(2, PAGES // 2)
    cu_seqlens, lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([50, 60], dtype=torch.int32)
    decoding, prompt = (2, None), (TOKENS, None)
    cases = {dtype: [decoding, (2, 16), (10, None), prompt], torch.int8: [decoding, prompt]}
    cases[torch.float8_e4m3fn] = [(2, 16), (10, None)]
    for q_heads, kv_heads, d in (*HEADS, (4, 1, 256)):
        q = rows(TOKENS, q_heads, d, dtype=dtype, differentiable=False)
        for page_dtype, every in cases.items() if d == 128 else [(dtype, [decoding, prompt])]:
            k_pages, v_pages = torch.zeros(2, PAGES, PAGE, kv_heads, d).to(page_dtype)
            scales: dict[str, Tensor] = {}
            if page_dtype != dtype:
                scales = {name: torch.zeros(PAGES, PAGE, kv_heads) for name in ("k_scales", "v_scales")}
            for tokens, window in every:
                paged_attention(q[:tokens], k_pages, v_pages, tables, cu_seqlens, lengths, window=window, **scales)
    for tokens in (2, TOKENS):
        paged_attention(q[:tokens], k_pages, v_pages, tables, cu_seqlens, lengths, soft_cap=50.0)


def losses(dtype: torch.dtype) -> None:
    """Cross-entropy and every divergence, at hidden sizes that fill their tiles and that do not."""
    labels = torch.zeros(TOKENS, dtype=torch.int64)
    for student_size, teacher_size in ((2048, 4096), (576, 1000)):
        student = rows(TOKENS, student_size, dtype=dtype), rows(320, student_size, dtype=dtype)
        teacher = rows(TOKENS, teacher_size, dtype=dtype), rows(304, teacher_size, dtype=dtype)
        for kept in (2**27, 0):
            _streamed_projection._KEPT_LOGITS = kept
            backward(linear_cross_entropy(*student, labels))
            backward(linear_cross_entropy(*student, labels, soft_cap=30.0))
            usual = kept == 0 or student_size == 576
            temperature = 1.0 if usual else 2.0
            for kind in ("forward_kl",) if usual else get_args(DivergenceKind):
                backward(linear_distillation(*student, *teacher, labels, kind=kind, temperature=temperature).loss)
            backward(linear_distillation(*student, *teacher, labels, soft_caps=(30.0, 30.0)).loss)
    with torch.no_grad():
        linear_distillation(*student, *teacher, labels, kind="jsd", temperature=2.0)


def sampling(dtype: torch.dtype) -> None:
    """From logits to tokens, verification of chains and trees, drafts from the text."""
    batch, n, vocabulary = 4, 5, 49_152
    zeros, ones = torch.zeros(batch, dtype=torch.int32), torch.ones(batch)
    stream = Stream(zeros.long(), zeros, zeros)
    exponential(stream, 100, 0)
    uniform(stream, 100, 0)
    logits, filters = rows(batch, vocabulary, dtype=dtype, differentiable=False), Filters(ones, zeros, ones, ones)
    lists = (torch.zeros(batch, 3, dtype=torch.int32), torch.zeros(batch, 3), torch.zeros(batch, 3, dtype=torch.int32))
    state = RequestState(torch.zeros(batch, vocabulary, dtype=torch.int32), ones, ones, ones, *lists)
    for drafted in (None, lists[0]):
        scores = adjust_scores(logits, state, slots=zeros, positions=zeros, drafted=drafted)
    for x in (logits, scores, logits[:, :-1]):
        race(adjusted_probabilities(x, **filters._asdict()), stream, Purpose.DRAFT)
        token_logprobs(x, sample_tokens(x, filters, stream), 5)
    p, tokens = torch.zeros(batch, n + 1, vocabulary), torch.zeros(batch, n, dtype=torch.int64)
    for draft_p in (None, p):
        for parents in (None, tokens.int()):
            verify(p, draft_p, tokens, counts=zeros, lengths=zeros, stream=stream, parents=parents)
    find_ngrams(torch.zeros(batch, 500, dtype=torch.int64), zeros, 4)


def routing(dtype: torch.dtype) -> None:
    """Layers that only some tokens enter: who does, their rows, and attention over the slots that they have left."""
    index, _ = select_tokens(torch.zeros(TOKENS, dtype=torch.bool), 10)
    ints, tables = torch.arange(3, dtype=torch.int32), torch.zeros(2, PAGES, dtype=torch.int32)
    steps = {"block_tables": tables, "cu_seqlens": ints, "kv_lengths": ints[1:], "rows": ints[:2], "first": ints[:2]}
    plan = plan_visible_slots(torch.arange(2), **steps, page_size=PAGE)
    visible = VisibleSlots.empty(PAGES * PAGE, 3, PAGES * PAGE, torch.device("cpu"))
    lengths = list_visible_slots(visible, torch.arange(3), plan)
    for n, k in ((1536, 576), (300, 1030)):
        x, weight = rows(300, k, dtype=dtype, differentiable=False), torch.zeros(n, k, dtype=dtype)
        for bias in (None, torch.zeros(n, dtype=dtype)):
            linear_of_leading_rows(x, weight, bias, torch.tensor(9, dtype=torch.int32))
    for q_heads, kv_heads, d in HEADS:
        slots = torch.zeros(2, PAGES * PAGE, 1, kv_heads, d).to(dtype)
        for tokens in (2, TOKENS):
            q = rows(tokens, q_heads, d, dtype=dtype, differentiable=False)
            attention = plan_paged_attention(visible.lists, ints, lengths, 1, table_rows=plan.rows)
            paged_attention(q, *slots, visible.lists, ints, lengths, plan=attention)
    for size in (576, 4096):
        x = rows(TOKENS, size, dtype=dtype)
        for gate in (None, rows(10, dtype=torch.float32)):
            backward(scatter_add_rows(x, index, gather_rows(x, index), gate))


def quantized(dtype: torch.dtype) -> None:
    """Every format at every class of rows, and K that 64 or 32 do not divide; forward and backward, and logits."""
    bias = torch.zeros(256, dtype=dtype)
    for k, rows_each in ((1024, (16, 32, 64, 128, 256)), (1030, (1, 64)), (1040, (1,))):
        for quantize in (quantize_nf4, quantize_int4, quantize_int6, quantize_int8, quantize_fp8):
            weight = prepare_quantized_weight(quantize(torch.zeros(256, k)))
            for tokens in rows_each:
                backward(quantized_linear(rows(tokens, k, dtype=dtype), weight, bias))
                if k == 1024 and tokens in (16, 128):
                    quantized_linear_in_fp32(rows(tokens, k, dtype=dtype, differentiable=False), weight)


def products(dtype: torch.dtype) -> None:
    """One row, many rows that the weight is written out for, and many that are rounded as it is; every format. Of
    experts few rows and many, dense and quantized."""
    for quantize in (quantize_nf4, quantize_int4, quantize_int6, quantize_int8, quantize_fp8):
        weight = prepare_quantized_weight(quantize(torch.zeros(256, 1024)))
        for tokens in (1, 256):
            quantized_linear(rows(tokens, 1024, dtype=dtype, differentiable=False), weight)
    for quantize, rounded in ((quantize_int8, torch.int8), (quantize_fp8, torch.float8_e4m3fn)):
        weight = prepare_quantized_weight(quantize(torch.zeros(256, 1024)))
        rounded_linear(rows(256, 1024, dtype=dtype, differentiable=False), weight, None, Rounding(rounded))
    weight = prepare_quantized_weight(quantize_int4(torch.zeros(256, 1024)))
    for experts in (weight, PreparedWeight(torch.zeros(256, 1024, dtype=dtype))):
        for tokens in (1, 256):
            arranged = arrange_rows(torch.zeros(tokens, 1, dtype=torch.int64), 4, dtype)
            stacked = stack_experts([experts] * 4)
            expert_products(rows(tokens, 1024, dtype=dtype, differentiable=False), stacked, arranged)


def optimizer(dtype: torch.dtype) -> None:
    """A step of AdamW with 8-bit moments."""
    settings = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    for size in (4096, 1_000_003):
        weight, moments = torch.zeros(size), Moments.zeros(size, device=torch.device("cpu"))
        adamw_8bit(weight, torch.zeros(size, dtype=dtype), moments, **settings)
        adamw_8bit(weight, torch.zeros(size), moments, **settings)


def lora(dtype: torch.dtype) -> None:
    """Adapters alone and in quantized products, gated ones too, whose K is split (N = 256) and whose K is not."""
    slots = torch.zeros(TOKENS * 6, dtype=torch.int32)
    for k, rank, n, adapters in ((1024, 16, 256, 8), (1030, 7, 301, 1), (4096, 130, 256, 8)):
        for tokens in (1, TOKENS, 6 * TOKENS):
            x, y = (rows(tokens, size, dtype=dtype, differentiable=False) for size in (k, n))
            a, b = (torch.zeros(adapters, *sizes, dtype=dtype) for sizes in ((rank, k), (n, rank)))
            lora_add(y, x, LoraWeights(a, b, torch.ones(adapters)), slots[:tokens] if adapters > 1 else None)
    for n, k, quantize in ((256, 4096, quantize_nf4), (2**16, 512, quantize_int8)):
        bias, a, b = (torch.zeros(size, dtype=dtype) for size in ((n,), (8, 16, k), (8, n, 16)))
        weights = LoraWeights(a, b, torch.ones(8))
        weight = prepare_quantized_weight(quantize(torch.zeros(n, k)))
        for tokens in (1, 16, 64):
            x = rows(tokens, k, dtype=dtype, differentiable=False)
            quantized_linear(x, weight, bias, weights, slots[:tokens])
            quantized_swiglu(x, weight, None, weights, slots[:tokens])
            quantized_swiglu(x, weight, bias)


KERNELS = {
    "around": {
        "rms_norm._forward_kernel", "rms_norm._backward_kernel", "swiglu._forward_kernel", "swiglu._backward_kernel",
        "rotary._rotary_kernel", "rotary_write._rotate_and_write_kernel", "write_pages._write_kernel",
    },
    "flash": {"flash._forward_kernel", "flash._grad_queries_kernel", "flash._grad_keys_kernel"},
    "hopper": {"_flash_hopper._forward_kernel", "_flash_hopper_backward._backward_kernel"},
    "lora": {"lora._shrink_kernel", "lora._expand_kernel", "quantized._product_kernel"},
    "losses": {
        "linear_cross_entropy._statistics_kernel", "linear_cross_entropy._gradient_kernel",
        "linear_distillation._statistics_kernel", "linear_distillation._divergence_kernel",
    },
    "optimizer": {"adamw_8bit._update_kernel"},
    "paged": {"paged._attend_kernel"},
    "products": {
        "quantized._product_kernel", "quantized._expand_kernel", "_rounded_tiles._codes_kernel",
        "experts._expert_kernel",
    },
    "quantized": {"quantized._product_kernel", "quantized._grad_input_kernel", "quantized._expand_kernel"},
    "sampling": {
        "random._fill_kernel", "_thresholds._extremes_kernel", "_thresholds._narrow_kernel", "sample._kept_mass_kernel",
        "sample._probabilities_kernel", "sample._race_kernel", "sample._draw_kernel",
        "logit_adjustments._adjust_kernel", "token_logprobs._logprobs_kernel", "verification._walk_kernel",
        "verification._next_token_kernel", "ngram._ngram_kernel",
    },
    "routing": {
        "token_routing._select_kernel", "token_routing._gather_kernel", "token_routing._add_kernel",
        "token_routing._add_backward_kernel", "visible_slots._list_slots_kernel", "_paged_plan._count_kernel",
        "_paged_plan._list_kernel", "paged._attend_kernel", "paged._merge_kernel",
        "leading_rows._leading_rows_kernel",
    },
}  # fmt: skip
"""What each group compiles at least."""

GROUPS = {
    "optimizer": optimizer,
    "sampling": sampling,
    "losses": losses,
    "around": around,
    "flash": flash,
    "hopper": hopper,
    "paged": paged,
    "routing": routing,
    "quantized": quantized,
    "products": products,
    "lora": lora,
}


def compile_alone(
    capability: int, groups: list[str], cache: Path, *flags: str, fits: int | None = None, **quickly: str
) -> None:
    """By a process of its own: every kernel of these groups compiles and fits into the shared memory of the GPU, or of
    another, `fits`. `quickly` are variables of its environment."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)} | quickly
    command = [sys.executable, "-m", __name__, str(capability), *groups, *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    expected = set().union(*(KERNELS[group.partition(":")[0]] for group in groups))
    assert {".".join(kernel["name"].split()[0].split(".")[-2:]) for kernel in kernels} >= expected
    most = MOST_SHARED_BYTES[fits or capability]
    assert [kernel for kernel in kernels if kernel["shared_bytes"] > most] == []


def ptx_of(capability: int, group: str, cache: Path, *, fits: int | None = None) -> dict[str, str]:
    """PTX of all that a group compiles, by the kernel's name and a number; whoever asks assembles it."""
    compile_alone(capability, [group], cache, ONLY_PTX, fits=fits)
    files = sorted(cache.glob("*/*.ptx"))
    return {f"{file.stem} {number}": file.read_text() for number, file in enumerate(files)}


if __name__ == "__main__":
    compiled = compile_instead_of_launching(int(sys.argv[1]), only_ptx=ONLY_PTX in sys.argv)
    if FLOATS_IN_FP64 in sys.argv:
        widen_floats()
    for group in [argument for argument in sys.argv[2:] if not argument.startswith("--")]:
        name, _, dtype = group.partition(":")
        GROUPS[name](getattr(torch, dtype or "bfloat16"))
    for name, kernel in compiled.items():
        print(json.dumps({"name": name, "shared_bytes": kernel.metadata.shared}))
