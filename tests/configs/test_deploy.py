"""What is shipped for running a server fits the server. Linters that are installed have their say, too."""

import argparse
import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve.http.options import ServerOptions, add_serve_arguments, options_from_arguments, options_from_words
from tests.serve.http_server import ROOT, SCRIPTED, running_server, save_tiny_folder

DEPLOY = ROOT / "configs" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DEPLOYMENT, SERVICE = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
RAY_SERVICE = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())["spec"]
CLUSTER = RAY_SERVICE["rayClusterConfig"]
[WORKERS] = CLUSTER["workerGroupSpecs"]
RAY_PODS = {"head": CLUSTER["headGroupSpec"]["template"]["spec"], "worker": WORKERS["template"]["spec"]}
[APPLICATION] = yaml.safe_load(RAY_SERVICE["serveConfigV2"])["applications"]
POD = DEPLOYMENT["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
UNIT = (DEPLOY / "potstill.service").read_text()
ENTRYPOINT = json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[0])
EXEC_START = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)[0].split()
DRAIN_S = ServerOptions.drain_s


def options_of(command: list[str]) -> ServerOptions:
    """As `potstill serve` reads them."""
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return options_from_arguments(parser.parse_args(command))


def unit_setting(name: str) -> str:
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)[-1]


@pytest.mark.parametrize(
    "command",
    [
        [*ENTRYPOINT, *COMPOSE["services"]["potstill"]["command"]],
        [*ENTRYPOINT, *CONTAINER["args"]],
        [Path(EXEC_START[0]).name, *EXEC_START[1:]],
        ["potstill", "serve", *APPLICATION["args"]["command"].split()],
    ],
    ids=["compose", "kubernetes", "systemd", "kuberay"],
)
def test_commands_are_what_the_program_takes(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "serve.yaml").write_text("host: 0.0.0.0")
    command = [str(tmp_path / "serve.yaml") if word == "/etc/potstill/serve.yaml" else word for word in command]
    assert command[:2] == ["potstill", "serve"]
    monkeypatch.delenv("POTSTILL_API_KEY", raising=False)
    with pytest.raises(ValueError, match="give --api-key"):  # the world is listened to: never without a key
        options_of(command[2:])
    monkeypatch.setenv("POTSTILL_API_KEY", "key")
    options = options_of(command[2:])
    assert options.port == 8000 and options.engine.model in ("/model", "${POTSTILL_MODEL}")


def test_the_image_holds_every_package_and_nothing_else() -> None:
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {name.rstrip("*") for name in include}
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()}
    files = {"pyproject.toml", "requirements.lock", "requirements-ray.lock", "README.md", "LICENSE"}
    assert copied == packages | files
    ignore = (ROOT / ".dockerignore").read_text().split()
    assert ignore[0] == "*" and {name.lstrip("!") for name in ignore if name.startswith("!")} == copied
    assert re.search(r"^torch==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)


def test_whoever_runs_it_is_not_root() -> None:
    [user] = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert f"--uid {user} " in DOCKERFILE
    assert POD["securityContext"]["runAsUser"] == int(user) and POD["securityContext"]["runAsNonRoot"]
    assert "DynamicUser=yes" in UNIT


def test_nothing_writes_but_where_it_may() -> None:
    """The root file system is read-only: sockets are in /tmp, compiled kernels in the cache."""
    cache = re.findall(r"XDG_CACHE_HOME=(\S+)", DOCKERFILE)[0]
    assert re.findall(r"TRITON_CACHE_DIR=(\S+)", DOCKERFILE)[0].startswith(cache)
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in CONTAINER["volumeMounts"]}
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert mounts == {"/model": True, cache: False, "/tmp": False}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}
    service = COMPOSE["services"]["potstill"]
    assert service["read_only"] and service["tmpfs"] == ["/tmp"]
    assert f"cache:{cache}" in service["volumes"]
    assert f"XDG_CACHE_HOME=/var/cache/{unit_setting('CacheDirectory')} " in UNIT


def test_there_is_time_to_drain() -> None:
    drain_s = options_of(["m", *CONTAINER["args"][1:]]).drain_s
    [before_s] = [int(word) for word in CONTAINER["lifecycle"]["preStop"]["exec"]["command"] if word.isdigit()]
    assert POD["terminationGracePeriodSeconds"] >= drain_s + before_s + 5
    assert int(COMPOSE["services"]["potstill"]["stop_grace_period"].removesuffix("s")) >= DRAIN_S + 5
    assert int(unit_setting("TimeoutStopSec")) >= DRAIN_S + 5
    assert unit_setting("KillMode") == "mixed"


def test_files_that_compose_mounts_exist_and_ports_stay_on_this_machine() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), source
            assert source.startswith((".", "$")) or source in COMPOSE["volumes"], source
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    build = COMPOSE["services"]["potstill"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    [scrape] = yaml.safe_load((ROOT / "configs/monitoring/prometheus.yaml").read_text())["scrape_configs"]
    [target] = scrape["static_configs"][0]["targets"]
    assert target.partition(":")[0] in COMPOSE["services"]
    [source] = yaml.safe_load((ROOT / "configs/monitoring/grafana/datasource.yaml").read_text())["datasources"]
    assert source["url"].removeprefix("http://").partition(":")[0] in COMPOSE["services"]
    provider = yaml.safe_load((ROOT / "configs/monitoring/grafana/provider.yaml").read_text())["providers"][0]
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/potstill.json" in mounted


# Probes


def probe(kind: str) -> str:
    get = CONTAINER[f"{kind}Probe"]["httpGet"]
    [port] = CONTAINER["ports"]
    assert get["port"] == port["name"] and port["containerPort"] == 8000
    return str(get["path"])


def test_probes_tell_loading_serving_and_hanging_apart(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "slow")  # takes 3 s to load
    options = ["--api-key", "secret", "--health-timeout-s", "1"]

    def answers() -> dict[str, Any]:
        kinds = ("startup", "readiness", "liveness")
        return {kind: httpx.get(f"{server.url}{probe(kind)}", timeout=5).status_code for kind in kinds}

    with running_server(folder, tmp_path / "log", *options, program=SCRIPTED, ready=False) as server:
        assert answers() == {"startup": 503, "readiness": 503, "liveness": 200}
        server.wait_healthy(20)
        assert answers() == {"startup": 200, "readiness": 200, "liveness": 200}
        [engine] = server.engine_pids()
        os.kill(engine, signal.SIGSTOP)
        assert answers() == {"startup": 503, "readiness": 503, "liveness": 200}
    assert f"http://127.0.0.1:8000{probe('readiness')}'" in DOCKERFILE


def test_probes_wait_longer_than_the_server_may_take_to_answer() -> None:
    health_s = options_of(["m", *CONTAINER["args"][1:]]).health_timeout_s
    for kind in ("startup", "readiness"):
        assert CONTAINER[f"{kind}Probe"]["timeoutSeconds"] > health_s
    startup = CONTAINER["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 600
    assert SERVICE["spec"]["selector"].items() <= DEPLOYMENT["spec"]["template"]["metadata"]["labels"].items()


# Ray


def test_ray_runs_what_is_there_in_pods_of_which_each_holds_one_replica() -> None:
    module, _, name = APPLICATION["import_path"].partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    [deployment] = APPLICATION["deployments"]
    assert {name, deployment["name"]} <= defined
    options = options_from_words([*APPLICATION["args"]["command"].split(), "--api-key", "key"])
    assert options.replicas == (WORKERS["minReplicas"], WORKERS["maxReplicas"]) and CLUSTER["enableInTreeAutoscaling"]
    assert WORKERS["minReplicas"] <= WORKERS["replicas"] <= WORKERS["maxReplicas"]
    [container] = RAY_PODS["worker"]["containers"]
    assert deployment["ray_actor_options"]["num_cpus"] == int(container["resources"]["limits"]["cpu"])
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    locked = re.findall(r"^ray==(.*)$", (ROOT / "requirements-ray.lock").read_text(), re.MULTILINE)
    assert locked == [CLUSTER["rayVersion"]]
    assert options.engine.model in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("kind", RAY_PODS)
def test_ray_pods_have_all_probes_and_the_rights_of_the_others(kind: str) -> None:
    pod = RAY_PODS[kind]
    [container] = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    asked = {}
    for name in ("startup", "readiness", "liveness"):
        probe = container[f"{name}Probe"]
        port = probe["httpGet"]["port"]
        asked[name] = ports.get(port, port), probe["httpGet"]["path"]
        assert probe["failureThreshold"] * probe["periodSeconds"] >= 10
    node = 52365, "/api/local_raylet_healthz"
    ready = {"head": (8265, "/api/gcs_healthz"), "worker": (8000, "/-/healthz")}
    assert asked == {"startup": node, "readiness": ready[kind], "liveness": node}
    drain_s = options_from_words([*APPLICATION["args"]["command"].split(), "--api-key", "key"]).drain_s
    assert pod["terminationGracePeriodSeconds"] >= drain_s + 10
    assert pod["securityContext"] == POD["securityContext"]
    assert container["securityContext"] == CONTAINER["securityContext"] and container["env"] == CONTAINER["env"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    expected = POD["volumes"] if kind == "worker" else [one for one in POD["volumes"] if one["name"] != "model"]
    assert pod["volumes"] == expected


def test_ray_takes_what_is_to_be_served() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed")
    parsed = schema.ServeDeploySchema.model_validate(yaml.safe_load(RAY_SERVICE["serveConfigV2"]))
    assert parsed.applications[0].import_path == APPLICATION["import_path"]


# Linters


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(["hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "potstill.service"
    unit.write_text(UNIT.replace(EXEC_START[0], "/bin/true"))  # verify wants a program that exists
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="kubernetes-validate is missing")
def test_kubernetes_takes_the_manifest() -> None:
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", str(DEPLOY / "kubernetes.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
