"""An ONNX file that others made, run as is declared about it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from nobackfill.adopt.embedding.embedder import DOCUMENTS, QUERIES
from nobackfill.adopt.embedding.image_input import ImageInput
from nobackfill.adopt.maps import normalised
from nobackfill.errors import (
    InvalidInputError,
    NotFoundError,
    UnusableItemsError,
    UnusableRowsError,
)
from nobackfill.items.kind import Kind
from nobackfill.release.publishing.declaration import (
    Declaration,
    fingerprint,
    guess,
    read_declaration,
    read_pixels,
    tokenizer_file,
    weight_files,
)
from nobackfill.tokenizing import Tokenizing
from nobackfill.vectors import Vectors, check_vectors


class OnnxModel:
    """A session on the file; what reads texts has an input `input_ids`, all others read images.
    `queries`: its texts are those that ask. `pixels`: of a Declaration, in place of what the files
    beside it say."""

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
        self.fingerprint = fingerprint(weights, self._declared, file)
        self._prefix = self._declared.asks_with if queries else self._declared.prefix
        alike = self.kind == "image" or self._declared.asks_with == self._declared.prefix
        self.reads = "" if alike else QUERIES if queries else DOCUMENTS

    @property
    def declared(self) -> dict[str, object]:
        """What its fingerprint covers beside the files."""
        return self._declared.model_dump()

    @property
    def told(self) -> str:
        """Say how the model reads pictures, or texts without a declaration."""
        return guess(self._path, self._declared) if self._pixels is None else self._pixels.told

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
        return normalised(checked) if self._declared.normalise else checked

    def _reading(self, given: Mapping[str, object]) -> tuple[Declaration, ImageInput | None]:
        """Read the declaration, and how the model reads pictures, if it does. Raises
        InvalidInputError."""
        if self.kind == "text":
            if given:
                raise InvalidInputError(
                    f"{self._path}: reads texts; {', '.join(given)} is of images"
                )
            outputs = [one.name for one in self._session.get_outputs()]
            return read_declaration(self._path, outputs), None
        declared, said_by = read_pixels(self._path)
        try:
            declared = Declaration.model_validate(dict(declared) | dict(given))
        except ValidationError as error:
            raise InvalidInputError(f"{self._path}: {error}") from error
        return declared, ImageInput(self._path, list(self._inputs.values()), declared, said_by)

    def _tokenizing(self, file: Path) -> Tokenizing:
        return Tokenizing(file.read_bytes(), self._declared.max_length, str(file))

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
