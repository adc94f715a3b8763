"""Vectors know the model that made them: the same dimension is not the same space."""

import importlib
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pytest
from PIL import Image

from nobackfill.adopt.cli import main
from nobackfill.adopt.embedding import open_embedder
from nobackfill.adopt.embedding.vector_folder import ItemList, embed_into
from nobackfill.adopt.maps import load_map
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.parquet import MODEL, vectors_to_parquet
from nobackfill.digests import space_id
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
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


def stored_at(path: Path, location: str | None, *, subgraph: bool = False) -> Path:
    """The model of `path` with its weights in files of their own: one by name, or one a tensor."""
    model = onnx.load(path)
    if subgraph:
        # The table stands in both branches of a condition, not in the graph.
        table = model.graph.initializer.pop()
        node = onnx.helper.make_node("Constant", [], ["table_"], value=table)
        output = onnx.helper.make_tensor_value_info("table_", table.data_type, table.dims)
        branch = onnx.helper.make_graph([node], "branch", [], [output])
        condition = onnx.numpy_helper.from_array(np.array(True), "condition")
        model.graph.initializer.append(condition)
        choice = onnx.helper.make_node(
            "If", ["condition"], ["table"], then_branch=branch, else_branch=branch
        )
        model.graph.node.insert(0, choice)
        for held in model.graph.node[0].attribute:
            tensor = held.g.node[0].attribute[0].t
            onnx.external_data_helper.set_external_data(tensor, location or "inner.bin")
            (path.parent / (location or "inner.bin")).write_bytes(tensor.raw_data)
            tensor.ClearField("raw_data")
        onnx.save(model, path)
        return path
    together = location is not None
    (path.parent / (location or "x")).parent.mkdir(exist_ok=True)
    onnx.save_model(
        model, path, save_as_external_data=True, all_tensors_to_one_file=together,
        location=location, size_threshold=0,
    )  # fmt: skip
    return path


@pytest.mark.parametrize("location", ["weights.bin", "below/weights.bin", "model.onnx_data", None])
def test_weights_beside_are_of_the_fingerprint_wherever_they_are(
    location: str | None, tmp_path: Path
) -> None:
    """Of one graph, with files of one name: None is a file that is named as its tensor."""
    first, again, other = (
        stored_at(text_model(tmp_path / name, seed, pooling="mean"), location)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first.read_bytes() == other.read_bytes()
    named = [open_embedder(str(path)).fingerprint for path in (first, again, other)]
    assert named[0] == named[1] != named[2]
    items = ItemList("text", ["1"], ["w1"])
    embed_into(tmp_path / "out", items, open_embedder(str(first)))
    with pytest.raises(IncompatibleSpaceError, match="another model"):
        embed_into(tmp_path / "out", ItemList("text", ["2"], ["w1"]), open_embedder(str(other)))


def test_weights_of_a_subgraph_are_of_the_fingerprint(tmp_path: Path) -> None:
    first, other = (
        stored_at(text_model(tmp_path / name, seed, pooling="mean"), None, subgraph=True)
        for name, seed in (("a", 1), ("b", 2))
    )
    assert first.read_bytes() == other.read_bytes()
    assert open_embedder(str(first)).fingerprint != open_embedder(str(other)).fingerprint


@pytest.mark.parametrize("beside", [None, "model.onnx_data"])
def test_models_of_before_have_the_fingerprint_of_before(
    beside: str | None, tmp_path: Path
) -> None:
    path = text_model(tmp_path / "m", 1, pooling="cls", max_length=9)
    files = [path, path.parent / "tokenizer.json"]
    if beside is not None:
        stored_at(path, beside)
        files.insert(1, path.parent / beside)
    declared = {
        "tokenizer": "tokenizer.json", "prefix": "", "max_length": 9, "pooling": "cls",
        "output": None, "normalise": True, "size": None, "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    parts = [sha256(file.read_bytes()).hexdigest() for file in files]
    parts.append(json.dumps(declared, sort_keys=True))
    wanted = sha256("\n".join(parts).encode()).hexdigest()
    assert open_embedder(str(path)).fingerprint == wanted


@pytest.mark.parametrize("place", ["../weights.bin", "/weights.bin", "below/../../weights.bin"])
def test_weights_outside_of_the_models_folder_are_refused(place: str, tmp_path: Path) -> None:
    path = stored_at(text_model(tmp_path / "m", 1), "weights.bin")
    model = onnx.load(path, load_external_data=False)
    (path.parent / "weights.bin").rename(tmp_path / "weights.bin")
    for elsewhere, words in (
        (place, "in the folder of the ONNX file"),
        ("gone.bin", "'gone.bin' is not in its folder"),
    ):
        for tensor in model.graph.initializer:
            tensor.external_data[0].value = elsewhere
        onnx.save(model, path)
        with pytest.raises(InvalidInputError, match=words):
            open_embedder(str(path))


def test_a_function_may_name_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By FINGERPRINT: a comment does not make another model then, and other weights do."""
    monkeypatch.chdir(tmp_path)

    def named(number: int, declared: str, more: str = "") -> str:
        text = f"{more}FINGERPRINT = {declared}\ndef embed(items): return [[1.0]] * len(items)\n"
        Path(f"named_{number}.py").write_text(text)
        importlib.invalidate_caches()
        return open_embedder(f"named_{number}:embed").fingerprint

    first = named(1, "'minilm 1'")
    assert first == named(2, "'minilm 1'", "# A comment.\n") != named(3, "'minilm 2'")
    # A digest is the fingerprint: that of an ONNX file of the same model, say.
    assert named(4, repr("a" * 64)) == "a" * 64
    assert len(first) == 64
    for number, wrong in ((5, "7"), (6, "''")):
        with pytest.raises(
            InvalidInputError, match="FINGERPRINT in the function's module to be a text"
        ):
            named(number, wrong)


def written(path: Path, vectors: Vectors, model: str, rows: list[int] | None = None) -> str:
    path.parent.mkdir(exist_ok=True)
    ids = pa.array([f"item-{row}" for row in rows or range(len(vectors))])
    path.write_bytes(vectors_to_parquet("id", ids, "vector", vectors, {MODEL: model.encode()}))
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
    verdict = f"the verdict of map.npz was {mapping.facts['verdict']}: "
    assert any(note.startswith(verdict) for note in told["notes"])
    assert open_source(str(tmp_path / "_old.carried")).facts().model == "new model"
    (tmp_path / "shop").mkdir()
    with pytest.raises(IncompatibleSpaceError, match="expected vectors of one model"):
        Dual.open(
            loaded(tmp_path / "shop"), Path("map.npz"), Path("j.npz"), Path("n.db"),
            NewModel(fingerprint="another model"),
        )  # fmt: skip
    with pytest.raises(InvalidInputError, match="expected one that embeds items"):
        Dual.open(
            loaded(tmp_path / "shop"), Path("map.npz"), Path("j.npz"), Path("n.db"),
            NewModel(fingerprint="new model", text_role="queries"),
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
        ("new", "new-items", ["--queries"], "vectors of queries, found vectors of documents"),
        ("new", "new-queries", [], "vectors of documents, found vectors of queries"),
        ("old", "old-queries", [], "found vectors of queries by"),
    ):
        words = ["queries.jsonl", "--with", f"{model}/model.onnx", "--out", out, *more]
        assert why in refused(["embed", *words], 65, monkeypatch, capsys)
    fit = ["fit", "--old", "old-items", "--new"]
    both = ["--queries-old", "old-queries", "--queries-new"]
    carry = ["carry", "old-queries", "--to", "carried", "--map", "map.npz"]
    for words in ([*fit, "new-queries"], ["sample", "old-queries"], carry):
        assert "got vectors of queries" in refused(words, 65, monkeypatch, capsys)
    said = refused([*fit, "new-items", *both, "new-items"], 65, monkeypatch, capsys)
    assert "--queries-new: the model embeds queries and items differently" in said
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
    assert any("stay as busy as they were" in note for note in right)
    (warned,) = (note for note in notes(again, gallery) if "wrong way round" in note)
    assert "60 items that --old lacks" in warned


def spaces(dim: int, weights: str) -> SpaceSpec:
    """That of a release whose model has these weights."""
    named = space_id(weights * 64, height=8, width=8, dim=dim, metric="cosine", unit_norm=True)
    spec = making.spec(1, dim=dim, metric="cosine", unit=True)
    return replace(spec, space=named, side_space=None, side_dim=0)


def exported(folder: Path, vectors: Vectors, weights: str) -> str:
    """What `gateway data export` writes of a gallery with these items."""
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
