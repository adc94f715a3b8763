"""Read how an image model prepares pixels, from files that exporters write next to it."""

import re
from collections.abc import Iterator
from math import floor, isclose
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from nobackfill.errors import InvalidInputError
from nobackfill.framing import Fit, Interpolation, MarginRounding

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# For red, green and blue: the mean to subtract, and the standard deviation to divide by.
Channels = tuple[_Finite, _Finite, _Finite]
ChannelSpread = tuple[_Positive, _Positive, _Positive]
Side = Annotated[int, Field(ge=1, le=4096)]
# Height and width.
Size = tuple[Side, Side]

# The numbers are Pillow's; transformers writes them.
_RESAMPLE: dict[int, Interpolation] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
# Image processors of transformers whose pixels are reproduced here. True: a size of one number is
# the size of both sides; False: of the shortest side.
_SQUARE = {
    "Beit": True, "Bit": False, "Blip": True, "CLIP": False, "ChineseCLIP": False,
    "ConvNext": False, "DINOv3ViT": True, "Flava": True, "MobileNetV1": False,
    "MobileNetV2": False, "PoolFormer": False, "Pvt": True, "Siglip": True, "ViT": True,
}  # fmt: skip
# Suffixes of their names, by version and backend.
_END = re.compile(r"(FeatureExtractor|ImageProcessor(Fast|Pil)?)\Z")
_BLACK = (0, (0, 0, 0))


class Preprocessing(BaseModel):
    """How a picture becomes a model's pixels: (value / 255 - mean) / std after
    `nobackfill.framing`."""

    size: Size
    fit: Fit
    shortest: Side | None = None
    interpolation: Interpolation
    margin: MarginRounding = "nearest"
    mean: Channels
    std: ChannelSpread


class _EdgeLengths(BaseModel):
    shortest_edge: Side | None = None
    height: Side | None = None
    width: Side | None = None


class _Transformers(BaseModel):
    """The preprocessor_config.json of transformers' image processors."""

    image_processor_type: str | None = None
    feature_extractor_type: str | None = None
    do_resize: bool = True
    size: Side | _EdgeLengths
    default_to_square: bool | None = None
    do_center_crop: bool | None = False
    crop_size: Side | _EdgeLengths | None = None
    crop_pct: float | None = Field(None, gt=0, le=1)
    do_pad: bool | None = False
    resample: int = 2
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    rescale_offset: bool = False
    do_normalize: bool = True
    image_mean: Channels = (0, 0, 0)
    image_std: ChannelSpread = (1, 1, 1)

    def read(self) -> Preprocessing:
        name = self.image_processor_type or self.feature_extractor_type or ""
        family = _END.sub("", name)
        if name and family not in _SQUARE:
            raise ValueError(f"expected an image processor of {', '.join(_SQUARE)}, got {name}")
        wrong = [
            f"{key} {value}"
            for key, value, is_fit in (
                ("do_resize", self.do_resize, self.do_resize),
                ("do_rescale", self.do_rescale, self.do_rescale),
                ("do_pad", self.do_pad, not self.do_pad),
                ("rescale_offset", self.rescale_offset, not self.rescale_offset),
                ("rescale_factor", self.rescale_factor,
                 isclose(self.rescale_factor, 1 / 255, rel_tol=1e-3)),
            )
            if not is_fit
        ]  # fmt: skip
        if wrong:
            raise ValueError(
                "expected pictures to be resized and divided by 255, without padding, got "
                f"{', '.join(wrong)}"
            )
        if self.resample not in _RESAMPLE:
            raise ValueError(
                f"resample: expected one of {', '.join(map(str, sorted(_RESAMPLE)))}, got "
                f"{self.resample}"
            )
        square = self.default_to_square
        if square is None:
            square = _SQUARE.get(family, False)
        size, fit, shortest = self._frame(square=square)
        return Preprocessing(
            size=size, fit=fit, shortest=shortest, interpolation=_RESAMPLE[self.resample],
            margin="down" if fit == "crop" else "nearest",
            mean=self.image_mean if self.do_normalize else (0, 0, 0),
            std=self.image_std if self.do_normalize else (1, 1, 1),
        )  # fmt: skip

    def _frame(self, *, square: bool) -> tuple[Size, Fit, int | None]:
        both, shortest = self._sides(self.size)
        if square and isinstance(self.size, int):
            both, shortest = (self.size, self.size), None
        if self.crop_pct is not None and shortest is not None:
            # ConvNeXT does not crop larger sizes.
            sides = (shortest, shortest)
            if shortest >= 384:
                return sides, "stretch", None
            return sides, "crop", int(shortest / self.crop_pct)
        if not self.do_center_crop:
            if both is None and isinstance(self.size, int):
                both = (self.size, self.size)
            if both is None:
                raise ValueError(
                    "expected a size with height and width, or a crop of the centre, got neither"
                )
            return both, "stretch", None
        cut, side = self._sides(self.crop_size if self.crop_size is not None else self.size)
        cut = cut if side is None else (side, side)
        if cut is not None and both == cut:
            return cut, "stretch", None
        if cut is None or shortest is None:
            raise ValueError(
                "expected the shortest edge in `size` and a centre crop in `crop_size`, got "
                f"size {self.size} and crop_size {self.crop_size}"
            )
        return cut, "crop", shortest

    @staticmethod
    def _sides(size: int | _EdgeLengths) -> tuple[Size | None, int | None]:
        """Return height and width, or the shortest edge alone."""
        if isinstance(size, int):
            return None, size
        if size.height is not None and size.width is not None:
            return (size.height, size.width), None
        return None, size.shortest_edge


class _Processor(BaseModel):
    """The processor_config.json of transformers 5, which contains that of its image processor."""

    image_processor: _Transformers | None = None

    def read(self) -> Preprocessing | None:
        return None if self.image_processor is None else self.image_processor.read()


class _OpenClip(BaseModel):
    """The preprocess_cfg.json of open_clip, or the same part of open_clip_config.json."""

    size: Side | Size
    mean: Channels
    std: ChannelSpread
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    resize_mode: Literal["shortest", "longest", "squash"] = "shortest"
    fill_color: int | tuple[int, int, int] = 0

    def read(self) -> Preprocessing:
        size = (self.size, self.size) if isinstance(self.size, int) else self.size
        fit: Fit = "crop"
        if self.resize_mode != "shortest":
            fit = "pad" if self.resize_mode == "longest" else "stretch"
        if fit == "pad" and self.fill_color not in _BLACK:
            raise ValueError(
                f"fill_color: expected black (0) for the padding, got {self.fill_color}"
            )
        if fit == "crop" and size[0] != size[1]:
            raise ValueError(f"expected a square crop, got {size}")
        return Preprocessing(
            size=size, fit=fit, shortest=max(size) if fit == "crop" else None,
            interpolation=self.interpolation, mean=self.mean, std=self.std,
        )  # fmt: skip


class _Timm(BaseModel):
    """The `pretrained_cfg` of a timm model or of its config.json."""

    input_size: tuple[Literal[3], Side, Side]
    mean: Channels
    std: ChannelSpread
    interpolation: Interpolation = "bicubic"
    crop_pct: float | None = Field(None, gt=0, le=1)
    crop_mode: Literal["center", "squash", "border"] | None = None

    def read(self) -> Preprocessing:
        height, width = self.input_size[1:]
        share = self.crop_pct or 0.875
        fit: Fit = "stretch" if self.crop_mode == "squash" else "crop"
        if self.crop_mode == "border" or (fit == "stretch" and share < 1) or height != width:
            raise ValueError(
                f"expected a square centre crop, or no crop, got crop_mode "
                f"{self.crop_mode}, crop_pct {share:g}, {width} x {height}"
            )
        shortest = floor(height / share) if fit == "crop" else None
        return Preprocessing(
            size=(height, width), fit=fit, shortest=shortest, mean=self.mean, std=self.std,
            interpolation=self.interpolation,
        )  # fmt: skip


class _OpenClipModel(BaseModel):
    """The open_clip_config.json, whose model has the size where its preprocessing lacks it."""

    class _VisionTower(BaseModel):
        class _Vision(BaseModel):
            image_size: Side | Size

        vision_cfg: _Vision

    preprocess_cfg: dict[str, object]
    model_cfg: _VisionTower | None = None

    def read(self) -> Preprocessing:
        size = {} if self.model_cfg is None else {"size": self.model_cfg.vision_cfg.image_size}
        return _OpenClip.model_validate(size | self.preprocess_cfg).read()


class _Config(BaseModel):
    """A config.json; with this key it is timm's."""

    pretrained_cfg: _Timm | None = None

    def read(self) -> Preprocessing | None:
        return None if self.pretrained_cfg is None else self.pretrained_cfg.read()


_Kind = type[_Processor | _Transformers | _OpenClip | _OpenClipModel | _Config]
# The first file that exists and has a preprocessing wins.
_FILES: dict[str, _Kind] = {
    "processor_config.json": _Processor,
    "preprocessor_config.json": _Transformers,
    "preprocess_cfg.json": _OpenClip,
    "open_clip_config.json": _OpenClipModel,
    "config.json": _Config,
}


def read_preprocessing(path: Path) -> tuple[Path, Preprocessing] | None:
    """Read the preprocessing of an image model from files next to the model or one folder above.

    The folder of the model comes first. In a folder the order is processor_config.json,
    preprocessor_config.json, preprocess_cfg.json, open_clip_config.json, config.json. A file
    without a preprocessing is passed over.

    Args:
        path: The ONNX file.

    Returns:
        The file that declares it, and the preprocessing; None without such a file.

    Raises:
        InvalidInputError: A file cannot be read, is no JSON, or declares something that is not
            reproduced here.
    """
    for file, kind in _candidates(path):
        try:
            preprocessing = kind.model_validate_json(file.read_bytes()).read()
        except OSError as error:
            raise InvalidInputError(
                f"{file}: this file of the model's preprocessing cannot be read "
                f"({error.strerror}); check its permissions"
            ) from error
        except ValueError as error:
            raise InvalidInputError(
                f"{file}: this file's preprocessing of images cannot be applied here "
                f"({_first(error)}); declare the model's pixels in "
                f"{path.with_suffix('.json').name} next to the ONNX file"
            ) from error
        if preprocessing is not None:
            return file, preprocessing
    return None


def read_timm(config: dict[str, object]) -> Preprocessing:
    """Read the preprocessing from a timm model's `pretrained_cfg`.

    Args:
        config: The dictionary; unknown keys are ignored. Without crop_pct, timm's 0.875 counts.

    Raises:
        ValueError: A key is missing or has a wrong type (pydantic.ValidationError), or the
            preprocessing cannot be reproduced here, such as a crop that is not square.
    """
    return _Timm.model_validate(config).read()


def read_open_clip(config: dict[str, object]) -> Preprocessing:
    """Read the preprocessing of an open_clip model.

    Args:
        config: The preprocess_cfg of the model, with `size`; unknown keys are ignored.

    Raises:
        ValueError: A key is missing or has a wrong type (pydantic.ValidationError). Or it cannot be
            reproduced here: padding that is not black, or a crop that is not square.
    """
    return _OpenClip.model_validate(config).read()


def _first(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]


def _candidates(path: Path) -> Iterator[tuple[Path, _Kind]]:
    for folder in (path.parent, path.parent.parent):
        for name, kind in _FILES.items():
            if (folder / name).is_file():
                yield folder / name, kind
