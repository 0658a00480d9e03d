"""The plan of memory against what real steps on the CPU take: every way to train, within a tenth."""

import itertools
import signal
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from compress.lora import inject
from compress.mod import add_routers
from compress.quantize.round_to_nearest import formats_of_layers
from model.config import MixtureOfDepths, ModelConfig
from model.cost import FULL
from model.experts_config import MixtureOfExperts
from model.formats.base import WeightFormat
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Int4, Int8
from model.lora import LoraConfig, LoraError
from model.mesh import MeshError
from model.quantized import QuantizedLayer, quantized_layers
from model.routed import routed_layers
from model.sharded_memory import smallest_shards
from model.training_memory import Rounding, Setup, largest_micro_batch, shapes_of
from model.transformer import Transformer
from pipeline.measure import training_time
from pipeline.measure.parity import PARITY_SEQUENCES, PARITY_TOKENS
from pipeline.measure.training_time import (
    measuring_seconds,
    objective_by_settings,
    random_data,
    random_documents,
    random_models,
    training_seconds,
)
from tests.memory import peak_bytes
from tests.model.test_families import FAMILIES, SIZES
from tests.tiny import tiny_config
from tests.trials import covering
from train.config import Loss, PreferenceLoss, TrainingConfig
from train.loop import Trainer
from train.objectives import Distillation, LanguageModelling, Objective, RoutedTraining, RoutingConfig
from train.optimizer import named_moments
from train.preference import PreferenceTuning
from train.tracking import Tracker

TINY = tiny_config(
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    vocab_size=2048,
    num_query_heads=8,
    max_position_embeddings=512,
)
EXPERTS = tiny_config(
    "qwen2_moe", hidden_size=128, num_layers=3, vocab_size=2048, num_query_heads=8,
    experts=MixtureOfExperts((0, 2), 6, 3, 192, normalizes=True, shared_intermediate_size=128),
)  # fmt: skip
# A frozen base weighs most where tokens and vocabulary are few.
WIDE = tiny_config(hidden_size=256, intermediate_size=768, num_layers=3, num_query_heads=8, head_dim=32)
FEW = 256
WIDE_TEACHER = tiny_config(
    hidden_size=512, intermediate_size=1536, num_layers=4, vocab_size=2048, num_query_heads=8, head_dim=64
)
SMOLLM2 = tiny_config(
    hidden_size=576, intermediate_size=1536, num_layers=2, vocab_size=49_152, num_query_heads=9, num_kv_heads=3,
    head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
TOKENS = 512


def training(tokens: int = TOKENS, *, micro_batches: int = 1, **changes: Any) -> TrainingConfig:
    """Two steps."""
    step = tokens * micro_batches
    return TrainingConfig(tokens=2 * step, batch_tokens=step, micro_batch_tokens=tokens, **changes)


@dataclass(frozen=True)
class HiddenTraining(TrainingConfig):
    """With a loss that compares hidden states too."""

    loss: Loss = field(default_factory=lambda: Loss(hidden_weight=1.0))


@dataclass(frozen=True)
class PreferenceTraining(TrainingConfig):
    """Of pairs of answers, which share a micro-batch."""

    preference_loss: PreferenceLoss = field(default_factory=PreferenceLoss)


def loaded_bytes(model: Transformer | None) -> int:
    if model is None:
        return 0
    quantized = sum(layer.weight_bytes for layer in model.modules() if isinstance(layer, QuantizedLayer))
    held = [*model.parameters(), *model.buffers()]
    return quantized + sum(tensor.nbytes for tensor in held)


def trainer_of(setup: Setup, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    model, teacher = random_models(setup)
    objective = objective_by_settings(setup.training, teacher)
    return trainer_for(setup, model, objective, folder, monkeypatch)


def trainer_for(
    setup: Setup, model: Transformer, objective: Objective, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Trainer:
    """Of two steps, after which nothing is saved."""
    monkeypatch.setattr(Trainer, "_save", lambda self: None)
    paired = isinstance(objective, PreferenceTuning)
    length = setup.training.micro_batch_tokens // (2 if paired else 1)
    return Trainer(
        model,
        objective,
        random_documents(setup.model.vocab_size, length, paired=paired),
        setup.training,
        folder=folder,
        sequence_length=length,
        tracker=Tracker(folder),
    )


ADAPTERS = {
    "plain": LoraConfig(rank=16),
    "dropout": LoraConfig(rank=16, dropout=0.1),
    "dora": LoraConfig(rank=16, dora=True),
    "two layers": LoraConfig(rank=8, targets=("q_proj", "v_proj")),
}
INT4 = Int4(32)


def rounding(trained: str, embeddings: WeightFormat[Any] | None = None) -> Setup:
    """Of a distillation through rounding to four bits."""
    formats = formats_of_layers(WIDE, INT4, dict.fromkeys(["embed_tokens", "lm_head"], embeddings))
    kind: Any = trained
    return Setup(WIDE, training(FEW), teacher=WIDE, rounding=Rounding(kind, formats, rank=8))


SETUPS = {
    "scales through rounding": rounding("scales"),
    "scales through rounding, embeddings too": rounding("scales", Int8()),
    "low rank through rounding": rounding("low_rank"),
    "all through rounding": rounding("all"),
    "all through rounding, recomputed": replace(rounding("all"), training=training(FEW, activation_checkpointing=True)),
    "all through rounding, embeddings too": rounding("all", Int8()),
    "language": Setup(TINY, training()),
    "fp32": Setup(TINY, training(precision="fp32")),
    "experts": Setup(EXPERTS, training(precision="fp32")),
    "experts, recomputed": Setup(EXPERTS, training(precision="fp32", activation_checkpointing=True)),
    "an adapter over experts": Setup(EXPERTS, training(precision="fp32"), adapter=ADAPTERS["plain"]),
    "recomputed": Setup(TINY, training(activation_checkpointing=True)),
    "8 bit": Setup(TINY, training(optimizer="adamw_8bit")),
    "distill": Setup(TINY, training(), teacher=TINY),
    "hidden states too": Setup(TINY, HiddenTraining(**asdict(training())), teacher=TINY),
    "two micro-batches": Setup(TINY, training(micro_batches=2), teacher=TINY),
    "recomputed adapter": Setup(
        TINY, training(activation_checkpointing=True), adapter=ADAPTERS["plain"], quantization="nf4"
    ),
    "bf16 base": Setup(WIDE, training(FEW), adapter=ADAPTERS["plain"]),
    "bf16 base, paged": Setup(WIDE, training(FEW, optimizer="paged_adamw_8bit"), adapter=ADAPTERS["dropout"]),
    "bf16 base, recomputed": Setup(WIDE, training(FEW, activation_checkpointing=True), adapter=ADAPTERS["plain"]),
    "bf16 base, two micro-batches": Setup(WIDE, training(FEW, micro_batches=2), adapter=ADAPTERS["dora"]),
    "fp32 base": Setup(WIDE, training(FEW), adapter=ADAPTERS["plain"], fp32_base=True),
    "fp32 base, two layers": Setup(WIDE, training(FEW), adapter=ADAPTERS["two layers"], fp32_base=True),
    "fp32 base, recomputed": Setup(
        WIDE, training(FEW, activation_checkpointing=True), adapter=ADAPTERS["plain"], fp32_base=True
    ),
    "fp32 base, distilled": Setup(WIDE, training(FEW), teacher=WIDE, adapter=ADAPTERS["dropout"], fp32_base=True),
    "fp32 throughout": Setup(WIDE, training(FEW, precision="fp32"), adapter=ADAPTERS["plain"]),
    "NF4 in fp32": Setup(TINY, training(precision="fp32"), adapter=ADAPTERS["plain"], quantization="nf4"),
    **{name: Setup(TINY, training(), adapter=adapter, quantization="nf4") for name, adapter in ADAPTERS.items()},
    "dpo": Setup(WIDE, PreferenceTraining(**asdict(training(FEW))), adapter=ADAPTERS["plain"]),
    "dpo over NF4": Setup(
        WIDE, PreferenceTraining(**asdict(training(FEW))), adapter=ADAPTERS["plain"], quantization="nf4"
    ),
    **{
        f"from {one.title}": Setup(
            TINY, training(FEW), teacher=WIDE_TEACHER, teacher_formats=formats_of_layers(WIDE_TEACHER, one)
        )
        for one in (NF4(), INT4)
    },
}


def check(setup: Setup, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = replace(setup, on_gpu=False)
    plan, trainer = setup.memory(), trainer_of(setup, folder, monkeypatch)
    models = trainer.model, getattr(trainer.module.objective, "teacher", None)
    loaded = sum(map(loaded_bytes, models))
    assert plan.weights + plan.adapters == loaded
    for layer in (layer for model in models if model for layer in quantized_layers(model).values()):
        _ = layer.prepared_weight  # may take the place of what is loaded, of which the profiler sees no end
    assert plan.peak == pytest.approx(loaded + peak_bytes(trainer.train), rel=0.1)


def settings_of(name: str) -> set[tuple[str, str]]:
    setup = SETUPS[name]
    of_training = {f"training.{key}": value for key, value in vars(setup.training).items()}
    return {(key, repr(value)) for key, value in {**vars(setup), **of_training}.items() if key != "training"}


@pytest.mark.parametrize("name", covering(SETUPS, settings_of))
def test_the_plan_is_within_a_tenth_of_the_measured_peak(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(SETUPS[name], tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("route", "changes"),
    [("attention", {}), ("block", {"adapter": ADAPTERS["plain"]}), ("block", {"routers": 2})],
    ids=["full", "adapters", "routers alone"],
)
def test_so_it_is_with_routers(
    route: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(TINY, training(), teacher=TINY, fp32_base=True, on_gpu=False, **changes)
    dense, teacher = random_models(replace(setup, adapter=None))
    assert teacher is not None
    model = add_routers(dense, MixtureOfDepths(route, (0, 2), capacity=0.5))  # type: ignore[arg-type]
    model.requires_grad_(not changes)
    if setup.adapter is not None:
        inject(model, setup.adapter)
    for layer in routed_layers(model):
        layer.router.requires_grad_(True)
    objective = RoutedTraining(Distillation(teacher), RoutingConfig(0.5))
    trainer = trainer_for(setup, model, objective, tmp_path, monkeypatch)
    loaded, plan = loaded_bytes(model) + loaded_bytes(teacher), setup.memory()
    assert plan.weights + plan.adapters == pytest.approx(loaded, rel=1e-3)
    assert plan.peak == pytest.approx(loaded + peak_bytes(trainer.train), rel=0.1)


@pytest.mark.parametrize("name", ["language", "8 bit", "bf16 base", "bf16 base, paged", "fp32 base", "dora"])
def test_what_lasts_is_planned_to_the_byte(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = replace(SETUPS[name], on_gpu=False)
    plan, trainer = setup.memory(), trainer_of(setup, tmp_path, monkeypatch)
    model = trainer.model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapters = sum(parameter.nbytes for parameter in trained) if setup.adapter else 0
    assert plan.adapters == adapters and plan.weights == loaded_bytes(model) - adapters
    trainer.train()
    moments = sum(tensor.nbytes for tensor in named_moments(model, trainer.optimizer).values())
    assert plan.optimizer == moments
    assert plan.checkpoint == sum(parameter.nbytes for parameter in trained) + moments
    LanguageModelling()(model, trainer.sampler.batch(trainer.sampler.take(1)[0])).loss_sum.backward()
    assert plan.gradients == sum(
        parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None
    )


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_so_it_is_for_a_distillation_of_real_models_widths(
    recomputes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Setup(SMOLLM2, training(FEW, activation_checkpointing=recomputes), teacher=SMOLLM2), tmp_path, monkeypatch)


TIMED = {name: SETUPS[name] for name in ("language", "two micro-batches", "plain", "low rank through rounding", "dpo")}


@pytest.mark.parametrize("name", TIMED)
def test_time_is_that_of_all_steps_of_which_a_few_are_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, ticks, saved = TIMED[name], itertools.count(), []
    monkeypatch.setattr(training_time, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))  # once a step
    monkeypatch.setattr(Trainer, "_save", lambda self: saved.append(self))
    long = replace(setup, training=replace(setup.training, tokens=1000 * setup.training.batch_tokens))
    found = training_seconds(long, random_models(long), random_data(long, 128).train, 128)
    assert found == 1000 and next(ticks) < 10 and not saved


@pytest.mark.parametrize(("name", "documents"), [("language", 1), ("language", 64), ("dpo", 4)])
def test_held_out_text_is_timed_as_far_as_there_is_any(
    name: str, documents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass takes three seconds by this clock, however many tokens it has; parity adds two over its prompts."""
    setup, ticks = SETUPS[name], itertools.count()
    monkeypatch.setattr(training_time, "DOCUMENTS", documents)
    monkeypatch.setattr(training_time, "time", SimpleNamespace(monotonic=lambda: 3.0 * next(ticks)))
    data = random_data(setup, 128).held_out
    asked = SimpleNamespace(held_out_tokens=32 * 128, measured_tokens=7 * 32 * 128, teacher_tokens=0)
    there = documents // 2 if data.paired else documents
    found = measuring_seconds(replace(setup, training=asked), random_models(setup), data, 128)
    compared = min(there, PARITY_SEQUENCES) * PARITY_TOKENS / 128
    assert found == pytest.approx(3 * (7 * min(there, 32) + 2 * compared))


def test_a_signal_ends_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "_save", lambda self: None)
    monkeypatch.setattr(training_time._Stopwatch, "log", lambda *told: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        setup = SETUPS["language"]
        training_seconds(setup, random_models(setup), random_data(setup, 128).train, 128)


def test_the_largest_micro_batch_fits_and_the_next_one_does_not() -> None:
    setup = Setup(TINY, training())
    budget = setup.with_tokens(5000).memory().peak
    tokens = largest_micro_batch(setup, budget)
    assert tokens == 5000 // 256 * 256
    assert setup.with_tokens(tokens).memory().peak <= budget < setup.with_tokens(tokens + 256).memory().peak
    assert largest_micro_batch(setup, 1000) == 0


def llama_8b() -> ModelConfig:
    return tiny_config(
        hidden_size=4096, intermediate_size=14_336, num_layers=32, vocab_size=128_256, num_query_heads=32,
        num_kv_heads=8, head_dim=128,
    )  # fmt: skip


def llama_70b() -> ModelConfig:
    return tiny_config(
        hidden_size=8192, intermediate_size=28_672, num_layers=80, vocab_size=128_256, num_query_heads=64,
        num_kv_heads=8, head_dim=128,
    )  # fmt: skip


def test_a_llama_of_8_billion_weights_in_nf4_fits_where_its_bf16_base_does_not() -> None:
    adapter = LoraConfig(rank=64)
    changes = {"activation_checkpointing": True, "optimizer": "paged_adamw"}
    nf4, bf16 = (
        Setup(llama_8b(), training(2048, **changes), adapter=adapter, quantization=kind).memory()
        for kind in ("nf4", "none")
    )
    matrices = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336)
    assert bf16.weights - nf4.weights == pytest.approx(matrices * (2 - 4.127 / 8), rel=1e-3)
    assert nf4.adapters == nf4.gradients == 4 * 64 * 32 * (6 * 4096 + 2 * 1024 + 3 * (4096 + 14_336))
    # What stays on the GPU: moments too small to page, and those of the two tensors that are worked on.
    assert 0.95 < nf4.host / (2 * nf4.adapters) < 1 and nf4.optimizer < nf4.host / 20
    assert nf4.peak < 16 * 2**30 < bf16.peak


def test_a_llama_of_8_billion_weights_learns_from_one_of_70_on_eight_gpus_of_80_gib() -> None:
    teacher = llama_70b()
    setup = Setup(llama_8b(), training(4096, micro_batches=8, activation_checkpointing=True), teacher=teacher)
    placed = smallest_shards(setup, 8, 80 * 2**30)
    assert placed is not None and placed.shards == 4
    memory, heads = placed.memory(), 2 * 128_256 * 8192
    weights, taught = 8.03e9, 70.55e9
    assert memory.weights == pytest.approx(4 * weights / 4 + 2 * ((taught - heads) / 4 + heads), rel=1e-2)
    assert memory.optimizer == pytest.approx(8 * weights / 4, rel=1e-2)
    assert smallest_shards(setup, 2, 80 * 2**30) is None


def test_layers_that_are_too_large_whole_are_divided() -> None:
    """Of few tokens parts weigh little."""
    setup = Setup(llama_70b(), training(256, micro_batches=64))
    whole = replace(setup, processes=64, shards=64)
    tokens, layers = replace(whole, context=2), replace(whole, tensor=2)
    budget = layers.memory().peak
    assert budget < min(whole.memory().peak, tokens.memory().peak)
    placed = smallest_shards(setup, 64, budget)
    assert placed is not None and (placed.shards, placed.context, placed.tensor) == (64, 1, 2)
    assert smallest_shards(replace(setup, whole_documents=True), 64, budget) is None
    # What they hold is the same share, to the vectors; of their layers half is whole in each.
    assert layers.memory().weights == pytest.approx(whole.memory().weights, rel=1e-3)
    heads, layer = 128_256 * 8192, 8192 * (2 * 8192 + 2 * 1024 + 3 * 28_672)
    assert layers.memory().weights == pytest.approx(4 * (2 * heads + 80 * layer) / 64, rel=1e-2)
    # In bf16 as it came and as it is used, gradients in fp32, and the widest matrix's as it is computed.
    saved = ((2 * 2 + FULL) * layer + 2 * 8192 * 28_672) / 2
    recomputed = training(256, micro_batches=64, activation_checkpointing=True)
    whole, layers = (replace(one, training=recomputed).memory() for one in (whole, layers))
    assert whole.activations - layers.activations == pytest.approx(saved, rel=0.02)


def test_a_base_in_parts_has_scales_of_its_own_and_lies_whole_in_host_memory() -> None:
    setup = Setup(WIDE, training(FEW), adapter=ADAPTERS["plain"], quantization="nf4", processes=4, shards=4)
    whole, parts = setup.memory(), replace(setup, tensor=2).memory()
    blocks = sum(shape.numel() // 64 for name, shape in shapes_of(WIDE).items() if "_proj" in name)
    bytes_of_scales = 4 * blocks  # in fp32, and once more as GPUs read them; doubly quantized ones are bytes first
    assert parts.weights - whole.weights == pytest.approx((2 * bytes_of_scales - 5 * blocks) / 4, rel=0.05)
    ends = sum(2 * shape.numel() for name, shape in shapes_of(WIDE).items() if "_proj" not in name)
    alone = replace(setup, processes=1, shards=1).memory()
    assert alone.host == 0 and whole.host == parts.host
    assert whole.host == pytest.approx(blocks * (32 + 1) + ends + alone.adapters, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tensor": 3}, "tp_size 3 does not divide the 8 attention heads"),
        ({"model": EXPERTS}, "tp_size 2 does not divide the experts of a model that is trained"),
        ({"adapter": ADAPTERS["dora"]}, "tp_size 2 cuts the rows whose norms DoRA divides by"),
        (
            {"teacher": tiny_config(num_query_heads=1, num_kv_heads=1)},
            "tp_size 2 does not divide the 1 attention heads",
        ),
    ],
)
def test_layers_that_cannot_be_divided_are_refused_and_never_proposed(changes: dict[str, Any], sentence: str) -> None:
    setup = replace(Setup(TINY, training(), processes=6, shards=6, tensor=2), **changes)
    with pytest.raises(MeshError, match=sentence):
        setup.memory()
    assert smallest_shards(replace(setup, tensor=1), 6, 0) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_planned_as_a_student_and_as_its_teacher(name: str) -> None:
    family, fields = FAMILIES[name]
    model = ModelConfig.from_hf(AutoConfig.for_model(family, **(SIZES | fields)).to_dict())
    setup = Setup(model, training(), teacher=model, teacher_formats=formats_of_layers(model, Int4(8)))
    for placed in (setup, replace(setup, processes=2, shards=2)):
        assert placed.memory().peak > 0


def test_a_target_that_names_no_layer_is_refused() -> None:
    with pytest.raises(LoraError, match="matches no layer"):
        Setup(TINY, training(), adapter=LoraConfig(targets=("query",))).memory()


def test_a_search_for_what_fits_builds_no_model_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 layers one takes seconds."""
    setup = Setup(
        replace(TINY, num_layers=1, windows=(None,), rope_layers=(True,)), training(), adapter=LoraConfig(rank=4)
    )
    built, build = [], Transformer.__init__
    monkeypatch.setattr(Transformer, "__init__", lambda model, config: (built.append(config), build(model, config))[1])
    assert largest_micro_batch(setup, 1 << 30) and len(built) == 1
