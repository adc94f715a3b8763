"""Train an upgrade: compute features of frozen models over the same views, then run the method.

`train_upgrade` runs a configuration. compare.py, which has the features already, calls
`fit_upgrade`.

Options that the key `choose` names are selected first, by results on classes that the upgrade was
not trained on, because a gallery contains such classes. For each combination of values, upgrades
are trained for a third of the epochs, each without a third of the classes. They carry all images,
and the new embeddings of the left-out classes search them. With fewer than five class folders the
images are clustered by their new embeddings, so that no label is needed.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobackfill.class_folders import ImageListing
from nobackfill.digests import sha256_file
from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.metrics.ranking import rank, relevance_by_label
from nobackfill.metrics.retrieval import average_precision, cmc
from nobackfill.training.config import (
    PublishedSource,
    StoredVectorFiles,
    UpgradeConfig,
)
from nobackfill.training.data.folders import read_stored_vectors
from nobackfill.training.data.pictures import reading_options
from nobackfill.training.loop.loop import ProgressBars, train_objective, write_solved_run
from nobackfill.training.loop.run import Checkpoint, load_part, read_finished, resumable_checkpoint
from nobackfill.training.method import UpgradeInputs, UpgradeMethod, UpgradeShape
from nobackfill.training.methods import upgrade_method
from nobackfill.training.networks.frozen import (
    FrozenEncoder,
    augmented_views,
    cached_training_features,
    encoder_of_run,
    encoders_of_release,
    load_classifier,
)
from nobackfill.training.networks.transform import UpgradeNetwork

# Fewer groups are too few to compare values by, or to leave out a third.
_FEWEST_GROUPS, _CLUSTERS, _FOLDS = 5, 10, 3
# Least images per cluster, and most images in the gallery, because searches cost its square.
_FEWEST_IN_CLUSTER, _MOST_SEARCHED = 10, 2000
_SHARE_OF_EPOCHS = 3

Ints = NDArray[np.int64]
Scores = NDArray[np.float64]
Values = dict[str, float]


@dataclass(frozen=True)
class GroupFolds:
    """The class or cluster of each training image, and the folds of groups that are left out.

    Attributes:
        group_ids: the group of each image, int64 [n], below `group_count`.
        group_count: the number of groups.
        folds: groups that are left out together, int64 each.
        description: what the groups are, for the run's facts.
    """

    group_ids: Ints
    group_count: int
    folds: tuple[Ints, ...]
    description: str


def check_choices(method: UpgradeMethod, config: UpgradeConfig) -> None:
    """Check the options that the key `choose` names; without any, do nothing.

    Raises:
        ConfigurationError: the method cannot select the option (those it can are listed), it is set
            in `options`, or it is named twice.
    """
    for name in config.choose:
        if name not in method.option_values:
            names = ", ".join(method.option_values) or "none"
            raise ConfigurationError(
                f"the key choose: method {config.method} has no option {name!r} whose value can be "
                f"selected automatically; expected one of: {names}"
            )
        if name in config.options or config.choose.count(name) > 1:
            raise ConfigurationError(
                f"the key choose: the option {name} is named twice in the key choose, or also in "
                "the key options; leave one out"
            )


def select_options(
    method: UpgradeMethod,
    inputs: UpgradeInputs,
    rows_of: Callable[[Ints], Mapping[str, Tensor]],
    train: Callable[[UpgradeInputs], UpgradeNetwork],
) -> UpgradeInputs:
    """Select the values of the options that the key `choose` names.

    Each combination of values is scored by short trainings, which run in folders below
    config.run_dir/choice. The module's docstring describes the rule. The number of trainings is
    three times the product of the candidate values, without those of variants. Selected values are
    set for the real training, also if they are the defaults. The default is kept unless another
    value is better by more than the standard error. The folders stay after the call.

    Args:
        method: the upgrade method.
        inputs: the inputs of the training, with at least one option in `choose`, which
            `check_choices` accepts.
        rows_of: returns the features of images, given by their row numbers, in views that show no
            other images.
        train: trains an upgrade; its errors pass through.

    Returns:
        `inputs` with `selected_options` and `selection_images`.

    Raises:
        InvalidInputError: there are too few classes and too few images to cluster.
        ValueError: an embedding that is clustered is not finite.
        DivergedError: a loss of a short training is not finite.
        ConfigurationError: a folder below run_dir/choice holds another training.
        CannotWriteError: such a folder cannot be written.
    """
    groups = make_groups(inputs)
    trained = [name for name in inputs.config.choose if name not in method.variant_makers]
    after = [name for name in inputs.config.choose if name in method.variant_makers]
    scores: dict[tuple[float, ...], Scores] = {}
    for first in _combinations(method, trained):
        for number, fold in enumerate(groups.folds):
            rows = rows_of(np.flatnonzero(~np.isin(groups.group_ids, fold)))
            name = "-".join([f"{number}", *(f"{value:g}" for value in first.values())])
            config = _short(inputs.config, name)
            trial = replace(
                inputs,
                config=config,
                training_features=rows,
                held_out_features={},
                selected_options=first,
            )
            upgrade = train(trial)
            for second in _combinations(method, after):
                values = tuple((first | second)[option] for option in inputs.config.choose)
                of_groups = scores.setdefault(values, np.zeros(groups.group_count))
                variant = upgrade
                for option, value in second.items():
                    variant = method.variant_makers[option](variant, value)
                of_groups[fold] = _scores(variant, inputs, groups, fold)
    selection = dict(zip(inputs.config.choose, best_option_values(scores), strict=True))
    return replace(inputs, selected_options=selection, selection_images=groups.description)


def _short(config: UpgradeConfig, name: str) -> UpgradeConfig:
    """Return the configuration of a short trial training."""
    changed = {
        "run_dir": config.run_dir / "choice" / name,
        "epochs": -(-config.epochs // _SHARE_OF_EPOCHS),
        "warmup_epochs": config.warmup_epochs / _SHARE_OF_EPOCHS,
        "keep_best": False,
        "choose": (),
    }
    return config.model_copy(update=changed)


def best_option_values(scores: Mapping[tuple[float, ...], Scores]) -> tuple[float, ...]:
    """Return the values with the largest mean score over groups, unless the default is as good.

    If several values have the largest mean, the first counts. With a difference of exactly the
    standard error the default stays. Values whose mean is NaN are never chosen; a default of NaN
    stays.

    Args:
        scores: float64 scores per group [g], g at least 2, by values; the first entry has the
            default values. Without an entry it raises StopIteration.

    Returns:
        The best values if they beat the default by more than the standard error of the difference,
        else the default values.
    """
    usual, best = next(iter(scores)), max(scores, key=lambda values: float(scores[values].mean()))
    gains = scores[best] - scores[usual]
    return best if gains.mean() > gains.std(ddof=1) / len(gains) ** 0.5 else usual


def make_groups(inputs: UpgradeInputs) -> GroupFolds:
    """Divide the classes, or clusters of images, into three folds drawn by config.seed.

    With fewer than five classes the images are clustered by their new embeddings (k-means, ten
    clusters). Every group is in one fold; folds differ by at most one group. The first view of an
    image is clustered, on the CPU.

    Raises:
        InvalidInputError: there are fewer than five classes, and fewer than 100 images or five
            different embeddings to cluster.
        ValueError: an embedding that is clustered is not finite.
    """
    labels, seed = inputs.training_features["labels"].numpy(), inputs.config.seed
    names, kind = np.unique(labels), "classes"
    if len(names) < _FEWEST_GROUPS:
        if len(labels) < _FEWEST_IN_CLUSTER * _CLUSTERS:
            raise InvalidInputError(
                "the key choose: to select option values, expected images of at least "
                f"{_FEWEST_GROUPS} class folders, or at least {_FEWEST_IN_CLUSTER * _CLUSTERS} "
                f"images, got {len(names)} class folders with {len(labels)} images; leave the key "
                "choose out"
            )
        # Imported here: it takes a second, and most trainings do not cluster.
        from sklearn.cluster import KMeans

        means = KMeans(_CLUSTERS, n_init=4, random_state=seed)
        labels = means.fit_predict(inputs.training_features["new"][:, 0].numpy())
        names, kind = np.unique(labels), "clusters"
        if len(names) < _FEWEST_GROUPS:
            raise InvalidInputError(
                f"the key choose: to select option values, expected at least {_FEWEST_GROUPS} "
                f"different new embeddings of the images, got {len(names)}; leave the key choose "
                "out"
            )
    group_of = np.searchsorted(names, labels).astype(np.int64)
    drawn = np.random.default_rng(seed).permutation(len(names))
    folds = tuple(np.sort(fold) for fold in np.array_split(drawn, _FOLDS))
    return GroupFolds(
        group_of, len(names), folds, f"{len(names)} {kind}, a third held back at a time"
    )


def _combinations(method: UpgradeMethod, names: list[str]) -> Iterator[Values]:
    """Yield all combinations of candidate values, the defaults first."""
    for values in itertools.product(*(method.option_values[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _scores(
    upgrade: UpgradeNetwork, inputs: UpgradeInputs, groups: GroupFolds, fold: Ints
) -> Scores:
    """Return the mean of CMC-1 and mAP for each group of the fold.

    New embeddings of the group are the queries; all migrated embeddings are the gallery."""
    drawn = np.random.default_rng(inputs.config.seed).permutation(len(groups.group_ids))[
        :_MOST_SEARCHED
    ]
    view = {
        name: rows[drawn, 0] for name, rows in inputs.training_features.items() if rows.ndim > 2
    }
    with torch.no_grad():
        gallery = upgrade(view["old"], view.get("side")).embedding.numpy()
    group_of = groups.group_ids[drawn]
    queries = np.flatnonzero(np.isin(group_of, fold))
    relevance = relevance_by_label(group_of[queries], group_of, queries, np.arange(len(group_of)))
    ranking = rank(view["new"].numpy()[queries], gallery, relevance)
    figures = (cmc(ranking, 1) + average_precision(ranking)) / 2
    # An image that is alone in its group has no relevant item.
    by_group = [figures[(group_of[queries] == group) & np.isfinite(figures)] for group in fold]
    return np.array([one.mean() if len(one) else 0.0 for one in by_group])


@dataclass(frozen=True)
class FrozenSources:
    """The frozen models of an upgrade; None: not used.

    Attributes:
        old_encoder: the old embedder; None if there are `vector_files`.
        vector_files: stored vectors of the old embedder, which replace it.
        old_side_encoder: the encoder of the side-information that is read.
        new_encoder: the new embedder.
        new_side_encoder: the encoder of the side-information that is written.
    """

    old_encoder: FrozenEncoder | None
    vector_files: StoredVectorFiles | None
    old_side_encoder: FrozenEncoder | None
    new_encoder: FrozenEncoder
    new_side_encoder: FrozenEncoder | None

    def encoders(self) -> dict[str, FrozenEncoder]:
        """Return the encoders by the name of their features: old, side, new, new_side.

        Encoders that are not used are missing from it.
        """
        named = {
            "old": self.old_encoder,
            "side": self.old_side_encoder,
            "new": self.new_encoder,
            "new_side": self.new_side_encoder,
        }
        return {name: encoder for name, encoder in named.items() if encoder is not None}


def open_sources(config: UpgradeConfig) -> FrozenSources:
    """Load the models that the configuration names; files of stored vectors are not opened.

    A release's side encoder is used unless a run is named. With reads_side: false, the old side
    encoder is opened, but not used. Publications are verified whole.

    Raises:
        ConfigurationError: a run is missing, unfinished or of another kind; a release is not
            published; the new side encoder is missing for side: maps; or the package of a backbone
            is not installed.
        InvalidInputError: a release reads images in a way that training does not support.
        VerificationError: a checkpoint or a release is damaged.
        NoEncoderError: a release embeds no images.
        NotFoundError: a publication is incomplete, or a backbone of local-dir is missing.
        UnavailableError: a publication, or the description of a public backbone, cannot be read.
        UnfitError: this program cannot use a published release.
        CannotWriteError: the folder for temporary files has no room to verify a publication.
        OSError: a checkpoint exists, but cannot be opened, or no temporary folder can be made.
    """
    old = vector_files = old_side = None
    if isinstance(config.old, StoredVectorFiles):
        vector_files = config.old
    elif isinstance(config.old, PublishedSource):
        old, old_side = encoders_of_release(config.old)
    else:
        old = encoder_of_run(config.old, "embedder")
    if config.old_side is not None:
        old_side = encoder_of_run(config.old_side, "side_encoder")
    if isinstance(config.new, PublishedSource):
        new, new_side = encoders_of_release(config.new)
    else:
        new, new_side = encoder_of_run(config.new, "embedder"), None
    if config.new_side is not None:
        new_side = encoder_of_run(config.new_side, "side_encoder")
    if config.side == "maps" and new_side is None:
        raise ConfigurationError(
            f"the key side: `maps` needs the new side encoder, but {config.new} has none; add the "
            "key new_side with a run folder, or set side: drops"
        )
    return FrozenSources(
        old,
        vector_files,
        old_side if config.reads_side else None,
        new,
        new_side if config.side == "maps" else None,
    )


def make_upgrade_features(
    sources: FrozenSources,
    listing: ImageListing,
    config: UpgradeConfig,
    view_count: int,
    mixed_view_count: int = 0,
) -> dict[str, Tensor]:
    """Compute the features that an upgrade is trained on, from the cache or into it.

    The cache is the folder `features` next to the run folder. All rows are in memory. To compute an
    augmented view, torch's default generator is seeded from config.split_seed.

    Args:
        sources: the models.
        listing: n images, at least 1.
        config: the configuration, with the augmentation, the seed and the place of the cache.
        view_count: the number of views, the images themselves included; at least 1.
        mixed_view_count: the number of additional views that mix two images.

    Returns:
        `old`, `side`, `new`, `new_side` float32 [n,views + mixed_views,dim], as far as the sources
        have them, and `labels` int64 [n]. Stored old vectors have one view.

    Raises:
        InvalidInputError: a file is no image, or stored vectors do not match the images or have
            another form.
        ConfigurationError: a file of stored vectors is missing.
        CannotWriteError: the cache cannot be written.
        UnusableRowsError: a stored vector has NaN, infinity or a norm above 1e15.
        VerificationError: a published model cannot be run, or returns unusable vectors.
        NobackfillError: a process that reads images was killed.
    """
    columns: dict[str, list[np.ndarray]] = {name: [] for name in sources.encoders()}
    for read in _views_read(sources.encoders(), listing, config, view_count, mixed_view_count):
        for name, vectors in read.items():
            columns[name].append(vectors)
    rows = {name: torch.from_numpy(np.stack(parts, 1)) for name, parts in columns.items()}
    if sources.vector_files is not None:
        rows["old"] = torch.from_numpy(read_stored_vectors(sources.vector_files, listing))[:, None]
    return {**rows, "labels": torch.from_numpy(listing.labels)}


def _views_read(
    encoders: Mapping[str, FrozenEncoder],
    listing: ImageListing,
    config: UpgradeConfig,
    views: int,
    mixed_views: int = 0,
) -> Iterator[dict[str, NDArray[np.float32]]]:
    """Yield the vectors of each encoder, view by view, from the cache or into it."""
    cache = config.run_dir.parent / "features"
    sizes = tuple(encoder.image_size for encoder in encoders.values())
    for images in augmented_views(
        listing,
        sizes,
        views,
        config.augmentation,
        config.split_seed,
        reading_options(config),
        mixed_views,
    ):
        read: dict[str, NDArray[np.float32]] = {}
        for size, source in images.items():
            named = {name: one for name, one in encoders.items() if one.image_size == size}
            vectors = cached_training_features(list(named.values()), source, cache)
            read |= zip(named, vectors, strict=True)
        yield read


def cache_features(
    configs: Sequence[UpgradeConfig], train: ImageListing, held_out: ImageListing
) -> None:
    """Compute the features that `train_upgrade` needs into the cache, and return nothing.

    Each view is made once for all configurations. Models of equal digest count once, and stored
    vectors are not read. Files that the cache has are not computed again. To compute an augmented
    view, torch's default generator is seeded from the key split_seed.

    Args:
        configs: at least one configuration (IndexError without any); they must differ only in
            models and methods.
        train: the images to train on.
        held_out: the held-out images; may be none.

    Raises:
        InvalidInputError: a file is no image, or a release reads images in a way that training does
            not support.
        CannotWriteError: the cache cannot be written.
        ConfigurationError: a run is missing, unfinished or of another kind, a release is not
            published, or a side encoder is missing.
        NoEncoderError: a release embeds no images.
        VerificationError: a checkpoint or a release is damaged, or a published model returns
            unusable vectors.
        NotFoundError, UnavailableError: a publication is incomplete or cannot be read.
        NobackfillError: a process that reads images was killed.
        OSError: a checkpoint exists, but cannot be opened.
        UnfitError: this program cannot use a published release.
    """
    encoders: dict[str, FrozenEncoder] = {}
    for config in configs:
        encoders |= {one.model_digest: one for one in open_sources(config).encoders().values()}
    first = configs[0]
    for _ in _views_read(encoders, train, first, first.views, first.mixed_views):
        pass
    if len(held_out):
        for _ in _views_read(encoders, held_out, first, 1):
            pass


def repeat_unseen_classes(
    rows: Mapping[str, Tensor],
    class_names: Sequence[str],
    old_classes: Collection[str],
    copy_count: int,
) -> dict[str, Tensor]:
    """Repeat the rows of classes that the old model was not trained on.

    Old embeddings of images that the old model was trained on differ from those of a gallery, which
    it never saw; embeddings of unseen classes do not. docs/training.md explains this. `rows` are
    not changed.

    Args:
        rows: tensors of equal length, with `labels` int64.
        class_names: names of the labels; classes without rows count, too.
        old_classes: names of the old model's training classes; others than `class_names` are
            ignored.
        copy_count: how often such a row occurs in the result, at least 1; other rows occur once.

    Returns:
        The tensors with repeated rows next to each other.

    Raises:
        ConfigurationError: the old model was trained on every class.
    """
    unseen = torch.tensor([name not in old_classes for name in class_names])
    if not unseen.any():
        raise ConfigurationError(
            "the key unseen_copies: the old model was trained on every class of the images, so "
            "there is no unseen class to repeat; leave the key out"
        )
    times = torch.where(unseen, copy_count, 1)[rows["labels"]]
    return {name: tensor.repeat_interleave(times, 0) for name, tensor in rows.items()}


def upgrade_shape(rows: Mapping[str, Tensor], unit_norm: bool) -> UpgradeShape:
    """Return the dimensions of features [n,v,dim] by name; 0 for a feature that is absent.

    `unit_norm` is passed on: whether the new space has unit vectors. Other names, such as labels,
    are ignored. A feature with fewer than three axes raises IndexError.
    """
    dims = {name: rows[name].shape[2] if name in rows else 0 for name in _FEATURES}
    return UpgradeShape(dims["old"], dims["side"], dims["new"], dims["new_side"], unit_norm)


_FEATURES = ("old", "side", "new", "new_side")


def train_upgrade(
    config: UpgradeConfig, train: ImageListing, held_out: ImageListing, progress: ProgressBars
) -> Checkpoint:
    """Train the upgrade of a configuration, or return its finished run unchanged.

    A finished run is returned without its models and images being opened. Features of the frozen
    models are computed into a cache next to the run folder. With the key `choose`, short trainings
    leave their runs in the folder `choice` of the run folder. torch's default generator is seeded.
    The caller holds the lock of the run folder. It does nothing about files that are no images;
    `split_images` leaves them out before.

    Args:
        config: the configuration.
        train: the images to train on, at least two.
        held_out: images that no model was trained on; may be none.
        progress: where to show progress.

    Returns:
        The finished checkpoint.

    Raises:
        ConfigurationError: the method, an option or a model does not fit, or a side encoder is
            missing; unseen_copies finds no unseen class; a file of stored vectors is missing; or
            the run folder holds another training.
        InvalidInputError: there are too few images, a file is no image, a release reads images in
            an unsupported way, or stored vectors do not match the images.
        UnusableRowsError: a stored vector has NaN, infinity or a norm above 1e15.
        VerificationError: a checkpoint or a release is damaged, or a published model returns
            unusable vectors.
        DivergedError: a loss or a weight is not finite.
        CannotWriteError: the run folder or the cache cannot be written.
        NoEncoderError: a release embeds no images.
        UnfitError: this program cannot use a published release.
        NotFoundError, UnavailableError: a publication is incomplete or cannot be read.
        NobackfillError: a process that reads images was killed.
        ValueError, RuntimeError: an upgrade is solved from vectors that are not finite.
        ValueError: stats.jsonl is damaged, or every held-out prediction of FastFill's variance
            equals its target.
        OSError: a checkpoint exists, but cannot be opened.
    """
    method = upgrade_method(config.method)
    check_choices(method, config)
    if len(train) < 2:
        raise InvalidInputError(
            f"{train.root}: expected at least two images to train an upgrade, got {len(train)}; "
            "add images"
        )
    checkpoint = resumable_checkpoint(config)
    if checkpoint is not None and checkpoint.is_finished:
        return checkpoint
    sources = open_sources(config)
    rows = make_upgrade_features(sources, train, config, config.views, config.mixed_views)
    new_head, new_names = None, train.class_names
    if not isinstance(config.new, PublishedSource):
        classifier = load_classifier(config.new)
        new_head, new_names = classifier.head, classifier.class_names
    inputs = UpgradeInputs(
        config,
        upgrade_shape(rows, sources.new_encoder.unit_norm),
        train.class_names,
        rows,
        make_upgrade_features(sources, held_out, config, 1) if len(held_out) else {},
        new_head,
        new_names,
    )
    digests = {f"{name}_digest": e.model_digest for name, e in sources.encoders().items()}
    if isinstance(config.old, StoredVectorFiles):
        digests["old_vectors_digest"] = sha256_file(config.old.vectors)
        digests["old_paths_digest"] = sha256_file(config.old.paths)
    if config.choose:
        inputs = select_options(
            method,
            inputs,
            lambda picked: _rows_of(sources, train.select(picked), config, rows, picked),
            lambda trial: load_upgrade(fit_upgrade(trial, progress, digests)),
        )
    if config.unseen_copies > 1:
        assert isinstance(config.old, Path)
        old_classes = load_classifier(config.old).class_names
        rows = repeat_unseen_classes(rows, train.class_names, old_classes, config.unseen_copies)
        inputs = replace(inputs, training_features=rows)
    return fit_upgrade(inputs, progress, digests)


def _rows_of(
    sources: FrozenSources,
    some: ImageListing,
    config: UpgradeConfig,
    rows: Mapping[str, Tensor],
    picked: NDArray[np.int64],
) -> dict[str, Tensor]:
    """Return the features of some images; mixed views are made again, of these images alone."""
    if config.mixed_views:
        return make_upgrade_features(sources, some, config, config.views, config.mixed_views)
    return {name: tensor[picked] for name, tensor in rows.items()}


def fit_upgrade(
    inputs: UpgradeInputs, progress: ProgressBars, digests: Mapping[str, str]
) -> Checkpoint:
    """Train or solve an upgrade, and write its run to config.run_dir.

    A finished run with the same configuration and facts is returned unchanged if the method is
    trained; a method in closed form is solved again. torch's default generator is seeded by
    config.seed. The caller holds the lock of the run folder. Labels and views are those of
    `inputs.training_features`.

    Args:
        inputs: the features and the configuration.
        progress: where to show progress.
        digests: facts that record which models the upgrade belongs to.

    Returns:
        The finished checkpoint, part `upgrade`.

    Raises:
        ConfigurationError: the method or an option does not fit; keep_best is set for a method in
            closed form or without held-out images; or the run folder holds another training, or the
            machine lacks the devices.
        VerificationError: the checkpoint in the run folder is damaged.
        DivergedError: a loss or a weight is not finite.
        CannotWriteError: the run folder cannot be written.
        ValueError: a method in closed form gets fewer than two images, or values that are not
            finite; or stats.jsonl in the run folder is damaged.
        RuntimeError: method procrustes or residual gets a value that is not finite.
        OSError: the checkpoint in the run folder cannot be opened.
    """
    config, shape = inputs.config, inputs.shape
    method = upgrade_method(config.method)
    torch.manual_seed(config.seed)
    upgrade = method.build_network(config, shape)
    facts: dict[str, str | int | float | bool] = {
        "old_dim": shape.old_dim,
        "side_dim": shape.side_dim,
        "new_dim": shape.new_dim,
        "new_side_dim": shape.new_side_dim,
        "unit": shape.unit_norm,
        **digests,
        **{f"chosen_{name}": value for name, value in inputs.selected_options.items()},
    }
    if inputs.selection_images:
        facts["chosen_on"] = inputs.selection_images
    if isinstance(config.old, StoredVectorFiles | PublishedSource):
        facts["old_release"] = config.old.release
    if method.solve is not None:
        if config.keep_best:
            raise ConfigurationError(
                f"the key keep_best: method {config.method} is solved in closed form and has no "
                "epochs to select from; leave the key keep_best out"
            )
        method.solve(upgrade, inputs)
        return write_solved_run({"upgrade": upgrade}, config, inputs.class_names, facts)
    assert method.make_objective is not None
    objective = method.make_objective(upgrade, inputs)
    return train_objective(
        objective,
        inputs.training_features,
        config,
        inputs.class_names,
        progress=progress,
        facts=facts,
    )


def load_upgrade(checkpoint: Checkpoint) -> UpgradeNetwork:
    """Build the upgrade of a finished checkpoint, on the CPU, in eval mode and without gradients.

    The checkpoint is not changed, and its network is built with random weights first, from torch's
    default generator.

    Raises:
        ConfigurationError: the run is of another kind, its method or options are unknown, or its
            tensors do not fit the network.
    """
    config, facts = checkpoint.config, checkpoint.facts
    if not isinstance(config, UpgradeConfig):
        raise ConfigurationError(
            f"{config.run_dir}: expected the run folder of a training of kind upgrade, got one of "
            f"kind {config.kind}; name another run folder"
        )
    shape = UpgradeShape(
        int(facts["old_dim"]),
        int(facts["side_dim"]),
        int(facts["new_dim"]),
        int(facts["new_side_dim"]),
        bool(facts["unit"]),
    )
    upgrade = upgrade_method(config.method).build_network(config, shape)
    load_part(upgrade, checkpoint, "upgrade")
    return upgrade.eval().requires_grad_(False)


def read_upgrade(run_dir: Path) -> tuple[UpgradeNetwork, Checkpoint]:
    """Load the finished upgrade of a run folder, with its checkpoint.

    Returns:
        The network on the CPU, in eval mode and without gradients, and the checkpoint.

    Raises:
        ConfigurationError: the run is missing, unfinished or of another kind, or its configuration
            or tensors do not fit this version.
        VerificationError: the checkpoint is damaged or was not written by train.py.
        OSError: the checkpoint exists, but cannot be opened.
    """
    checkpoint = read_finished(run_dir)
    return load_upgrade(checkpoint), checkpoint
