"""docs/edge.md: every command and option is in it, and its blocks run as they stand."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from manual.commands import application
from nobackfill.client import Gateway
from nobackfill.client.cli.main import run_line
from nobackfill.client.device import Device
from nobackfill.client.vault import keys
from tests.server.support import running
from tests.support import blocks, documents, edge, releases
from tests.support.documents import page

PAGE = page("docs/edge.md")


def test_every_command_and_option_is_documented() -> None:
    group = application("edge-client")
    assert len(group.commands) == 16
    for name, command in group.commands.items():
        assert re.search(rf"^edge-client {name}\b", PAGE, re.MULTILINE), name
        assert re.search(rf"^### .*\b{name}\b|^edge-client {name}", PAGE, re.MULTILINE), name
        for option in (o for p in command.params for o in p.opts if o.startswith("-")):
            assert option in PAGE, f"{name} {option}"
    for option in (o for p in group.params for o in p.opts):
        assert option in PAGE, option


def test_every_option_in_the_page_exists() -> None:
    group = application("edge-client")
    known = {"--help"}
    for command in (group, *group.commands.values()):
        known |= {o for p in command.params for o in p.opts}
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", PAGE))
    assert used <= known


def test_exit_codes_are_those_of_the_errors() -> None:
    from nobackfill import errors

    used = {c.exit_code for c in vars(errors).values() if hasattr(c, "exit_code")}
    documented = set(map(int, re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)))
    assert documented == used - {1}


@pytest.fixture
def scene(
    world: edge.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """The folder that the page speaks of; yields what its variables stand for."""
    world.publish(tmp_path / "pub" / "repo", 1)
    (tmp_path / "publication").symlink_to(tmp_path / "pub" / "repo")
    blocks.write_pngs(tmp_path / "photos", 12)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOBACKFILL_GALLERY", raising=False)
    recovery = keys.new_identity(tmp_path / "recovery.txt")
    gateway_repo = tmp_path / "gateway" / "repo"
    world.publish(gateway_repo, 1)
    with running(gateway_repo, tmp_path / "gateway" / "data") as gateway:
        yield {
            "127.0.0.1:50051": gateway.address,
            "$RECOVERY_KEY": str(recovery.to_public()),
        }


def test_the_blocks_run(
    scene: dict[str, str],
    world: edge.World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(documents.blocks(PAGE, "sh")) == 4
    for line in documents.lines(PAGE, "sh"):
        if published := re.fullmatch(r"# the publisher publishes release (\d)", line):
            world.publish(tmp_path / "pub" / "repo", int(published[1]))
            continue
        if "$ITEM" in line:
            with Device(tmp_path / "gallery.sqlite") as device:
                scene["$ITEM"] = device.store.list_items()[0].id
        for name, value in scene.items():
            line = line.replace(name, value)
        documents.run_command(run_line, shlex.split(line), monkeypatch)
        said = capsys.readouterr()
        if "--json" in line:
            assert json.loads(said.out)
    with Device(tmp_path / "gallery.sqlite") as device:
        assert device.store.active().spec.release == 3
    assert len(list((tmp_path / "restored").iterdir())) == 11
    assert (tmp_path / "found.png").stat().st_size > 1000


def test_the_python_of_the_page_runs(
    scene: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for line in documents.lines(PAGE, "sh")[:2]:
        documents.run_command(run_line, shlex.split(line), monkeypatch)
    picture = tmp_path / "photos" / "0-0003.png"
    with Gateway(scene["127.0.0.1:50051"]) as gateway:
        for gallery in ("gallery", "photos"):
            gateway.create_gallery(gallery)
            assert not gateway.put(gallery, {"of the gateway": picture})
    for asked in ("query.png", "cat.jpg"):
        (tmp_path / asked).write_bytes(picture.read_bytes())
    (code,) = (text for _, text in documents.blocks(PAGE, "python"))
    code = code.replace("127.0.0.1:50051", scene["127.0.0.1:50051"])
    # A filter of the page's own photos.
    code = code.replace('{"folder": "sea"}', '{"name": "0-0003.png"}')
    capsys.readouterr()
    exec(compile(code, "docs/edge.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert "of the gateway" in "".join(said) and len(said) >= 2


def test_the_example_of_the_help_runs(
    scene: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = re.findall(r"^  (edge-client .*)$", application("edge-client").epilog, re.MULTILINE)
    words = ["init", "add", "search", "sync", "status"]
    assert [line.split()[1] for line in lines] == words
    (tmp_path / "1.root.json").write_bytes((tmp_path / "gateway/repo/1.root.json").read_bytes())
    (tmp_path / "photos" / "a.jpg").write_bytes(blocks.png(releases.images(1, seed=3)[0]))
    for line in lines:
        words = shlex.split(line.replace("127.0.0.1:50051", scene["127.0.0.1:50051"]))
        documents.run_command(run_line, words, monkeypatch)


def test_the_threat_model_names_each_party() -> None:
    text = page("docs/threat-model.md").lower()
    for party in ("publisher", "host", "gateway", "vault", "device", "network", "app"):
        assert party in text, party
