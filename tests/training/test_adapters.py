"""Query adapters that `nobackfill fit` wrote, published by export.py and measured by its gate."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from nobackfill.adopt.converters import map_to_upgrade_onnx
from nobackfill.adopt.embedding.onnx_model import OnnxModel
from nobackfill.adopt.maps import Map, save_map
from nobackfill.quality.cells import parse_cell
from nobackfill.quality.embedded import PublishedListing
from nobackfill.quality.gate import measure_release
from nobackfill.quality.listing import list_texts, relevance_among_others, split_halves
from nobackfill.quality.retrieval import measure_cell
from nobackfill.release.manifest import TEXT_ROLES
from nobackfill.release.publishing.inspection import verify_publication
from nobackfill.release.text_models import open_text_encoder
from nobackfill.release.trust.trust import Publication
from tests.adopt.models import WORDS, text_model
from tests.support import trials
from tests.training.life import run_export
from tests.training.test_text_releases import export, labelled

OLD, NEW = 24, 32


@pytest.fixture(autouse=True)
def _near() -> Iterator[None]:
    with trials.near():
        yield


def turn() -> np.ndarray:
    """Return orthogonal rows [24, 32], by which the new model's space holds the old one's."""
    rng = np.random.default_rng(3)
    return np.linalg.qr(rng.normal(size=(NEW, NEW)))[0][:OLD].astype(np.float32)


def models(folder: Path, *, normalise: bool = True) -> tuple[tuple[str | Path, ...], Path]:
    """Write an old model that reads queries badly, and a new one of another dimension that reads
    them as the old one reads documents.

    Returns:
        Options of the old release, and the new model's folder.
    """
    rng = np.random.default_rng(0)
    table = rng.normal(size=(len(WORDS), OLD)).astype(np.float32)
    blur = 1.5 * rng.normal(size=table.shape).astype(np.float32)
    text_model(folder / "old", 0, table=table, normalise=normalise)
    text_model(folder / "asks", 0, table=table + blur, normalise=normalise)
    text_model(folder / "new", 0, table=table @ turn())
    return ("--text-encoder", folder / "old", "--query-encoder", folder / "asks"), folder / "new"


def adapter(weight: np.ndarray, file: Path, *, unit: bool = True, **facts: str) -> Path:
    """Write a query adapter as `nobackfill fit --adapter FILE.onnx` does."""
    bias = np.zeros(len(weight), np.float32)
    mapping = Map(
        "affine", weight.astype(np.float32), bias, unit, facts=facts, direction="new to old"
    )
    file.write_bytes(map_to_upgrade_onnx(mapping))
    return file


def mean_precision(distances: np.ndarray, labels: np.ndarray) -> float:
    """Return mAP of items that search all others, by its definition."""
    every = []
    for query, row in enumerate(distances):
        order = [n for n in np.argsort(row, kind="stable") if n != query]
        hits = np.flatnonzero(labels[order] == labels[query])
        every.append(np.mean([(n + 1) / (rank + 1) for n, rank in enumerate(hits)]))
    return float(np.mean(every))


@pytest.mark.long
@pytest.mark.parametrize("normalise", [True, False], ids=["cosine", "l2"])
def test_the_gate_measures_old_vectors_through_the_adapter(normalise: bool, tmp_path: Path) -> None:
    """In the old space's metric, as numpy measures it."""
    repo, file = tmp_path / "repo", labelled(tmp_path / "texts.jsonl", 300)
    old, new = models(tmp_path, normalise=normalise)
    scale = 1.0 if normalise else 2.0
    made_by_fit = adapter(scale * turn(), tmp_path / "adapter.onnx", unit=normalise, pairs="300")
    first = export(repo, 1, *old, "--eval-texts", file)
    made = export(repo, 2, "--text-encoder", new, "--adapter", made_by_fit, "--eval-texts", file)
    (adapts,) = made.adapters
    assert (made.format, adapts.to_release, adapts.method) == (5, 1, "affine")
    assert (adapts.to_space, adapts.to_dim, adapts.to_unit) == (first.space, OLD, normalise)
    assert (made.gate.verdict, made.gate.forced) == ("passed", False)
    assert made.recipe["adapter_1.pairs"] == "300" and made.upgrades == ()
    cells = {cell.name: cell for cell in made.evidence}
    assert cells["2/1"].map > cells["1/1"].map + 0.05
    _, rows = split_halves(list_texts(file), 0)
    listing = list_texts(file).select(rows)
    items = open_text_encoder(repo, first).run(listing.texts, "document")
    queries = scale * OnnxModel(new / "model.onnx").embed(list(listing.texts)) @ turn().T
    if normalise:
        distances = -queries @ items.T
    else:
        distances = ((queries[:, None] - items[None]) ** 2).sum(axis=2)
    expected = mean_precision(distances, listing.labels)
    assert cells["2/1"].map == pytest.approx(expected, abs=0.005)
    asks, found = (
        PublishedListing(listing, repo, {1: first, 2: made}, role=role) for role in TEXT_ROLES
    )
    exact = measure_cell(parse_cell("2/1"), asks, found, relevance_among_others(listing))
    assert float(np.mean(exact.map)) == pytest.approx(expected, abs=0.001)
    (curve,) = (one for one in made.calibration if one.origin == "direct")
    assert (curve.query_space, curve.gallery_space) == (made.space, first.space)
    assert verify_publication(repo).releases == (1, 2)


@pytest.mark.long
def test_the_gate_measures_mixtures_as_a_gateway_ranks_them(tmp_path: Path) -> None:
    """Old vectors among new ones, by the published scores, as numpy ranks them."""
    repo, file = tmp_path / "repo", labelled(tmp_path / "texts.jsonl", 300)
    old, new = models(tmp_path)
    first = export(repo, 1, *old, "--eval-texts", file)
    made_by_fit = adapter(turn(), tmp_path / "adapter.onnx")
    made = export(repo, 2, "--text-encoder", new, "--adapter", made_by_fit, "--eval-texts", file)
    _, evidence = measure_release(
        made, Publication({1: first}, frozenset()), repo, list_texts(file), seed=0, int8_loss=1.0
    )
    (row,) = [row for row in evidence.gain_rows if row.mixture]
    share = int(row.mixture.removesuffix(" % of 2/2")) / 100
    assert str(row) == f"2/1 with {row.mixture}" and 0 < share < 1 and row.passes
    _, rows = split_halves(list_texts(file), 0)
    listing = list_texts(file).select(rows)
    count = len(listing)
    one = open_text_encoder(repo, first)
    items, asks = one.run(listing.texts, "document"), one.run(listing.texts, "query")
    vectors = OnnxModel(new / "model.onnx").embed(list(listing.texts))
    curves = {str(c.origin): (c.distances, c.probabilities) for c in evidence.calibrations}
    scores, distances = [], []
    for origin, queries, stored in (
        ("direct", vectors @ turn().T, items),
        ("native", vectors, vectors),
    ):
        unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
        distances.append(1 - unit @ stored.T)
        scores.append(np.interp(distances[-1], *curves[origin]))
    replaced = np.zeros(count, bool)
    replaced[np.random.default_rng(0).permutation(count)[: round(share * count)]] = True
    score, distance = (np.where(replaced, pair[1], pair[0]) for pair in (scores, distances))
    # Places by (score, distance) stand for distances.
    places = np.argsort(np.lexsort((distance, -score), axis=1), axis=1)
    gained = mean_precision(places, listing.labels) - mean_precision(
        -asks @ items.T, listing.labels
    )
    assert row.map_gain.mean == pytest.approx(gained, abs=0.005)


@pytest.mark.long
def test_an_adapter_whose_mixtures_are_below_staying_is_not_published(tmp_path: Path) -> None:
    """The old vectors alone are found better; the new ones, put beside them, are not found."""
    repo, file = tmp_path / "repo", labelled(tmp_path / "texts.jsonl", 300)
    old, new = models(tmp_path)
    lost = np.random.default_rng(4).normal(size=(len(WORDS), NEW)).astype(np.float32)
    text_model(tmp_path / "lost", 0, table=lost)
    export(repo, 1, *old, "--eval-texts", file)
    made_by_fit = adapter(turn(), tmp_path / "adapter.onnx")
    asks = ("--query-encoder", new, "--adapter", made_by_fit)
    refused = run_export(repo, 2, "--text-encoder", tmp_path / "lost", *asks, "--eval-texts", file)
    assert refused.exit_code == 65
    assert "2/1 with 90 % of 2/2 does not beat 1/1" in refused.output
    assert "2/1 does not beat 1/1" not in refused.output
    assert not (repo / "release-2.json").exists()


def test_an_adapter_below_staying_is_not_published(tmp_path: Path) -> None:
    repo, file = tmp_path / "repo", labelled(tmp_path / "texts.jsonl", 120)
    old, new = models(tmp_path)
    export(repo, 1, *old, "--eval-texts", file)
    lost = np.random.default_rng(0).normal(size=(OLD, NEW))
    words = ("--adapter", adapter(lost, tmp_path / "lost.onnx"), "--eval-texts", file)
    refused = run_export(repo, 2, "--text-encoder", new, *words)
    assert refused.exit_code == 65
    assert "2/1 does not beat 1/1" in refused.output and "an --adapter that fails" in refused.output
    assert not (repo / "release-2.json").exists()


def external(file: Path) -> None:
    onnx.save(
        onnx.load(file), file, save_as_external_data=True, location="map.data", size_threshold=0
    )
    file.with_name("map.data").unlink()


def of_numpy(file: Path) -> None:
    save_map(file, Map("affine", turn(), np.zeros(OLD, np.float32), unit_norm=True))


def upgrade(file: Path) -> None:
    file.write_bytes(
        map_to_upgrade_onnx(Map("affine", turn(), np.zeros(OLD, np.float32), unit_norm=True))
    )


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (external, "as an ONNX file"),
        (of_numpy, "`nobackfill fit --adapter FILE.onnx` writes one"),
        (upgrade, "output `adapted` float32"),
        (lambda file: adapter(turn()[:, :5], file), "reads queries of dimension 5"),
        (lambda file: adapter(turn()[:5], file), "but no published release has such vectors"),
        (lambda file: adapter(turn(), file, new_model="other"), "of another new model"),
        (lambda file: adapter(turn(), file, old_model="other"), "of the model other"),
        (lambda file: adapter(2 * turn(), file, unit=False), "model output 'adapted'"),
    ],
)
def test_what_is_no_adapter_of_the_release_is_refused(
    spoil: object, sentence: str, tmp_path: Path
) -> None:
    repo, file = tmp_path / "repo", tmp_path / "adapter.onnx"
    old, new = models(tmp_path)
    export(repo, 1, *old)
    adapter(2 * turn(), file)
    spoil(file)  # type: ignore[operator]
    result = run_export(repo, 2, "--text-encoder", new, "--adapter", file, "--force")
    assert result.exit_code in (65, 78)
    assert sentence in result.output
    assert not (repo / "release-2.json").exists()


def test_a_second_adapter_to_the_same_release_is_refused(tmp_path: Path) -> None:
    repo, file = tmp_path / "repo", adapter(turn(), tmp_path / "adapter.onnx")
    old, new = models(tmp_path)
    export(repo, 1, *old)
    words = ("--text-encoder", new, "--adapter", file, "--adapter", file, "--force")
    assert "whose vectors this release searches already" in run_export(repo, 2, *words).output
    as_upgrade = run_export(repo, 2, "--text-encoder", new, "--upgrade", file, "--force")
    assert "output `upgraded` float32" in as_upgrade.output
    assert json.loads(run_export(repo, 2, *words[:4], "--force", "--json").stdout.splitlines()[-1])[
        "written"
    ]
