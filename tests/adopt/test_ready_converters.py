"""The maps of converters/: they open, agree with the committed figures, and fit no other model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bench.adoption import converters, packaged
from bench.adoption.converters import FOLDER, LARGEST, Texts
from bench.adoption.texts import EmbeddedDocuments
from demo.adoption.documents import Document
from nobackfill.adopt.converters import map_to_onnx, open_converter, open_map_for_store
from nobackfill.adopt.joining import load_rank_fusion
from nobackfill.adopt.maps import NEW_MODEL, OLD_MODEL, Map, load_map
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.parquet import MODEL, vectors_to_parquet
from nobackfill.digests import sha256_bytes
from nobackfill.errors import AlreadyExistsError, IncompatibleSpaceError, InvalidInputError
from nobackfill.release.manifest import PublishedFile, parse_converter
from nobackfill.release.publishing.inspection import verify_publication
from nobackfill.vectors import Vectors, normalise
from tests.adopt.command import run_nobackfill
from tests.support.documents import blocks, page, run_script

FIGURES: dict[str, Any] = json.loads((FOLDER / "figures.json").read_text("utf-8"))
ROWS = {row["name"]: row for row in FIGURES["pairs"]}
KEPT = [name for name, row in ROWS.items() if row["kept"]]


def unit(count: int, dim: int, seed: int = 0) -> Vectors:
    return normalise(np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32))


def store(path: Path, vectors: Vectors, model: str | None) -> Path:
    metadata = {} if model is None else {MODEL: model.encode()}
    ids = pa.array([f"item-{row}" for row in range(len(vectors))])
    path.write_bytes(vectors_to_parquet("id", ids, "vector", vectors, metadata))
    return path


def test_the_folders_are_those_of_the_figures_and_small() -> None:
    assert KEPT
    assert sorted(path.parent.name for path in FOLDER.glob("*/card.json")) == sorted(KEPT)
    sizes = {name: sum(path.stat().st_size for path in (FOLDER / name).iterdir()) for name in KEPT}
    assert max(sizes.values()) <= LARGEST
    assert sum(sizes.values()) <= 10_000_000
    for path in FOLDER.rglob("*.npz"):
        with np.load(path, allow_pickle=False) as arrays:
            assert all(arrays[name].dtype.kind in "fU" for name in arrays)


@pytest.mark.parametrize("name", KEPT)
def test_a_map_and_its_card_agree_with_the_figures(name: str) -> None:
    row, mapping = ROWS[name], load_map(FOLDER / name / "map.npz")
    assert (mapping.kind, mapping.digest) == (row["map"]["kind"], row["map"]["digest"])
    assert list(mapping.dims) == row["dims"]
    assert [mapping.facts[OLD_MODEL], mapping.facts[NEW_MODEL]] == row["fingerprints"]
    assert mapping.facts["verdict"] == converters.best_way(row["held_out"]["signs"])
    card = json.loads((FOLDER / name / "card.json").read_text("utf-8"))
    assert card["held_out"] == row["held_out"]
    assert card["measured_on"] == row["measured_on"]
    assert card["measured_on"]["name"] not in card["evidence"]["corpus"]
    signs = row["held_out"]["signs"]
    assert card["loses"] == [
        f"{way}: {figure}" for way in ("map", "both") for figure, sign in signs[way].items()
        if sign == "-"
    ]  # fmt: skip
    data = map_to_onnx(mapping)
    file = PublishedFile(path="converter-1.onnx", sha256=sha256_bytes(data), length=len(data))
    manifest = converters.manifest_of(card, 1, file)
    assert parse_converter(manifest.model_dump_json(), 1) == manifest
    assert [manifest.old.fingerprint, manifest.new.fingerprint] == row["fingerprints"]
    assert [manifest.old.dim, manifest.new.dim] == row["dims"]
    assert manifest.evidence.pairs == row["pairs"]


@pytest.mark.parametrize("name", KEPT)
def test_a_map_applies_to_vectors_of_its_model_alone(name: str, tmp_path: Path) -> None:
    path, dim = FOLDER / name / "map.npz", ROWS[name]["dims"][0]
    vectors, mapping = unit(5, dim), load_map(path)
    with np.load(path) as arrays:
        straight = vectors @ arrays["weight"].T + arrays["bias"]
    np.testing.assert_allclose(mapping(vectors), normalise(straight), atol=1e-6)

    def of_store(model: str | None) -> Map:
        source = open_source(str(store(tmp_path / "old.parquet", vectors, model)))
        return open_map_for_store(source.facts(), path, None, None, None)[0]

    for known in (ROWS[name]["fingerprints"][0], None):
        assert of_store(known).digest == mapping.digest
    with pytest.raises(IncompatibleSpaceError, match="expected vectors of one model"):
        of_store("e" * 64)
    with pytest.raises(InvalidInputError, match=f"expected an array of shape .n, {dim}."):
        mapping(unit(5, dim + 1))


@pytest.mark.parametrize("name", KEPT)
def test_vectors_of_another_norm_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = unit(5, ROWS[name]["dims"][0])
    # Zeros have no direction, and are passed on.
    vectors[0] = 0
    path = store(tmp_path / "old.parquet", 3 * vectors, None)
    words = ("carry", str(path), "--map", str(FOLDER / name / "map.npz"), "--to")
    assert run_nobackfill(*words, "new") == 65
    assert "expected vectors of norm 1, as the map was fitted on, found norms from 3 to 3" in (
        capsys.readouterr().err
    )
    store(path, vectors, None)
    assert run_nobackfill(*words, "newer") == 0


@pytest.mark.parametrize("name", KEPT)
def test_a_rank_fusion_is_of_its_map(name: str) -> None:
    joining, row = load_rank_fusion(FOLDER / name / "joining.npz"), ROWS[name]
    assert joining.map_digest == row["map"]["digest"]
    old, new = (unit(7, dim) for dim in row["dims"])
    odds = joining.match_log_odds(
        old[:2], new[:2], old, load_map(FOLDER / name / "map.npz")(old), {}
    )
    assert odds.shape == (2, 7)
    assert np.isfinite(odds).all()


@pytest.mark.parametrize("name", ROWS)
def test_a_pair_is_kept_by_the_rule(name: str) -> None:
    row = ROWS[name]
    assert row["why"] == converters.reason_to_leave_out(row["held_out"], row["bytes"])
    assert row["kept"] == (row["why"] is None)
    for way, figures in row["held_out"]["differences"].items():
        for figure, (mean, low, high) in figures.items():
            ways = row["held_out"]["ways"]
            assert mean == pytest.approx(ways[way][figure][0] - ways["stay"][figure][0], abs=2e-4)
            sign = "+" if low > 0 else "-" if high < 0 else "="
            assert row["held_out"]["signs"][way][figure] == sign


def test_reasons_to_leave_a_converter_out() -> None:
    def reason(way: str, figure: str, sign: str, size: int = 0) -> str | None:
        signs = {one: dict.fromkeys(converters.FIGURES, "=") for one in ("map", "both", "re-embed")}
        signs[way][figure] = sign
        return converters.reason_to_leave_out({"signs": signs}, size)

    assert reason("map", "R@1", "-") == "never better than the old model"
    assert reason("re-embed", "R@1", "-") == "the new model finds less than the old one"
    assert reason("both", "R@10", "+") is None
    assert reason("map", "agreement@10", "+", LARGEST + 1) == "its files have 3.0 MB"


@pytest.mark.long
def test_the_page_has_the_figures_and_its_command_runs(tmp_path: Path) -> None:
    text = page("converters/README.md")
    assert f"<!-- figures -->\n{converters.page(FIGURES)}<!-- end of figures -->\n" in text
    ((_, command),) = blocks(text, "sh")
    (tmp_path / "converters").symlink_to(FOLDER)
    (name,) = (one for one in KEPT if f"converters/{one}/" in command)
    vectors = unit(12, ROWS[name]["dims"][0])
    store(tmp_path / "old.parquet", vectors, ROWS[name]["fingerprints"][0])
    said = run_script(command, tmp_path, {"SOURCE": "old.parquet"}, 60)
    assert "12 vectors written now, 12 in the store and checked" in said
    source = open_source(str(tmp_path / "_old.embedding_new"))
    migrated = source.read(next(source.windows(100))).vectors
    mapping = load_map(FOLDER / name / "map.npz")
    np.testing.assert_allclose(migrated, mapping(vectors), atol=1e-6)


def test_signed_converters_are_verified_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    maps = tmp_path / "maps"
    converters.sign(maps)
    verify_publication(maps)
    for number, name in enumerate(sorted(KEPT), 1):
        opened = open_converter(f"{maps}#{number}", root=maps / "1.root.json")
        assert opened.mapping.digest == ROWS[name]["map"]["digest"]
        assert opened.manifest.old.fingerprint == ROWS[name]["fingerprints"][0]
    with pytest.raises(AlreadyExistsError, match="publication resign"):
        converters.sign(maps)


def test_figures_are_those_of_a_slow_count() -> None:
    rng = np.random.default_rng(0)
    turn = rng.normal(size=(8, 10)).astype(np.float32)

    def texts(count: int) -> Texts:
        hidden = rng.normal(size=(2, count, 8)).astype(np.float32)
        hidden[1] = hidden[0] + 0.7 * hidden[1]
        noise = 0.3 * rng.normal(size=(2, count, 10)).astype(np.float32)
        return Texts(
            EmbeddedDocuments(*map(normalise, hidden)),
            EmbeddedDocuments(*map(normalise, hidden @ turn + noise)),
        )

    pairs, verdict = converters.fit([texts(60), texts(50)])
    assert len(pairs) == 110
    other = texts(40)
    found = converters.measure(verdict.map, verdict.joining, other)
    assert (found["texts"], found["queries"]) == (40, 40)
    sides = {
        "stay": (other.old.titles, other.old.bodies),
        "map": (other.new.titles, verdict.map(other.old.bodies)),
        "re-embed": (other.new.titles, other.new.bodies),
    }
    ranked = {way: np.argsort(-(asked @ items.T), 1) for way, (asked, items) in sides.items()}
    own = [set(row[:10]) for row in ranked["re-embed"]]
    for way, rows in ranked.items():
        first = np.mean([row[0] == number for number, row in enumerate(rows)])
        ten = np.mean([number in row[:10] for number, row in enumerate(rows)])
        same = np.mean(
            [len(set(row[:10]) & best) / 10 for row, best in zip(rows, own, strict=True)]
        )
        means = [one[0] for one in found["ways"][way].values()]
        assert means == pytest.approx([first, ten, same], abs=1e-4)
    assert found["signs"]["re-embed"]["agreement@10"] == "+"


def test_texts_of_wordnet_and_of_python(tmp_path: Path) -> None:
    gloss = "an entity that has physical existence and may be touched, seen or heard by people"
    for name in ("noun", "verb", "adj", "adv"):
        line = f"00001930 03 n 02 physical_entity 0 thing(a) 0 001 @ 0 n 0000 | {gloss}  \n"
        entries = line if name == "noun" else line.replace("touched", name).replace("entity", name)
        (tmp_path / f"data.{name}").write_text(f"  1 This software and database\n{entries}")
    found = packaged.draw_glosses(tmp_path, 4)
    assert Document("physical entity, thing", gloss) in found.documents
    with pytest.raises(ValueError, match="expected 5 documents, found 4"):
        packaged.draw_glosses(tmp_path, 5)
