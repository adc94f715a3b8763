"""The rule of `make quick` (tests/quick.py): what it leaves out, and what fails in it."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLAIN = """
import os
import subprocess
from importlib import import_module

import pytest


def helper():
    subprocess.run(["true"])


@pytest.fixture(scope="session")
def child():
    helper()


@pytest.fixture(params=[min, helper])
def parameter(request):
    return request.param


def test_plain():
    pass


def test_helper():
    helper()


def test_fixture(child):
    pass


def test_parameter(parameter):
    pass


def test_gateway():
    from nobackfill.server.gateway import GatewayServer

    GatewayServer(None)


@pytest.mark.slow
def test_marked():
    pass


@pytest.mark.parametrize("time", ["first", "second"])
def test_late_fixture(request, time):
    request.getfixturevalue("child")


def test_hidden_process():
    getattr(import_module("subprocess"), "run")(["true"])


def test_handled_process():
    try:
        getattr(import_module("subprocess"), "run")(["true"])
    except BaseException:
        pass


def test_child_without_an_event():
    pid = import_module("multiprocessing.util").spawnv_passfds(b"/bin/true", [b"true"], [])
    os.waitpid(pid, 0)


def test_hidden_torch():
    import_module("torch")


def test_hidden_gateway():
    import_module("nobackfill.server.gateway").GatewayServer.start(None)


def test_after_the_others():
    pass
"""
TORCH = """
import torch


def test_with_torch():
    pass
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What became of each test by name; nothing of what was left out."""
    folder = tmp_path_factory.mktemp("quick")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    # Plug-ins that other packages bring are off here, too.
    (folder / "pytest.ini").write_text(
        f"[pytest]\nmarkers = slow\naddopts = {settings['addopts']}\n"
    )
    (folder / "test_plain.py").write_text(PLAIN)
    (folder / "test_torch.py").write_text(TORCH)
    command = [sys.executable, "-m", "pytest", "-p", "tests.quick", "-rA", "-q", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True
    )
    found: dict[str, set[str]] = {}
    for outcome, name, reason in re.findall(
        r"^(PASSED|FAILED|ERROR) \S+::test_(\S+)(.*)", done.stdout, re.MULTILINE
    ):
        refused = outcome == "PASSED" or "NotQuickError" in reason
        found.setdefault(name, set()).add(outcome if refused else f"{outcome}{reason}")
    assert "imports torch" in done.stdout, done.stdout + done.stderr
    return found


def test_what_starts_no_process_runs(outcomes: dict[str, set[str]]) -> None:
    for name in ("plain", "parameter[min]", "after_the_others"):
        assert outcomes[name] == {"PASSED"}


@pytest.mark.parametrize(
    "name",
    [
        "helper",
        "fixture",
        "parameter[helper]",
        "gateway",
        "marked",
        "late_fixture[first]",
        "late_fixture[second]",
        "with_torch",
    ],
)
def test_what_reaches_a_process_is_left_out(name: str, outcomes: dict[str, set[str]]) -> None:
    assert name not in outcomes


@pytest.mark.parametrize("name", ["process", "torch", "gateway"])
def test_what_hides_it_fails(name: str, outcomes: dict[str, set[str]]) -> None:
    assert "FAILED" in outcomes[f"hidden_{name}"]


@pytest.mark.parametrize("name", ["handled_process", "child_without_an_event"])
def test_what_handles_the_refusal_fails_at_its_end(
    name: str, outcomes: dict[str, set[str]]
) -> None:
    assert outcomes[name] == {"PASSED", "ERROR"}
