import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from nobackfill.class_folders import decode_listing, list_images
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.onnx_runtime import onnxruntime as ort
from nobackfill.release.manifest import upgrade_int8_path, upgrade_path
from nobackfill.release.models import ImageEmbedder, open_side_encoder
from nobackfill.report import page
from nobackfill.report.comparison import (
    SHOWN_HITS,
    Comparison,
    Flips,
    compare,
    find_flips,
    matrix_from_pictures,
    predecessor,
    retention_percent,
)
from nobackfill.report.page import read_folder
from tests.support.publication import manifests_of


@pytest.fixture(scope="module")
def comparison(
    model_repo: Path, images: Path, tmp_path_factory: pytest.TempPathFactory
) -> Comparison:
    manifests = manifests_of(model_repo, tmp_path_factory.mktemp("state"))
    assert predecessor(manifests, 2) == 1
    assert predecessor(manifests, 1) is None
    shown, total = read_folder(images, seed=0)
    assert total == len(shown) == 24
    return compare(model_repo, manifests, 1, 2, shown)


def labels_of(comparison: Comparison) -> list[str]:
    return [path.split("/")[0] for path in comparison.pictures.paths]


def slow_map(queries: np.ndarray, gallery: np.ndarray, labels: list[str]) -> float:
    """Each picture against all others, one by one, by scikit-learn."""
    values = []
    for i, query in enumerate(queries):
        others = [j for j in range(len(gallery)) if j != i]
        distances = [float(((query - gallery[j]) ** 2).sum()) for j in others]
        right = [labels[j] == labels[i] for j in others]
        values.append(average_precision_score(right, [-d for d in distances]))
    return float(np.mean(values))


def test_cells_agree_with_a_slow_loop(comparison: Comparison) -> None:
    labels = labels_of(comparison)
    old, new = comparison.old_vectors, comparison.new_vectors
    for name, queries, gallery in (
        ("old/old", old, old),
        ("new/served", new, comparison.served_vectors),
        ("new/new", new, new),
    ):
        figure = float(np.mean(comparison.cells[name].map))
        assert figure == pytest.approx(slow_map(queries, gallery, labels), abs=1e-6)
        # Neither trivial nor perfect, or this test could not tell right from wrong.
        assert 0.3 < figure < 0.99


def test_hits_are_the_nearest_others(comparison: Comparison) -> None:
    new = comparison.new_vectors
    distances = ((new[:, None] - new[None]) ** 2).sum(-1)
    np.fill_diagonal(distances, np.inf)
    expected = np.argsort(distances, axis=1, kind="stable")[:, :SHOWN_HITS]
    assert (comparison.cells["new/new"].neighbours == expected).all()


def test_a_naive_swap_finds_nothing_and_the_exact_upgrade_everything(
    comparison: Comparison,
) -> None:
    matrix = matrix_from_pictures(comparison.cells)
    # Orthogonal blocks: every distance is the same, so nothing is near.
    assert matrix["new", "old"].map < 30
    assert retention_percent(matrix) == pytest.approx(100, abs=0.1)
    assert matrix["new", "new"].shade == pytest.approx(1)
    assert comparison.route == (1, 2)
    assert comparison.uncertainty is not None


def test_flips_are_those_of_the_first_hit(comparison: Comparison) -> None:
    labels = labels_of(comparison)
    worse = dict(comparison.cells)
    # As if the upgrade had turned the first hits of the first three pictures.
    cell = comparison.cells["new/served"]
    cmc1, precision = cell.cmc1.copy(), cell.map.copy()
    cmc1[:3], precision[:3] = 1 - cmc1[:3], precision[:3] - [0.1, 0.3, 0.2]
    worse["new/served"] = replace(cell, cmc1=cmc1, map=precision)
    changed = find_flips(replace(comparison, cells=worse))
    before = comparison.cells["old/old"]
    right = [
        labels[hits[0]] == label for hits, label in zip(before.neighbours, labels, strict=True)
    ]
    assert right == (before.cmc1 == 1).tolist()
    turned_bad = [i for i in (1, 2, 0) if right[i]]
    turned_good = [i for i in (0, 2, 1) if not right[i]]
    percent = 100 * len(turned_bad) / 24
    assert changed == Flips(turned_good, turned_bad, 24, percent)


def test_pictures_alone_in_their_class_are_no_searches(comparison: Comparison) -> None:
    cells = {}
    for name, cell in comparison.cells.items():
        cmc1 = cell.cmc1.copy()
        cmc1[:4] = np.nan
        cells[name] = replace(cell, cmc1=cmc1)
    before, after = (cells[name].cmc1 for name in ("old/old", "new/served"))
    before[4:8], after[4:8] = 1, 0
    changed = find_flips(replace(comparison, cells=cells))
    assert changed.answerable_count == 20
    assert changed.worsened_percent == pytest.approx(100 * len(changed.worsened_rows) / 20)
    assert set(changed.worsened_rows) >= {4, 5, 6, 7}


def test_it_measures_the_int8_upgrade_that_is_run_by_default(
    chain_repo: Path, images: Path, tmp_path: Path
) -> None:
    manifests = manifests_of(chain_repo, tmp_path)
    shown, _ = read_folder(images, seed=0)
    measured = compare(chain_repo, manifests, 1, 2, shown)
    side = open_side_encoder(chain_repo, manifests[1]).run(decode_listing(shown, 8))
    inputs = {"embedding": measured.old_vectors, "side": side}

    def upgraded(path: str) -> np.ndarray:
        session = ort.InferenceSession(chain_repo / path, providers=["CPUExecutionProvider"])
        return np.asarray(session.run(["upgraded"], inputs)[0])

    int8 = upgraded(upgrade_int8_path(1, 2))
    np.testing.assert_allclose(measured.served_vectors, int8, atol=1e-6)
    assert np.abs(measured.served_vectors - upgraded(upgrade_path(1, 2))).max() > 1e-4


def test_images_are_embedded_a_few_at_a_time(
    comparison: Comparison,
    model_repo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []
    run = ImageEmbedder.run

    def spied(self: ImageEmbedder, pixels: np.ndarray) -> np.ndarray:
        sizes.append(len(pixels))
        return run(self, pixels)

    monkeypatch.setattr("nobackfill.quality.embedded.BATCH", 5)
    monkeypatch.setattr(ImageEmbedder, "run", spied)
    manifests = manifests_of(model_repo, tmp_path)
    again = compare(model_repo, manifests, 1, 2, comparison.pictures)
    assert sizes == 2 * [5, 5, 5, 5, 4]
    np.testing.assert_allclose(again.old_vectors, comparison.old_vectors, atol=1e-6)
    np.testing.assert_allclose(again.new_vectors, comparison.new_vectors, atol=1e-6)


def test_a_large_folder_is_sampled_by_seed(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_IMAGES", 10)
    shown, total = read_folder(images, seed=1)
    assert (len(shown), total) == (10, 24)
    assert shown.paths == read_folder(images, seed=1)[0].paths
    assert shown.paths != read_folder(images, seed=2)[0].paths
    assert [path.split("/")[0] for path in shown.paths] == [shown.class_of(i) for i in range(10)]


def test_folders_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="--images expects a folder of class folders"):
        read_folder(tmp_path / "nowhere", 0)
    with pytest.raises(InvalidInputError, match="at least two class folders"):
        read_folder(tmp_path, 0)


def test_a_class_folder_may_be_empty_here(images: Path, tmp_path: Path) -> None:
    """A report only reads: what training would refuse, it passes over."""
    shutil.copytree(images, tmp_path, dirs_exist_ok=True)
    (tmp_path / "abandoned").mkdir()
    assert read_folder(tmp_path, 0)[0].class_names == tuple("abcd")
    with pytest.raises(InvalidInputError, match="abandoned: expected images"):
        list_images(tmp_path)
