"""Pictures of `make demo-adopt IMAGES=…`: those that packages bring, and those of a folder."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from demo.adoption import pictures
from nobackfill.errors import InvalidInputError


def pixels(file: Path) -> np.ndarray:
    with Image.open(file) as opened:
        return np.asarray(opened)


def test_photographs_of_packages_become_tiles_once(tmp_path: Path) -> None:
    """Of packages that are installed here: two photographs of scikit-learn, one of matplotlib."""
    said = pictures.write_photo_tiles(tmp_path / "no packages", tmp_path / "tiles")
    assert "2 of sklearn, 1 of matplotlib" in said
    files = {one: one.stat().st_mtime_ns for one in (tmp_path / "tiles").rglob("*.png")}
    assert f"{len(files)} tiles" in said
    assert {pixels(one).shape for one in files} == {(96, 96, 3)}
    china = pixels(tmp_path / "tiles" / "sklearn" / "china-000.png")
    from sklearn.datasets import load_sample_image

    photograph = load_sample_image("china.jpg")
    corners = [photograph[top : top + 96, left : left + 96] for top, left in _grid(photograph)]
    assert any(np.array_equal(china, corner) for corner in corners)
    assert pictures.write_photo_tiles(tmp_path / "no packages", tmp_path / "tiles") == said
    assert {one: one.stat().st_mtime_ns for one in files} == files


def _grid(photograph: np.ndarray) -> list[tuple[int, int]]:
    height, width = photograph.shape[:2]
    return [(y, x) for y in range(0, height - 95, 96) for x in range(0, width - 95, 96)]


def test_a_folder_of_pictures_is_drawn_from_and_seen_a_second_time(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    rng = np.random.default_rng(0)
    for number in range(101):
        place = folder / f"{number % 3}" / f"p {number}.{('jpg', 'PNG', 'webp')[number % 3]}"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (20, 30, 3), np.uint8)).save(place)
    (folder / "0" / "notes.txt").write_text("no picture")
    names = pictures.draw_pictures(folder, 40)
    assert len(set(names)) == 40 and pictures.draw_pictures(folder, 40) == names
    before = {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    pictures.write_second_views(folder, names[:5], tmp_path / "views")
    for name in names[:5]:
        view, image = pixels(tmp_path / "views" / name), pixels(folder / name)
        assert view.shape == image.shape and not np.array_equal(view, image)
    assert {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()} == before
    for few in (folder / "1", tmp_path / "none"):
        with pytest.raises(InvalidInputError, match="at least 100 PNG, JPEG or WebP files"):
            pictures.draw_pictures(few, 40)
