"""Pictures as transformers' image processors bring them to a model's pixels, on a photograph."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

import transformers

from nobackfill.adopt.embedding.embedder import describe_preparation, open_embedder
from nobackfill.errors import InvalidInputError
from tests.adopt.library_models import LIBRARY
from tests.adopt.test_pixels import pixels_of


def tokenizer() -> Any:
    file = str(LIBRARY / "tokenizer.json")
    return transformers.PreTrainedTokenizerFast(tokenizer_file=file, pad_token="[PAD]")


def clip() -> Any:
    images = transformers.CLIPImageProcessor()
    return transformers.CLIPProcessor(image_processor=images, tokenizer=tokenizer())


def siglip() -> Any:
    images = transformers.SiglipImageProcessor()
    return transformers.SiglipProcessor(image_processor=images, tokenizer=tokenizer())


def dino() -> Any:
    sizes = {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}
    return transformers.BitImageProcessor(**sizes)


PROCESSORS = {
    "CLIP": clip,
    "SigLIP": siglip,
    "DINOv2": dino,
    "ViT": transformers.ViTImageProcessor,
    "CLIP's images alone": transformers.CLIPImageProcessor,
    "of a wide picture": lambda: transformers.ViTImageProcessor(size={"height": 96, "width": 192}),
    "BEiT": transformers.BeitImageProcessor,
    "BLIP": transformers.BlipImageProcessor,
    "ConvNeXT": lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 224}),
    "ConvNeXT, whole": transformers.ConvNextImageProcessor,
    "PoolFormer": transformers.PoolFormerImageProcessor,
}


@pytest.fixture(scope="module")
def photograph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """640 x 427 pixels, without JPEG's shortcuts for smaller sizes."""
    path = tmp_path_factory.mktemp("photographs") / "china.png"
    Image.fromarray(load_sample_image("china.jpg")).save(path)
    return path


@pytest.mark.parametrize("case", PROCESSORS)
def test_a_picture_is_what_the_library_makes_of_it(
    case: str, photograph: Path, tmp_path: Path
) -> None:
    processor = PROCESSORS[case]()
    processor.save_pretrained(tmp_path)
    model = pixels_of(tmp_path / "onnx" / "model.onnx")
    (found,) = open_embedder(str(model), pixels={"normalise": False}).embed([photograph])
    images = getattr(processor, "image_processor", processor)
    by_pillow = getattr(transformers, f"{type(images).__name__}Pil").from_pretrained(tmp_path)
    level = 1 / 255 / min(images.image_std)
    # The library's own two ways are up to two levels of 255 apart.
    for reader, levels in ((by_pillow, 1.01), (processor, 2.01)):
        said = reader(images=Image.open(photograph), return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(found, said.ravel(), atol=levels * level)


@pytest.mark.parametrize("kind", ["EfficientNet", "Levit", "DeiT", "DPT", "Siglip2"])
def test_a_processor_with_rules_of_its_own_is_refused(kind: str, tmp_path: Path) -> None:
    getattr(transformers, f"{kind}ImageProcessor")().save_pretrained(tmp_path)
    model = pixels_of(tmp_path / "model.onnx", 224)
    with pytest.raises(InvalidInputError, match=r"preprocessor_config.json: this file"):
        open_embedder(str(model))


def test_both_files_are_read_in_the_librarys_order(tmp_path: Path) -> None:
    """The part in processor_config.json is believed first; without it, the file of before."""
    clip().save_pretrained(tmp_path)
    transformers.ViTImageProcessor().save_pretrained(tmp_path)
    model = str(pixels_of(tmp_path / "model.onnx", 224))
    assert "rounded down, bicubic, less mean 0.481455" in describe_preparation(open_embedder(model))
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"processor_class": "CLIPProcessor"})
    )
    assert "stretch, bilinear, less mean 0.5" in describe_preparation(open_embedder(model))


@pytest.mark.parametrize(
    ("kind", "fit"), [("CLIPFeatureExtractor", "crop"), ("ViTImageProcessorFast", "stretch")]
)
def test_a_size_of_one_number_is_a_side_or_the_shortest_by_the_processor(
    kind: str, fit: str, tmp_path: Path
) -> None:
    said = {"size": 224, "crop_size": 224, "do_center_crop": True, "feature_extractor_type": kind}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    told = describe_preparation(open_embedder(str(pixels_of(tmp_path / "model.onnx", 224))))
    assert f"224 x 224 pixels, {fit}" in told
