"""Add embedders and upgrades that exist as ONNX, and public models, to a release.

Weights stay unchanged. If an embedder takes float32 pixels, the conversion from uint8 is put in
front of it, inside the graph: scaling to 0..1, mean and standard deviation per channel, channels
first.

A map as ONNX, as `nobackfill fit --onnx` writes it, is an upgrade. The file names the models whose
vectors it was fitted on. A release that knows its own model refuses a map of another model, because
the same dimension is not the same space.

A public model is timm's, open_clip's or torchvision's (`torchvision:NAME/WEIGHTS`, with the weight
names of `train.py --weights`), without its classifier and without training.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, compose, helper, numpy_helper
from torch import nn

from nobackfill.digests import SPACE_PREFIX
from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    VerificationError,
    join_few,
)
from nobackfill.framing import Fit, Interpolation
from nobackfill.release.manifest import (
    Manifest,
    PublishedEmbedder,
    QueryAdapter,
    adapter_path,
    embedder_path,
    release_space_id,
    upgrade_path,
)
from nobackfill.release.publishing.declaration import hash_model_files, list_weight_files
from nobackfill.release.publishing.preprocessing import Preprocessing
from nobackfill.training.export.drafting import Recipe, ReleaseDraft, probe_images
from nobackfill.training.export.onnx_export import run_onnx, strip_model
from nobackfill.training.export.probes import source_probes
from nobackfill.training.networks.backbones import AUXILIARY, linear_layers, replace_layer
from nobackfill.training.networks.embedder import ImageEncoder
from nobackfill.training.networks.public_models import (
    PublicModel,
    is_public,
    open_public,
    unknown_model_error,
)
from nobackfill.training.networks.weights import (
    name_without_path,
    read_weights,
    torchvision_weights,
)

Channels = tuple[float, float, float]

# Names around a foreign model; a foreign graph that uses one of them gets a prefix.
_OURS = {
    "image", "image_float", "image_scale", "image_scaled", "image_shift", "image_shifted",
    "embedding",
}  # fmt: skip
_THEIRS = "model/"


@dataclass(frozen=True)
class Pixels:
    """Preprocessing of an embedder.

    Attributes:
        mean, std: for float32 input, (value / 255 - mean) / std of red, green and blue.
        fit, shortest, interpolation: how pictures are framed, as in nobackfill.framing.Frame.
    """

    mean: Channels = (0.0, 0.0, 0.0)
    std: Channels = (1.0, 1.0, 1.0)
    fit: Fit = "stretch"
    shortest: int | None = None
    interpolation: Interpolation = "bilinear"


def add_onnx_embedder(release: ReleaseDraft, source: Path, pixels: Pixels) -> None:
    """Add an embedder that exists as an ONNX file to the release.

    It has one input, uint8 [n,H,W,3], float32 [n,3,H,W] or float32 [n,H,W,3] with a free n, and one
    output float32 [n,dim]. It is run once to find out whether its vectors have norm 1; then the
    metric is cosine, else squared L2. Publishing checks which operators the graph uses. The recipe
    gets the digest of the file and of its weights. An embedder that was added before is replaced.

    Args:
        release: the release, whose embedder and method "brought" are set.
        source: the ONNX file, with its external weights next to it.
        pixels: the preprocessing; mean and std apply only to float32 input.

    Raises:
        InvalidInputError: the file or its external weights cannot be read or run, or it has another
            form; a graph that cannot be run stays in the release's folder.
        ValidationError: the images have more than 2,048 pixels on a side, or the vectors more than
            65,536 dimensions; it is pydantic's.
        OSError: the graph cannot be written to the release's folder.
    """
    model = _load(source, f"--onnx {source}", "export the model again")
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if len(inputs) != 1 or len(model.graph.output) != 1:
        raise InvalidInputError(
            f"--onnx {source}: expected a model with one input and one output, got {len(inputs)} "
            f"inputs and {len(model.graph.output)} outputs; export it again with only the "
            "embedding as output"
        )
    if _OURS & _names(model.graph):
        compose.add_prefix_graph(model.graph, _THEIRS, inplace=True)
    size = _connect_input(model, inputs[0], pixels, source)
    _rename_output(model)
    strip_model(model)
    path = release.add_file(embedder_path(release.number))
    onnx.save(model, path)
    embedding = _run(path, size, source)
    unit = bool((np.abs(np.linalg.norm(embedding, axis=1) - 1) < 1e-3).all())
    release.embedder = PublishedEmbedder(
        file=release.published_file(embedder_path(release.number)),
        height=size[0],
        width=size[1],
        dim=embedding.shape[1],
        metric="cosine" if unit else "squared_l2",
        unit=unit,
        fit=pixels.fit,
        shortest=pixels.shortest,
        interpolation=pixels.interpolation,
    )
    release.method = "brought"
    release.recipe["onnx_sha256"] = hash_model_files(list_weight_files(source))


def _load(source: Path, option: str, remedy: str) -> onnx.ModelProto:
    try:
        return onnx.load(source)
    except (OSError, DecodeError, onnx.checker.ValidationError) as error:
        raise InvalidInputError(
            f"{option}: cannot be read as an ONNX file ({error}); {remedy}"
        ) from error


def _names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of all values of a graph."""
    names = {value.name for value in (*graph.input, *graph.output)}
    names |= {tensor.name for tensor in graph.initializer}
    return names.union(*(node.output for node in graph.node))


def _connect_input(
    model: onnx.ModelProto, value: onnx.ValueInfoProto, pixels: Pixels, source: Path
) -> tuple[int, int]:
    """Make `image` uint8 [n,H,W,3] the only input; return its height and width."""
    kind = value.type.tensor_type.elem_type
    shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
    first = kind == TensorProto.FLOAT and len(shape) == 4 and shape[1] == 3
    if kind not in (TensorProto.UINT8, TensorProto.FLOAT) or len(shape) != 4 or shape[0] != 0:
        raise InvalidInputError(
            f"--onnx {source}: expected an input uint8 [n,H,W,3] or float32 [n,3,H,W] with a free "
            f"n, got {TensorProto.DataType.Name(kind).lower()} {shape}; export it with a dynamic "
            "batch"
        )
    height, width = (shape[2], shape[3]) if first else (shape[1], shape[2])
    if not (first or shape[3] == 3) or not height or not width:
        raise InvalidInputError(
            f"--onnx {source}: expected an input with 3 colour channels and a fixed height and "
            f"width, got {shape} (0 is a free size); export it again for one image size"
        )
    target = value.name
    model.graph.input.remove(value)
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", height, width, 3])
    model.graph.input.insert(0, image)
    if kind == TensorProto.UINT8:
        steps = [helper.make_node("Identity", ["image"], [target])]
    else:
        scale = 1 / (255 * np.array(pixels.std, np.float32))
        shift = -np.array(pixels.mean, np.float32) / np.array(pixels.std, np.float32)
        model.graph.initializer.extend(
            [
                numpy_helper.from_array(scale.astype(np.float32), "image_scale"),
                numpy_helper.from_array(shift.astype(np.float32), "image_shift"),
            ]
        )
        steps = [
            helper.make_node("Cast", ["image"], ["image_float"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["image_float", "image_scale"], ["image_scaled"]),
            helper.make_node("Add", ["image_scaled", "image_shift"], ["image_shifted"]),
            helper.make_node("Transpose", ["image_shifted"], [target], perm=[0, 3, 1, 2])
            if first
            else helper.make_node("Identity", ["image_shifted"], [target]),
        ]
    for step in reversed(steps):
        model.graph.node.insert(0, step)
    return height, width


def _rename_output(model: onnx.ModelProto) -> None:
    output = model.graph.output[0]
    model.graph.node.append(helper.make_node("Identity", [output.name], ["embedding"]))
    output.name = "embedding"


def _run(path: Path, size: tuple[int, int], source: Path) -> np.ndarray:
    try:
        embedding = run_onnx(path, {"image": probe_images(*size)}, ("embedding",))[0]
    except VerificationError as error:
        raise InvalidInputError(f"--onnx {source}: {error}") from error
    if embedding.dtype != np.float32 or embedding.ndim != 2:
        raise InvalidInputError(
            f"--onnx {source}: expected a model whose output is float32 [n, dim], got "
            f"{embedding.dtype} {list(embedding.shape)}; export it again with one vector per image"
        )
    return embedding


TORCHVISION = "torchvision:"


def open_torchvision(name: str) -> PublicModel:
    """Open a torchvision model with verified weights; its embedding is the classifier's input.

    Weights that are not in torch's cache are downloaded, without a limit of time. The model is on
    the CPU and in eval mode. Its vectors are not normalised. Building the network draws from
    torch's default generator. The name is compared exactly, with capitals.

    Args:
        name: torchvision:NAME/WEIGHTS, such as torchvision:resnet18/IMAGENET1K_V1.

    Raises:
        ConfigurationError: the model or its weights are unknown (similar or possible ones are
            listed); it has no linear last layer; or it is googlenet or inception_v3, or its weights
            have other names.
        VerificationError: the file has another digest, or is damaged.
        UnavailableError: the download failed.
        CannotWriteError: the cache cannot be written.
        OSError: the file in the cache cannot be opened.
    """
    import torchvision

    architecture, _, tag = name.removeprefix(TORCHVISION).partition("/")
    known = torchvision.models.list_models(module=torchvision.models)
    if architecture not in known:
        raise unknown_model_error(name, "torchvision", architecture, known)
    pixels = _pixels(torchvision_weights(tag, architecture).transforms())
    plain = architecture not in AUXILIARY
    network = torchvision.models.get_model(architecture, weights=None) if plain else nn.Module()
    linear = linear_layers(network)
    if not linear:
        raise ConfigurationError(
            f"{name}: expected a model whose last layer is linear and reads an embedding, but it "
            "has none; publish a model of timm, --weights timm:NAME.TAG"
        )
    try:
        network.load_state_dict(dict(read_weights(tag, architecture).tensors))
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{name}: the weights of this torchvision model do not fit its layers ({first_line}); "
            "publish a model of timm instead, with --weights timm:NAME.TAG"
        ) from error
    path, last = linear[-1]
    replace_layer(network, path, nn.Identity())
    return PublicModel(name, network.eval(), last.in_features, pixels)


def _pixels(transforms: object) -> Preprocessing:
    """Convert torchvision's preset: resize the shortest side, then crop the centre."""
    from torchvision.transforms._presets import ImageClassification

    assert isinstance(transforms, ImageClassification)
    (side,), (shortest,) = transforms.crop_size, transforms.resize_size
    return Preprocessing(
        size=(side, side), fit="crop", shortest=shortest,
        interpolation=transforms.interpolation.value,
        mean=tuple(transforms.mean), std=tuple(transforms.std),
    )  # fmt: skip


def can_be_public(name: str) -> bool:
    """Return whether a name begins with timm:, open_clip: or torchvision:; the model need not
    exist."""
    return is_public(name) or name.startswith(TORCHVISION)


def add_public_embedder(release: ReleaseDraft, name: str) -> None:
    """Add a public image model to the release, with its published weights and preprocessing.

    Its vectors are normalised to length 1. Weights that are not cached are downloaded, without a
    limit of time. The recipe gets the name, without paths of this machine. An embedder that was
    added before is replaced. Building the network draws from torch's default generator.

    Args:
        release: the release, whose embedder and method "brought" are set.
        name: timm:NAME.TAG, open_clip:NAME/TAG or torchvision:NAME/WEIGHTS.

    Raises:
        ConfigurationError: the name is unknown, its package is not installed, the model cannot be
            built or has an unsupported preprocessing, or its input is not square.
        VerificationError: the weights have another digest, or the exported file computes other
            vectors; the file stays then.
        NotFoundError: the folder of a local-dir model does not exist.
        UnavailableError: the weights cannot be downloaded.
        CannotWriteError: the cache of torchvision's weights cannot be written.
        OSError: the ONNX file cannot be written.
        RuntimeError: torch cannot export the network.
    """
    model = open_public(name) if is_public(name) else open_torchvision(name)
    (height, width), pixels = model.pixels.size, model.pixels
    if height != width:
        raise ConfigurationError(
            f"--weights {name}: expected a model of square images, but this one reads {width} x "
            f"{height} pixels; export it to ONNX and publish it with --onnx FILE"
        )
    encoder = ImageEncoder(model.network, model.dim, height, True, pixels.mean, pixels.std)
    release.add_embedder(encoder.eval())
    assert release.embedder is not None
    framed = {"fit": pixels.fit, "shortest": pixels.shortest, "interpolation": pixels.interpolation}
    release.embedder = release.embedder.model_copy(update=framed)
    release.method = "brought"
    release.recipe["weights"] = name_without_path(name) if is_public(name) else name


SUFFIX = ".onnx"
# Key of a manifest's recipe: the fingerprint of the text model that made its vectors.
TEXT_MODEL = "text_model"


def add_onnx_upgrade(release: ReleaseDraft, source: Path) -> None:
    """Add a map to the release: input `embedding` float32 [n, a], output `upgraded` [n, b].

    It leads from the published release whose model it was fitted on. If neither the file nor a
    release names the model, it leads from the newest release of dimension a, withdrawn ones last.
    Side-information stays valid if the release keeps its predecessor's encoder. An int8 file of the
    map is added, too. If several releases fit, the newest counts. The manifest's recipe gets the
    digest of the file and, if the file names them, the number of pairs and the penalty. A second
    map from the same release replaces the files of the first, but adds a second entry. Without an
    embedder it raises AssertionError.

    Args:
        release: the release, to which its embedder was added.
        source: the ONNX file, as `nobackfill fit --onnx FILE` writes it.

    Raises:
        InvalidInputError: the file or its external weights cannot be read or run, it has another
            form, or returns numbers that are not finite.
        ConfigurationError: it was fitted on vectors of another new model, no published release has
            its old model and dimension, or it returns another dimension than the release's; or the
            older release embeds texts, and the extra `text` is not installed.
        VerificationError: a file of the older release is damaged, or its model returns unusable
            vectors.
        OSError: a file cannot be written. Files that were written before an error stay.
    """
    assert release.embedder is not None
    option = f"--upgrade {source}"
    command = "`nobackfill fit --onnx FILE`"
    model, facts, dims = _open_map(release, source, option, "map", "upgraded", command)
    old = _source(release, f"{option}: the map", facts.get("old_model"), dims[0])
    if dims[1] != release.embedder.dim:
        raise ConfigurationError(
            f"{option}: the map returns vectors of dimension {dims[1]}, but release "
            f"{release.number} has dimension {release.embedder.dim}; fit it again on vectors of "
            "this release's model"
        )
    _write(release, model, old, source)
    release.list_upgrade(
        old,
        method=facts.get("kind", "brought"),
        side="carries" if release.stored_side_stays_valid else "drops",
    )
    _record_origin(release, f"upgrade_{old.release}", source, facts)


def add_adapter(release: ReleaseDraft, source: Path) -> None:
    """Add a query adapter to the release: input `embedding` float32 [n, a], output `adapted`
    [n, b].

    It leads to the published release whose model it was fitted on. If neither the file nor a
    release names the model, it leads to the newest release of dimension b, withdrawn ones last. The
    manifest's recipe gets the digest of the file and, if the file names them, the number of pairs
    and the penalty. Without an embedder it raises AssertionError.

    Args:
        release: the release, to which its embedder was added.
        source: the ONNX file, as `nobackfill fit --adapter FILE.onnx` writes it.

    Raises:
        InvalidInputError: the file or its external weights cannot be read, or it has another form.
        ConfigurationError: it was fitted on vectors of another new model or dimension, or no
            published release has its old model and dimension; or the release has an adapter to that
            release already, or searches its vectors without one.
        OSError: the file cannot be written.
    """
    assert release.embedder is not None
    option = f"--adapter {source}"
    command = "`nobackfill fit --adapter FILE.onnx`"
    model, facts, dims = _open_map(release, source, option, "query adapter", "adapted", command)
    if dims[0] != release.embedder.dim:
        raise ConfigurationError(
            f"{option}: the adapter reads queries of dimension {dims[0]}, but release "
            f"{release.number} has dimension {release.embedder.dim}; fit it again on vectors of "
            "this release's model"
        )
    old = _source(release, f"{option}: the adapter", facts.get("old_model"), dims[1])
    others = {*release.searches_directly, *(one.to_release for one in release.adapters)}
    if old.release in others:
        raise ConfigurationError(
            f"{option}: the adapter leads to release {old.release}, whose vectors this release "
            "searches already, directly or by another adapter; leave the adapter out"
        )
    strip_model(model)
    path = adapter_path(release.number, old.release)
    onnx.save(model, release.add_file(path))
    release.adapters.append(
        QueryAdapter(
            to_release=old.release,
            to_space=old.space,
            to_dim=old.embedder.dim,
            to_unit=old.embedder.unit,
            method=facts.get("kind", "brought"),
            file=release.published_file(path),
        )
    )
    _record_origin(release, f"adapter_{old.release}", source, facts)


def _record_origin(release: ReleaseDraft, name: str, source: Path, facts: dict[str, str]) -> None:
    """Note the digest of a file in the recipe, and what the file says about its fit."""
    release.recipe[f"{name}.onnx_sha256"] = hash_model_files(list_weight_files(source))
    release.recipe |= {f"{name}.{key}": facts[key] for key in ("pairs", "penalty") if key in facts}


def _open_map(
    release: ReleaseDraft, source: Path, option: str, kind: str, output: str, command: str
) -> tuple[onnx.ModelProto, dict[str, str], tuple[int, int]]:
    """Read a map, its facts and its dimensions; refuse one of another new model than the release's.

    A map that names no model fits every release.
    """
    assert release.embedder is not None
    loaded = _load(source, option, f"{command} writes one")
    facts = {one.key: one.value for one in loaded.metadata_props}
    dims = _dims(loaded, output, f"{option}: expected a {kind}", command)
    model = facts.get("new_model")
    space = release_space_id(release.embedder, release.text_encoder)
    own = _model_name(space, release.embedder, release.recipe, model)
    if model is not None and own is not None and model != own:
        raise ConfigurationError(
            f"{option}: the {kind} was fitted on vectors of another new model than the one being "
            "published; fit it again on vectors of this release's model"
        )
    return loaded, facts, dims


def _dims(model: onnx.ModelProto, output: str, label: str, command: str) -> tuple[int, int]:
    """Return a and b. Raises InvalidInputError for another form."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    ends = [*inputs, *model.graph.output]
    shapes = [[size.dim_value for size in one.type.tensor_type.shape.dim] for one in ends]
    floats = all(one.type.tensor_type.elem_type == TensorProto.FLOAT for one in ends)
    open_rows = all(len(shape) == 2 and not shape[0] and shape[1] for shape in shapes)
    if [one.name for one in ends] != ["embedding", output] or not (floats and open_rows):
        found = join_few(f"{end.name} {size}" for end, size in zip(ends, shapes, strict=True))
        raise InvalidInputError(
            f"{label} with input `embedding` float32 [n, a] and output `{output}` float32 "
            f"[n, b], n free, got {found} (0 is a free size); {command} writes one"
        )
    return shapes[0][1], shapes[1][1]


def _model_name(
    space: str, embedder: PublishedEmbedder, recipe: Recipe, model: str | None
) -> str | None:
    """Return a release's own name of the model of its vectors, in the form of `model`.

    This is the space, or the text model's fingerprint; None if that is unknown, as for images."""
    if model is not None and model.startswith(SPACE_PREFIX):
        return space
    made = recipe.get(TEXT_MODEL)
    return made if isinstance(made, str) and embedder.file is None else None


def _source(release: ReleaseDraft, map_name: str, model: str | None, dim: int) -> Manifest:
    """Return the published release whose vectors were the old ones of a map or an adapter."""
    found = list(release.older_manifests.values())
    if model is not None:
        named = [one for one in found if model in (one.space, one.recipe.get(TEXT_MODEL))]
        found = named or [
            one for one in found if _model_name(one.space, one.embedder, one.recipe, model) is None
        ]
    fitting = [one for one in found if one.embedder.dim == dim]
    if not fitting:
        raise ConfigurationError(
            f"{map_name} was fitted on old vectors of dimension {dim}"
            f"{'' if model is None else f' of the model {model[:12]}…'}, but no published release "
            "has such vectors; publish the old model first, or fit the map on vectors of a release"
        )
    standing = [one for one in fitting if one.release not in release.withdrawn_releases]
    return (standing or fitting)[-1]


def _write(release: ReleaseDraft, model: onnx.ModelProto, old: Manifest, source: Path) -> None:
    """Write the graph, and run it once on embeddings of the older release."""
    strip_model(model)
    path = release.add_file(upgrade_path(old.release, release.number))
    onnx.save(model, path)
    embedding, _ = source_probes(old, release.all_files())
    try:
        (upgraded,) = run_onnx(path, {"embedding": embedding}, ("upgraded",))
    except VerificationError as error:
        raise InvalidInputError(f"--upgrade {source}: {error}") from error
    if not np.isfinite(upgraded).all():
        raise InvalidInputError(
            f"--upgrade {source}: the map returns NaN or infinity for vectors of release "
            f"{old.release}; fit it again"
        )
