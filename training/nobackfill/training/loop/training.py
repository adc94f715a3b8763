"""Run one training from its configuration: select images, take a lock, load weights, fit."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from nobackfill.class_folders import ImageListing, list_images
from nobackfill.digests import sha256_file
from nobackfill.durable import lock_file, remove_tree
from nobackfill.errors import (
    BusyError,
    CannotWriteError,
    ConfigurationError,
    InvalidInputError,
    join_few,
)
from nobackfill.training.config import (
    Config,
    EmbedderConfig,
    SideEncoderConfig,
    UpgradeConfig,
)
from nobackfill.training.data.folders import drop_unreadable_images, hold_out, require_classes
from nobackfill.training.data.pictures import (
    exceeds_memory,
    open_pictures,
    reading_options,
)
from nobackfill.training.loop.loop import (
    ProgressBars,
    keep_freed_memory,
    launch_fabric,
    train_objective,
    write_solved_run,
)
from nobackfill.training.loop.objective import Objective
from nobackfill.training.loop.run import CHECKPOINT, Checkpoint, read_finished, resumable_checkpoint
from nobackfill.training.loop.upgrade import train_upgrade
from nobackfill.training.method import EmbedderInputs
from nobackfill.training.methods import embedder_method
from nobackfill.training.methods.cheap_maps import set_linear
from nobackfill.training.methods.compatible import encode_images
from nobackfill.training.networks.backbones import linear_layers, replace_layer
from nobackfill.training.networks.embedder import (
    ConcatenatedBackbones,
    EmbedderObjective,
    ImageEncoder,
    bare_backbone,
    build_encoder,
)
from nobackfill.training.networks.frozen import fastest_device, load_classifier, load_encoder
from nobackfill.training.networks.maps import fit_principal_map
from nobackfill.training.networks.weights import load_pretrained, pixel_normalisation, read_weights
from nobackfill.training.side_info import side_objective

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def train(config: Config, progress: ProgressBars) -> Checkpoint:
    """Run a training, or return its finished run unchanged.

    It writes to config.run_dir, and features of frozen models to the folder `features` next to it.
    Pretrained weights are downloaded if they are not cached. An interrupted training resumes. The
    images are listed, and checked as in `split_images`, also if the run is finished. The lock of
    the run folder is not waited for. It is a file `lock`, which is removed after a finished run.
    Memory that is freed stays with the process, see `keep_freed_memory`. torch's default generator
    is seeded. With several devices each other process runs the same command again. stderr lists
    files that were left out, and layers that are not pretrained.

    Args:
        config: the configuration of any kind. For named weights their pixel normalisation is used,
            unless the configuration sets one.
        progress: where to show progress.

    Returns:
        The finished checkpoint.

    Raises:
        BusyError: another process trains in the run folder.
        ConfigurationError: the method, a key, a model or the classes do not fit; the machine lacks
            the devices; a package of public models is missing; or the run folder holds another
            training.
        InvalidInputError: there are too few images or classes, a file is no image, or stored
            vectors do not match the images.
        VerificationError: a checkpoint, a release or a file of weights is damaged.
        DivergedError: a loss or a weight is not finite.
        CannotWriteError: the run folder, a cache or the folder of downloads cannot be written.
        NobackfillError: a process that reads images was killed.
        NotFoundError: a file of weights, or a folder of a public model, does not exist.
        UnavailableError: weights cannot be downloaded, or a publication cannot be read.
        NoEncoderError: a release of an upgrade embeds no images.
        UnfitError: this program cannot use a published release of an upgrade.
        ValueError, RuntimeError: an upgrade is solved from vectors that are not finite.
        ValueError: stats.jsonl, or `unreadable-*.json` in the folder `features`, is damaged.
        OSError: a checkpoint, a file of weights, the folder of images or the lock exists, but
            cannot be opened.
    """
    keep_freed_memory()
    config = _normalised(config)
    _check_names(config)
    training_images, held_out = split_images(config)
    checkpoint = resumable_checkpoint(config)
    if checkpoint is not None and checkpoint.is_finished:
        return checkpoint
    with _run_lock(config.run_dir):
        if isinstance(config, UpgradeConfig):
            return train_upgrade(config, training_images, held_out, progress)
        return _train_network(config, training_images, progress)


@contextmanager
def _run_lock(run_dir: Path) -> Iterator[None]:
    """Lock the run folder: two trainings in it would overwrite each other's files."""
    path = run_dir / "lock"
    with ExitStack() as stack:
        if _leads():
            try:
                stack.enter_context(lock_file(path))
            except BusyError as error:
                raise BusyError(
                    f"another process is training in the run folder {run_dir}; wait until it ends, "
                    "or set another run_dir"
                ) from error
            except CannotWriteError as error:
                # Some network file systems have no locks, and a cluster may have nothing else.
                if getattr(error.__cause__, "errno", None) not in _NO_LOCKS:
                    raise
        yield
        if _leads():
            # Only after a finished run, which is not written again. Otherwise a process that waits
            # on the deleted file and one that creates a new file would both hold a lock.
            remove_tree(path)


def _leads() -> bool:
    """Return whether this is the first process of its training, which alone writes and locks.

    lightning-fabric, torchrun and Slurm number processes; the one that starts others has no number.
    """
    ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return next((rank for rank in ranks if rank is not None), "0") == "0"


def split_images(config: Config) -> tuple[ImageListing, ImageListing]:
    """Return the images to train on, and the held-out images, which may be none.

    With skip_corrupt, files that are no images are left out, and stderr lists them. Images are
    checked now if skip_corrupt is set, or if a network's training will read them on demand. The
    result of a check is kept in the folder `features` next to the run folder.

    Returns:
        Images to train on and held-out images, with the same class names, both in the order of the
        listing. Equal names and an equal split_seed give the same division.

    Raises:
        ConfigurationError: the folder of images or the class list cannot be read.
        InvalidInputError: there are fewer than two classes (one for an upgrade), fewer than the key
            `classes`, or a class is empty; the class list names a folder that is missing, listed
            twice or inside another; or, where files are checked now, one is no image.
        CannotWriteError: the result of that check cannot be written.
        ValueError: the kept result of that check is damaged.
        PermissionError: the folder of images may not be read by this user.
    """
    listing = _usable(list_images(config.images, config.classes, config.class_list), config)
    # An upgrade may read no labels, so one class is enough.
    require_classes(listing, 1 if isinstance(config, UpgradeConfig) else 2)
    train_rows, held_rows = hold_out(listing, config.held_out, config.split_seed)
    return listing.select(train_rows), listing.select(held_rows)


def _normalised(config: Config) -> Config:
    """Apply the pixel normalisation of named weights, unless the configuration sets one."""
    if isinstance(config, UpgradeConfig) or config.weights is None:
        return config
    expected = pixel_normalisation(config.weights, config.backbone)
    if expected is None or {"pixel_mean", "pixel_std"} & config.model_fields_set:
        return config
    return config.model_copy(update={"pixel_mean": expected.mean, "pixel_std": expected.std})


def _usable(listing: ImageListing, config: Config) -> ImageListing:
    """Return the images; with skip_corrupt, without files that are no images.

    Images that are read on demand are checked now, so that a training does not fail after hours.
    """
    later = not isinstance(config, UpgradeConfig) and exceeds_memory(
        listing, config.image_size, reading_options(config)
    )
    if not config.skip_corrupt and not later:
        return listing
    usable, skipped = drop_unreadable_images(listing, config.run_dir.parent / "features")
    if skipped and not config.skip_corrupt:
        raise InvalidInputError(
            f"{len(skipped)} of the {len(listing)} files in {listing.root} are no images that can "
            f"be decoded: {join_few(skipped)}; remove them, or train with --set skip_corrupt=true"
        )
    for path in skipped:
        print(f"{listing.root / path}: not trained on, because it is no image", file=sys.stderr)
    return usable


def _check_names(config: Config) -> None:
    """Check the method and the run `init` before images are read."""
    if isinstance(config, EmbedderConfig):
        embedder_method(config.method)
        if config.init is not None:
            read_finished(config.init)


def _train_network(
    config: EmbedderConfig | SideEncoderConfig, listing: ImageListing, progress: ProgressBars
) -> Checkpoint:
    torch.manual_seed(config.seed)
    labels = torch.from_numpy(listing.labels)
    if len(listing) < config.batch_size:
        raise InvalidInputError(
            f"{listing.root}: expected at least batch_size ({config.batch_size}) images to train "
            f"on, got {len(listing)}; add images, or train with "
            f"--set batch_size={max(2, len(listing) // 2)}"
        )
    if isinstance(config, SideEncoderConfig):
        if config.embedder is not None:
            return _project_inner(config, config.embedder, listing)
        objective = side_objective(config, len(listing.class_names))
        _begin_with(config, objective, listing.class_names)
        images = open_pictures(listing, config.image_size, reading_options(config))
        rows = {"labels": labels, "images": images}
        return train_objective(objective, rows, config, listing.class_names, progress=progress)
    method = embedder_method(config.method)
    old = None if config.old is None else load_classifier(config.old)
    images = open_pictures(listing, config.image_size, reading_options(config))
    # Launched before the objective is built, which may encode every image.
    fabric = launch_fabric(config)
    inputs = EmbedderInputs(config, listing.class_names, images, labels, old, fabric.device)
    embedder = method.make_objective(inputs)
    _begin_with(config, embedder, listing.class_names)
    if config.init is not None:
        embedder.start_from(read_finished(config.init), listing.class_names)
    facts = {} if config.old is None else {"old_digest": sha256_file(config.old / CHECKPOINT)}
    rows = {"labels": labels, "images": images}
    return train_objective(
        embedder, rows, config, listing.class_names,
        progress=progress, facts=facts, fabric=fabric,
    )  # fmt: skip


# Keys of the network, which psi shares with the embedder if it projects its features.
_NETWORK = ("backbone", "width", "image_size", "pooling", "pixel_mean", "pixel_std")


def _project_inner(config: SideEncoderConfig, run_dir: Path, listing: ImageListing) -> Checkpoint:
    """Make psi from a finished embedder: a PCA of what its embedding layer reads takes its place.

    Pooled features contain what the embedding layer leaves out. Nothing is trained. With the key
    `simclr`, the output of that finished run follows.

    Raises:
        ConfigurationError: the embedder or the run of SimCLR is of another kind or has another
            network, or the embedder has no linear embedding layer, or fewer features than psi
            takes from it.
    """
    old, before = load_encoder(run_dir)
    if not isinstance(before.config, EmbedderConfig):
        raise ConfigurationError(
            "the key embedder: expected the run folder of a training of kind embedder, got "
            f"{run_dir} of kind {before.config.kind}; name another run folder"
        )
    _same_network(config, before.config, run_dir)
    if config.last_nonlin:
        raise ConfigurationError(
            f"the key last_nonlin: expected false, because side_info is {config.side_info} and a "
            "ReLU would drop the negative half of each projected feature; got true"
        )
    second = None if config.simclr is None else _trained_simclr(config, config.simclr)
    dim = config.side_info_dim if second is None else config.side_info_dim // 2
    network = bare_backbone(old, before.config)
    layers = linear_layers(network)
    if not layers or layers[-1][1].in_features < dim:
        width = layers[-1][1].in_features if layers else 0
        raise ConfigurationError(
            f"the key side_info_dim: expected at most {width}, the number of features that the "
            f"embedding layer of {run_dir} reads, because side_info is {config.side_info}; got "
            f"{dim}"
        )
    path, last = layers[-1]
    replace_layer(network, path, torch.nn.Identity())
    encoder = build_encoder(config)
    encoder.backbone = network
    images = open_pictures(listing, config.image_size, reading_options(config))
    layer = torch.nn.Linear(last.in_features, dim)
    set_linear(layer, fit_principal_map(encode_images(encoder, images, fastest_device()), dim))
    replace_layer(network, path, layer)
    facts = {"embedder_digest": sha256_file(run_dir / CHECKPOINT)}
    if config.simclr is not None and second is not None:
        encoder.backbone = ConcatenatedBackbones(network, second)
        facts["simclr_digest"] = sha256_file(config.simclr / CHECKPOINT)
    return write_solved_run({"encoder": encoder}, config, listing.class_names, facts)


def _trained_simclr(config: SideEncoderConfig, run_dir: Path) -> torch.nn.Module:
    """Return the backbone of a finished run of kind simclr, with its normalisation."""
    encoder, checkpoint = load_encoder(run_dir)
    other, half = checkpoint.config, config.side_info_dim // 2
    if not isinstance(other, SideEncoderConfig) or other.side_info != "simclr":
        kind = other.side_info if isinstance(other, SideEncoderConfig) else other.kind
        raise ConfigurationError(
            "the key simclr: expected the run folder of a side encoder with side_info: simclr, got "
            f"{run_dir} with {kind}; name another run folder"
        )
    if other.side_info_dim != half:
        raise ConfigurationError(
            f"the key side_info_dim: expected {2 * other.side_info_dim}, twice that of {run_dir}; "
            f"got {config.side_info_dim}"
        )
    _same_network(config, other, run_dir, (*_NETWORK, "last_nonlin"))
    return encoder.backbone


def _same_network(
    config: SideEncoderConfig,
    other: EmbedderConfig | SideEncoderConfig,
    run_dir: Path,
    keys: tuple[str, ...] = _NETWORK,
) -> None:
    for key in keys:
        expected, found = getattr(other, key), getattr(config, key)
        if expected != found:
            raise ConfigurationError(
                f"the key {key}: expected {expected}, as in {run_dir}, because side_info is "
                f"{config.side_info}; got {found}"
            )


def _begin_with(
    config: EmbedderConfig | SideEncoderConfig, objective: Objective, class_names: tuple[str, ...]
) -> None:
    """Load the pretrained weights that the configuration names."""
    if config.weights is None or resumable_checkpoint(config) is not None:
        return
    encoder = objective.trained_parts()["encoder"]
    assert isinstance(encoder, ImageEncoder)
    head = objective.head if isinstance(objective, EmbedderObjective) else None
    weights = read_weights(config.weights, config.backbone)
    load_pretrained(encoder, head, weights, config, class_names)
