"""A map from the old model's vectors to the new one's, and the file that holds one."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from nobackfill.durable import write_file
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.ridge import Floats
from nobackfill.vectors import Vectors, check_vectors

# Of the file; the second has layers, which a reader of the first would pass over.
FORMAT, LAYERED = 1, 2
# Of the file, which is read whole; a map of 8,192 dims has 268 MB.
MOST_BYTES = 1 << 31
# Facts of a map that was made from vectors whose models are known.
OLD_MODEL, NEW_MODEL = "old_model", "new_model"
# Vectors that differ less from norm 1 came from a model that normalises.
UNIT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Map:
    """x -> weight x + bias, then divided by its norm with `unit`; weight [b, a], bias [b].

    `facts`: what the file says of its origin: pairs, penalty, the two models. `layers`: of a
    network of x whose output is added before the norm, weight [out, in] and bias [out] each, ReLU
    between them.
    """

    kind: str
    weight: Vectors
    bias: Vectors
    unit: bool
    facts: dict[str, str] = field(default_factory=dict)
    layers: tuple[tuple[Vectors, Vectors], ...] = ()

    @property
    def dims(self) -> tuple[int, int]:
        """a and b."""
        return self.weight.shape[1], self.weight.shape[0]

    def of_models(self, old: str | None, new: str | None) -> "Map":
        """The same, with the fingerprints of the two models where they are known."""
        known = {name: model for name, model in ((OLD_MODEL, old), (NEW_MODEL, new)) if model}
        return replace(self, facts=self.facts | known)

    @property
    def digest(self) -> str:
        """What vectors that were made by it are known by."""
        arrays = (self.weight, self.bias, *(part for layer in self.layers for part in layer))
        parts = (str(self.unit).encode(), *(array.tobytes() for array in arrays))
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def __call__(self, vectors: Vectors) -> Vectors:
        """[n, a] -> [n, b]. Raises InvalidInputError for another dimension than a, and NaN."""
        checked = check_vectors(vectors, self.dims[0], what="old vectors")
        mapped = checked @ self.weight.T + self.bias
        if self.layers:
            mapped = mapped + self._network(checked)
        return normalised(mapped) if self.unit else mapped

    def _network(self, hidden: Vectors) -> Vectors:
        for number, (weight, bias) in enumerate(self.layers):
            hidden = (np.maximum(hidden, 0) if number else hidden) @ weight.T + bias
        return hidden


def normalised(vectors: Vectors) -> Vectors:
    """Rows of norm 1; a row of zeros stays as it is."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = vectors / np.maximum(norms, np.float32(1e-12))
    return scaled


def is_unit(vectors: Floats) -> bool:
    """Whether all rows have norm 1 within 1e-3."""
    norms = np.linalg.norm(vectors, axis=1)
    return bool(len(norms)) and float(np.abs(norms - 1).max()) <= UNIT_TOLERANCE


def save_map(path: Path, found: Map) -> None:
    """Write a map as arrays and a line of JSON. Raises CannotWriteError."""
    header = {"format": FORMAT, "kind": found.kind, "unit": found.unit, "facts": found.facts}
    arrays = {"weight": found.weight, "bias": found.bias}
    if found.layers:
        header |= {"format": LAYERED, "layers": len(found.layers)}
    for number, (weight, bias) in enumerate(found.layers):
        arrays |= {f"weight_{number}": weight, f"bias_{number}": bias}
    buffer = io.BytesIO()
    text = np.array(json.dumps(header, sort_keys=True))
    np.savez(buffer, header=text, **arrays)  # type: ignore[arg-type]
    write_file(path, buffer.getvalue())


def load_map(path: Path) -> Map:
    """Read what `save_map` wrote. Raises NotFoundError, InvalidInputError for another file."""
    with written_by(path, "nobackfill fit"):
        header, arrays = read_arrays(path)
        if header["format"] not in (FORMAT, LAYERED):
            raise ValueError(f"format {header['format']}")
        weight, bias = _linear(arrays["weight"], arrays["bias"])
        layers = tuple(
            _linear(arrays[f"weight_{number}"], arrays[f"bias_{number}"])
            for number in range(int(header.get("layers", 0)))
        )
        ends = [weight.shape[1], *(len(one) for _, one in layers)]
        if layers and ([one.shape[1] for one, _ in layers], ends[-1]) != (ends[:-1], len(bias)):
            raise ValueError("layers that do not fit one another")
        facts = {str(key): str(value) for key, value in header["facts"].items()}
        return Map(str(header["kind"]), weight, bias, bool(header["unit"]), facts, layers)


@contextmanager
def written_by(path: Path, command: str) -> Iterator[None]:
    """Refuse a file at which reading fails. Raises NotFoundError, InvalidInputError."""
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file; `{command}` writes one")
    try:
        yield
    except Exception as error:
        # Errors of zipfile, numpy and json at hostile bytes have no common base class.
        raise InvalidInputError(
            f"{path}: expected what `{command}` wrote ({error or type(error).__name__}); "
            "fit it again"
        ) from error


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, Vectors]]:
    """Read the header and the arrays of numbers that `np.savez` wrote, none of which is larger than
    the file: it packs nothing. Raises ValueError, and what zipfile, numpy and json raise."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES} bytes")
    data = path.read_bytes()
    found: dict[str, Any] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > len(data):
            raise ValueError("entries larger than the file")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is packed")
            found[entry.filename.removesuffix(".npy")] = _array(archive.read(entry))
    header = json.loads(str(found.pop("header")))
    return header, found


def _array(data: bytes) -> Any:
    """An array whose header claims as many bytes as follow it."""
    file = io.BytesIO(data)
    known = np.lib.format
    first = known.read_magic(file) == (1, 0)
    read = known.read_array_header_1_0 if first else known.read_array_header_2_0
    shape, _, dtype = read(file)
    if prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"shape {shape} of {dtype} in {len(data)} bytes")
    file.seek(0)
    return known.read_array(file, allow_pickle=False)


def _linear(weight: Vectors, bias: Vectors) -> tuple[Vectors, Vectors]:
    if weight.ndim != 2 or 0 in weight.shape or weight.shape[:1] != bias.shape:
        raise ValueError(f"shapes {weight.shape} and {bias.shape}")
    checked = check_vectors(weight, weight.shape[1], what="weight")
    return checked, check_vectors(bias[None], len(bias), what="bias")[0]
