"""A teacher with random weights and a little text: enough to run a whole recipe in seconds.

`python -m tests.pipeline.tiny_run FOLDER` writes the teacher that configs/tiny.yaml names.
"""

import json
import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from model.config import ModelConfig
from model.files.checkpoint import save_model
from model.transformer import Transformer
from pipeline.processes import Processes
from pipeline.recipe import load_recipe
from pipeline.results import Result
from pipeline.run import run_recipe
from pipeline.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = ROOT / "configs" / "tiny.yaml"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["still", "pot", "copper", "steam", "mash", "wort", "grain", "cask", "spirit", "cut", "heart", "tail", "boil"]


def write_text(folder: Path, *, documents: int = 24, words: int = 160, seed: int = 0) -> Path:
    """Text files of made-up sentences; the same seed gives the same text."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    for number in range(documents):
        text = " ".join(generator.choice(WORDS) for _ in range(words))
        (folder / f"{number:02d}.txt").write_text(f"{number}: {text}.\n", encoding="utf-8")
    return folder


def run_stages(
    home: Path,
    *stages: dict[str, object],
    serve: str,
    layers: int = 3,
    teacher: Path | None = None,
    called: str = "teacher",
    folder: str = "run",
    data: Mapping[str, object] = MappingProxyType({}),
) -> list[Result]:
    """Runs these stages in `home / folder`, on a teacher and a text that are written into `home` if they are not there.

    `called` is the teacher's name in the recipe, `serve` that of the model which the recipe serves, `data` other
    settings of the text.
    """
    teacher = teacher or home / "teacher"
    if not teacher.exists():
        write_teacher(teacher, layers=layers)
    if not (home / "text").exists():
        write_text(home / "text")
    overrides = [
        f"models={json.dumps({called: {'from': str(teacher)}})}",
        f"stages={json.dumps(stages)}",
        f"serve={{model: {serve}}}",
        f"data.text.source={home / 'text'}",
        *(f"data.text.{name}={json.dumps(value)}" for name, value in data.items()),
    ]
    recipe = load_recipe(RECIPE, overrides)
    return run_recipe(recipe, RunFolder(home / folder), cache=home / "cache", processes=Processes())


def write_teacher(
    folder: Path, *, seed: int = 0, layers: int = 3, tokens: int = 320, rows: int = 320, **sizes: int
) -> Path:
    """A model folder in Hugging Face's layout: 32 wide, random weights that make clear choices.

    `tokens` of its tokenizer, `rows` of its embedding, other `sizes` by their names in `ModelConfig`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    config = ModelConfig(
        family="llama",
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=64,
        num_layers=layers,
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=8,
        windows=(None,) * layers,
        rope_layers=(True,) * layers,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        initializer_range=0.3,
    )
    model = Transformer(replace(config, **sizes))  # type: ignore[arg-type]
    model.initialize(seed)
    save_model(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class TinyRun:
    """A run folder and what the run needs: teacher, text and cache below `home`."""

    home: Path
    folder: RunFolder

    @classmethod
    def prepare(cls, home: Path) -> "TinyRun":
        write_teacher(home / "teacher")
        write_text(home / "text")
        return cls(home, RunFolder(home / "run"))

    def copy(self, folder: Path, *stages: str) -> "TinyRun":
        """The same run in another folder, at the state this one is in, or with only these stages done."""
        shutil.copytree(self.folder.path, folder)
        for path in folder.glob("[0-9]*") if stages else ():
            if path.name not in stages:
                shutil.rmtree(path)
        return TinyRun(self.home, RunFolder(folder))

    def overrides(self, *more: str, drop: tuple[str, ...] = ("conversation",)) -> list[str]:
        """What makes configs/tiny.yaml run here; without `drop`'s stages."""
        with open(RECIPE, encoding="utf-8") as file:
            stages = [stage for stage in yaml.safe_load(file)["stages"] if not set(stage) & set(drop)]
        return [
            f"stages={json.dumps(stages)}",
            f"models.teacher.from={self.home / 'teacher'}",
            f"data.text.source={self.home / 'text'}",
            *more,
        ]

    def arguments(self, *more: str, drop: tuple[str, ...] = ("conversation",)) -> list[str]:
        """The command line of the run."""
        where = ["--folder", str(self.folder.path), "--cache", str(self.home / "cache")]
        return ["run", str(RECIPE), *self.overrides(*more, drop=drop), *where]

    def run(self, *more: str, drop: tuple[str, ...] = ("conversation",)) -> list[Result]:
        """Runs it in this process."""
        recipe = load_recipe(RECIPE, self.overrides(*more, drop=drop))
        return run_recipe(recipe, self.folder, cache=self.home / "cache", processes=Processes())

    def finished(self) -> dict[str, int]:
        """When each stage finished, in ns, by its name: what changes when a stage runs again."""
        return {path.parent.name: path.stat().st_mtime_ns for path in self.folder.path.glob("*/result.json")}

    def weights(self) -> bytes:
        return (self.folder.path / "01-distill" / "model" / "model.safetensors").read_bytes()


def rerun(before: dict[str, int], after: dict[str, int]) -> set[str]:
    """Stages that ran between two calls of `finished`."""
    return {name for name, when in after.items() if before.get(name) != when}


if __name__ == "__main__":
    write_teacher(Path(sys.argv[1]))
