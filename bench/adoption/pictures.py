"""Pictures and their vectors by pretrained EfficientNet-Lite models: embedded once, then kept.

A picture's query is a second view of it: another part, light and side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bench.adoption.texts import Embedded
from demo.adoption import lite
from demo.adoption.pictures import second_view
from nobackfill.adopt.maps import normalised
from nobackfill.onnx_runtime import onnxruntime
from nobackfill.vectors import Vectors

_BATCH = 16


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


def embedded(
    pictures: Pictures,
    asked: NDArray[np.int64],
    packages: Path,
    model: str,
    size: int,
    file: Path,
) -> Embedded:
    """By `model` at `size` pixels, or from `file`, where an earlier run has kept them. `asked`: the
    rows that have a second view; the others' are 0."""
    if not file.exists():
        network = _Network(packages, model, size, file.with_suffix(".onnx"))
        images = [Image.open(one).convert("RGB") for one in pictures.files]
        bodies = network.run(images)
        titles = np.zeros_like(bodies)
        titles[asked] = network.run([second_view(images[row], row) for row in asked.tolist()])
        Embedded(bodies, titles).write(file)
    return Embedded.read(file)


class _Network:
    """What lies before the classes, averaged over the picture, of norm 1.

    Run by onnxruntime, which takes a quarter of torch's time on a CPU.
    """

    def __init__(self, packages: Path, model: str, size: int, file: Path) -> None:
        self._size = size
        if not file.exists():
            lite.export(packages, model, size, file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(file, options)

    def run(self, images: Sequence[Image.Image]) -> Vectors:
        parts = []
        for first in range(0, len(images), _BATCH):
            sized = [
                np.asarray(image.resize((self._size, self._size), Image.Resampling.BICUBIC))
                for image in images[first : first + _BATCH]
            ]
            pixels = (np.stack(sized).astype(np.float32) - 127) / 128
            parts.append(self._session.run(None, {"image": pixels.transpose(0, 3, 1, 2)})[0])
        return normalised(np.concatenate(parts))
