"""The guides in docs/ tell the truth: each command in them runs as a reader would run it, on tiny models and data.

A block of ```yaml whose first line is a comment with a file's name is that file; a block of ```sh is run; ```text is
only shown. What readers bring, `my-model`, `chat.jsonl` and others, is made here, and numbers of tokens are made small.
With `--all-trials` they bring a model of each family, conversations in each form, and run recipes on two processes too;
what they then see on their screens is left as `transcript.txt` in the folder of the test (`--basetemp FOLDER`).
"""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
import yaml
from datasets import Dataset

from model.files.checkpoint import load_config
from model.formats.gguf.architectures import check_fits
from model.text.gguf_tokenizer import GGUFError
from pipeline.recipe import load_recipe
from pipeline.report.front import latency_chart
from pipeline.results import ModelReport
from tests import trials
from tests.forked import free_port
from tests.forked_command import potstill_in
from tests.model.test_families import FAMILIES, their_model
from tests.pipeline.tiny_run import ROOT, WORDS, write_teacher, write_text

DOCS = ROOT / "docs"
BROUGHT = [("tiny llama", "messages.jsonl", 1)]
"""What readers bring to every run of the tests: a family, conversations, and processes to run recipes with."""
ROWS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "messages": lambda asked, said: {
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    },
    "sharegpt": lambda asked, said: {
        "conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]
    },
    "alpaca": lambda asked, said: {"instruction": asked, "output": said},
    "prompts": lambda asked, said: {"prompt": asked, "completion": said},
}
LARGER = {"vocab_size": 320, "intermediate_size": 64, "max_position_embeddings": 512}
"""Than the models of other tests: what the tokenizer and groups of 32 weights need."""
WIDER_HEADS = {"mistral-tied-no-window": {"head_dim": 8}}
"""Than there, where all heads together are narrower than a group."""
KINDS = [
    "sharegpt.json",
    "alpaca.jsonl.gz",
    "prompts.csv",
    "messages.parquet",
    "sharegpt",
    "prompts.jsonl.zst",
    "alpaca.csv.gz",
]
EVERYTHING = [
    (family, KINDS[(number + processes) % len(KINDS)], processes)
    for number, family in enumerate(FAMILIES)
    for processes in (1, 2)
    if family != "phi3-partial-longrope"  # knows 64 positions, less than what a run measures a model on
]
GUIDES = ["your-model", "your-data", "sizing", "many-gpus", "serving", "troubleshooting"]
"""In the order in which they are read; what one makes the later ones use."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
SMALL: dict[str, Any] = {
    "tokens": 512,
    "batch_tokens": 256,
    "micro_batch_tokens": 128,
    "sequence_length": 64,
    "held_out": 0.2,
    "held_out_tokens": 256,
    "calibration_tokens": 256,
    "evaluate_every_tokens": 512,
    "importance_tokens": 128,
    "layers": 2,
    "speed": {"batch_sizes": [1], "prompt_tokens": 8, "new_tokens": 4},
}

MORE = {"tokens": 768}
"""On command lines, where a run is made longer."""


def blocks(guide: str) -> list[tuple[str, str]]:
    """(language, text) of a guide's blocks, in order."""
    return BLOCK.findall((DOCS / f"{guide}.md").read_text(encoding="utf-8"))


def files(guide: str) -> Iterator[tuple[str, str]]:
    """(name, text) of the files that a guide tells to save."""
    for language, text in blocks(guide):
        if language == "yaml" and (name := re.match(r"# (\S+\.yaml)\n", text)):
            yield name[1], text


def commands(guide: str, port: int, processes: int) -> str:
    """A script of all that a guide tells to run, at a free port and with numbers that take no time."""
    text = "".join(text for language, text in blocks(guide) if language == "sh")
    if processes > 1:
        launched = f"torchrun --standalone --nproc_per_node {processes} -m pipeline run"
        text = re.sub(r"^potstill run", launched, text, flags=re.MULTILINE)
    text = re.sub(r"(\w+)=\d[\d.]*[kM]\b", lambda found: f"{found[1]}={MORE.get(found[1], SMALL[found[1]])}", text)
    return text.replace(":8000", f":{port}").replace("--port 8000", f"--port {port}")


def smaller(part: Any) -> Any:
    """The same recipe with numbers that take no time."""
    if isinstance(part, list):
        return [smaller(one) for one in part]
    if not isinstance(part, dict):
        return part
    small = {key: SMALL[key] if key in SMALL else smaller(value) for key, value in part.items()}
    return small | {"evaluate": small["evaluate"] | {"speed": SMALL["speed"]}} if "evaluate" in small else small


def write_what_readers_bring(home: Path, family: str, conversations: str) -> None:
    write_teacher(home / "my-model")
    if family in FAMILIES:
        their_model(family, **LARGER, **WIDER_HEADS.get(family, {})).save_pretrained(home / "my-model")
    write_text(home / "notes", documents=80, words=20)
    write_conversations(home / conversations)
    (home / "configs").symlink_to(ROOT / "configs")


def write_conversations(path: Path) -> None:
    """150 of them in rows and a file of the kinds that its name tells."""
    generator = random.Random(0)
    said = [[" ".join(generator.choice(WORDS) for _ in range(12)) for _ in range(2)] for _ in range(150)]
    kind, *suffixes = path.name.split(".")
    rows = [ROWS[kind](*words) for words in said]
    if not suffixes:
        Dataset.from_list(rows).save_to_disk(path)
    elif suffixes == ["parquet"]:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with pyarrow.output_stream(path, compression="detect") as file:
            if suffixes[0] == "csv":
                pyarrow.csv.write_csv(pyarrow.Table.from_pylist(rows), file)
            else:
                text = json.dumps(rows) if suffixes[0] == "json" else "".join(json.dumps(row) + "\n" for row in rows)
                file.write(text.encode())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "conversations", "processes"), EVERYTHING if trials.in_full else BROUGHT)
def test_every_command_of_the_guides_does_what_they_say(
    family: str, conversations: str, processes: int, tmp_path: Path
) -> None:
    write_what_readers_bring(tmp_path, family, conversations)
    port = free_port()
    (tmp_path / "forks").mkdir()
    with potstill_in(tmp_path / "forks") as potstill, (tmp_path / "transcript.txt").open("w") as transcript:
        environment = variables(tmp_path / "cache", potstill)
        for guide in GUIDES:
            for name, text in files(guide):
                recipe = smaller(yaml.safe_load(text.replace("chat.jsonl", conversations)))
                (tmp_path / name).write_text(yaml.safe_dump(recipe, sort_keys=False))
            script = commands(guide, port, processes)
            if not is_known_to_llama_cpp(tmp_path / "my-model"):
                script = "".join(line for line in script.splitlines(keepends=True) if ".gguf" not in line)
            done = subprocess.run(
                ["bash", "-euxo", "pipefail", "-c", script],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            transcript.write(f"# docs/{guide}.md\n\n{done.stdout}\n")
            assert done.returncode == 0, f"docs/{guide}.md: {done.stdout[-4000:]}"
            assert "Traceback" not in done.stdout and "Warning" not in done.stdout, f"docs/{guide}.md: {done.stdout}"


def variables(cache: Path, potstill: Path) -> dict[str, str]:
    """Of a reader's shell, whose cache has nothing but what the other tests have compiled."""
    compiled = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "potstill" / "compiled"
    (cache / "potstill").mkdir(parents=True)
    (cache / "potstill" / "compiled").symlink_to(compiled)
    return os.environ | {
        "PATH": f"{potstill}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(cache),
    }


def is_known_to_llama_cpp(folder: Path) -> bool:
    try:
        check_fits(load_config(folder))
    except GGUFError:
        return False
    return True


@pytest.mark.parametrize("guide", GUIDES)
def test_recipes_in_guides_are_valid_as_they_stand(guide: str, tmp_path: Path) -> None:
    """With the numbers that they show, which the test above makes small."""
    for name, text in files(guide):
        (tmp_path / name).write_text(text)
        assert load_recipe(tmp_path / name, []).name == Path(name).stem


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_are_short_and_their_links_lead_somewhere(guide: str) -> None:
    lines = (DOCS / f"{guide}.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120 and all(len(line) <= 130 for line in lines if not line.startswith("|"))
    check_links(DOCS / f"{guide}.md")


def test_links_of_the_first_page_lead_somewhere() -> None:
    check_links(ROOT / "README.md")


def check_links(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve() if target else page
        if not target.startswith("http"):
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What GitHub calls its headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_plot_on_the_first_page_shows_the_figures_beside_it() -> None:
    figures = ROOT / "bench" / "results" / "demo-cpu.json"
    rows = msgspec.convert(json.loads(figures.read_text(encoding="utf-8"))["models"], list[ModelReport])
    assert latency_chart(rows).html(alone=True) == figures.with_suffix(".svg").read_text(encoding="utf-8")


def test_all_guides_are_tried() -> None:
    assert sorted(GUIDES) == sorted(path.stem for path in DOCS.glob("*.md"))
