"""An ONNX file that others made, run as is declared about it."""

from pathlib import Path
from typing import Any

import numpy as np

from nobackfill.adopt.embedding.embedder import DOCUMENTS, QUERIES
from nobackfill.adopt.maps import normalised
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.images import decode, decode_file
from nobackfill.items.kind import Kind
from nobackfill.release.publishing.declaration import fingerprint, read_declaration, tokenizer_file
from nobackfill.tokenizing import Tokenizing
from nobackfill.vectors import Vectors, check_vectors


class OnnxModel:
    """A session on the file; what reads texts has an input `input_ids`, all others read images.
    `queries`: its texts are those that ask."""

    def __init__(self, path: Path, *, queries: bool = False) -> None:
        from nobackfill.onnx_runtime import onnxruntime

        if not path.is_file():
            raise NotFoundError(f"{path}: no such file; --with expects an ONNX file")
        self._path, self._declared = path, read_declaration(path)
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            # onnxruntime's classes are made in C++ and have no common public base.
            raise InvalidInputError(f"{path}: cannot be read as ONNX ({error})") from error
        self._inputs = {one.name: one for one in self._session.get_inputs()}
        self.kind: Kind | None = "text" if "input_ids" in self._inputs else "image"
        file = tokenizer_file(path, self._declared) if self.kind == "text" else None
        self._tokenizer = None if file is None else self._tokenizing(file)
        self.fingerprint = fingerprint(path, self._declared, file)
        self._prefix = self._declared.asks_with if queries else self._declared.prefix
        alike = self.kind == "image" or self._declared.asks_with == self._declared.prefix
        self.reads = "" if alike else QUERIES if queries else DOCUMENTS

    @property
    def declared(self) -> dict[str, object]:
        """What its fingerprint covers beside the files."""
        return self._declared.model_dump()

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        feed, mask = self._texts(items) if self.kind == "text" else self._images(items)
        wanted = None if self._declared.output is None else [self._declared.output]
        try:
            output = np.asarray(self._session.run(wanted, feed)[0], np.float32)
        except Exception as error:
            raise InvalidInputError(f"{self._path}: does not take these items ({error})") from error
        vectors = self._pooled(output, mask)
        checked = check_vectors(vectors, vectors.shape[1], what=f"output of {self._path}")
        return normalised(checked) if self._declared.normalise else checked

    def _tokenizing(self, file: Path) -> Tokenizing:
        return Tokenizing(file.read_bytes(), self._declared.max_length, str(file))

    def _texts(self, items: list[str] | list[Path] | list[bytes]) -> tuple[dict[str, Any], Any]:
        assert self._tokenizer is not None
        known = self._tokenizer.tokens([self._prefix + str(item) for item in items])
        if strangers := set(self._inputs) - set(known):
            raise InvalidInputError(f"{self._path}: unknown inputs {sorted(strangers)}")
        return {name: known[name] for name in self._inputs}, known["attention_mask"]

    def _images(self, items: list[str] | list[Path] | list[bytes]) -> tuple[dict[str, Any], Any]:
        if len(self._inputs) != 1:
            raise InvalidInputError(
                f"{self._path}: expected one input of images, got {list(self._inputs)}"
            )
        (name, one), declared = next(iter(self._inputs.items())), self._declared
        last = one.shape[-1] == 3
        height, width = one.shape[1:3] if last else one.shape[2:4]
        if not (isinstance(height, int) and isinstance(width, int)):
            height = width = declared.size
        if height is None or width is None:
            raise InvalidInputError(
                f"{self._path}: its image size is open; declare it: "
                f'{{"size": 224}} in {self._path.with_suffix(".json").name}'
            )
        pixels: Any = np.stack([_pixels(item, height, width) for item in items])
        if one.type != "tensor(uint8)":
            mean, std = np.array(declared.mean), np.array(declared.std)
            scaled = (pixels / 255 - mean) / std
            pixels = scaled.astype(np.float16 if one.type == "tensor(float16)" else np.float32)
        return {name: pixels if last else np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))}, None

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


def _pixels(item: str | Path | bytes, height: int, width: int) -> Any:
    if isinstance(item, bytes):
        return decode(item, height, width)
    return decode_file(Path(item), height, width)
