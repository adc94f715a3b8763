"""Closed-form maps from the old model's vectors to the new one's, and the file that holds one.

No labels and no training: sums over pairs are all that each needs (nobackfill.ridge).
"""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from nobackfill import ridge
from nobackfill.durable import write_file
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.ridge import Blocks, Doubles, Floats, Moments, in_blocks
from nobackfill.vectors import Vectors, check_vectors

# Of the file.
FORMAT = 1
# Facts of a map that was made from vectors whose models are known.
OLD_MODEL, NEW_MODEL = "old_model", "new_model"
KINDS = ("affine", "low_rank", "near_procrustes", "procrustes")
# Rows whose leave-one-out error chooses a penalty: a curve over 16 penalties needs no more.
LEFT_OUT = 4000
# Vectors that differ less from norm 1 came from a model that normalises.
UNIT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Map:
    """x -> weight x + bias, then divided by its norm with `unit`; weight [b, a], bias [b].

    `facts`: what the file says of its origin: pairs, penalty, the two models.
    """

    kind: str
    weight: Vectors
    bias: Vectors
    unit: bool
    facts: dict[str, str] = field(default_factory=dict)

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
        parts = (str(self.unit).encode(), self.weight.tobytes(), self.bias.tobytes())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def __call__(self, vectors: Vectors) -> Vectors:
        """[n, a] -> [n, b]. Raises InvalidInputError for another dimension than a, and NaN."""
        checked = check_vectors(vectors, self.dims[0], what="old vectors")
        mapped = checked @ self.weight.T + self.bias
        return normalised(mapped) if self.unit else mapped


def normalised(vectors: Vectors) -> Vectors:
    """Rows of norm 1; a row of zeros stays as it is."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = vectors / np.maximum(norms, np.float32(1e-12))
    return scaled


def is_unit(vectors: Floats) -> bool:
    """Whether all rows have norm 1 within 1e-3."""
    norms = np.linalg.norm(vectors, axis=1)
    return bool(len(norms)) and float(np.abs(norms - 1).max()) <= UNIT_TOLERANCE


def fit_maps(
    old: Vectors, new: Vectors, *, kinds: Collection[str] = KINDS, together: int = 1
) -> dict[str, Map]:
    """The candidates, by name, from pairs old [n, a] and new [n, b].

    "affine": ridge with its penalty by leave-one-out. "low_rank": the same through the b/2 leading
    directions of what it predicts. "procrustes": orthogonal between centred vectors, between
    vectors of any norm times one factor. "near_procrustes": ridge that shrinks towards that times
    its factor, in place of zero. Raises InvalidInputError for fewer than 2 pairs.
    """
    if len(old) != len(new) or len(old) < 2 * together:
        raise InvalidInputError(f"expected at least 2 pairs, got {len(old)} old and {len(new)} new")
    blocks = in_blocks(old, new)
    solver = Solver(Moments.of(blocks()))
    return solver.maps(solver.penalties(blocks, kinds, together=together), is_unit(new), kinds)


class Solver:
    """The candidates of the pairs whose moments are given; what two of them need is solved once."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments
        # By penalty.
        self._affine: dict[float, Doubles] = {}

    def penalties(
        self, blocks: Blocks, kinds: Collection[str] = KINDS, *, together: int = 1
    ) -> dict[str, float]:
        """Those of each of `kinds` that has one, of least leave-one-out error on the same pairs,
        which `blocks` gives."""
        found: dict[str, float] = {}
        if not {"affine", "low_rank", "near_procrustes"} & set(kinds):
            return found
        left_out = ridge.LeaveOneOut(
            blocks, together=together, moments=self._moments, left_out=LEFT_OUT
        )
        if "affine" in kinds or "low_rank" in kinds:
            found |= dict.fromkeys(("affine", "low_rank"), left_out.fit().penalty)
        if "near_procrustes" in kinds:
            rotation, factor = self._procrustes
            found["near_procrustes"] = left_out.fit(factor * rotation).penalty
        return found

    def maps(
        self, chosen: Mapping[str, float], unit: bool, kinds: Collection[str] = KINDS
    ) -> dict[str, Map]:
        """Those of `kinds`; `chosen`: their `penalties`, `unit`: as in Map."""
        moments, maps = self._moments, {}
        for kind in kinds:
            weight = self._weight(kind, chosen, unit)
            bias = moments.means[1] - weight @ moments.means[0]
            facts = {"pairs": str(moments.rows)}
            if kind in chosen:
                facts["penalty"] = f"{chosen[kind]:.3g}"
            maps[kind] = Map(kind, weight.astype(np.float32), bias.astype(np.float32), unit, facts)
        return maps

    def _weight(self, kind: str, chosen: Mapping[str, float], unit: bool) -> Doubles:
        if kind in ("affine", "low_rank"):
            penalty = chosen[kind]
            if penalty not in self._affine:
                self._affine[penalty] = ridge.solve(self._moments, penalty).weight
            affine = self._affine[penalty]
            half = max(1, self._moments.dims[1] // 2)
            return affine if kind == "affine" else _low_rank(affine, self._moments, half)
        rotation, factor = self._procrustes
        if kind == "near_procrustes":
            return ridge.solve(self._moments, chosen[kind], factor * rotation).weight
        return rotation * (1 if unit else factor)

    @cached_property
    def _procrustes(self) -> tuple[Doubles, float]:
        return _procrustes(self._moments)


def _low_rank(weight: Doubles, moments: Moments, rank: int) -> Doubles:
    """Reduced-rank regression: `weight` onto the leading principal directions of its outputs."""
    _, directions = np.linalg.eigh(weight @ moments.gram @ weight.T)
    kept = directions[:, -rank:]
    return kept @ (kept.T @ weight)


def _procrustes(moments: Moments) -> tuple[Doubles, float]:
    """R = V U' of the singular value decomposition U s V' of the cross products (Schönemann 1966),
    semi-orthogonal between different dimensions, and the factor of least squared error."""
    u, singular, vt = _decomposed(moments.cross)
    rotation = u @ vt
    spread = float((moments.gram @ rotation * rotation).sum())
    return rotation.T, float(singular.sum()) / spread if spread > 0 else 1.0


def _decomposed(cross: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    try:
        u, singular, vt = np.linalg.svd(cross, full_matrices=False)
    except np.linalg.LinAlgError:
        # LAPACK's gesdd gives up on a few matrices of fewer pairs than dims, not on the transpose.
        v, singular, ut = np.linalg.svd(cross.T, full_matrices=False)
        u, vt = ut.T, v.T
    return u, singular, vt


def save_map(path: Path, found: Map) -> None:
    """Write a map as arrays and a line of JSON. Raises CannotWriteError."""
    header = {"format": FORMAT, "kind": found.kind, "unit": found.unit, "facts": found.facts}
    buffer = io.BytesIO()
    text = np.array(json.dumps(header, sort_keys=True))
    np.savez(buffer, header=text, weight=found.weight, bias=found.bias)
    write_file(path, buffer.getvalue())


def load_map(path: Path) -> Map:
    """Read what `save_map` wrote. Raises NotFoundError, InvalidInputError for another file."""
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file; `nobackfill fit` writes a map")
    try:
        # From memory: numpy leaves a file open that it cannot read.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            header = json.loads(str(arrays["header"]))
            weight, bias = arrays["weight"], arrays["bias"]
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}")
        if bias.ndim != 1 or weight.shape[:1] != bias.shape:
            raise ValueError(f"shapes {weight.shape} and {bias.shape}")
        checked = check_vectors(weight, weight.shape[1], what="weight")
        shift = check_vectors(bias[None], len(bias), what="bias")[0]
        facts = {str(key): str(value) for key, value in header["facts"].items()}
        return Map(str(header["kind"]), checked, shift, bool(header["unit"]), facts)
    except (
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        RecursionError,
        zlib.error,
        OSError,
        EOFError,
        zipfile.BadZipFile,
    ) as error:
        raise InvalidInputError(
            f"{path}: expected a map that `nobackfill fit` wrote ({error}); fit it again"
        ) from error
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error
