"""A folder of results belongs to the images that it was begun with."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.research.compare import compare
from nobackfill.research.images import require_same_images
from nobackfill.research.presets import DIGITS
from nobackfill.research.results import Results

SHORT = {
    "embedder": {"epochs": 1, "batch_size": 8, "warmup_epochs": 0},
    "side_encoder": {"epochs": 1, "batch_size": 8, "warmup_epochs": 0},
}
FEW = replace(DIGITS, name="few")


def compared(images: Path, out: Path) -> Results:
    return compare(FEW, images, out, [0], ("independent",), 1, SHORT)


def test_other_images_are_refused_in_the_same_folder(digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = compared(digits / "queries", out)
    with pytest.raises(ConfigurationError, match=r"other images .* choose another --out"):
        compared(digits / "gallery", out)
    # A copy is the same, though its files were written at another time; so is what an older version
    # left, which knew of no note.
    shutil.copytree(digits / "queries", tmp_path / "copy", copy_function=shutil.copyfile)
    assert compared(tmp_path / "copy", out).splits == first.splits
    (out / "few" / "images.json").unlink()
    assert compared(digits / "queries", out).splits == first.splits
    with pytest.raises(ConfigurationError, match="other images"):
        compared(digits / "gallery", out)


@pytest.mark.parametrize("share", [0.4, None])
def test_names_lengths_and_contents_tell_images_apart(
    share: float | None, digits: Path, tmp_path: Path
) -> None:
    images = tmp_path / "images"
    for part in ("train", "test"):
        shutil.copytree(digits / "queries", images / part / "digits" if share else images / part)
    root = tmp_path / "root"
    require_same_images(images, share, root)
    files = sorted((images / "test").rglob("*.png"))
    first, last = files[0], files[-1]
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    _refused(images, share, root)
    first.write_bytes(content)
    require_same_images(images, share, root)
    os.truncate(last, last.stat().st_size - 1)
    _refused(images, share, root)
    last.unlink()
    _refused(images, share, root)
    last.symlink_to("nowhere.png")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        require_same_images(images, share, root)


def _refused(images: Path, share: float | None, root: Path) -> None:
    with pytest.raises(ConfigurationError, match="other images"):
        require_same_images(images, share, root)
