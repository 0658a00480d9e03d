"""Alerts and dashboard ask for what a server really exports. promtool, where it is installed, proves what they do."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.http_server import ROOT, SCRIPTED, running_server, save_tiny_folder

MONITORING = ROOT / "configs" / "monitoring"
ALERTS = MONITORING / "alerts.yaml"
DASHBOARD = json.loads((MONITORING / "grafana" / "potstill.json").read_text())
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def dashboard_expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of samples, as Prometheus stores them, and the labels that they have: from a server that has just begun."""
    folder = save_tiny_folder(tmp_path_factory.mktemp("monitoring") / "model")
    with running_server(folder, folder.parent / "log", "--price-per-hour", "2", program=SCRIPTED) as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": [1], "max_tokens": 2})
        text = httpx.get(f"{server.url}/metrics").text
    found: dict[str, set[str]] = {"up": {"job", "instance"}}
    for family in text_string_to_metric_families(text):
        for suffix in SUFFIXES[family.type]:
            name = family.name.removesuffix("_total") + suffix if suffix == "_total" else family.name + suffix
            found[name] = {label for sample in family.samples if sample.name == name for label in sample.labels}
    return found


def test_every_metric_that_is_asked_for_is_exported(exported: dict[str, set[str]]) -> None:
    for expression in (*dashboard_expressions(), *(rule["expr"] for rule in rules())):
        names = set(re.findall(r"potstill:\w+|\bup\b", expression))
        assert names, expression
        assert names <= exported.keys(), expression
        for name, selector in re.findall(r"(potstill:\w+){([^}]*)}", expression):
            labels = {matcher.partition("=")[0] for matcher in re.split(r",(?=\w+=)", selector)}
            assert labels <= exported[name], f"{name} has no label {labels - exported[name]}"
        grouped = {label for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(", ")}
        assert grouped <= set().union(*(exported[name] for name in names)), expression


def test_the_check_notices_a_metric_that_is_not(exported: dict[str, set[str]]) -> None:
    assert {"potstill:engine_restarts_total", "potstill:time_to_first_token_seconds_bucket"} <= exported.keys()
    assert not {"potstill:engine_restarts", "potstill:time_to_first_token_seconds", "potstill:x"} & exported.keys()
    assert "le" in exported["potstill:time_to_first_token_seconds_bucket"]
    assert "le" not in exported["potstill:engine_restarts_total"]


def test_alerts_are_complete_and_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
    tested = yaml.safe_load((ROOT / "tests" / "configs" / "alerts_test.yaml").read_text())["tests"][0]
    assert {test["alertname"] for test in tested["alert_rule_test"]} == set(names)


def test_panels_do_not_overlap_and_name_the_datasource() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["title"] and panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C"][: len(panel["targets"])]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) - {"__rate_interval"}
    assert used == variables


def test_a_datasource_and_the_dashboard_are_provisioned() -> None:
    [source] = yaml.safe_load((MONITORING / "grafana" / "datasource.yaml").read_text())["datasources"]
    [provider] = yaml.safe_load((MONITORING / "grafana" / "provider.yaml").read_text())["providers"]
    assert source["type"] == "prometheus" and source["isDefault"] and provider["type"] == "file"


@promtool
def test_promtool_takes_rules_and_configuration() -> None:
    subprocess.run(["promtool", "check", "rules", ALERTS], check=True)
    subprocess.run(["promtool", "check", "config", MONITORING / "prometheus.yaml"], check=True)


@promtool
def test_each_alert_fires_for_what_it_is_about(tmp_path: Path) -> None:
    tests = (ROOT / "tests" / "configs" / "alerts_test.yaml").read_text().replace("- ALERTS", f"- {ALERTS}")
    (tmp_path / "tests.yaml").write_text(tests)
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_every_expression_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    expressions = [expr for panel in DASHBOARD["panels"] for expr in (target["expr"] for target in panel["targets"])]
    plain = [expr.replace("$__rate_interval", "1m").replace("$model", ".*") for expr in expressions]
    records = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(plain)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "panels.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
