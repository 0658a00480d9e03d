"""Several adapters over one model: every token gets what the model with its own adapter alone would give it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.quantize.round_to_nearest import quantize_model
from model.attention import PackedAttention
from model.files.adapter import AdapterError, load_adapter, load_adapters, save_adapter
from model.formats.bitsandbytes import NF4
from model.lora import LoraConfig, LoraError, attach_lora, detach_lora
from model.transformer import Transformer
from tests.compare import relative_rms
from tests.interpreted import interpreted
from tests.model.test_lora import disturb
from tests.tiny import full_logits, tiny_model

CONFIGS = (
    LoraConfig(rank=4, alpha=8),
    LoraConfig(rank=2, dora=True, targets=("q_proj", "v_proj", "down_proj")),
    LoraConfig(rank=7, rslora=True, targets=("model.layers.1.*",)),
)
DOCUMENTS = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7], [9, 3], [2, 3, 8, 4])
WHOSE = (1, -1, 0, 2, 0)


def make_base(kind: str, family: str = "llama") -> Transformer:
    model = tiny_model(family)
    return model if kind == "dense" else quantize_model(model, NF4(kind == "nf4"))


def save_adapters(folder: Path, model: Transformer, configs: tuple[LoraConfig, ...] = CONFIGS) -> list[Path]:
    """Adapter folders 0, 1, … that differ clearly from each other and from nothing."""
    folders = [folder / str(number) for number in range(len(configs))]
    for number, (path, config) in enumerate(zip(folders, configs, strict=True)):
        attach_lora(model, config, seed=number)
        disturb(model)
        save_adapter(model, path, config)
        detach_lora(model)
    return folders


def batch_logits(model: Transformer, whose: tuple[int, ...] | None) -> list[Tensor]:
    """Logits of each document, all in one batch."""
    lengths = [len(document) for document in DOCUMENTS]
    tokens = torch.tensor([token for document in DOCUMENTS for token in document])
    positions = torch.cat([torch.arange(length) for length in lengths])
    adapters = None
    if whose is not None:
        adapters = torch.tensor(whose, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    attention = PackedAttention(model.config, torch.tensor([0, *lengths]).cumsum(0).int())
    with torch.no_grad():
        return list(model.logits(model(tokens, positions, attention, adapters=adapters)).split(lengths))


@pytest.mark.parametrize("kind", ["dense", "nf4", "nf4 that stacks"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_each_document_gets_its_own_adapter(kind: str, family: str, tmp_path: Path) -> None:
    folders = save_adapters(tmp_path, make_base(kind, family))
    expected = []
    for document, number in zip(DOCUMENTS, WHOSE, strict=True):
        alone = make_base(kind, family)
        if number >= 0:
            load_adapter(alone, folders[number])
        expected.append(full_logits(alone, document))
    model = make_base(kind, family)
    model.fuse(load_adapters(model, folders))
    for logits, own in zip(batch_logits(model, WHOSE), expected, strict=True):
        assert relative_rms(logits, own) < 2e-5


@pytest.mark.parametrize("kind", ["dense", "nf4", "nf4 that stacks"])
def test_without_an_adapter_every_bit_is_the_base_s(kind: str, tmp_path: Path) -> None:
    folders = save_adapters(tmp_path, make_base(kind))
    expected = batch_logits(make_base(kind).fuse(), None)
    model = make_base(kind)
    model.fuse(load_adapters(model, folders))
    nobody = batch_logits(model, (-1,) * len(DOCUMENTS))
    mixed = batch_logits(model, WHOSE)
    unasked = batch_logits(model, None)
    for number, own in enumerate(expected):
        assert torch.equal(nobody[number], own) and torch.equal(unasked[number], own)
        assert torch.equal(mixed[number], own) == (WHOSE[number] < 0)


def test_adapters_through_triton(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_query_heads": 2, "num_kv_heads": 1}
    folders = save_adapters(tmp_path, tiny_model(**sizes), CONFIGS[:2])
    whose = tuple(min(number, 1) for number in WHOSE)

    def logits() -> Tensor:
        model = tiny_model(**sizes)
        model.fuse(load_adapters(model, folders))
        return torch.cat(batch_logits(model, whose))

    expected = logits()
    with interpreted():
        assert relative_rms(logits(), expected) < 2e-5


def test_the_serving_dtype_is_the_model_s(tmp_path: Path) -> None:
    folders = save_adapters(tmp_path, make_base("nf4"))
    model = make_base("nf4")
    model.fuse(load_adapters(model, folders))
    rough = make_base("nf4").to(torch.bfloat16)
    rough.fuse(load_adapters(rough, folders))
    exact, logits = (torch.cat(batch_logits(each, WHOSE)) for each in (model, rough))
    assert 0.001 < relative_rms(logits, exact) < 0.05


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_only_the_decoder_s_layers_may_differ_by_request(target: str, tmp_path: Path) -> None:
    folders = save_adapters(tmp_path, tiny_model(), (LoraConfig(rank=2, targets=("q_proj", target)),))
    model = tiny_model()
    with pytest.raises(AdapterError, match=rf"0 adapts .*{target}; adapters to choose from"):
        load_adapters(model, folders)
    model.fuse()  # it was left as it was


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folders = save_adapters(tmp_path, tiny_model())
    with pytest.raises(AdapterError, match=r"adapts model\.layers\.0\.mlp\.down_proj with 160 inputs and 64 outputs"):
        load_adapters(tiny_model(hidden_size=32), folders)
    model = tiny_model()
    choices = load_adapters(model, folders)
    attach_lora(model, CONFIGS[0])
    with pytest.raises(LoraError, match="carries an adapter, so requests cannot choose"):
        model.fuse(choices)
    detach_lora(model)
    with pytest.raises(ValueError, match="none were"):
        batch_logits(model.fuse(), WHOSE)
