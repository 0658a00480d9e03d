"""Everything that a machine without Triton is to do: `python -m tests.without_triton FOLDER` blocks its import, imports
all modules, runs a stage of each kind that computes, and writes text with what came out.
"""

import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

ROOMS = ("kernels", "model", "compress", "train", "serve", "pipeline")
NOT_EVERYWHERE = "kernels.attention._flash_hopper", "serve.cluster"
"""Modules that only GPUs of one generation load, and only who has Ray."""


class NoTriton:
    """Finds no module of Triton, as where it has no wheel."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def import_everything() -> int:
    found = (module.name for room in ROOMS for module in pkgutil.walk_packages([room], f"{room}."))
    names = [name for name in found if not name.startswith(NOT_EVERYWHERE) and not name.endswith("__main__")]
    for name in names:
        importlib.import_module(name)
    return len(names)


def run_every_kind(home: Path) -> Path:
    """The folder of the model that is served."""
    from tests.pipeline.test_pretrain import SHAPE
    from tests.pipeline.tiny_run import run_stages

    steps = {"batch_tokens": 256, "micro_batch_tokens": 128, "precision": "fp32", "held_out_tokens": 256}
    step = {"data": "text", "tokens": 256, **steps}
    speed = {"context_tokens": 20, "new_tokens": 2, "batch_sizes": [1]}
    evaluated = {"batch_sizes": [1], "prompt_tokens": 8, "new_tokens": 4}
    results = run_stages(
        home,
        {"pretrain": {"tokenizer": "teacher", "architecture": SHAPE, "out": "parent", **step}},
        {"gqa": {"model": "teacher", "kv_heads": 1, "long_context": speed, "out": "narrow", **step}},
        {"mod": {"model": "narrow", "layers": [1], "speed": speed | {"prefill_tokens": 32}, "out": "routed", **step}},
        {"distill": {"teacher": "teacher", "student": {"from": "narrow", "layers": 2}, "out": "student", **step}},
        {"sft": {"model": "student", "out": "tuned", **step}},
        {"qlora": {"model": "tuned", "adapter": {"rank": 4}, "out": "adapted", **step}},
        {"quantize": {"model": "tuned", "method": "round", "data": "text", "out": "small", **steps}},
        {
            "evaluate": {
                "model": "small",
                "against": "teacher",
                "data": "text",
                "held_out_tokens": 256,
                "speed": evaluated,
            }
        },
        serve="small",
    )
    print(*(result.kind for result in results))
    return next((home / "run").glob("*-quantize/model"))


def main(home: Path) -> None:
    sys.meta_path.insert(0, NoTriton())  # type: ignore[arg-type]
    print(import_everything(), "modules")
    model = run_every_kind(home)
    from serve import LLM, SamplingParams

    for eight_bits in ("auto", "int8"):
        (output,) = LLM(str(model), activations=eight_bits, kv_cache_dtype=eight_bits, num_pages=64).generate(
            ["copper"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        )
        print(len(output.choices[0].token_ids), "tokens")
    print("triton" in sys.modules)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
