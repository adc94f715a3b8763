"""Calibration and gate: halves that can be compared in, of small and lopsided folders."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from nobackfill.class_folders import ImageListing
from nobackfill.errors import InvalidInputError
from nobackfill.quality.listing import split_halves
from tests.training.life import run_export


def listing(sizes: list[int]) -> ImageListing:
    names = tuple(f"class{label:03d}" for label in range(len(sizes)))
    paths = tuple(
        f"{n}/{row}.png" for n, size in zip(names, sizes, strict=True) for row in range(size)
    )
    return ImageListing(Path("eval"), names, paths, np.repeat(np.arange(len(sizes)), sizes))


def pairs(sizes: list[int], half: np.ndarray) -> int:
    """Classes of which a half holds two images."""
    labels = listing(sizes).labels[half]
    return int((np.bincount(labels, minlength=len(sizes)) >= 2).sum())


@pytest.mark.parametrize(
    "sizes",
    [
        [2] * 4,
        [3] * 242,
        [4, 4],
        [1] * 50 + [4, 4],
        [10_000] + [3] * 200,
        [1, 2, 1, 2, 1, 2, 1, 2],
        [2, 5, 2, 5, 3, 3],
        [24] * 10,
    ],
)
def test_both_halves_have_pairs_where_the_folder_has_them(sizes: list[int]) -> None:
    made = listing(sizes)
    first, second = split_halves(made, 0)
    assert sorted([*first, *second]) == list(range(len(made)))
    usable = sum(size >= 4 for size in sizes) + sum(size in (2, 3) for size in sizes) / 2
    for half in (first, second):
        assert pairs(sizes, half) >= max(2, int(usable))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 5))
def test_what_is_enough_is_never_refused(sizes: list[int], seed: int) -> None:
    large, small = sum(n >= 4 for n in sizes), sum(n in (2, 3) for n in sizes)
    if large + small // 2 >= 2:
        first, second = split_halves(listing(sizes), seed)
        assert not set(first) & set(second)
    else:
        with pytest.raises(InvalidInputError, match="each half needs 2 classes with 2 images"):
            split_halves(listing(sizes), seed)


def test_a_refusal_is_one_short_line() -> None:
    with pytest.raises(InvalidInputError) as refusal:
        split_halves(listing([1] * 242), 0)
    assert "class000: 1, class001: 1, class002: 1 and 239 more" in str(refusal.value)
    assert len(str(refusal.value)) < 400
    assert "\n" not in str(refusal.value)


def test_export_refuses_before_it_exports(tmp_path: Path) -> None:
    """The run folder that is named is not there: nobody has looked yet."""
    folder = tmp_path / "eval"
    for name in ("a", "b", "c"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / name / "1.png")
    result = run_export(tmp_path / "repo", 1, "--embedder", "nowhere", "--eval", folder)
    assert result.exit_code == 65
    assert "got 3 images in 3 classes" in result.output
