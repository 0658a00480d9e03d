"""The table of parts, in the order of worth. A new part is one more entry, and a function that yields figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.sources import TESTED
from bench.parts import parts_of_family

_KERNELS = ("kernels", "bench/kernels", "bench/gpu/kernels.py")
_ENGINE = ("kernels", "model", "serve", "bench/models.py", "bench/gpu/engine.py", "bench/serve/decode_trace.py")
_SERVING = (*_ENGINE, "bench/gpu/serving.py")
_PEERS = ("bench/models.py", "bench/gpu/peers.py")
_TRAINING = ("kernels", "model", "compress", "train", "bench/models.py", "bench/train", "bench/gpu/training.py")


@dataclass(frozen=True)
class Part:
    """What is measured in one process."""

    name: str
    measure: str
    """MODULE:FUNCTION, which `bench.gpu.worker` calls."""
    limit_s: float
    sources: tuple[str, ...]
    """Folders and files of this repository that decide the figures."""
    needs: tuple[str, ...] = ()
    """Modules without which it is skipped."""
    options: Mapping[str, Any] = field(default_factory=dict)


def _kernels(name: str) -> Part:
    return Part(f"kernels-{name}", "bench.gpu.kernels:beside_peers", 100, _KERNELS, options={"part": name})


def _correct(family: str, *names: str) -> Part:
    options = {"parts": names or (family,)}
    return Part(f"correct-{family}", "bench.gpu.kernels:correct", 180, _KERNELS, options=options)


def _engine(name: str, function: str, limit_s: float, **options: Any) -> Part:
    return Part(name, f"bench.gpu.engine:{function}", limit_s, _ENGINE, options=options)


def _transformers(name: str, function: str, **options: Any) -> Part:
    return Part(name, f"bench.gpu.peers:{function}", 240, _PEERS, ("transformers",), options)


# fmt: off
_PARTS = (
    Part("tests", "bench.gpu.checks:gpu_tests", 600, TESTED, ("pytest",)),
    _correct("attention", "flash", "decode", "verify", "prefill_paged"),
    _correct("fused"),
    _correct("linear", "quantized"),
    _correct("losses"),
    _correct("sampling"),
    Part("peaks", "bench.gpu.checks:peaks", 90, ("bench/kernels/timing.py", "bench/gpu/checks.py")),
    _engine("decode-8b", "decode", 180, shape="8B", weights="bf16"),
    _engine("decode-8b-nf4", "decode", 180, shape="8B", weights="nf4"),
    _engine("decode-8b-int4", "decode", 180, shape="8B", weights="int4"),
    _engine("decode-1b", "decode", 150, shape="1B", weights="bf16"),
    _engine("prefill-8b", "prefill", 120, shape="8B", weights="bf16"),
    _engine("prefill-1b", "prefill", 120, shape="1B", weights="bf16"),
    _engine("idle-8b", "idle", 90, shape="8B"),
    _engine("idle-1b", "idle", 90, shape="1B"),
    Part("speculation", "bench.gpu.speculation:speculate", 240, (*_ENGINE, "bench/gpu/speculation.py")),
    *map(_kernels, ("quantized_nf4", "quantized_int4", "quantized_fused", "decode", "flash_forward",
                    "flash_forward_backward", "verify", "sampling_tokens", "sampling_drafts")),
    Part("training-qlora", "bench.gpu.training:qlora", 300, _TRAINING),
    Part("training-distill", "bench.gpu.training:distill", 240, _TRAINING),
    *map(_kernels, ("losses_distillation", "losses_cross_entropy")),
    Part("serving-1b", "bench.gpu.serving:offline", 180, _SERVING, options={"shape": "1B"}),
    Part("serving-8b", "bench.gpu.serving:offline", 300, _SERVING, options={"shape": "8B"}),
    Part("serving-load", "bench.gpu.serving:under_load", 180, _SERVING, options={"shape": "8B"}),
    Part("serving-http", "bench.gpu.serving:over_http", 240, (*_SERVING, "pipeline"),
         ("msgspec", "omegaconf", "starlette", "uvicorn")),
    _transformers("transformers-8b", "transformers_decode", shape="8B"),
    _transformers("transformers-1b", "transformers_decode", shape="1B"),
    _transformers("transformers-serving", "transformers_offline", shape="1B"),
    Part("vllm-8b", "bench.gpu.peers:vllm", 300, _PEERS, ("vllm",), {"shape": "8B"}),
    Part("vllm-1b", "bench.gpu.peers:vllm", 300, _PEERS, ("vllm",), {"shape": "1B"}),
    Part("peft-qlora", "bench.gpu.training:peft", 300, ("bench/models.py", "bench/train", "bench/gpu/training.py"),
         ("transformers", "peft", "bitsandbytes")),
    *map(_kernels, ("quantized_int8", "quantized_fp8", "quantized_backward", "prefill_paged", "decode_8bit",
                    "flash_backward", "fused", "sampling_routing")),
)
# fmt: on
PARTS = {part.name: part for part in _PARTS}


def parts_named(wanted: str) -> list[str]:
    """The part of this name, else all whose names begin with it and a dash: `decode` means four."""
    return parts_of_family(wanted, PARTS, "-")
