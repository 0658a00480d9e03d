"""llama.cpp with a BLAS library, run by the interpreter that has it: it reads quantized weights as fp32 for sgemm.

    PYTHON -m bench.quantize.llama_cpp_blas CASE.json

The case names a GGUF `file`, `prompts` (lists of tokens), `threads`, and the `out` that is written: fp32, the logits at
each position of each prompt, [P, T, V], as numpy's file. Without BLAS, and with it for fewer than 32 tokens at once,
llama.cpp rounds activations to 8 bits; so the head computes all positions of a prompt, not its last alone. The last
line printed names its version and what multiplies, BLAS first.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._ggml import libggml

FP32, DISABLED = 0, 0
"""Of `ggml_type`, and of `llama_flash_attn_type`."""


def devices() -> list[str]:
    """What multiplies, in the order in which it is asked."""
    count, get, describe = (
        libggml.ggml_backend_dev_count,
        libggml.ggml_backend_dev_get,
        libggml.ggml_backend_dev_description,
    )
    count.restype, get.restype, describe.restype = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
    get.argtypes, describe.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    return [describe(get(number)).decode() for number in range(count())]


def context_of(case: dict[str, Any], num_tokens: int) -> Any:
    """An open file that reads a whole prompt at once, keys and values in fp32."""
    loading = llama_cpp.llama_model_default_params()
    loading.use_extra_bufts = False  # weights rearranged for its own products are not BLAS's to read
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = num_tokens
    settings.n_threads = settings.n_threads_batch = case["threads"]
    settings.type_k = settings.type_v = FP32
    settings.flash_attn_type = DISABLED
    return llama_cpp.llama_init_from_model(
        llama_cpp.llama_model_load_from_file(case["file"].encode(), loading), settings
    )


def logits(context: Any, prompt: list[int]) -> np.ndarray:
    """After each token of a prompt, fp32 [T, V]."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(len(prompt), 0, 1)
    batch.n_tokens = len(prompt)
    for position, token in enumerate(prompt):
        batch.token[position], batch.pos[position], batch.logits[position] = token, position, True
        batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
    if llama_cpp.llama_decode(context, batch):
        raise SystemExit("llama.cpp could not decode a prompt.")
    width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context)))
    found = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(prompt), width)).copy()
    llama_cpp.llama_batch_free(batch)
    return found


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    if len(devices()) < 2:
        raise SystemExit("This llama.cpp is built without a BLAS library.")
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    context = context_of(case, max(map(len, case["prompts"])))
    with Path(case["out"]).open("wb") as out:
        np.save(out, np.stack([logits(context, prompt) for prompt in case["prompts"]]), allow_pickle=False)
    print(json.dumps({"llama_cpp_python": llama_cpp.__version__, "devices": devices()}))


if __name__ == "__main__":
    main()
