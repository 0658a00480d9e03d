"""llm-compressor's side of `bench.quantize`, run by the interpreter that has it: of ours it imports `bench.cost` alone.

    PYTHON -m bench.quantize.llm_compressor CASE.json

The case names model, documents (lists of tokens), method, group, damping, threads, and the folder of compressed-tensors
`out` that is written; the last line printed is what rounding cost. Settings that it does not name are their defaults.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from bench.cost import cost_of


def recipe(case: dict[str, Any]) -> list[Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": case["group"]}
    rounded = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    if case["method"] == "gptq":
        return [GPTQModifier(dampening_frac=case["damping"], actorder="static", **rounded)]
    return [AWQModifier(), QuantizationModifier(**rounded)]


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(case["threads"])
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    if not torch.cuda.is_available():  # there its AWQ fails to pin what it would copy to a GPU
        IntermediatesCache.pin_memory = lambda *_: None
    batches = [{"input_ids": torch.tensor([tokens])} for tokens in case["documents"]]
    cost = cost_of(lambda: oneshot(model=model, dataset=DataLoader(batches, batch_size=None), recipe=recipe(case)))
    model.save_pretrained(case["out"], save_compressed=True)
    versions = {name: version(name) for name in ("llmcompressor", "compressed-tensors", "transformers", "torch")}
    print(json.dumps(cost | {"versions": versions}))


if __name__ == "__main__":
    main()
