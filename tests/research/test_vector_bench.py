"""`compare.py --vectors`: maps between frozen vectors, measured against brute force."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.adoption.texts import EmbeddedDocuments, write_pairs
from nobackfill.errors import ConfigurationError, InvalidInputError, NotFoundError
from nobackfill.research.compare import app
from nobackfill.research.rivals.rival import Floats, TrainingVectors, UncertainRival
from nobackfill.research.rivals.rows import list_rivals
from nobackfill.research.vector_bench import (
    REEMBED,
    STAY,
    BenchResults,
    FrozenVectors,
    bench_page,
    compare_vectors,
    read_bench,
    read_vectors,
)
from nobackfill.vectors import normalise
from tests.support.commands import run_here

CLASSES, DIM = 24, 12
# Trained in seconds.
SMALL = list_rivals(epochs=6, inner_dim=64)


def arrays(dim_new: int = DIM, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Two models of the same classes: the new one is a rotation of a better view of them."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, 2 * DIM))
    to_new = np.linalg.qr(rng.normal(size=(2 * DIM, dim_new)))[0]
    to_old = to_new[:, :DIM] if dim_new >= DIM else rng.normal(size=(2 * DIM, DIM))
    turn = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
    made: dict[str, NDArray[Any]] = {}
    for prefix, count, low in (("", 500, 0), ("test_", 240, 4)):
        labels = rng.integers(low, CLASSES if prefix else CLASSES - 8, size=count)
        items = centres[labels] + 0.8 * rng.normal(size=(count, 2 * DIM))
        noisy = items + 0.7 * rng.normal(size=items.shape)
        made[f"{prefix}new"] = normalise((items @ to_new).astype(np.float32))
        made[f"{prefix}old"] = normalise((noisy @ to_old @ turn).astype(np.float32))
        made[f"{prefix}side"] = (noisy[:, :5]).astype(np.float32)
        made[f"{prefix}labels"] = labels.astype(np.uint8)
    return made


def save(path: Path, named: Mapping[str, NDArray[Any]]) -> None:
    np.savez(path, **{str(name): values for name, values in named.items()})  # type: ignore[arg-type]


def frozen(path: Path, **changed: NDArray[Any]) -> FrozenVectors:
    save(path / "v.npz", arrays() | changed)
    return read_vectors([path / "v.npz"])


def brute_force(queries: Floats, gallery: Floats, labels: NDArray[np.int64]) -> tuple[float, float]:
    """CMC-1 and mAP by a full sort of each query's distances, without the query itself."""
    firsts, precisions = [], []
    for place, query in enumerate(queries.astype(np.float64)):
        order = np.argsort(((gallery - query) ** 2).sum(axis=1), kind="stable")
        right = labels[order[order != place]] == labels[place]
        if right.any():
            firsts.append(right[0])
            ranks = np.flatnonzero(right) + 1
            precisions.append(np.mean(np.arange(1, len(ranks) + 1) / ranks))
    return float(np.mean(firsts)), float(np.mean(precisions))


def test_figures_are_those_of_a_full_sort(tmp_path: Path) -> None:
    vectors = frozen(tmp_path)
    result = compare_vectors(vectors, names=["procrustes", "query_drift"])
    assert vectors.labels is not None
    seen = vectors.test_parts()["seen classes"]
    assert 0 < seen.sum() < len(seen)
    rotation = SMALL["procrustes"]()
    rotation.fit(vectors.train, 0)
    for name, queries, gallery in (
        (STAY, vectors.old, vectors.old),
        (REEMBED, vectors.new, vectors.new),
        ("procrustes", vectors.new, rotation.transform(vectors.old, None)),
    ):
        total = [0.0, 0.0]
        for part, mask in vectors.test_parts().items():
            figures = result.rows[name].figures[part]
            total[0] += figures["cmc1"] * mask.sum() / len(mask)
            total[1] += figures["map"] * mask.sum() / len(mask)
        assert total == pytest.approx(brute_force(queries, gallery, vectors.labels), abs=1e-6)


def test_orders_of_a_backfill_are_measured_by_full_sorts(tmp_path: Path) -> None:
    vectors = frozen(tmp_path)
    names = ["fastfill_side", "fct_side", "affine"]
    result = compare_vectors(vectors, names=names, registry=SMALL)
    rows = result.rows
    # FCT and the affine map predict no variance.
    assert {name for name, row in rows.items() if row.backfill} == {"fastfill_side"}
    fitted = SMALL["fastfill_side"]()
    fitted.fit(vectors.train, 0)
    assert isinstance(fitted, UncertainRival) and vectors.labels is not None
    gallery = fitted.transform(vectors.old, vectors.side)
    variances = fitted.variances(vectors.old, vectors.side)
    assert variances is not None and (variances > 0).all()
    orders = {
        "random": np.random.default_rng(0).permutation(240),
        "uncertainty": np.argsort(-variances, kind="stable"),
    }
    masks, row = vectors.test_parts(), rows["fastfill_side"]
    for order, items in orders.items():
        points = []
        for share in np.linspace(0, 1, 11):
            mixed = gallery.copy()
            first = items[: round(240 * share)]
            mixed[first] = vectors.new[first]
            points.append(brute_force(vectors.new, mixed, vectors.labels))
        for number, figure in enumerate(("cmc1", "map")):
            curve = np.array([point[number] for point in points])
            area = float((curve[:-1] + curve[1:]).sum() / 20)
            told = sum(
                row.backfill[part][order][figure] * mask.sum() for part, mask in masks.items()
            )
            assert told / 240 == pytest.approx(area, abs=1e-6)
    for part in masks:
        gains = row.against_random[part]
        assert list(gains) == ["uncertainty", "gain"]
        means = row.backfill[part]
        for order, fields in gains.items():
            mean = means[order]["map"] - means["random"]["map"]
            assert fields["map"].mean == pytest.approx(mean, abs=1e-9)
    assert "Means over the curve of a backfill, seen classes:" in bench_page(result)


def test_agreement_and_known_items_are_counted(tmp_path: Path) -> None:
    vectors = frozen(tmp_path)
    rows = compare_vectors(vectors, names=["affine"]).rows
    for figures in rows[REEMBED].figures.values():
        assert figures["agreement"] == 1 and "known_item" not in figures
    mapped = SMALL["affine"]()
    mapped.fit(vectors.train, 0)
    gallery = mapped.transform(vectors.old, None)
    distances = ((vectors.new[:, None].astype(float) - gallery[None]) ** 2).sum(axis=2)
    own = distances.argmin(axis=1) == np.arange(len(gallery))
    for part, mask in vectors.test_parts().items():
        assert rows["affine"].figures[part]["known_item"] == pytest.approx(own[mask].mean())


@pytest.mark.long
def test_every_rival_runs_and_reports_its_size(tmp_path: Path) -> None:
    vectors = frozen(tmp_path)
    result = compare_vectors(vectors, seed_count=2, pair_count=400, registry=SMALL)
    assert list(result.rows) == [STAY, REEMBED, *SMALL]
    assert (result.pairs, result.seeds) == (400, 2)
    for name, row in result.rows.items():
        assert not row.refusal, (name, row.refusal)
        for part, figures in row.figures.items():
            assert all(0 <= value <= 1 for value in figures.values()), (name, part)
    for name in SMALL:
        assert result.rows[name].parameters > 0, name
    # Each map is worth more than chance. A mean drift is no map between two rotated spaces, and
    # without pairs these few clusters of equal size and distance can be matched in many ways.
    cmc1 = {name: row.figures["seen classes"]["cmc1"] for name, row in result.rows.items()}
    paired = [cmc1[name] for name in SMALL if name not in ("query_drift", "mini_vec2vec")]
    assert min(paired) > 4 / CLASSES, cmc1
    assert cmc1["residual_side"] > cmc1["query_drift"]
    # Paired with our own row, too: by the same queries, so differences of means are means.
    ours = result.rows["residual_side"]
    assert ours.against_ours == {}
    for part, figures in ours.figures.items():
        fields = result.rows["affine"].against_ours[part]
        assert set(fields) == {"cmc1", "map", "agreement", "known_item"}
        for name, field in fields.items():
            mine = result.rows["affine"].figures[part][name]
            assert field.mean == pytest.approx(mine - figures[name], abs=1e-9)
            assert field.low <= field.mean <= field.high
    # The new view is better, and a difference over classes says over how many.
    better = result.rows[REEMBED].differences["seen classes"]["map"]
    assert 0 < better.low < better.mean < better.high
    assert better.classes == result.classes["seen classes"] >= 10
    assert result.rows[REEMBED].differences["unseen classes"]["map"].classes is None


def test_mini_vec2vec_finds_a_rotation_and_reads_no_pair() -> None:
    """Also where the new vectors are of the same items in another order."""
    rng = np.random.default_rng(0)
    centres = 3 * rng.normal(size=(12, 10)) * np.linspace(1, 0.2, 10)
    items = centres[rng.choice(12, 400, p=rng.dirichlet(np.ones(12)))]
    old = normalise((items + 0.3 * rng.normal(size=items.shape)).astype(np.float32))
    turn = np.linalg.qr(rng.normal(size=(10, 10)))[0].astype(np.float32)
    new = old @ turn
    rival = list_rivals()["mini_vec2vec"]()
    rival.fit(TrainingVectors(old, new[rng.permutation(400)], None, None, unit_norm=True), seed=0)
    mapped = rival.transform(old, None)
    assert mapped.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(mapped, axis=1), 1, rtol=1e-5)
    assert (mapped * new).sum(axis=1).mean() > 0.95
    with pytest.raises(ConfigurationError, match=r"needs at least 153; got 100"):
        rival.fit(TrainingVectors(old[:100], new[:100], None, None, unit_norm=True), seed=0)


@pytest.mark.long
@pytest.mark.parametrize("dim_new", [7, 20])
def test_spaces_of_different_dimensions(tmp_path: Path, dim_new: int) -> None:
    save(tmp_path / "v.npz", arrays(dim_new))
    rows = compare_vectors(read_vectors([tmp_path / "v.npz"]), registry=SMALL).rows
    refused = {name: row.refusal for name, row in rows.items() if row.refusal}
    assert list(refused) == ["drift_adapter_procrustes", "query_drift"]
    assert refused["query_drift"].startswith("query_drift subtracts vectors of both models")


def test_a_single_pair_is_refused_with_a_reason(tmp_path: Path) -> None:
    vectors = frozen(tmp_path).take_pairs(1, seed=0)
    result = compare_vectors(vectors, names=["procrustes", "residual"], registry=SMALL)
    for name in ("procrustes", "residual"):
        assert "at least 2 training pairs, got 1" in result.rows[name].refusal
    assert "Not run:" in bench_page(result)


def test_without_labels_and_side(tmp_path: Path) -> None:
    kept = {name: values for name, values in arrays().items() if name.endswith(("old", "new"))}
    save(tmp_path / "v.npz", kept)
    names = ["residual", "residual_side", "fastfill_joint_side", "affine", "local_adapters"]
    result = compare_vectors(read_vectors([tmp_path / "v.npz"]), names=names, registry=SMALL)
    assert list(result.queries) == ["all"] and result.classes == {"all": 0}
    assert "reads side-information" in result.rows["residual_side"].refusal
    figures = result.rows["affine"].figures["all"]
    assert set(figures) == {"agreement", "known_item"}
    assert figures["known_item"] > 10 / 240
    # Our row without side-information is the one that others are compared with.
    assert result.our_row == "residual" and "Less residual, in points:" in bench_page(result)
    assert result.rows["residual"].against_ours == {}
    ours = result.rows["residual"].figures["all"]
    for name, field in result.rows["affine"].against_ours["all"].items():
        assert field.mean == pytest.approx(figures[name] - ours[name], abs=1e-9)
        # Queries were drawn, so no side of 0 is called measurable.
        assert field.classes is None and field.sign == 0


def test_int8_with_scales_and_several_files(tmp_path: Path) -> None:
    whole = arrays()
    scale = np.abs(whole["old"]).max(axis=0) / 127
    packed = np.round(whole["old"] / scale).astype(np.int8)
    first = whole | {"old": packed, "old_scale": scale.astype(np.float32)}
    side = {name: first.pop(name) for name in ("side", "test_side")}
    save(tmp_path / "a.npz", first)
    np.savez(tmp_path / "b.npz", side_simclr=side["side"], test_side_simclr=side["test_side"])
    vectors = read_vectors([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert np.abs(vectors.train.old - whole["old"]).max() <= scale.max() / 2 + 1e-6
    assert vectors.side is not None and np.array_equal(vectors.side, side["test_side"])
    assert np.array_equal(vectors.old, whole["test_old"])


def test_wrong_files_are_refused_by_name(tmp_path: Path) -> None:
    def refuses(words: str, **changed: NDArray[Any] | None) -> None:
        merged = {**arrays(), **changed}
        kept = {name: values for name, values in merged.items() if values is not None}
        save(tmp_path / "v.npz", kept)
        with pytest.raises(InvalidInputError, match=words):
            read_vectors([tmp_path / "v.npz"])

    good = arrays()
    refuses("expected the arrays old and new", new=None)
    refuses("expected the arrays test_old and test_new", test_old=None)
    refuses("expected 500 rows in the array new, as in old, got 499", new=good["new"][1:])
    refuses("array labels to hold 500 whole numbers", labels=good["labels"][1:])
    packed = {"old": good["old"].astype(np.int8)}
    refuses("array old_scale to hold", **packed, old_scale=np.ones(4))
    refuses(r"got <U1 \[\]", **packed, old_scale=np.array("x"))
    refuses("got <U3", labels=good["labels"].astype("<U3"))
    refuses(
        "expected dimension 12 of the array test_new, as of new, got 11",
        test_new=good["test_new"][:, :11],
    )
    refuses("finite numbers in the array old, got NaN", old=good["old"] * np.float32(np.nan))
    refuses("array old to hold numbers of shape", old=good["old"][:, 0])
    refuses("array old to hold numbers of shape", old=good["old"].astype("<U9"))
    refuses("at least 1 rows in the array old, got 0", old=good["old"][:0], new=good["new"][:0])
    one = {name: good[name][:1] for name in good if name.startswith("test_")}
    refuses("at least 2 rows in the array test_old, got 1", **one)
    np.savez(tmp_path / "o.npz", old=np.array([{}], dtype=object))
    with pytest.raises(InvalidInputError, match=r"o\.npz: expected arrays of numbers"):
        read_vectors([tmp_path / "o.npz"])
    (tmp_path / "t.npz").write_text("no archive")
    with pytest.raises(InvalidInputError, match=r"t\.npz: expected arrays of numbers"):
        read_vectors([tmp_path / "t.npz"])
    with pytest.raises(NotFoundError):
        read_vectors([tmp_path / "none.npz"])
    with pytest.raises(
        ConfigurationError,
        match="with --vectors there is no method residuall; expected some of resid",
    ):
        compare_vectors(frozen(tmp_path), names=["residuall"])


def test_the_command_writes_a_page_and_its_figures(tmp_path: Path) -> None:
    save(tmp_path / "features.npz", arrays())
    command = ("compare.py", "--vectors", tmp_path / "features.npz", "--out", tmp_path / "out")
    done = run_here(app, *command, "--methods", "affine,procrustes", "--seeds", "1")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "features.md").read_text()
    assert done.stdout.strip() == page.strip()
    told = BenchResults.model_validate_json((tmp_path / "out" / "features.json").read_text())
    assert told.command == (
        "python training/compare.py --vectors features.npz --seeds 1 --methods affine,procrustes"
    )
    assert read_bench(tmp_path / "out" / "features.json") == told
    assert told.rows["affine"].against_ours == {} and "Less residual_side" not in page
    assert "500 training pairs, one seed, which proves nothing about others" in page
    seen = told.rows["affine"].figures["seen classes"]["cmc1"]
    assert f"| affine | items | {100 * seen:.1f} (" in page
    assert json.loads((tmp_path / "out" / "features.json").read_text())["pairs"] == 500
    for words, sentence in (
        (("--data", "digits"), "leave out --data"),
        (("--methods", "afine"), "there is no method afine"),
        (("--development",), "leave out --development"),
    ):
        refused = run_here(app, *command, *words)
        assert refused.returncode == 78 and sentence in refused.stderr
    for option in ("--pairs", "--width"):
        alone = run_here(app, "compare.py", option, "100")
        assert alone.returncode == 78 and "also give --vectors FILE.npz" in alone.stderr
    sizes = []
    for width in ("8", "16"):
        narrow = run_here(app, *command, "--methods", "fct", "--seeds", "1", "--width", width)
        assert narrow.returncode == 0, narrow.stderr
        told = read_bench(tmp_path / "out" / "features.json")
        assert told.command.endswith(f"--methods fct --width {width}")
        sizes.append(told.rows["fct"].parameters)
    assert sizes[0] < sizes[1]


def test_vectors_of_texts_are_a_file_of_the_bench(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bodies = {name: normalise(rng.normal(size=(200, 8)).astype(np.float32)) for name in "on"}
    old, new = (EmbeddedDocuments(bodies[name], bodies[name]) for name in "on")
    write_pairs(old, new, 60, tmp_path / "texts.npz")
    vectors = read_vectors([tmp_path / "texts.npz"])
    for name in ("old", "new"):
        assert np.array_equal(getattr(vectors, name), bodies[name[0]][:60])
        assert np.array_equal(getattr(vectors.train, name), bodies[name[0]][60:])
    assert vectors.labels is None and vectors.side is None
    assert [path.name for path in tmp_path.iterdir()] == ["texts.npz"]
