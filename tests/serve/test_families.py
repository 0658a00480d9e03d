"""Every family through what is done with models, each step against transformers, peft and bitsandbytes."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from compress.lora import inject, merged_weights
from compress.prune.depth import prune_depth
from compress.quantize.calibrated import quantize_layers
from compress.quantize.methods import Method
from compress.quantize.round_to_nearest import quantize_folder, quantize_model
from model.config import ConfigError, ModelConfig
from model.files.adapter import load_adapter, save_adapter
from model.files.checkpoint import load_config, load_model, save_model, write_checkpoint
from model.formats.base import WeightFormat
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Int4
from model.lora import LoraConfig
from model.quantized import quantized_layers
from model.transformer import Transformer
from tests.compress.conversions import texts
from tests.model.paged_cache import PagedCache
from tests.model.test_families import their_model
from tests.serve.http_server import running_server, save_tiny_tokenizer
from tests.serve.toys import drain, generate, greedy, make_engine, random_prompts
from tests.tiny import full_logits, tiny_config
from tests.train.toy import batch_of
from train.objectives import LanguageModelling

NAMES = ("llama", "mistral", "qwen2-windows", "qwen3", "smollm3-windows")
NAMES += ("granite", "olmo2", "phi3-partial-longrope", "gemma2", "gemma3")
EXPERTS = ("mixtral", "qwen2-moe", "qwen3-moe-some-layers")
"""One entry of each family in tests/model/test_families.py; transformers holds experts in three dimensions."""
# Blocks of 64 weights fill rows, which bitsandbytes' compiled code needs.
SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
PROMPTS = random_prompts(20, seed=2, high=40)
FAMILIES = pytest.mark.parametrize("name", [*NAMES, *EXPERTS])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("theirs")

    @cache
    def save(name: str) -> Path:
        their_model(name, **SIZES).save_pretrained(root / name)
        save_tiny_tokenizer(root / name)
        return root / name

    return save


@pytest.fixture
def folder(name: str, saved: Callable[[str], Path]) -> Path:
    return saved(name)


def opened(folder: Path) -> Any:
    """By transformers; with a complaint of any tensor that is missing or too many."""
    from transformers import AutoModelForCausalLM

    theirs, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return theirs.eval()


def logits_of(theirs: Any, tokens: list[int]) -> Tensor:
    theirs.train()  # bitsandbytes computes in fp32 on a CPU only then; nothing here has dropout
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0].float()


def assert_same(ours: Transformer, theirs: Any) -> None:
    for prompt in PROMPTS[:3]:
        torch.testing.assert_close(full_logits(ours, prompt), logits_of(theirs, prompt), atol=1e-4, rtol=1e-4)


def logits_in_chunks(model: Transformer, prompts: list[list[int]], chunk: int) -> list[Tensor]:
    pages, rows = PagedCache(model, [len(prompt) for prompt in prompts]), [list[Tensor]() for _ in prompts]
    for done in range(0, max(map(len, prompts)), chunk):
        chunks = [(n, done, prompt[done : done + chunk]) for n, prompt in enumerate(prompts) if done < len(prompt)]
        logits = pages.logits(chunks).split([len(new) for *_, new in chunks])
        for (number, *_), part in zip(chunks, logits, strict=True):
            rows[number].append(part)
    return list(map(torch.cat, rows))


@FAMILIES
def test_chunks_over_pages_in_the_serving_form_give_their_logits(folder: Path) -> None:
    ours, theirs, prompts = load_model(folder).fuse(), opened(folder), PROMPTS[:4]
    expected = [logits_of(theirs, prompt) for prompt in prompts]
    for chunk in (1, 7, 64):
        for found, wanted in zip(logits_in_chunks(ours, prompts, chunk), expected, strict=True):
            torch.testing.assert_close(
                found, wanted, atol=1e-4, rtol=1e-4, msg=lambda m, c=chunk: f"of {c} tokens: {m}"
            )


@FAMILIES
def test_the_server_writes_their_greedy_text(folder: Path, tmp_path: Path) -> None:
    request = {"prompt": PROMPTS, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running_server(folder, tmp_path / "log", "--dtype", "float32", "--max-model-len", "64") as server:
        choices = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60).json()["choices"]
    assert [choice["index"] for choice in choices] == [*range(len(PROMPTS))]
    assert [choice["token_ids"] for choice in choices] == greedy_text_of(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [choice["text"] for choice in choices] == tokenizer.decode_batch(greedy_text_of(folder))


@pytest.mark.parametrize("name", ["gemma2"])
@pytest.mark.parametrize("draft", ["early_exit", "a draft of its own"])
def test_drafts_of_capped_logits_change_no_text(draft: str, folder: Path) -> None:
    target = load_model(folder)
    kind = draft if draft == "early_exit" else prune_depth(load_model(folder), (0, 2))
    engine = make_engine(target, kind, max_model_len=64, num_speculative_tokens=3)
    assert generate(engine, PROMPTS, greedy(16)) == greedy_text_of(folder)


@pytest.mark.parametrize("name", ["gemma2"])
def test_log_probabilities_are_those_of_capped_logits(folder: Path) -> None:
    engine = make_engine(load_model(folder), max_model_len=64)
    engine.add_request("it", PROMPTS[0], greedy(1, logprobs=5, prompt_logprobs=5))
    found = drain(engine)["it", 0]
    expected = logits_of(opened(folder), PROMPTS[0]).log_softmax(-1)
    entries = [entry for entry in (*(found.prompt_logprobs or []), *(found.logprobs or [])) if entry is not None]
    assert len(entries) == len(PROMPTS[0])
    for entry, wanted in zip(entries, expected, strict=True):
        said = dict([(entry.token_id, entry.logprob), *entry.top])
        assert len(said) >= 5
        assert said == pytest.approx({token: wanted[token].item() for token in said}, abs=1e-4)


@cache
def greedy_text_of(folder: Path) -> list[list[int]]:
    """By transformers, once for both ways through the engine."""
    theirs, told = opened(folder), []
    for prompt in PROMPTS:
        text = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
        told.append(text[0, len(prompt) :].tolist())
    return told


def by_expert(tensors: dict[str, Any]) -> dict[str, Any]:
    """With those of transformers' experts one by one, as files and our models have them."""
    found = {}
    for name, tensor in tensors.items():
        experts, _, leaf = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf)
        if parts is None:
            found[name] = tensor
            continue
        for number, whole in enumerate(tensor):
            for part, rows in zip(parts, whole.chunk(len(parts)), strict=True):
                found[f"{experts}.{number}.{part}.weight"] = rows
    return found


@FAMILIES
def test_one_step_has_their_gradients(folder: Path) -> None:
    """Of the mean over labels: 1e-5, where either side's own rounding takes it up to 3e-5 from fp64."""
    ours, theirs, text = load_model(folder).requires_grad_(True), opened(folder), PROMPTS[0]
    batch = batch_of([text])
    LanguageModelling()(ours.train(), batch).loss_sum.div(batch.num_labels).backward()
    theirs(torch.tensor([text]), labels=torch.tensor([text])).loss.backward()
    expected = by_expert({name: parameter.grad for name, parameter in theirs.named_parameters()})
    assert expected.keys() >= dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(
            parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n} {m}"
        )


@FAMILIES
def test_fewer_layers_are_theirs_without_the_others(folder: Path, tmp_path: Path) -> None:
    save_model(prune_depth(load_model(folder), (0, 2)), tmp_path / "pruned")
    theirs = opened(folder)
    del theirs.model.layers[1]
    pruned = opened(tmp_path / "pruned")
    assert_same(load_model(tmp_path / "pruned"), pruned)
    for mine, other in zip(pruned.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", NAMES)
def test_nf4_and_an_adapter_on_it_open_in_their_tools(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    quantize_folder(folder, tmp_path / "nf4", NF4())
    ours, theirs = load_model(tmp_path / "nf4"), opened(tmp_path / "nf4")
    assert_same(ours, theirs)
    assert_same(load_model(tmp_path / "nf4").fuse(), theirs)
    config = LoraConfig(rank=4, dropout=0.0)
    inject(ours, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    save_adapter(ours, tmp_path / "adapter", config, base=str(tmp_path / "nf4"))
    with_adapter = PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    assert_same(ours, with_adapter)
    assert_same(ours.fuse(), with_adapter)


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("format", [NF4(), Int4(32)], ids=str)
def test_quantized_experts_with_an_adapter_are_those_of_dense_weights(
    name: str, format: WeightFormat[Any], folder: Path, tmp_path: Path
) -> None:
    """Trained, opened again and served; transformers computes what all of it comes to, since it rounds no experts."""
    quantize_folder(folder, tmp_path / "rounded", format)
    ours = load_model(tmp_path / "rounded")
    assert {kind.rpartition(".")[2] for kind in quantized_layers(ours)} >= {"q_proj", "gate_proj", "down_proj"}
    inject(ours, config := LoraConfig(rank=4, dropout=0.0))
    batch, before = batch_of([PROMPTS[0]]), LanguageModelling()
    optimizer = torch.optim.AdamW([p for p in ours.parameters() if p.requires_grad], lr=0.03)
    for _ in range(3):
        before(ours.train(), batch).loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_adapter(ours.eval(), tmp_path / "adapter", config)
    write_checkpoint(tmp_path / "merged", ours.config, merged_weights(ours), dtype=torch.float32)
    theirs = opened(tmp_path / "merged")
    assert_same(ours, theirs)
    again = load_model(tmp_path / "rounded")
    load_adapter(again, tmp_path / "adapter")
    assert_same(again.fuse(), theirs)


@pytest.mark.parametrize("name", ["qwen2-moe"])
def test_an_expert_that_no_text_reaches_is_rounded_for_itself(folder: Path) -> None:
    model = load_model(folder)
    router: Any = model.get_submodule("model.layers.1.mlp.gate")
    with torch.no_grad():
        router.weight[3].fill_(0)
        for one, other in ((0, 1), (2, 4)):  # of each pair one is above expert 3, whose score is 0
            router.weight[other] = -router.weight[one]
    plain = copy.deepcopy(model)
    unseen = "model.layers.1.mlp.experts.3"
    seen = [*texts(300, 200)]
    tokens = [0]
    hook = model.get_submodule(f"{unseen}.up_proj").register_forward_pre_hook(
        lambda _, arguments: tokens.append(len(arguments[0]))
    )
    quantize_layers(model, seen, lambda _: Int4(32), Method(grid="min_max", rounding="gptq"))
    hook.remove()
    rounded = quantize_model(plain, Int4(32))
    assert sum(tokens) == 0
    for part in ("gate_proj", "down_proj"):
        mine, other = (m.get_submodule(f"{unseen}.{part}").weight.dequantize() for m in (model, rounded))
        assert torch.equal(mine, other), part
    other = "model.layers.1.mlp.shared_expert.down_proj"
    assert not torch.equal(*(m.get_submodule(other).weight.dequantize() for m in (model, rounded)))


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts 0; it must be a whole number from 1 to"),
        ("mixtral", {"num_experts_per_tok": 9}, "sends each token to 9 experts .* of the 4 that there are"),
        ("qwen2_moe", {"moe_intermediate_size": "wide"}, "moe_intermediate_size 'wide'; it must be a whole number"),
        ("qwen3_moe", {"decoder_sparse_step": -1}, "decoder_sparse_step -1; it must be a positive whole number"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers 3; it must be a list of layer numbers"),
    ],
)
def test_experts_that_cannot_be_are_one_sentence(family: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ModelConfig.from_hf(tiny_config(family).to_hf() | changes)


def test_what_a_family_cannot_go_through_is_one_sentence() -> None:
    """Norms behind the blocks leave nothing to fold scales into, and no narrower or routed layer that is known."""
    from compress.gqa import GroupingError, check_convertible
    from pipeline.errors import UserError
    from pipeline.stages.quantize import run as quantize
    from pipeline.stages.quantize.config import Quantize

    with pytest.raises(ConfigError, match="mixtral has experts; only whole layers can leave such a model"):
        tiny_config("mixtral").narrow(mlp=64)
    with pytest.raises(UserError, match="of the family mixtral have routers that read the norms too"):
        quantize.formats(Quantize(model="it", data="text", method="awq"), {"it": tiny_config("mixtral")}, Path())
    for family, why in (("olmo2", "norms what its blocks add"), ("phi3", "joins projections")):
        config = tiny_config(family)
        with pytest.raises(ConfigError, match=f"{family} {why}; only whole layers can leave such a model"):
            config.narrow(mlp=64)
        with pytest.raises(GroupingError, match=f"{family} .*; its KV heads cannot be grouped"):
            check_convertible(config, [1, 1], "mean")
        with pytest.raises(UserError, match=f"quantize: awq divides norms .* of the family {family} do not"):
            quantize.formats(Quantize(model="it", data="text", method="awq"), {"it": config}, Path())
        assert quantize.formats(Quantize(model="it", data="text", method="gptq"), {"it": config}, Path())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope_scaling": {"rope_type": "martian"}}, "the rope type 'martian'; phi3 models have default or longrope"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2; it must leave an even part of the 16 features"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0]}},
            "longrope needs a short_factor of 4 positive numbers",
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4}},
            "longrope needs original_max_position_embeddings",
        ),
    ],
)
def test_a_rotation_that_is_not_known_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    raw = {name: value for name, value in tiny_config("phi3").to_hf().items() if name != "rope_parameters"}
    with pytest.raises(ConfigError, match=sentence):
        ModelConfig.from_hf(raw | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"final_logit_softcapping": 0}, "final_logit_softcapping 0; it must be a positive number"),
        ({"attn_logit_softcapping": "50"}, "attn_logit_softcapping '50'; it must be a positive number"),
        ({"use_bidirectional_attention": True}, "sets use_bidirectional_attention, which is not supported in gemma2"),
        ({"sliding_window": None}, "has no sliding_window, which gemma2 models need"),
    ],
)
def test_a_gemma_2_that_is_not_known_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ModelConfig.from_hf(tiny_config("gemma2").to_hf() | changes)


def test_what_gemma_2_leaves_out_is_what_transformers_takes() -> None:
    """The files of the published models name neither layer types nor, some of them, their caps."""
    from transformers import Gemma2Config

    raw = tiny_config("gemma2", num_layers=4, head_dim=256).to_hf()
    taken = ("layer_types", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "head_dim")
    raw = {name: value for name, value in raw.items() if name not in (*taken, "sliding_window", "tie_word_embeddings")}
    ours, theirs = ModelConfig.from_hf(raw), Gemma2Config(**raw)
    assert ours.attention_soft_cap == theirs.attn_logit_softcapping
    assert ours.logit_soft_cap == theirs.final_logit_softcapping
    assert ours.attention_scale == pytest.approx(theirs.query_pre_attn_scalar**-0.5)
    assert (ours.head_dim, ours.tie_word_embeddings) == (theirs.head_dim, theirs.tie_word_embeddings)
    kinds = {theirs.sliding_window: "sliding_attention", None: "full_attention"}
    assert [kinds[window] for window in ours.windows] == theirs.layer_types


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"final_logit_softcapping": 30.0}, "sets final_logit_softcapping, which is not supported"),
        ({"use_bidirectional_attention": True}, "sets use_bidirectional_attention, which is not supported"),
        ({"sliding_window": None}, "has no sliding_window, which gemma3_text models need"),
        ({"hidden_activation": "relu"}, "asks for hidden_act 'relu'; only 'gelu_pytorch_tanh' is supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": -1}}},
            "the rope's rope_theta -1; it must be a positive",
        ),
    ],
)
def test_a_gemma_that_is_not_known_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ModelConfig.from_hf(tiny_config("gemma3_text").to_hf() | changes)


def test_a_longrope_model_ends_where_its_other_factors_would_begin(tmp_path: Path) -> None:
    their_model("phi3-partial-longrope").save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert (config.max_position_embeddings, config.num_positions) == (256, 64)
    with pytest.raises(ValueError, match="between 2 and the 64 positions of the model, not 65"):
        make_engine(load_model(tmp_path), max_model_len=65)
