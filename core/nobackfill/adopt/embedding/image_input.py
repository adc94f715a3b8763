"""Pictures as the input of an ONNX file that others made."""

from pathlib import Path
from typing import Any

import numpy as np

from nobackfill.errors import InvalidInputError, UnusableItemsError
from nobackfill.framing import Frame
from nobackfill.images import decode, decode_file
from nobackfill.release.publishing.declaration import Declaration

_TYPES = {"tensor(uint8)": np.uint8, "tensor(float16)": np.float16, "tensor(float)": np.float32}


class ImageInput:
    """The input of a graph that reads images, channels first or last; `declared` by `said_by`, or
    by nobody."""

    def __init__(
        self, path: Path, inputs: list[Any], declared: Declaration, said_by: Path | None
    ) -> None:
        """`inputs`: onnxruntime's. Raises InvalidInputError for another graph, or where it and what
        is declared contradict each other."""
        if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].type not in _TYPES:
            raise InvalidInputError(
                f"{path}: expected one input of images, [n,3,H,W] or [n,H,W,3], got "
                f"{[(one.name, one.type, one.shape) for one in inputs]}"
            )
        (one,) = inputs
        self._path, self._name, self._type = path, one.name, _TYPES[one.type]
        self._last = one.shape[-1] == 3
        self._declared, self._said_by = declared, said_by
        self._frame = self._framed(tuple(one.shape[1:3] if self._last else one.shape[2:4]))

    @property
    def told(self) -> str:
        """How it reads pictures, and who says so."""
        declared, frame = self._declared, self._frame
        how = f"{frame.width} x {frame.height} pixels, {frame.fit}"
        how += f" from {frame.shortest}" if frame.fit == "crop" else ""
        how += ", margins rounded down" if frame.margin == "down" else ""
        how += f", {frame.interpolation}"
        if self._type is not np.uint8:
            mean, std = (" ".join(f"{c:g}" for c in of) for of in (declared.mean, declared.std))
            how += f", less {mean}, by {std}"
        if self._said_by is not None:
            return f"{self._path}: {how}, as {self._said_by} says"
        return (
            f"{self._path}: {how}; nothing beside it says so. If its makers did otherwise, write "
            f"that into {self._path.with_suffix('.json').name}, or give --fit and its like"
        )

    def feed(self, items: list[str] | list[Path] | list[bytes]) -> dict[str, Any]:
        """The input's value by its name. Raises UnusableItemsError for what is no image."""
        try:
            pixels: Any = np.stack([_pixels(item, self._frame) for item in items])
        except InvalidInputError as error:
            raise UnusableItemsError(str(error)) from error
        if self._type is not np.uint8:
            mean, std = np.array(self._declared.mean), np.array(self._declared.std)
            pixels = ((pixels / 255 - mean) / std).astype(self._type)
        if not self._last:
            pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        return {self._name: pixels}

    def _framed(self, fixed: tuple[Any, ...]) -> Frame:
        """`fixed`: height and width in the graph, which may leave them open."""
        declared, beside = self._declared, self._path.with_suffix(".json").name
        said = (declared.size, declared.size) if isinstance(declared.size, int) else declared.size
        if not all(isinstance(side, int) for side in fixed):
            if said is None:
                raise InvalidInputError(
                    f'{self._path}: its image size is open; declare it: {{"size": 224}} in '
                    f"{beside}, or --size 224"
                )
            fixed = said
        if said is not None and said != fixed:
            raise InvalidInputError(
                f"{self._path}: its graph reads {fixed[1]} x {fixed[0]} pixels, but "
                f"{said[1]} x {said[0]} are declared"
            )
        longer, shortest = max(fixed), declared.shortest
        if declared.fit == "crop":
            shortest = shortest or longer
        elif shortest is not None:
            raise InvalidInputError(f"{self._path}: expected shortest with fit crop alone")
        if shortest is not None and shortest < longer:
            raise InvalidInputError(
                f"{self._path}: expected shortest to reach over the pixels that are cut out, "
                f"{longer}, got {shortest}"
            )
        height, width = fixed
        return Frame(height, width, declared.fit, shortest, declared.interpolation, declared.margin)


def _pixels(item: str | Path | bytes, frame: Frame) -> Any:
    if isinstance(item, bytes):
        return decode(item, *frame)
    return decode_file(Path(item), *frame)
