"""Notes on a device: texts added, found, carried over by a sync, brought back by a rollback."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from nobackfill.client import Device
from nobackfill.client.cli.main import run_line
from nobackfill.errors import InvalidInputError, NoEncoderError
from nobackfill.release import probes
from nobackfill.release.publishing.publish import publish
from tests.release.test_tokenizers import ENDLESS, HARD
from tests.support import edge, text_releases, trials
from tests.support.blocks import manifest, png
from tests.support.releases import images


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    with trials.near():
        publish(
            tmp_path / "repo",
            text_releases.draft(tmp_path / "drafts", 1, reads="both", asking=True),
        )
    return tmp_path / "repo"


def bring_second(repo: Path, reads: text_releases.Reads) -> None:
    with trials.near():
        drafts = repo.with_name("drafts")
        publish(repo, text_releases.draft(drafts, 2, [manifest(repo, 1)], reads=reads))


def found(device: Device, text: str) -> str:
    return device.search(text=text, k=1).hits[0].id


def test_notes_follow_a_release_and_come_back(repo: Path, tmp_path: Path) -> None:
    with (
        trials.near(),
        Device.create(tmp_path / "g.sqlite", str(repo), repo / "1.root.json") as device,
    ):
        assert not device.put_texts({f"n{n}": f"w{n}" for n in range(10)}, {"n3": {"tag": "three"}})
        assert not device.put({"p": png(images(20)[12])})
        assert device.search(text="w3", where={"tag": "three"}).hits[0].id == "n3"
        # As an image does, an unchanged text keeps what it has.
        assert not device.put_texts({"n3": "w3"})
        assert device.search(text="w3", where={"tag": "three"}).hits[0].id == "n3"
        # Either finds what the other put.
        assert found(device, "w12") == "p"
        assert device.search(image=png(images(20)[4]), k=1).hits[0].id == "n4"
        odd = {"i" * 2**16: "w14", "nul\0": "w15"}
        refused = device.put_texts({"blank": " ", "long": "w1" * 2**16, **odd, "n3": "w13"})
        assert set(refused) == {"blank", "long", *odd}
        assert found(device, "w13") == "n3"
        # The model of queries takes w18 for w19, that of documents does not.
        assert not device.put_texts({"n19": "w19"})
        assert found(device, "w18") == "n19"

        bring_second(repo, "texts")
        device.sync()
        answer = device.search(text="w5", k=1)
        assert (answer.release, answer.hits[0].id, answer.hits[0].origin) == (2, "n5", "upgraded")
        with pytest.raises(NoEncoderError, match="release 2 embeds no images; send a text"):
            device.search(image=png(images(1)[0]))
        with pytest.raises(NoEncoderError, match="embeds no images"):
            device.put({"q": png(images(1)[0])})
        # In both spaces, as long as a rollback may come.
        assert not device.put_texts({"late": "w17"})
        assert found(device, "w17") == "late"
        device.rollback()
        assert found(device, "w17") == "late"
        assert device.put({"q": png(images(1)[0])}) == {}


def run(gallery: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and stdout of a command."""
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit) as ended:
        run_line(["--gallery", str(gallery), *arguments])
    return int(ended.value.code or 0), said.getvalue()


def test_commands_take_texts(repo: Path, tmp_path: Path) -> None:
    with trials.near():
        gallery = edge.make_device(repo, tmp_path / "g.sqlite")
    lines: list[dict[str, object]] = [
        {"id": "a", "text": "w1", "year": 2026}, {"id": "b", "text": ""}, {"id": 3, "text": "w2"},
    ]  # fmt: skip
    file = tmp_path / "notes.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in lines))
    code, said = run(gallery, "add", "--texts", str(file))
    assert (code, said) == (65, "2 added, 1 refused; 2 items\n")
    assert run(gallery, "search", "--text", "w2", "-k", "1")[1].startswith("3 ")
    year = run(gallery, "search", "--text", "w2", "-k", "1", "--where", "year=2026")
    assert year[1].startswith("a ")
    assert run(gallery, "search", "--text", "")[0] == 65
    assert run(gallery, "search", "--text", "w1", "--id", "a")[0] == 2
    assert run(gallery, "add", "--texts", str(tmp_path / "none.jsonl"))[0] == 66
    assert run(gallery, "add", "--texts", str(file), str(tmp_path))[0] == 2


def bring_endless(repo: Path, number: int) -> None:
    """A release whose tokenizer crashes on some texts: by a publisher who tried less than we do."""
    sources = [manifest(repo, one) for one in range(1, number)]
    drafts = repo.with_name("drafts")
    with trials.near(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "_LONG_TEXTS", [])
        publish(repo, text_releases.draft(drafts, number, sources, splits=ENDLESS))


def test_a_tokenizer_that_crashes_is_held_back(repo: Path, tmp_path: Path) -> None:
    with (
        trials.near(),
        Device.create(tmp_path / "g.sqlite", str(repo), repo / "1.root.json") as device,
    ):
        assert not device.put_texts({f"n{n}": f"w{n}" for n in range(10)})
        bring_endless(repo, 2)
        report = device.sync()
        assert (report.state, report.release) == ("behind", 1)
        assert "a sound tokenizer.json" in report.notes[0]
        assert found(device, "w3") == "n3"


def test_a_text_that_crashes_its_tokenizer_is_refused_alone(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    bring_endless(repo, 1)
    with trials.near(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "_LONG_TEXTS", [])
        device = Device.create(tmp_path / "g.sqlite", str(repo), repo / "1.root.json")
    with device:
        refused = device.put_texts({"a": "w1", "hard": HARD, "b": "w2"})
        assert refused.keys() == {"hard"} and "retry-limit" in refused["hard"]
        assert found(device, "w2") == "b"
        with pytest.raises(InvalidInputError, match="retry-limit"):
            device.search(text=HARD)
