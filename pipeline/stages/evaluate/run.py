"""Stage `evaluate`: quality, memory and speed of a model, of its reference, and of the two serving together."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from model.mesh import choose_device
from model.text.tokenizer import Tokenizer
from pipeline.files import write_atomically
from pipeline.measure.gates import check_gate, describe
from pipeline.measure.parity import check_parity
from pipeline.measure.quality import HeldOut, describe_model, load_published
from pipeline.measure.shortage import unless_short
from pipeline.measure.speed import TURNS, engines_for_speed, known_positions, measure_speed, prompts_from, within
from pipeline.measure.suite.ask import Marked, ask, prompts
from pipeline.results import ModelReport, Parity, Result
from pipeline.stages.evaluate.config import Evaluate
from pipeline.stages.evaluate.report import ANSWERS_NAME, EvaluateDetails, HarnessScore, Score, scores_of
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.models import asking_mesh
from train.evaluate import TeacherStates

log = logging.getLogger(__name__)


def run(context: StageContext) -> Result[EvaluateDetails] | None:
    """Measures quality and asks the suite in all processes, the rest in the main one. Publishes nothing."""
    config: Evaluate = context.stage.config
    tokenizer = Tokenizer.load(context.model(config.model))
    data = context.data(config.data, tokenizer)
    sequence_length, group = context.data_set(config.data).sequence_length, context.processes.group
    held_out = HeldOut.of(data, sequence_length=sequence_length, max_tokens=config.held_out_tokens, group=group)
    harness = _open_harness(config) if context.processes.is_main else _no_harness
    reports = []
    reference: TeacherStates | None = None
    names = [config.against, config.model] if config.against else [config.model]
    for name in names:
        log.info("measuring the quality of %s", name)
        report, states = _quality(context, name, held_out, reference)
        reference = reference or states
        reports.append(report)
    suite = _suite(context, names) if config.suite else ()
    if not context.processes.is_main:
        return None
    parity, skipped = _parity(context, names, held_out)
    if config.against:
        reports.append(_pair(*reports))
    checks = check_gate(config.gate, next(row.quality for row in reports if row.label == config.model and row.quality))
    for check in checks:
        log.info("%s", describe(check))
    if config.speed.batch_sizes:
        timed, short = unless_short("Speed", partial(_with_speeds, context, reports, held_out))
        reports, skipped = timed or reports, (*skipped, *short)
    details = EvaluateDetails(
        suite=suite,
        harness=tuple(score for name in names for score in harness(context, name)),
    )
    return context.result(models=reports, gate=checks, parity=parity, skipped=skipped, details=details)


def _quality(
    context: StageContext, name: str, held_out: HeldOut, reference: TeacherStates | None
) -> tuple[ModelReport, TeacherStates | None]:
    """The row of one model, and its states if it is the reference of the others."""
    model = load_published(context.model(name), asking_mesh())
    if name != context.stage.config.against:
        return describe_model(name, model, held_out.quality(model, reference)), None
    states = held_out.states(model)
    return describe_model(name, model, held_out.quality_of(states)), states


def _pair(verifier: ModelReport, draft: ModelReport) -> ModelReport:
    """Both models serving together: the cost of two, the distribution of the verifier."""
    return ModelReport(
        label=f"{draft.label} verified by {verifier.label}",
        parameters=verifier.parameters + draft.parameters,
        weight_bytes=verifier.weight_bytes + draft.weight_bytes,
        kv_bytes_per_token=verifier.kv_bytes_per_token + draft.kv_bytes_per_token,
        quality=verifier.quality,
        exact=True,
    )


def _with_speeds(context: StageContext, reports: list[ModelReport], held_out: HeldOut) -> list[ModelReport]:
    """The same rows (the reference, the model, the verified pair) with the speeds of each."""
    config: Evaluate = context.stage.config
    log.info("measuring the speed of %s, in turns", ", ".join(report.label for report in reports))
    model, verifier = context.model(config.model), context.model(config.against) if config.against else None
    settings = within(config.speed, known_positions(folder for folder in (model, verifier) if folder))
    count = TURNS * max(settings.batch_sizes)
    prompts = prompts_from(held_out.batches, count=count, prompt_tokens=settings.prompt_tokens)
    engines = engines_for_speed(str(model), str(verifier) if verifier else None, settings)
    speeds = measure_speed(engines, prompts, settings)
    timed = [replace(report, speed=speed) for report, speed in zip(reports, speeds, strict=True)]
    if verifier is None:
        return timed
    *others, pair = timed
    alone, *_, together = (engine.engine.kv_bytes_per_token for engine in engines)
    if together == alone:  # the draft reads the verifier's cache
        pair = replace(pair, kv_bytes_per_token=others[0].kv_bytes_per_token)
    return [*others, pair]


def _open_harness(config: Evaluate) -> Callable[[StageContext, str], list[HarnessScore]]:
    """What puts the tasks of lm-evaluation-harness to a model; their data are read first, since they may be missing."""
    if not config.lm_eval.tasks:
        return _no_harness
    from pipeline.stages.evaluate.harness import open_tasks, run_harness

    manager = open_tasks(config.lm_eval)

    def scores(context: StageContext, name: str) -> list[HarnessScore]:
        log.info("putting %s to %s", ", ".join(config.lm_eval.tasks), name)
        kept = context.folder / f"harness-{context.inputs[name].digest[:16]}.jsonl"
        return run_harness(context.model(name), config.lm_eval, manager, label=name, kept=kept)

    return scores


def _no_harness(context: StageContext, name: str) -> list[HarnessScore]:
    return []


def _suite(context: StageContext, names: list[str]) -> tuple[Score, ...]:
    """What each model passes, asked by all processes; its answers stay in the stage's folder."""
    processes, marked = context.processes, list[Marked]()
    for name in names:
        log.info("asking %s the suite's prompts", name)
        own = ask(context.model(name), processes.dealt(prompts(context.stage.config.suite)), label=name)
        marked += processes.collected(own, Marked)
    if processes.is_main:
        write_atomically(context.folder / ANSWERS_NAME, msgspec.json.format(msgspec.json.encode(marked), indent=1))
    return scores_of((one.model, one.task, one.passed) for one in marked)


def _parity(context: StageContext, names: list[str], held_out: HeldOut) -> tuple[Parity | None, tuple[str, ...]]:
    """One result for several models, and what was not measured."""
    asked = {name: partial(check_parity, context.model(name), held_out.batches, choose_device()) for name in names}
    both = [unless_short(f"Parity of {name}", measure) for name, measure in asked.items()]
    found = [parity for parity, _ in both if parity is not None]
    return _worst(found) if found else None, tuple(sentence for _, skipped in both for sentence in skipped)


def _worst(found: list[Parity]) -> Parity:
    return replace(
        max(found, key=lambda one: one.difference / one.tolerance),
        tokens=sum(one.tokens for one in found),
        same_top=min(one.same_top for one in found),
    )
