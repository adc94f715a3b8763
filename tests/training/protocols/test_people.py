"""Market-1501's names and junk, VGGFace2's subsample."""

from pathlib import Path

import numpy as np
import pytest

from nobackfill.class_folders import ImageListing
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.metrics.ranking import rank
from nobackfill.metrics.retrieval import average_precision, cmc
from nobackfill.training.protocols.persons import (
    draw_per_class,
    market_relevance,
    read_person_images,
)

GALLERY = [
    "-1_c1s1_000001_00.jpg",
    "0000_c2s1_000001_00.jpg",
    "0002_c1s1_000451_03.jpg",
    "0002_c2s1_000452_01.jpg",
    "0007_c1s2_000453_01.jpg",
    "0007_c3s3_000454_02.jpg",
]


@pytest.fixture
def market(tmp_path: Path) -> Path:
    for folder, names in (
        ("query", ["0002_c1s1_000001_00.jpg", "0007_c2s1_000001_00.jpg"]),
        ("bounding_box_test", [*GALLERY, "Thumbs.db"]),
    ):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    return tmp_path


def test_names_say_person_and_camera(market: Path) -> None:
    gallery = read_person_images(market / "bounding_box_test")
    assert [path.name for path in gallery.paths] == sorted(GALLERY)
    assert gallery.person_ids.tolist() == [-1, 0, 2, 2, 7, 7]
    assert gallery.camera_ids.tolist() == [1, 2, 1, 2, 1, 3]


def test_own_camera_and_bad_detections_are_junk_distractors_are_wrong(market: Path) -> None:
    queries, gallery = (
        read_person_images(market / "query"),
        read_person_images(market / "bounding_box_test"),
    )
    found = market_relevance(queries, gallery)
    assert found.relevant[0].tolist() == [3] and found.ignored[0].tolist() == [0, 2]
    assert found.relevant[1].tolist() == [4, 5] and found.ignored[1].tolist() == [0]
    # Nearest to both: the bad detection, then the distractor, then the gallery's order.
    ranking = rank(np.array([[-1.0], [-1.0]]), np.arange(6.0)[:, None], found)
    assert ranking.ranks[0].tolist() == [2]
    assert ranking.ranks[1].tolist() == [4, 5]
    assert cmc(ranking, 1).tolist() == [0, 0]
    np.testing.assert_allclose(average_precision(ranking), [1 / 2, (1 / 4 + 2 / 5) / 2])


def test_other_names_are_refused(market: Path) -> None:
    (market / "query" / "person7.jpg").touch()
    with pytest.raises(InvalidInputError, match=r"person7.jpg: expected a file name .* 0002_c1s1"):
        read_person_images(market / "query")
    with pytest.raises(NotFoundError, match="gallery"):
        read_person_images(market / "gallery")
    (market / "empty").mkdir()
    with pytest.raises(InvalidInputError, match="got none"):
        read_person_images(market / "empty")


def faces(counts: list[int]) -> ImageListing:
    labels = np.repeat(np.arange(len(counts)), counts)
    names = tuple(f"n{i:06d}" for i in range(len(counts)))
    paths = tuple(f"{names[label]}/{i:04d}_01.jpg" for i, label in enumerate(labels))
    return ImageListing(Path("test"), names, paths, labels)


def test_the_subsample_has_fifty_of_each_subject_and_is_fixed() -> None:
    listing = faces([70, 50, 90])
    rows = draw_per_class(listing)
    assert np.bincount(listing.labels[rows]).tolist() == [50, 50, 50]
    assert len(np.unique(rows)) == 150 and (np.diff(rows) > 0).all()
    assert np.array_equal(rows, draw_per_class(listing))
    assert not np.array_equal(rows, draw_per_class(listing, seed=1))
    with pytest.raises(InvalidInputError, match="class n000001 of test: expected at least 50"):
        draw_per_class(faces([60, 49]))
