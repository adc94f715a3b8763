"""The command `gateway`: a life through its commands, refusals with sentences and exit codes."""

import errno
import fcntl
import json
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from typer.main import get_command

from manual import commands
from nobackfill.errors import BusyError, CannotWriteError
from nobackfill.server.cli.app import app
from nobackfill.server.cli.main import main
from nobackfill.server.grpc.listener import check_port_free
from nobackfill.server.state import StateFile
from tests.server.conftest import Stages, publish_stage
from tests.server.process import Served, command, serving
from tests.server.support import Client, images, running
from tests.support.commands import Ended, run_here
from tests.support.ports import free_port


@pytest.fixture
def served(repo: Path, tmp_path: Path) -> Iterator[Served]:
    with serving(repo, tmp_path / "data", "--triton=in-process") as served:
        yield served


def run(*arguments: str, code: int = 0, process: bool = False) -> str:
    """Run a command in this process, or in one of its own as a gateway is; its stdout."""
    done: Ended | subprocess.CompletedProcess[str]
    if process or arguments[0] == "serve":
        done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)
    else:
        done = run_here(main, "gateway", *arguments)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.startswith("gateway: "), done.stderr
        assert "Traceback" not in done.stderr
        assert not done.stdout
        return done.stderr
    return done.stdout


def run_json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return found


def test_every_command_shows_examples_that_its_parser_accepts() -> None:
    for words, entry in commands.below(commands.application("gateway")):
        if entry.commands:
            continue
        lines = re.findall(r"^  gateway (.*)$", entry.epilog, re.MULTILINE)
        assert lines, f"gateway {words} shows no example"
        for line in lines:
            assert line.startswith(f"{words} ") or line == words
            parser: Any = get_command(app)
            arguments = shlex.split(line)
            while hasattr(parser, "commands"):
                parser = parser.commands[arguments.pop(0)]
            # The parser raises for an unknown option, a missing or a surplus argument.
            parser.make_context(words, arguments)


@pytest.mark.long
def test_a_status_says_why_no_release_answers(repo: Path, tmp_path: Path) -> None:
    absent = f"--triton=127.0.0.1:{free_port()}"
    with serving(repo, tmp_path / "data", absent) as gateway:
        at = f"--server={gateway.address}"
        status = run_json("status", at)
        assert (status["active_release"], status["model_server_up"]) == (0, False)
        ends = time.monotonic() + 60
        # Between two attempts to activate the release, none is under way.
        while "\nrelease 1 is being activated" not in (printed := run("status", at)):
            assert time.monotonic() < ends, printed
        for note in ("no release is active", "the model server (Triton) does not"):
            assert f"\n{note}" in printed, printed


@pytest.mark.long
def test_a_life_through_commands(
    served: Served, repo: Path, stages: Stages, tmp_path: Path
) -> None:
    at = f"--server={served.address}"
    with Client(served.address) as client:
        client.create_gallery("g")
        client.put_images(images(5))
    publish_stage(repo, stages[2])
    estimate = run_json("estimate", "g", "2", at)
    assert estimate["items"] == "5"
    assert estimate["route"] == [1, 2]
    assert run_json("activate", "2", at)["phase"] == "PHASE_DONE"
    listed = run_json("releases", at)["releases"]
    assert [(r["number"], r["state"]) for r in listed] == [
        (1, "RELEASE_STATE_PREVIOUS"),
        (2, "RELEASE_STATE_ACTIVE"),
    ]
    assert listed[1]["manifest"]["release"] == 2
    status = run_json("status", at)
    assert (status["active_release"], status["model_server_up"]) == (2, True)
    (gallery,) = status["galleries"]
    assert (gallery["name"], gallery["items"], gallery["release"]) == ("g", "5", 2)
    assert "active" in run("releases", at)
    assert "release 2" in run("status", at)
    assert "done 5/5" in run("watch", "g", at)
    run("data", "backup", str(tmp_path / "backup"), f"--data={tmp_path / 'data'}")
    assert run_json("data", "verify", str(tmp_path / "backup"))["galleries"] == {"g": 5}
    assert run_json("rollback", at) == {"number": 1, "lost_items": "0", "lost": [], "done": False}
    assert run_json("rollback", "--yes", at)["done"] is True
    run("activate", "2", "--rollout=dual", at)
    assert run_json("retire", at) == {"retired": [1]}
    with urlopen(f"http://{served.metrics}/metrics", timeout=10) as page:
        assert "nobackfill_active_release 2.0" in page.read().decode()
    assert served.stop() == 0
    run("data", "restore", str(tmp_path / "backup"), f"--data={tmp_path / 'restored'}")
    with (
        serving(repo, tmp_path / "restored", "--triton=in-process") as again,
        Client(again.address) as client,
    ):
        assert client.states() == {1: "PREVIOUS", 2: "ACTIVE"}
        assert client.find(images(5)[4]).hits[0].id == "i4"


def test_the_log_is_json_with_request_ids(served: Served) -> None:
    with Client(served.address) as client:
        request = client.raw.releases.GetRelease.with_call
        from nobackfill.v1 import release_pb2

        with pytest.raises(Exception, match="not published"):
            request(release_pb2.GetReleaseRequest(number=9), metadata=(("x-request-id", "mine-7"),))
    refused = [event for event in served.events() if event["event"] == "refused"]
    assert [event["request_id"] for event in refused] == ["mine-7"]
    assert {"timestamp", "level", "code", "method"} <= set(refused[0])


def test_an_address_in_use(repo: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag in ("--address", "--metrics-address", "--console-address"):
            done = subprocess.run(
                command(
                    "serve", f"--model-repo={repo}", f"--data={tmp_path / 'd'}",
                    "--triton=in-process", "--console", "--address=127.0.0.1:0",
                    "--metrics-address=127.0.0.1:0", "--console-address=127.0.0.1:0",
                    f"{flag}={address}",
                ),
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert done.returncode == 75, done.stderr
            told = done.stderr.splitlines()[-1]
            assert address in told and f"with {flag}" in told
            # Told at once: no state was opened, and no model was loaded.
            assert [path.name for path in (tmp_path / "d").iterdir()] == ["lock"]


def test_a_port_that_a_connection_left_is_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with socket.create_connection(server.getsockname()[:2]):
            # This end is closed first, so its address waits for late packets.
            server.accept()[0].close()
        with pytest.raises(BusyError, match="--address"):
            check_port_free(address, "--address")
    check_port_free(address, "--address")
    check_port_free("127.0.0.1:0", "--address")


def test_a_data_folder_serves_one_gateway(served: Served, repo: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(
            "serve", f"--model-repo={repo}", f"--data={tmp_path / 'data'}", "--triton=in-process",
            "--address=127.0.0.1:0", "--metrics-address=127.0.0.1:0",
        ),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 75
    assert "another gateway uses this data folder" in done.stderr
    assert served.process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("serve", "--model-repo=missing"), 78, "publication folder"),
        (("serve", "--address=0.0.0.0:1"), 78, "tls_cert"),
        (("serve", "--settings=missing.toml"), 78, "missing.toml"),
        (("releases", "--server=127.0.0.1:1"), 69, "gateway serve"),
        (("activate", "2", "--server=127.0.0.1:1", "--json"), 69, "127.0.0.1:1"),
        (("data", "backup", "target", "--data=missing"), 66, "state.json"),
        (("data", "restore", "missing", "--data=new"), 66, "backup.json"),
        (("data", "verify", "missing"), 66, "state.json"),
        (("data", "backup", 300 * "x", "--data=served"), 65, "no file can have this name"),
        (("data", "restore", "missing", f"--data={300 * 'x'}"), 65, "no file can have this name"),
    ],
)
def test_refusals(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "served").mkdir()
    StateFile(tmp_path / "served" / "state.json").change(paused=("g",))
    assert words in run(*arguments, code=code)


@pytest.mark.parametrize("trouble", ["no locks", "folder", "file"])
def test_a_lock_that_cannot_be_had_is_a_sentence(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """A file system without locks, such as a share over NFS, was a traceback."""
    data, saved, words = tmp_path / "data", tmp_path / "saved", "move the folder of this name away"
    data.mkdir()
    StateFile(data / "state.json").change(paused=("g",))
    run("data", "backup", str(saved), f"--data={data}")
    empty = tmp_path / "empty"
    if trouble == "no locks":

        def none(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", none)
        words = "No locks available"
        said = run("data", "backup", str(tmp_path / "new"), f"--data={data}", code=73)
        assert words in said
        # Neither the copy nor the hidden folder that it was begun in.
        assert {path.name for path in tmp_path.iterdir()} == {"data", "repo", "saved"}
        with pytest.raises(CannotWriteError, match=words), running(repo, data):
            pass
    elif trouble == "folder":
        (data / "lock").mkdir()
        (empty / "lock").mkdir(parents=True)
    else:
        data, empty, words = data / "state.json", saved / "state.json", "state.json"
    before = empty.exists()
    assert words in run("data", "restore", str(saved), f"--data={empty}", code=73)
    assert empty.exists() is before
    if trouble != "no locks":
        assert words in run("serve", f"--model-repo={repo}", f"--data={data}", code=73)


def test_triton_that_cannot_start(repo: Path, tmp_path: Path) -> None:
    """A venv without the wheel, named on purpose, is an error and not a silent fallback."""
    sentence = run(
        "serve", f"--model-repo={repo}", f"--data={tmp_path / 'd'}",
        f"--triton-venv={tmp_path}", "--metrics-address=127.0.0.1:0", code=69,
    )  # fmt: skip
    assert "nvidia-pytriton" in sentence
