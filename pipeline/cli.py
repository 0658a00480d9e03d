"""The `potstill` command. Everything heavy is imported by the command that needs it; `--help` imports no torch.

Exit codes: 0 done; 1 a gate refused a result, a stage failed, or processes did not come together; 2 a mistake in what
was given; 130 interrupted, and the same command goes on.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.files.sources import KNOWN
from model.mesh import this_rank
from model.startup import import_torch
from pipeline.environment import ROOMS
from pipeline.errors import UserError, exit_of, say
from pipeline.signals import ended_by_signals
from serve.http.options import add_serve_arguments, options_from_arguments

if TYPE_CHECKING:
    from pipeline.results import Result

OVERRIDE = "key=value"
LOGGERS = (*ROOMS, "potstill")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. A user's mistake is one sentence, never a traceback."""
    try:
        options = parse_arguments(arguments)
        if options.command not in (_run, _tune):
            _check_alone()
        return options.command(options)
    except (Exception, KeyboardInterrupt) as error:
        end = exit_of(error, shows_traceback=options.traceback)
        if end is None:
            raise
        logging.getLogger("potstill").debug("the command failed", exc_info=True)
        if end.sentence:
            say(end.sentence)
        return end.exit_code


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="potstill", description="One recipe turns a large language model into an efficient one and serves it."
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_tune(commands)
    _add_serve(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_small(commands)
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line. Overrides and a prompt may stand behind options too, where argparse leaves them over."""
    parser = make_parser()
    options, late = parser.parse_known_args(arguments)
    place = getattr(options, "late", "")
    fits = place == "overrides" or (place == "prompt" and len(late) == 1 and options.prompt is None)
    if late and (not fits or any(word.startswith("-") for word in late)):
        parser.error(f"unrecognized arguments: {' '.join(late)}")
    if late:
        setattr(options, place, [*options.overrides, *late] if place == "overrides" else late[0])
    return options


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser("run", help="run a recipe, or go on with it")
    run.add_argument("recipe", type=Path, help="recipe file, or the folder of a run")
    run.add_argument(
        "overrides", nargs="*", default=[], metavar=OVERRIDE, help="such as distill.tokens=1M or name=other"
    )
    run.add_argument("--folder", type=Path, help="the run's folder (default: runs/NAME)")
    run.add_argument("--cache", type=Path, help="downloads and tokenized text (default: ~/.cache/potstill)")
    run.set_defaults(command=_run, late="overrides")


def _add_tune(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    tune = commands.add_parser("tune", help="search the recipe that meets targets of memory, speed and quality")
    tune.add_argument("recipe", type=Path, help="recipe whose stages say what may be tried; the last one evaluates")
    tune.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE)
    tune.add_argument("--memory", metavar="64MB", help="most that the weights may take")
    tune.add_argument("--tpot", metavar="12ms", help="longest time a token of one request")
    tune.add_argument("--max-kl", metavar="0.1", help="largest KL to the teacher, nats a token")
    tune.add_argument("--budget", metavar="45m", default="45m", help="time in all, of earlier calls too (default: 45m)")
    tune.add_argument("--folder", type=Path, help="the search's folder (default: runs/NAME-tune)")
    tune.add_argument("--cache", type=Path, help="downloads and tokenized text (default: ~/.cache/potstill)")
    tune.set_defaults(command=_tune, late="overrides")


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, alone or verified",
        description="MODEL may also be the folder of a run: its recipe says what to serve, and --verify takes the name "
        "of one of its models. The weights of a .gguf file are served as they are stored.",
    )
    add_serve_arguments(serve)
    serve.set_defaults(command=_serve)


def _add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    generate = commands.add_parser("generate", help="print one answer")
    generate.add_argument("model", metavar="MODEL", help=f"folder of a run, or {KNOWN}")
    generate.add_argument("prompt", nargs="?", help="what to say (default: read from standard input)")
    generate.add_argument("--verify", metavar="TARGET", help="serve TARGET's distribution, with MODEL as its draft")
    generate.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    generate.add_argument("--max-tokens", type=int, default=128, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    generate.add_argument("--device", default="auto", help="auto, cpu or cuda")
    generate.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="processes that share it")
    generate.add_argument("--pipeline-parallel-size", type=int, default=1, metavar="N", help="groups of such processes")
    generate.set_defaults(command=_generate, late="prompt")


def _add_chat(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    chat = commands.add_parser("chat", help="talk with a model on the terminal")
    chat.add_argument("model", metavar="MODEL", nargs="?", help=f"folder of a run, or {KNOWN}")
    chat.add_argument("--url", help="ask this server instead of loading a MODEL, such as http://127.0.0.1:8000")
    chat.add_argument("--name", help="of the model or adapter at the server (default: its first)")
    chat.add_argument("--api-key", metavar="KEY", help="for the server; also POTSTILL_API_KEY, OPENAI_API_KEY")
    chat.add_argument("--verify", metavar="TARGET", help="talk with TARGET, with MODEL as its draft")
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before everything else")
    chat.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="of one answer (default: 1024)")
    chat.add_argument("--temperature", type=float, default=0.7, help="default: 0.7")
    chat.add_argument("--top-p", type=float, default=0.95, help="default: 0.95")
    chat.add_argument("--seed", type=int)
    chat.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    chat.add_argument("--device", default="auto", help="auto, cpu or cuda")
    chat.set_defaults(command=_chat)


def _add_small(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    report = commands.add_parser("report", help="write a run's report.html again")
    report.add_argument("run", type=Path, help="folder of the run")
    report.set_defaults(command=_report)
    compare = commands.add_parser("compare", help="show runs side by side: quality against memory, latency and cost")
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    compare.add_argument("--out", type=Path, default=Path("compare.html"), help="page (default: compare.html)")
    compare.set_defaults(command=_compare)
    doctor = commands.add_parser("doctor", help="say what this environment is and what is wrong with it")
    doctor.set_defaults(command=_doctor)
    plan = commands.add_parser("plan", help="say what training and serving will hold in memory, before any GPU is used")
    plan.add_argument("recipe", type=Path, help="recipe file")
    plan.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE)
    plan.add_argument("--gpu-memory", metavar="80GiB", help="memory to fit (default: this GPU's, or common sizes)")
    plan.add_argument("--gpu", metavar="h100", help="estimate latency on this one, whose memory is then the default")
    plan.add_argument("--gpus", type=int, metavar="8", help="say how so many of them are divided to train and to serve")
    plan.add_argument(
        "--time", action="store_true", help="take a few steps of each stage here, and say how long all take"
    )
    plan.add_argument("--cache", type=Path, help="downloads (default: ~/.cache/potstill)")
    plan.set_defaults(command=_plan, late="overrides")
    data = commands.add_parser(
        "data", help="show a recipe's data: counts, lengths, what is cut, which tokens are learnt"
    )
    data.add_argument("recipe", type=Path, help="recipe file")
    data.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE)
    data.add_argument("--cache", type=Path, help="downloads and tokenized text (default: ~/.cache/potstill)")
    data.set_defaults(command=_data, late="overrides")
    export = commands.add_parser("export", help="write a finished model as another program wants it")
    export.add_argument("model", metavar="MODEL", help=f"folder of a run, or {KNOWN}")
    layouts = (
        "gguf (in bf16), gguf:q4_0 and others; of quantized models gguf:blocks, which keeps their levels, "
        "compressed-tensors and others"
    )
    export.add_argument("--to", required=True, metavar="LAYOUT[:TYPE]", help=layouts)
    export.add_argument("--out", type=Path, metavar="PATH", help="what to write (default: NAME-TYPE in this folder)")
    export.set_defaults(command=_export)
    recipe = commands.add_parser("recipe", help="show or check a recipe")
    actions = recipe.add_subparsers(required=True, metavar="ACTION")
    for name, text in (("show", "print it with every default and override"), ("validate", "only check it")):
        action = actions.add_parser(name, help=text)
        action.add_argument("recipe", type=Path)
        action.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE)
        action.set_defaults(command=_recipe, late="overrides", show=name == "show")


# --- commands ---------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from model.files.safe_io import default_cache
    from pipeline.processes import Processes, check_mesh
    from pipeline.recipe import load_recipe, recipe_to_yaml
    from pipeline.run_folder import RECIPE_NAME, RunFolder, is_run

    with closing(Processes()) as processes, processes.together(shows_traceback=options.traceback), ended_by_signals():
        resumes = is_run(options.recipe)
        path = options.recipe / RECIPE_NAME if resumes else options.recipe
        recipe = load_recipe(path, options.overrides)
        check_mesh(recipe)
        processes.check_same(recipe_to_yaml(recipe))
        folder = RunFolder(options.folder or (options.recipe if resumes else Path("runs") / recipe.name))
        cache = options.cache or default_cache()
        log_to(folder.log if processes.is_main else None, show=processes.is_main)
        import_torch()
        from pipeline.preflight import preflight
        from pipeline.run import run_recipe

        if processes.is_main:
            preflight(recipe, folder, cache)
        results = run_recipe(recipe, folder, cache=cache, processes=processes)
    if processes.is_main:
        _print_results(results, folder.report)
    return 0


def _tune(options: argparse.Namespace) -> int:
    from model.files.safe_io import default_cache
    from pipeline.processes import Processes
    from pipeline.recipe import load_recipe, recipe_to_yaml
    from pipeline.run_folder import RunFolder
    from pipeline.tune.targets import Targets, seconds_of

    with closing(Processes()) as processes, processes.together(shows_traceback=options.traceback), ended_by_signals():
        targets = Targets.parse(memory=options.memory, tpot=options.tpot, max_kl=options.max_kl)
        budget_s = seconds_of("--budget", options.budget)
        recipe = load_recipe(options.recipe, options.overrides)
        processes.check_same(recipe_to_yaml(recipe))
        folder = RunFolder(options.folder or Path("runs") / f"{recipe.name}-tune")
        log_to(folder.log if processes.is_main else None, show=processes.is_main)
        import_torch()
        from pipeline.tune.search import Search

        search = Search(recipe, folder, targets, cache=options.cache or default_cache(), processes=processes)
        search.execute(budget_s)
    if processes.is_main:
        sentence, winner = search.write()
        print(f"{sentence}\nrecipe: {winner}\npage: {search.page}")
    return 0


def _serve(options: argparse.Namespace) -> int:
    from pipeline.run_folder import resolve_served

    served = resolve_served(options.model, getattr(options, "verify", None))
    options.model = served.model
    if served.verify is not None:
        options.verify = served.verify
    if served.name is not None and not hasattr(options, "served_model_name"):
        options.served_model_name = [served.name]
    if not hasattr(options, "kv_cache_dtype"):
        options.kv_cache_dtype = served.kv_cache_dtype
    server_options = options_from_arguments(options)
    if server_options.replicas is not None:
        from serve.cluster import run_cluster

        return run_cluster(server_options)
    from serve.http.server import run_server

    return run_server(server_options)


def _generate(options: argparse.Namespace) -> int:
    from pipeline.run_folder import resolve_served

    served = resolve_served(options.model, options.verify)
    prompt = options.prompt if options.prompt is not None else sys.stdin.read()
    if not prompt.strip():
        raise UserError("There is no prompt: give one after MODEL or on standard input.")
    import_torch()
    from pipeline.generate import generate

    return generate(served, prompt, options)


def _chat(options: argparse.Namespace) -> int:
    from pipeline.chat.command import chat

    return chat(options)


def _report(options: argparse.Namespace) -> int:
    from pipeline.report.page import write_report
    from pipeline.run_folder import RunFolder

    print(write_report(RunFolder(options.run)))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from pipeline.files import write_atomically
    from pipeline.report.page import compare_runs
    from pipeline.report.terminal import print_sections
    from pipeline.run_folder import RunFolder

    sections, page = compare_runs([RunFolder(path) for path in options.runs])
    if not any(section.tables for section in sections):
        raise UserError("These runs have no two models that were measured on the same text yet.")
    print_sections(Console(width=None if sys.stdout.isatty() else 160), sections)
    write_atomically(options.out, page.encode())
    print(f"page: {options.out}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from pipeline.doctor import run_doctor

    return run_doctor()


def _plan(options: argparse.Namespace) -> int:
    from pipeline.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    import_torch()
    from rich.console import Console
    from rich.markup import escape

    from model.files.safe_io import default_cache
    from pipeline.plan import budgets_of, gpu_named, note, on_gpus, plan_recipe, plan_table, timed
    from pipeline.plan_serving import serving_plan
    from pipeline.preflight import findings
    from pipeline.report.terminal import print_table

    gpu = gpu_named(options.gpu)
    budgets, cache = budgets_of(options.gpu_memory, gpu), options.cache or default_cache()
    plans = plan_recipe(recipe, cache)
    if options.gpus is not None:
        plans = on_gpus(plans, options.gpus, budgets)
    if options.time:
        log_to(None, show=True)
        plans = timed(plans, recipe, cache)
    tables = [replace(plan_table(plans, budgets), note=note(plans))] if plans else []
    if recipe.serve is not None:
        tables.append(serving_plan(recipe, cache, gpus=options.gpus or 1, budgets=budgets, gpu=gpu))
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables:
        print_table(console, table)
    for sentence in findings(recipe, plans):
        console.print(f"[yellow]{escape(sentence)}[/]", soft_wrap=True, highlight=False)
    return 0


def _data(options: argparse.Namespace) -> int:
    from pipeline.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    import_torch()
    from rich.console import Console

    from model.files.safe_io import default_cache
    from pipeline.data import data_sets, made_later, show

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for data_set in data_sets(recipe, options.cache or default_cache()):
        show(data_set, console)
    for name, stage in made_later(recipe).items():
        console.print(f"{name} is made by the stage {stage}, so there is nothing to show of it before the run.")
    return 0


def _export(options: argparse.Namespace) -> int:
    import_torch()
    from pipeline.export import export

    print(export(options))
    return 0


def _recipe(options: argparse.Namespace) -> int:
    from pipeline.recipe import load_recipe, recipe_to_yaml

    recipe = load_recipe(options.recipe, options.overrides)
    if options.show:
        print(recipe_to_yaml(recipe), end="")
    else:
        print(f"{options.recipe} is a valid recipe: {', '.join(stage.name for stage in recipe.plan())}")
    return 0


# --- helpers ----------------------------------------------------------------------------------------------------------


def _check_alone() -> None:
    """UserError, told once, where torchrun, or accelerate by it, has started several processes to do one thing."""
    if "TORCHELASTIC_RUN_ID" in os.environ and this_rank().count > 1:
        from pipeline.meeting import once

        reason = "every process of the launcher would do the same: only `potstill run` and `tune` are started by one"
        raise once(UserError(f"{reason}; serving starts its ranks itself (--tensor-parallel-size)"), this_rank().index)


def log_to(file: Path | None, *, show: bool) -> None:
    """Sends our rooms' messages to the terminal and, with times and details, to the run's log file."""
    screen = logging.StreamHandler(sys.stderr)
    screen.setFormatter(logging.Formatter("%(message)s"))
    screen.setLevel(logging.INFO if show else logging.ERROR)
    handlers: list[logging.Handler] = [screen]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = logging.FileHandler(file, encoding="utf-8", delay=True)
        kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(kept)
    for room in LOGGERS:
        logger = logging.getLogger(room)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.handlers = handlers


def _print_results(results: "Sequence[Result[Any]]", report: Path) -> None:
    from rich.console import Console

    from pipeline.report.table import models_section
    from pipeline.report.terminal import print_sections
    from pipeline.stages.base import sections_of

    console = Console(width=None if sys.stdout.isatty() else 160)
    print_sections(console, [*sections_of(results, curves={}), models_section(results)])
    console.print(f"report: {report}", soft_wrap=True, highlight=False)
