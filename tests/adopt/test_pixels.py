"""Pictures of any aspect, brought to a model's pixels as its export says; torchvision is asked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image
from torchvision import transforms as T
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import to_tensor

from nobackfill.adopt.cli import main
from nobackfill.adopt.embedding import open_embedder
from nobackfill.adopt.embedding.vector_folder import embed_into, read_items
from nobackfill.adopt.sources.opening import open_source
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError
from tests.adopt.test_refusals import refused
from tests.support.documents import run_command

Norm = tuple[list[float], list[float]]
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
BICUBIC, BILINEAR = InterpolationMode.BICUBIC, InterpolationMode.BILINEAR


def pixels_of(path: Path, side: int | str = "side") -> Path:
    """A model whose vector is what it read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    read = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["n", 3, side, side])
    made = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", "dim"])
    node = helper.make_node("Flatten", ["pixel_values"], ["out"])
    graph = helper.make_graph([node], "pixels", [read], [made])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    return path


def photographs(folder: Path) -> Path:
    """Noise on colours, wide, high, square, and smaller than any model."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(3)
    for name, size in {
        "wide": (97, 40),
        "high": (33, 80),
        "square": (64, 64),
        "small": (9, 5),
    }.items():
        Image.fromarray(draw.integers(0, 256, (size[1], size[0], 3), np.uint8)).save(
            folder / f"{name}.png"
        )
    return folder


def read_by(model: Path, folder: Path) -> dict[str, np.ndarray]:
    items = read_items(str(folder), column="text")
    vectors = open_embedder(str(model), pixels={"normalise": False}).embed(items.contents)
    return dict(zip(items.ids, vectors, strict=True))


def padded(side: int) -> Callable[[Any], Any]:
    """open_clip's ResizeKeepRatio and CenterCropOrPad, read in its source."""

    def pad(image: Any) -> Any:
        ratio = max(image.width / side, image.height / side)
        size = [max(1, round(one / ratio)) for one in image.size]
        small = T.functional.resize(image, [size[1], size[0]], BICUBIC)
        left, top = (side - size[0]) // 2, (side - size[1]) // 2
        right, bottom = side - size[0] - left, side - size[1] - top
        return T.functional.pad(small, [left, top, right, bottom])

    return pad


def middle(shortest: int, side: int, how: InterpolationMode) -> Any:
    return T.Compose([T.Resize(shortest, how), T.CenterCrop(side)])


def middle_down(shortest: int, side: int, how: InterpolationMode) -> Any:
    """As transformers cut it out: an odd margin is halved down."""

    def cut(image: Any) -> Any:
        left, top = (image.width - side) // 2, (image.height - side) // 2
        return T.functional.crop(image, top, left, side, side)

    return T.Compose([T.Resize(shortest, how), cut])


def transformers(*, norm: Norm = IMAGENET, **said: object) -> dict[str, object]:
    mean, std = norm
    usual = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "resample": 2}
    return {**usual, "do_normalize": True, "image_mean": mean, "image_std": std, **said}


EDGE, CROP = {"shortest_edge": 24}, {"height": 24, "width": 24}
CASES: dict[str, tuple[str, dict[str, object], Callable[[Any], Any], Any]] = {
    "transformers' CLIP": (
        "preprocessor_config.json",
        transformers(do_center_crop=True, size=EDGE, crop_size=CROP, resample=3, norm=CLIP,
                     image_processor_type="CLIPImageProcessor"),
        middle_down(24, 24, BICUBIC), CLIP,
    ),
    "transformers' CLIP of before": (
        "preprocessor_config.json",
        transformers(do_center_crop=True, size=24, crop_size=24, resample=3, norm=CLIP),
        middle_down(24, 24, BICUBIC), CLIP,
    ),
    "transformers' DINOv2": (
        "preprocessor_config.json",
        transformers(do_center_crop=True, size={"shortest_edge": 28}, crop_size=CROP, resample=3),
        middle_down(28, 24, BICUBIC), IMAGENET,
    ),
    "transformers' ViT": (
        "preprocessor_config.json", transformers(size=CROP, norm=HALF),
        T.Resize((24, 24), BILINEAR), HALF,
    ),
    "transformers' ConvNeXT": (
        "preprocessor_config.json", transformers(size=EDGE, crop_pct=0.875, resample=3),
        middle_down(27, 24, BICUBIC), IMAGENET,
    ),
    "transformers without a norm": (
        "preprocessor_config.json", transformers(size=CROP, do_normalize=False),
        T.Resize((24, 24), BILINEAR), ([0, 0, 0], [1, 1, 1]),
    ),
    "open_clip": (
        "preprocess_cfg.json",
        {"size": [24, 24], "mode": "RGB", "mean": CLIP[0], "std": CLIP[1],
         "interpolation": "bicubic", "resize_mode": "shortest", "fill_color": 0},
        middle(24, 24, BICUBIC), CLIP,
    ),
    "open_clip's squash": (
        "open_clip_config.json",
        {"model_cfg": {"embed_dim": 8, "vision_cfg": {"image_size": 24}},
         "preprocess_cfg": {"mean": HALF[0], "std": HALF[1], "resize_mode": "squash",
                            "interpolation": "bicubic"}},
        T.Resize((24, 24), BICUBIC), HALF,
    ),
    "open_clip's longest": (
        "preprocess_cfg.json",
        {"size": 24, "mean": HALF[0], "std": HALF[1], "resize_mode": "longest"}, padded(24), HALF,
    ),
    "timm": (
        "config.json",
        {"architecture": "resnet18", "pretrained_cfg": {
            "input_size": [3, 24, 24], "interpolation": "bilinear", "crop_pct": 0.95,
            "crop_mode": "center", "mean": IMAGENET[0], "std": IMAGENET[1]}},
        middle(25, 24, BILINEAR), IMAGENET,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("side", [24, "side"])
def test_what_an_export_says_is_done(case: str, side: int | str, tmp_path: Path) -> None:
    """Where optimum and Immich put it: beside the ONNX file, or one folder above."""
    name, said, steps, (mean, std) = CASES[case]
    model = pixels_of(tmp_path / "export" / "onnx" / "model.onnx", side)
    place = model.parent if side == 24 else model.parent.parent
    (place / name).write_text(json.dumps(said))
    found = read_by(model, photographs(tmp_path / "images"))
    assert len(found) == 4
    for file, vector in found.items():
        picture = to_tensor(steps(Image.open(tmp_path / "images" / file)))
        wanted = T.functional.normalize(picture, mean, std).flatten().numpy()
        # One level of 255, by the least std.
        np.testing.assert_allclose(vector, wanted, atol=1.01 / 255 / min(std))


def test_what_is_given_is_of_the_fingerprint_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pixels_of(tmp_path / "m.onnx")
    photographs(tmp_path / "images")
    embed = ["embed", "images", "--with", "m.onnx", "--out"]
    assert "--size 224" in refused([*embed, "o"], 65, monkeypatch, capsys)
    crop = ["--size", "24", "--fit", "crop", "--shortest", "28", "--interpolation", "bicubic"]
    norm = ["--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5"]
    run_command(main, ["nobackfill", *embed, "cut", *crop, *norm], monkeypatch)
    told = capsys.readouterr().err
    assert "24 x 24 pixels, crop from 28, bicubic, less mean 0.5 0.5 0.5" in told
    assert "these are assumptions" in told and "m.json" in told
    said = {"size": 24, "fit": "crop", "shortest": 28, "interpolation": "bicubic"}
    said |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    with pytest.raises(IncompatibleSpaceError, match="other settings"):
        stretched = open_embedder("m.onnx", pixels={"size": 24})
        embed_into(Path("cut"), read_items("images", column="text"), stretched)
    # The same, written beside it, is the same space.
    (tmp_path / "m.json").write_text(json.dumps(said))
    run_command(main, ["nobackfill", *embed, "cut"], monkeypatch)
    assert capsys.readouterr().out.startswith("0 items embedded now, 4 with a vector in cut")
    assert open_source("cut").facts().model == open_embedder("m.onnx").fingerprint


def test_a_declaration_of_before_names_the_same_model(tmp_path: Path) -> None:
    """What stretched, as all did, and was made then, is of the same fingerprint now."""
    model = pixels_of(tmp_path / "m.onnx", 24)
    digest = open_embedder(str(model)).fingerprint
    assert digest == open_embedder(str(model), pixels={"fit": "stretch"}).fingerprint
    others = [{"fit": "pad"}, {"fit": "crop"}, {"interpolation": "bicubic"}]
    assert len({open_embedder(str(model), pixels=one).fingerprint for one in others}) == 3


@pytest.mark.parametrize(
    ("name", "said", "why"),
    [
        ("preprocessor_config.json", transformers(size={"longest_edge": 24}), "cannot be applied"),
        ("preprocessor_config.json", transformers(size=EDGE), "cannot be applied"),
        ("preprocessor_config.json", transformers(size=CROP, resample=0), "resample"),
        ("preprocessor_config.json", transformers(size=CROP, rescale_factor=1), "divided by 255"),
        ("preprocessor_config.json", transformers(size=CROP, do_pad=True), "without padding"),
        ("preprocess_cfg.json", {"size": 24, "mean": [0] * 3, "std": [1] * 3, "fill_color": 127,
                                 "resize_mode": "longest"}, "black"),
        ("config.json", {"pretrained_cfg": {"input_size": [3, 24, 24], "mean": [0] * 3,
                                            "std": [1] * 3, "crop_mode": "border"}}, "border"),
        ("preprocessor_config.json", transformers(size={"height": 30, "width": 30}), "30 x 30"),
        ("preprocessor_config.json", [1, 2], "cannot be applied"),
        ("preprocessor_config.json", transformers(size=CROP, norm=([0] * 3, [1, 0, 1])),
         "image_std.1: Input should be greater than 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(name: str, said: object, why: str, tmp_path: Path) -> None:
    model = pixels_of(tmp_path / "m" / "model.onnx", 24)
    (tmp_path / "m" / name).write_text(json.dumps(said))
    with pytest.raises(InvalidInputError, match=why):
        open_embedder(str(model))
    # Said by hand instead.
    (tmp_path / "m" / "model.json").write_text('{"fit": "pad"}')
    assert open_embedder(str(model)).input_kind == "image"
