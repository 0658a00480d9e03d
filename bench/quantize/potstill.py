"""Our side of `bench.quantize`: see `bench.quantize.llm_compressor`, whose counterpart it is."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench.cost import cost_of
from compress.quantize.calibrated import quantize_layers
from compress.quantize.methods import METHODS
from model.files.checkpoint import load_model, save_model
from model.formats.registry import format_named
from train.packing import Batch


def batch_of(document: list[int]) -> Batch:
    tokens = torch.tensor(document)
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    return Batch(tokens, torch.arange(len(tokens)), ends, labels=tokens, num_labels=len(tokens))


def main() -> None:
    case: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(case["threads"])
    model = load_model(case["model"], dtype=torch.float32)
    batches, format = [batch_of(document) for document in case["documents"]], format_named("int4", group=case["group"])
    choose = {name: format for name, _ in model.named_modules() if name.endswith("_proj")}.get
    cost = cost_of(lambda: quantize_layers(model, batches, choose, METHODS[case["method"]]))
    save_model(model, case["out"])
    print(json.dumps(cost))


if __name__ == "__main__":
    main()
