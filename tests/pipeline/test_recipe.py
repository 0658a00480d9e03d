"""Recipes are data: every mistake is one sentence that names the key, and nothing in a recipe can run."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from model.lora_config import LoraConfig
from pipeline.recipe import RecipeError, load_recipe, parse_recipe, read_count, recipe_to_plain, recipe_to_yaml
from pipeline.schema import DataSource
from pipeline.stages.qlora.config import Qlora
from pipeline.stages.shared.config import Adapter, Training
from train.config import Loss, TrainingConfig
from train.data import DataConfig

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
TEXT = """
name: small
models:
  teacher: {from: org/teacher, revision: abc}
data:
  text: {source: python-stdlib, sequence_length: 64}
stages:
  - distill: {teacher: teacher, student: {from: teacher, layers: 2}, data: text, tokens: 100k, out: student}
  - evaluate: {model: student, against: teacher, data: text}
serve: {model: student, verify: teacher}
"""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_and_survive_their_own_spelling(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert parse_recipe(recipe_to_yaml(recipe)) == recipe


def test_a_recipe_becomes_typed_settings() -> None:
    recipe = parse_recipe(TEXT)
    kind, distill = recipe.stages[0]
    assert (kind, distill.tokens, distill.student.origin, distill.student.layers) == ("distill", 100_000, "teacher", 2)
    assert recipe.models["teacher"].origin == "org/teacher"
    assert [stage.name for stage in recipe.plan()] == ["00-teacher", "01-distill", "02-evaluate"]
    assert [stage.out for stage in recipe.plan()] == ["teacher", "student", None]


@pytest.mark.parametrize(
    ("text", "number"),
    [(5, 5), ("5", 5), ("100k", 100_000), ("1.5M", 1_500_000), ("2G", 2 * 10**9), ("3T", 3 * 10**12), ("1_000", 1000)],
)
def test_counts(text: object, number: int) -> None:
    assert read_count(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "-3", "1e3", "2MM", "0x10", True, 1.5, None, [1], "9" * 40])
def test_what_is_no_count(text: object) -> None:
    with pytest.raises(RecipeError, match="whole number"):
        read_count(text)


@pytest.mark.parametrize(("written", "read"), [("1", (1,)), ("[1, 2, 1]", (1, 2, 1))])
def test_a_list_may_be_one_number(written: str, read: tuple[int, ...]) -> None:
    stage = "stages=[{gqa: {model: teacher, data: text, tokens: 100k, kv_heads: %s, out: student}}]"
    recipe = parse_recipe(TEXT, [stage % written])
    assert recipe.stages[0][1].kv_heads == read
    assert parse_recipe(recipe_to_yaml(recipe)) == recipe
    for wrong, sentence in (("two", "must be a whole number"), ("[]", "is empty"), ("0", "must lie between")):
        with pytest.raises(RecipeError, match=rf"gqa.kv_heads.* {sentence}"):
            parse_recipe(TEXT, [stage % wrong])


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("name=other", ("name",), "other"),
        ("stages.0.distill.tokens=10k", ("stages", 0, "distill", "tokens"), 10_000),
        ("distill.tokens=10k", ("stages", 0, "distill", "tokens"), 10_000),
        ("01-distill.learning_rate=2e-3", ("stages", 0, "distill", "learning_rate"), 2e-3),
        ("distill.gate.max_kl=0.5", ("stages", 0, "distill", "gate", "max_kl"), 0.5),
        ("evaluate.speed.batch_sizes=[1, 4]", ("stages", 1, "evaluate", "speed", "batch_sizes"), [1, 4]),
        ("data.text.sequence_length=32", ("data", "text", "sequence_length"), 32),
        ("models.teacher.revision=null", ("models", "teacher", "revision"), None),
        ("serve.verify=", ("serve", "verify"), None),
        ("tracking.wandb=offline", ("tracking", "wandb"), "offline"),
    ],
)
def test_overrides_set_one_value_and_no_other(override: str, place: tuple[str | int, ...], value: object) -> None:
    plain, changed = recipe_to_plain(parse_recipe(TEXT)), recipe_to_plain(parse_recipe(TEXT, [override]))
    node = plain
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    assert changed == plain


def test_two_stages_of_a_kind_need_their_number() -> None:
    text = TEXT + "  \n"
    recipe = yaml.safe_load(text)
    recipe["stages"].append({"evaluate": {"model": "teacher", "data": "text"}})
    text = yaml.safe_dump(recipe)
    with pytest.raises(RecipeError, match=r"stages\.1\.evaluate\.data or stages\.2\.evaluate\.data"):
        parse_recipe(text, ["evaluate.data=text"])
    assert parse_recipe(text, ["03-evaluate.held_out_tokens=99"]).stages[2][1].held_out_tokens == 99


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("distil.tokens=1", "begins with no key of a recipe. Did you mean 'distill'?"),
        ("distill.tokns=1", "stages.0.distill has the unknown key 'tokns'. Did you mean 'tokens'?"),
        ("distill.student.layer=1", "stages.0.distill.student has the unknown key 'layer'. Did you mean 'layers'?"),
        ("data.text.held=0.1", "data.text has the unknown key 'held'. Did you mean 'held_out'?"),
        ("models.teacher.form=x", "models.teacher has the unknown key 'form'. Did you mean 'from'?"),
        ("distill.teacher=teachr", "but the recipe has no such model; it has teacher. Did you mean 'teacher'?"),
        ("distill.data=txt", "but the recipe has no such data; it has text. Did you mean 'text'?"),
        ("distill.student.from=student", "which only a later stage makes"),
        ("serve.model=nothing", "serve.model is 'nothing'"),
        ("distill.out=teacher", "a model of that name exists already"),
        ("distill.loss.kind=forwardkl", "Did you mean 'forward_kl'?"),
        ("distill.tokens=many", "must be a whole number like 2000, 100k or 1.5M"),
        ("distill.tokens=true", "stages.0.distill.tokens is True"),
        ("distill.learning_rate=fast", "stages.0.distill.learning_rate is 'fast'; it must be a number."),
        ("distill.seed=1.5", "stages.0.distill.seed is 1.5; it must be a whole number."),
        ("distill.seed=null", "stages.0.distill.seed is null; it must be a whole number."),
        ("distill.out=[a]", "stages.0.distill.out is ['a']; it must be text."),
        ("distill.loss.alpha=x", "stages.0.distill.loss.alpha is 'x'; it must be a number."),
        ("data.text.chat=maybe", "data.text.chat is 'maybe'; it must be true or false."),
        ("models.teacher.from=null", "models.teacher.from is null; it must be text."),
        ("distill.lr=1", "stages.0.distill has the unknown key 'lr'. Did you mean 'learning_rate'?"),
        ("distill.epochs=3", "stages.0.distill has the unknown key 'epochs'. Did you mean 'tokens'?"),
        (
            "data.text.max_seq_length=9",
            "data.text has the unknown key 'max_seq_length'. Did you mean 'sequence_length'?",
        ),
        ("distill.xyz=3", "stages.0.distill has the unknown key 'xyz'; it can be tokens, batch_tokens, "),
        ("stages=[{xyz: {}}]", "stages.0 has the unknown stage 'xyz'; it can be pretrain, gqa, "),
        ("xyz.tokens=3", "begins with no key of a recipe; it can be name, models, data, "),
        ("distill.learning_rate=.nan", "stages.0.distill.learning_rate is nan"),
        ("distill.seed=yes", "stages.0.distill.seed must not be true"),
        ("distill.student=null", "stages.0.distill.student must be a map, not null; its keys can be"),
        ("distill.student.layers=[2]", "stages.0.distill.student.layers is [2]; it must be a whole number"),
        ("distill.batch_tokens=3000", "a multiple of micro_batch_tokens"),
        ("distill.micro_batch_tokens=32", "at least the sequence_length"),
        ("data.text.held_out=0.9", "data.text.held_out is 0.9; it must lie between"),
        ("evaluate.speed.batch_sizes=4", "must be a list"),
        ("evaluate.speed.batch_sizes=[0]", "it must lie between 1 and"),
        ("evaluate.gate.max_kl_ratio=0.3", "no KL falls by training here"),
        ("stages.9.distill.tokens=1", "'9' is none of its places (0 to 1)"),
        ("name.x=1", "name is no map"),
        ("name=../../etc", "name must be letters"),
        ("models={}", "models must map names to settings"),
        ("models.teacher.sha256=abc", "64 hexadecimal digits"),
        ("stages=[distill]", "stages.0 must be a map with one key"),
        ("stages=[{destill: {}}]", "unknown stage 'destill'. Did you mean 'distill'?"),
        ("tokens", "is not of the form key=value"),
        ("=1", "is not of the form key=value"),
    ],
)
def test_every_mistake_is_one_sentence_that_names_the_key(override: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(TEXT, [override])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_suggested_where_two_words_are_as_near() -> None:
    with pytest.raises(RecipeError, match=r"is 'int3'; it can be .*, int8, .*[^?]$"):
        parse_recipe(TEXT, ["stages=[{quantize: {model: teacher, data: text, weights: {format: int3}, out: q}}]"])


def test_a_gate_needs_a_reference() -> None:
    with pytest.raises(RecipeError, match="`against` is not set"):
        parse_recipe(TEXT, ["evaluate.against=null", "evaluate.gate.max_kl=1"])


HOSTILE = [
    "distill.tokens=!!python/object/apply:os.system [ls]",
    "name=!!python/name:os.system",
    "models.teacher.from=${oc.env:HOME}",
    "models.teacher.from=${oc.decode:x}",
    "models.teacher.from=${name}",
    "data.text.source=prefix-${oc.env:PATH}-suffix",
    "name=${eval:1+1}",
    "distill.tokens=${tokens}",
    "models.teacher._target_=os.system",
    "distill._target_=subprocess.run",
    "distill.student._convert_=all",
    "stages.0.distill.loss.__class__=x",
    "distill.__init__=x",
    "models.__class__.x=1",
    "data.text=!!binary aGVsbG8=",
    "data.text.source=2026-01-01",
    "models.../x.from=y",
    "models={../evil: {from: x}}",
    "models={'a b': {from: x}}",
    "models={1: {from: x}}",
    "distill.out=../student",
    "distill.out=a/b",
    "name=.hidden",
    "name=" + "a" * 65,
    "distill.seed=1e400",
    "distill.learning_rate=.inf",
    "distill.tokens=99999T",
    "distill.gate.max_kl=-1",
    "data.text.held_out=-.inf",
    "distill.seed=" + "9" * 5000,
    "name=" + "[" * 5000,
    "name=" + "{a: " * 200 + "1" + "}" * 200,
    "data={a: &a {source: x}, b: &b [*a, *a], c: &c [*b, *b]}",
    "tracking.wandb=https://example.org",
    "serve={model: student, host: 0.0.0.0}",
    "defaults=[x]",
    "hydra.run.dir=x",
    "stages.0.distill.teacher=[teacher]",
    "stages.-1.distill.tokens=1",
    "data.text.source={a: 1}",
]


@pytest.mark.parametrize("override", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_overrides_are_refused(override: str) -> None:
    with pytest.raises(RecipeError):
        parse_recipe(TEXT, [override])


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    contents = [bomb, "a: &a [*a]", "", "[]", "text", "a: 1\na: 2", "name: x\n\tstages: []", "%TAG ! x", "\ufffe"]
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.yaml"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(RecipeError):
            load_recipe(path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00name")
    (tmp_path / "large.yaml").write_bytes(b"#" * 300_000)
    for name in ("binary.yaml", "large.yaml", "missing.yaml"):
        with pytest.raises(RecipeError):
            load_recipe(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("models:\n  base: {from: m/llama\ndata: {}\n", "line 3, column 5: expected ',' or '}', but got ':'."),
        ("name: x\n\tstages: []", "line 2, column 1: found character '\\t' that cannot start any token."),
        ("name: x\ndata: {}\nname: y", "line 3, column 1: the key 'name' stands in this map already, in line 1."),
        ("name: !!python/name:os.system", "line 1, column 7: could not determine a constructor for the tag "),
        ("name: x\n\ufffe", "line 2: no text holds U+FFFE."),
        ("name: 2001-99-99", "month must be in 1..12."),
        ("[" * 5000, "it is nested too deeply."),
    ],
)
def test_what_is_no_yaml_is_named_by_line(text: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"a.yaml is not plain YAML: {sentence}")) as caught:
        parse_recipe(text, where="a.yaml")
    assert "unicode string" not in str(caught.value)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
KEYS = [
    "name",
    "models",
    "data",
    "stages",
    "serve",
    "tracking",
    "distill",
    "evaluate",
    "teacher",
    "student",
    "from",
    "gate",
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(KEYS), TREES | st.dictionaries(st.sampled_from(KEYS), TREES), max_size=6))
def test_generated_recipes_never_fail_in_another_way(raw: dict[str, object]) -> None:
    base = yaml.safe_load(TEXT)
    for candidate in (raw, base | raw):
        try:
            parse_recipe(yaml.safe_dump(candidate))
        except RecipeError as error:
            assert "\n" not in str(error)


def test_a_stage_is_trained_by_its_own_settings() -> None:
    """Nothing is copied from one class to another, so no name can be lost on the way."""
    recipe = parse_recipe(
        TEXT.replace(
            "- evaluate",
            "- qlora: {model: teacher, data: text, tokens: 1k, adapter: {learning_rate_ratio: 4}}\n  - evaluate",
        )
    )
    (_, distill), (_, qlora), _ = recipe.stages
    assert isinstance(distill, TrainingConfig) and isinstance(distill.loss, Loss)
    assert isinstance(qlora, TrainingConfig) and isinstance(qlora.adapter, LoraConfig)
    assert isinstance(recipe.data["text"], DataConfig)
    assert (distill.learning_rate_ratio, qlora.learning_rate_ratio) == (1.0, 4.0)
    for config in (TrainingConfig, Loss, LoraConfig, DataConfig):
        with pytest.raises(TypeError, match="unexpected keyword argument 'tempreature'"):
            config(tempreature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("config", [Training, Qlora, DataSource, Adapter])
def test_a_setting_of_the_floors_below_is_declared_once(config: type) -> None:
    """A stage may give it another default or tighter bounds; everything else that is said of it stays."""
    for base in config.__mro__[1:-1]:
        inherited = {field.name: field.metadata for field in dataclasses.fields(base)}
        for field in dataclasses.fields(config):
            assert inherited.get(field.name, {}).keys() <= field.metadata.keys(), field.name
