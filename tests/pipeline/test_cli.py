"""The command: fast help, one sentence a mistake, exit codes, and the whole way with a real server at its end."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.cli import main, parse_arguments
from pipeline.stages.base import read_result
from tests.pipeline.tiny_run import RECIPE, ROOT, TinyRun


def potstill(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "pipeline", *arguments], cwd=cwd, capture_output=True, text=True)


def test_help_is_fast_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom pipeline.cli import main\n"
        "try:\n    main(['--help'])\nfinally:\n"
        "    print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    fastest = 9.0
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        fastest = min(fastest, time.perf_counter() - started)
    assert done.returncode == 0
    for command in ("run", "serve", "generate", "chat", "report", "compare", "plan", "doctor", "export", "recipe"):
        assert command in done.stdout
    heavy = {
        "torch",
        "numpy",
        "omegaconf",
        "rich",
        "accelerate",
        "datasets",
        "wandb",
        "starlette",
        "uvicorn",
        "msgspec",
    }
    assert not heavy & set(done.stderr.split())
    assert fastest < 1.0


def test_recipes_are_checked_without_torch() -> None:
    code = (
        f"import sys\nfrom pipeline.cli import main\nmain(['recipe', 'validate', {str(RECIPE)!r}])\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    first, modules = done.stdout.splitlines()
    assert first.endswith("is a valid recipe: 00-teacher, 01-distill, 02-evaluate, 03-conversation")
    assert "torch" not in modules.split()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "nowhere.yaml"], "There is no recipe at nowhere.yaml."),
        (["run", str(RECIPE), "distil.tokens=1"], "Did you mean 'distill'?"),
        (["recipe", "show", str(RECIPE), "name"], "is not of the form key=value."),
        (["report", "nowhere"], "nowhere is no run folder: it has no recipe.yaml."),
        (["compare", "nowhere"], "nowhere is no run folder: it has no recipe.yaml."),
        (
            ["serve", "nowhere"],
            "There is no model at nowhere; give a folder with config.json, a .gguf file",
        ),
        (["generate", "nowhere", "hello"], "There is no model at nowhere"),
        (["export", "nowhere", "--to", "gguf"], "There is no model at nowhere"),
        (["export", "nowhere", "--to", "onnx"], "Nothing can be exported to 'onnx'; known are gguf, "),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("potstill: ") and error.count("\n") == 1


def test_overrides_may_stand_anywhere_and_options_may_not_be_misspelled(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_arguments(["run", "x.yaml", "a=1", "--folder", "f", "b=2", "c=3"])
    assert (options.overrides, options.folder) == (["a=1", "b=2", "c=3"], Path("f"))
    assert parse_arguments(["generate", "m", "--verify", "t", "hello"]).prompt == "hello"
    for wrong in (["run", "x.yaml", "--fodler", "f"], ["generate", "m", "a", "--raw", "b"], ["doctor", "now"]):
        with pytest.raises(SystemExit) as end:
            parse_arguments(wrong)
        assert end.value.code == 2
    assert "unrecognized arguments: now" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_arguments(["run"])
    assert capsys.readouterr().err.endswith("are required: recipe\n"), "overrides may be left out"


def test_recipe_show_prints_overrides_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show", str(RECIPE), "distill.tokens=3k"]) == 0
    shown = capsys.readouterr().out
    assert "tokens: 3000" in shown and "beta2: 0.95" in shown


def test_a_refused_gate_is_exit_code_1(copied_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(copied_run.arguments("evaluate.gate.max_kl=0.001")) == 1
    error = capsys.readouterr().err
    assert "max_kl FAILS" in error and "02-evaluate is below its gate" in error and "Traceback" not in error


def test_a_finished_run_prints_its_table(copied_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(copied_run.arguments()) == 0
    shown = capsys.readouterr().out
    for word in ("teacher", "student, before", "student verified by teacher", "perplexity", "1 − TV", "tokens/s ×2"):
        assert word in shown
    assert shown.rstrip().endswith("report.html")


def test_a_run_can_be_named_by_its_folder(copied_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = copied_run.finished()
    assert main(["run", str(copied_run.folder.path), "--cache", str(copied_run.home / "cache")]) == 0
    assert copied_run.finished() == before


@pytest.mark.parametrize("how", [[], ["--verify", "teacher"], ["--raw"]])
def test_generate_answers(finished_run: TinyRun, how: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(finished_run.folder.path), "copper", "--max-tokens", "6", *how]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() and "6 tokens, " in captured.err
    assert captured.err.endswith("; stopped at --max-tokens\n")


def test_generate_says_where_the_model_ends(finished_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(finished_run.folder.path), "copper " * 480, "--max-tokens", "5000"]) == 0
    assert capsys.readouterr().err.endswith("; stopped at the last position of the model\n")


def test_a_verified_answer_is_the_teachers_own(finished_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = str(finished_run.folder.path / "00-teacher" / "model")
    answers = []
    for arguments in ([teacher], [str(finished_run.folder.path), "--verify", "teacher"]):
        main(["generate", *arguments, "spirit cut", "--max-tokens", "24", "--dtype", "float32"])
        answers.append(capsys.readouterr().out.replace("[", "").replace("]", ""))
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_the_whole_way_ends_with_a_conversation_over_http(copied_run: TinyRun) -> None:
    arguments = copied_run.arguments(drop=())
    done = potstill(*arguments)
    assert done.returncode == 0, done.stderr
    result = read_result(copied_run.folder.path / "03-conversation")
    assert result is not None
    alone, verified = result.answers
    assert (alone.served, verified.served) == ("student", "student verified by teacher")
    assert 1 <= alone.tokens <= 8 and alone.drafted_tokens == 0 and not any(piece.drafted for piece in alone.pieces)
    assert "> What is a potstill?" in done.stdout and "student verified by teacher: " in done.stdout
    assert "What is a potstill?" in copied_run.folder.report.read_text()
    again = potstill(*arguments)
    assert again.returncode == 0 and "03-conversation is finished, nothing has changed" in again.stderr
    assert "> What is a potstill?" in again.stdout
