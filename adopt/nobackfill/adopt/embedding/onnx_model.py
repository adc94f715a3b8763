"""Run an ONNX file that embeds texts or images, by the declaration in its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from nobackfill.adopt.embedding.text_files import fingerprint_and_role, finish_vectors
from nobackfill.errors import (
    InvalidInputError,
    NotFoundError,
    UnusableItemsError,
    join_few,
)
from nobackfill.framing import Frame
from nobackfill.images import decode_file, decode_image
from nobackfill.release.manifest import TEXT_ROLES
from nobackfill.release.publishing.declaration import (
    Declaration,
    describe_assumptions,
    find_tokenizer_file,
    fingerprint_model,
    list_weight_files,
    read_image_declaration,
    read_text_declaration,
    read_tokenizer,
)
from nobackfill.release.publishing.sentence_head import pool_tokens
from nobackfill.release.publishing.text_folder import RoleFiles, TextFiles
from nobackfill.text import BatchTokenizer
from nobackfill.vectors import InputKind, Vectors

_TYPES = {"tensor(uint8)": np.uint8, "tensor(float16)": np.float16, "tensor(float)": np.float32}


class ImageInput:
    """The input of a graph that reads images, with channels first or last."""

    def __init__(
        self, path: Path, inputs: list[Any], declared: Declaration, declaring_file: Path | None
    ) -> None:
        """Check a declaration against a graph.

        Args:
            path: The ONNX file, for errors; it is not read.
            inputs: Its inputs, as onnxruntime lists them.
            declared: How the model reads images.
            declaring_file: The file with this declaration; None for the defaults.

        Raises:
            InvalidInputError: The graph has no single input of images, its size is declared
                nowhere, or the declaration contradicts it.
        """
        if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].type not in _TYPES:
            raise InvalidInputError(
                f"{path}: expected a graph with an input 'input_ids' of texts, or one input of "
                "images, [n,3,H,W] or [n,H,W,3] of uint8, float16 or float32; its inputs are "
                f"{join_few(f'{one.name} {one.type} {one.shape}' for one in inputs)}. Export the "
                "model again with such an input"
            )
        (one,) = inputs
        self._path, self._name, self._type = path, one.name, _TYPES[one.type]
        self._last = one.shape[-1] == 3
        self._declared, self._declaring_file = declared, declaring_file
        self._frame = self._framed(tuple(one.shape[1:3] if self._last else one.shape[2:4]))

    @property
    def description(self) -> str:
        """Return a sentence on how the model reads images, and on the file that declares it.

        It names size, fit, interpolation and, except for uint8, mean and deviation. Without a
        declaring file it says that these are assumptions.
        """
        declared, frame = self._declared, self._frame
        how = f"{frame.width} x {frame.height} pixels, {frame.fit}"
        how += f" from {frame.shortest}" if frame.fit == "crop" else ""
        how += ", margins rounded down" if frame.margin == "down" else ""
        how += f", {frame.interpolation}"
        if self._type is not np.uint8:
            mean, std = (" ".join(f"{c:g}" for c in of) for of in (declared.mean, declared.std))
            how += f", less mean {mean}, divided by standard deviation {std}"
        if self._declaring_file is not None:
            return f"{self._path}: reads {how}, as {self._declaring_file} declares"
        return (
            f"{self._path}: reads {how}; these are assumptions, because no file in its folder "
            "declares them. If the model was trained otherwise, declare it in "
            f"{self._path.with_suffix('.json').name} there, or by --fit, --size and --mean"
        )

    def feed(self, items: list[str] | list[Path] | list[bytes]) -> dict[str, Any]:
        """Decode images, and return the value of the graph's input by the input's name.

        One bad image refuses all. All decoded images are in memory at once.

        Args:
            items: n images, as paths or encoded bytes.

        Returns:
            One array of the graph's type: [n, 3, H, W], or [n, H, W, 3].

        Raises:
            UnusableItemsError: An item cannot be read or decoded as an image.
            ValueError: There are no items.
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
        declared, sidecar = self._declared, self._path.with_suffix(".json").name
        size = (declared.size, declared.size) if isinstance(declared.size, int) else declared.size
        if not all(isinstance(side, int) for side in fixed):
            if size is None:
                raise InvalidInputError(
                    f"{self._path}: its graph leaves the size of images open, and no file declares "
                    f'it; write {{"size": 224}} into {sidecar} in its folder, or give --size 224'
                )
            fixed = size
        if size is not None and size != fixed:
            raise InvalidInputError(
                f"{self._path}: its graph reads {fixed[1]} x {fixed[0]} pixels, but "
                f"{size[1]} x {size[0]} are declared; correct --size or {sidecar}"
            )
        longer, shortest = max(fixed), declared.shortest
        if declared.fit == "crop":
            shortest = shortest or longer
        elif shortest is not None:
            raise InvalidInputError(
                f"{self._path}: expected the setting `shortest` only with the setting `fit` crop, "
                f"got `fit` {declared.fit}; leave --shortest out, or give --fit crop"
            )
        if shortest is not None and shortest < longer:
            raise InvalidInputError(
                f"{self._path}: expected `shortest` (--shortest) of at least {longer}, the longer "
                f"side of the model's input, got {shortest}"
            )
        height, width = fixed
        return Frame(height, width, declared.fit, shortest, declared.interpolation, declared.margin)


def _pixels(item: str | Path | bytes, frame: Frame) -> Any:
    if isinstance(item, bytes):
        return decode_image(item, *frame)
    return decode_file(Path(item), *frame)


class OnnxModel:
    """The Embedder of an ONNX file, run on the CPU.

    A graph with an input `input_ids` reads texts, by a tokenizer in its folder; any other reads
    images. Files in the folder declare the preprocessing.

    The file is run in this process, without the trials that a release must pass; take it only from
    a source that you trust.

    Args:
        path: The file.
        queries: Whether the texts are queries; ignored for images.
        pixels: Fields of a `Declaration` that replace those in the folder; only for images.
        files: The files that determine the vectors of texts, where the ONNX file was exported from
            another folder and stands for the weights of its role. None: it and those next to it.

    Raises:
        NotFoundError: There is no such file, or no tokenizer for texts.
        InvalidInputError: The file is no ONNX, its declaration is malformed or does not fit it, or
            `pixels` are given for texts. A file of weights is missing or outside of its folder, or
            the tokenizer's file is no tokenizer.
        ConfigurationError: An extra is not installed.
        OSError: A file of the model cannot be read.
    """

    def __init__(
        self, path: Path, *, queries: bool = False, pixels: Mapping[str, object] | None = None,
        files: RoleFiles | None = None,
    ) -> None:  # fmt: skip
        from nobackfill.onnx_runtime import onnxruntime

        if not path.is_file():
            raise NotFoundError(f"{path}: no such file; expected the ONNX file of a model")
        self._path, weights = path, list_weight_files(path)
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            # onnxruntime's classes are made in C++ and have no common public base.
            raise InvalidInputError(
                f"{path}: cannot be read as an ONNX model ({error}); export the model again"
            ) from error
        self._inputs = {one.name: one for one in self._session.get_inputs()}
        # Sizes that the graph fixes: items in one run, and tokens of a text.
        self._batch, self._tokens = _fixed(self._inputs, 0), _fixed(self._inputs, 1)
        self.input_kind: InputKind | None = "text" if "input_ids" in self._inputs else "image"
        self._elsewhere = files is not None
        self._tokenizer: BatchTokenizer | None = None
        self._pixels: ImageInput | None = None
        if self.input_kind == "image":
            self._declared, self._pixels = self._image_reading(pixels or {})
            self.fingerprint, self.text_role = fingerprint_model(weights, self._declared), ""
        else:
            files = files or self._text_files(weights, pixels or {})
            own = files["query" if queries else "document"]
            self._declared = own.declaration
            self._tokenizer = self._tokenizing(own.tokenizer)
            self.fingerprint, self.text_role = fingerprint_and_role(files, queries=queries)
        self._layers = [layer.open() for layer in self._declared.layers]
        self._prefix = self._declared.prefix_of_queries if queries else self._declared.prefix

    @property
    def declared(self) -> dict[str, object]:
        """Return the fields of the declaration, which the fingerprint covers besides the files.

        Changes of the result do not reach the model.
        """
        return self._declared.model_dump()

    @property
    def description(self) -> str:
        """Return how the model reads images, or which assumptions it makes about texts.

        Empty for texts with a declaration.

        For texts it looks at each call whether a declaring file is there; the rest was read at the
        opening.
        """
        if self._pixels is not None:
            return self._pixels.description
        return "" if self._elsewhere else describe_assumptions(self._path, self._declared)

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        """Embed items in one or more runs of the graph; the vectors are normalised if that is
        declared.

        Longer texts are truncated to the declared number of tokens. A graph with a fixed batch size
        runs several times. A zero vector is not refused, and stays zero. One bad item refuses all.

        Args:
            items: n texts, or n images as paths or encoded bytes; at least one.

        Returns:
            float32 [n, dim], finite, in the order of `items`.

        Raises:
            UnusableItemsError: An item cannot be decoded or tokenized, the graph fails, or a vector
                holds NaN or infinity.
            InvalidInputError: The graph has unknown inputs, or an output of an unexpected shape.
                Declared modules behind the pooling do not fit the vectors.
        """
        feed, mask = (
            self._texts(items) if self._pixels is None else (self._pixels.feed(items), None)
        )
        try:
            output = self._run(feed, len(items))
        except Exception as error:
            raise UnusableItemsError(
                f"{self._path}: onnxruntime cannot run the model on these items ({error}); leave "
                "them out, or export the model again"
            ) from error
        pooled = self._pooled(output, mask)
        return finish_vectors(pooled, self._layers, self._declared, self._path)

    def _run(self, feed: Mapping[str, Any], count: int) -> Vectors:
        """Run the graph on `count` items, in groups of the size that the graph fixes."""
        wanted = None if self._declared.output is None else [self._declared.output]
        size = self._batch or max(count, 1)
        outputs = []
        for first in range(0, max(count, 1), size):
            # The last group is filled with its own first items.
            part = {
                name: np.resize(values[first : first + size], (size, *values.shape[1:]))
                if self._batch
                else values
                for name, values in feed.items()
            }
            outputs.append(np.asarray(self._session.run(wanted, part)[0], np.float32))
        return np.concatenate(outputs)[:count]

    def _text_files(self, weights: list[Path], pixels: Mapping[str, object]) -> RoleFiles:
        """Read the declarations in the model's folder for both roles.

        Raises:
            NotFoundError: The tokenizer is missing.
            InvalidInputError: A declaration is malformed or does not fit the graph.
        """
        if pixels:
            raise InvalidInputError(
                f"{self._path}: this model reads texts, so it has no settings of images; leave "
                f"out {', '.join(f'--{one}' for one in pixels)}"
            )
        outputs = [one.name for one in self._session.get_outputs()]
        declared = {role: read_text_declaration(self._path, outputs, role) for role in TEXT_ROLES}
        return {
            role: TextFiles(tuple(weights), one, find_tokenizer_file(self._path, one))
            for role, one in declared.items()
        }

    def _image_reading(self, pixels: Mapping[str, object]) -> tuple[Declaration, ImageInput]:
        """Read the declaration in the model's folder, and how the graph reads images by it.

        Raises:
            InvalidInputError: The declaration is malformed or does not fit the graph.
        """
        declared, declaring_file = read_image_declaration(self._path)
        try:
            declared = Declaration.model_validate(dict(declared) | dict(pixels))
        except ValidationError as error:
            raise InvalidInputError(f"{self._path}: {error}") from error
        inputs = list(self._inputs.values())
        return declared, ImageInput(self._path, inputs, declared, declaring_file)

    def _tokenizing(self, file: Path) -> BatchTokenizer:
        length = min(self._declared.max_length, self._tokens or self._declared.max_length)
        return BatchTokenizer(read_tokenizer(file, self._declared), length, str(file))

    def _texts(self, items: list[str] | list[Path] | list[bytes]) -> tuple[dict[str, Any], Any]:
        assert self._tokenizer is not None
        try:
            known = self._tokenizer.tokenize([self._prefix + str(item) for item in items])
        except InvalidInputError as error:
            raise UnusableItemsError(str(error)) from error
        if strangers := set(self._inputs) - set(known):
            raise InvalidInputError(
                f"{self._path}: expected no inputs but {', '.join(sorted(known))}, found "
                f"{', '.join(sorted(strangers))}; export the model again without them"
            )
        if self._tokens is not None:
            # Masked tokens fill a text up to the length that the graph fixes.
            missing = self._tokens - known["input_ids"].shape[1]
            known = {name: np.pad(ids, ((0, 0), (0, missing))) for name, ids in known.items()}
        feed = {
            name: known[name].astype(np.int32 if one.type == "tensor(int32)" else np.int64)
            for name, one in self._inputs.items()
        }
        return feed, known["attention_mask"]

    def _pooled(self, output: Vectors, mask: Any) -> Vectors:
        if output.ndim == 2:
            return output
        if output.ndim == 4 and mask is None:
            return np.asarray(output.mean((2, 3)))
        modes = self._declared.pooling_modes
        if output.ndim != 3 or mask is None or not modes:
            raise InvalidInputError(
                f"{self._path}: expected an output [n, dim], or [n, tokens, dim] with pooling, got "
                f'{list(output.shape)}; declare the name of another output as "output" in '
                f"{self._path.with_suffix('.json').name}"
            )
        return pool_tokens(output, mask, modes)


def _fixed(inputs: Mapping[str, Any], axis: int) -> int | None:
    """Return the size of an axis that the graph's first input fixes; None if it is free."""
    shape = next(iter(inputs.values())).shape if inputs else []
    size = shape[axis] if axis < len(shape) else None
    return size if isinstance(size, int) and size > 0 else None
