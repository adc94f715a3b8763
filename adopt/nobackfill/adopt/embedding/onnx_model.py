"""Run an ONNX file that embeds texts or images, by the declaration in its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from nobackfill.adopt.sources.source import DOCUMENTS, QUERIES
from nobackfill.errors import (
    InvalidInputError,
    NotFoundError,
    UnusableItemsError,
    UnusableRowsError,
)
from nobackfill.framing import Frame
from nobackfill.images import decode_file, decode_image
from nobackfill.release.publishing.declaration import (
    Declaration,
    describe_assumptions,
    fingerprint_model,
    read_declaration,
    read_pixels,
    tokenizer_file,
    weight_files,
)
from nobackfill.text import BatchTokenizer
from nobackfill.vectors import Kind, Vectors, check_vectors, normalise

_TYPES = {"tensor(uint8)": np.uint8, "tensor(float16)": np.float16, "tensor(float)": np.float32}


class ImageInput:
    """The input of a graph that reads images, with channels first or last."""

    def __init__(
        self, path: Path, inputs: list[Any], declared: Declaration, said_by: Path | None
    ) -> None:
        """Check a declaration against a graph.

        Args:
            path: The ONNX file.
            inputs: Its inputs, as onnxruntime lists them.
            declared: How the model reads images.
            said_by: The file that declares it; None for the defaults.

        Raises:
            InvalidInputError: The graph does not read images, or contradicts the declaration.
        """
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
    def description(self) -> str:
        """A sentence on how the model reads images, and on the file that declares it."""
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
        """Decode images into the value of the input, by its name.

        Raises:
            UnusableItemsError: An item is no image.
        """
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
        """Return how to crop and resize images.

        Args:
            fixed: Height and width in the graph; names in place of numbers leave them open.

        Raises:
            InvalidInputError: The size is unknown, or contradicts the declaration.
        """
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
        return decode_image(item, *frame)
    return decode_file(Path(item), *frame)


class OnnxModel:
    """A model in an ONNX file. A graph with an input `input_ids` reads texts, another one images.

    Args:
        path: The file.
        queries: Whether the texts are queries.
        pixels: Fields of a `Declaration` that replace those in the folder.

    Raises:
        NotFoundError: There is no such file.
        InvalidInputError: The file is no ONNX, or its declaration does not fit it.
    """

    def __init__(
        self, path: Path, *, queries: bool = False, pixels: Mapping[str, object] | None = None
    ) -> None:
        from nobackfill.onnx_runtime import onnxruntime

        if not path.is_file():
            raise NotFoundError(f"{path}: no such file; --with expects an ONNX file")
        self._path, weights = path, weight_files(path)
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            # onnxruntime's classes are made in C++ and have no common public base.
            raise InvalidInputError(f"{path}: cannot be read as ONNX ({error})") from error
        self._inputs = {one.name: one for one in self._session.get_inputs()}
        self.kind: Kind | None = "text" if "input_ids" in self._inputs else "image"
        self._declared, self._pixels = self._reading(pixels or {})
        file = tokenizer_file(path, self._declared) if self.kind == "text" else None
        self._tokenizer = None if file is None else self._tokenizing(file)
        self.fingerprint = fingerprint_model(weights, self._declared, file)
        self._prefix = self._declared.prefix_of_queries if queries else self._declared.prefix
        alike = self.kind == "image" or self._declared.prefix_of_queries == self._declared.prefix
        self.reads = "" if alike else QUERIES if queries else DOCUMENTS

    @property
    def declared(self) -> dict[str, object]:
        """The declaration, which the fingerprint covers in addition to the files."""
        return self._declared.model_dump()

    @property
    def description(self) -> str:
        """Say how the model reads pictures, or texts without a declaration."""
        return (
            describe_assumptions(self._path, self._declared)
            if self._pixels is None
            else self._pixels.description
        )

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        feed, mask = (
            self._texts(items) if self._pixels is None else (self._pixels.feed(items), None)
        )
        wanted = None if self._declared.output is None else [self._declared.output]
        try:
            output = np.asarray(self._session.run(wanted, feed)[0], np.float32)
        except Exception as error:
            raise UnusableItemsError(
                f"{self._path}: does not take these items ({error})"
            ) from error
        vectors = self._pooled(output, mask)
        try:
            checked = check_vectors(vectors, vectors.shape[1], what=f"output of {self._path}")
        except UnusableRowsError as error:
            raise UnusableItemsError(str(error)) from error
        return normalise(checked) if self._declared.normalise else checked

    def _reading(self, pixels: Mapping[str, object]) -> tuple[Declaration, ImageInput | None]:
        """Read the declaration, and how the model reads pictures, if it does. Raises
        InvalidInputError."""
        if self.kind == "text":
            if pixels:
                raise InvalidInputError(
                    f"{self._path}: reads texts; {', '.join(pixels)} only applies to images"
                )
            outputs = [one.name for one in self._session.get_outputs()]
            return read_declaration(self._path, outputs), None
        declared, said_by = read_pixels(self._path)
        try:
            declared = Declaration.model_validate(dict(declared) | dict(pixels))
        except ValidationError as error:
            raise InvalidInputError(f"{self._path}: {error}") from error
        return declared, ImageInput(self._path, list(self._inputs.values()), declared, said_by)

    def _tokenizing(self, file: Path) -> BatchTokenizer:
        return BatchTokenizer(file.read_bytes(), self._declared.max_length, str(file))

    def _texts(self, items: list[str] | list[Path] | list[bytes]) -> tuple[dict[str, Any], Any]:
        assert self._tokenizer is not None
        try:
            known = self._tokenizer.tokens([self._prefix + str(item) for item in items])
        except InvalidInputError as error:
            raise UnusableItemsError(str(error)) from error
        if strangers := set(self._inputs) - set(known):
            raise InvalidInputError(f"{self._path}: unknown inputs {sorted(strangers)}")
        return {name: known[name] for name in self._inputs}, known["attention_mask"]

    def _pooled(self, output: Vectors, mask: Any) -> Vectors:
        if output.ndim == 2:
            return output
        if output.ndim == 4 and mask is None:
            return np.asarray(output.mean((2, 3)))
        if output.ndim != 3 or mask is None or self._declared.pooling == "none":
            raise InvalidInputError(
                f"{self._path}: expected an output [n, dim], or [n, tokens, dim] with pooling, got "
                f'{list(output.shape)}; declare another one as "output"'
            )
        if self._declared.pooling == "cls":
            first: Vectors = output[:, 0]
            return first
        weights = mask[..., None].astype(np.float32)
        pooled: Vectors = (output * weights).sum(1) / np.maximum(weights.sum(1), 1)
        return pooled
