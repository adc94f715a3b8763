"""Galleries of texts: put, searched, carried over by each rollout; and what is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from grpc import RpcError
from typer.testing import CliRunner

from nobackfill.errors import InvalidInputError, NoEncoderError, PreconditionError, TooLargeError
from nobackfill.release import probes
from nobackfill.release.manifest import parse_manifest
from nobackfill.release.publishing.publish import publish
from nobackfill.server.bulk import fill
from nobackfill.server.cli import galleries  # noqa: F401 - puts its command into app
from nobackfill.server.cli.app import app
from nobackfill.text import LARGEST_TEXT_BYTES
from nobackfill.v1 import gallery_pb2, search_pb2
from tests.adopt.models import WORDS
from tests.release.test_tokenizers import ENDLESS, HARD
from tests.server.process import triton_venv
from tests.server.support import Client, ids, images, refused, running
from tests.support import text_releases, trials
from tests.support.blocks import manifest, png
from tests.support.text_releases import Reads

NOTES = {f"n{number}": f"w{number}" for number in range(20)}


@pytest.fixture(scope="module", autouse=True)
def _near() -> Iterator[None]:
    with trials.near():
        yield


def published(
    repo: Path, number: int, reads: Reads, *, directly: bool = False, asking: bool = False
) -> None:
    sources = [manifest(repo, n) for n in range(1, number)]
    made = text_releases.draft(
        repo.with_name("drafts"), number, sources, reads=reads,
        directly=sources if directly else (), asking=asking,
    )  # fmt: skip
    publish(repo, made)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Publications: texts alone and what follows them; both; nothing but vectors, then texts."""
    found = {}
    for name, (first, second, directly) in {
        "texts": ("texts", "texts", False),
        "direct": ("texts", "texts", True),
        "both": ("both", "both", False),
        "nothing": ("nothing", "texts", False),
        "asking": ("both", "both", False),
    }.items():
        repo, asking = tmp_path_factory.mktemp(name) / "repo", name == "asking"
        published(repo, 1, first, asking=asking)  # type: ignore[arg-type]
        shutil.copytree(repo, repo.with_name("stage1"))
        published(repo, 2, second, directly=directly, asking=asking)  # type: ignore[arg-type]
        found[name] = repo
    return found


@pytest.fixture
def begun(request: pytest.FixtureRequest, kinds: dict[str, Path], tmp_path: Path) -> Path:
    """A publication of release 1, of the kind that the test names."""
    shutil.copytree(kinds[request.param].with_name("stage1"), tmp_path / "repo")
    return tmp_path / "repo"


def bring(repo: Path, kinds: dict[str, Path], name: str) -> None:
    from tests.server.conftest import publish_stage

    publish_stage(repo, kinds[name])


@pytest.fixture(scope="module")
def notes(kinds: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a gateway with a gallery `g` of NOTES."""
    folder = tmp_path_factory.mktemp("notes")
    shutil.copytree(kinds["texts"].with_name("stage1"), folder / "repo")
    with running(folder / "repo", folder / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        assert not client.put_texts("g", NOTES, {"n3": {"tag": "three"}})
        yield client


def test_texts_are_found_by_texts(notes: Client) -> None:
    found = notes.search("g", text="w3", k=3)
    assert ids(found)[0] == "n3"
    assert found.hits[0].distance < 1e-4
    assert found.hits[0].metadata == {"tag": "three"}
    assert not notes.put_texts("g", {"n3": "w3"})
    assert ids(notes.search("g", text="w3", where={"tag": "three"})) == ["n3"]
    asked = [search_pb2.Query(text=text) for text in ("w5", "", "w7")]
    batch = search_pb2.SearchBatchRequest(gallery="g", queries=asked, k=1)
    answers = notes.raw.searches.SearchBatch(batch, timeout=60).responses
    assert [ids(one) for one in answers] == [["n5"], [], ["n7"]]
    assert "at least one visible character" in answers[1].error
    assert notes.get_release(1).embeds_texts
    assert not notes.get_release(1).embeds_images


@pytest.mark.parametrize(
    "text",
    ["w4\0w4", "w4 " * 1000, "w4 \U0001f642 \u200b", "\u202ew4", "w4" + "\ufffd" * 9],
)
def test_odd_texts_are_answered(notes: Client, text: str) -> None:
    assert len(notes.search("g", text=text, k=2).hits) == 2
    assert not notes.put_texts("g", {"odd": text})
    assert notes.delete("g", ["odd"]) == 1 and notes.count("g") == len(NOTES)


@pytest.mark.parametrize("text", ["", "  \n\t", "\0\0", "\u200b"])
def test_a_text_without_anything_to_read_is_refused(notes: Client, text: str) -> None:
    query = search_pb2.Query(text=text)
    with pytest.raises(RpcError, match="at least one visible character"):
        notes.raw.ask(query)
    response = notes.raw.put([gallery_pb2.PutItem(id="x", text=text)])
    assert "at least one visible character" in response.errors[0].message


def test_texts_are_bounded(notes: Client) -> None:
    long = "w1 " * (10 * 2**20 // 3)
    with pytest.raises(TooLargeError, match="cut it into passages"):
        notes.search("g", text=long)
    with pytest.raises(RpcError, match=f"at most {LARGEST_TEXT_BYTES} bytes"):
        notes.raw.ask(search_pb2.Query(text=long))
    refused = notes.put_texts("g", {"long": long})
    assert "passages" in refused["long"]
    response = notes.raw.put([gallery_pb2.PutItem(id="long", text=long)])
    assert "passages" in response.errors[0].message
    many = [gallery_pb2.PutItem(id=f"m{n}", text="w1 " * 20_000) for n in range(80)]
    with pytest.raises(RpcError, match="send fewer at a time"):
        notes.raw.put(many)
    with pytest.raises(InvalidInputError, match="half of a character"):
        notes.search("g", text="w1 \ud800")
    assert notes.count("g") == len(NOTES)


def test_a_release_of_texts_refuses_images(notes: Client) -> None:
    with pytest.raises(NoEncoderError, match="embeds no images; send a text"):
        notes.find(images(1)[0])
    assert "embeds no images" in notes.put("g", {"x": png(images(1)[0])})["x"]


def test_a_release_of_images_refuses_texts(shared: Client, gallery: str) -> None:
    with pytest.raises(NoEncoderError, match="embeds no texts; send an image"):
        shared.search(gallery, text="w1")
    assert "embeds no texts" in shared.put_texts(gallery, {"x": "w1"})["x"]


def test_a_file_of_texts_is_put(notes: Client, tmp_path: Path) -> None:
    notes.create_gallery("file")
    lines = [
        {"id": "a", "text": "w1", "year": 2026},
        {"id": "b", "text": ""},
        {"id": 3, "text": "w2"},
    ]
    path = tmp_path / "notes.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in lines) + "\n\n")
    done = fill(notes, "file", str(path))
    assert (done.stored_count, list(done.refusals)) == (2, ["b"])
    assert notes.get("file", "a").metadata == {"year": 2026}
    path.write_text('{"id": "a", "text": "w1"}\n{"id": "b"}\n')
    done = fill(notes, "file", str(path))
    assert (done.stored_count, list(done.refusals)) == (1, [f"{path}:2"])
    # A message cannot hold these; they ended the command with a traceback.
    odd: list[dict[str, object]] = [{"n": 10**400}, {"n": "\ud800"}, {"\ud800": 1}]
    lines = [{"id": f"odd {n}", "text": "w1", **one} for n, one in enumerate(odd)]
    path.write_text("\n".join(map(json.dumps, [*lines, {"id": "last", "text": "w1"}])))
    done = fill(notes, "file", str(path))
    assert (done.stored_count, sorted(done.refusals)) == (1, ["odd 0", "odd 1", "odd 2"])


def test_bad_lines_of_a_file_are_named_and_the_others_stored(notes: Client, tmp_path: Path) -> None:
    """One ended a file of a thousand where it stood."""
    lines = [json.dumps({"id": f"line {number}", "text": "w1"}) for number in range(100)]
    lines[40] = '{"id": "cut", "text": "w'
    lines[50] = '{"id": NaN, "text": "w1"}'
    lines[60] = '{"id": true, "text": "w1"}'
    lines[70] = '{"id": "endless", "text": Infinity}'
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(lines))
    done = fill(notes, "g", str(file))
    assert done.stored_count == 96
    assert {name.rpartition(":")[2] for name in done.refusals} == {"41", "51", "61", "71"}
    assert all("expected a JSON object" in reason for reason in done.refusals.values())
    words = ["put", "g", str(file), f"--server={notes.address}", "--json"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 65 and "lines.jsonl:41" in told.output
    notes.delete("g", [f"line {number}" for number in range(100)])


@pytest.mark.long
@pytest.mark.parametrize(
    ("begun", "rollout"),
    [("texts", "cutover"), ("texts", "dual"), ("direct", "direct")],
    indirect=["begun"],
)
def test_each_rollout_carries_texts(
    begun: Path, kinds: dict[str, Path], rollout: str, tmp_path: Path
) -> None:
    with running(begun, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_texts("g", {name: text for name, text in NOTES.items() if name != "n19"})
        bring(begun, kinds, "direct" if rollout == "direct" else "texts")
        for event in client.activate(2, rollout=rollout):
            # Wholly by the old model, or by the new one; found by each, and put, at any time.
            assert ids(client.search("g", text="w6", k=1)) == ["n6"], event
            assert not client.put_texts("g", {"n19": "w19"})
        found = client.search("g", text="w6", k=1)
        assert (found.release, ids(found)) == (2, ["n6"])
        assert found.hits[0].distance < 1e-4
        assert ids(client.search("g", text="w19", k=1)) == ["n19"]
        assert client.rollback(confirm=True).lost_items == 0
        assert ids(client.search("g", text="w19", k=1)) == ["n19"]


@pytest.mark.long
@pytest.mark.parametrize("begun", ["both"], indirect=True)
def test_two_encoders_of_one_space(begun: Path, kinds: dict[str, Path], tmp_path: Path) -> None:
    pictures = images(20)
    with running(begun, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(pictures[:10])
        assert not client.put_texts("g", {f"i{n}": f"w{n}" for n in range(10, 20)})
        bring(begun, kinds, "both")
        for _ in (1, 2):
            assert ids(client.search("g", text="w4", k=1)) == ["i4"]
            assert ids(client.find(pictures[14], k=1)) == ["i14"]
            answers = client.search_batch("g", images=[png(pictures[3])], texts=["w4"], k=1)
            assert [ids(one) for one in answers] == [["i3"], ["i4"]]
            client.swap(2)


@pytest.mark.long
@pytest.mark.parametrize("begun", ["nothing"], indirect=True)
def test_a_release_of_vectors_alone(begun: Path, kinds: dict[str, Path], tmp_path: Path) -> None:
    new = kinds["nothing"]
    words = read_words(new)
    with running(begun, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        space = client.get_release(1).space
        with pytest.raises(NoEncoderError, match="release 1 embeds no images; send an embedding"):
            client.find(images(1)[0])
        old = np.roll(words, -8, axis=1)
        put = [vectors(f"n{n}", space, old[n]) for n in range(20)]
        assert not client.put_items("g", put)
        assert ids(client.search("g", embeddings={space: old[5].tolist()}, k=1)) == ["n5"]
        bring(begun, kinds, "nothing")
        client.swap(2)
        assert ids(client.search("g", text="w5", k=1)) == ["n5"]


@pytest.mark.long
def test_a_tokenizer_that_crashes_ends_no_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its release FAILS; where it was not found out, the text is refused and others are taken."""
    repo = tmp_path / "repo"
    published(repo, 1, "texts")
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        assert not client.put_texts("g", {"n3": "w3"})
        with monkeypatch.context() as patch:
            patch.setattr(probes, "_LONG_TEXTS", [])
            sources = [manifest(repo, 1)]
            publish(repo, text_releases.draft(tmp_path / "drafts", 2, sources, splits=ENDLESS))
        with refused(PreconditionError, "sound tokenizer"):
            client.swap(2)
        assert client.states()[2] == "FAILED"
        with monkeypatch.context() as patch:
            patch.setattr(probes, "_LONG_TEXTS", [])
            client.swap(2)
        why = client.put_texts("g", {"n4": "w4", "hard": HARD, "n5": "w5"})
        assert why.keys() == {"hard"}
        with pytest.raises(InvalidInputError, match="retry-limit"):
            client.search("g", text=HARD)
        assert ids(client.search("g", text="w5", k=1)) == ["n5"]


def read_words(repo: Path) -> np.ndarray:
    """Release 2's vectors of w0 to w19."""
    from nobackfill.release.text_models import open_text_encoder

    words = [word for word in WORDS if word.startswith("w")][:20]
    return open_text_encoder(repo, manifest(repo, 2)).run(words, "document")


def vectors(name: str, space: str, values: np.ndarray) -> gallery_pb2.PutItem:
    item = gallery_pb2.PutItem(id=name)
    item.vectors.embedding.space = space
    item.vectors.embedding.values = values.astype("<f4").tobytes()
    return item


@pytest.mark.long
@pytest.mark.skipif(triton_venv() is None, reason="no Triton here: run make setup")
@pytest.mark.parametrize("begun", ["asking"], indirect=True)
def test_triton_reads_texts(begun: Path, kinds: dict[str, Path], tmp_path: Path) -> None:
    given = {"triton": None, "triton_venv": triton_venv()}
    with (
        running(begun, tmp_path / "data", **given) as gateway,
        Client(gateway.address) as client,
    ):
        client.create_when_idle("g")
        assert not client.put_texts("g", NOTES)
        check_asking(client)
        assert ids(client.find(images(20)[3], k=1)) == ["n3"]
        bring(begun, kinds, "asking")
        client.swap(2)
        check_asking(client)
        assert client.search("g", text="w3", k=1).release == 2


def check_asking(client: Client) -> None:
    """The model of queries takes w18 for w19, that of documents does not."""
    for asked, found in (("w3", "n3"), ("w18", "n19"), ("w19", "n18")):
        assert ids(client.search("g", text=asked, k=1)) == [found]


@pytest.mark.long
@pytest.mark.parametrize("begun", ["asking"], indirect=True)
def test_a_model_of_their_own_reads_queries(
    begun: Path, kinds: dict[str, Path], tmp_path: Path
) -> None:
    with running(begun, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        assert not client.put_texts("g", NOTES)
        check_asking(client)
        bring(begun, kinds, "asking")
        client.swap(2)
        check_asking(client)


def test_manifests_of_images_stay_readable_by_older_readers(one: object) -> None:
    """Nothing new is written where nothing new is there."""
    from nobackfill.release.manifest import Manifest

    assert isinstance(one, Manifest)
    written = json.loads(one.model_dump_json())
    assert written["format"] == 1
    assert "text_encoder" not in written
    assert set(written["embedder"]) == {"file", "height", "width", "dim", "metric", "unit"}
    assert parse_manifest(one.model_dump_json()) == one
