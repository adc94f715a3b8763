"""Pictures that are given, or those that installed packages bring, and a second view of each."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from nobackfill.errors import InvalidInputError

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
# Side of the tiles that found pictures are cut into, and the spread of a tile that shows something.
_TILE, _SPREAD = 96, 12.0
# Photographs of packages, below their folders.
_BROUGHT = {
    "skimage": "data", "sklearn": "datasets/images", "matplotlib": "mpl-data/sample_data",
}  # fmt: skip
# Of them what is no photograph, or another's twin.
_LEFT_OUT = {
    "chessboard_GRAY", "chessboard_RGB", "color", "horse", "logo", "logo2", "microaneurysms",
    "Minduka_Present_Blue_Pack", "motorcycle_right", "page", "phantom", "text",
}  # fmt: skip


def draw_pictures(folder: Path, count: int, seed: int = 0) -> list[Path]:
    """At most `count` pictures of a folder and those below, drawn by seed, as paths in it.

    Raises InvalidInputError for less than 100.
    """
    every = sorted(
        one for one in folder.rglob("*")
        if one.suffix.lower() in SUFFIXES and not one.name.startswith(".")
    )  # fmt: skip
    if len(every) < 100:
        raise InvalidInputError(
            f"{folder}: expected a folder with at least 100 PNG, JPEG or WebP files, found "
            f"{len(every)}; `--images packages` takes those that installed packages bring"
        )
    rows = np.random.default_rng(seed).permutation(len(every))[:count]
    return [every[row].relative_to(folder) for row in sorted(rows.tolist())]


def write_photo_tiles(packages: Path, folder: Path) -> str:
    """Write tiles of the photographs that installed packages bring into `folder`, unless they are
    there; which packages that were."""
    said = []
    for name, below in _BROUGHT.items():
        top = packages / name
        if not top.is_dir():
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                continue
            top = Path(spec.origin).parent
        files = sorted(one for one in (top / below).glob("*") if one.suffix in SUFFIXES)
        files = [one for one in files if one.stem not in _LEFT_OUT]
        said.append(f"{len(files)} of {name}")
        for file in files:
            for number, tile in enumerate(_tiles(file)):
                place = folder / name / f"{file.stem}-{number:03d}.png"
                if not place.exists():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    _save(tile, place)
    tiles = sum(1 for _ in folder.rglob("*.png"))
    return f"{tiles} tiles of {_TILE} x {_TILE} pixels of {', '.join(said)}"


def write_second_views(folder: Path, names: Sequence[Path], into: Path) -> None:
    """A second view of each of these pictures under the same name, unless it is there."""
    for number, name in enumerate(names):
        place = into / name
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            with Image.open(folder / name) as opened:
                _save(make_second_view(opened.convert("RGB"), number), place)


def make_second_view(image: Image.Image, seed: int) -> Image.Image:
    """75 to 87 % of either side, mirrored or not, lighter or darker by up to a fifth."""
    rng = np.random.default_rng(seed)
    side = int(min(image.size) * rng.uniform(0.75, 0.875))
    left, top = (int(rng.integers(0, length - side + 1)) for length in image.size)
    part = image.crop((left, top, left + side, top + side))
    view = part.resize(image.size, Image.Resampling.BILINEAR)
    view = ImageOps.mirror(view) if rng.random() < 0.5 else view
    return ImageEnhance.Brightness(view).enhance(float(rng.uniform(0.8, 1.2)))


def _tiles(file: Path) -> Iterator[Image.Image]:
    """Squares side by side that show something."""
    with Image.open(file) as opened:
        image = opened.convert("RGB")
    for top in range(0, image.height - _TILE + 1, _TILE):
        for left in range(0, image.width - _TILE + 1, _TILE):
            tile = image.crop((left, top, left + _TILE, top + _TILE))
            if np.asarray(tile.convert("L")).std() >= _SPREAD:
                yield tile


def _save(image: Image.Image, place: Path) -> None:
    """Whole or not there, for a run that is killed."""
    part = place.with_name(f".part{place.suffix}")
    image.save(part)
    part.replace(place)
