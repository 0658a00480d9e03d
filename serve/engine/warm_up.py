"""Allocate, compile and capture what is so at first use, before the first client waits.

On a GPU kernels come in variants: by how many tokens a step has, by what requests ask of sampling, by who drafts. None
follows lengths or numbers of sequences any further, so that a few requests of each kind meet all of them. They are
served twice: as a rehearsal, whose kernels are then compiled side by side, and in earnest.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kernels.common.cuda_graph import Graphs
from kernels.common.rehearsal import Rehearsal
from model.files.adapter import Adapter
from model.lora_config import LoraConfig
from serve.engine.drafts.length import FixedLength
from serve.engine.graph_shapes import captured_sizes, captured_token_counts
from serve.sampling_params import SamplingParams
from serve.tenant import Tenant

if TYPE_CHECKING:
    from serve.engine.engine import Engine

log = logging.getLogger("potstill.engine")
_BLANK = "warm-up"
"""An adapter that changes nothing."""
_LENGTH = 8
"""Tokens of a prompt, and of an answer."""


def warm_up(engine: "Engine") -> None:
    """Serve requests of all kinds, and capture plain passes; ValueError for a model that cannot be served.

    On a CPU one short request does, and with a draft passes of each length that it may have: they are captured, and
    their costs decide which pays.
    """
    if engine.graphs is None:
        _serve(engine, min(_LENGTH, engine.max_model_len // 2), {"temperature": 0.0})
        if engine.draft is not None:
            engine.runner.rehearse(range(1, 2 + engine.state.max_drafts), engine.target_timer)
            engine.draft.rehearse()
            engine.draft_length.target_costs.only_rehearsed()  # one sequence's rows, on a machine that has just begun
            engine.draft_length.forget_acceptance()  # that text was nobody's
        return
    with _drafting(engine, engine.state.max_drafts):
        _compile(engine, engine.graphs)
        log.info("running each kernel once")
        _serve_all_kinds(engine)
    if engine.uniform_steps is None:
        return
    if (passes := engine.runner.captured) is not None:
        _capture("tokens", captured_token_counts(engine.config.max_num_batched_tokens), passes.prepare)
    _capture("sequences", captured_sizes(engine.config.max_num_seqs), engine.uniform_steps.prepare)


def _capture(what: str, sizes: list[int], prepare: Callable[[int], None]) -> None:
    for number, size in enumerate(sizes, 1):
        log.info("capturing CUDA graph %d of %d: %d %s", number, len(sizes), size, what)
        prepare(size)


def _compile(engine: "Engine", graphs: Graphs) -> None:
    rehearsal = Rehearsal()
    with rehearsal.noted(), graphs.off():
        _serve_all_kinds(engine)
    log.info("compiling %d kernels", rehearsal.num_noted)
    rehearsal.compile()
    engine.cache.forget_prefixes()  # nobody has computed them


def _serve_all_kinds(engine: "Engine") -> None:
    most = min(engine.config.max_num_batched_tokens, engine.max_model_len - 1)
    if engine.config.enable_lora:
        engine.adapters.add(_BLANK, Adapter(LoraConfig(rank=1), {}))
    for adapter in (None, *engine.adapters.names[-1:]):
        length = 1
        while length < 2 * most:  # tiles, and the choice between products, follow the number of tokens
            _serve(engine, min(length, most), {"temperature": 0.0}, adapter)
            length *= 2
    engine.adapters.remove(_BLANK)
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "logit_bias": {0: 1.0}, "min_tokens": 1}
    for options in (
        {"temperature": 1.0},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.01},
        penalties,
        {"n": 2, "seed": 1, "top_k": 8, **penalties},
        {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1},
    ):
        _serve(engine, min(_LENGTH, most), options)
    for num_drafts in range(1, engine.state.max_drafts):  # a tile of attention follows how many
        with _drafting(engine, num_drafts):
            _serve(engine, min(_LENGTH, most), {"temperature": 0.0})


def _serve(engine: "Engine", prompt: int, options: dict[str, Any], adapter: str | None = None) -> None:
    n = min(options.get("n", 1), engine.config.max_num_seqs)
    max_tokens = min(_LENGTH, engine.max_model_len - prompt)
    params = SamplingParams(**{**options, "n": n}, max_tokens=max_tokens, ignore_eos=True)
    # Shared prefixes would leave too little of a prompt to compute.
    engine.add_request("warm-up", [0] * prompt, params, adapter=adapter, tenant=Tenant(cache_salt=str(prompt)))
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise ValueError(f"{engine.config.model} cannot be served: {output.error}")


@contextmanager
def _drafting(engine: "Engine", num_drafts: int) -> Iterator[None]:
    """Drafts of this length, whether they pay or not."""
    if engine.draft is None:
        yield
        return
    chosen = engine.draft_length
    costs = chosen.target_costs, chosen.draft_costs
    engine.draft_length = FixedLength(num_drafts, *costs, engine.draft)
    try:
        yield
    finally:
        engine.draft_length = chosen
        for one in costs:  # of passes that compiled, or computed nothing
            one.forget()
