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
from nobackfill.metrics.ranking import rank, same_label
from nobackfill.metrics.retrieval import average_precision, cmc
from nobackfill.training.config import (
    PublishedSource,
    StoredVectorFiles,
    UpgradeConfig,
)
from nobackfill.training.data.folders import read_stored
from nobackfill.training.data.pictures import reading
from nobackfill.training.loop.loop import ProgressBars, finish, fit
from nobackfill.training.loop.run import Checkpoint, load_part, read_finished, resumable
from nobackfill.training.method import UpgradeInputs, UpgradeMethod, UpgradeShape
from nobackfill.training.methods import upgrade_method
from nobackfill.training.networks.frozen import (
    FrozenEncoder,
    augmented_views,
    load_classifier,
    of_release,
    of_run,
    training_features,
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
class Groups:
    """The class or cluster of each training image, and the folds of groups that are left out.

    Attributes:
        of: the group of each image, int64 [n], below `count`.
        count: the number of groups.
        folds: groups that are left out together.
        told: a description for the run's facts.
    """

    of: Ints
    count: int
    folds: tuple[Ints, ...]
    told: str


def check_choices(method: UpgradeMethod, config: UpgradeConfig) -> None:
    """Raise ConfigurationError for an option in `choose` that cannot be selected, or is set."""
    for name in config.choose:
        if name not in method.choices:
            names = ", ".join(method.choices) or "none"
            raise ConfigurationError(
                f"choose: method {config.method} has no option {name!r} to choose; it has {names}"
            )
        if name in config.options or config.choose.count(name) > 1:
            raise ConfigurationError(f"choose: {name} is named twice, or set in options, too")


def choose(
    method: UpgradeMethod,
    inputs: UpgradeInputs,
    rows_of: Callable[[Ints], Mapping[str, Tensor]],
    train: Callable[[UpgradeInputs], UpgradeNetwork],
) -> UpgradeInputs:
    """Select the values of the options in `choose`.

    Args:
        method: the upgrade method.
        inputs: the inputs of the training.
        rows_of: returns the features of some images, in views that show no other images.
        train: trains an upgrade.

    Returns:
        `inputs` with the selected values.

    Raises:
        InvalidInputError: as `divide`.
    """
    groups = divide(inputs)
    trained = [name for name in inputs.config.choose if name not in method.variants]
    after = [name for name in inputs.config.choose if name in method.variants]
    scores: dict[tuple[float, ...], Scores] = {}
    for first in _combinations(method, trained):
        for number, fold in enumerate(groups.folds):
            shown = rows_of(np.flatnonzero(~np.isin(groups.of, fold)))
            name = "-".join([f"{number}", *(f"{value:g}" for value in first.values())])
            config = _short(inputs.config, name)
            trial = replace(inputs, config=config, rows=shown, held_out={}, chosen=first)
            upgrade = train(trial)
            for second in _combinations(method, after):
                values = tuple((first | second)[option] for option in inputs.config.choose)
                of_groups = scores.setdefault(values, np.zeros(groups.count))
                variant = upgrade
                for option, value in second.items():
                    variant = method.variants[option](variant, value)
                of_groups[fold] = _scores(variant, inputs, groups, fold)
    chosen = dict(zip(inputs.config.choose, by_rule(scores), strict=True))
    return replace(inputs, chosen=chosen, chosen_on=groups.told)


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


def by_rule(scores: Mapping[tuple[float, ...], Scores]) -> tuple[float, ...]:
    """Return the values with the largest mean score over groups, unless the default is as good.

    Args:
        scores: scores per group [g], by values; the first entry has the default values.

    Returns:
        The best values if they beat the default by more than the standard error of the difference,
        else the default values.
    """
    usual, best = next(iter(scores)), max(scores, key=lambda values: float(scores[values].mean()))
    gains = scores[best] - scores[usual]
    return best if gains.mean() > gains.std(ddof=1) / len(gains) ** 0.5 else usual


def divide(inputs: UpgradeInputs) -> Groups:
    """Divide the classes, or clusters of images, into three folds drawn by the seed.

    Raises:
        InvalidInputError: there are too few images to cluster.
    """
    labels, seed = inputs.rows["labels"].numpy(), inputs.config.seed
    names, kind = np.unique(labels), "classes"
    if len(names) < _FEWEST_GROUPS:
        if len(labels) < _FEWEST_IN_CLUSTER * _CLUSTERS:
            raise InvalidInputError(
                f"choose: expected {_FEWEST_GROUPS} class folders, or "
                f"{_FEWEST_IN_CLUSTER * _CLUSTERS} images to cluster, got {len(names)} with "
                f"{len(labels)} images; leave choose out"
            )
        # Imported here: it takes a second, and most trainings do not cluster.
        from sklearn.cluster import KMeans

        means = KMeans(_CLUSTERS, n_init=4, random_state=seed)
        labels = means.fit_predict(inputs.rows["new"][:, 0].numpy())
        names, kind = np.unique(labels), "clusters"
        if len(names) < _FEWEST_GROUPS:
            raise InvalidInputError(
                f"choose: the images have {len(names)} new embeddings that differ; leave it out"
            )
    of = np.searchsorted(names, labels).astype(np.int64)
    drawn = np.random.default_rng(seed).permutation(len(names))
    folds = tuple(np.sort(fold) for fold in np.array_split(drawn, _FOLDS))
    return Groups(of, len(names), folds, f"{len(names)} {kind}, a third held back at a time")


def _combinations(method: UpgradeMethod, names: list[str]) -> Iterator[Values]:
    """Yield all combinations of candidate values, the defaults first."""
    for values in itertools.product(*(method.choices[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _scores(upgrade: UpgradeNetwork, inputs: UpgradeInputs, groups: Groups, fold: Ints) -> Scores:
    """Return the mean of CMC-1 and mAP for each group of the fold.

    New embeddings of the group are the queries; all migrated embeddings are the gallery."""
    drawn = np.random.default_rng(inputs.config.seed).permutation(len(groups.of))[:_MOST_SEARCHED]
    view = {name: rows[drawn, 0] for name, rows in inputs.rows.items() if rows.ndim > 2}
    with torch.no_grad():
        carried = upgrade(view["old"], view.get("side")).embedding.numpy()
    own = groups.of[drawn]
    asking = np.flatnonzero(np.isin(own, fold))
    relevance = same_label(own[asking], own, asking, np.arange(len(own)))
    ranking = rank(view["new"].numpy()[asking], carried, relevance)
    both = (cmc(ranking, 1) + average_precision(ranking)) / 2
    # An image that is alone in its group has no relevant item.
    found = [both[(own[asking] == group) & np.isfinite(both)] for group in fold]
    return np.array([one.mean() if len(one) else 0.0 for one in found])


@dataclass(frozen=True)
class Sources:
    """The frozen models of an upgrade; None: not used. `stored` vectors replace an old model."""

    old: FrozenEncoder | None
    stored: StoredVectorFiles | None
    old_side: FrozenEncoder | None
    new: FrozenEncoder
    new_side: FrozenEncoder | None

    def encoders(self) -> dict[str, FrozenEncoder]:
        """Return the encoders by the name of their features."""
        named = {
            "old": self.old,
            "side": self.old_side,
            "new": self.new,
            "new_side": self.new_side,
        }
        return {name: encoder for name, encoder in named.items() if encoder is not None}


def open_sources(config: UpgradeConfig) -> Sources:
    """Load the models that the configuration names. Raises ConfigurationError for another kind."""
    old = stored = old_side = None
    if isinstance(config.old, StoredVectorFiles):
        stored = config.old
    elif isinstance(config.old, PublishedSource):
        old, old_side = of_release(config.old)
    else:
        old = of_run(config.old, "embedder")
    if config.old_side is not None:
        old_side = of_run(config.old_side, "side_encoder")
    if isinstance(config.new, PublishedSource):
        new, new_side = of_release(config.new)
    else:
        new, new_side = of_run(config.new, "embedder"), None
    if config.new_side is not None:
        new_side = of_run(config.new_side, "side_encoder")
    if config.side == "maps" and new_side is None:
        raise ConfigurationError(
            f"{config.new}: side: maps needs a side encoder, but it has none; add new_side"
        )
    return Sources(
        old,
        stored,
        old_side if config.reads_side else None,
        new,
        new_side if config.side == "maps" else None,
    )


def upgrade_rows(
    sources: Sources, listing: ImageListing, config: UpgradeConfig, views: int, mixed_views: int = 0
) -> dict[str, Tensor]:
    """Compute the features that an upgrade is trained on.

    Returns:
        `old`, `side`, `new`, `new_side` float32 [n,views + mixed_views,dim], as far as the sources
        have them, and `labels` int64 [n].
    """
    columns: dict[str, list[np.ndarray]] = {name: [] for name in sources.encoders()}
    for read in _views_read(sources.encoders(), listing, config, views, mixed_views):
        for name, vectors in read.items():
            columns[name].append(vectors)
    rows = {name: torch.from_numpy(np.stack(parts, 1)) for name, parts in columns.items()}
    if sources.stored is not None:
        rows["old"] = torch.from_numpy(read_stored(sources.stored, listing))[:, None]
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
        listing, sizes, views, config.augmentation, config.split_seed, reading(config), mixed_views
    ):
        read: dict[str, NDArray[np.float32]] = {}
        for size, source in images.items():
            named = {name: one for name, one in encoders.items() if one.image_size == size}
            found = training_features(list(named.values()), source, cache)
            read |= zip(named, found, strict=True)
        yield read


def keep_features(
    configs: Sequence[UpgradeConfig], train: ImageListing, held_out: ImageListing
) -> None:
    """Compute the features of `train_upgrade` into the cache.

    Each view is made once for all configurations, which must differ only in models and methods."""
    encoders: dict[str, FrozenEncoder] = {}
    for config in configs:
        encoders |= {one.digest: one for one in open_sources(config).encoders().values()}
    shown = configs[0]
    for _ in _views_read(encoders, train, shown, shown.views, shown.mixed_views):
        pass
    if len(held_out):
        for _ in _views_read(encoders, held_out, shown, 1):
            pass


def repeat_unseen(
    rows: Mapping[str, Tensor],
    class_names: Sequence[str],
    old_classes: Collection[str],
    copies: int,
) -> dict[str, Tensor]:
    """Repeat the rows of classes that the old model was not trained on.

    Old embeddings of images that the old model was trained on differ from those of a gallery, which
    it never saw; embeddings of unseen classes do not. docs/training.md explains this.

    Args:
        rows: tensors of equal length, with `labels`.
        class_names: names of the labels.
        old_classes: names of the old model's training classes.
        copies: how often to repeat a row.

    Raises:
        ConfigurationError: the old model was trained on every class.
    """
    unseen = torch.tensor([name not in old_classes for name in class_names])
    if not unseen.any():
        raise ConfigurationError(
            "unseen_copies: the old model trained on every class of the images; leave the key out"
        )
    times = torch.where(unseen, copies, 1)[rows["labels"]]
    return {name: tensor.repeat_interleave(times, 0) for name, tensor in rows.items()}


def shape_of(rows: Mapping[str, Tensor], unit: bool) -> UpgradeShape:
    """Return the dimensions of the features."""
    dims = {name: rows[name].shape[2] if name in rows else 0 for name in _FEATURES}
    return UpgradeShape(dims["old"], dims["side"], dims["new"], dims["new_side"], unit)


_FEATURES = ("old", "side", "new", "new_side")


def train_upgrade(
    config: UpgradeConfig, train: ImageListing, held_out: ImageListing, progress: ProgressBars
) -> Checkpoint:
    """Train the upgrade of a configuration; a finished run is returned unchanged.

    Raises:
        ConfigurationError: the method, an option or a model does not fit.
        InvalidInputError: there are too few images.
        DivergedError: a loss is not finite.
    """
    method = upgrade_method(config.method)
    if config.mixed_views and method.reads_labels(config):
        raise ConfigurationError(
            f"method {config.method} reads labels, but views that mix two images have none; "
            "set mixed_views: 0, or options without a term on labels"
        )
    check_choices(method, config)
    if len(train) < 2:
        raise InvalidInputError(
            f"{train.root}: expected at least two images to train an upgrade, got {len(train)}"
        )
    done = resumable(config)
    if done is not None and done.finished:
        return done
    sources = open_sources(config)
    rows = upgrade_rows(sources, train, config, config.views, config.mixed_views)
    new_head, new_names = None, train.class_names
    if not isinstance(config.new, PublishedSource):
        classifier = load_classifier(config.new)
        new_head, new_names = classifier.head, classifier.class_names
    inputs = UpgradeInputs(
        config,
        shape_of(rows, sources.new.unit),
        train.class_names,
        rows,
        upgrade_rows(sources, held_out, config, 1) if len(held_out) else {},
        new_head,
        new_names,
    )
    digests = {f"{name}_digest": e.digest for name, e in sources.encoders().items()}
    if isinstance(config.old, StoredVectorFiles):
        digests["old_vectors_digest"] = sha256_file(config.old.vectors)
        digests["old_paths_digest"] = sha256_file(config.old.paths)
    if config.choose:
        inputs = choose(
            method,
            inputs,
            lambda picked: _rows_of(sources, train.select(picked), config, rows, picked),
            lambda trial: load_upgrade(fit_upgrade(trial, progress, digests)),
        )
    if config.unseen_copies > 1:
        assert isinstance(config.old, Path)
        old_classes = load_classifier(config.old).class_names
        rows = repeat_unseen(rows, train.class_names, old_classes, config.unseen_copies)
        inputs = replace(inputs, rows=rows)
    return fit_upgrade(inputs, progress, digests)


def _rows_of(
    sources: Sources,
    some: ImageListing,
    config: UpgradeConfig,
    rows: Mapping[str, Tensor],
    picked: NDArray[np.int64],
) -> dict[str, Tensor]:
    """Return the features of some images; mixed views are made again, of these images alone."""
    if config.mixed_views:
        return upgrade_rows(sources, some, config, config.views, config.mixed_views)
    return {name: tensor[picked] for name, tensor in rows.items()}


def fit_upgrade(
    inputs: UpgradeInputs, progress: ProgressBars, digests: Mapping[str, str]
) -> Checkpoint:
    """Train or solve an upgrade; `digests` record which models it belongs to."""
    config, shape = inputs.config, inputs.shape
    method = upgrade_method(config.method)
    torch.manual_seed(config.seed)
    upgrade = method.build(config, shape)
    facts: dict[str, str | int | float | bool] = {
        "old_dim": shape.old_dim,
        "side_dim": shape.side_dim,
        "new_dim": shape.new_dim,
        "new_side_dim": shape.new_side_dim,
        "unit": shape.unit,
        **digests,
        **{f"chosen_{name}": value for name, value in inputs.chosen.items()},
    }
    if inputs.chosen_on:
        facts["chosen_on"] = inputs.chosen_on
    if isinstance(config.old, StoredVectorFiles | PublishedSource):
        facts["old_release"] = config.old.release
    if method.solve is not None:
        if config.keep_best:
            raise ConfigurationError(f"keep_best: {config.method} is solved and has no epochs")
        method.solve(upgrade, inputs)
        return finish({"upgrade": upgrade}, config, inputs.class_names, facts)
    assert method.objective is not None
    objective = method.objective(upgrade, inputs)
    return fit(objective, inputs.rows, config, inputs.class_names, progress=progress, facts=facts)


def load_upgrade(checkpoint: Checkpoint) -> UpgradeNetwork:
    """Load the finished upgrade of a checkpoint, in eval mode.

    Raises ConfigurationError for another kind of run."""
    config, facts = checkpoint.config, checkpoint.facts
    if not isinstance(config, UpgradeConfig):
        raise ConfigurationError(
            f"{config.run_dir}: expected a run of kind upgrade, got {config.kind}"
        )
    shape = UpgradeShape(
        int(facts["old_dim"]),
        int(facts["side_dim"]),
        int(facts["new_dim"]),
        int(facts["new_side_dim"]),
        bool(facts["unit"]),
    )
    upgrade = upgrade_method(config.method).build(config, shape)
    load_part(upgrade, checkpoint, "upgrade")
    return upgrade.eval().requires_grad_(False)


def read_upgrade(run_dir: Path) -> tuple[UpgradeNetwork, Checkpoint]:
    """Load the finished upgrade of a run folder, with its checkpoint."""
    checkpoint = read_finished(run_dir)
    return load_upgrade(checkpoint), checkpoint
