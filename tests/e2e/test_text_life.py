"""Notes through two releases of others' text models: what people search, on a gateway and a device.

The second model is worth having: of a note's words it hears the topic better. A map that
`nobackfill fit` finds on some notes passes the gate, and carries those whose texts are gone.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nobackfill.adopt.cli import app
from nobackfill.adopt.embedding.onnx_model import OnnxModel
from nobackfill.adopt.maps import load_adapter
from nobackfill.client import Device
from nobackfill.server.gateway import GatewayServer
from tests.adopt.models import topical
from tests.server.support import Client, ids, running
from tests.support import trials
from tests.support.blocks import manifest
from tests.training.life import run_export

TOPICS, DIM = 6, 16
# Notes whose texts are still there, to fit and to measure on; and those of the galleries.
KNOWN, KEPT = 400, 240


@pytest.fixture(autouse=True)
def _near() -> Iterator[None]:
    with trials.near():
        yield


def notes(count: int, seed: int) -> dict[str, str]:
    """One word of five tells the topic, which stands in the id: `3-17` is of topic 3."""
    rng = np.random.default_rng(seed)
    made = {}
    for number in range(count):
        others = rng.choice(np.arange(TOPICS, 40), 4, replace=False)
        words = [f"w{number % TOPICS}", *(f"w{other}" for other in others)]
        made[f"{number % TOPICS}-{number}"] = " ".join(rng.permutation(words))
    return made


def lines(file: Path, texts: dict[str, str], *, labels: bool = False) -> Path:
    said = [
        {"id": name, "text": text} | ({"label": name[0]} if labels else {})
        for name, text in texts.items()
    ]
    file.write_text("\n".join(map(json.dumps, said)))
    return file


def nobackfill(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def embedded(folder: Path) -> tuple[str, ...]:
    """Embed some notes by both models; return the options of `fit` that name the vectors."""
    known = lines(folder / "known.jsonl", notes(KNOWN, seed=1))
    for name in ("old", "new"):
        model = folder / name / "model.onnx"
        nobackfill("embed", known, "--with", model, "--out", folder / f"{name}-vectors")
    return "--old", str(folder / "old-vectors"), "--new", str(folder / "new-vectors")


def fitted(folder: Path) -> Path:
    """By the commands of docs/releases.md."""
    words = (*embedded(folder), "--out", folder / "map.npz", "--onnx", folder / "upgrade.onnx")
    said = nobackfill("fit", *words)
    assert "upgrade.onnx, for export.py --upgrade" in said
    return folder / "upgrade.onnx"


def look(client: Client | Device) -> float:
    """The share of ten hits that are of the topic asked for, over some questions."""
    found = []
    for name, text in notes(4 * TOPICS, seed=9).items():
        if isinstance(client, Device):
            answer = [hit.id for hit in client.search(text=text, k=10).hits]
        else:
            answer = ids(client.search("g", text=text, k=10))
        found.append(np.mean([one.startswith(f"{name[0]}-") for one in answer]))
    return float(np.mean(found))


def publish(folder: Path, number: int, *more: object) -> None:
    texts = lines(folder / "eval.jsonl", notes(KNOWN, seed=2), labels=True)
    model = folder / ("old" if number == 1 else "new")
    result = run_export(
        folder / "repo", number, "--text-encoder", model, "--eval-texts", texts,
        *map(str, more),
    )  # fmt: skip
    assert result.exit_code == 0, result.output


@pytest.mark.long
def test_a_map_of_others_models_upgrades_notes_and_is_taken_back(tmp_path: Path) -> None:
    topical(tmp_path / "old", TOPICS, DIM, strength=1.0, turned=0)
    topical(tmp_path / "new", TOPICS, DIM, strength=6.0, turned=1)
    publish(tmp_path, 1)
    repo, kept = tmp_path / "repo", notes(KEPT, seed=3)
    with (
        running(repo, tmp_path / "data") as gateway,
        Client(gateway.address) as client,
        Device.create(tmp_path / "g.sqlite", str(repo), repo / "1.root.json") as device,
    ):
        client.create_gallery("g")
        assert not client.put_texts("g", kept)
        assert not device.put_texts(kept)
        before = look(client)
        assert look(device) == pytest.approx(before, abs=0.02)

        publish(tmp_path, 2, "--upgrade", fitted(tmp_path))
        made = manifest(repo, 2)
        assert (made.gate.verdict, made.gate.forced) == ("passed", False)
        cells = {cell.name: cell for cell in made.evidence}
        assert cells["2/1>2"].map > cells["1/1"].map + 0.1
        assert cells["2/1>2"].map == pytest.approx(cells["2/2"].map, abs=0.05)

        client.swap(2)
        device.sync()
        after = look(client)
        assert after > before + 0.1
        assert look(device) == pytest.approx(after, abs=0.02)
        found = client.search("g", text="w3", k=5)
        assert (found.release, {hit.origin for hit in found.hits}) == (2, {"upgraded"})

        assert client.rollback(confirm=True).lost_items == 0
        device.rollback()
        assert look(client) == pytest.approx(before, abs=1e-9)
        assert look(device) == pytest.approx(before, abs=0.02)
        again(gateway, client, after)


def again(gateway: GatewayServer, client: Client, after: float) -> None:
    """A release that was rolled back may be activated again."""
    client.swap(2)
    assert look(client) == pytest.approx(after, abs=1e-9)
    assert gateway.galleries.peek("g").count() == KEPT


@pytest.mark.long
def test_a_map_of_another_model_is_refused(tmp_path: Path) -> None:
    topical(tmp_path / "old", TOPICS, DIM, strength=1.0, turned=0)
    topical(tmp_path / "new", TOPICS, DIM, strength=6.0, turned=1)
    publish(tmp_path, 1)
    upgrade = fitted(tmp_path)
    # Of the same dimension, of another space.
    topical(tmp_path / "new", TOPICS, DIM, strength=6.0, turned=2)
    refused = run_export(
        tmp_path / "repo", 2, "--text-encoder", tmp_path / "new", "--upgrade", upgrade, "--force"
    )
    assert refused.exit_code == 78
    assert "of another new model than the one being published" in refused.output


@pytest.mark.long
def test_a_query_adapter_answers_on_the_first_day(tmp_path: Path) -> None:
    """The old model hears six words in each query that nobody said; its notes are as good as the
    new one's."""
    old = topical(tmp_path / "old", TOPICS, DIM, strength=3.0, turned=0)
    new = topical(tmp_path / "new", TOPICS, DIM, strength=3.0, turned=1)
    noise = " ".join(f"w{number}" for number in range(30, 36))
    old.with_name("model.json").write_text(json.dumps({"query_prefix": f"{noise} "}))
    publish(tmp_path, 1)
    repo, kept = tmp_path / "repo", notes(KEPT, seed=3)
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        assert not client.put_texts("g", kept)
        before = look(client)

        vectors = embedded(tmp_path)
        for name in ("adapter.onnx", "adapter.npz"):
            file = tmp_path / name
            nobackfill("fit", *vectors, "--out", tmp_path / "map.npz", "--adapter", file)
        publish(tmp_path, 2, "--adapter", tmp_path / "adapter.onnx")
        assert manifest(repo, 2).gate.verdict == "passed"
        client.swap(2)
        assert look(client) > before + 0.1
        # numpy alone: the new model's query, mapped to vectors of the old one.
        items, adapter = OnnxModel(old).embed([*kept.values()]), load_adapter(file)
        for text in notes(5, seed=9).values():
            query = adapter(OnnxModel(new).embed([text]))
            answer = client.search("g", text=text, k=10)
            assert {hit.origin for hit in answer.hits} == {"direct"}
            distances = 1 - (items @ query[0])
            nearest = np.sort(distances)[:10]
            np.testing.assert_allclose([hit.distance for hit in answer.hits], nearest, atol=2e-3)
        assert client.rollback(confirm=True).lost_items == 0
        assert look(client) == pytest.approx(before, abs=1e-9)
