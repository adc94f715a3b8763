"""The site's reference has everything there is; its tutorials' blocks run as they stand."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from manual import commands, faces, protocol
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2, types_pb2, upgrade_pb2, vault_pb2
from tests.server.conftest import Stages, make_stages
from tests.support.blocks import write_pngs
from tests.support.documents import ROOT, blocks, page, run_script

FILES = (search_pb2, gallery_pb2, release_pb2, upgrade_pb2, vault_pb2, types_pb2)
TUTORIALS = "docs/tutorials"


def test_the_protocol_page_has_every_call_message_and_comment() -> None:
    text = protocol.page()
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            assert f"### {service.name}\n" in text
            assert all(f"| `{method.name}` |" in text for method in service.methods)
        for message in file.DESCRIPTOR.message_types_by_name.values():
            body = text.split(f"### {message.name}\n")[1].split("\n### ")[0]
            assert all(f"| `{field.name}` = {field.number} |" in body for field in message.fields)
        for enum in file.DESCRIPTOR.enum_types_by_name.values():
            assert all(f"| `{value.name}` =" in text for value in enum.values)
    # A comment of each kind, as it stands in the files.
    for said in ("Finds the nearest items of a gallery.", "Number of hits wanted, 1 to 1000",
                 "Still answers queries in its own space."):  # fmt: skip
        assert said in text


def test_the_commands_page_has_every_option() -> None:
    text = commands.page()
    for name, (module, app) in commands.COMMANDS.items():
        group = typer.main.get_command(getattr(sys.modules[module], app))
        for word, command in group.commands.items():  # type: ignore[attr-defined]
            body = text.split(f"### {name} {word}\n")[1].split("\n### ")[0].split("\n## ")[0]
            for parameter in command.params:
                shown = [o for o in parameter.opts if o.startswith("-") and o != "--help"]
                assert all(option in body for option in shown), (name, word, shown)


def test_the_python_page_has_every_name_of_every_face() -> None:
    text = faces.page()
    for room in faces.ROOMS:
        body = text.split(f"## nobackfill.{room}\n")[1].split("\n## ")[0]
        names = faces.names(f"nobackfill.{room}")
        assert names
        assert all(f"### {name}\n" in body for name in names)


def test_the_site_is_built_strictly_and_searched_offline(tmp_path: Path) -> None:
    """Every link and anchor leads somewhere, or mkdocs ends with 1."""
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", "manual/mkdocs.yml",
         "-d", site],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    # Searched from the disk: the index is a script, as a page of a file may fetch nothing.
    assert "SearchRequest" in (site / "search" / "search_index.js").read_text("utf-8")
    for path in (site / "index.html", site / "tutorials" / "operator.html"):
        text = path.read_text("utf-8")
        assert "nobackfill" in text
        assert "fonts.googleapis" not in text


def test_the_researchers_blocks_run() -> None:
    code = "\n".join(text for _, text in blocks(page(f"{TUTORIALS}/researcher.md"), "python"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "new/upgraded" in done.stdout


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Releases 1 and 2."""
    return make_stages(tmp_path_factory.mktemp("published"), 2)


# Twenty processes one after the other: half a minute and more.
@pytest.mark.faults
def test_the_other_tutorials_run_one_after_the_other(stages: Stages, tmp_path: Path) -> None:
    from tests.server.test_operations_doc import free_ports

    shutil.copytree(stages[1], tmp_path / "model_repo")
    shutil.copytree(stages[2], tmp_path / "next")
    write_pngs(tmp_path / "photos", 12)
    for number, path in enumerate(sorted((tmp_path / "photos").glob("*.png"))):
        path.rename(path.with_name(f"{number:04}.png"))
    script = ""
    for name in ("backend-engineer", "app-developer", "operator"):
        for language, text in blocks(page(f"{TUTORIALS}/{name}.md"), "sh", "python"):
            python = f"{shlex.quote(sys.executable)} - <<'PYTHON'\n{text}PYTHON\n"
            script += text if language == "sh" else python
    script = script.replace("# release 2 is published", "cp -r next/. model_repo/; sleep 3")
    port, metrics = free_ports()
    script = script.replace("127.0.0.1:50051", f"127.0.0.1:{port}").replace("9464", str(metrics))
    environment = {
        "NOBACKFILL_TRITON": "in-process",
        "NOBACKFILL_ADDRESS": f"127.0.0.1:{port}",
        "NOBACKFILL_METRICS_ADDRESS": f"127.0.0.1:{metrics}",
        "NOBACKFILL_SERVER": f"127.0.0.1:{port}",
    }
    said = run_script(script, tmp_path, environment, 280)
    assert "nobackfill_canary_share 0.05" in said
    assert "canary of release 2 promoted" in said
    assert "release 1 answers again" in said
