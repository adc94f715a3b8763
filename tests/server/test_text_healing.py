"""Notes heal as pictures do: embedded again from a file of lines, or what a function gives."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
)
from nobackfill.serving import JsonLinesItems, sources
from nobackfill.text import TextLine, parse_text_line
from tests.server.conftest import publish_stage
from tests.server.support import Client, ids, images, refused, running
from tests.server.test_healing import healed, origins, progress, register
from tests.server.test_texts import published
from tests.support import trials
from tests.support.blocks import png
from tests.support.waiting import wait_until

# As they were put, and as the source has them: what is carried is known from what is native.
PUT = {f"n{number}": f"w{number}" for number in range(10)}
TRUE = {name: f"w{10 + number}" for number, name in enumerate(PUT)}
GALLERIES = ["lines", "mixed"]


@pytest.fixture(scope="module", autouse=True)
def _near() -> Iterator[None]:
    with trials.near():
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the settings let sources lie; with a module of the operator's."""
    folder = tmp_path_factory.mktemp("notes")
    true = {**TRUE, "n4": None, "n5": None}
    (folder / "notes_of_the_shop.py").write_text(
        f"from pathlib import Path\nTRUE = {true!r}\n"
        "def item(name):\n"
        "    if name == 'n4':\n"
        "        return (Path(__file__).parent / 'n4.png').read_bytes()\n"
        "    return TRUE.get(name)\n"
    )
    (folder / "n4.png").write_bytes(png(images(20)[14]))
    return folder


@pytest.fixture(scope="module")
def client(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of a gateway that has carried PUT to release 2, in each of GALLERIES."""
    repo = tmp_path_factory.mktemp("published") / "repo"
    published(repo, 1, "both")
    shutil.copytree(repo, repo.with_name("served"))
    published(repo, 2, "texts")
    settings = {
        "item_folders": (place,), "item_functions": {"shop": "notes_of_the_shop:item"},
    }  # fmt: skip
    with (
        pytest.MonkeyPatch.context() as patch,
        running(repo.with_name("served"), repo.with_name("data"), **settings) as gateway,
        Client(gateway.address) as client,
    ):
        patch.syspath_prepend(place)
        for name in GALLERIES:
            client.create_gallery(name)
            assert not client.put_texts(name, PUT)
        publish_stage(repo.with_name("served"), repo)
        client.swap(2)
        yield client


def write(file: Path, texts: dict[str, str]) -> None:
    lines = [json.dumps({"id": name, "text": text, "more": [1]}) for name, text in texts.items()]
    part = file.with_suffix(".part")
    part.write_text("\n".join(lines))
    part.replace(file)


def test_hits_are_read_again_from_a_file_of_lines(client: Client, place: Path) -> None:
    file = place / "notes.jsonl"
    # One is half of a character, one is not there, and two are deleted or put again.
    write(file, {name: text for name, text in TRUE.items() if name != "n3"} | {"n2": "\ud800"})
    client.delete("lines", ["n0"])
    register(client, "lines", f"texts:{file}", a_day=1000)
    found = client.search("lines", text="w17", k=3)
    assert (ids(found)[0], found.hits[0].origin) == ("n7", "re-embedded")
    assert found.hits[0].distance == pytest.approx(0, abs=1e-5)
    left = {"n2", "n3"}
    wait_until(lambda: healed(client, "lines") == set(PUT) - left - {"n0"}, "the rest is not read")
    assert {origins(client, "lines")[name] for name in left} == {"upgraded"}
    told = progress(client, "lines")
    assert (told.carried, told.embedded) == (2, 7)
    with pytest.raises(NotFoundError):
        client.get("lines", "n0")
    # What is put now is what it says, whatever the file does.
    assert not client.put_texts("lines", {"n1": "w19"})
    again = {hit.id: hit for hit in client.search("lines", text="w19", k=10).hits}
    assert again["n1"].origin == "native"
    assert again["n1"].distance == pytest.approx(0, abs=1e-5)
    # A file that is written anew is looked through again.
    write(file, TRUE)
    register(client, "lines", f"texts:{file}", a_day=1001)
    assert ids(client.search("lines", text="w12", k=1)) == ["n2"]


def test_what_the_release_does_not_embed_stays_as_it_is(client: Client) -> None:
    register(client, "mixed", "function:shop", a_day=1000)
    assert ids(client.search("mixed", text="w16", k=1)) == ["n6"]
    left = {"n4", "n5"}
    wait_until(lambda: healed(client, "mixed") == set(PUT) - left, "the rest is not read")
    told = progress(client, "mixed")
    assert (told.embedded, told.carried) == (8, 2)
    assert "embeds no images" in told.last_failure or "lacks 1 items" in told.last_failure


def test_where_lines_may_lie(client: Client, place: Path) -> None:
    (place.parent / "elsewhere.jsonl").write_text('{"id": 1, "text": "w1"}\n')
    (place / "bad.jsonl").write_text('{"id": 1, "text": "w1"}\nno line\n')
    for address, kind, why in (
        (f"texts:{place.parent}/elsewhere.jsonl", ConfigurationError, "item_folders"),
        (f"texts:{place}/../elsewhere.jsonl", ConfigurationError, "item_folders"),
        (f"texts:{place}/none.jsonl", NotFoundError, "cannot be read"),
        (f"texts:{place}/bad.jsonl", InvalidInputError, "bad.jsonl:2: expected a JSON object"),
        (f"folder:{place}/none/{{id}}.txt", NotFoundError, "expected a folder of texts"),
    ):
        with refused(kind, why):
            register(client, "lines", address)


def test_lines_are_found_where_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    texts = {"a": 'grün \u2028 "x"', "b": "天気", "twice": "old", "": "no name"}
    write(file, texts)
    with file.open("a") as more:
        more.write('\n\n{"text": "new", "id": "twice"}\n{"id": 7, "text": 8}')
    items = JsonLinesItems(file)
    for name, text in {**texts, "twice": "new", "7": "8"}.items():
        assert items.read(name, 100) == text
    assert items.read("none", 100) is None
    with pytest.raises(TooLargeError):
        items.read("a", 5)
    write(file, {"a": "x" * 10**6})
    os.utime(file, ns=(1, 1))
    with pytest.raises(TooLargeError):
        items.read("a", 100)
    assert items.read("b", 100) is None


def test_of_a_file_that_grows_what_was_added_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is parsed once, and at most one is again, however often lines come."""
    file = tmp_path / "notes.jsonl"
    write(file, {f"old {number}": f"text {number}" for number in range(100)})
    items = JsonLinesItems(file)
    with file.open("a") as more:
        more.write("\n")
    parsed: list[str] = []

    def counted(line: bytes, where: str) -> TextLine:
        parsed.append(where)
        return parse_text_line(line, where)

    monkeypatch.setattr(sources, "parse_text_line", counted)
    for number in range(20):
        with file.open("a") as more:
            more.write(json.dumps({"id": f"new {number}", "text": f"added {number}"}) + "\n")
        assert items.read(f"new {number}", 100) == f"added {number}"
        assert items.read("old 5", 100) == "text 5"
    assert len([where for where in parsed if str(file) in where]) == 2 * 20
    with file.open("a") as more:
        more.write('{"id": "half", "te')
    assert items.read("old 5", 100) == "text 5" and items.read("half", 100) is None
    with file.open("a") as more:
        more.write('xt": "whole"}\nno line\n')
    with pytest.raises(InvalidInputError, match=r"notes.jsonl:122: expected a JSON object"):
        items.read("half", 100)
    write(file, {"other": "file", **{f"old {number}": "x" * 300 for number in range(200)}})
    assert items.read("half", 100) is None and items.read("old 199", 1000) == "x" * 300


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """Nobody writes to the pipe: who opened it would wait for ever."""
    os.mkfifo(tmp_path / "notes.jsonl")
    for place in (tmp_path / "notes.jsonl", tmp_path):
        with pytest.raises(InvalidInputError, match="expected a regular file"):
            JsonLinesItems(place)


def test_no_line_is_taken_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written anew after the look that said where the line stands."""
    file = tmp_path / "notes.jsonl"
    write(file, {"a": "one", "b": "two"})
    items = JsonLinesItems(file)
    opened = Path.open

    def late(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == file:
            write(file, {"b": "two", "a": "one"})
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", late)
        with pytest.raises(UnavailableError, match="changed while it was read"):
            items.read("a", 100)
    assert items.read("a", 100) == "one"


def test_lines_that_change_places_under_the_last_are_found_again(tmp_path: Path) -> None:
    """Longer, and the line that was seen last is where it was: as if lines were added."""
    file = tmp_path / "notes.jsonl"
    write(file, {"a": "one", "b": "two", "z": "end"})
    items = JsonLinesItems(file)
    write(tmp_path / "other", {"b": "two", "a": "one", "z": "end", "y": "new"})
    file.write_bytes((tmp_path / "other").read_bytes())
    with pytest.raises(UnavailableError, match="changed while it was read"):
        items.read("a", 100)
    assert [items.read(name, 100) for name in "abzy"] == ["one", "two", "end", "new"]
