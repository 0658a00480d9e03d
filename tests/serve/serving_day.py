"""What a day of requests compiles after the warm-up: run as `python -m tests.serve.serving_day`, no GPU needed.

Engines of all kinds as on a GPU, whose launches are noted and not made (tests/compilations.py): every new tensor holds
zeros, so that every token drawn is token 0. Prints a line of JSON: of each engine how many variants of kernels the
warm-up has met, and the kernels of which the day needed others.
"""

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.host_overhead import EmptyGraph
from compress.quantize.round_to_nearest import quantize_model
from kernels.common.cuda_graph import Graphs
from kernels.common.rehearsal import zeroed
from model.config import MixtureOfDepths
from model.files.adapter import load_adapters
from model.formats.registry import format_named
from model.transformer import Transformer
from serve.config import EngineConfig
from serve.engine import engine as engine_module
from serve.engine.drafts.length import MAX_DRAFT_TOKENS, AdaptiveLength, FixedLength
from serve.engine.engine import Engine
from serve.engine.loading import Models
from serve.engine.requests import Sequence
from serve.engine.warm_up import warm_up
from serve.sampling_params import SamplingParams
from tests.compilations import Variants, note_instead_of_launching
from tests.model.test_fused_adapters import save_adapters
from tests.serve.toys import VOCAB_SIZE, toy_tokenizer
from tests.tiny import tiny_model

# Too few pages for all who run at once: some are preempted, and begin again in the midst of a prompt.
OPTIONS = {"max_num_seqs": 48, "max_num_batched_tokens": 512, "num_pages": 96, "max_model_len": 512}
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512}
HEADS = {"num_query_heads": 8, "num_kv_heads": 2, "head_dim": 128}
ROUTES = MixtureOfDepths("block", (1, 2), 0.5, gate_range=0.5)
REQUESTS = 40


class unmultiplied(zeroed):
    """torch's own products are zeros: nothing depends on them, and in bf16 some processors take minutes for them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in recorded_graphs.py."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.linear.default:
            return zeroed.__torch_dispatch__.__wrapped__(self, func, types, args, kwargs)
        x, weight = args[:2]
        return x.new_zeros(*x.shape[:-1], len(weight))


def model(family: str = "llama", *, weights: str = "none", **changes: Any) -> Transformer:
    made = tiny_model(family, seed=1, **SIZES | HEADS | changes).to(torch.bfloat16)
    format = format_named(weights)
    return made if format is None else quantize_model(made, format)


def engine(
    target: Transformer, drafter: Transformer | None = None, folders: tuple[Path, ...] = (), **options: Any
) -> Engine:
    adapters = {folder.name: str(folder) for folder in folders}
    config = EngineConfig(model="toy", adapters=adapters, **OPTIONS | options)
    target = target.fuse(load_adapters(target, list(adapters.values())))
    drafting = drafter.fuse() if drafter is not None else None
    return Engine(config, Models(target, toy_tokenizer(), drafting, dtype=torch.bfloat16))


def engines(adapters: tuple[Path, ...]) -> dict[str, Callable[[], Engine]]:
    return {
        "bf16": lambda: engine(model()),
        "int8 cache": lambda: engine(model(), kv_cache_dtype="int8"),
        "fp8 cache": lambda: engine(model(), kv_cache_dtype="fp8"),
        "nf4": lambda: engine(model(weights="nf4")),
        "int4": lambda: engine(model(weights="int4")),
        "int8": lambda: engine(model(weights="int8")),
        "adapters": lambda: engine(model(), folders=adapters),
        "adapters of nf4": lambda: engine(model(weights="nf4"), folders=adapters),
        "draft model": lambda: engine(model(), model(num_layers=1), num_speculative_tokens=3),
        "draft in 4 bits": lambda: engine(model(), model(weights="int4")),
        "n-grams": lambda: engine(model(), draft="ngram", num_speculative_tokens=5),
        "suffixes": lambda: engine(model(), draft="suffix"),
        "routed layers": lambda: engine(model(num_layers=4, mixture_of_depths=ROUTES)),
        "windows": lambda: engine(model("mistral")),
        "norms of heads": lambda: engine(model("qwen3")),
    }


def random_params(dice: random.Random) -> SamplingParams:
    options: dict[str, Any] = {
        "temperature": dice.choice([0.0, 0.5, 1.0]),
        "top_k": dice.randint(1, 100),
        "top_p": dice.uniform(0.05, 0.95),
        "min_p": dice.uniform(0.01, 0.5),
        "seed": dice.randint(0, 2**40),
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.3,
        "min_tokens": 1,
        "logit_bias": dict.fromkeys(range(dice.randint(1, 300)), 1.0),
        "n": dice.randint(1, 4),
        "logprobs": dice.randint(0, 20),
        "prompt_logprobs": dice.randint(0, 20),
    }
    asked = {name: value for name, value in options.items() if dice.random() < 0.25}
    return SamplingParams(max_tokens=dice.randint(1, 40), ignore_eos=True, **asked)


class AnyLength(FixedLength):
    """Drafts of all lengths that may come to pay: which do follows the hour of this machine, and not of a GPU."""

    def __init__(self, chosen: AdaptiveLength, most: int, dice: random.Random) -> None:
        super().__init__(most, chosen.target_costs, chosen.draft_costs, chosen.draft)
        self._most, self._dice = most, dice

    def begin_step(self, decoding: list[Sequence]) -> None:
        self._length = self._dice.randint(0, self._most)
        super().begin_step(decoding)


def live(engine: Engine, dice: random.Random) -> None:
    """Requests that come one by one and in crowds, with pauses."""
    if engine.draft is not None and engine.config.num_speculative_tokens is None:
        engine.draft_length = AnyLength(engine.draft_length, MAX_DRAFT_TOKENS, dice)
    number = 0
    while number < REQUESTS or engine.has_work():
        for _ in range(dice.choice([0, 0, 0, 0, 1, 1, 2, 5, 30]) if number < REQUESTS else 0):
            length = dice.randint(1, dice.choice([3, 17, 64, 100, 300, 440]))
            prompt = [dice.randrange(VOCAB_SIZE) for _ in range(length)]
            adapter = dice.choice([None, *engine.config.adapters])
            engine.add_request(str(number), prompt, random_params(dice), adapter=adapter)
            number += 1
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)


def warmed_and_late(variants: Variants, kind: str, engine: Engine) -> tuple[int, dict[str, int]]:
    """How many variants the warm-up meets, and how many more the day does, by kernel."""
    engine.max_pending = 1
    with unmultiplied():
        variants.clear()
        warm_up(engine)
        warmed = {name: len(keys) for name, keys in variants.items()}
        live(engine, random.Random(kind))
    late = {name: len(keys) - warmed.get(name, 0) for name, keys in variants.items()}
    return sum(warmed.values()), {name: number for name, number in late.items() if number}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        makers = engines(tuple(save_adapters(Path(scratch), model())))
        variants = note_instead_of_launching()
        engine_module.graphs_on = lambda device: Graphs(EmptyGraph)
        print(json.dumps({kind: warmed_and_late(variants, kind, make()) for kind, make in makers.items()}))


if __name__ == "__main__":
    main()
