"""Maps between the old model's vectors and the new one's, and the file that holds one.

A map is solved from pairs, without labels and without training, from sums over the pairs. Ridge
regression shrinks directions in which the pairs say little, so that searches no longer distinguish
items there. A rotation preserves all directions, but follows no stretching. The mean of both finds
more known items than either, from 100 pairs to 2,000 (docs/lab/adoption.md has the figures). A
network can learn the residual of an affine map.
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
from typing import Any, Literal, get_args

import numpy as np

from nobackfill import ridge
from nobackfill.durable import write_file
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.ridge import Blocks, Doubles, Floats, Moments, split_into_blocks
from nobackfill.vectors import Vectors, check_vectors, normalise

# Formats of the file. The second has the layers of a network, which a reader of the first ignores.
# The third is a query adapter, which a reader of the others would take for a map.
FORMAT, LAYERED, ADAPTER_FORMAT = 1, 2, 3
# Largest file in bytes: it is read into memory. A map of 8,192 dims has 268 MB.
MOST_BYTES = 1 << 31
# The output of a query adapter that is written as a graph.
ADAPTER_OUTPUT = "adapted"
# Facts of a map that was made from vectors whose models are known.
OLD_MODEL, NEW_MODEL = "old_model", "new_model"
# Fact of a map that was fitted on old vectors of norm 1, with the value "1".
OLD_NORM_FACT = "old_norm"
# Vectors that differ less from norm 1 came from a model that normalises.
UNIT_TOLERANCE = 1e-3


# A map migrates stored vectors, "old to new". A query adapter maps queries, "new to old".
Direction = Literal["old to new", "new to old"]


@dataclass(frozen=True)
class Map:
    """A map from old vectors x [a] to new vectors [b]: weight x + bias, normalised with
    `unit_norm`.

    Call it with an array of old vectors; a query adapter, with new queries.

    The arrays are not copied or checked; do not change them.

    Attributes:
        kind: Name of the method that fitted it, such as "affine".
        weight: float32 [b, a].
        bias: float32 [b].
        unit_norm: Whether the output is divided by its norm.
        facts: Its origin, as texts: number of pairs, penalty, fingerprints of the two models.
        residual_layers: Layers of a network of x whose output is added before the normalisation:
            weight float32 [out, in] and bias [out] each, with ReLU between layers. Empty for a
            linear map.
        direction: Which vectors it reads, and which it returns.
    """

    kind: str
    weight: Vectors
    bias: Vectors
    unit_norm: bool
    facts: dict[str, str] = field(default_factory=dict)
    residual_layers: tuple[tuple[Vectors, Vectors], ...] = ()
    direction: Direction = "old to new"

    @property
    def dims(self) -> tuple[int, int]:
        """Return the dimension a of the vectors it reads, and b of those it returns.

        For a query adapter, the first is the new model's dimension.
        """
        return self.weight.shape[1], self.weight.shape[0]

    def with_model_names(self, old: str | None, new: str | None) -> "Map":
        """Return a copy of the map whose facts name the two models.

        The arrays are shared; an earlier fact of the same name is replaced. The digest stays the
        same, because facts are not part of it.

        Args:
            old: Fingerprint of the old model; None or empty leaves the fact as it is.
            new: Fingerprint of the new model, likewise.
        """
        known = {name: model for name, model in ((OLD_MODEL, old), (NEW_MODEL, new)) if model}
        return replace(self, facts=self.facts | known)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of weights, biases and `unit_norm` as 64 hexadecimal digits.

        Stores mark migrated vectors with it. Kind and facts do not change it.

        The direction does not change it either. It is computed at each call.
        """
        arrays = (
            self.weight,
            self.bias,
            *(part for layer in self.residual_layers for part in layer),
        )
        parts = (str(self.unit_norm).encode(), *(array.tobytes() for array in arrays))
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def __call__(self, vectors: Vectors) -> Vectors:
        """Migrate old vectors, or map new queries if `direction` says so.

        The input is not changed. A row whose output is zero stays zero.

        Args:
            vectors: float32 or float64 [n, a]; n may be 0.

        Returns:
            float32 [n, b].

        Raises:
            InvalidInputError: The array has another shape or type, or rows hold NaN, infinity or a
                norm above 1e15.
        """
        what = "old vectors" if self.direction == "old to new" else "queries by the new model"
        checked = check_vectors(vectors, self.dims[0], error_name=what)
        mapped = checked @ self.weight.T + self.bias
        if self.residual_layers:
            mapped = mapped + self._network(checked)
        return normalise(mapped) if self.unit_norm else mapped

    def _network(self, hidden: Vectors) -> Vectors:
        for number, (weight, bias) in enumerate(self.residual_layers):
            hidden = (np.maximum(hidden, 0) if number else hidden) @ weight.T + bias
        return hidden


def is_unit(vectors: Floats) -> bool:
    """Tell whether all rows of an array [n, d] have norm 1 within 1e-3; False if n is 0.

    NaN is not norm 1.
    """
    norms = np.linalg.norm(vectors, axis=1)
    return bool(len(norms)) and float(np.abs(norms - 1).max()) <= UNIT_TOLERANCE


def save_map(path: Path, mapping: Map) -> None:
    """Write a map or a query adapter as a numpy archive with a JSON header.

    `load_map` reads a map, and `load_adapter` a query adapter.

    An existing file is replaced in one step.

    Do not write while another process writes the same file: the last one wins.

    Raises:
        CannotWriteError: The file cannot be written, or its folder does not exist.
    """
    header = {
        "format": FORMAT,
        "kind": mapping.kind,
        "unit": mapping.unit_norm,
        "facts": mapping.facts,
    }
    arrays = {"weight": mapping.weight, "bias": mapping.bias}
    if mapping.residual_layers:
        header |= {"format": LAYERED, "layers": len(mapping.residual_layers)}
    if mapping.direction != "old to new":
        header |= {"format": ADAPTER_FORMAT, "direction": mapping.direction}
    for number, (weight, bias) in enumerate(mapping.residual_layers):
        arrays |= {f"weight_{number}": weight, f"bias_{number}": bias}
    buffer = io.BytesIO()
    text = np.array(json.dumps(header, sort_keys=True))
    np.savez(buffer, header=text, **arrays)  # type: ignore[arg-type]
    write_file(path, buffer.getvalue())


def load_map(path: Path) -> Map:
    """Read a map that `save_map` wrote, of this version or an earlier one.

    The file may be hostile: nothing in it is run.

    Raises:
        NotFoundError: There is no such file, or it is a folder.
        InvalidInputError: The file cannot be read, is damaged, larger than 2 GiB, a query adapter,
            or no file of a map.
    """
    wanted = "from old vectors to new ones"
    if (output := _graph_output(path)) == ADAPTER_OUTPUT:
        raise InvalidInputError(
            f"{path}: expected a map {wanted}, found the graph of a query adapter, which maps new "
            "queries to the old space, so that no vector is migrated; to use it in a release, "
            f"run `python training/export.py --text-encoder FOLDER --adapter {path}`. To migrate "
            "vectors, name the file of `nobackfill fit --out`"
        )
    if output is not None:
        raise InvalidInputError(
            f"{path}: expected a map {wanted} as `nobackfill fit --out` writes it, found an ONNX "
            "file; name the .npz file of that command (export.py --upgrade reads the ONNX file of "
            "`nobackfill fit --onnx`)"
        )
    mapping = _load(path, "nobackfill fit")
    if mapping.direction != "old to new":
        raise InvalidInputError(
            f"{path}: expected a map {wanted}, found a query adapter, which maps new queries to "
            f"the old space, so that no vector is migrated; {adapter_example(path)}. To migrate "
            "vectors, name the file of `nobackfill fit --out`"
        )
    return mapping


def load_adapter(path: Path) -> Map:
    """Read a query adapter that `save_map` wrote.

    The file may be hostile: nothing in it is run.

    Raises:
        NotFoundError: There is no such file, or it is a folder.
        InvalidInputError: The file cannot be read, is damaged, larger than 2 GiB, or no query
            adapter.
    """
    if _graph_output(path) is not None:
        raise InvalidInputError(
            f"{path}: expected a query adapter as an archive, found an ONNX file, which only a "
            "release can use; write the archive with `nobackfill fit --adapter adapter.npz`, and "
            "name that file"
        )
    mapping = _load(path, "nobackfill fit --adapter")
    if mapping.direction != "new to old":
        raise InvalidInputError(
            f"{path}: expected a query adapter, found a map from old vectors to new ones; name the "
            "file of `nobackfill fit --adapter`"
        )
    return mapping


def adapter_example(file: Path) -> str:
    """Return a line of Python that searches the stored vectors by a query of the new model.

    The file need not exist.
    """
    return (
        f"search by AdapterSearch.open(source, Path({str(file)!r})).search(query_by_new_model) of "
        "nobackfill.serve; no stored vector changes"
    )


def _graph_output(path: Path) -> str | None:
    """Return the name of an ONNX file's first output, or "" without one; None for another file."""
    if path.suffix != ".onnx" or not path.is_file():
        return None
    import onnx
    from google.protobuf.message import DecodeError

    try:
        outputs = onnx.load(path, load_external_data=False).graph.output
    except (OSError, DecodeError):
        return None
    return outputs[0].name if outputs else ""


def _load(path: Path, command: str) -> Map:
    with name_file_in_errors(path, command):
        header, arrays = read_arrays(path)
        if header["format"] not in (FORMAT, LAYERED, ADAPTER_FORMAT):
            raise ValueError(
                f"it has the format {header['format']!r}, which this version of nobackfill does "
                "not know"
            )
        weight, bias = _linear(arrays["weight"], arrays["bias"])
        layers = tuple(
            _linear(arrays[f"weight_{number}"], arrays[f"bias_{number}"])
            for number in range(int(header.get("layers", 0)))
        )
        ends = [weight.shape[1], *(len(one) for _, one in layers)]
        if layers and ([one.shape[1] for one, _ in layers], ends[-1]) != (ends[:-1], len(bias)):
            raise ValueError(
                "a layer has another number of inputs than the layer before has outputs"
            )
        facts = {str(key): str(value) for key, value in header["facts"].items()}
        adapts = header["format"] == ADAPTER_FORMAT
        direction: Direction = header["direction"] if adapts else "old to new"
        if direction not in get_args(Direction):
            raise ValueError(
                f"it has the direction {direction!r}, which this version of nobackfill does not "
                "know"
            )
        return Map(
            str(header["kind"]), weight, bias, bool(header["unit"]), facts, layers, direction
        )


@contextmanager
def name_file_in_errors(path: Path, command: str) -> Iterator[None]:
    """Turn every error of the block, which reads a file, into an error that names the file.

    Args:
        path: The file.
        command: The command that writes such files, for the error.

    Raises:
        NotFoundError: There is no such file, or the path is a folder's.
        InvalidInputError: The block raises any exception.
    """
    if not path.is_file():
        found = "expected a file, found a folder" if path.is_dir() else "no such file"
        raise NotFoundError(f"{path}: {found}; `{command}` writes one")
    try:
        yield
    except KeyError as error:
        raise InvalidInputError(
            f"{path}: expected a file that `{command}` wrote, found a file without {error}; name "
            "the file that the command wrote, or run that command again"
        ) from error
    except Exception as error:
        # Errors of zipfile, numpy and json at hostile bytes have no common base class.
        raise InvalidInputError(
            f"{path}: expected a file that `{command}` wrote "
            f"({str(error) or type(error).__name__}); run that command again"
        ) from error


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, Vectors]]:
    """Read the header and the arrays of a numpy archive that `np.savez` wrote, from an untrusted
    file.

    An archive with compressed entries is refused: its arrays could be larger than the file.

    Returns:
        The JSON value of the array `header`, which should be an object and is not checked, and all
        other arrays by name.

    Raises:
        ValueError: The file is larger than 2 GiB, or an entry is compressed or has another length
            than its header declares.
        Exception: Any error of zipfile, numpy and json for a damaged file; `name_file_in_errors`
            turns it into InvalidInputError.
        OSError: The file is missing or cannot be read.
        KeyError: There is no array `header`.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES} bytes")
    data = path.read_bytes()
    arrays: dict[str, Any] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > len(data):
            raise ValueError("it has arrays that are larger than the file")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its array {entry.filename} is compressed")
            arrays[entry.filename.removesuffix(".npy")] = _array(archive.read(entry))
    header = json.loads(str(arrays.pop("header")))
    return header, arrays


def _array(data: bytes) -> Any:
    """Parse an array of a .npy file.

    Raises:
        ValueError: Its header declares another number of bytes than follow it, or objects.
    """
    file = io.BytesIO(data)
    known = np.lib.format
    first = known.read_magic(file) == (1, 0)
    read = known.read_array_header_1_0 if first else known.read_array_header_2_0
    shape, _, dtype = read(file)
    if prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise ValueError(
            f"it has {len(data)} bytes for an array of {dtype} of the shape {shape}, which needs "
            "another number of bytes"
        )
    file.seek(0)
    return known.read_array(file, allow_pickle=False)


def _linear(weight: Vectors, bias: Vectors) -> tuple[Vectors, Vectors]:
    if weight.ndim != 2 or 0 in weight.shape or weight.shape[:1] != bias.shape:
        raise ValueError(
            f"it has a layer with weights of the shape {weight.shape} and a bias of the shape "
            f"{bias.shape}, which do not belong together"
        )
    checked = check_vectors(weight, weight.shape[1], error_name="weight")
    return checked, check_vectors(bias[None], len(bias), error_name="bias")[0]


MAP_KINDS = ("affine", "low_rank", "procrustes")
# Rows whose leave-one-out error chooses a penalty: a curve over 16 penalties needs no more.
LEAVE_ONE_OUT_ROWS = 4000
# Constants of an affine map, tuned on texts and pictures that no published figure uses. The largest
# share of the rotation; the factor of ridge's penalty of least error, below 1 because a mean of two
# maps varies less than either; and the singular value, in multiples of the mean one, at which the
# rotation weights a direction by 1 / sqrt(2).
LARGEST_ROTATION_SHARE, PENALTY_FACTOR, UNSURE_SINGULAR_VALUE = 0.6, 0.3, 0.3


@dataclass(frozen=True)
class AffineStrength:
    """Parameters of an affine map that do not follow from the moments of the pairs.

    Attributes:
        penalty: Ridge's penalty lambda, as a multiple of the mean input variance.
        rotation_share: Weight of the rotation in its mean with ridge, 0 to 1.
    """

    penalty: float
    rotation_share: float

    @property
    def of_ridge_alone(self) -> "AffineStrength":
        """Return the parameters of ridge without a rotation, as residuals of a converter need. The
        penalty is then that of least error.
        """
        return AffineStrength(self.penalty / PENALTY_FACTOR, 0.0)


def fit_maps(
    old: Vectors, new: Vectors, *, kinds: Collection[str] = MAP_KINDS, rows_per_item: int = 1
) -> dict[str, Map]:
    """Fit maps of several kinds to pairs.

    - "affine": the mean of ridge regression, whose penalty leave-one-out chooses, and of a scaled
      rotation.
    - "low_rank": the affine map, restricted to the b/2 leading directions of its outputs.
    - "procrustes": a rotation between the centred vectors (Schönemann 1966), with one scale factor
      if the new vectors are not normalised.

    A map normalises its output if all new vectors have norm 1.

    Args:
        old: Vectors by the old model, float32 [n, a].
        new: Vectors of the same items by the new model, float32 [n, b].
        kinds: Names of MAP_KINDS; none give no maps. A repeated one counts once.
        rows_per_item: Number of adjacent rows that belong to one item and are left out together.
            At least 1.

    Returns:
        The maps by kind.

    Raises:
        InvalidInputError: `old` and `new` differ in length, or have fewer than 2 groups of rows. A
            kind is not in MAP_KINDS.
        ValueError: A vector holds NaN or infinity. The number of rows is no multiple of
            `rows_per_item`, and a kind other than "procrustes" is wanted.
        numpy.linalg.LinAlgError: The equations cannot be solved.
    """
    if len(old) != len(new) or len(old) < 2 * rows_per_item:
        raise InvalidInputError(
            f"expected at least {2 * rows_per_item} items with an old and a new vector to fit a "
            "map to, "
            f"got {len(old)} old and {len(new)} new vectors; embed more items by the new model"
        )
    blocks = split_into_blocks(old, new)
    solver = MapSolver(Moments.from_blocks(blocks()))
    strength = (
        solver.choose_strength(blocks, rows_per_item=rows_per_item)
        if needs_strength(kinds)
        else None
    )
    return solver.solve_maps(strength, is_unit(new), kinds)


def needs_strength(kinds: Collection[str]) -> bool:
    """Tell whether a kind of map needs an `AffineStrength`: all but "procrustes" do.

    False for no kinds. An unknown kind counts as one that does.
    """
    return any(kind != "procrustes" for kind in kinds)


class MapSolver:
    """Solves for maps of several kinds from the moments of pairs; shared parts are solved once.

    Args:
        moments: Sums over the pairs (see nobackfill.ridge).
    """

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def choose_strength(self, blocks: Blocks, *, rows_per_item: int = 1) -> AffineStrength:
        """Choose the parameters of the affine map by the leave-one-out error of ridge.

        The share of the rotation grows with the share of the new vectors' variance that ridge does
        not explain, up to 0.6.

        Args:
            blocks: Each call yields the pairs whose moments these are, from the first one on.
            rows_per_item: As in `fit_maps`.

        Returns:
            The penalty is a multiple of the mean input variance; the share is 0 to 0.6.

        Raises:
            ValueError: The blocks hold NaN or infinity. There are fewer than 2 groups, or the
                number of rows is no multiple of `rows_per_item`.
            numpy.linalg.LinAlgError: The eigenvalues cannot be computed.
        """
        found = ridge.fit_ridge(
            blocks,
            rows_per_group=rows_per_item,
            moments=self._moments,
            most_sampled_rows=LEAVE_ONE_OUT_ROWS,
        )
        unexplained = found.loo_error / found.output_variance if found.output_variance > 0 else 0.0
        return AffineStrength(
            PENALTY_FACTOR * found.penalty, min(LARGEST_ROTATION_SHARE, unexplained)
        )

    def solve_maps(
        self, strength: AffineStrength | None, unit_norm: bool, kinds: Collection[str] = MAP_KINDS
    ) -> dict[str, Map]:
        """Solve for the maps of some kinds.

        Nothing is fitted again: the same moments give the same maps.

        Args:
            strength: Parameters of the affine map; None only if all kinds are "procrustes".
            unit_norm: Whether the maps normalise their output, as in Map.
            kinds: Names of MAP_KINDS.

        Returns:
            The maps by kind, float32, in the order of `kinds`; a repeated kind counts once.

        Raises:
            InvalidInputError: A kind is not in MAP_KINDS.
            numpy.linalg.LinAlgError: The equations are singular, as with a penalty near 0 and fewer
                pairs than dimensions.
            AssertionError: `strength` is None, and a kind needs it.
        """
        if unknown := [kind for kind in kinds if kind not in MAP_KINDS]:
            raise InvalidInputError(
                f"kinds of maps to fit: expected only names of {', '.join(MAP_KINDS)}, got "
                f"{unknown[0]!r}; correct the name"
            )
        moments, maps = self._moments, {}
        affine = None if strength is None else self._affine(strength)
        for kind in kinds:
            facts = {"pairs": str(moments.row_count)}
            if kind == "procrustes":
                weight = self._rotation(np.ones(min(moments.dims)), factor=not unit_norm)
            else:
                assert strength is not None and affine is not None
                half = max(1, moments.dims[1] // 2)
                weight = affine if kind == "affine" else _low_rank(affine, moments, half)
                facts |= {
                    "penalty": f"{strength.penalty:.3g}",
                    "turned": f"{strength.rotation_share:.3g}",
                }
            bias = moments.mean[1] - weight @ moments.mean[0]
            maps[kind] = Map(
                kind, weight.astype(np.float32), bias.astype(np.float32), unit_norm, facts
            )
        return maps

    def _affine(self, strength: AffineStrength) -> Doubles:
        """Solve for the weights [b, a] of the mean of ridge and rotation."""
        linear = ridge.solve_ridge(self._moments, strength.penalty).weight
        share = strength.rotation_share
        if share == 0:
            return linear
        _, singular, _ = self._decomposed
        unsure = UNSURE_SINGULAR_VALUE * singular.mean()
        # Factors of 1 give the rotation of least error, in which directions with little evidence
        # count as much as any. Here these get smaller factors.
        lengths = np.hypot(singular, unsure)
        factors = np.divide(singular, lengths, out=np.zeros_like(singular), where=lengths > 0)
        rotation = self._rotation(factors, factor=True)
        mean: Doubles = (1 - share) * linear + share * rotation
        return mean

    def _rotation(self, values: Doubles, *, factor: bool) -> Doubles:
        """Compute V diag(values) U' [b, a] from the decomposition U s V' of the cross products.

        It is semi-orthogonal if all values are 1 (Schönemann 1966). With `factor`, it is multiplied
        by the number that gives the least squared error.
        """
        u, singular, vt = self._decomposed
        rotation = (u * values) @ vt
        spread = float((self._moments.gram @ rotation * rotation).sum())
        scale = float(values @ singular) / spread if factor and spread > 0 else 1.0
        return scale * rotation.T

    @cached_property
    def _decomposed(self) -> tuple[Doubles, Doubles, Doubles]:
        return _decomposed(self._moments.cross)


def _low_rank(weight: Doubles, moments: Moments, rank: int) -> Doubles:
    """Project weights [b, a] onto the `rank` leading principal directions of their outputs."""
    _, directions = np.linalg.eigh(weight @ moments.gram @ weight.T)
    leading = directions[:, -rank:]
    return leading @ (leading.T @ weight)


def _decomposed(cross: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    try:
        u, singular, vt = np.linalg.svd(cross, full_matrices=False)
    except np.linalg.LinAlgError:
        # LAPACK's gesdd fails on a few matrices of fewer pairs than dims, but not on the transpose.
        v, singular, ut = np.linalg.svd(cross.T, full_matrices=False)
        u, vt = ut.T, v.T
    return u, singular, vt


RESIDUAL_KIND = "residual"
# A function of old vectors [n, a], new vectors [n, b] and the affine map's outputs before
# normalisation [n, b]. It returns the layers of a network, weight [out, in] and bias [out] each,
# with ReLU between them, that computes the residual from old vectors. The user names it as
# `module:function`; ours is `nobackfill.training.pairs:residual`, with the extra `training`.
Trainer = Callable[[Vectors, Vectors, Vectors], Sequence[tuple[Floats, Floats]]]


def open_trainer(name: str) -> Trainer:
    """Import the function that trains a residual network.

    An ImportError, AttributeError or ValueError of the module's own code becomes NotFoundError, and
    its other errors pass through.

    Args:
        name: `module:function`. The module is looked for on Python's path, and its code is run.

    Raises:
        NotFoundError: There is no such module or function, or the module fails to import another.
        InvalidInputError: The name leads to an object that is no function.
        TypeError: The name of the module begins with a dot.
        Exception: Any other error of the module's own code.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise NotFoundError(
            f"--also {name}: cannot be imported as MODULE:FUNCTION ({error}); "
            "nobackfill.training.pairs:residual needs pip install '.[training]'"
        ) from error
    if not callable(found):
        raise InvalidInputError(
            f"--also {name}: expected a function, got {type(found).__name__}; name a function as "
            "MODULE:FUNCTION"
        )
    trainer: Trainer = found
    return trainer


def train_residual(affine: Map, old: Vectors, new: Vectors, trainer: Trainer) -> Map:
    """Train a network for the residual of an affine map, and return the map with both.

    The trainer gets the arrays themselves, not copies.

    The trainer is called once. The digest of the result differs from that of `affine`.

    Args:
        affine: The affine map, without layers.
        old: Vectors by the old model, float32 [n, a].
        new: Vectors of the same items by the new model, float32 [n, b].
        trainer: Trains the network; its errors pass through.

    Returns:
        A map of the kind "residual" with the facts of `affine`.

    Raises:
        InvalidInputError: The trainer returns no layers, layers that do not fit one another or the
            dimensions a and b, or NaN or infinity. `old` has another dimension than `affine`.
        ValueError, TypeError: The trainer returns something else than pairs of arrays of numbers.
        Exception: Any error of the trainer.
    """
    layers: list[tuple[Vectors, Vectors]] = []
    size = affine.dims[0]
    for weight, bias in trainer(old, new, replace(affine, unit_norm=False)(old)):
        if np.ndim(weight) != 2 or np.shape(weight)[1] != size:
            raise InvalidInputError(
                f"--also: expected a layer that reads {size} numbers, got weights of shape "
                f"{list(np.shape(weight))}; correct the function of --also"
            )
        size = len(weight)
        shift = check_vectors(np.asarray(bias, np.float32)[None], size, error_name="a layer's bias")
        checked = check_vectors(
            np.asarray(weight, np.float32), np.shape(weight)[1], error_name="a layer's weight"
        )
        layers.append((checked, shift[0]))
    if size != affine.dims[1] or not layers:
        raise InvalidInputError(
            f"--also: expected a last layer with {affine.dims[1]} outputs, the dimension of the "
            f"new model, got {size if layers else 'no layer'}; correct the function of --also"
        )
    return replace(affine, kind=RESIDUAL_KIND, residual_layers=tuple(layers))
