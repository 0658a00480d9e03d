"""llama.cpp, from the wheel `xllamacpp`, as an oracle: its distributions and tokens for a GGUF file, its quantizer."""

import ctypes
import json
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear._turned_cpu import TurnedWeight
from model.formats.ggml import Ggml

xllamacpp = pytest.importorskip("xllamacpp", reason="the oracle llama.cpp needs: pip install xllamacpp")

WHOLE_CHARACTER = 7
"""A token of the tiny tokenizers that is one, "!"."""


@dataclass
class LlamaCpp:
    """An open file."""

    server: Any

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Ids of the most likely continuation."""
        return self._complete(prompt, num_tokens)["tokens"]

    def log_probs(self, prompt: Sequence[int], vocab_size: int) -> Tensor:
        """Of each token after the prompt, [vocab_size]."""
        # It reports no distribution where the chosen token is a part of a character; the bias moves the choice alone.
        answer = self._complete(prompt, 1, n_probs=vocab_size, logit_bias=[[WHOLE_CHARACTER, 1e6]])
        found = torch.full((vocab_size,), float("nan"))
        for choice in answer["completion_probabilities"][0]["top_logprobs"]:
            found[choice["id"]] = choice["logprob"]
        return found

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        asked = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return self._ask("tokenize", asked)["tokens"]

    def apply_template(self, messages: Sequence[dict[str, str]]) -> str:
        """A conversation as text, ready for an answer."""
        return self._ask("apply-template", {"messages": list(messages)})["prompt"]

    def _complete(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> Any:
        asked = {"prompt": list(prompt), "n_predict": num_tokens, "temperature": 0.0, "return_tokens": True}
        return self._ask("completion", asked | {"ignore_eos": True, "cache_prompt": False} | options)

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self.server.listening_address}/{path}", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


@contextmanager
def opened(path: Path, *, at_once: int = 512, rearranged: bool = True) -> Iterator[LlamaCpp]:
    """One thread, keys and values in fp32, so many tokens of a prompt at once; weights rearranged for fast products."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.port, params.warmup, params.verbosity = 512, 1, 0, False, 0
    params.n_ubatch, params.no_extra_bufts = at_once, not rearranged
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = LlamaCpp(xllamacpp.Server(params))
    try:
        yield server
    finally:
        del server.server


def quantize(type: str, dense: Tensor) -> Tensor:
    """u8 [N, bytes of a row] of a matrix by llama.cpp's own quantizer, without an imatrix."""
    function = _library().ggml_quantize_chunk
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    function.restype = ctypes.c_size_t
    kind, (rows, columns) = gguf.GGMLQuantizationType[type], dense.shape
    weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = torch.zeros(rows, columns // weights * num_bytes, dtype=torch.uint8)
    dense = dense.contiguous().float()
    assert function(kind, dense.data_ptr(), stored.data_ptr(), 0, rows, columns, None) == stored.numel()
    return stored


def dequantize(type: str, stored: Tensor) -> Tensor:
    """What its own code makes of blocks, u8 [N, bytes of a row]: fp32 [N, K]."""
    weights, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    function = getattr(_library(), f"dequantize_row_{type.lower().replace('_k', '_K')}")
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    stored = stored.contiguous()
    dense = torch.full((len(stored), stored.shape[1] // num_bytes * weights), float("nan"))
    function(stored.data_ptr(), dense.data_ptr(), dense.numel())
    return dense


def _library() -> ctypes.CDLL:
    (path,) = Path(xllamacpp.__file__).parent.glob("*.abi3.so")
    return ctypes.CDLL(str(path))


# Its rounding: of activations before each product with blocks (ggml/src/ggml-cpu/arch/x86/quants.c), of GELU


@contextmanager
def rounded_activations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products with blocks round what they multiply as llama.cpp's do: in groups of 32, with large blocks of 256."""
    product = Ggml.product

    def rounded(format: Ggml, x: Tensor, prepared: Any, *rest: Any) -> Tensor:
        if gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format.type]][0] == 256:
            return product(format, _rounded_by_256(x), prepared, *rest)
        levels, scales = _levels_by_32(x)
        y = product(format, (levels * scales.half()).view(x.shape), prepared, *rest)
        held = prepared.held.stored() if isinstance(prepared.held, TurnedWeight) else prepared.held
        if (minima := held.minima) is None:
            return y
        # Minima are multiplied with the sums of 32 activations, which it rounds to fp16.
        sums = levels.sum(1, keepdim=True)
        return y + ((sums * scales).half().float() - sums * scales.half()).view(len(x), -1) @ minima.float().T

    with monkeypatch.context() as patched:
        patched.setattr(Ggml, "product", rounded)
        patched.setattr(Ggml, "in_fp32", rounded)
        yield


@contextmanager
def half_gelu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLPs with GELU look it up in fp16, as its CPU code does between -10 and 10 (ggml/src/ggml-cpu/vec.h)."""

    def looked_up(gate: Tensor, up: Tensor) -> Tensor:
        rounded = F.gelu(gate.half().float(), approximate="tanh").half().float()
        return torch.where(gate.abs() < 10, rounded, gate.clamp(min=0)) * up

    with monkeypatch.context() as patched:
        patched.setattr("model.mlp.geglu", looked_up)
        yield


def _levels_by_32(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.reshape(-1, 32)
    extremes = blocks.abs().amax(1, keepdim=True)
    return (blocks * torch.where(extremes == 0, 0, 127 / extremes)).round(), extremes / 127


def _rounded_by_256(x: Tensor) -> Tensor:
    blocks = x.reshape(-1, 256)
    extremes = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    factors = torch.where(extremes == 0, 0, -127 / extremes)
    levels = (blocks * factors).round().clamp(max=127)
    return (levels * torch.where(factors == 0, 0, 1 / factors)).view(x.shape)
