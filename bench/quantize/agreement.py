"""How far llama.cpp's distributions are from ours on its quantized files, and from its own with other settings.

    python -m bench.quantize.agreement          # writes bench/results/gguf-agreement-cpu.json; 30 minutes
    python -m bench.quantize.agreement --peer ENVIRONMENT/bin/python        # gguf-agreement-blas-cpu.json

SmolLM2-135M-Instruct in each type, as llama.cpp's own quantizer writes it, and in fp32. llama.cpp, on one thread, with
keys and values in fp32 and without flash attention, reads a prompt in one piece. Compared are the distributions after
prompts of held-out text: by the KL, of which 2e-3 are asked for, and by first choices, of which 99 % shall be equal;
`bounds` says who keeps to that. Beside its distributions stand

    ours                   of the stored weights, with activations as they are, in fp32
    ours_rounded           with activations rounded as it does, to 8 bits by 32 or 256 neighbours
    itself_again           the same once more
    itself_token_by_token  it reads one token at a time (`n_ubatch` 1): sums in another order, and nothing else
    itself_as_stored       its weights are not rearranged for faster products (`no_extra_bufts`)
    itself_in_fp32         it reads the weights that the file stands for, in fp32, so that it rounds no activations

and `in_fp32` beside the last. `ours_nudged` compares `ours_rounded` with itself, weights of the first norm changed by
1e-7. Where so little, as much as sums in another order differ by, tips one number of the hundred thousand that are
rounded for a token, a whole step of rounding goes on to the next product and tips many there, and a few layers later
nothing is left in common but the size of the error. So whoever sums in another order, be it llama.cpp, comes no nearer.

Built with a BLAS library, llama.cpp rounds no activations where 32 tokens or more are multiplied at once: it reads the
weights of the same file as fp32. `--peer` names an interpreter with such a llama.cpp, and compares its distributions at
each position of the prompts with ours; it is built by

    CMAKE_ARGS="-DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS" pip install --no-binary llama-cpp-python llama-cpp-python
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.common import check_peer, run_side, teacher_folder, write_result
from bench.serve.llama_cpp import check_installed
from compress.residual_stream import layers_of
from model.files.checkpoint import load_model
from model.formats.gguf.reader import import_gguf, import_gguf_blocks
from model.formats.gguf.writer import export_gguf
from model.text.tokenizer import Tokenizer
from tests.tiny import full_logits

if TYPE_CHECKING:
    from model.transformer import Transformer

TYPES = ("f32", "q8_0", "q6_k", "q4_k_m", "q4_1", "q4_0")
PROMPT_TOKENS, EVERY = 64, 7
"""Of text, a prompt's end every so many tokens."""
MOST_KL, LEAST_EQUAL, NUDGE = 2e-3, 0.99, 1e-7
INSTALL = "build llama-cpp-python with GGML_BLAS in an environment of its own"


def prompts(folder: Path, count: int) -> Iterator[list[int]]:
    tokens = Tokenizer.load(folder).encode(Path(argparse.__file__).read_text())
    return (tokens[EVERY * number :][:PROMPT_TOKENS] for number in range(count))


def theirs(file: Path, asked: list[list[int]], vocab_size: int, **settings: Any) -> Tensor:
    """llama.cpp's distributions after prompts, with the settings of `opened`: [P, V]."""
    from tests.model.llama_cpp import opened

    with opened(file, **settings) as server:
        found = torch.stack([server.log_probs(prompt, vocab_size) for prompt in asked])
    return found.double().log_softmax(-1)  # its own sum over the vocabulary, in fp32, is off by 1e-4


def ours(model: "Transformer", asked: list[list[int]]) -> Tensor:
    """Our distributions after prompts, [P, V]."""
    return torch.stack([full_logits(model, prompt)[-1].double().log_softmax(-1) for prompt in asked])


def ours_rounded(model: "Transformer", asked: list[list[int]]) -> Tensor:
    """The same with activations rounded as llama.cpp's are."""
    from tests.model.llama_cpp import rounded_activations

    with pytest.MonkeyPatch.context() as patch, rounded_activations(patch):
        return ours(model, asked)


@contextmanager
def nudged(model: "Transformer") -> Iterator[None]:
    """The weights of its first norm are others by NUDGE of themselves meanwhile."""
    weight = layers_of(model)[0].input_layernorm.weight.data  # type: ignore[union-attr]
    before = weight.clone()
    weight *= 1 + NUDGE * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    try:
        yield
    finally:
        weight.copy_(before)


def written(type: str, scratch: Path) -> tuple[Path, "Transformer"]:
    """The teacher's file of a type, and what it is here, in fp32."""
    file, folder = scratch / f"{type}.gguf", scratch / type
    export_gguf(teacher_folder(), file, type=type)
    import_gguf_blocks(file, folder)
    return file, load_model(folder, dtype=torch.float32)


def by_blas(interpreter: str, type: str, asked: list[list[int]], scratch: Path) -> dict[str, Any]:
    """How far llama.cpp's distributions at each position, by BLAS, are from ours, and what multiplies there."""
    (file, model), out = written(type, scratch), scratch / f"{type}.npy"
    case = {"file": str(file), "prompts": asked, "threads": torch.get_num_threads(), "out": str(out)}
    about = run_side(interpreter, "bench.quantize.llama_cpp_blas", case)
    theirs = torch.from_numpy(np.load(out, mmap_mode="c", allow_pickle=False))
    each = [
        distance(logits.double().log_softmax(-1), full_logits(model, prompt).double().log_softmax(-1))
        for logits, prompt in zip(theirs, asked, strict=True)
    ]
    return {name: sum(one[name] for one in each) / len(each) for name in ("kl", "equal_first_choices")} | about


def distance(one: Tensor, other: Tensor) -> dict[str, float]:
    """KL(one ‖ other), nats, of log-probabilities [P, V], and the share of equal first choices."""
    kl = (one.exp() * (one - other)).sum(1)
    return {
        "kl": kl.mean().item(),
        "kl_median": kl.median().item(),
        "equal_first_choices": (one.argmax(1) == other.argmax(1)).float().mean().item(),
    }


def compare(type: str, asked: list[list[int]], scratch: Path) -> dict[str, Any]:
    file, model = written(type, scratch)
    plain, rounded = ours(model, asked), ours_rounded(model, asked)
    with nudged(model):
        near = ours_rounded(model, asked)
    ask = partial(theirs, asked=asked, vocab_size=plain.shape[1])
    whole, wide = ask(file), ask(in_fp32(file, scratch))
    others = {
        "ours": plain,
        "ours_rounded": rounded,
        "itself_again": ask(file),
        "itself_token_by_token": ask(file, at_once=1),
        "itself_as_stored": ask(file, rearranged=False),
        "itself_in_fp32": wide,
    }
    found = {name: distance(whole, other) for name, other in others.items()}
    return found | {"in_fp32": distance(wide, plain), "ours_nudged": distance(rounded, near)}


def in_fp32(file: Path, scratch: Path) -> Path:
    """A file of the weights that another one's blocks stand for; tests hold them to llama.cpp's own, bit by bit."""
    folder, wide = scratch / f"{file.stem}-wide", scratch / f"{file.stem}-wide.gguf"
    import_gguf(file, folder, dtype=torch.float32)
    export_gguf(folder, wide, type="f32")
    return wide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40, help="positions that are compared")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--peer", metavar="PYTHON", help="compare with its llama.cpp, built for BLAS, alone")
    options = parser.parse_args()
    asked, found = list(prompts(teacher_folder(), options.prompts)), {}
    if options.peer:
        return write_by_blas(options.peer, options.types, asked)
    check_installed()
    with tempfile.TemporaryDirectory() as scratch:
        for type in options.types:
            found[type] = compare(type, asked, Path(scratch))
            for name, far in found[type].items():
                equal = far["equal_first_choices"]
                print(f"  {type}, {name}: KL {far['kl']:.2e}, {equal:.1%} equal first choices", flush=True)
            write(found, len(asked))


def write_by_blas(interpreter: str, types: Sequence[str], asked: list[list[int]]) -> None:
    check_peer(interpreter, "llama_cpp", INSTALL)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for type in types:
            found[type] = far = by_blas(interpreter, type, asked, Path(scratch))
            found[type]["kept"] = keeps(far)
            print(f"  {type}: KL {far['kl']:.2e}, {far['equal_first_choices']:.2%} equal first choices", flush=True)
    command = f"python -m bench.quantize.agreement --peer PYTHON --prompts {len(asked)} --types {' '.join(types)}"
    bounds = {"kl": MOST_KL, "equal_first_choices": LEAST_EQUAL}
    write_result(
        "gguf-agreement-blas-cpu", command, {"positions": sum(map(len, asked)), "bounds": bounds, "types": found}
    )


def write(found: dict[str, Any], positions: int) -> None:
    """What is compared so far, with who keeps to the bounds."""
    command = f"python -m bench.quantize.agreement --prompts {positions} --types {' '.join(found)}"
    kept = {type: {name: keeps(far) for name, far in rows.items()} for type, rows in found.items()}
    bounds = {"kl": MOST_KL, "equal_first_choices": LEAST_EQUAL, "kept_by": kept}
    write_result("gguf-agreement-cpu", command, {"positions": positions, "bounds": bounds, "types": found})


def keeps(far: dict[str, float]) -> bool:
    return far["kl"] <= MOST_KL and far["equal_first_choices"] >= LEAST_EQUAL


if __name__ == "__main__":
    main()
