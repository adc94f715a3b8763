"""`edge-client` as a person runs it: one JSON object on stdout, exit codes.

One whole life runs as processes; other commands run in this one, unless they are about a process.
"""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nobackfill.client.cli.main import edge_client, run_line
from nobackfill.client.device import Device
from nobackfill.client.maintenance import remove
from tests.support import blocks, edge
from tests.support.commands import Ended, run_here
from tests.support.edge import Setting

COMMAND = Path(sys.executable).with_name("edge-client")


def run(
    gallery: Path, *arguments: str | Path, code: int = 0, stdin: str = "", cwd: Path | None = None
) -> Ended:
    """The end of the command in this process; its exit code must be `code`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOBACKFILL_GALLERY", str(gallery))
        done = run_here(run_line, "edge-client", *arguments, stdin=stdin, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done


def start(
    gallery: Path, *arguments: str | Path, code: int = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The same of a process, which never shows a traceback."""
    done = subprocess.run(
        [COMMAND, *arguments],
        env={**os.environ, "NOBACKFILL_GALLERY": str(gallery)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == code, done.stderr
    return done


def ask(
    gallery: Path,
    *arguments: str | Path,
    code: int = 0,
    run: Callable[..., Ended | subprocess.CompletedProcess[str]] = run,
) -> dict[str, Any]:
    """The one JSON object that the command prints."""
    answer = json.loads(run(gallery, *arguments, "--json", code=code).stdout)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.long
def test_a_life(world: edge.World, tmp_path: Path) -> None:
    """Each command is a process once."""
    process = partial(ask, run=start)
    repo, gallery = tmp_path / "pub" / "repo", tmp_path / "g.sqlite"
    world.publish(repo, 1)
    images = blocks.write_pngs(tmp_path / "images", 6)
    (tmp_path / "images" / "torn.png").write_bytes(images[0].read_bytes()[:60])
    (tmp_path / "images" / "notes.txt").write_text("no image")
    made = process(gallery, "init", "--from", repo, "--root", repo / "1.root.json")
    assert made["release"] == 1
    added = process(gallery, "add", tmp_path / "images", "--set", "trip=alps", code=65)
    assert added["added"] == [str(path) for path in images]
    others = ("torn.png", "notes.txt")
    assert list(added["refused"]) == [str(tmp_path / "images" / name) for name in others]
    assert ask(gallery, "add", tmp_path / "images" / images[0].name)["held"] == 1

    found = process(gallery, "search", images[2], "-k", "3", "--where", "trip=alps")
    assert (found["query"], found["release"]) == (str(images[2]), 1)
    nearest = found["hits"][0]
    assert (nearest["path"], nearest["origin"], nearest["release"]) == (
        str(images[2]), "native", 1,
    )  # fmt: skip
    assert nearest["distance"] < 1e-5
    assert nearest["score"] == pytest.approx(1)
    assert ask(gallery, "search", images[2], "--where", "trip=sea")["hits"] == []
    for condition, count in {"trip!=alps": 0, "trip exists": 3, "trip>=2020-01-01": 0}.items():
        answer = ask(gallery, "search", images[2], "-k", "3", "--where", condition)
        assert len(answer["hits"]) == count
    both = ask(gallery, "search", *images[:2], "--sheet", tmp_path / "sheet.png")
    assert [a["hits"][0]["path"] for a in both["answers"]] == [str(p) for p in images[:2]]
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size[1] > 200

    world.publish(repo, 2)
    assert ask(gallery, "sync", "--dry-run")["state"] == "planned"
    assert process(gallery, "sync")["state"] == "upgraded"
    upgraded = ask(gallery, "search", images[2])["hits"][0]
    assert (upgraded["path"], upgraded["origin"], upgraded["release"]) == (
        str(images[2]), "upgraded", 2,
    )  # fmt: skip
    assert upgraded["distance"] < 1e-5
    assert process(gallery, "status")["rollback_to"] == 1
    assert process(gallery, "rollback") == {"from_release": 2, "release": 1}
    assert process(gallery, "gc")["freed_bytes"] > 0
    listed = process(gallery, "list")["items"]
    assert [item["metadata"]["name"] for item in listed] == [p.name for p in images]
    assert process(gallery, "remove", images[0], listed[1]["id"])["removed"] == 2
    assert process(gallery, "verify") == {"items": 4, "vectors": 4, "problems": [], "notes": []}


def test_people_get_sentences(setting: Setting) -> None:
    item = run(setting.gallery, "list").stdout.split()[0]
    assert item in run(setting.gallery, "search", setting.images[0]).stdout
    assert "release 1" in run(setting.gallery, "status").stdout
    assert "list --after 5" in run(setting.gallery, "list", "--limit", "5").stderr
    assert run(setting.gallery, "list", "--after", "5").stderr == ""
    assert "newest" in run(setting.gallery, "sync").stdout
    assert run(setting.gallery, "search", "--id", item, "-k", "2").stdout.count("\n") == 2


REFUSALS = [
    (["--gallery", "MISSING", "search", "--id", "x"], 66, "edge-client --gallery"),
    (["search", "--id", "x", "--gallery", "MISSING"], 66, "edge-client --gallery"),
    (["search", "--id", "x"], 66, "x: this gallery has no searchable item"),
    (["search"], 2, "exactly one of images, --text and --id"),
    (["search", "--id", "x", "-k", "0"], 2, "expected a whole number from"),
    (["add", "MISSING"], 65, "no such file"),
    (["search", "TEXT"], 65, "text.png"),
    (["search", "--id", "x", "--where", "trip"], 2, "KEY=VALUE"),
    (["search", "--id", "x", "--where", "trip>alps"], 2, "a number, a date or a time"),
    (["search", "IMAGE", "--sheet", "found.xbm"], 65, "ends in .png"),
    (["list", "--after", f"{2**63}"], 2, "whole number"),
    (["sync", "--backfill", f"{2**63}"], 2, "whole number"),
    (["remove", "x"], 66, "has this id or path"),
    (["rollback"], 66, "a rollback is not possible"),
    (["init", "--from", "REPO"], 73, "already exists"),
    (["--gallery", "MISSING", "init", "--from", "MISSING"], 78, "publication folder"),
    (["--gallery", "MISSING", "init", "--from", "REPO", "--root", "MISSING"], 78, "--root"),
    (["--gallery", "MISSING", "init", "--from", "REPO", "--root", "TEXT"], 65, "given root"),
    (["--gallery", "MISSING", "init", "--from", "EMPTY", "--root", "ROOT"], 66, "not there"),
    (["--gallery", "MISSING", "init", "--from", "grpc://127.0.0.1:1", "--root", "ROOT"], 69, "try"),
    (["push"], 78, "no vault"),
    (["push", "--recipient", "AGE"], 78, "age1"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), REFUSALS, ids=lambda value: str(value))
def test_refusals_are_one_sentence_and_their_exit_code(
    setting: Setting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    names = {
        "MISSING": tmp_path / "missing",
        "EMPTY": tmp_path / "empty",
        "TEXT": tmp_path / "text.png",
        "REPO": setting.repo,
        "IMAGE": setting.images[0],
        "ROOT": setting.repo / "1.root.json",
    }
    names["EMPTY"].mkdir()
    names["TEXT"].write_text("not an image")
    monkeypatch.setenv("NOBACKFILL_GALLERY", str(setting.gallery))
    with pytest.raises(SystemExit) as ended:
        run_line([str(names.get(word, word)) for word in arguments])
    assert ended.value.code == code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "missing").exists()


def test_trust_on_first_use_asks(world: edge.World, tmp_path: Path) -> None:
    repo, gallery = tmp_path / "pub" / "repo", tmp_path / "g.sqlite"
    world.publish(repo, 1)
    refused = run(gallery, "init", "--from", repo, code=78, stdin="n\n")
    assert "fingerprint" in refused.stderr
    run(gallery, "init", "--from", repo, code=78)
    assert not gallery.exists()
    start(gallery, "init", "--from", repo, input="y\n")
    assert gallery.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_add_survives_an_interruption(
    setting: Setting, tmp_path: Path, number: signal.Signals
) -> None:
    images = blocks.write_pngs(tmp_path / "many", 400, seed=8)
    adding = subprocess.Popen(
        [COMMAND, "--gallery", setting.gallery, "add", tmp_path / "many"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    before = count = len(edge.contents(setting.gallery))
    while count == before and adding.poll() is None:
        time.sleep(0.01)
        count = len(edge.contents(setting.gallery))
    adding.send_signal(number)
    _, said = adding.communicate(timeout=60)
    assert adding.returncode in (130 if number is signal.SIGINT else -number, 0), said
    kept = len(edge.contents(setting.gallery))
    assert edge.fill(setting.gallery, tmp_path / "many") == len(images) - (kept - before)
    assert len(edge.contents(setting.gallery)) == before + len(images)


def test_a_search_loads_what_it_needs_and_nothing_else(setting: Setting) -> None:
    """Of what is not Python's own: each of them takes longer than the search."""
    item = run(setting.gallery, "list").stdout.split()[0]
    code = (
        "import sys; before = set(sys.modules)\n"
        "from nobackfill.client.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(loaded - sys.stdlib_module_names))\n"
    )
    for arguments, loaded in (
        (["--id", item], ["nobackfill", "numpy"]),
        ([str(setting.images[0])], ["PIL", "nobackfill", "numpy", "onnxruntime"]),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, "--gallery", setting.gallery, "search", *arguments],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        said = ast.literal_eval(done.stdout.splitlines()[-1])
        assert [name for name in said if not name.startswith("_")] == loaded


def test_a_search_whose_answer_nobody_takes_ends_in_silence(setting: Setting) -> None:
    line = f"exec {COMMAND} --gallery {setting.gallery} search {setting.images[0]} >&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_options_stand_between_names_too(setting: Setting) -> None:
    first, second = setting.images[:2]
    asked = ask(setting.gallery, "search", first, "-k", "1", second)
    assert [answer["query"] for answer in asked["answers"]] == [str(first), str(second)]
    assert asked == ask(setting.gallery, "search", "-k1", first, second)
    assert asked == ask(setting.gallery, "search", "-k=1", "--", first, second)


def test_a_command_line_is_read_alike_with_and_without_the_other_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parser is made for the words at hand: a word that names another command is no matter."""
    monkeypatch.delenv("NOBACKFILL_GALLERY", raising=False)
    for line in (
        ["search", "add", "-k", "3"],
        ["--gallery", "search", "add", "search", "--json"],
        ["set", "a", "--to", "b=1", "sync", "--to=c=true"],
        ["sync", "--fp32", "--keep-original", "--backfill=3"],
    ):
        read = [vars(edge_client(words).parse_args(line)) for words in (line, ())]
        for one in read:
            del one["refuse"]
        assert read[0] == read[1]


def test_wrong_usage_says_so_in_one_line(setting: Setting) -> None:
    for line in ("no-such", "search --js", "search -k", "list \x1b[1m", "set x"):
        refused = run(setting.gallery, *line.split(), code=2)
        assert refused.stderr.count("\n") == 1
        assert "--help`" in refused.stderr
        assert "\x1b" not in refused.stderr
    assert "COMMAND" in run(setting.gallery, code=2).stderr


def complete(line: str, folder: Path) -> list[str]:
    """The words that a shell is offered."""
    file = folder / "words"
    done = subprocess.run(
        [COMMAND],
        env={
            **os.environ, "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line,
            "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(file),
        },
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == ""
    return file.read_text().split()


def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    assert set(complete("edge-client s", tmp_path)) == {"search", "set", "status", "sync"}
    offered = complete("edge-client --gallery x sync --dr", tmp_path)
    assert set(offered) == {"--drop-original", "--dry-run"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_once(tmp_path: Path, shell: str) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "SHELL": f"/bin/{shell}"}
    (tmp_path / f".{shell}rc").write_text("alias ll='ls -l'")
    for _ in range(2):
        subprocess.run([COMMAND, "--install-completion"], env=environment, check=True)
    shown = subprocess.run(
        [COMMAND, "--show-completion"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    (file,) = tmp_path.rglob("edge-client.*")
    assert file.read_text() == shown.removesuffix("\n")
    lines = (tmp_path / f".{shell}rc").read_text().splitlines()
    assert lines == ["alias ll='ls -l'", f"source '{file}'"][: 1 if shell == "fish" else 2]
    if shell == "bash":
        script = "source ~/.bashrc; complete -p edge-client"
        done = subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert "edge-client" in done.stdout


def test_completion_of_another_shell_is_refused() -> None:
    done = subprocess.run(
        [COMMAND, "--show-completion"], env={**os.environ, "SHELL": "/bin/dash"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 65
    assert "SHELL=bash edge-client --show-completion" in done.stderr


def test_removing_a_path_removes_every_item_added_from_it(setting: Setting, tmp_path: Path) -> None:
    """A file that was edited and added again is two items of one path."""
    picture = tmp_path / "picture.png"
    for source in setting.images[:2]:
        Image.open(source).transpose(Image.Transpose.ROTATE_90).save(picture)
        edge.fill(setting.gallery, tmp_path)
    with Device(setting.gallery) as device:
        before = device.store.count()
        assert remove(device, [str(picture)])["removed"] == 2
        assert device.store.count() == before - 2


def test_names_that_are_none(setting: Setting, tmp_path: Path) -> None:
    """An empty name would add all below the folder one is in; one that is no text is still said."""
    blocks.write_pngs(tmp_path / "here", 2, seed=5)
    refused = run(setting.gallery, "add", "", code=2, cwd=tmp_path / "here")
    assert "an empty text" in refused.stderr
    run(setting.gallery, "search", "", code=2, cwd=tmp_path / "here")
    odd = tmp_path / os.fsdecode(b"\xff\n.png")
    shutil.copy(tmp_path / "here" / "5-0000.png", odd)
    answer = ask(setting.gallery, "add", odd, code=65)
    assert list(answer["refused"].values()) == [
        "the name of this file is not valid UTF-8; rename the file"
    ]
    run(setting.gallery, "add", odd, code=65)
    run(setting.gallery, "add", "x" * 5000, code=65)
    assert len(edge.contents(setting.gallery)) == 12
