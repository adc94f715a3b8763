"""What exports say of the pixels that a model of images reads, in files beside its ONNX file."""

import re
from collections.abc import Iterator
from math import floor, isclose
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from nobackfill.errors import InvalidInputError
from nobackfill.framing import Fit, Interpolation, Margin

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Of red, green and blue: what is taken off, and what that is divided by.
Channels = tuple[_Finite, _Finite, _Finite]
Spread = tuple[_Positive, _Positive, _Positive]
Side = Annotated[int, Field(ge=1, le=4096)]
# Height and width.
Size = tuple[Side, Side]

# As numbers of Pillow's, which transformers writes.
_RESAMPLE: dict[int, Interpolation] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
# Image processors of transformers whose pixels are made here as they make them, and whether a size
# of one number is that of both sides; else it is the shortest side's.
_SQUARE = {
    "Beit": True, "Bit": False, "Blip": True, "CLIP": False, "ChineseCLIP": False,
    "ConvNext": False, "DINOv3ViT": True, "Flava": True, "MobileNetV1": False,
    "MobileNetV2": False, "PoolFormer": False, "Pvt": True, "Siglip": True, "ViT": True,
}  # fmt: skip
# Endings of their names, by the version and the backend.
_END = re.compile(r"(FeatureExtractor|ImageProcessor(Fast|Pil)?)\Z")
_BLACK = (0, (0, 0, 0))


class Preprocessing(BaseModel):
    """How a picture becomes a model's pixels: nobackfill.framing.Frame, and what is taken off
    values of 0..1 and what they are divided by."""

    size: Size
    fit: Fit
    shortest: Side | None = None
    interpolation: Interpolation
    margin: Margin = "nearest"
    mean: Channels
    std: Spread


class _Edges(BaseModel):
    shortest_edge: Side | None = None
    height: Side | None = None
    width: Side | None = None


class _Transformers(BaseModel):
    """preprocessor_config.json of transformers' image processors."""

    image_processor_type: str | None = None
    feature_extractor_type: str | None = None
    do_resize: bool = True
    size: Side | _Edges
    default_to_square: bool | None = None
    do_center_crop: bool | None = False
    crop_size: Side | _Edges | None = None
    crop_pct: float | None = Field(None, gt=0, le=1)
    do_pad: bool | None = False
    resample: int = 2
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    rescale_offset: bool = False
    do_normalize: bool = True
    image_mean: Channels = (0, 0, 0)
    image_std: Spread = (1, 1, 1)

    def read(self) -> Preprocessing:
        name = self.image_processor_type or self.feature_extractor_type or ""
        family = _END.sub("", name)
        if name and family not in _SQUARE:
            raise ValueError(f"expected an image processor of {', '.join(_SQUARE)}, got {name}")
        plain = self.do_resize and self.do_rescale and not (self.do_pad or self.rescale_offset)
        if not plain or not isclose(self.rescale_factor, 1 / 255, rel_tol=1e-3):
            raise ValueError("expected pictures resized and divided by 255, nothing padded")
        if self.resample not in _RESAMPLE:
            raise ValueError(f"expected resample of {sorted(_RESAMPLE)}, got {self.resample}")
        square = self.default_to_square
        if square is None:
            square = _SQUARE.get(family, False)
        size, fit, shortest = self._framed(square=square)
        return Preprocessing(
            size=size, fit=fit, shortest=shortest, interpolation=_RESAMPLE[self.resample],
            margin="down" if fit == "crop" else "nearest",
            mean=self.image_mean if self.do_normalize else (0, 0, 0),
            std=self.image_std if self.do_normalize else (1, 1, 1),
        )  # fmt: skip

    def _framed(self, *, square: bool) -> tuple[Size, Fit, int | None]:
        both, shortest = self._sides(self.size)
        if square and isinstance(self.size, int):
            both, shortest = (self.size, self.size), None
        if self.crop_pct is not None and shortest is not None:
            # ConvNeXT's: larger ones are not cut.
            sides = (shortest, shortest)
            if shortest >= 384:
                return sides, "stretch", None
            return sides, "crop", int(shortest / self.crop_pct)
        if not self.do_center_crop:
            if both is None and isinstance(self.size, int):
                both = (self.size, self.size)
            if both is None:
                raise ValueError("expected height and width, or a crop of the middle")
            return both, "stretch", None
        cut, side = self._sides(self.crop_size if self.crop_size is not None else self.size)
        cut = cut if side is None else (side, side)
        if cut is not None and both == cut:
            return cut, "stretch", None
        if cut is None or shortest is None:
            raise ValueError("expected the shortest edge and what is cut out of the middle")
        return cut, "crop", shortest

    @staticmethod
    def _sides(size: int | _Edges) -> tuple[Size | None, int | None]:
        """Height and width, or the shortest edge alone."""
        if isinstance(size, int):
            return None, size
        if size.height is not None and size.width is not None:
            return (size.height, size.width), None
        return None, size.shortest_edge


class _Processor(BaseModel):
    """processor_config.json of transformers 5: that of its image processor is a part of it."""

    image_processor: _Transformers | None = None

    def read(self) -> Preprocessing | None:
        return None if self.image_processor is None else self.image_processor.read()


class _OpenClip(BaseModel):
    """preprocess_cfg.json, or that part of open_clip_config.json."""

    size: Side | Size
    mean: Channels
    std: Spread
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    resize_mode: Literal["shortest", "longest", "squash"] = "shortest"
    fill_color: int | tuple[int, int, int] = 0

    def read(self) -> Preprocessing:
        size = (self.size, self.size) if isinstance(self.size, int) else self.size
        fit: Fit = "crop"
        if self.resize_mode != "shortest":
            fit = "pad" if self.resize_mode == "longest" else "stretch"
        if fit == "pad" and self.fill_color not in _BLACK:
            raise ValueError(f"expected black beside the picture, got {self.fill_color}")
        if fit == "crop" and size[0] != size[1]:
            raise ValueError(f"expected a square to be cut out, got {size}")
        return Preprocessing(
            size=size, fit=fit, shortest=max(size) if fit == "crop" else None,
            interpolation=self.interpolation, mean=self.mean, std=self.std,
        )  # fmt: skip


class _Timm(BaseModel):
    """`pretrained_cfg` of timm's config.json, or of a model."""

    input_size: tuple[Literal[3], Side, Side]
    mean: Channels
    std: Spread
    interpolation: Interpolation = "bicubic"
    crop_pct: float | None = Field(None, gt=0, le=1)
    crop_mode: Literal["center", "squash", "border"] | None = None

    def read(self) -> Preprocessing:
        height, width = self.input_size[1:]
        share = self.crop_pct or 0.875
        fit: Fit = "stretch" if self.crop_mode == "squash" else "crop"
        if self.crop_mode == "border" or (fit == "stretch" and share < 1) or height != width:
            raise ValueError(
                f"expected a square out of the middle, or the whole, got crop_mode "
                f"{self.crop_mode}, crop_pct {share:g}, {width} x {height}"
            )
        shortest = floor(height / share) if fit == "crop" else None
        return Preprocessing(
            size=(height, width), fit=fit, shortest=shortest, mean=self.mean, std=self.std,
            interpolation=self.interpolation,
        )  # fmt: skip


class _OpenClipModel(BaseModel):
    """open_clip_config.json, whose model says the size where its preprocessing does not."""

    class _Whole(BaseModel):
        class _Vision(BaseModel):
            image_size: Side | Size

        vision_cfg: _Vision

    preprocess_cfg: dict[str, object]
    model_cfg: _Whole | None = None

    def read(self) -> Preprocessing:
        whole = {} if self.model_cfg is None else {"size": self.model_cfg.vision_cfg.image_size}
        return _OpenClip.model_validate(whole | self.preprocess_cfg).read()


class _Config(BaseModel):
    """config.json, which is timm's where it has this key."""

    pretrained_cfg: _Timm | None = None

    def read(self) -> Preprocessing | None:
        return None if self.pretrained_cfg is None else self.pretrained_cfg.read()


_Kind = type[_Processor | _Transformers | _OpenClip | _OpenClipModel | _Config]
# In the order in which they are believed.
_FILES: dict[str, _Kind] = {
    "processor_config.json": _Processor,
    "preprocessor_config.json": _Transformers,
    "preprocess_cfg.json": _OpenClip,
    "open_clip_config.json": _OpenClipModel,
    "config.json": _Config,
}


def read_preprocessing(path: Path) -> tuple[Path, Preprocessing] | None:
    """What the files beside the ONNX file `path`, or in the folder above, say of its pixels, and
    which one said it.

    Raises InvalidInputError for one that says something else than can be done here.
    """
    for file, kind in _found(path):
        try:
            said = kind.model_validate_json(file.read_bytes()).read()
        except ValueError as error:
            raise InvalidInputError(
                f"{file}: cannot be followed ({_first(error)}); say what pixels the model reads in "
                f"{path.with_suffix('.json').name} beside it"
            ) from error
        if said is not None:
            return file, said
    return None


def read_timm(config: dict[str, object]) -> Preprocessing:
    """Of a timm model's `pretrained_cfg`. Raises ValueError."""
    return _Timm.model_validate(config).read()


def read_open_clip(config: dict[str, object]) -> Preprocessing:
    """Of an open_clip model's preprocessing. Raises ValueError."""
    return _OpenClip.model_validate(config).read()


def _first(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]


def _found(path: Path) -> Iterator[tuple[Path, _Kind]]:
    for folder in (path.parent, path.parent.parent):
        for name, kind in _FILES.items():
            if (folder / name).is_file():
                yield folder / name, kind
