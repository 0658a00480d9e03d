"""Weight formats: each is named by its own file and the list alone, so that a new one is one file and one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compress.lora import inject, merge, start_loftq
from compress.quantize.round_to_nearest import quantize_folder
from model.files.checkpoint import TensorFiles, load_model, save_model
from model.formats.registry import FORMATS, format_named
from model.lora import LoraConfig
from model.quantized import quantized_layers
from model.training_memory import Setup
from serve import LLM
from serve.sampling_params import SamplingParams
from tests.compare import relative_rms
from tests.serve.toys import greedy_oracle, toy_tokenizer
from tests.tiny import full_logits, tiny_model
from train.config import TrainingConfig

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]

AMBIGUOUS = ("gptq", "awq", "ggml")
"""Formats whose names are also those of methods in compress/quantize, or of the library that defines them."""
FILES = {"ggml": {"model/formats/gguf/reader.py", "model/formats/gguf/writer.py"}}
"""What makes weights of a format from files of another kind, or such files of the weights."""
PAGES = {"model/kv_format.py", "serve/config.py", "serve/http/options.py", "pipeline/stages/quantize/config.py"}
PAGES |= {"model/files/cache_scales.py", "model/transformer.py", "serve/engine/loading.py", "pipeline/schema.py"}
"""Where the same names mean formats of keys and values."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", FORMATS)
def test_only_its_file_and_the_list_name_a_format(name: str) -> None:
    """Above the kernels, which multiply with it."""
    own = {"model/formats/registry.py", FORMATS[name].partition(":")[0].replace(".", "/") + ".py"}
    folders = ("model", "compress", "train", "serve", "pipeline")
    sources = {
        str(path.relative_to(ROOT)): path.read_text() for room in folders for path in (ROOT / room).rglob("*.py")
    }
    own |= PAGES if name in ("int8", "fp8") else FILES.get(name, set())
    # int8 alone is also a dtype of torch, and 8 bits may be those of an optimizer or of pages.
    word = rf"formats\.{name}" if name in AMBIGUOUS else rf"(?<![\w.]){name}(?!\w)"
    naming = re.compile(rf"{word}|{name}(?:Weight|Linear|Format)", re.IGNORECASE)
    assert {path for path, text in sources.items() if naming.search(text)} <= own


def test_the_list_alone_needs_no_torch() -> None:
    code = "import sys, model.formats.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """The line that a new format adds to the list."""
    monkeypatch.setitem(FORMATS, "sign", "tests.model.toy_format:Sign")
    return "sign"


def test_a_new_format_is_written_read_served_and_planned(toy: str, tmp_path: Path) -> None:
    format = format_named(toy)
    save_model(tiny_model("qwen2"), tmp_path / "dense")
    quantize_folder(tmp_path / "dense", tmp_path / "toy", format)
    toy_tokenizer().save(tmp_path / "toy")
    model, twin = load_model(tmp_path / "toy"), tiny_model("qwen2")
    for name, layer in quantized_layers(model).items():
        twin.get_submodule(name).weight.data = layer.weight.dequantize()
    assert relative_rms(full_logits(model, TOKENS), full_logits(twin, TOKENS)) < 1e-5
    (answer,) = LLM(str(tmp_path / "toy"), dtype="float32", num_pages=32).generate(
        [TOKENS], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    )
    assert answer.choices[0].token_ids == greedy_oracle(twin, TOKENS, 12)
    training = TrainingConfig(tokens=64, batch_tokens=32, micro_batch_tokens=32, precision="fp32")
    planned = Setup(model.config, training, adapter=LoraConfig(rank=2), quantization=toy).memory().weights
    tensors = [part for layer in quantized_layers(model).values() for part in format.tensors(layer.weight).values()]
    assert planned == sum(tensor.nbytes for tensor in [*tensors, *model.parameters()])


def test_adapters_train_on_a_new_format(toy: str, tmp_path: Path) -> None:
    """LoftQ brings base and adapter closer to the dense weights; merging and gradients need nothing more."""
    save_model(tiny_model(), tmp_path / "dense")
    quantize_folder(tmp_path / "dense", tmp_path / "toy", format_named(toy))
    model, dense = load_model(tmp_path / "toy"), full_logits(tiny_model(), TOKENS)
    before = relative_rms(full_logits(model, TOKENS), dense)
    inject(model, LoraConfig(rank=16))
    start_loftq(model, TensorFiles(tmp_path / "dense"), iterations=3)
    assert relative_rms(full_logits(model, TOKENS), dense) < before
    merged = full_logits(merge(model, dtype=torch.float32), TOKENS)
    assert relative_rms(full_logits(model, TOKENS), merged) < 1e-4
