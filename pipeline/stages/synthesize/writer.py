"""Text written by the serving engine, kept line by line as it is finished: what a kill cuts short is written again.

Each process writes its share of the requests into a file of its own; what is written depends on the request's number
alone, so neither interruptions nor the number of processes change a token.
"""

import hashlib
import json
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pipeline.errors import RunInterrupted
from pipeline.stages.shared.config import Server
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.served import ServedModel
from pipeline.stages.synthesize.config import Sampling, Synthesize
from serve.llm import LLM, Generation
from serve.sampling_params import SamplingParams
from train.progress import Progress
from train.signals import StopSignals

ENDED, CUT, LEAKED = "ended", "cut", "leaked"


@dataclass(frozen=True)
class Written:
    """What the model wrote for one request."""

    number: int
    text: str
    tokens: int
    state: str
    """It ended by itself, was cut at its most tokens, or holds another control token than those that end it."""


class Writer:
    """The engine of a model, which is loaded when there is something to write, and the files of a stage."""

    def __init__(self, context: StageContext, model: str, seed: int) -> None:
        self.context, self.model, self.seed = context, model, seed
        self.tokens, self.seconds = 0, 0.0
        """Written in this attempt by all processes, and the time that it took."""

    @cached_property
    def _llm(self) -> LLM:
        return LLM(str(self.context.model(self.model)), verify_artifact=False)

    def write(self, name: str, requests: Mapping[int, Any], sampling: Sampling) -> dict[int, Written]:
        """Continuations of token ids (of conversations, by a server), by number; every process returns all of them.

        Raises RunInterrupted after a signal.
        """
        folder, processes = self.context.folder, self.context.processes
        before, began = read_all(folder, name), time.monotonic()
        processes.wait()  # nobody writes before all have read
        missing = {number: ids for number, ids in requests.items() if number not in before}
        mine = sorted(missing)[processes.index :: processes.count]
        if mine:
            path = folder / f"{name}.{processes.index}.jsonl"
            known = len(requests) - len(missing)
            self._write(path, {number: missing[number] for number in mine}, sampling, known=known)
        processes.wait()
        written = read_all(folder, name)
        self.tokens += sum(one.tokens for number, one in written.items() if number not in before)
        self.seconds += time.monotonic() - began
        return {number: written[number] for number in sorted(requests)}

    def _write(self, path: Path, requests: Mapping[int, Any], sampling: Sampling, *, known: int) -> None:
        seeds = {number: self._seed(path.name, number) for number in requests}
        title, share = f"writing {path.name.split('.')[0]}", self.context.processes.count
        # Many are written at once, so what is done is counted in tokens; an answer that ends early has none left to do.
        most, is_main = sampling.max_tokens, self.context.processes.is_main
        bar = Progress(title, most * (known + share * len(requests)), done=most * known, enabled=is_main)
        tokens, began = 0, time.monotonic()

        def heard(new: int) -> None:
            nonlocal tokens
            tokens += new
            bar.advance(share * new, f"{tokens / (time.monotonic() - began):.0f} tokens/s")

        finished = closing(self._finished(requests, sampling, seeds, heard))
        with StopSignals() as signals, bar, finished as results, open(path, "a", encoding="utf-8") as file:
            for written in results:
                file.write(json.dumps(asdict(written)) + "\n")
                file.flush()
                bar.skip(share * (most - written.tokens))
                if signals.requested:
                    raise RunInterrupted(f"{self.context.stage.name} is saved; the same command goes on from here")

    def _seed(self, file: str, number: int) -> int:
        name = file.split(".")[0]
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{name}:{number}".encode()).digest()[:7], "big")

    def _finished(
        self, requests: Mapping[int, Any], sampling: Sampling, seeds: Mapping[int, int], heard: Callable[[int], None]
    ) -> Generator[Written, None, None]:
        """All continuations, as they come; `heard` is told how many tokens have been written since the last time."""
        numbers, prompts = list(requests), list(requests.values())
        params = [SamplingParams(**asdict(sampling), seed=seeds[number]) for number in numbers]
        news = self._llm.as_completed(prompts, params, heard=lambda output: heard(len(output.new_token_ids)))
        with closing(news) as generations:
            for at, generation in generations:
                yield self._written(numbers[at], generation)

    def _written(self, number: int, generation: Generation) -> Written:
        (choice,) = generation.choices
        if choice.error is not None:
            raise RuntimeError(choice.error)
        control = self._llm.tokenizer.control_tokens
        ended = choice.finish_reason == "stop"
        inside = choice.token_ids[:-1] if ended else choice.token_ids
        state = LEAKED if any(token in control for token in inside) else ENDED if ended else CUT
        return Written(number, choice.text, len(choice.token_ids), state)


class ServedWriter(Writer):
    """Lets a server answer conversations. Control tokens, which it leaves out of the text, are not seen."""

    def __init__(self, context: StageContext, config: Synthesize) -> None:
        super().__init__(context, config.model, config.seed)
        self._model = ServedModel(cast("Server", config.server))

    def _finished(
        self, requests: Mapping[int, Any], sampling: Sampling, seeds: Mapping[int, int], heard: Callable[[int], None]
    ) -> Generator[Written, None, None]:
        settings = asdict(sampling)
        asked = {number: {"messages": requests[number], "seed": seeds[number], **settings} for number in requests}
        for number, text, tokens, ended in self._model.answers(asked):
            heard(tokens)
            yield Written(number, text, tokens, ENDED if ended else CUT)


def read_all(folder: Path, name: str) -> dict[int, Written]:
    """What all processes have written under a name. A line that a kill cut short is removed from its file."""
    found: dict[int, Written] = {}
    for path in sorted(folder.glob(f"{name}.*.jsonl")):
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if whole != raw:
            with open(path, "r+b") as file:
                file.truncate(len(whole))
        lines = (Written(**json.loads(line)) for line in whole.splitlines())
        found |= {written.number: written for written in lines}
    return found
