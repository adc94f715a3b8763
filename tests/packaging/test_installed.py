"""What an install can do, in an empty folder outside the checkout."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.conftest import ROOT
from tests.packaging.environments import Environment
from tests.support import blocks, edge
from tests.support.waiting import wait_until
from tests.test_architecture import packages, sources

REPORT = "nobackfill.report"
LARGEST_MB = 300
# What the edge client does without.
HEAVY = {"torch", "torchvision", "tritonclient", "hnswlib", "sklearn", "matplotlib", "structlog"}
# Modules that an extra is for, by what their names begin with; the others are the base install's.
OF_SERVER = (
    "server.", "gallery.search.hnsw", "gallery.search.graph", "gallery.search.package_graph",
)  # fmt: skip
OF_POSTGRESQL = (
    "server.stores.postgresql", "server.galleries.hosted_database",
    "server.upgrades.workers",
)  # fmt: skip
OF_EXPORT = ("server.export",)
OF_WEB = ("pages.", "plugins.web.")
OF_TRAINING = ("training.", "report.", "quality.")
OF_ADOPT = ("adopt.", "serve.")
OF_PLUGINS = ("plugins.",)
# Plug-ins by group and name: extras of the room that asks for them, and their own ("": none).
PLUGINS: Mapping[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("pages", "browse"): ((), "web"),
    ("pages", "console"): (("server",), "web"),
    ("sources", "chroma"): ((), ""),
    ("sources", "lancedb"): ((), "lancedb"),
    ("sources", "milvus"): ((), "milvus"),
    ("sources", "qdrant"): ((), "qdrant"),
    ("sources", "sqlite"): ((), "sqlite-vec"),
    ("stores", "milvus"): (("server", "postgres"), "milvus"),
    ("telemetry", "otel"): (("server",), "otel"),
    ("workers", "ray"): (("server", "postgres"), "ray"),
}
LOAD = """
import sys
from nobackfill.errors import ConfigurationError
from nobackfill.extras import load_plugin
try:
    load_plugin(*sys.argv[1:])
except ConfigurationError as error:
    print(error)
"""
# Programs: one of the edge of a process, one that runs inside Triton, one that a module runs.
PROGRAMS = ("server.triton.launch", "server.triton.backends.", "report.__main__")


def modules(installed: Environment) -> list[str]:
    """The names, without `nobackfill.`, of all modules that can be imported."""
    top = installed.site_packages / "nobackfill"
    paths = [path.relative_to(top).with_suffix("") for path in top.rglob("*.py")]
    names = [".".join(path.parts) for path in sorted(paths)]
    return [name for name in names if not name.startswith(PROGRAMS)]


def import_all(installed: Environment, names: list[str], folder: Path) -> set[str]:
    """Import them; the names of all top-level modules that are loaded then."""
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module('nobackfill.' + name)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    return set(installed.run("python", "-c", script, cwd=folder).stdout.split())


def test_an_install_adds_one_package_and_its_record(base: Environment) -> None:
    package, record = sorted(base.added)
    assert package == "nobackfill"
    assert record.startswith("nobackfill-")
    assert record.endswith(".dist-info")


def test_the_base_install_is_light(base: Environment) -> None:
    names = [path.name for path in base.site_packages.iterdir()]
    assert not HEAVY & set(names)
    assert "numpy" in names
    # Links are followed, one folder at a time: `rglob` does not.
    files = (
        file
        for top in base.site_packages.iterdir()
        for file in (top.resolve().rglob("*") if top.is_dir() else [top])
    )
    assert sum(file.stat().st_size for file in files if file.is_file()) < LARGEST_MB * 1e6


def test_the_base_needs_what_it_declares(base: Environment, tmp_path: Path) -> None:
    others = (*OF_SERVER, *OF_TRAINING, *OF_ADOPT, *OF_WEB, *OF_PLUGINS)
    names = [name for name in modules(base) if not name.startswith(others)]
    assert len(names) > 100
    assert not HEAVY & import_all(base, names, tmp_path)


def test_the_server_needs_what_it_declares(server: Environment, tmp_path: Path) -> None:
    names = [
        name
        for name in modules(server)
        if name.startswith(OF_SERVER) and not name.startswith((*OF_POSTGRESQL, *OF_EXPORT, *OF_WEB))
    ]
    assert len(names) > 50
    import_all(server, names, tmp_path)


def test_adopting_needs_what_it_declares(adopt: Environment, tmp_path: Path) -> None:
    names = [name for name in modules(adopt) if name.startswith(OF_ADOPT)]
    assert len(names) > 20
    loaded = import_all(adopt, names, tmp_path)
    assert not loaded & {"torch", "hnswlib", "grpc"}


def test_other_extras_need_what_they_declare(
    environment: Callable[..., Environment], tmp_path: Path
) -> None:
    for extras, prefixes in {
        ("server", "web"): OF_WEB,
        ("server", "postgres", "export"): (*OF_POSTGRESQL, *OF_EXPORT),
    }.items():
        installed = environment(*extras)
        names = [name for name in modules(installed) if name.startswith(prefixes)]
        assert names
        import_all(installed, names, tmp_path)


def test_the_wheel_registers_every_plugin(base: Environment, tmp_path: Path) -> None:
    script = (
        "from importlib.metadata import distribution\n"
        "for one in distribution('nobackfill').entry_points:\n"
        "    if one.group.startswith('nobackfill.'): print(one.group, one.name)"
    )
    found = base.run("python", "-c", script, cwd=tmp_path).stdout.splitlines()
    assert sorted(found) == sorted(f"nobackfill.{group} {name}" for group, name in PLUGINS)


@pytest.mark.parametrize(("group", "name"), PLUGINS, ids=map("-".join, PLUGINS))
def test_a_plugin_needs_its_own_extra_alone(
    environment: Callable[..., Environment], group: str, name: str, tmp_path: Path
) -> None:
    """Without its extra its error says how to get it."""
    room, own = PLUGINS[group, name]

    def error(*extras: str) -> str:
        return environment(*extras).run("python", "-c", LOAD, group, name, cwd=tmp_path).stdout

    without = error(*room)
    if not own:
        assert without == ""
        return
    assert f"pip install '.[{own}]'" in without
    try:
        assert error(*room, own) == ""
    except PackageNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed: it comes with `make test-scale`")


def test_a_name_that_no_plugin_has(base: Environment, tmp_path: Path) -> None:
    said = base.run("python", "-c", LOAD, "sources", "weaviate", cwd=tmp_path).stdout
    assert said.startswith("no plug-in 'weaviate' is installed in the group nobackfill.sources")
    assert "chroma, lancedb, milvus, qdrant, sqlite" in said


def test_training_needs_what_it_declares(training: Environment, tmp_path: Path) -> None:
    """Importing all of it takes half a minute: what it imports is looked up, one door is opened."""
    there = {path.name.split(".")[0] for path in training.site_packages.iterdir()}
    for room in ("training", "quality", "report"):
        for path in sources(room):
            # --weights asks for public models, and a folder without an ONNX file for its library.
            optional = {"timm", "open_clip", "sentence_transformers"}
            assert packages(path) - optional <= there | sys.stdlib_module_names, path.name
    names = ["training.cli.train", "training.loop.training"]
    assert "torch" in import_all(training, names, tmp_path)


def test_the_comparison_stays_in_checkouts(training: Environment, tmp_path: Path) -> None:
    assert not (training.site_packages / "nobackfill" / "research").exists()
    for door in (
        [str(ROOT / "training" / "compare.py")],
        ["-m", "nobackfill.training.cli.compare"],
    ):
        said = training.run("python", *door, "--data", "digits", cwd=tmp_path, code=78).stderr
        assert said.startswith("compare.py: nobackfill.research is not installed")


def test_commands_say_what_they_need(base: Environment, tmp_path: Path) -> None:
    for command in (
        ["edge-client"],
        ["publication"],
        ["gateway"],
        ["nobackfill"],
        ["python", "-m", REPORT],
    ):
        assert "Usage" in base.run(*command, "--help", cwd=tmp_path).stdout
    assert (
        "there is no gallery"
        in base.run("edge-client", "search", "x", cwd=tmp_path, code=66).stderr
    )
    asked = base.run("gateway", "serve", cwd=tmp_path, code=78).stderr
    assert asked.count("\n") == 1
    assert "pip install '.[server]'" in asked
    options = ["--model-repo", "x", "--release", "2", "-o", "page.html"]
    asked = base.run("python", "-m", REPORT, *options, cwd=tmp_path, code=78).stderr
    assert asked.count("\n") == 1
    assert "pip install '.[training]'" in asked
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x.parquet").touch()
    asked = base.run("nobackfill", "inspect", "x.parquet", cwd=tmp_path, code=78).stderr
    assert "pip install '.[adopt]'" in asked
    asked = base.run("nobackfill", "inspect", "qdrant:x#y", cwd=tmp_path, code=78).stderr
    assert asked.count("\n") == 1
    assert "pip install '.[qdrant]'" in asked


@contextmanager
def serving(installed: Environment, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """What `gateway serve` logs, run in `folder` on free ports, until it answers."""
    log = folder / "gateway.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [
                installed.bin / "gateway", "serve",
                "--address=127.0.0.1:0", "--metrics-address=127.0.0.1:0",
            ],
            cwd=folder, env=installed.variables(), stderr=stderr,
        )  # fmt: skip
    try:
        wait_until(
            lambda: '"event": "serving"' in log.read_text() or process.poll() is not None,
            "the gateway answers",
        )
        assert process.poll() is None, log.read_text()
        yield [json.loads(line) for line in log.read_text().splitlines()]
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def test_a_life(base: Environment, server: Environment, tmp_path: Path) -> None:
    """Gateway and device, each with its own install; no Triton beside the gateway."""
    repo = tmp_path / "pub" / "repo"
    world = edge.World(tmp_path / "world")
    world.publish(repo, 1)
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "model_repo").symlink_to(repo)
    images = blocks.write_pngs(tmp_path / "images", 5)
    server.run("publication", "verify", "--model-repo", repo, cwd=tmp_path)
    device = tmp_path / "device"
    device.mkdir()

    def run(*arguments: str | Path) -> dict[str, Any]:
        done = base.run("edge-client", *arguments, "--json", cwd=device)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    with serving(server, tmp_path / "gateway") as events:
        (missing,) = (event["event"] for event in events if event["level"] == "warning")
        assert "gateway install-triton" in missing
        address = events[-1]["address"]
        said = server.run("gateway", "releases", "--json", "--server", address, cwd=tmp_path)
        (release,) = json.loads(said.stdout)["releases"]
        assert release["state"] == "RELEASE_STATE_ACTIVE"
        run("init", "--from", f"grpc://{address}", "--root", repo / "1.root.json")
    run("add", tmp_path / "images")
    assert run("search", images[0])["hits"][0]["path"] == str(images[0])
    assert run("verify")["problems"] == []


# Names of packages that apps have, and that earlier versions of ours had or its folders have.
THEIRS = [
    "client",
    "core",
    "gallery",
    "metrics",
    "protos",
    "release",
    "report",
    "server",
    "training",
]


def test_an_app_keeps_its_own_packages(server: Environment, tmp_path: Path) -> None:
    for name in THEIRS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"WHOSE = 'the {name} of the app'\n")
    (tmp_path / "app.py").write_text(
        f"import {', '.join(THEIRS)}\n"
        "import nobackfill.client.device, nobackfill.server.gateway, nobackfill.wire.gateway\n"
        f"print(*(module.WHOSE for module in ({', '.join(THEIRS)})), sep='\\n')\n"
        "assert nobackfill.server.__file__ != server.__file__\n"
    )
    said = server.run("python", "app.py", cwd=tmp_path).stdout.splitlines()
    assert said == [f"the {name} of the app" for name in THEIRS]


def test_an_app_is_checked_against_our_types(base: Environment, tmp_path: Path) -> None:
    """Modules of the namespace itself have types, too."""
    app = tmp_path / "app.py"
    app.write_text(
        "from nobackfill.errors import NobackfillError\n"
        "from nobackfill.release.manifest import embedder_model_name\n"
        "reveal_type(NobackfillError.exit_code)\n"
        "reveal_type(embedder_model_name(1))\n"
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=/dev/null",
            "--python-executable", base.bin / "python", app,
        ],
        cwd=tmp_path, env=base.variables(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.rpartition(" ")[2] for line in done.stdout.splitlines()[:2]] == ['"int"', '"str"']
