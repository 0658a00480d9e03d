"""Tasks of lm-evaluation-harness, put to the serving engine. Only its runs import this: it needs the extra `eval`.

The tokens that are scored, where texts are cut, and what stops an answer are those of the harness's own adapter for
transformers, so that figures compare. Control tokens spelled in a prompt are control tokens there and here.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pipeline.errors import StageFailed, UserError
from pipeline.measure.gates import Z_95
from pipeline.report.table import duration
from pipeline.results import Estimate
from pipeline.stages.evaluate.config import Harness
from pipeline.stages.evaluate.report import HarnessScore
from serve.llm import LLM, Generation
from serve.sampling_params import SamplingParams

log = logging.getLogger(__name__)

AT_ONCE, PIECE = 64, 256
"""Requests in one batch of the engine, and answered between two writes to the disk."""
MAX_NEW_TOKENS = 256
"""Of an answer, where a task does not say; the harness's own default."""
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")
REPORT_EVERY_S = 10.0


class EngineLM(TemplateLM):
    """The engine as the harness sees a model. What was answered once is read from the file `kept` afterwards."""

    def __init__(self, folder: Path, kept: Path, **options: Any) -> None:
        super().__init__()
        self.engine = LLM(str(folder), max_num_seqs=AT_ONCE, **options)
        self.tokenizer = self.engine.tokenizer
        self._kept, self._known = kept, dict(_read_lines(kept))

    # --- what the harness asks ---------------------------------------------------------------------------------------

    @property
    def max_length(self) -> int:
        """Most tokens before the last that is scored: the engine writes one more after it."""
        return self.engine.engine.max_model_len - 2

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that is scored from its first token."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.digest

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.tokenizer.templates["default"].source if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise StageFailed("a task begins the model's answer for it, which needs `chat: false`")
        return self.tokenizer.apply_chat_template(chat_history, add_generation_prompt=True)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            begin = self.tokenizer.special_tokens.get("bos_token")
            add_special_tokens = not (begin and string.startswith(begin))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens, allow_special=True)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Of each ((texts), context, continuation): log p of the continuation, and whether greedy decoding gives it."""
        most = self.max_length + 1
        pairs = [[(context + scored)[-most:], len(scored)] for _, context, scored in requests]
        return [(logprob, greedy) for logprob, greedy in self._answer("loglikelihood", pairs, self._score)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows = [list(self._windows(request.args[0])) for request in requests]
        scored = iter(self._loglikelihood_tokens([(None, *window) for own in windows for window in own]))
        return [sum(next(scored)[0] for _ in own) for own in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        asked: Counter[str] = Counter()
        numbered = []
        for text, settings in (request.args for request in requests):
            spelled = json.dumps([text, settings])
            numbered.append([text, settings, asked[spelled]])
            asked[spelled] += 1
        return self._answer("generate", numbered, self._generate)

    # --- how the engine answers --------------------------------------------------------------------------------------

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        yield from map(
            make_disjoint_window,
            get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ),
        )

    def _score(self, pairs: Sequence[Sequence[Any]]) -> list[tuple[float, bool]]:
        once = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        answers = self.engine.generate([tokens for tokens, _ in pairs], once)
        return [_continuation(answer, count) for answer, (_, count) in zip(answers, pairs, strict=True)]

    def _generate(self, requests: Sequence[Sequence[Any]]) -> list[str]:
        """Of each (prompt, settings, how often the same was asked before): sampled answers differ."""
        params = [_sampling(settings, seed) for _, settings, seed in requests]
        if (longest := max(own.max_tokens for own in params)) >= self.max_length:
            raise StageFailed(
                f"a task wants answers of {longest:,} tokens; the engine holds {self.max_length:,}, prompt included"
            )
        prompts = [
            self.tok_encode(text)[-(self.max_length - own.max_tokens) :]
            for (text, *_), own in zip(requests, params, strict=True)
        ]
        return [answer.text for answer in self.engine.generate(prompts, params)]

    def _answer(self, kind: str, requests: list[Any], compute: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Answers of requests that are plain data, computed and kept piece by piece where they are not known yet."""
        keys = [hashlib.sha256(json.dumps([kind, request]).encode()).hexdigest() for request in requests]
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in self._known}
        started = reported = time.monotonic()
        for begin in range(0, len(missing), PIECE):
            piece = list(missing)[begin : begin + PIECE]
            found = dict(zip(piece, compute([missing[key] for key in piece]), strict=True))
            with open(self._kept, "a", encoding="utf-8") as file:
                file.writelines(f"\n{json.dumps(line)}" for line in found.items())  # after what a kill may have cut
            self._known |= found
            done, now = begin + len(piece), time.monotonic()
            if now - reported > REPORT_EVERY_S:
                left = (now - started) / done * (len(missing) - done)
                log.info("%s: %s of %s requests, %s left", kind, f"{done:,}", f"{len(missing):,}", duration(left))
                reported = now
        return [self._known[key] for key in keys]


def _continuation(answer: Generation, count: int) -> tuple[float, bool]:
    scored = (answer.prompt_logprobs or [])[-count:]
    return sum(entry.logprob for entry in scored if entry), all(entry.rank == 1 for entry in scored if entry)


def _sampling(settings: Mapping[str, Any], seed: int) -> SamplingParams:
    """A task's `generation_kwargs`. Raises StageFailed for one that the engine does not have."""
    plain = dict(normalize_gen_kwargs(dict(settings), MAX_NEW_TOKENS))
    until, max_tokens = plain.pop("until", None) or (), plain.pop("max_gen_toks")
    temperature = plain.pop("temperature", 0.0) * bool(plain.pop("do_sample", False))
    if strange := sorted(plain.keys() - set(SAMPLING)):
        raise StageFailed(f"a task sets {strange[0]} for its answers, which the engine does not have")
    sampled = plain if temperature else {}
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, stop=_some(until), seed=seed, **sampled)


def _some(until: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(text for text in ([until] if isinstance(until, str) else until) if text)


def _read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """What was answered; a line that a kill cut short is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            key, answer = json.loads(line)
        except ValueError:
            continue
        yield key, answer


# --- tasks ------------------------------------------------------------------------------------------------------------


def open_tasks(config: Harness) -> TaskManager:
    """Knows the tasks of the harness and of the recipe's folder, with their data at hand.

    Raises UserError for a name that is none, StageFailed where data cannot be had.
    """
    manager = TaskManager(include_path=config.folder, include_defaults=False)
    if not set(config.tasks) <= set(manager.all_tasks):  # reading all that the harness brings takes a while
        manager = TaskManager(include_path=config.folder)
    for name in config.tasks:
        if name not in manager.all_tasks:
            where = f" or {config.folder}" if config.folder else ""
            raise UserError(f"lm_eval.tasks has {name!r}, which is no task of lm-evaluation-harness{where}.")
        try:
            manager.load(name)
        except Exception as error:  # of many libraries: no network, no such data set, a damaged file
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise StageFailed(f"the data of the task {name} cannot be read: {reason}") from error
    return manager


def run_harness(folder: Path, config: Harness, manager: TaskManager, *, label: str, kept: Path) -> list[HarnessScore]:
    """What the model in `folder` reaches in each task; its answers are kept in the file `kept`."""
    model = EngineLM(folder, kept)
    if config.chat and not model.tokenizer.templates:
        raise UserError(f"lm_eval.chat is true, but {label} has no chat template.")
    found = simple_evaluate(
        model=model,
        tasks=list(config.tasks),
        num_fewshot=config.few_shot,
        limit=config.limit,
        bootstrap_iters=1000,
        log_samples=False,
        apply_chat_template=config.chat,
        task_manager=manager,
    )
    return list(_scores(label, found))


def _scores(label: str, found: Mapping[str, Any]) -> Iterator[HarnessScore]:
    for task, row in found["results"].items():
        samples = found["n-samples"].get(task, {}).get("effective", 0)
        for key, value in row.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = row.get(f"{metric}_stderr,{chosen}")
            margin = Z_95 * error if isinstance(error, int | float) else None
            name = metric if chosen == "none" else f"{metric} ({chosen})"
            shots = found["n-shot"].get(task, 0)
            yield HarnessScore(label, task, name, Estimate(float(value), margin), samples, shots)
