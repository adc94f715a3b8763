"""Converters: published by who has pairs, used by who has none, and what strangers make of them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import numpy_helper

from nobackfill.adopt.cli import main
from nobackfill.adopt.converters import (
    map_from_onnx,
    map_to_onnx,
    open_converter,
    publish_map_as_converter,
    read_card,
)
from nobackfill.adopt.crossfit import CONVERTER, CORRECTED, correct_converter, cross_fit_candidates
from nobackfill.adopt.embedding.embedder import open_embedder
from nobackfill.adopt.judgement import sample_item_queries
from nobackfill.adopt.maps import Map, fit_maps, load_map
from nobackfill.adopt.pairs import Pairs, match_by_id
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.parquet import MODEL, vectors_to_parquet
from nobackfill.adopt.verdict import Cost, decide
from nobackfill.errors import InvalidInputError, NotFoundError, UnfitError, VerificationError
from nobackfill.onnx_runtime import onnxruntime
from nobackfill.release.publishing.inspection import list_releases, verify_publication
from nobackfill.release.publishing.renew import withdraw
from nobackfill.release.trust.trust import TrustedFolder, converter_numbers
from nobackfill.vectors import Vectors
from tests.adopt.made import world
from tests.adopt.models import text_model, texts
from tests.adopt.test_refusals import refused
from tests.support import crash
from tests.support.blocks import publish_block_release
from tests.support.documents import run_command

Run = Callable[..., None]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, 120 texts by both, a card."""
    top = tmp_path_factory.mktemp("converters")
    for name, seed in (("old", 0), ("new", 1)):
        model = open_embedder(str(text_model(top / name, seed)))
        rows = texts(120)
        write(top / f"{name}.parquet", model.embed(rows), model.fingerprint)
    said = {
        name: {"name": f"{name} model", "licence": "Apache-2.0", "model": f"{name}/model.onnx"}
        for name in ("old", "new")
    }
    (top / "card.json").write_text(
        json.dumps({**said, "corpus": "words", "corpus_licence": "CC0-1.0"})
    )
    return top


@pytest.fixture
def run(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in a folder where `given` is; its user trusts nothing yet."""
    shutil.copytree(given, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return lambda *words: run_command(main, ["nobackfill", *words], monkeypatch)


PAIRS = ("--old", "old.parquet", "--new", "new.parquet")
PUBLISH = ("converter", "publish", "maps", "--card", "card.json", *PAIRS)
CARRY = ("carry", "old.parquet", "--to", "carried", "--release", "maps")
ROOT = ("--root", "maps/1.root.json")


def write(path: Path, vectors: Vectors, model: str | None) -> None:
    said = {} if model is None else {MODEL: model.encode()}
    ids = pa.array([f"item-{row}" for row in range(len(vectors))])
    path.write_bytes(vectors_to_parquet("id", ids, "vector", vectors, said))


@pytest.mark.long
@pytest.mark.slow
def test_who_has_no_pairs_carries_by_what_another_published(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*PUBLISH)
    run(*CARRY, *ROOT)
    said = capsys.readouterr().out
    assert "old model (Apache-2.0) to new model (Apache-2.0), fitted to 120 pairs of words" in said
    source = open_source("_old.carried")
    window = next(source.windows(1000))
    mapping = load_map(tmp_path / "map.npz")
    stored = open_source("old.parquet").read(next(open_source("old.parquet").windows(1000)))
    np.testing.assert_allclose(source.read(window).vectors, mapping(stored.vectors), atol=1e-6)
    assert source.facts().model == open_embedder("new/model.onnx").fingerprint
    run("converter", "improve", "maps", *PAIRS, "--out", "again.npz", "--report", "page.html")
    assert "converter 1: old model" in capsys.readouterr().out
    assert "corrected" in Path("page.html").read_text("utf-8")
    # Remembered: the root is given once. Published twice, the newest is taken, the first by number.
    run(*PUBLISH)
    for name, number in (("maps", 2), ("maps#1", 1), (f"{tmp_path}/maps#2", 2)):
        opened = open_converter(name)
        assert opened.manifest.converter == number
        assert opened.manifest.old.declared["pooling"] == "mean"
        assert len(opened.manifest.evidence.healing["agreement@10"]) == 11
    assert verify_publication(Path("maps")).releases == ()
    assert list_releases(Path("maps")) == []


def test_what_does_not_belong_together_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no(*words: str, code: int = 65) -> str:
        return refused(list(words), code, monkeypatch, capsys)

    run(*PUBLISH)
    stored = open_source("old.parquet").read(next(open_source("old.parquet").windows(1000)))
    assert "fingerprint" in no(*CARRY)
    # The same dimension, other weights; and vectors of nobody knows whom.
    write(tmp_path / "other.parquet", stored.vectors, "e" * 64)
    write(tmp_path / "unsaid.parquet", stored.vectors, None)
    rest = ("--to", "carried", "--release", "maps", *ROOT)
    assert "found 1: old model to new model" in no("carry", "other.parquet", *rest)
    write(tmp_path / "release.parquet", stored.vectors, f"sp-{'e' * 64}")
    for unsaid in ("unsaid.parquet", "release.parquet"):
        assert "does not name the model that computed" in no("carry", unsaid, *rest)
        assert "does not name the model that computed" in no(
            *PUBLISH[:5], "--old", unsaid, "--new", "new.parquet"
        )
    assert "one model" in no("carry", "old.parquet", *rest, "--model", "new/model.onnx")
    for unsaid in ("unsaid.parquet", "release.parquet"):
        run("carry", unsaid, *rest, "--model", "old/model.onnx")
    assert "one model" in no(*PUBLISH[:5], "--old", "new.parquet", "--new", "old.parquet")
    assert "which has 1" in no(*CARRY[:-1], "maps#7", code=66)
    for strange in ("maps#x", "#1", ""):
        assert "FOLDER#N" in no(*CARRY[:-1], strange)
    assert "--map FILE, --release" in no(*CARRY, "--map", "map.npz")
    assert "is not there" in no(*CARRY[:-1], "nowhere", code=66)
    (tmp_path / "card.json").write_text('{"old": {"name": "x"}}')
    assert "old.licence" in no(*PUBLISH)


def test_a_map_that_was_not_signed_by_the_publisher_is_refused(
    run: Run, tmp_path: Path, given: Path
) -> None:
    run(*PUBLISH)
    old = open_embedder("old/model.onnx").fingerprint
    open_converter("maps", root=Path("maps/1.root.json"), old=old)
    shutil.copytree("maps", "good")
    file = Path("maps/converter-1.onnx")
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(VerificationError, match="a file that differs from the signed one"):
        open_converter("maps", root=Path("good/1.root.json"), old=old)
    # Another's publication in its place, under the same name.
    for name in ("maps", "maps.keys"):
        shutil.rmtree(name)
    run(*PUBLISH)
    for root in (None, Path("good/1.root.json")):
        with pytest.raises(VerificationError):
            open_converter("maps", root=root, old=old)


def test_a_withdrawn_converter_carries_nothing_more(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no(*words: str) -> str:
        return refused(list(words), 65, monkeypatch, capsys)

    run(*PUBLISH)
    run(*PUBLISH)
    run(*CARRY, *ROOT)
    for _ in range(2):
        # The second time it is no news.
        run("converter", "withdraw", "2", "--reason", "of another L6", "--model-repo", "maps")
    assert "withdrawn already" in capsys.readouterr().out
    verify_publication(Path("maps"))
    # The newest that was not: the first. By number, its publisher's reason.
    assert open_converter("maps").manifest.converter == 1
    assert "withdrawn by its publisher (of another L6)" in no(*CARRY[:-1], "maps#2")
    assert withdraw(Path("maps"), 1, "too", is_converter=True)
    assert "converter 2 was withdrawn" in no(*CARRY)
    assert "converter 1 was withdrawn" in no("converter", "improve", "maps#1", *PAIRS)
    with pytest.raises(NotFoundError, match="converter 3 is not published in"):
        withdraw(Path("maps"), 3, "typo", is_converter=True)


def test_an_ordinary_release_is_no_converter(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_block_release(tmp_path / "maps", 1)
    for name in ("maps", "maps#1"):
        said = refused([*CARRY[:-1], name, *ROOT], 66, monkeypatch, capsys)
        assert "releases (1), whose upgrades" in said
        assert "`gateway upgrade`" in said


@pytest.mark.long
def test_a_killed_publish_shows_nothing_and_the_next_one_works(run: Run, tmp_path: Path) -> None:
    run(*PUBLISH)
    old, new = open_source("old.parquet"), open_source("new.parquet")
    pairs = match_by_id(old, new).pairs
    verdict = decide(pairs, Cost(120, None, None, 1e-6))
    card = read_card(Path("card.json"))

    def again() -> object:
        models = (old.facts().model, new.facts().model)
        return publish_map_as_converter(tmp_path / "maps", verdict, pairs, models, card)

    def seen() -> list[int]:
        verify_publication(tmp_path / "maps")
        with TemporaryDirectory() as state:
            trust = TrustedFolder(tmp_path / "maps", Path(state))
            trust.refresh()
            return converter_numbers(trust)

    steps = crash.count_steps(again)
    before = seen()
    for step in range(2, steps + 1, max(1, steps // 8)):
        assert crash.run_with_fault(f"kill@{step}", again).fired
        after = seen()
        assert after in (before, [*before, len(before) + 1])
        before = after
    again()
    assert seen() == [*before, len(before) + 1]
    assert (
        not list(tmp_path.rglob(".tmp-*"))
        and verify_publication(tmp_path / "maps").leftover_files == ()
    )


def test_one_model_under_two_names_is_no_pair(run: Run, tmp_path: Path) -> None:
    run(*PUBLISH)
    old, new = open_source("old.parquet"), open_source("new.parquet")
    pairs = match_by_id(old, new).pairs
    verdict = decide(pairs, Cost(120, None, None, 1e-6))
    card = read_card(Path("card.json"))
    card = card.model_copy(update={"new": card.old.model_copy(update={"name": "another name"})})
    model = old.facts().model
    with pytest.raises(InvalidInputError, match="got one model under two names"):
        publish_map_as_converter(
            tmp_path / "maps", verdict, replace(pairs, new=pairs.old), (model, model), card
        )


def test_a_map_with_a_network_is_published_and_opened(run: Run, tmp_path: Path) -> None:
    run(*PUBLISH)
    old, new = open_source("old.parquet"), open_source("new.parquet")
    pairs = match_by_id(old, new).pairs
    verdict = decide(pairs, Cost(120, None, None, 1e-6))
    verdict = replace(verdict, map=layered(verdict.map))
    models = (old.facts().model, new.facts().model)
    made = publish_map_as_converter(
        tmp_path / "maps", verdict, pairs, models, read_card(Path("card.json"))
    )
    opened = open_converter(f"maps#{made.converter}", root=Path("maps/1.root.json"))
    assert opened.mapping.digest == verdict.map.digest
    np.testing.assert_array_equal(opened.mapping(pairs.old), verdict.map(pairs.old))


def test_few_pairs_of_ones_own_improve_a_foreign_converter() -> None:
    """A corpus of other proportions: its map is worse than that of many own pairs, better than that
    of few; both together are best."""
    made = world(900, noise=0.5)
    rng = np.random.default_rng(1)
    # The foreign corpus hardly varies in some directions of the old model.
    scale = np.geomspace(1, 0.02, made.old.shape[1]).astype(np.float32)
    away = made.old[:500] * scale
    noise = 0.05 * rng.normal(size=(500, made.new.shape[1])).astype(np.float32)
    prior = fit_maps(away, made.new[:500] + noise)["affine"]
    own = Pairs(made.ids[500:560], made.old[500:560], made.new[500:560])
    held = slice(560, 900)

    def error(mapping: Map) -> float:
        return float(np.square(mapping(made.old[held]) - made.new[held]).sum())

    both, alone = correct_converter(prior, own), fit_maps(own.old, own.new)["affine"]
    assert error(both) < min(error(prior), error(alone))
    found = cross_fit_candidates(own, [sample_item_queries(own)], prior)
    assert {CONVERTER, CORRECTED, "affine"} <= set(found)
    np.testing.assert_allclose(found[CONVERTER].migrated_vectors, prior(own.old), atol=1e-6)


def layered(mapping: Map) -> Map:
    """A map with a small network added, as one that a trainer made."""
    rng, (a, b) = np.random.default_rng(3), mapping.dims
    sizes = [a, 8, 6, b]
    layers = tuple(
        (
            rng.normal(size=(out, read)).astype(np.float32),
            rng.normal(size=out).astype(np.float32),
        )
        for read, out in pairwise(sizes)
    )
    return replace(mapping, residual_layers=layers)


def test_the_graph_gives_what_the_map_gives_and_others_are_refused() -> None:
    made = world(60)
    maps = [fit_maps(made.old, new)["affine"] for new in (made.new, 3 * made.new)]
    for mapping in (layered(maps[0]), *maps):
        data = map_to_onnx(mapping)
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        rows = np.concatenate([made.old, np.zeros_like(made.old[:1])])
        got = session.run(["upgraded"], {"embedding": rows})[0]
        np.testing.assert_allclose(got, mapping(rows), atol=1e-5)
        assert map_from_onnx(data, "affine", {}, "map.onnx").digest == mapping.digest
    model = onnx.load_from_string(data)
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(np.full((32, 24), np.nan, np.float32), "weight")
    )
    twice = onnx.load_from_string(data)
    twice.graph.node[0].input[0] = "bias"
    more = onnx.load_from_string(data)
    more.graph.node.append(more.graph.node[-1])
    every = (model, twice, more)
    for bad in (b"", b"no graph", *(one.SerializeToString() for one in every)):
        with pytest.raises(UnfitError, match=r"map\.onnx: expected"):
            map_from_onnx(bad, "affine", {}, "map.onnx")
