"""Maps from the old model's vectors to the new one's, and the file that holds one.

A map is solved from pairs, without labels and without training: sums over pairs are all it takes.
Ridge regression shrinks the directions that it knows little of towards nothing, so that searches
miss what they told apart. A rotation keeps them all, and follows no stretching. Their mean finds
more known items than either, from 100 pairs to 2,000 (docs/adopt.md has the figures). A network may
learn what an affine map leaves over.
"""

import hashlib
import importlib
import io
import json
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from nobackfill import ridge
from nobackfill.durable import write_file
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.ridge import Blocks, Doubles, Floats, Moments, split_into_blocks
from nobackfill.vectors import Vectors, check_vectors, normalise

# Formats of the file. The second has layers, which a reader of the first would ignore.
FORMAT, LAYERED = 1, 2
# The most bytes of a file, which is read into memory; a map of 8,192 dims has 268 MB.
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
        """The dimensions a of old and b of new vectors."""
        return self.weight.shape[1], self.weight.shape[0]

    def of_models(self, old: str | None, new: str | None) -> "Map":
        """Return the same map with the fingerprints of the two models where they are known."""
        known = {name: model for name, model in ((OLD_MODEL, old), (NEW_MODEL, new)) if model}
        return replace(self, facts=self.facts | known)

    @property
    def digest(self) -> str:
        """The SHA-256 of the map, in 64 hexadecimal digits; it marks migrated vectors."""
        arrays = (self.weight, self.bias, *(part for layer in self.layers for part in layer))
        parts = (str(self.unit).encode(), *(array.tobytes() for array in arrays))
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def __call__(self, vectors: Vectors) -> Vectors:
        """Map old vectors [n, a] to new ones, float32 [n, b].

        Raises:
            InvalidInputError: The vectors have another dimension than a, or NaN or infinity.
        """
        checked = check_vectors(vectors, self.dims[0], what="old vectors")
        mapped = checked @ self.weight.T + self.bias
        if self.layers:
            mapped = mapped + self._network(checked)
        return normalise(mapped) if self.unit else mapped

    def _network(self, hidden: Vectors) -> Vectors:
        for number, (weight, bias) in enumerate(self.layers):
            hidden = (np.maximum(hidden, 0) if number else hidden) @ weight.T + bias
        return hidden


def is_unit(vectors: Floats) -> bool:
    """Tell whether all rows of [n, d] have norm 1 within UNIT_TOLERANCE; False without rows."""
    norms = np.linalg.norm(vectors, axis=1)
    return bool(len(norms)) and float(np.abs(norms - 1).max()) <= UNIT_TOLERANCE


def save_map(path: Path, mapping: Map) -> None:
    """Write a map as arrays and a line of JSON. Raises CannotWriteError."""
    header = {"format": FORMAT, "kind": mapping.kind, "unit": mapping.unit, "facts": mapping.facts}
    arrays = {"weight": mapping.weight, "bias": mapping.bias}
    if mapping.layers:
        header |= {"format": LAYERED, "layers": len(mapping.layers)}
    for number, (weight, bias) in enumerate(mapping.layers):
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
    arrays: dict[str, Any] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > len(data):
            raise ValueError("entries larger than the file")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is packed")
            arrays[entry.filename.removesuffix(".npy")] = _array(archive.read(entry))
    header = json.loads(str(arrays.pop("header")))
    return header, arrays


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


KINDS = ("affine", "low_rank", "procrustes")
# Rows whose leave-one-out error chooses a penalty: a curve over 16 penalties needs no more.
LEFT_OUT = 4000
# Constants of an affine map, tuned on texts and pictures that no published figure uses: the largest
# share of the rotation; ridge's penalty over the one of least error, as a mean of two varies less
# than either; and the singular value, over the mean one, at which the rotation weights a direction
# by 1 / sqrt(2).
MOST_TURNED, LESS, DOUBTED = 0.6, 0.3, 0.3


@dataclass(frozen=True)
class Strength:
    """Parameters of an affine map that do not follow from the moments of the pairs.

    Attributes:
        penalty: Ridge's penalty.
        turned: Share of the rotation in the mean of both, 0 to 1.
    """

    penalty: float
    turned: float

    @property
    def straight(self) -> "Strength":
        """The parameters of ridge alone, for residuals of a converter: they need no rotation."""
        return Strength(self.penalty / LESS, 0.0)


def fit_maps(
    old: Vectors, new: Vectors, *, kinds: Collection[str] = KINDS, group: int = 1
) -> dict[str, Map]:
    """The candidates, by name, from pairs old [n, a] and new [n, b].

    "affine": the mean of ridge, its penalty by leave-one-out, and of a rotation times a factor.
    "low_rank": the same through the b/2 leading directions of what it predicts. "procrustes":
    orthogonal between centred vectors, between vectors of any norm times one factor. Raises
    InvalidInputError for fewer than 2 pairs.
    """
    if len(old) != len(new) or len(old) < 2 * group:
        raise InvalidInputError(f"expected at least 2 pairs, got {len(old)} old and {len(new)} new")
    blocks = split_into_blocks(old, new)
    solver = Solver(Moments.of(blocks()))
    strength = solver.strength(blocks, group=group) if needs_strength(kinds) else None
    return solver.maps(strength, is_unit(new), kinds)


def needs_strength(kinds: Collection[str]) -> bool:
    """Whether one of them is told more than moments: all but a rotation are."""
    return any(kind != "procrustes" for kind in kinds)


class Solver:
    """The candidates of the pairs whose moments are given; what two of them need is solved once."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def strength(self, blocks: Blocks, *, group: int = 1) -> Strength:
        """By leave-one-out error on the same pairs, which `blocks` gives. The less of the new
        vectors ridge leaves unexplained, the less is turned."""
        found = ridge.fit_ridge(blocks, group=group, moments=self._moments, sample=LEFT_OUT)
        unexplained = found.error / found.spread if found.spread > 0 else 0.0
        return Strength(LESS * found.penalty, min(MOST_TURNED, unexplained))

    def maps(
        self, strength: Strength | None, unit: bool, kinds: Collection[str] = KINDS
    ) -> dict[str, Map]:
        """Solve for the maps of some kinds.

        Args:
            strength: Parameters of the affine map; None if all kinds are "procrustes".
            unit: Whether the maps normalise, as in Map.
            kinds: Names of KINDS.
        """
        moments, maps = self._moments, {}
        affine = None if strength is None else self._affine(strength)
        for kind in kinds:
            facts = {"pairs": str(moments.rows)}
            if kind == "procrustes":
                weight = self._rotation(np.ones(min(moments.dims)), factor=not unit)
            else:
                assert strength is not None and affine is not None
                half = max(1, moments.dims[1] // 2)
                weight = affine if kind == "affine" else _low_rank(affine, moments, half)
                facts |= {
                    "penalty": f"{strength.penalty:.3g}",
                    "turned": f"{strength.turned:.3g}",
                }
            bias = moments.mean[1] - weight @ moments.mean[0]
            maps[kind] = Map(kind, weight.astype(np.float32), bias.astype(np.float32), unit, facts)
        return maps

    def _affine(self, strength: Strength) -> Doubles:
        straight = ridge.solve_ridge(self._moments, strength.penalty).weight
        if strength.turned == 0:
            return straight
        _, singular, _ = self._decomposed
        doubted = DOUBTED * singular.mean()
        # 1 in place of each singular value gives the rotation of least error, in which those of
        # directions that the pairs say little of are as large as any.
        known = np.hypot(singular, doubted)
        believed = np.divide(singular, known, out=np.zeros_like(singular), where=known > 0)
        turned = self._rotation(believed, factor=True)
        mean: Doubles = (1 - strength.turned) * straight + strength.turned * turned
        return mean

    def _rotation(self, values: Doubles, *, factor: bool) -> Doubles:
        """V diag(values) U' [b, a] of the singular value decomposition U s V' of the cross products
        (Schönemann 1966), semi-orthogonal where all are 1; with `factor` times the one of least
        squared error."""
        u, singular, vt = self._decomposed
        turned = (u * values) @ vt
        spread = float((self._moments.gram @ turned * turned).sum())
        scale = float(values @ singular) / spread if factor and spread > 0 else 1.0
        return scale * turned.T

    @cached_property
    def _decomposed(self) -> tuple[Doubles, Doubles, Doubles]:
        return _decomposed(self._moments.cross)


def _low_rank(weight: Doubles, moments: Moments, rank: int) -> Doubles:
    """Reduced-rank regression: `weight` onto the leading principal directions of its outputs."""
    _, directions = np.linalg.eigh(weight @ moments.gram @ weight.T)
    kept = directions[:, -rank:]
    return kept @ (kept.T @ weight)


def _decomposed(cross: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    try:
        u, singular, vt = np.linalg.svd(cross, full_matrices=False)
    except np.linalg.LinAlgError:
        # LAPACK's gesdd gives up on a few matrices of fewer pairs than dims, not on the transpose.
        v, singular, ut = np.linalg.svd(cross.T, full_matrices=False)
        u, vt = ut.T, v.T
    return u, singular, vt


RESIDUAL = "residual"
# The user names the trainer, `module:function`: nothing here knows of one. Ours is
# `nobackfill.training.pairs:residual`, where the extra `training` is installed.
# From old vectors [n, a], new ones [n, b] and what the affine map gives before it normalises
# [n, b]: the layers of a network, weight [out, in] and bias [out] each, which gives of old vectors
# what to add. ReLU stands between layers.
Trainer = Callable[[Vectors, Vectors, Vectors], Sequence[tuple[Floats, Floats]]]


def open_trainer(name: str) -> Trainer:
    """`module:function`. Raises NotFoundError where there is none, or what it needs is missing."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise NotFoundError(
            f"{name}: cannot be imported ({error}); our own trainer needs pip install '.[training]'"
        ) from error
    if not callable(found):
        raise InvalidInputError(f"{name}: is no function")
    trainer: Trainer = found
    return trainer


def trained(straight: Map, old: Vectors, new: Vectors, trainer: Trainer) -> Map:
    """An affine map with a network beside it, from pairs. Raises InvalidInputError for layers that
    do not fit, NaN and infinity."""
    given = trainer(old, new, replace(straight, unit=False)(old))
    layers: list[tuple[Vectors, Vectors]] = []
    size = straight.dims[0]
    for weight, bias in given:
        if np.ndim(weight) != 2 or np.shape(weight)[1] != size:
            raise InvalidInputError(
                f"--also: expected a layer that reads {size} numbers, got weights of shape "
                f"{list(np.shape(weight))}"
            )
        size = len(weight)
        shift = check_vectors(np.asarray(bias, np.float32)[None], size, what="a layer's bias")
        checked = check_vectors(
            np.asarray(weight, np.float32), np.shape(weight)[1], what="a layer's weight"
        )
        layers.append((checked, shift[0]))
    if size != straight.dims[1] or not layers:
        raise InvalidInputError(
            f"--also: expected layers that give {straight.dims[1]} numbers, got {size}"
        )
    return replace(straight, kind=RESIDUAL, layers=tuple(layers))
