"""Compute what sentence-transformers computes behind a Transformer: pooling, Dense, LayerNorm.

It stands for modules that an ONNX file of the Transformer alone does not contain. All arithmetic is
in float32, as in the library.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nobackfill.digests import sha256_bytes
from nobackfill.errors import InvalidInputError
from nobackfill.vectors import Vectors, normalise

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
LayerKind = Literal["Dense", "LayerNorm", "Normalize"]

WEIGHTS = "model.safetensors"
_ACTIVATIONS: Mapping[str, Callable[[Vectors], Vectors]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: np.asarray(1 / (1 + np.exp(-x)), np.float32),
    "SiLU": lambda x: x / (1 + np.exp(-x)),
}
_TENSORS: Mapping[LayerKind, tuple[str, ...]] = {
    "Dense": ("linear.weight",),
    "LayerNorm": ("norm.weight", "norm.bias"),
    "Normalize": (),
}
# torch.nn.LayerNorm adds it to the variance.
LAYER_NORM_EPSILON = 1e-5
# Integers are int8 tables, and numbers of rows.
_TYPES = {
    "F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"
}  # fmt: skip


def pool_tokens(token_vectors: Vectors, mask: Any, modes: Sequence[PoolingMode]) -> Vectors:
    """Make one vector of the vectors of a text's tokens.

    Args:
        token_vectors: float32 [n, t, dim]; the padding comes last. It is not changed.
        mask: 1 for each token of the text, 0 for padding; int64 [n, t]. Each text needs at least
            one token; this is not checked. Without one, max gives -inf, the means give 0, and cls
            and lasttoken the vector of a padding.
        modes: One or several; their vectors are joined in this order.

    Returns:
        float32 [n, dim * number of modes].

    Raises:
        ValueError: No mode, or the shapes of vectors and mask do not fit.
    """
    weights = mask[..., None].astype(np.float32)
    last = mask.sum(1) - 1

    def one(mode: PoolingMode) -> Vectors:
        if mode == "cls":
            return token_vectors[:, 0]
        if mode == "lasttoken":
            return np.asarray(token_vectors[np.arange(len(token_vectors)), last])
        if mode == "max":
            return np.asarray(np.where(weights > 0, token_vectors, -np.inf).max(1))
        shares = weights
        if mode == "weightedmean":
            shares = weights * np.arange(1, token_vectors.shape[1] + 1, dtype=np.float32)[:, None]
        total, count = (token_vectors * shares).sum(1), np.maximum(shares.sum(1), 1)
        return np.asarray(total / (np.sqrt(count) if mode == "mean_sqrt_len_tokens" else count))

    return np.concatenate([one(mode) for mode in modes], axis=1, dtype=np.float32)


class Layer(BaseModel):
    """A module behind the pooling.

    Attributes:
        kind: Dense, LayerNorm, or Normalize, which scales to norm 1.
        activation: Function that Dense applies to its output.
        residual: Whether Dense adds its input to its output.
        sha256: Digest of the file with the weights; empty for Normalize.
        folder: The module's folder; no part of the model's fingerprint.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: LayerKind
    activation: str = "Identity"
    residual: bool = False
    sha256: str = ""
    folder: Path = Field(Path(), exclude=True)

    def open(self) -> Callable[[Vectors], Vectors]:
        """Read the weights, and return the layer as a function from float32 [n, dim] to float32 [n,
        other].

        The weights are read once, here.

        Returns:
            The function; it does not change its argument. It raises ValueError for another
            dimension. Normalize leaves a vector of zeros as it is.

        Raises:
            InvalidInputError: The weights cannot be read, are no safetensors, lack a tensor, or are
                not those of `sha256`.
            KeyError: The activation is unknown.
        """
        if self.kind == "Normalize":
            return normalise
        weights = self.weights()
        if self.kind == "LayerNorm":
            scale, move = weights["norm.weight"], weights["norm.bias"]

            def norm(x: Vectors) -> Vectors:
                centred = x - x.mean(1, keepdims=True)
                spread = np.sqrt(
                    (centred**2).mean(1, keepdims=True) + np.float32(LAYER_NORM_EPSILON)
                )
                return np.asarray(centred / spread * scale + move, np.float32)

            return norm
        weight, bias = weights["linear.weight"], weights.get("linear.bias", np.float32(0))
        activate, straight = _ACTIVATIONS[self.activation], weights.get("residual.weight")

        def dense(x: Vectors) -> Vectors:
            y = activate(x @ weight.T + bias)
            if self.residual:
                y = y + (x if straight is None else x @ straight.T)
            return np.asarray(y, np.float32)

        return dense

    def weights(self) -> dict[str, Vectors]:
        """Read the layer's tensors by name, each float32; none for Normalize.

        Raises:
            InvalidInputError: The file cannot be read, is no safetensors, lacks a tensor, or is not
                that of `sha256`.
        """
        if self.kind == "Normalize":
            return {}
        file = self.folder / WEIGHTS
        data = read_model_file(file)
        if sha256_bytes(data) != self.sha256:
            raise InvalidInputError(f"{file}: changed while it was read; run the command again")
        tensors = read_tensors(data, file)
        if missing := [name for name in _TENSORS[self.kind] if name not in tensors]:
            raise InvalidInputError(
                f"{file}: expected the tensors {' and '.join(_TENSORS[self.kind])} of a "
                f"{self.kind} layer, found none named {' or '.join(missing)}; save the model again "
                "with sentence-transformers, or download the model again"
            )
        return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def read_model_file(file: Path) -> bytes:
    """Return the bytes of a file of a model's folder, such as its weights.

    Raises:
        InvalidInputError: It cannot be read; the message names it.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidInputError(
            f"{file}: cannot read this file of the model ({error.strerror}); check that the file "
            "exists and its permissions, or download the model again"
        ) from error


def read_tensors(data: bytes, file: Path) -> dict[str, Any]:
    """Return the tensors of a file of safetensors by name.

    Args:
        data: The bytes of the file.
        file: Its name, for the message.

    Returns:
        float32 where the file has F64, F32, F16 or BF16, else integers of its size. They may be
        read-only.

    Raises:
        InvalidInputError: It is no file of safetensors, or has another type of numbers, such as
            BOOL, U8 or F8.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        header: Any = json.loads(data[8 : 8 + size])
        body = memoryview(data)[8 + size :]
        tensors: dict[str, Any] = {}
        for name, described in header.items():
            if name != "__metadata__":
                first, end = described["data_offsets"]
                numbers = _numbers(body[first:end], described["dtype"])
                tensors[name] = numbers.reshape(described["shape"])
        return tensors
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInputError(
            f"{file}: expected weights in the format safetensors, found a file that cannot be read "
            f"as such ({error}); save the model again with sentence-transformers, or download the "
            "model again"
        ) from error


def _numbers(data: memoryview, kind: str) -> Any:
    if kind == "BF16":
        # The upper half of a float32.
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    numbers = np.frombuffer(data, _TYPES[kind])
    return numbers if kind.startswith("I") else numbers.astype(np.float32, copy=False)


class _LayerConfig(BaseModel):
    """The config.json of a Dense or a Normalize module."""

    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None
    use_residual: bool = False


def read_layer(kind: LayerKind, folder: Path) -> Layer:
    """Read how a module of sentence-transformers is set up.

    LayerNorm reads no `config.json`, and Normalize may have none. The weights are hashed here, and
    their content is checked by `Layer.open`.

    Args:
        kind: Its class.
        folder: Its folder, with `config.json` and `model.safetensors`.

    Raises:
        InvalidInputError: Its configuration or weights are missing or cannot be read, or the
            configuration is not applied here, such as an unknown activation.
    """
    file, place = folder / WEIGHTS, folder / "config.json"
    config = _LayerConfig()
    try:
        if kind == "Dense" or (kind == "Normalize" and place.is_file()):
            config = _LayerConfig.model_validate_json(place.read_bytes())
    except OSError as error:
        raise InvalidInputError(
            f"{place}: cannot read the settings of the layer {kind} ({error.strerror}); check that "
            "the file exists and its permissions"
        ) from error
    except ValidationError as error:
        raise InvalidInputError(
            f"{place}: expected settings of the layer {kind} as sentence-transformers writes them, "
            f"found others ({error}); download the model again, or save the model again with "
            "sentence-transformers"
        ) from error
    library, _, activation = config.activation_function.rpartition(".")
    known = activation in _ACTIVATIONS and library.startswith("torch.nn.")
    source = config.module_input_name
    target = config.module_output_name or source
    unknown = [] if known else [f"the activation {config.activation_function}"]
    if {source, target} != {"sentence_embedding"}:
        unknown.append(f"a layer that reads {source!r} and writes {target!r}")
    if unknown:
        raise InvalidInputError(
            f"{place}: nobackfill does not apply {', '.join(unknown)}; export the whole model, so "
            "that its graph has an output 'sentence_embedding'"
        )
    if kind == "Normalize":
        return Layer(kind=kind)
    if not file.is_file():
        raise InvalidInputError(
            f"{file}: no such file; the module's weights are read from safetensors: load the model "
            "with sentence-transformers and save it again"
        )
    dense = kind == "Dense"
    return Layer(
        kind=kind,
        activation=activation if dense else "Identity",
        residual=dense and config.use_residual,
        sha256=sha256_bytes(read_model_file(file)),
        folder=folder,
    )
