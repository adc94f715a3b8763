import json
from pathlib import Path

import numpy as np
import pytest

from nobackfill.class_folders import decode_listing, list_images
from nobackfill.errors import CannotWriteError
from nobackfill.metrics.ranking import relevance_by_label
from nobackfill.quality.cells import parse_cell
from nobackfill.quality.criterion import compute_criteria
from nobackfill.quality.embedded import PublishedListing
from nobackfill.quality.retrieval import MatrixCell
from nobackfill.release.models import open_embedder, open_side_encoder, open_upgrade
from nobackfill.release.trust.trust import read_publication
from nobackfill.training.cli.evaluate import write_picture
from nobackfill.vectors import Vectors
from tests.training.life import SIZE, Life, run_evaluate


def slow_cell(
    queries: Vectors, gallery: Vectors, asked: list[str], held: list[str]
) -> dict[str, float]:
    """CMC-1, CMC-5 and mAP of definitions, one query and one rank at a time."""
    first, fifth, precisions = [], [], []
    for query, name in zip(queries, asked, strict=True):
        order = sorted(range(len(held)), key=lambda i: float(((query - gallery[i]) ** 2).sum()))
        hits = [held[i] == name for i in order]
        first.append(hits[0])
        fifth.append(any(hits[:5]))
        found, total = 0, 0.0
        for rank, hit in enumerate(hits, 1):
            if hit:
                found += 1
                total += found / rank
        precisions.append(total / found)
    return {
        "cmc1": float(np.mean(first)),
        "cmc5": float(np.mean(fifth)),
        "map": float(np.mean(precisions)),
    }


@pytest.fixture(scope="module")
def report(life: Life, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    file = tmp_path_factory.mktemp("report") / "deep" / "cells.json"
    picture = file.with_suffix(".png")
    result = run_evaluate(life, "--json", file, "--neighbours", "5", "--picture", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    loaded: dict[str, dict[str, object]] = json.loads(file.read_text("utf-8"))
    return loaded


def vectors(life: Life) -> dict[str, tuple[Vectors, Vectors]]:
    """Query and gallery vectors of each cell, through the published files one by one."""
    published = read_publication(life.repo).manifests
    old, new = published[1], published[2]
    asked = decode_listing(list_images(life.data / "queries"), SIZE)
    held = decode_listing(list_images(life.data / "gallery"), SIZE)
    old_embedder, new_embedder = open_embedder(life.repo, old), open_embedder(life.repo, new)
    side = open_side_encoder(life.repo, old).run(held)
    stored = old_embedder.run(held)
    upgraded = open_upgrade(life.repo, new, new.upgrades[0]).run(stored, side).embedding
    return {
        "1/1": (old_embedder.run(asked), stored),
        "2/1": (new_embedder.run(asked), stored),
        "2/1>2": (new_embedder.run(asked), upgraded),
        "2/2": (new_embedder.run(asked), new_embedder.run(held)),
    }


@pytest.mark.parametrize("cell", ["1/1", "2/1", "2/1>2", "2/2"])
def test_cells_agree_with_a_slow_oracle(
    cell: str, life: Life, report: dict[str, dict[str, dict[str, float]]]
) -> None:
    asked = [p.split("/")[0] for p in list_images(life.data / "queries").paths]
    held = [p.split("/")[0] for p in list_images(life.data / "gallery").paths]
    expected = slow_cell(*vectors(life)[cell], asked, held)
    for name, value in expected.items():
        assert report["cells"][cell][name] == pytest.approx(value, abs=1e-5), name


def test_neighbours_are_gallery_paths_nearest_first(
    life: Life, report: dict[str, dict[str, dict[str, list[str]]]]
) -> None:
    queries, gallery = vectors(life)["2/1>2"]
    asked, held = (list_images(life.data / part).paths for part in ("queries", "gallery"))
    found = report["neighbours"]["2/1>2"]
    assert set(found) == set(asked)
    for row in (0, 41):
        distances = ((queries[row] - gallery) ** 2).sum(1)
        assert found[asked[row]] == [held[i] for i in np.argsort(distances)[:5]]


def test_the_criterion_follows_from_the_cells(
    report: dict[str, dict[str, dict[str, float]]],
) -> None:
    cells, told = report["cells"], report["criterion"]["2/1>2"]
    old, served, new = (cells[name]["map"] for name in ("1/1", "2/1>2", "2/2"))
    assert told["compatible"] is True
    assert told["share_kept"] == pytest.approx(served / new)
    assert told["gap_closed"] == pytest.approx((served - old) / (new - old))
    # Release 2 was trained on its own: what it is held to is itself.
    assert told["update_gain"] == pytest.approx((served - old) / (new - old))
    assert told["upgrade_gain"] == pytest.approx((served - old) / old)
    assert told["degradation"] == 0
    raw = report["criterion"]["2/1"]
    assert raw["compatible"] is False and raw["update_gain"] is None
    assert raw["upgrade_gain"] == pytest.approx((cells["2/1"]["map"] - old) / old)
    assert "2/2" not in report["criterion"]


def test_the_strict_criterion_is_that_of_every_pair(
    life: Life, report: dict[str, dict[str, dict[str, float]]]
) -> None:
    asked = [p.split("/")[0] for p in list_images(life.data / "queries").paths]
    held = [p.split("/")[0] for p in list_images(life.data / "gallery").paths]
    (old, gallery), (new, _) = (vectors(life)[cell] for cell in ("1/1", "2/1"))
    kept: dict[bool, list[bool]] = {True: [], False: []}
    for i, name in enumerate(asked):
        for j, other in enumerate(held):
            further = new[i] @ gallery[j] - old[i] @ gallery[j]
            kept[name == other].append(further >= 0 if name == other else further <= 0)
    told = report["criterion"]["2/1"]
    assert told["strict_together"] == pytest.approx(np.mean(kept[True]), abs=1e-3)
    assert told["strict_apart"] == pytest.approx(np.mean(kept[False]), abs=1e-3)
    # Not asked of vectors that took a route.
    assert report["criterion"]["2/1>2"]["strict_together"] is None


class Random(PublishedListing):
    """Vectors that mean nothing."""

    def native_vectors(self, release: int) -> Vectors:
        rng = np.random.default_rng(release)
        return rng.normal(size=(len(self.listing), 4)).astype(np.float32)


def test_a_compatible_release_is_held_to_an_independent_one(life: Life) -> None:
    """BCT Table 1: lower bound 77.86, BCT 80.25, an update gain of 26.26 % of the paragon's 86.96;
    new/new of the compatible model 85.
    """
    published = read_publication(life.repo).manifests[1]
    methods = {1: "independent", 2: "independent", 3: "bct"}
    manifests = {n: published.model_copy(update={"method": m}) for n, m in methods.items()}
    listing = list_images(life.data / "queries")
    images = Random(listing, life.repo, manifests)
    figures = {"1/1": 0.7786, "3/1": 0.8025, "3/3": 0.85, "2/2": 0.8696}
    none = np.zeros(0)
    cells = [
        MatrixCell(parse_cell(name), {"map": value}, np.ones(3), none, none, "")
        for name, value in figures.items()
    ]
    relevance = relevance_by_label(listing.labels, listing.labels)
    told = compute_criteria(cells, images, images, relevance, independent_release=2)["3/1"]
    assert told["update_gain"] == pytest.approx(0.2626, abs=1e-4)
    assert told["upgrade_gain"] == pytest.approx(0.0307, abs=1e-4)
    assert told["degradation"] == pytest.approx(0.0225, abs=1e-4)
    # Its own new/new is no upper bound.
    unheld = compute_criteria(cells, images, images, relevance)["3/1"]
    assert unheld["update_gain"] is None and unheld["degradation"] is None
    assert unheld["upgrade_gain"] == told["upgrade_gain"]


def test_backfill_curves_run_from_served_to_native(life: Life, tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    result = run_evaluate(life, "--cells", "2/1,2/1>2,2/2", "--json", file, "--backfill")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    report = json.loads(file.read_text("utf-8"))
    cells = report["cells"]
    # Vectors that are searched as they are get a backfill, too: BCT's own case.
    assert set(report["backfill"]) == {"2/1", "2/1>2"}
    for name, curves in report["backfill"].items():
        assert set(curves) == {"random", "class", "oracle"}
        for curve in curves.values():
            assert curve["map"][0] == pytest.approx(cells[name]["map"])
            assert curve["map"][-1] == pytest.approx(cells["2/2"]["map"])
        # Ten classes of 16 images: 2 % of the classes are less than one.
        assert curves["class"]["shares"] == pytest.approx([i / 10 for i in range(11)])
        # The same curves are printed, a row each.
        for order, curve in curves.items():
            for title, key in (("CMC-1", "cmc1"), ("mAP", "map")):
                told = [f"{100 * value:.1f}" for value in (*curve[key], curve[f"mean_{key}"])]
                assert [name, order, title, *told] in rows, result.output


def test_a_backfill_without_an_older_gallery_says_so(life: Life) -> None:
    result = run_evaluate(life, "--cells", "2/2", "--backfill")
    assert result.exit_code == 0, result.output
    assert "--backfill measured no curve" in result.output


def test_a_backfill_by_class_replaces_whole_classes(life: Life, tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    result = run_evaluate(life, "--cells", "2/1", "--json", file, "--backfill")
    assert result.exit_code == 0, result.output
    curve = json.loads(file.read_text("utf-8"))["backfill"]["2/1"]["class"]
    asked = [p.split("/")[0] for p in list_images(life.data / "queries").paths]
    held = [p.split("/")[0] for p in list_images(life.data / "gallery").paths]
    (queries, stored), (_, whole) = (vectors(life)[cell] for cell in ("2/1", "2/2"))
    possible = []
    for digit in sorted(set(held)):
        done = np.array([name == digit for name in held])[:, None]
        possible.append(slow_cell(queries, np.where(done, whole, stored), asked, held)["map"])
    assert min(abs(curve["map"][1] - value) for value in possible) < 1e-4


def test_verification_agrees_with_counting(
    life: Life, report: dict[str, dict[str, dict[str, float]]]
) -> None:
    queries, gallery = vectors(life)["2/2"]
    asked = [p.split("/")[0] for p in list_images(life.data / "queries").paths]
    held = [p.split("/")[0] for p in list_images(life.data / "gallery").paths]
    genuine: list[float] = []
    impostor: list[float] = []
    for query, name in zip(queries, asked, strict=True):
        for vector, other in zip(gallery, held, strict=True):
            (genuine if name == other else impostor).append(float(1 - query @ vector))
    threshold = sorted(impostor)[len(impostor) // 1000]
    expected = sum(distance < threshold for distance in genuine) / len(genuine)
    assert report["cells"]["2/2"]["tar_at_far_0.001"] == pytest.approx(expected, abs=0.003)


def test_one_folder_on_both_sides_leaves_the_image_itself_out(life: Life, tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    folder = life.data / "queries"
    result = run_evaluate(
        life, "--gallery", folder, "--cells", "2/2", "--json", file, "--neighbours", "3"
    )
    assert result.exit_code == 0, result.output
    neighbours = json.loads(file.read_text("utf-8"))["neighbours"]["2/2"]
    assert all(query not in found for query, found in neighbours.items())
    assert json.loads(file.read_text("utf-8"))["cells"]["2/2"]["cmc1"] < 1


def test_the_quantised_twin_can_be_measured(life: Life, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("fp32.json", "int8.json")]
    for file, extra in zip(files, ((), ("--int8",)), strict=True):
        result = run_evaluate(life, "--cells", "2/1>2", "--json", file, *extra)
        assert result.exit_code == 0, result.output
    whole, small = (json.loads(f.read_text("utf-8"))["cells"]["2/1>2"]["map"] for f in files)
    assert small == pytest.approx(whole, abs=0.05)
    assert small != whole


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--cells", "2-1"), 78, "expected a cell like"),
        (("--cells", "3/3"), 66, "release 3 is not published"),
        (("--cells", "2/2", "--independent", "3"), 66, "release 3 is not published"),
        (("--cells", "2/2>1"), 66, "no published upgrade leads from release 2 to release 1"),
        (("--model-repo", "nowhere"), 78, "has no published release to measure"),
        (("--queries", "nowhere"), 78, "there is no such folder"),
    ],
)
def test_wrong_requests_are_refused(
    life: Life, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = run_evaluate(life, *arguments)
    assert result.exit_code == code, result.output
    assert message in result.output


def test_folders_without_a_class_in_common_are_refused(life: Life, tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "zero").symlink_to(life.data / "gallery" / "0")
    result = run_evaluate(life, "--gallery", tmp_path / "g", "--cells", "2/2")
    assert result.exit_code == 65
    assert "no class name in common" in result.output


def test_a_gallery_without_another_image_of_a_class_is_refused(life: Life, tmp_path: Path) -> None:
    """Each query finds only itself, which is left out of its answers: nothing can be measured."""
    for name in ("0", "1", "2"):
        image = min((life.data / "gallery" / name).iterdir())
        (tmp_path / name).mkdir()
        (tmp_path / name / image.name).write_bytes(image.read_bytes())
    result = run_evaluate(life, "--queries", tmp_path, "--gallery", tmp_path, "--cells", "2/2")
    assert result.exit_code == 65, result.output
    assert f"--gallery {tmp_path}: expected another image of a query's class" in result.output


def test_a_picture_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    one, none = np.ones(1), np.empty((1, 0), np.int64)
    cell = MatrixCell(parse_cell("1/1"), {"map": 1.0, "cmc1": 1.0}, one, one, none, "a")
    with pytest.raises(CannotWriteError):
        write_picture([cell], file / "cells.png")
