"""Search against the plainest oracle: every distance, computed and sorted in float64."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nobackfill.client.cli.main import run_line
from nobackfill.client.device import Device
from nobackfill.client.search import Search
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.gallery.spec import Origin
from nobackfill.gallery.store import NewVectors
from tests.support import blocks, edge, graphs
from tests.support.edge import Setting

ITEMS = 300


@pytest.fixture
def vectors(setting: Setting) -> NDArray[np.float32]:
    """Of 300 items put into the gallery, item-0 to item-299, by number; every fifth is blue."""
    rows = np.random.default_rng(1).standard_normal((ITEMS, graphs.DIM)).astype(np.float32)
    rows[7] = rows[3]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    with Device(setting.gallery) as device:
        device.store.delete([item.id for item in device.store.list_items()])
        device.store.put(
            [f"item-{row}" for row in range(ITEMS)],
            [NewVectors(device.store.active().spec.space, rows)],
            metadata=[{"blue": row % 5 == 0, "row": row} for row in range(ITEMS)],
        )
    return rows


def nearest(vectors: NDArray[np.float32], query: NDArray[np.float32]) -> list[tuple[str, float]]:
    squared = ((vectors.astype(np.float64) - query.astype(np.float64)) ** 2).sum(axis=1)
    order = np.argsort(squared, kind="stable")
    return [(f"item-{row}", float(squared[row])) for row in order]


def test_by_id_finds_the_nearest_others(setting: Setting, vectors: NDArray[np.float32]) -> None:
    with Device(setting.gallery) as device:
        search = Search(device, {})
        for row in (0, 3, 7, 299):
            hits = search.by_id(f"item-{row}", 20).hits
            expected = [h for h in nearest(vectors, vectors[row]) if h[0] != f"item-{row}"][:20]
            assert [hit.id for hit in hits] == [name for name, _ in expected]
            distances = [distance for _, distance in expected]
            assert [hit.distance for hit in hits] == pytest.approx(distances, abs=1e-5)
            # The curve of the test releases: 1 at distance .01, 0.2 at 2, 0 at 4.
            scores = np.interp(distances, [0.01, 2, 4], [1, 0.2, 0])
            assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-5)
            # Items 3 and 7 are the same: nearer than any pair of the calibration.
            assert [hit.beyond_calibration for hit in hits] == [d < 0.01 for d in distances]
            assert hits[0].beyond_calibration == (row in (3, 7))


def test_an_answer_that_is_all_beyond_the_calibration_says_so(
    setting: Setting, vectors: NDArray[np.float32], capsys: pytest.CaptureFixture[str]
) -> None:
    with Device(setting.gallery) as device:
        search = Search(device, {})
        assert search.by_id("item-3", 1).beyond_calibration
        assert not search.by_id("item-3", 2).beyond_calibration
        assert not Search(device, {"row": -1}).by_id("item-3", 2).beyond_calibration
    note = "every hit lies beyond the distances that the release was calibrated on"
    for k, noted in ((1, True), (2, False)):
        with pytest.raises(SystemExit):
            run_line(["--gallery", str(setting.gallery), "search", "--id=item-3", f"-k{k}"])
        assert (note in capsys.readouterr().out) == noted


def test_filters_leave_the_rest_in_order(setting: Setting, vectors: NDArray[np.float32]) -> None:
    with Device(setting.gallery) as device:
        hits = Search(device, {"blue": True}).by_id("item-4", 100).hits
        assert Search(device, {"blue": True, "row": 5.0}).by_id("item-4", 9).hits[0].id == "item-5"
        assert Search(device, {"blue": 1.0}).by_id("item-4", 9).hits == []
    blue = [n for n, _ in nearest(vectors, vectors[4]) if int(n.removeprefix("item-")) % 5 == 0]
    assert [hit.id for hit in hits] == blue


def test_by_image_is_by_its_embedding(setting: Setting, tmp_path: Path) -> None:
    queries = blocks.write_pngs(tmp_path / "queries", 3, seed=11)
    with Device(setting.gallery) as device:
        answers = Search(device, {}).by_images(queries, 12)
    items = [vector for _, vector in edge.contents(setting.gallery).values()]
    paths = list(edge.contents(setting.gallery))
    for answer, query in zip(answers, edge.embedded(setting.repo, 1, queries), strict=True):
        expected = nearest(np.stack(items), query)
        rows = [int(name.removeprefix("item-")) for name, _ in expected]
        assert [hit.path for hit in answer.hits] == [paths[row] for row in rows]


def test_refusals(setting: Setting, tmp_path: Path) -> None:
    (tmp_path / "no.png").write_text("no image")
    with Device(setting.gallery) as device:
        search = Search(device, {})
        with pytest.raises(NotFoundError):
            search.by_id("nobody", 3)
        with pytest.raises(InvalidInputError, match=r"no\.png"):
            search.by_images([tmp_path / "no.png"], 3)
        for k in (0, 2000):
            with pytest.raises(InvalidInputError, match="1 to 1000"):
                search.by_images(setting.images, k)


def test_carried_vectors_stand_where_the_release_says(tmp_path: Path) -> None:
    """Every third was carried: as likely a match as a native one that is farther."""
    slope, offset = 1.5, 0.3
    blocks.publish_block_release(tmp_path / "repo", 1, scale=(slope, offset))
    gallery = edge.make_device(tmp_path / "repo", tmp_path / "gallery.sqlite")
    rows = np.random.default_rng(2).standard_normal((ITEMS, graphs.DIM)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    carried = np.arange(ITEMS) % 3 == 0
    apart = ((rows.astype(float) - rows[4].astype(float)) ** 2).sum(axis=1)
    order = np.argsort(np.where(carried, slope * apart + offset, apart), kind="stable").tolist()
    with Device(gallery) as device:
        space = device.store.active().spec.space
        of_each: list[tuple[Origin, NDArray[np.bool_]]]
        of_each = [("upgraded", carried), ("native", ~carried)]
        for origin, some in of_each:
            numbers = np.flatnonzero(some)
            device.store.put(
                [f"item-{row}" for row in numbers],
                [NewVectors(space, rows[numbers], origin=origin)],
                metadata=[{"blue": int(row) % 5 == 0} for row in numbers],
            )
        search = Search(device, {})
        hits = search.by_embedding({space: rows[4].tolist()}, 20).hits
        blue = search.with_filter({"blue": True}).by_embedding({space: rows[4].tolist()}, 20).hits
    assert [hit.id for hit in hits] == [f"item-{row}" for row in order[:20]]
    assert [hit.distance for hit in hits] == pytest.approx(apart[order[:20]], abs=1e-5)
    passing = [f"item-{row}" for row in order if row % 5 == 0]
    assert [hit.id for hit in blue] == passing[:20]
