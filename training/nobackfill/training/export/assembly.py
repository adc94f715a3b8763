"""Assemble a release: training runs, a text model, a map, or only the name of a model.

A run records the digests of the models that it was trained with, and a manifest's recipe the digest
of its checkpoint. An upgrade thereby finds its source release, and wrong pairs are refused.
Evaluation images are compared by content: `leave_out_training_images` leaves out those that a run
was trained on.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobackfill.class_folders import ImageListing, hash_file, hash_files, list_images
from nobackfill.digests import sha256_file
from nobackfill.errors import ConfigurationError, InvalidInputError, join_few
from nobackfill.release.manifest import Manifest
from nobackfill.release.trust.trust import find_published_manifest
from nobackfill.training.config import EmbedderConfig, UpgradeConfig
from nobackfill.training.data.folders import hold_out
from nobackfill.training.export.drafting import Recipe, ReleaseDraft
from nobackfill.training.export.external import SUFFIX, add_onnx_upgrade, can_be_public
from nobackfill.training.export.probes import source_probes
from nobackfill.training.export.text_encoder import add_text_encoder
from nobackfill.training.loop.run import CHECKPOINT, Checkpoint, load_part, read_finished
from nobackfill.training.loop.upgrade import read_upgrade
from nobackfill.training.method import UpgradeShape
from nobackfill.training.methods import embedder_method
from nobackfill.training.networks.frozen import load_encoder
from nobackfill.training.networks.weights import name_without_path

# Up to this share of evaluation images are accidental copies and left out; more are a wrong folder.
_CHANCE = 0.01


def leave_out_training_images(
    listing: ImageListing, runs: Sequence[Path], *, force: bool
) -> tuple[ImageListing, int]:
    """Leave out evaluation images that a run was trained on, which are recognised by content.

    A line on stderr says how many images were left out, or are measured nevertheless. Another one
    names runs whose training images no longer exist; these are not compared. Every evaluation image
    is read once, and those training images that have the length of one.

    Args:
        listing: the evaluation images.
        runs: folders of finished runs; none: no image is left out.
        force: measure on trained images, too, if they are more than 1 %.

    Returns:
        The images to measure on, and how many of them were trained on: 0 unless `force` applies.

    Raises:
        InvalidInputError: more than 1 % of the images were trained on, without `force`; or an image
            cannot be read.
        ConfigurationError: a run is missing or unfinished, or its configuration has unknown keys.
        VerificationError: a run's checkpoint is damaged or was not written by train.py.
        OSError: an image disappears during the call; a run's checkpoint cannot be opened; or the
            folder of its training images may not be read (PermissionError).
    """
    rows, example = _trained_on(listing, runs)
    if not len(rows):
        return listing, 0
    found = f"a run was trained on {len(rows)} of the {len(listing)} images of {listing.root}"
    if len(rows) <= _CHANCE * len(listing):
        print(
            f"{found} (the same content: {join_few(example)}); the release is measured without "
            "them",
            file=sys.stderr,
        )
        return listing.select(np.setdiff1d(np.arange(len(listing)), rows)), 0
    if force:
        print(f"{found}, so the gate measures memorised images", file=sys.stderr)
        return listing, len(rows)
    raise InvalidInputError(
        f"{found} (the same content: {join_few(example)}), so figures on them predict nothing. "
        "Give --eval a folder of images that no run was trained on, or publish with --force"
    )


def _trained_on(listing: ImageListing, runs: Sequence[Path]) -> tuple[NDArray[np.int64], list[str]]:
    """Return the rows of `listing` whose content a run was trained on, and their paths."""
    sizes = {(listing.root / path).stat().st_size for path in listing.paths}
    trained: dict[Path, str] = {}
    for run in runs:
        for path in _training_files(run):
            # Only files of equal length can have equal content.
            if path not in trained and path.stat().st_size in sizes:
                trained[path] = hash_file(path)
    known = set(trained.values())
    shared = [row for row, own in enumerate(hash_files(listing)) if own in known]
    return np.array(shared, np.int64), [listing.paths[row] for row in shared]


def _training_files(run: Path) -> list[Path]:
    config = read_finished(run).config
    try:
        listing = list_images(config.images, config.classes, config.class_list)
    except (ConfigurationError, InvalidInputError) as error:
        print(
            f"the training images of {run} cannot be compared with those of --eval: {error}",
            file=sys.stderr,
        )
        return []
    rows, _ = hold_out(listing, config.held_out, config.split_seed)
    return [listing.root / listing.paths[row] for row in rows]


# Keys of a configuration that may contain paths of this machine are not published.
_WEIGHTS = {"weights", "backbone"}
_PRIVATE = {
    "run_dir", "images", "class_list", "pixel_cache", "old", "new", "old_side", "new_side", "init",
    "embedder",
}  # fmt: skip


def add_embedder_run(release: ReleaseDraft, run_dir: Path) -> None:
    """Add a run's embedder to the release, with the older releases that it can search directly.

    Warns on stderr if a compatible embedder has another dimension than the old one. Its first
    elements match old vectors (BCT section 3.6), but a published space has one dimension. A method
    that searches directly needs its old model among the published releases, but only if the run has
    one; if it is not published, embedder, method and recipe are set before the error. Keys of the
    configuration that may contain paths of this machine are left out of the recipe. Loading the run
    draws from torch's default generator.

    Args:
        release: the release, which gets the ONNX file, the method and the run's configuration.
        run_dir: the folder of a finished run of kind embedder.

    Raises:
        ConfigurationError: the run is missing, unfinished, or of a kind other than embedder; or its
            configuration or tensors do not fit this version; or its old model is not published.
        VerificationError: its checkpoint is damaged or was not written by train.py, or the exported
            file computes other vectors.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
        OSError: the checkpoint cannot be opened, or the ONNX file cannot be written.
        RuntimeError: torch cannot export the network.
    """
    encoder, checkpoint = load_encoder(run_dir)
    config = checkpoint.config
    if not isinstance(config, EmbedderConfig):
        raise ConfigurationError(
            f"--embedder {run_dir}: expected the run folder of a training of kind embedder, got "
            f"one of kind {config.kind}; name another run folder"
        )
    method = embedder_method(config.method)
    release.add_embedder(encoder)
    release.method = config.method
    release.recipe |= {
        "embedder_checkpoint": sha256_file(run_dir / CHECKPOINT),
        **_flat("embedder", config.model_dump(mode="json")),
    }
    # d-Simplex trains without an old model, too; it then names no release to search.
    if method.searches_directly and config.old is not None:
        source = _trained_against(release, run_dir, checkpoint)
        if source.embedder.dim == encoder.dim:
            release.searches_directly.append(source.release)
        else:
            _tell_not_searched(release, source, encoder.dim)


def _tell_not_searched(release: ReleaseDraft, source: Manifest, dim: int) -> None:
    print(
        f"queries of release {release.number} cannot search vectors of release {source.release} "
        f"directly, although method {release.method} trained them for that: they have {dim} "
        f"dimensions, the vectors {source.embedder.dim}. Give --upgrade RUN from release "
        f"{source.release}",
        file=sys.stderr,
    )


def add_forward_head(release: ReleaseDraft, run_dir: Path) -> None:
    """Add the upgrade that an embedder's own training made (DMU); without one, do nothing.

    Side-information stays valid if the release keeps its predecessor's encoder. A run of another
    kind raises AssertionError. Loading the run draws from torch's default generator.

    Args:
        release: the release, to which the run's embedder was added.
        run_dir: the folder of a finished run of kind embedder.

    Raises:
        ConfigurationError: the run is missing or unfinished; its configuration or tensors do not
            fit this version; its old model is not published; or the old release embeds texts, and
            the extra `text` is not installed.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
        VerificationError: its checkpoint is damaged, the exported file computes other vectors, or a
            file of the old release is damaged.
        OSError: the checkpoint cannot be opened, or a file cannot be written.
        RuntimeError: torch cannot export the network.
    """
    encoder, checkpoint = load_encoder(run_dir)
    config = checkpoint.config
    assert isinstance(config, EmbedderConfig)
    build = embedder_method(config.method).build_upgrade
    if build is None or not checkpoint.part_tensors("upgrade"):
        return
    source = _trained_against(release, run_dir, checkpoint)
    shape = UpgradeShape(source.embedder.dim, 0, encoder.dim, 0, encoder.unit_norm)
    module = build(config, shape)
    load_part(module, checkpoint, "upgrade")
    release.add_upgrade(
        module.eval(), source, _examples(source, release),
        method=config.method, keeps_side_information=release.stored_side_stays_valid,
    )  # fmt: skip


def _trained_against(release: ReleaseDraft, run_dir: Path, checkpoint: Checkpoint) -> Manifest:
    config = checkpoint.config
    assert isinstance(config, EmbedderConfig)
    source = _by_digest(release, "embedder_checkpoint", str(checkpoint.facts.get("old_digest")))
    if source is None:
        raise ConfigurationError(
            f"--embedder {run_dir}: method {config.method} trained it against the old model "
            f"{config.old}, which is the embedder of none of the published releases "
            f"({_numbers(release.older_manifests)}); publish the old model first"
        )
    return source


def add_side_run(release: ReleaseDraft, run_dir: Path) -> None:
    """Add the side encoder of a training run to the release, with its configuration.

    A side encoder that was added before is replaced. Loading the run draws from torch's default
    generator.

    Args:
        release: the release, to which its embedder was added (else AssertionError).
        run_dir: the folder of a finished run of kind side_encoder.

    Raises:
        ConfigurationError: the run is missing, unfinished, or of a kind other than side_encoder;
            its configuration or tensors do not fit this version; or it reads images of another size
            than the embedder.
        VerificationError: its checkpoint is damaged, or the exported file computes other vectors.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
        OSError: the checkpoint cannot be opened, or the ONNX file cannot be written.
        RuntimeError: torch cannot export the network.
    """
    encoder, checkpoint = load_encoder(run_dir)
    if checkpoint.config.kind != "side_encoder":
        raise ConfigurationError(
            f"--side-encoder {run_dir}: expected the run folder of a training of kind "
            "side_encoder, got one of kind embedder; name another run folder"
        )
    release.add_side_encoder(encoder)
    release.recipe |= {
        "side_encoder_checkpoint": sha256_file(run_dir / CHECKPOINT),
        **_flat("side_encoder", checkpoint.config.model_dump(mode="json")),
    }


def add_upgrade_run(release: ReleaseDraft, run_dir: Path) -> None:
    """Add a run's upgrade to the release, from the published release with its old model.

    An int8 file is added, too, and the recipe gets the run's configuration. If several releases
    have the old model, the newest counts, unless the run names the release. A second upgrade from
    the same release gets a second entry, but the same files.

    Args:
        release: the release, to which its embedder and side encoder were added.
        run_dir: the folder of a finished run of kind upgrade.

    Raises:
        ConfigurationError: the run is missing, unfinished or of another kind; it was trained with
            an old model, a new model or a side encoder that differs from the releases'; its old
            release is not published; it reads side-information that the old release lacks; or the
            old release embeds texts, and the extra `text` is not installed.
        VerificationError: its checkpoint is damaged, the exported file computes other vectors, or a
            file of the old release is damaged.
        OSError: the checkpoint cannot be opened, or a file cannot be written.
        RuntimeError: torch cannot export the network.
    """
    module, checkpoint = read_upgrade(run_dir)
    config, facts = checkpoint.config, checkpoint.facts
    assert isinstance(config, UpgradeConfig)
    source = _source(release, run_dir, checkpoint)
    for part, name, fact in (
        ("embedder", "embedder", "new_digest"),
        ("side_encoder", "side-information encoder", "new_side_digest"),
    ):
        if fact in facts and not _is_digest_of(release, part, str(facts[fact])):
            raise ConfigurationError(
                f"--upgrade {run_dir}: the upgrade was trained towards another {name} than the one "
                "being published; train it again with this release's runs"
            )
    side_digest = facts.get("side_digest")
    if side_digest is not None and not _has_digest(source, "side_encoder", str(side_digest)):
        raise ConfigurationError(
            f"--upgrade {run_dir}: the upgrade reads side-information of another encoder than that "
            f"of release {source.release}; train it again with the run of that encoder as the key "
            "old_side"
        )
    release.add_upgrade(
        module,
        source,
        _examples(source, release),
        method=config.method,
        keeps_side_information=config.side == "carries",
    )
    release.recipe |= upgrade_recipe(f"upgrade_{source.release}", checkpoint)


def upgrade_recipe(name: str, checkpoint: Checkpoint) -> Recipe:
    """Return the configuration of a run for a manifest, without paths of this machine.

    Lists, such as `choose`, are left out, and so are keys that may contain paths. Names of weights
    lose their folders.

    Args:
        name: the prefix of every key, which is followed by a dot.
        checkpoint: the run's checkpoint.

    Returns:
        Values by key, with nested keys in dots. Automatically selected options are `chosen_…`.
    """
    selection = {key: value for key, value in checkpoint.facts.items() if key.startswith("chosen_")}
    return _flat(name, {**checkpoint.config.model_dump(mode="json"), **selection})


def _source(release: ReleaseDraft, run_dir: Path, checkpoint: Checkpoint) -> Manifest:
    number, digest = checkpoint.facts.get("old_release"), checkpoint.facts.get("old_digest")
    if number is not None:
        named = find_published_manifest(int(number), release.older_manifests)
        if digest is not None and not _has_digest(named, "embedder", str(digest)):
            raise ConfigurationError(
                f"--upgrade {run_dir}: the upgrade was trained from a release {number} with "
                "another embedder than the published one; train it again from the published release"
            )
        return named
    source = _by_digest(release, "embedder_checkpoint", str(digest))
    if source is None:
        raise ConfigurationError(
            f"--upgrade {run_dir}: the upgrade's old embedder is that of none of the published "
            f"releases ({_numbers(release.older_manifests)}); publish that embedder first"
        )
    return source


def _is_digest_of(release: ReleaseDraft, part: str, digest: str) -> bool:
    made = release.embedder if part == "embedder" else release.side_encoder
    file = None if made is None or made.file is None else made.file.sha256
    if part == "side_encoder" and release.side_encoder is not None:
        origin = release.older_manifests.get(release.side_encoder.origin_release)
        if origin is not None:
            return _has_digest(origin, part, digest)
    return digest in (file, release.recipe.get(f"{part}_checkpoint"))


def _by_digest(release: ReleaseDraft, key: str, digest: str) -> Manifest | None:
    part = key.removesuffix("_checkpoint")
    matches = [m for m in release.older_manifests.values() if _has_digest(m, part, digest)]
    return matches[-1] if matches else None


def _has_digest(manifest: Manifest, part: str, digest: str) -> bool:
    made = manifest.embedder if part == "embedder" else manifest.side_encoder
    file = None if made is None or made.file is None else made.file.sha256
    return digest in (file, manifest.recipe.get(f"{part}_checkpoint"))


def _examples(source: Manifest, release: ReleaseDraft) -> tuple[Tensor, Tensor | None]:
    embedding, side = source_probes(source, release.all_files())
    return torch.from_numpy(embedding), None if side is None else torch.from_numpy(side)


def _flat(prefix: str, values: Mapping[str, object]) -> Recipe:
    flat: Recipe = {}
    for key, value in values.items():
        if key in _PRIVATE:
            continue
        if key in _WEIGHTS and isinstance(value, str):
            value = name_without_path(value)
        if isinstance(value, Mapping):
            flat |= _flat(f"{prefix}.{key}", value)
        elif isinstance(value, str | int | float | bool) or value is None:
            flat[f"{prefix}.{key}"] = value
    return flat


def _numbers(published: Mapping[int, Manifest]) -> str:
    return join_few(sorted(published, reverse=True)) or "none"


class ReleaseModels(NamedTuple):
    """The models to export into a release; None: there is none of this kind.

    Attributes:
        embedder: a run folder.
        text_encoder: an ONNX file, or a folder with one.
        query_encoder: an ONNX file, or a folder with one.
        side_encoder: a run folder.
        upgrades: run folders, or maps as ONNX files.
    """

    embedder: Path | None
    text_encoder: Path | None
    query_encoder: Path | None
    side_encoder: Path | None
    upgrades: tuple[Path, ...]

    def run_folders(self) -> list[Path]:
        """Return the run folders among the models, without ONNX files.

        They have the order embedder, side encoder, upgrades. Text models are not among them.
        """
        runs = (self.embedder, self.side_encoder, *self.upgrades)
        return [run for run in runs if run is not None and run.suffix != SUFFIX]


def check_models(
    runs: ReleaseModels, onnx: Path | None, weights: str | None, vectors_of: str | None
) -> None:
    """Check that the options of export.py name models of one release; open no file.

    An upgrade that does not exist passes.

    Args:
        runs: the models of --embedder, --text-encoder, --query-encoder and so on.
        onnx: the file of --onnx; None without it.
        weights: the name of --weights; None without it.
        vectors_of: the value of --vectors-of; None without it.

    Raises:
        ConfigurationError: there is no embedder, or more than one; a query encoder lacks its text
            encoder; the name of the weights has another form; or an upgrade is a file that is no
            ONNX.
    """
    for one in runs.upgrades:
        if one.is_file() and one.suffix != SUFFIX:
            raise ConfigurationError(
                f"--upgrade {one}: expected the run folder of an upgrade, or a FILE{SUFFIX} as "
                "`nobackfill fit --onnx FILE` writes it; got another file"
            )
    if weights is not None and not can_be_public(weights):
        raise ConfigurationError(
            f"--weights {weights}: expected timm:NAME.TAG, open_clip:NAME/TAG or "
            "torchvision:NAME/WEIGHTS; to publish other weights, train with them first "
            "(python training/train.py CONFIG --weights FILE)"
        )
    text = runs.text_encoder
    if runs.query_encoder is not None and text is None:
        raise ConfigurationError(
            "--query-encoder embeds only queries; also give --text-encoder FOLDER, the model that "
            "embeds the texts of a gallery"
        )
    images = [one for one in (runs.embedder, onnx, weights) if one is not None]
    if len(images) > 1 or (vectors_of is None) == (not images and text is None):
        raise ConfigurationError(
            "expected the models of one release: one of --embedder RUN, --onnx FILE and --weights "
            "NAME, optionally with --text-encoder FOLDER; or only --text-encoder FOLDER; or only "
            "--vectors-of NAME:DIM"
        )


def parse_vectors_of(vectors_of: str) -> tuple[str, int]:
    """Parse NAME:DIM to a model's name and its dimension; NAME may contain colons.

    DIM follows the last colon. Spaces belong to the name.

    Raises:
        ConfigurationError: there is no name or no colon, or DIM is no whole number above 0.
    """
    name, _, dim = vectors_of.rpartition(":")
    if not name or not dim.isdecimal() or not int(dim):
        raise ConfigurationError(
            f"--vectors-of: expected NAME:DIM, as in openai/text-embedding-ada-002:1536, got "
            f"{vectors_of!r}"
        )
    return name, int(dim)


def add_runs(draft: ReleaseDraft, runs: ReleaseModels, keep_side_encoder: bool) -> None:
    """Export every model of `runs`, the embedder first, because the others must match it.

    The order is embedder, text encoder, side encoder, an embedder's own upgrade (DMU), and upgrades
    as given. If one fails, the parts before it stay in the draft. A file that ends with .onnx is a
    map, every other path a run folder.

    Args:
        draft: the release, which gets the files and their entries.
        runs: the models.
        keep_side_encoder: use the side encoder of the newest published release; it replaces that of
            `runs`.

    Raises:
        ConfigurationError: a run is missing, unfinished, of another kind or does not fit this
            version; parts or releases do not fit each other; no release has a side encoder to
            keep; or texts are embedded, and the extra `text` is not installed.
        NotFoundError: there is no ONNX file of a text model, or a local-dir backbone is missing.
        UnavailableError: the description of a public backbone cannot be downloaded.
        NoEncoderError: the newest release embeds no images, but its side encoder is to be kept.
        InvalidInputError: an ONNX file cannot be read or run, or has another form.
        VerificationError: a checkpoint or a file of an older release is damaged, or an exported
            file computes other vectors.
        ConvertError: onnx cannot convert the operator set of a text model; it is onnx's.
        OSError: a checkpoint cannot be opened, or a file cannot be written.
        RuntimeError: torch cannot export a network.
        ValidationError: a prefix of a text model, or its dimension, is too large for a manifest; it
            is pydantic's.
    """
    if runs.embedder is not None:
        add_embedder_run(draft, runs.embedder)
    if runs.text_encoder is not None:
        add_text_encoder(draft, runs.text_encoder, runs.query_encoder)
    if runs.side_encoder is not None:
        add_side_run(draft, runs.side_encoder)
    if keep_side_encoder:
        draft.keep_side_encoder()
    if runs.embedder is not None:
        add_forward_head(draft, runs.embedder)
    for run in runs.upgrades:
        add = add_onnx_upgrade if run.suffix == SUFFIX else add_upgrade_run
        add(draft, run)
