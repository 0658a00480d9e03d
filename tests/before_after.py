"""Did a rebuild change anything? Runs the same work in two checkouts and compares what must be equal.

    python -m tests.before_after OLD NEW FOLDER [RECIPE]

OLD and NEW are checkouts, FOLDER takes what is made and is used again. Both run on this interpreter, one after the
other; with a recipe nothing else:

- every recipe of configs/ of OLD, resolved: the same text;
- a chain of all techniques (gqa, mod, distill, qlora, pretrain, evaluate) from a tiny teacher: the same weights,
  losses, qualities and gates to the digit;
- the run of OLD, copied: NEW skips every stage of it;
- 64 mixed requests (greedy, seeded, penalties, biases, stops, choices, log-probabilities) to the models of OLD's run:
  the teacher alone, with a draft, with n-grams, a routed model in NF4 with and without its adapter: the same tokens.

With RECIPE, one that both understand: its runs have the same weights, losses, qualities and gates. Nothing is
timed here.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHAIN = """
name: chain
models:
  teacher: {from: teacher}
data:
  text: {source: python-stdlib/email, sequence_length: 64, held_out: 0.1}
stages:
  - gqa: {model: teacher, kv_heads: 1, calibration_tokens: 1k, data: text, tokens: 4k, batch_tokens: 512,
          micro_batch_tokens: 512, evaluate_every_tokens: 2k, held_out_tokens: 600, compare: [mean], out: narrow,
          long_context: {context_tokens: 32, new_tokens: 4, batch_sizes: [2]}}
  - mod: {model: narrow, least_important: 2, calibration_tokens: 1k, data: text, tokens: 4k, batch_tokens: 512,
          micro_batch_tokens: 512, held_out_tokens: 600, train: adapters, adapter_rank: 4, out: routed,
          speed: {prefill_tokens: 32, context_tokens: 32, new_tokens: 4, batch_sizes: [2]}}
  - distill: {teacher: teacher, student: {from: routed, layers: 2, importance_tokens: 1k}, data: text, tokens: 4k,
          batch_tokens: 512, micro_batch_tokens: 256, held_out_tokens: 600, precision: fp32,
          loss: {kind: skewed_forward_kl, hard_weight: 0.1}, gate: {max_kl: 20}, out: student}
  - qlora: {model: student, data: text, tokens: 4k, batch_tokens: 512, micro_batch_tokens: 512,
          adapter: {rank: 8, dropout: 0.0}, held_out_tokens: 600, out: adapted}
  - pretrain: {tokenizer: teacher, data: text, tokens: 4k, batch_tokens: 512, micro_batch_tokens: 512,
          held_out_tokens: 600, out: fresh,
          architecture: {hidden_size: 32, intermediate_size: 64, layers: 4, query_heads: 4, kv_heads: 2,
                         mixture_of_depths: {every: 2}}}
  - evaluate: {model: student, against: teacher, data: text, held_out_tokens: 600,
          speed: {batch_sizes: [2], prompt_tokens: 16, new_tokens: 8}}
serve: {model: adapted, verify: teacher}
"""
STAGES = ("00-teacher", "01-gqa", "02-mod", "03-distill", "04-qlora", "05-pretrain", "06-evaluate")
NOT_COMPARED = {
    "cost", "versions", "hardware", "finished_at", "speed", "speeds", "decoding", "prefill_s", "memory", "seconds",
    "key", "kind", "output", "parents", "peak_memory_bytes", "answers",
}  # fmt: skip
"""Measured by the clock, of the machine, or the digest of a manifest, which names versions and times."""


def stream_settings() -> list[dict[str, Any]]:
    """64 requests' sampling parameters, all of them repeatable."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
        {"temperature": 0.8, "seed": 1, "top_p": 0.9},
        {"temperature": 1.2, "seed": 2, "top_k": 20, "min_p": 0.02},
        {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 1.0, "seed": 4, "n": 2, "logit_bias": {198: -5.0, 260: 2.0}},
        {"temperature": 0.0, "stop": ["\n\n", "self."], "min_tokens": 4},
        {"temperature": 0.9},
    ]
    return [{**kinds[i % len(kinds)], "max_tokens": 6 + 5 * (i % 7)} for i in range(64)]


def streams(run: Path) -> dict[str, Any]:
    """What each set-up answers, in the checkout that this process imports from."""
    from serve import LLM, SamplingParams

    text = Path(json.__file__).read_text()
    prompts = [text[97 * i : 97 * i + 40 + 23 * (i % 9)] for i in range(64)]
    teacher, student, adapted = (str(run / name / "model") for name in ("00-teacher", "03-distill", "04-qlora"))
    setups: dict[str, dict[str, Any]] = {
        "teacher": {"model": teacher},
        "teacher, drafted by the student": {"model": teacher, "draft": student, "num_speculative_tokens": 4},
        "teacher, drafted by n-grams": {"model": teacher, "draft": "ngram", "num_speculative_tokens": 3},
        "NF4 with its adapter, routed": {"model": adapted},
        "NF4 with adapters by request": {"model": adapted + "/base", "adapters": {"own": adapted}},
    }
    found = {}
    for name, options in setups.items():
        llm = LLM(max_num_seqs=24, max_num_batched_tokens=256, num_pages=600, max_model_len=512, **options)
        adapter = [("own", None)[i % 2] for i in range(64)] if "adapters" in options else None
        params = [SamplingParams(**setting) for setting in stream_settings()]
        answers = llm.generate(prompts, params, adapter=adapter)
        found[name] = [[[c.token_ids, c.text, c.finish_reason, repr(c.logprobs)] for c in a.choices] for a in answers]
    return found


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of all that is compared in a result."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in NOT_COMPARED and not key.endswith(("_s", "per_s", "_seconds")):
                yield from leaves(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}/{index}")
    else:
        yield path, value


def in_checkout(checkout: Path, *words: str, cwd: Path | None = None) -> str:
    """What `python -m …`, or a script, prints with that checkout's code."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", *([] if words[0].endswith(".py") else ["-m"]), *words]
    done = subprocess.run(command, cwd=cwd or checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout}: {' '.join(words)} failed\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def say(name: str, equal: bool, detail: str = "") -> bool:
    print(f"{'equal' if equal else 'DIFFERS':8}{name}{f': {detail}' if detail else ''}", flush=True)
    return equal


def compare_recipes(old: Path, new: Path) -> bool:
    same = True
    for recipe in sorted((old / "configs").glob("*.yaml")):
        before, after = (in_checkout(side, "pipeline", "recipe", "show", str(recipe)) for side in (old, new))
        same &= say(f"recipe {recipe.name}", before == after, f"{len(before.splitlines())} lines")
    return same


def make_chain(checkout: Path, folder: Path) -> Path:
    """The chain's run, made unless it is finished there."""
    run = folder / "runs" / "chain"
    if (run / STAGES[-1] / "result.json").exists():
        return run
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chain.yaml").write_text(CHAIN)
    if not (folder / "teacher").exists():
        in_checkout(checkout, "tests.pipeline.tiny_run", str(folder / "teacher"))
    in_checkout(checkout, "pipeline", "run", "chain.yaml", cwd=folder)
    return run


def make_run(checkout: Path, folder: Path, recipe: Path) -> Path:
    """The run of a recipe; a finished one is skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    in_checkout(checkout, "pipeline", "run", str(recipe), cwd=folder)
    (run,) = (folder / "runs").iterdir()
    return run


def compare_runs(old: Path, new: Path) -> bool:
    same = True
    for result in sorted(old.glob("[0-9]*/result.json")):
        stage = result.parent.name
        before, after = (dict(leaves(json.loads((run / stage / "result.json").read_text()))) for run in (old, new))
        different = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        numbers = sum(isinstance(value, float) for value in before.values())
        same &= say(f"figures of {stage}", not different, ", ".join(different[:5]) or f"{numbers} numbers")
        for weights in sorted(result.parent.glob("model/**/*.safetensors")):
            name = weights.relative_to(old)
            same &= say(f"weights {name}", weights.read_bytes() == (new / name).read_bytes())
    return same


def compare_skipping(made: Path, new: Path, folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made, folder)
    log = folder / "runs" / "chain" / "log.txt"
    log.unlink()
    in_checkout(new, "pipeline", "run", "chain.yaml", cwd=folder)
    skipped = log.read_text().count("is finished, nothing has changed")
    return say("stages of the old run that are skipped", skipped == len(STAGES), f"{skipped} of {len(STAGES)}")


def compare_streams(old: Path, new: Path, run: Path) -> bool:
    before, after = (json.loads(in_checkout(side, __file__, "--streams", str(run))) for side in (old, new))
    same = True
    for name, answers in before.items():
        tokens = sum(len(choice[0]) for answer in answers for choice in answer)
        different = [i for i, (a, b) in enumerate(zip(answers, after[name], strict=True)) if a != b]
        same &= say(f"streams, {name}", not different, f"differ: {different}" if different else f"{tokens} tokens")
    return same


def main() -> int:
    if sys.argv[1] == "--streams":
        print(json.dumps(streams(Path(sys.argv[2]))))
        return 0
    old, new, folder, *recipe = (Path(word).resolve() for word in sys.argv[1:])
    if recipe:
        before, after = (make_run(side, folder / name, *recipe) for name, side in (("old", old), ("new", new)))
        return 0 if compare_runs(before, after) else 1
    same = compare_recipes(old, new)
    before, after = (make_chain(side, folder / name) for name, side in (("old", old), ("new", new)))
    same &= compare_runs(before, after)
    same &= compare_skipping(folder / "old", new, folder / "skip")
    same &= compare_streams(old, new, folder / "old" / "runs" / "chain")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
