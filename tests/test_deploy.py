"""deploy/: every series that alerts and the dashboard ask for is one that gateways tell, every page
is there, every setting is one; and what the containers copy is in the repository."""

import ast
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

from nobackfill.server.grpc.metrics import THREADS, Metrics
from nobackfill.server.settings import Settings
from tests.inventory import series

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
# Of Prometheus itself.
OTHERS = {"up"}


@pytest.fixture(scope="module")
def told() -> set[str]:
    """Names of series."""
    kinds = series()
    parts = ("_bucket", "_sum", "_count")
    histograms = {n + part for n, kind in kinds.items() if kind == "histogram" for part in parts}
    counters = {n for n, kind in kinds.items() if kind == "counter"}
    assert all(name.endswith("_total") for name in counters)
    return set(kinds) | histograms | OTHERS


def asked(expression: str) -> set[str]:
    """Names of series in a PromQL expression."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(by|on) \([^)]*\)", "", expression)
    names = set(re.findall(r"[a-z_]{2,}[a-z0-9_]*", bare))
    functions = {
        "sum", "max", "min", "rate", "increase", "changes", "histogram_quantile", "and", "unless",
    }  # fmt: skip
    return names - functions


def test_alerts_ask_for_series_there_are_and_name_their_page(told: set[str]) -> None:
    (group,) = yaml.safe_load((DEPLOY / "monitoring" / "alerts.yaml").read_text())["groups"]
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    pages = {
        re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.*)$", runbook, re.MULTILINE)
    }
    named = set()
    for rule in group["rules"]:
        assert asked(rule["expr"]) and asked(rule["expr"]) <= told, rule["expr"]
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/runbook.md"
        named.add(anchor)
    assert named == pages and len({rule["alert"] for rule in group["rules"]}) > 10


def test_alerts_fire_when_they_should() -> None:
    """Prometheus' own tool evaluates the rules on the series of tests/alerts.yaml."""
    promtool = shutil.which("promtool")
    if promtool is None:
        assert not os.environ.get("CI"), "promtool is missing: apt-get install prometheus"
        pytest.skip("promtool is missing: apt-get install prometheus")
    done = subprocess.run(
        [promtool, "test", "rules", str(ROOT / "tests" / "alerts.yaml")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_counters_start_at_zero() -> None:
    """`increase` needs a sample before the first error."""
    metrics = Metrics()
    metrics.devices.set_expected_release(3)
    text = generate_latest(metrics.registry).decode()
    for thread in THREADS:
        assert f'nobackfill_unforeseen_errors_total{{thread="{thread}"}} 0.0' in text
    assert 'nobackfill_swap_seconds_count{outcome="failed"} 0.0' in text
    assert 'nobackfill_device_syncs_total{failure="probes",release="3"} 0.0' in text


@pytest.mark.slow
def test_every_boundary_names_a_thread_that_starts_at_zero() -> None:
    named = set()
    for path in (ROOT / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith(("error_boundary", "unforeseen.labels"))
                and isinstance(node.args[-1], ast.Constant)
            ):
                named.add(node.args[-1].value)
    assert named == set(THREADS)


def test_the_dashboard_asks_for_series_there_are(told: set[str]) -> None:
    board = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for expression in expressions:
        assert asked(expression) and asked(expression) <= told, expression
    assert len(expressions) > 10


def test_settings_that_are_given_are_settings() -> None:
    known = {f"NOBACKFILL_{name.upper()}" for name in Settings.model_fields}
    given = {
        str(path): set(re.findall(r"\bNOBACKFILL_[A-Z_]*[A-Z]\b", path.read_text()))
        for path in DEPLOY.rglob("*")
        if path.is_file()
    }
    assert sum(map(len, given.values())) > 10
    assert {name for names in given.values() for name in names} - {"NOBACKFILL_NAME"} <= known


def test_containers_copy_what_there_is_and_are_nobody() -> None:
    text = (DEPLOY / "containers" / "Containerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()[:-1]), line
    assert not re.search(r":latest\b", text)
    images = [part for part in re.split(r"^FROM ", text, flags=re.M) if "ENTRYPOINT" in part]
    named = {re.match(r"\$\{BASE\} AS (\w+)", part)[1]: part for part in images}  # type: ignore[index]
    assert named.keys() == {"gateway", "trainer", "static"}
    assert all("USER 10001:10001" in part for part in images)
    gateway = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["gateway"]
    assert gateway["read_only"] is True
    build = gateway["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists() and build["target"] in named


def test_containers_build_the_wheel_from_all_of_its_roots() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    lines = (DEPLOY / "containers" / "Containerfile").read_text().splitlines()
    copied = {line.split()[1] for line in lines if re.fullmatch(r"COPY (\w+) \1", line)}
    assert copied == {Path(path).parts[0] for path in wheel["only-include"]}


def test_every_tag_is_this_version() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    values = yaml.safe_load((DEPLOY / "chart" / "values.yaml").read_text())
    chart = yaml.safe_load((DEPLOY / "chart" / "Chart.yaml").read_text())
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert values["image"] | {"pullPolicy": ""} == {
        "repository": "nobackfill/gateway", "tag": version, "pullPolicy": "",
    }  # fmt: skip
    assert chart["appVersion"] == version
    assert compose["services"]["gateway"]["image"] == f"nobackfill/gateway:{version}"
