"""Adapter folders: peft opens ours, and we open peft's; what cannot be read is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.lora import inject
from compress.quantize.round_to_nearest import quantize_model
from model.files.adapter import AdapterError, check_base, load_adapter, read_adapter, save_adapter
from model.files.artifact import open_artifact, publish
from model.files.checkpoint import load_model, save_model
from model.formats.bitsandbytes import NF4
from model.lora import LoraConfig, LoraError, adapted_layers
from model.transformer import Transformer
from tests.tiny import full_logits, tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
CONFIGS = {
    "plain": LoraConfig(rank=4, alpha=6, dropout=0.1),
    "rslora": LoraConfig(rank=4, alpha=2.5, rslora=True),
    "dora": LoraConfig(rank=4, dora=True, targets=("q_proj", "down_proj")),
    "one-layer": LoraConfig(rank=3, targets=("model.layers.1.*",)),
    "embeddings-and-head": LoraConfig(rank=4, targets=("v_proj", "embed_tokens", "lm_head")),
}
ALL = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
BASES = pytest.mark.parametrize("quantized", [False, True], ids=["dense", "nf4"])


def base_of(folder: Path, quantized: bool) -> Transformer:
    model = tiny_model("llama", intermediate_size=128)
    save_model(quantize_model(model, NF4()) if quantized else model, folder / "base")
    return load_model(folder / "base")


def train(parameters: Any) -> None:
    """Moves an adapter from its start, as training does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.device)


def adapted(model: Transformer, config: LoraConfig) -> Transformer:
    inject(model, config)
    train(p for p in model.parameters() if p.requires_grad)
    return model.eval()


def their_base(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "base")


def their_logits(model: Any) -> Tensor:
    """bitsandbytes computes in fp32 on a CPU only in training mode; dropout stays off."""
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].float()


@ALL
@BASES
def test_peft_opens_ours(config: LoraConfig, quantized: bool, tmp_path: Path) -> None:
    from peft import PeftModel

    ours = adapted(base_of(tmp_path, quantized), config)
    save_adapter(ours, tmp_path / "adapter", config, base=str(tmp_path / "base"))
    theirs = PeftModel.from_pretrained(their_base(tmp_path), tmp_path / "adapter")
    used = {name.split(".lora_")[0] for name, _ in theirs.named_parameters() if ".lora_" in name}
    assert {name.removeprefix("base_model.model.") for name in used} == adapted_layers(ours).keys()
    torch.testing.assert_close(their_logits(theirs), full_logits(ours, TOKENS), rtol=1e-4, atol=1e-4)


@ALL
@BASES
def test_we_open_theirs(config: LoraConfig, quantized: bool, tmp_path: Path) -> None:
    from peft import LoraConfig as TheirConfig
    from peft import get_peft_model

    ours = base_of(tmp_path, quantized)
    names = {"model.layers.1.*": r"model\.layers\.1\..*_proj", "*_proj": "all-linear"}
    targets = [names.get(target, target) for target in config.targets]
    theirs = get_peft_model(
        their_base(tmp_path),
        TheirConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            use_rslora=config.rslora,
            use_dora=config.dora,
            target_modules=targets[0] if len(targets) == 1 else targets,
        ),
    )
    train(p for p in theirs.parameters() if p.requires_grad)
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    found = load_adapter(ours, tmp_path / "adapter")
    assert (found.rank, found.alpha, found.rslora, found.dora) == (
        config.rank, config.alpha, config.rslora, config.dora,
    )  # fmt: skip
    torch.testing.assert_close(full_logits(ours.eval(), TOKENS), their_logits(theirs), rtol=1e-4, atol=1e-4)


@ALL
def test_an_adapter_survives_saving(config: LoraConfig, tmp_path: Path) -> None:
    ours = adapted(base_of(tmp_path, True), config)
    save_adapter(ours, tmp_path / "adapter", config)
    again = load_model(tmp_path / "base")
    load_adapter(again, tmp_path / "adapter")
    weights = {name: parameter for name, parameter in ours.named_parameters() if ".lora." in name}
    assert weights and all(torch.equal(again.get_parameter(name), weight) for name, weight in weights.items())
    assert torch.equal(full_logits(again.eval(), TOKENS), full_logits(ours, TOKENS))
    with pytest.raises(LoraError, match="already has an adapter"):
        load_adapter(again, tmp_path / "adapter")


def test_the_targets_are_written_as_shortly_as_possible(tmp_path: Path) -> None:
    for number, (targets, expected) in enumerate([
        (("*_proj",), ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        (("model.layers.1.mlp.up_proj", "q_proj"), ["model.layers.1.mlp.up_proj", "q_proj"]),
    ]):  # fmt: skip
        config = LoraConfig(rank=2, targets=targets)
        save_adapter(adapted(tiny_model(), config), tmp_path / str(number), config)
        written = json.loads((tmp_path / str(number) / "adapter_config.json").read_text())
        assert written["target_modules"] == expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LoraConfig(rank=4)
    save_adapter(adapted(tiny_model(), config), tmp_path / "adapter", config)
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'; only 'LORA'"),
        ({"bias": "all"}, "bias 'all'; trained biases cannot be read"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save, which potstill does not support"),
        ({"rank_pattern": {"q_proj": 8}}, "sets rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "sets alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa', which changes the base too"),
        ({"r": 0}, "rank is 0; it must lie between 1 and 65,536"),
        ({"r": 8}, "says r = 8"),
        ({"r": "four"}, "describes no adapter"),
        ({"use_dora": True}, "lacks the magnitudes"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said(folder: Path, fields: dict[str, Any], sentence: str) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(AdapterError, match=sentence):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": None},
            "only one of the two factors of .*up_proj",
        ),
        (
            {"base_model.model.lm_head.weight": torch.zeros(2)},
            "holds base_model.model.lm_head.weight, which is no part",
        ),
        (
            {
                "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": torch.zeros(64, 4),
            },
            "adapts model.layers.9.mlp.up_proj, a layer that this model does not have",
        ),
        (
            {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)},
            "adapts model.layers.0.mlp.up_proj with 32 inputs and 160 outputs; this model's has 64 and 160",
        ),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 32, 1)}, "says r = 4"),
    ],
)
def test_what_is_wrong_with_weights_is_said(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    tensors = load_file(folder / "adapter_model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "adapter_model.safetensors")
    model = tiny_model()
    with pytest.raises(AdapterError, match=sentence):
        load_adapter(model, folder)
    assert not adapted_layers(model)


def test_a_damaged_or_missing_file_is_named(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors is not a valid safetensors file"):
        read_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors does not exist"):
        read_adapter(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"adapter_config.json does not exist"):
        read_adapter(folder)


def test_nothing_is_saved_that_could_not_be_used(folder: Path, tmp_path: Path) -> None:
    config = LoraConfig(rank=2)
    with pytest.raises(AdapterError, match="no adapter to save"):
        save_adapter(tiny_model(), tmp_path / "empty", config)
    model = adapted(tiny_model(), config)
    with pytest.raises(AdapterError, match="already holds an adapter"):
        save_adapter(model, folder, config)
    model.model.layers[0].mlp.up_proj.lora.b.data[0, 0] = torch.nan
    with pytest.raises(AdapterError, match=r"up_proj.lora_B.weight holds values that are not finite"):
        save_adapter(model, tmp_path / "nan", config)


def test_an_adapter_of_a_quantized_base_warns_on_what_that_was_made_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, own = tmp_path / "source", tmp_path / "published" / "base"
    publish(source, lambda to: save_model(tiny_model(), to), stage="teacher", recipe={})
    model, parents = quantize_model(tiny_model(), NF4()), [open_artifact(source).digest]

    def write(to: Path) -> None:
        save_adapter(adapted(model, LoraConfig(rank=2)), to, LoraConfig(rank=2), base="base")
        shutil.copytree(tmp_path / "quantized", to / "base")

    publish(tmp_path / "quantized", lambda to: save_model(model, to), stage="quantize", recipe={}, parents=parents)
    parents.append(open_artifact(tmp_path / "quantized").digest)
    publish(tmp_path / "published", write, stage="qlora", recipe={}, parents=parents)
    check_base(tmp_path / "published", own)
    assert not caplog.records
    check_base(tmp_path / "published", source)
    assert f"was trained on the quantized {own}; on {source} it computes something else" in caplog.text


def test_an_adapter_of_another_base_is_refused(folder: Path, tmp_path: Path) -> None:
    for name, seed in (("right", 0), ("wrong", 1)):
        model = tiny_model(seed=seed)
        publish(tmp_path / name, lambda to, model=model: save_model(model, to), stage="teacher", recipe={})  # type: ignore[misc]
    digests = {name: open_artifact(tmp_path / name).digest for name in ("right", "wrong")}
    config = LoraConfig(rank=2)
    model = adapted(tiny_model(), config)
    publish(
        tmp_path / "published",
        lambda to: save_adapter(model, to, config),
        stage="qlora",
        recipe={},
        parents=[digests["right"]],
    )
    check_base(tmp_path / "published", tmp_path / "right")
    sentence = f"was trained on {digests['right'][:12]}, not on .*wrong, which is {digests['wrong'][:12]}"
    with pytest.raises(AdapterError, match=sentence):
        check_base(tmp_path / "published", tmp_path / "wrong")
    check_base(folder, tmp_path / "wrong")  # of other tools: no digest to compare
