"""How far llama.cpp's distributions are from ours on its quantized files, and from its own with another batch size.

    python -m bench.quantize.agreement          # writes bench/results/gguf-agreement-cpu.json; 10 minutes

SmolLM2-135M-Instruct in each type, as llama.cpp's own quantizer writes it, and in fp32. llama.cpp, on one thread with
keys and values in fp32, reads a prompt in one piece or token by token (`n_ubatch` 512 or 1); both give the same numbers
but for its rounding of activations to 8 bits, which other sums before it turn to the other side. We multiply the stored
weights with activations as they are, in fp32. Compared are the distributions after prompts of held-out text: by the KL,
of which 2e-3 are asked for, and by first choices, of which 99 % shall be equal. `bounds` says who keeps to that.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import teacher_folder, write_result
from bench.serve.llama_cpp import check_installed
from model.files.checkpoint import load_model
from model.formats.gguf.reader import import_gguf_blocks
from model.formats.gguf.writer import export_gguf
from model.text.tokenizer import Tokenizer
from tests.tiny import full_logits

TYPES = ("f32", "q8_0", "q6_k", "q4_k_m", "q4_1", "q4_0")
PROMPT_TOKENS, EVERY = 64, 7
"""Of text, a prompt's end every so many tokens."""
MOST_KL, LEAST_EQUAL = 2e-3, 0.99


def prompts(folder: Path, count: int) -> Iterator[list[int]]:
    tokens = Tokenizer.load(folder).encode(Path(argparse.__file__).read_text())
    return (tokens[EVERY * number :][:PROMPT_TOKENS] for number in range(count))


def theirs(file: Path, asked: list[list[int]], vocab_size: int, *, at_once: int) -> Tensor:
    """llama.cpp's distributions after prompts, of which it computes so many tokens at once: [P, V]."""
    from tests.model.llama_cpp import opened

    with opened(file, at_once=at_once) as server:
        found = torch.stack([server.log_probs(prompt, vocab_size) for prompt in asked])
    return found.double().log_softmax(-1)  # its own sum over the vocabulary, in fp32, is off by 1e-4


def distance(one: Tensor, other: Tensor) -> dict[str, float]:
    """KL(one ‖ other), nats, of log-probabilities [P, V], and the share of equal first choices."""
    kl = (one.exp() * (one - other)).sum(1)
    return {
        "kl": kl.mean().item(),
        "kl_median": kl.median().item(),
        "equal_first_choices": (one.argmax(1) == other.argmax(1)).float().mean().item(),
    }


def compare(type: str, asked: list[list[int]], scratch: Path) -> dict[str, Any]:
    file, folder = scratch / f"{type}.gguf", scratch / type
    export_gguf(teacher_folder(), file, type=type)
    import_gguf_blocks(file, folder)
    model = load_model(folder, dtype=torch.float32)
    ours = torch.stack([full_logits(model, prompt)[-1].double().log_softmax(-1) for prompt in asked])
    whole, single = (theirs(file, asked, ours.shape[1], at_once=tokens) for tokens in (512, 1))
    return {"ours": distance(whole, ours), "itself_token_by_token": distance(whole, single)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40, help="positions that are compared")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    options = parser.parse_args()
    check_installed()
    asked, found = list(prompts(teacher_folder(), options.prompts)), {}
    with tempfile.TemporaryDirectory() as scratch:
        for type in options.types:
            found[type] = compare(type, asked, Path(scratch))
            for name, far in found[type].items():
                equal = far["equal_first_choices"]
                print(f"  {type} against {name}: KL {far['kl']:.2e}, {equal:.1%} equal first choices", flush=True)
            write(found, len(asked))


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
