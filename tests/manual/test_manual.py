"""The site's reference has everything there is; its tutorials' blocks run as they stand."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect

from manual import commands, drawings, faces, protocol
from nobackfill.client import Device
from nobackfill.release.publishing.publish import publish
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2, types_pb2, upgrade_pb2, vault_pb2
from tests.server.support import running
from tests.support import releases
from tests.support.blocks import write_pngs
from tests.support.browser import chromium, tab
from tests.support.documents import ROOT, blocks, page, run_script
from tests.test_architecture import ARROWS, SERVER, module
from tests.test_faces import FACES

FILES = (search_pb2, gallery_pb2, release_pb2, upgrade_pb2, vault_pb2, types_pb2)
TUTORIALS = "docs/tutorials"


def test_the_protocol_page_has_every_call_message_and_comment() -> None:
    text = protocol.page()
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            assert f"### {service.name}\n" in text
            for method in service.methods:
                assert re.search(rf"^\| `{method.name}` \|.*\| \w[^|]+ \|$", text, re.MULTILINE)
        for message in file.DESCRIPTOR.message_types_by_name.values():
            body = text.split(f"\n### {message.name}\n")[1].split("\n### ")[0]
            # What it is, before its fields.
            assert re.match(r"\n\w", body), message.name
            assert all(f"| `{field.name}` = {field.number} |" in body for field in message.fields)
        for enum in file.DESCRIPTOR.enum_types_by_name.values():
            assert all(f"| `{value.name}` =" in text for value in enum.values)
    # A comment of each kind, as it stands in the files.
    for said in ("Searches galleries for the nearest items.", "The number of hits, 1 to 1000",
                 "Still answers queries that are embedded in its space."):  # fmt: skip
        assert said in text


def test_the_commands_page_has_every_option() -> None:
    text = commands.page()
    for name in commands.COMMANDS:
        application = commands.application(name)
        pages = {f"## {name}": application}
        pages |= {f"### {name} {words}": one for words, one in commands.below(application)}
        for title, command in pages.items():
            body = re.split(r"\n##+ ", text.split(f"\n{title}\n")[1])[0]
            for parameter in command.params:
                hidden = parameter.record is None
                shown = [o for o in parameter.opts if o.startswith("-") and o != "--help"]
                assert hidden or all(option in body for option in shown), (title, shown)
            for line in (command.epilog or "").split():
                assert line in body, title


def test_every_command_of_ours_is_on_the_commands_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    doors = {f"python training/{path.name}" for path in (ROOT / "training").glob("*.py")}
    assert doors | set(project["scripts"]) <= set(commands.COMMANDS)


def test_the_python_page_has_every_name_of_every_face() -> None:
    text = faces.page()
    for room in faces.ROOMS:
        body = text.split(f"\n## nobackfill.{room}\n")[1].split("\n## ")[0]
        names = faces.offered(f"nobackfill.{room}")
        assert names
        assert all(f"### {name}\n" in body for name in names)
    rooms = {module(path).removeprefix("nobackfill.") for path in FACES}
    # Templates of pages are for the report and the plug-in `web` alone.
    inner = {"pages"} | {room for room in rooms if room.endswith(".cli")}
    assert rooms - inner <= set(faces.ROOMS)


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
    text = "".join(path.read_text("utf-8") for path in site.rglob("*.html"))
    assert not re.findall(r"<(?:script|img|iframe)[^>]* src=\"?https?:[^>]*>", text)
    assert not re.findall(r"<link[^>]*(?:stylesheet|preconnect)[^>]*https?:[^>]*>", text)
    assert "https://unpkg.com" not in text
    with chromium() as browser, tab(browser) as opened:
        opened.goto((site / "tutorials" / "operator.html").as_uri())
        opened.get_by_role("textbox", name="Search").fill("withdrawn")
        first = opened.locator(".md-search-result__item").first
        # A busy machine takes more than the five seconds of `expect` to load the index.
        expect(first).to_contain_text("withdrawn", timeout=60_000)


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_drawings_are_as_their_source_draws_them(name: str) -> None:
    """After a change: `make drawings`."""
    assert page(name) == drawings.DRAWINGS[name]()


def test_the_researchers_blocks_run(tmp_path: Path) -> None:
    text = page(f"{TUTORIALS}/researcher.md")
    code = "\n".join(block for _, block in blocks(text, "python"))
    ((_, command),) = blocks(text, "shell")
    program, *words = shlex.split(command)
    assert program == "python"
    script, *options = words
    for arguments, expected in (
        (["-c", code], "new/upgraded"),
        ([str(ROOT / script), *options], "| procrustes | items |"),
    ):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
        if arguments[0] == "-c":
            printed = done.stdout.splitlines()
            assert len(printed) == 2 and all(f"`{line}`" in text for line in printed)


def test_first_snippets_run_twice_and_without_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a release that was published without --eval: no hit has a score."""
    repo = tmp_path / "model_repo"
    made = releases.draft(tmp_path / "drafts", 1, [])
    bare = made.manifest.model_copy(update={"calibration": ()})
    publish(repo, replace(made, manifest=bare))
    for folder in ("server/a", "queries/a"):
        write_pngs(tmp_path / "photos" / folder, 2)
    for number, path in enumerate(write_pngs(tmp_path / "photos", 2)):
        shutil.copy(path, tmp_path / "cat.jpg")
        path.rename(path.with_name(f"red-circle-{number}.png"))
    monkeypatch.chdir(tmp_path)
    with running(repo, tmp_path / "data") as served:
        address = served.address
        with Device.create("gallery.sqlite", f"grpc://{address}", repo / "1.root.json") as device:
            assert device.put({"a": Path("cat.jpg")}) == {}
        for name in (f"{TUTORIALS}/backend-engineer.md", f"{TUTORIALS}/app-developer.md",
                     "docs/quick-start.md"):  # fmt: skip
            codes = [code for _, code in blocks(page(name), "python") if "print(hit" in code]
            assert codes, name
            for code in codes * 2:
                exec(compile(code.replace("127.0.0.1:50051", address), name, "exec"), {})
    assert "None" in capsys.readouterr().out


# Twenty processes one after the other: half a minute and more.
@pytest.mark.faults
def test_the_other_tutorials_run_one_after_the_other(tmp_path: Path) -> None:
    """From an empty folder: the sample publication is all that they need."""
    from tests.server.test_operations_doc import free_ports

    script = ""
    for name in ("backend-engineer", "app-developer", "operator"):
        for language, text in blocks(page(f"{TUTORIALS}/{name}.md"), "sh", "python"):
            python = f"{shlex.quote(sys.executable)} - <<'PYTHON'\n{text}PYTHON\n"
            script += text if language == "sh" else python
    script = script.replace("--release 2; sleep 3\n", "--release 2; sleep 6\n")
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
    assert "release 1 is active again" in said


def test_the_wait_for_a_gateway_ends_if_the_gateway_does(tmp_path: Path) -> None:
    """In a folder without the sample nothing can be served, and no reader waits for ever."""
    from tests.server.test_operations_doc import free_ports

    (start,) = (
        text
        for _, text in blocks(page(f"{TUTORIALS}/backend-engineer.md"), "sh")
        if "gateway serve" in text
    )
    run_script(start, tmp_path, {"NOBACKFILL_SERVER": f"127.0.0.1:{free_ports()[0]}"}, 60)
    assert "no publication folder at model_repo" in (tmp_path / "gateway.log").read_text()


def test_the_architecture_page_has_the_rooms_and_arrows_that_there_are() -> None:
    text = page("docs/architecture.md")
    (drawn,) = (block for _, block in blocks(text, "text") if "──▶" in block)
    arrows = {}
    for room, imported in re.findall(r"^(\w+) +──▶ (.*?)(?:  .*)?$", drawn, re.MULTILINE):
        arrows[room] = set(imported.replace("protos", "v1").split(", ")) - {"base"}
    del arrows["demo"]
    assert arrows == {room: to for room, to in ARROWS.items() if room != "metrics"}
    named = set(re.findall(r"`([\w.]+)`", text))
    assert set(ARROWS) | set(SERVER) <= named
