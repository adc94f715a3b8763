"""Vectors know the model that made them: the same dimension is not the same space."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from nobackfill.adopt.cli.app import main
from nobackfill.adopt.embedding import open_embedder
from nobackfill.adopt.maps import load_map
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.parquet import MODEL, table_bytes
from nobackfill.digests import space_id
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.writing import NewVectors
from nobackfill.serve import Dual
from nobackfill.server.export import export
from nobackfill.vectors import Vectors
from tests.adopt.made import world, write_parquet
from tests.adopt.models import expected, image_model, text_model, texts
from tests.adopt.test_refusals import refused
from tests.gallery import making
from tests.serve.shop import NewModel, loaded
from tests.support.documents import run_command

MADE = world(120)


def written(path: Path, vectors: Vectors, model: str, rows: list[int] | None = None) -> str:
    path.parent.mkdir(exist_ok=True)
    ids = pa.array([f"item-{row}" for row in rows or range(len(vectors))])
    path.write_bytes(table_bytes("id", ids, "vector", vectors, {MODEL: model.encode()}))
    return str(path)


def test_models_are_named_from_the_pairs_to_what_is_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = MADE.answers.tolist()
    old = written(tmp_path / "old.parquet", MADE.old, "old model")
    new = written(tmp_path / "new.parquet", MADE.new, "new model")
    asked_old = written(tmp_path / "qo.parquet", MADE.queries_old, "old model", answers)
    asked_new = written(tmp_path / "qn.parquet", MADE.queries_new, "new model", answers)
    other = written(tmp_path / "other.parquet", MADE.queries_new, "another model", answers)
    fit = ["fit", "--old", old, "--new", new, "--queries-old", asked_old, "--queries-new"]
    assert "one model" in refused([*fit, other], 65, monkeypatch, capsys)
    run_command(main, ["nobackfill", *fit, asked_new, "--joining", "j.npz"], monkeypatch)
    mapping = load_map(tmp_path / "map.npz")
    assert mapping.facts["old_model"] == "old model"
    assert mapping.facts["new_model"] == "new model"
    carry = ["--map", "map.npz", "--to", "carried"]
    stranger = written(tmp_path / "stranger.parquet", MADE.old, "a third model")
    assert "one model" in refused(["carry", stranger, *carry], 65, monkeypatch, capsys)
    capsys.readouterr()
    run_command(main, ["nobackfill", "carry", old, *carry, "--json"], monkeypatch)
    told = json.loads(capsys.readouterr().out)
    # What the verdict says of a map that is not the best way, to machines, too.
    assert mapping.facts["verdict"] != "map" and told["written"] == 120
    assert any("a map alone was not the best way" in note for note in told["notes"])
    assert open_source(str(tmp_path / "_old.carried")).facts().model == "new model"
    (tmp_path / "shop").mkdir()
    with pytest.raises(IncompatibleSpaceError, match="not the same space"):
        Dual.open(
            loaded(tmp_path / "shop"), Path("map.npz"), Path("j.npz"), Path("n.db"),
            NewModel(fingerprint="another model"),
        )  # fmt: skip
    with pytest.raises(InvalidInputError, match="expected an embedder of items"):
        Dual.open(
            loaded(tmp_path / "shop"), Path("map.npz"), Path("j.npz"), Path("n.db"),
            NewModel(fingerprint="new model", reads="queries"),
        )  # fmt: skip


def test_models_that_read_queries_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By another prefix, or by an encoder with weights of its own, as the old model and the new
    one do: queries are of their model's space, and never taken for items."""
    monkeypatch.chdir(tmp_path)
    asking = text_model(tmp_path / "asking", 3)
    text_model(tmp_path / "old", 0, pooling="mean")
    text_model(tmp_path / "new", 1, prefix="w1 ", query_prefix="query: ")
    bodies = texts(120)
    lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate(bodies)]
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    (tmp_path / "queries.jsonl").write_text("\n".join(lines[:40]))

    def embed(items: str, model: str, out: str, *more: str) -> Vectors:
        words = ["embed", items, "--with", f"{model}/model.onnx", "--out", out, *more]
        run_command(main, ["nobackfill", *words], monkeypatch)
        rows = read_all(open_source(out))
        found: Vectors = rows.vectors[rows.ids.index("7")]
        return found

    embed("items.jsonl", "old", "old-items")
    by_new = embed("items.jsonl", "new", "new-items")
    np.testing.assert_allclose(by_new, expected(tmp_path / "new", f"w1 {bodies[7]}"), atol=1e-6)
    encoder = ("--query-encoder", str(asking))
    asked = embed("queries.jsonl", "old", "old-queries", *encoder)
    np.testing.assert_allclose(asked, expected(tmp_path / "asking", bodies[7]), atol=1e-6)
    asked = embed("queries.jsonl", "new", "new-queries", "--queries")
    np.testing.assert_allclose(asked, expected(tmp_path / "new", f"query: {bodies[7]}"), atol=1e-6)
    for model, out, more, why in (
        ("new", "new-items", ["--queries"], "holds vectors of documents, not of queries"),
        ("new", "new-queries", [], "holds vectors of queries, not of documents"),
        ("old", "old-queries", [], "holds vectors of queries by"),
    ):
        words = ["queries.jsonl", "--with", f"{model}/model.onnx", "--out", out, *more]
        assert why in refused(["embed", *words], 65, monkeypatch, capsys)
    fit = ["fit", "--old", "old-items", "--new"]
    both = ["--queries-old", "old-queries", "--queries-new"]
    carry = ["carry", "old-queries", "--to", "carried", "--map", "map.npz"]
    for words in ([*fit, "new-queries"], ["sample", "old-queries"], carry):
        assert "those of queries" in refused(words, 65, monkeypatch, capsys)
    said = refused([*fit, "new-items", *both, "new-items"], 65, monkeypatch, capsys)
    assert "--queries-new: their model reads queries otherwise" in said
    run_command(main, ["nobackfill", *fit, "new-items", *both, "new-queries"], monkeypatch)
    facts, made_by = load_map(tmp_path / "map.npz").facts, tmp_path / "new" / "model.onnx"
    assert facts["old_model"] == open_embedder(str(tmp_path / "old" / "model.onnx")).fingerprint
    assert facts["new_model"] == open_embedder(str(made_by), queries=True).fingerprint


def test_texts_ask_for_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two encoders of one space, of which only that of images makes the items' vectors."""
    monkeypatch.chdir(tmp_path)
    pictured = image_model(tmp_path / "pictures.onnx")
    (tmp_path / "images").mkdir()
    Image.new("RGB", (4, 4), (255, 0, 0)).save(tmp_path / "images" / "red.png")
    (tmp_path / "asked.jsonl").write_text('{"id": "red.png", "text": "w1"}')
    worded = text_model(tmp_path / "words", 0, table=np.eye(43, 3, dtype=np.float32))
    for items, out, more in (
        ("images", "made", []),
        ("asked.jsonl", "asked", ["--query-encoder", str(worded)]),
    ):
        words = ["embed", items, "--with", str(pictured), "--out", out, *more]
        run_command(main, ["nobackfill", *words], monkeypatch)
    made, asked = open_source("made"), open_source("asked")
    assert made.facts().model == asked.facts().model is not None
    assert read_all(asked).ids == read_all(made).ids


def test_sides_that_name_no_model_are_told_apart_by_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gallery has all items, what was embedded again is a part of it."""
    monkeypatch.chdir(tmp_path)
    gallery = str(write_parquet(tmp_path / "gallery.parquet", MADE.ids, MADE.old))
    again = str(write_parquet(tmp_path / "again.parquet", MADE.ids[:60], MADE.new[:60]))

    def notes(old: str, new: str) -> list[str]:
        run_command(main, ["nobackfill", "fit", "--old", old, "--new", new, "--json"], monkeypatch)
        found: list[str] = json.loads(capsys.readouterr().out)["notes"]
        return found

    right = notes(gallery, again)
    assert any(
        note.startswith("old: ") and "gallery" in note and "24 dims" in note for note in right
    )
    assert any(note.startswith("new: ") and "again" in note and "32 dims" in note for note in right)
    assert not any("wrong way round" in note for note in right)
    (warned,) = (note for note in notes(again, gallery) if "wrong way round" in note)
    assert "60 items more than --old" in warned


def spaces(dim: int, weights: str) -> SpaceSpec:
    """That of a release whose model has these weights."""
    named = space_id(weights * 64, height=8, width=8, dim=dim, metric="cosine", unit=True)
    spec = making.spec(1, dim=dim, metric="cosine", unit=True)
    return replace(spec, space=named, side_space=None, side_dim=0)


def exported(folder: Path, vectors: Vectors, weights: str) -> str:
    """What `gateway export` writes of a gallery with these items."""
    spec = spaces(vectors.shape[1], weights)
    folder.mkdir()
    store = SqliteGallery.create(folder / "gallery.sqlite", spec)
    try:
        store.put([f"item-{row}" for row in range(len(vectors))], [NewVectors(spec.space, vectors)])
        export(store, folder / "out")
    finally:
        store.close()
    return str(folder / "out" / "release-1.parquet")


def test_an_export_of_a_gallery_is_known_by_its_releases_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = (
        exported(tmp_path / name, vectors, name)
        for name, vectors in (("a", MADE.old), ("b", MADE.new))
    )
    other = exported(tmp_path / "c", MADE.old, "c")
    run_command(main, ["nobackfill", "fit", "--old", old, "--new", new], monkeypatch)
    facts = load_map(tmp_path / "map.npz").facts
    assert (facts["old_model"], facts["new_model"]) == (
        spaces(24, "a").space, spaces(32, "b").space,
    )  # fmt: skip
    carry = ["--map", "map.npz", "--to", "carried"]
    assert "one model" in refused(["carry", other, *carry], 65, monkeypatch, capsys)
    assert not list((tmp_path / "c" / "out").glob("_*"))
    run_command(main, ["nobackfill", "carry", old, *carry], monkeypatch)
    carried = tmp_path / "a" / "out" / "_release-1.carried"
    assert open_source(str(carried)).facts().model == spaces(32, "b").space
    # Queries of another release, though of its dimension, and releases mixed in one folder.
    asked = ["--queries-old", other, "--queries-new", new]
    said = refused(["fit", "--old", old, "--new", new, *asked], 65, monkeypatch, capsys)
    assert "--old and --queries-old: expected vectors of one model" in said
    (tmp_path / "c" / "out" / "release-2.parquet").write_bytes(Path(old).read_bytes())
    said = refused(["inspect", str(tmp_path / "c" / "out")], 65, monkeypatch, capsys)
    assert "release-1.parquet and" in said and "one model" in said


def test_a_space_does_not_contradict_the_files_that_it_may_be_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A release's space and the digest of an ONNX file name one model in two ways."""
    monkeypatch.chdir(tmp_path)
    old = exported(tmp_path / "a", MADE.old, "a")
    new = written(tmp_path / "new.parquet", MADE.new, "d" * 64)
    asked_old = written(tmp_path / "qo.parquet", MADE.queries_old, "e" * 64, MADE.answers.tolist())
    asked_new = written(tmp_path / "qn.parquet", MADE.queries_new, "d" * 64, MADE.answers.tolist())
    asked = ["--queries-old", asked_old, "--queries-new", asked_new]
    run_command(main, ["nobackfill", "fit", "--old", old, "--new", new, *asked], monkeypatch)
    facts = load_map(tmp_path / "map.npz").facts
    assert (facts["old_model"], facts["new_model"]) == (spaces(24, "a").space, "d" * 64)
    stranger = written(tmp_path / "stranger.parquet", MADE.old, "e" * 64)
    for source in (old, stranger):
        carry = ["nobackfill", "carry", source, "--map", "map.npz", "--to", "carried"]
        run_command(main, carry, monkeypatch)
    capsys.readouterr()
