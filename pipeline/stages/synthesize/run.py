"""Stage `synthesize`: prompts, answered by the serving engine, filtered, written as conversations.

prompts (a data set's, or written behind the opening of the chat template) → filter → answers → filter → data/
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from model.text.tokenizer import Tokenizer
from pipeline.errors import StageFailed, UserError
from pipeline.results import Result
from pipeline.stages.shared.context import StageContext
from pipeline.stages.synthesize import filters
from pipeline.stages.synthesize.config import FILE_NAME, Synthesize
from pipeline.stages.synthesize.report import Drop, Sample, SynthesizeDetails
from pipeline.stages.synthesize.writer import CUT, LEAKED, ServedWriter, Writer, Written
from train.rows import Completion, Continuation, Learnt
from train.sources import Document, Message, open_source

log = logging.getLogger(__name__)

SAMPLES = 6
"""Conversations that the report shows, from all over the data."""
SENTINEL = "potstill-opening"
STATES = {CUT: filters.UNFINISHED, LEAKED: filters.ROLE_LEAK}

Conversation = list[Message]


class Selection:
    """What is dropped on the way, by reason and with an example of each, and what is left."""

    def __init__(self, config: Synthesize) -> None:
        self.config = config
        self.drops: dict[tuple[str, str], Drop] = {}

    def drop(self, what: str, reason: str, text: str) -> None:
        known = self.drops.get((what, reason), Drop(what, reason, 0, text))
        self.drops[what, reason] = Drop(what, reason, known.count + 1, known.example)

    def prompts(self, asked: Mapping[int, Conversation], faults: Mapping[int, str | None]) -> dict[int, Conversation]:
        """Those without a fault, of similar ones the first."""
        seen, kept = filters.NearDuplicates(self.config.filter.near_duplicates), {}
        for number, prompt in asked.items():
            spelled = "\n".join(message["content"] for message in prompt if message["role"] == "user")
            fault = faults.get(number) or (None if seen.add(spelled) else filters.DUPLICATE)
            if fault is None:
                kept[number] = prompt
            else:
                self.drop("prompt", fault, spelled)
        return kept

    def answers(self, prompts: Mapping[int, Conversation], written: Mapping[int, Written]) -> dict[int, Written]:
        """Those that are worth training on."""
        seen, kept = filters.NearDuplicates(self.config.filter.near_duplicates), {}
        for number, answer in written.items():
            prompt = str(prompts[number][-1]["content"])
            fault = None if self._is_kept_cut(answer) else STATES.get(answer.state)
            fault = fault or filters.fault_of_answer(answer.text, prompt, self.config.filter.min_words)
            fault = fault or (None if seen.add(answer.text) else filters.DUPLICATE)
            if fault is None:
                kept[number] = answer
            else:
                self.drop("answer", fault, f"{prompt}\n→ {answer.text}")
        return kept

    def _is_kept_cut(self, answer: Written) -> bool:
        return answer.state == CUT and self.config.filter.cut


def run(context: StageContext) -> Result[SynthesizeDetails] | None:
    """All processes write; the main one publishes and returns the result."""
    config: Synthesize = context.stage.config
    tokenizer = Tokenizer.load(context.model(config.model))
    if not tokenizer.templates:
        raise UserError(f"{context.stage.kind}: {config.model} has no chat template, so it can be asked nothing.")
    selection = Selection(config)
    writer = Writer(context, config.model, config.seed) if config.server is None else ServedWriter(context, config)
    own = config.prompts is None
    asked, faults = _written_prompts(config, tokenizer, writer) if own else _given_prompts(context)
    room = config.sequence_length - config.answering.max_tokens
    sound = {number: _prompt_ids(tokenizer, prompt) for number, prompt in asked.items() if not faults[number]}
    faults |= {number: filters.TOO_LONG for number, ids in sound.items() if len(ids) > room}
    prompts = selection.prompts(asked, faults)
    log.info("%d of %d prompts are worth an answer", len(prompts), len(asked))
    requests = prompts if config.server else {number: sound[number] for number in prompts}
    answers = selection.answers(prompts, writer.write("answers", requests, config.answering))
    log.info("%d of %d answers are worth training on", len(answers), len(requests))
    if not answers:
        reasons = ", ".join(f"{drop.count} {drop.what}s: {drop.reason}" for drop in selection.drops.values())
        raise StageFailed(f"{context.stage.name} keeps no conversation of {len(asked)} prompts ({reasons})")
    if not context.processes.is_main:
        return None
    pairs = {number: [*prompts[number], _as_message(answer)] for number, answer in answers.items()}
    output = context.publish_data(lambda folder: _write_conversations(folder / FILE_NAME, pairs.values()))
    details = SynthesizeDetails(
        prompts=len(asked),
        answered=len(requests),
        kept=len(answers),
        answer_tokens=sum(answer.tokens for answer in answers.values()),
        drops=list(selection.drops.values()),
        samples=_samples(pairs),
        written_tokens=writer.tokens,
        seconds=writer.seconds,
    )
    return context.result(output=output, details=details)


Asked = tuple[dict[int, Conversation], dict[int, str | None]]
"""Prompts by number, and what is wrong with them."""


def _written_prompts(config: Synthesize, tokenizer: Tokenizer, writer: Writer) -> Asked:
    """What the model says in the user's place."""
    opening = opening_of(tokenizer)
    ids = tokenizer.encode(opening, allow_special=True)
    written = writer.write("prompts", dict.fromkeys(range(config.count), ids), config.asking)
    prompts = {number: [{"role": "user", "content": one.text.strip()}] for number, one in written.items()}
    least = config.filter.min_words
    faults = {
        number: STATES.get(one.state) or filters.fault_of_prompt(one.text, opening, least)
        for number, one in written.items()
    }
    return prompts, faults


def opening_of(tokenizer: Tokenizer) -> str:
    """What a chat template writes before the first words of a user, its default system prompt included."""
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": SENTINEL}], add_generation_prompt=False)
    if SENTINEL not in rendered:
        raise UserError("The chat template does not show what the user says, so nothing can be written in its place.")
    return rendered[: rendered.index(SENTINEL)]


def _given_prompts(context: StageContext) -> Asked:
    """Those of a data set, as many as are wanted."""
    config: Synthesize = context.stage.config
    source = context.data_set(str(config.prompts))
    prompts: dict[int, Conversation] = {}
    for number, document in zip(range(config.count), open_source(source).documents(), strict=False):
        prompts[number] = _asked_in(document)
    if not prompts:
        raise UserError(f"{context.stage.kind}: the data set {config.prompts} holds no prompt.")
    return prompts, {
        number: None if _says_something(prompt) else filters.TOO_SHORT for number, prompt in prompts.items()
    }


def _asked_in(document: Document) -> Conversation:
    """All that comes before the last answer of a conversation; a text is what a user says."""
    content = cast("Learnt", document.content)  # pairs of answers were refused with the recipe
    content = content.prompt if isinstance(content, Completion | Continuation) else content
    if isinstance(content, str):
        return [{"role": "user", "content": content.strip()}]
    roles = [message["role"] for message in content]
    last = len(roles) - roles[::-1].index("user") if "user" in roles else 0
    return content[:last]


def _says_something(prompt: Conversation) -> bool:
    return bool(prompt) and bool(str(prompt[-1]["content"]).strip())


def _prompt_ids(tokenizer: Tokenizer, prompt: Conversation) -> list[int]:
    return tokenizer.chat_token_ids(prompt, add_generation_prompt=True)


def _as_message(answer: Written) -> Message:
    """What was cut in time ends with its last whole word, and is marked as APIs mark what is to be continued."""
    if answer.state == CUT:
        return {"role": "assistant", "content": answer.text.rsplit(maxsplit=1)[0], "prefix": True}
    return {"role": "assistant", "content": answer.text}


def _write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for messages in conversations:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def _samples(pairs: Mapping[int, Conversation]) -> list[Sample]:
    numbers = list(pairs)
    chosen = [numbers[at * len(numbers) // SAMPLES] for at in range(min(SAMPLES, len(numbers)))]
    return [Sample(*(str(said["content"]) for said in pairs[number][-2:])) for number in dict.fromkeys(chosen)]
