"""A small publication for trying everything out, made in seconds and without training.

`write_sample` draws pictures of 24 kinds (six shapes in four colours) and fits two linear models to
others of the same kinds. The model of release 1 sees grey pictures of 8 x 8 pixels. The model of
release 2 sees colours. Its upgrade reads the side-information of release 1 (FCT, section 3.4). The
releases are real: the gate of release 2 is measured, and both are signed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image, ImageDraw

from nobackfill import durable
from nobackfill.digests import side_space_id
from nobackfill.errors import AlreadyExistsError, NotFoundError
from nobackfill.metrics import (
    average_precision,
    cmc,
    mean_of_answerable,
    paired_bootstrap,
    rank,
    relevance_by_label,
)
from nobackfill.release.manifest import (
    Calibration,
    GateVerdict,
    Manifest,
    Probes,
    PublishedEmbedder,
    PublishedFile,
    PublishedSideEncoder,
    RouteEvidence,
    Upgrade,
    embedder_path,
    parse_manifest,
    probes_path,
    release_space_id,
    side_encoder_path,
    upgrade_path,
)
from nobackfill.release.models import open_embedder, open_side_encoder, open_upgrade
from nobackfill.release.paths import manifest_path
from nobackfill.release.publishing.draft import Draft, describe_file
from nobackfill.release.publishing.publish import publish
from nobackfill.vectors import Origin, Vectors

_SIZE = 32
_SHAPES = ("circle", "square", "triangle", "cross", "ring", "bars")
_COLOURS = {
    "red": (200, 50, 40), "green": (40, 160, 70), "blue": (50, 80, 200), "sand": (190, 160, 90),
}  # fmt: skip
KINDS = tuple(f"{colour}-{shape}" for colour in _COLOURS for shape in _SHAPES)
# Pictures of each kind: written for the user, and drawn to fit the models and to measure them.
_SHOWN, _FITTED, _MEASURED = 5, 20, 6
_DIM, _SIDE_DIM = len(KINDS), 48
# Weight of the regression's penalty. Searches are best with it among values from 0.3 to 30.
_RIDGE = 10.0
_OPSET, _IR_VERSION = 18, 10
_PROBED = 4

Pictures = NDArray[np.uint8]


@dataclass(frozen=True)
class SampleReport:
    """Report a published sample.

    Attributes:
        model_repo: the publication folder.
        photos_folder: the folder of pictures.
        picture_count: number of pictures in `photos_folder`.
        release: the release that was published, 1 or 2.
        migrated_and_native_map: for release 2, the mAP (0 to 1) of release 2 on migrated vectors,
            and of release 1 on its own vectors; None for release 1.
    """

    model_repo: Path
    photos_folder: Path
    picture_count: int
    release: int
    migrated_and_native_map: tuple[float, float] | None


def write_sample(folder: Path, release: int) -> SampleReport:
    """Write release 1 and the pictures into a folder, or publish release 2 there.

    It takes seconds and needs no network. After an error, files may be left in the folder.

    Args:
        folder: The folder, created if it is missing. `model_repo`, `model_repo.keys` and `photos`
            are created in it.
        release: 1, or 2 once release 1 is published there.

    Raises:
        AlreadyExistsError: The release is published already; or, for release 1, `model_repo` or
            `photos` exists.
        NotFoundError: `release` is 2, and the folder has no release 1.
        CannotWriteError: The folder cannot be written.
        GateFailedError: Release 2 does not beat release 1; this would be a defect of the sample.
        BusyError: Another program publishes into the folder.
        VerificationError: Release 1 there is damaged, or this program cannot use it (UnfitError).
        ConfigurationError: The keys in `model_repo.keys` are missing or invalid, or others may read
            them.
        OSError: A picture cannot be written, or release 1 cannot be read.
    """
    repo, photos = folder / "model_repo", folder / "photos"
    published = [number for number in (1, 2) if (repo / manifest_path(number)).exists()]
    if release in published:
        raise AlreadyExistsError(
            f"{repo}: has release {release} already; serve it with `gateway serve "
            f"--model-repo {repo}`, or name another folder"
        )
    if release == 1:
        for path in (repo, photos):
            if path.exists():
                raise AlreadyExistsError(
                    f"{path}: exists already; name another folder, as in `gateway sample FOLDER`"
                )
        durable.make_dir(folder)
    elif published != [1]:
        raise NotFoundError(
            f"{repo}: expected release 1 of the sample, found {published or 'no release'}; "
            "run `gateway sample` first"
        )
    old = parse_manifest((repo / manifest_path(1)).read_bytes(), 1) if release == 2 else None
    with TemporaryDirectory() as scratch:
        draft, gain = _draft(Path(scratch), release, old, repo)
        publish(repo, draft)
    if release == 1:
        _write_pictures(photos)
    return SampleReport(repo, photos, len(KINDS) * _SHOWN, release, gain)


def _write_pictures(photo_folder: Path) -> None:
    durable.make_dir(photo_folder)
    pictures, labels = _drawn(_SHOWN, seed=3)
    for number, (pixels, label) in enumerate(zip(pictures, labels.tolist(), strict=True)):
        path = photo_folder / f"{KINDS[label]}-{number % _SHOWN}.png"
        Image.fromarray(pixels).resize((96, 96), Image.Resampling.NEAREST).save(path)


@cache
def _drawn(each: int, seed: int) -> tuple[Pictures, NDArray[np.intp]]:
    """Draw `each` pictures of every kind: uint8 [n,32,32,3], and the numbers of their kinds [n]."""
    rng = np.random.default_rng(seed)
    drawn = [_draw(kind, rng) for kind in KINDS for _ in range(each)]
    return np.stack(drawn), np.repeat(np.arange(len(KINDS)), each)


def _draw(kind: str, rng: np.random.Generator) -> Pictures:
    """Draw one picture uint8 [32,32,3]; place, size, light and noise are random."""
    colour, _, shape = kind.partition("-")
    ground = tuple(int(value) for value in rng.integers(215, 250, 3))
    ink = tuple(int(np.clip(value + rng.integers(-25, 26), 0, 255)) for value in _COLOURS[colour])
    image = Image.new("RGB", (_SIZE, _SIZE), ground)
    pen = ImageDraw.Draw(image)
    half, x, y = rng.integers(8, 12), *rng.integers(14, 19, 2)
    left, top, right, bottom = (int(v) for v in (x - half, y - half, x + half, y + half))
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=ink)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=ink)
    elif shape == "triangle":
        pen.polygon([(left, bottom), (right, bottom), (int(x), top)], fill=ink)
    elif shape == "cross":
        pen.line((left, int(y), right, int(y)), fill=ink, width=6)
        pen.line((int(x), top, int(x), bottom), fill=ink, width=6)
    elif shape == "ring":
        pen.ellipse((left, top, right, bottom), outline=ink, width=4)
    else:
        for row in range(top, bottom + 1, 7):
            pen.rectangle((left, row, right, row + 2), fill=ink)
    noisy = np.asarray(image, np.float32) + rng.normal(0, 9, (_SIZE, _SIZE, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


# The models. Each is one matrix behind the scaled pixels, and the upgrade is one matrix.


def _pooled(*, grey: bool) -> NDArray[np.float32]:
    """Return the matrix [3072, m] that averages blocks of 4 x 4 pixels, and colours if `grey`."""
    cells = np.eye(64, dtype=np.float32).reshape(8, 8, 64)
    space = np.repeat(np.repeat(cells, 4, axis=0), 4, axis=1) / 16
    colours = np.full((3, 1), 1 / 3, np.float32) if grey else np.eye(3, dtype=np.float32)
    whole = np.einsum("xyc,ab->xyacb", space, colours)
    return np.asarray(whole, np.float32).reshape(_SIZE * _SIZE * 3, -1)


@cache
def _weights(*, grey: bool, side: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Fit the matrix [3072, d] and the bias [d] of a model to the pictures.

    Side-information is what the first principal components see. An embedding is ridge regression
    to the kinds.
    """
    pictures, labels = _drawn(_FITTED, seed=1)
    pooled = _pooled(grey=grey)
    seen = pictures.reshape(len(pictures), -1).astype(np.float32) / 255 @ pooled
    middle = seen.mean(axis=0)
    centred = (seen - middle).astype(np.float64)
    if side:
        inner = np.linalg.svd(centred, full_matrices=False)[2][:_SIDE_DIM].T
    else:
        kinds = np.eye(_DIM)[labels] - 1 / _DIM
        inner = np.linalg.solve(
            centred.T @ centred + _RIDGE * np.eye(centred.shape[1]), centred.T @ kinds
        )
    return (pooled @ inner).astype(np.float32), (-middle @ inner).astype(np.float32)


def _encoder(output: str, *, grey: bool) -> onnx.ModelProto:
    """Build image uint8 [n,32,32,3] -> `output` float32 [n, d], of length 1 if "embedding"."""
    unit = output == "embedding"
    weights, bias = _weights(grey=grey, side=not unit)
    last = "shifted" if unit else output
    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["pixels", "scale"], ["scaled"]),
        helper.make_node("Flatten", ["scaled"], ["flat"], axis=1),
        helper.make_node("MatMul", ["flat", "weights"], ["product"]),
        helper.make_node("Add", ["product", "bias"], [last]),
    ]
    if unit:
        nodes.append(helper.make_node("LpNormalization", [last], [output], axis=1, p=2))
    constants: dict[str, ArrayLike] = {
        "scale": np.float32(1 / 255), "weights": weights, "bias": bias,
    }  # fmt: skip
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", _SIZE, _SIZE, 3])
    return _model(nodes, [image], [_vector(output, len(bias))], constants)


def _upgrade(old: Vectors, side: Vectors, new: Vectors) -> onnx.ModelProto:
    """Fit the linear map from (embedding, side-information) [n, d] to the new embedding [n, e]."""
    inputs = np.hstack([old, side, np.ones((len(old), 1), np.float32)]).astype(np.float64)
    gram = inputs.T @ inputs + 1e-3 * np.eye(inputs.shape[1])
    fitted = np.linalg.solve(gram, inputs.T @ new.astype(np.float64)).astype(np.float32)
    nodes = [
        helper.make_node("Concat", ["embedding", "side"], ["both"], axis=1),
        helper.make_node("MatMul", ["both", "weights"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["shifted"]),
        helper.make_node("LpNormalization", ["shifted"], ["upgraded"], axis=1, p=2),
    ]
    constants = {"weights": fitted[:-1], "bias": fitted[-1]}
    inputs_of = [_vector("embedding", old.shape[1]), _vector("side", side.shape[1])]
    return _model(nodes, inputs_of, [_vector("upgraded", new.shape[1])], constants)


def _vector(name: str, dim: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", dim])


def _model(
    nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto], constants: Mapping[str, ArrayLike],
) -> onnx.ModelProto:  # fmt: skip
    tensors = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "sample", inputs, outputs, tensors)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
    )


# The release: its files, what was measured of them, and its manifest.


def _draft(
    folder: Path, release: int, old: Manifest | None, repo: Path
) -> tuple[Draft, tuple[float, float] | None]:
    """Build a release from files in `folder`; `old`: release 1, published in `repo`."""
    files: dict[str, Path] = {}

    def add(path: str, proto: onnx.ModelProto) -> PublishedFile:
        files[path] = folder / path
        durable.make_dir(files[path].parent)
        durable.write_file(files[path], proto.SerializeToString(deterministic=True))
        return describe_file(path, files[path])

    embedder = PublishedEmbedder(
        file=add(embedder_path(release), _encoder("embedding", grey=release == 1)),
        height=_SIZE, width=_SIZE, dim=_DIM, metric="squared_l2", unit=True,
    )  # fmt: skip
    if old is None:
        path = side_encoder_path(release)
        proto = _encoder("side", grey=False)
        side = PublishedSideEncoder(file=add(path, proto), dim=_SIDE_DIM, origin_release=release)
    else:
        assert old.side_encoder is not None, "release 1 of the sample has one"
        side = old.side_encoder
    space = release_space_id(embedder)
    values: dict[str, Any] = {
        "release": release, "space": space, "embedder": embedder,
        "side_space": side_space_id(side.file.sha256), "side_encoder": side,
        "gate": GateVerdict(verdict="first"), "method": "sample", "recipe": {"kinds": len(KINDS)},
        "probes": Probes(
            file=PublishedFile(path=probes_path(release), sha256="0" * 64, length=1),
            tolerance=1e-4, int8_tolerance=0.1,
        ),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    pixels, labels = _drawn(_MEASURED, seed=2)
    new = open_embedder(files, Manifest(**values)).run(pixels)
    probes: dict[str, NDArray[Any]] = {"image": pixels[:_PROBED], "embedding": new[:_PROBED]}
    held = repo if old is not None else files
    probes["side"] = open_side_encoder(held, Manifest(**values)).run(pixels[:_PROBED])
    calibrations, gain = [_calibration(space, space, "native", new, new, labels)], None
    if old is not None:
        gain = _add_upgrade(values, files, add, old, repo, new, probes, calibrations)
    values["calibration"] = tuple(calibrations)
    path = probes_path(release)
    with (folder / path).open("wb") as file:
        np.savez(file, allow_pickle=False, **probes)
    files[path] = folder / path
    values["probes"] = values["probes"].model_copy(
        update={"file": describe_file(path, files[path])}
    )
    return Draft(Manifest(**values), files), gain


def _add_upgrade(
    values: dict[str, Any], files: dict[str, Path], add: Any, old: Manifest, repo: Path,
    new: Vectors, probes: dict[str, NDArray[Any]], calibrations: list[Calibration],
) -> tuple[float, float]:  # fmt: skip
    """Add the upgrade from release 1, its evidence and its gate; both mean average precisions."""
    embed_old, see_side = open_embedder(repo, old), open_side_encoder(repo, old)
    fitted, _ = _drawn(_FITTED, seed=1)
    target = open_embedder(files, Manifest(**values)).run(fitted)
    proto = _upgrade(embed_old.run(fitted), see_side.run(fitted), target)
    file = add(upgrade_path(1, 2), proto)
    upgrade = Upgrade(
        from_release=1, from_space=old.space, from_dim=old.embedder.dim,
        from_side_space=old.side_space, from_side_dim=_SIDE_DIM, method="sample", file=file,
        int8_file=None, side="carries", predicts_uncertainty=False,
    )  # fmt: skip
    values["upgrades"] = (upgrade,)
    pixels, labels = _drawn(_MEASURED, seed=2)
    vectors, side = embed_old.run(pixels), see_side.run(pixels)
    carried = open_upgrade(files, Manifest(**values), upgrade).run(vectors, side).embedding
    probes["upgrade_1/embedding"], probes["upgrade_1/side"] = vectors[:_PROBED], side[:_PROBED]
    probes["upgrade_1/upgraded"] = carried[:_PROBED]
    stays = _figures(vectors, vectors, labels)
    serves = _figures(new, carried, labels)
    bounds = [
        paired_bootstrap([a], [b], classes=[labels]).low for a, b in zip(serves, stays, strict=True)
    ]
    passed = all(bound > 0 for bound in bounds)
    values["gate"] = GateVerdict(
        verdict="passed" if passed else "failed", map_gain_low=bounds[0], cmc1_gain_low=bounds[1]
    )
    whole = mean_of_answerable(_figures(new, new, labels)[0])
    values["routes"] = (
        RouteEvidence(
            releases=(1, 2), map=mean_of_answerable(serves[0]), cmc1=mean_of_answerable(serves[1]),
            kept=mean_of_answerable(serves[0]) / whole,
        ),
    )  # fmt: skip
    space = values["space"]
    calibrations.append(_calibration(space, space, "upgraded", new, carried, labels))
    calibrations.append(_calibration(old.space, old.space, "old-model", vectors, vectors, labels))
    return mean_of_answerable(serves[0]), mean_of_answerable(stays[0])


def _figures(
    queries: Vectors, gallery: Vectors, labels: NDArray[np.intp]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return average precision and CMC@1 of each picture [n] that searches all the others."""
    names = np.arange(len(labels))
    ranking = rank(queries, gallery, relevance_by_label(labels, labels, names, names))
    return average_precision(ranking), cmc(ranking, 1)


def _calibration(
    query_space: str, gallery_space: str, origin: Origin, queries: Vectors, gallery: Vectors,
    labels: NDArray[np.intp],
) -> Calibration:  # fmt: skip
    """Estimate the probability of a match by distance: shares of matches in eight bins."""
    apart = ~np.eye(len(labels), dtype=bool)
    distances = (2 - 2 * queries @ gallery.T)[apart].astype(np.float64)
    matches = (labels[:, None] == labels[None, :])[apart]
    order = np.argsort(distances)
    nearest = order[: 4 * int(matches.sum())]
    bins = np.array_split(nearest, 8)
    centres = np.maximum.accumulate([float(distances[rows].mean()) for rows in bins])
    shares = np.minimum.accumulate([float(matches[rows].mean()) for rows in bins])
    steps = 1e-6 * np.arange(len(bins))
    return Calibration(
        query_space=query_space, gallery_space=gallery_space, origin=origin,
        distances=tuple((centres + steps).tolist()),
        probabilities=tuple(np.clip(shares * 0.999 + 8e-6 - steps, 0, 1).tolist()),
        items=len(labels),
    )  # fmt: skip
