"""Bring your own: a map that exists as ONNX, as `nobackfill fit --onnx` writes it, is an upgrade.

The file says which models' vectors it was fitted on; a release that knows its own model refuses
another one's map, as the same dimension is not the same space.
"""

from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from nobackfill.digests import SPACE
from nobackfill.errors import ConfigurationError, InvalidInputError, VerificationError
from nobackfill.release.encoders import space_of
from nobackfill.release.manifest import Embedder, Manifest, Upgrade
from nobackfill.release.paths import upgrade_int8_path, upgrade_path
from nobackfill.release.publishing.declaration import digest, weight_files
from nobackfill.training.export.drafting import Recipe, Release
from nobackfill.training.export.onnx_export import quantise, run_onnx, strip
from nobackfill.training.export.probes import source_probes

SUFFIX = ".onnx"
# Of a manifest's recipe: the fingerprint of the text model that its vectors are of.
TEXT_MODEL = "text_model"


def add_onnx_upgrade(release: Release, source: Path) -> None:
    """Put a map into the release: input `embedding` float32 [n, a], output `upgraded` [n, b].

    It leads from the published release whose model it was fitted on; where no release or file says
    which, from the newest such of dimension a, a withdrawn one last. Side-information passes by it
    where the release keeps its predecessor's encoder. Raises InvalidInputError, ConfigurationError.
    """
    assert release.embedder is not None
    model = _loaded(source)
    facts = {one.key: one.value for one in model.metadata_props}
    dims = _dims(model, source)
    space = space_of(release.embedder, release.text_encoder)
    made = _named(space, release.embedder, release.recipe, facts.get("new_model"))
    if made is not None and facts.get("new_model", made) != made:
        raise ConfigurationError(
            f"--upgrade {source}: was fitted on vectors of another new model than the one being "
            "published; fit it again with vectors that this release's model makes"
        )
    old = _source(release, source, facts.get("old_model"), dims[0])
    if dims[1] != release.embedder.dim:
        raise ConfigurationError(
            f"--upgrade {source}: gives vectors of dimension {dims[1]}, release {release.number} "
            f"has {release.embedder.dim}"
        )
    _write(release, model, old, source)
    kept = release.side_encoder is not None and (
        release.side_encoder.origin_release != release.number
    )
    release.upgrades.append(
        Upgrade(
            from_release=old.release,
            from_space=old.space,
            from_dim=old.embedder.dim,
            from_side_space=None,
            from_side_dim=0,
            method=facts.get("kind", "brought"),
            file=release.file(upgrade_path(old.release, release.number)),
            int8_file=release.file(upgrade_int8_path(old.release, release.number)),
            side="carries" if kept else "drops",
            predicts_uncertainty=False,
        )
    )
    name = f"upgrade_{old.release}"
    release.recipe[f"{name}.onnx_sha256"] = digest(weight_files(source))
    for key in ("pairs", "penalty"):
        if key in facts:
            release.recipe[f"{name}.{key}"] = facts[key]


def _loaded(source: Path) -> onnx.ModelProto:
    try:
        return onnx.load(source)
    except (OSError, DecodeError) as error:
        raise InvalidInputError(f"--upgrade {source}: cannot be read as ONNX ({error})") from error


def _dims(model: onnx.ModelProto, source: Path) -> tuple[int, int]:
    """a and b. Raises InvalidInputError for another form."""
    held = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in held]
    ends = [*inputs, *model.graph.output]
    shapes = [[size.dim_value for size in one.type.tensor_type.shape.dim] for one in ends]
    floats = all(one.type.tensor_type.elem_type == TensorProto.FLOAT for one in ends)
    open_rows = all(len(shape) == 2 and not shape[0] and shape[1] for shape in shapes)
    if [one.name for one in ends] != ["embedding", "upgraded"] or not (floats and open_rows):
        raise InvalidInputError(
            f"--upgrade {source}: expected `embedding` float32 [n, a] and `upgraded` float32 "
            f"[n, b] with a free n, got {[one.name for one in ends]} {shapes}; `nobackfill fit "
            "--onnx FILE` writes it"
        )
    return shapes[0][1], shapes[1][1]


def _named(space: str, embedder: Embedder, recipe: Recipe, model: str | None) -> str | None:
    """A release's own name of what made its vectors, as `model` names it: by the space, or by the
    text model's fingerprint, None where that is not known: pictures are of another model."""
    if model is not None and model.startswith(SPACE):
        return space
    made = recipe.get(TEXT_MODEL)
    return made if isinstance(made, str) and embedder.file is None else None


def _source(release: Release, path: Path, model: str | None, dim: int) -> Manifest:
    """The published release whose vectors it takes."""
    found = list(release.published.values())
    if model is not None:
        named = [one for one in found if model in (one.space, one.recipe.get(TEXT_MODEL))]
        found = named or [
            one for one in found if _named(one.space, one.embedder, one.recipe, model) is None
        ]
    fitting = [one for one in found if one.embedder.dim == dim]
    if not fitting:
        raise ConfigurationError(
            f"--upgrade {path}: no published release has the vectors of dimension {dim} that it "
            f"was fitted on{'' if model is None else f', of the model {model[:12]}…'}; the same "
            "dimension is not the same space"
        )
    standing = [one for one in fitting if one.release not in release.withdrawn]
    return (standing or fitting)[-1]


def _write(release: Release, model: onnx.ModelProto, old: Manifest, source: Path) -> None:
    """The graph and its int8 twin, both run once on what the older release embeds."""
    strip(model)
    path = release.local(upgrade_path(old.release, release.number))
    onnx.save(model, path)
    embedding, _ = source_probes(old, release.all_files())
    try:
        (carried,) = run_onnx(path, {"embedding": embedding}, ("upgraded",))
    except VerificationError as error:
        raise InvalidInputError(f"--upgrade {source}: {error}") from error
    if not np.isfinite(carried).all():
        raise InvalidInputError(f"--upgrade {source}: gives numbers that are not finite")
    quantise(path, release.local(upgrade_int8_path(old.release, release.number)))
