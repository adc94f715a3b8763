"""Training an upgrade: features of the frozen models over the same views, then the method's part.

`train_upgrade` is for a configuration; compare.py, which has features already, calls `fit_upgrade`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobackfill.class_folders import Listing
from nobackfill.digests import sha256_file
from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.training.config import PublishedSource, StoredVectors, UpgradeConfig
from nobackfill.training.data.pictures import reading
from nobackfill.training.data.stored import read_stored
from nobackfill.training.loop.choice import check_choices, choose
from nobackfill.training.loop.loop import finish, fit
from nobackfill.training.loop.progress import Progress
from nobackfill.training.loop.run import Checkpoint, load_part, read_finished, resumable
from nobackfill.training.method import UpgradeInputs, UpgradeShape
from nobackfill.training.methods import upgrade_method
from nobackfill.training.networks.frozen import (
    FrozenEncoder,
    augmented_views,
    load_classifier,
    of_run,
    training_features,
)
from nobackfill.training.networks.published import of_release
from nobackfill.training.networks.transform import Upgrade


@dataclass(frozen=True)
class Sources:
    """The frozen models of an upgrade; None: without. Stored vectors stand for an old model."""

    old: FrozenEncoder | None
    stored: StoredVectors | None
    old_side: FrozenEncoder | None
    new: FrozenEncoder
    new_side: FrozenEncoder | None

    def encoders(self) -> dict[str, FrozenEncoder]:
        """By the name of their features."""
        named = {
            "old": self.old,
            "side": self.old_side,
            "new": self.new,
            "new_side": self.new_side,
        }
        return {name: encoder for name, encoder in named.items() if encoder is not None}


def open_sources(config: UpgradeConfig) -> Sources:
    """Load what the configuration names. Raises ConfigurationError where it is not of its kind."""
    old = stored = old_side = None
    if isinstance(config.old, StoredVectors):
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
            f"{config.new}: side: maps, but it has no side encoder; add new_side"
        )
    return Sources(
        old,
        stored,
        old_side if config.reads_side else None,
        new,
        new_side if config.side == "maps" else None,
    )


def upgrade_rows(
    sources: Sources, listing: Listing, config: UpgradeConfig, views: int, mixed_views: int = 0
) -> dict[str, Tensor]:
    """Features `old`, `side`, `new`, `new_side` [n,views + mixed_views,dim], where there are such,
    and `labels`.
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
    listing: Listing,
    config: UpgradeConfig,
    views: int,
    mixed_views: int = 0,
) -> Iterator[dict[str, NDArray[np.float32]]]:
    """View by view the vectors by each of the encoders, from the cache or into it."""
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


def keep_features(configs: Sequence[UpgradeConfig], train: Listing, held_out: Listing) -> None:
    """Compute what `train_upgrade` reads of frozen models, into the cache where it finds it: each
    view is made once for all of the configurations, which differ in models and methods alone."""
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
    rows: Mapping[str, Tensor], class_names: Sequence[str], known: Collection[str], copies: int
) -> dict[str, Tensor]:
    """The rows, those of classes that are not `known` to the old model `copies` times.

    The old embeddings of images that the old model trained on are unlike those of a gallery, which
    it never saw; those of classes that it never saw are not. Why no half-models: docs/training.md.
    Raises ConfigurationError where the old model knows every class.
    """
    unseen = torch.tensor([name not in known for name in class_names])
    if not unseen.any():
        raise ConfigurationError(
            "unseen_copies: the old model trained on every class of the images; leave the key out"
        )
    times = torch.where(unseen, copies, 1)[rows["labels"]]
    return {name: tensor.repeat_interleave(times, 0) for name, tensor in rows.items()}


def shape_of(rows: Mapping[str, Tensor], unit: bool) -> UpgradeShape:
    """The dimensions that the features have."""
    dims = {name: rows[name].shape[2] if name in rows else 0 for name in _FEATURES}
    return UpgradeShape(dims["old"], dims["side"], dims["new"], dims["new_side"], unit)


_FEATURES = ("old", "side", "new", "new_side")


def train_upgrade(
    config: UpgradeConfig, train: Listing, held_out: Listing, progress: Progress
) -> Checkpoint:
    """Train the upgrade of a configuration; a finished run is returned as it is."""
    method = upgrade_method(config.method)
    if config.mixed_views and method.reads_labels(config):
        raise ConfigurationError(
            f"method {config.method} reads labels, which views that mix two images have not; "
            "expected mixed_views: 0, or options without a term on labels"
        )
    check_choices(method, config)
    if len(train) < 2:
        raise InvalidInputError(
            f"{train.root}: expected two images at least to train an upgrade on, got {len(train)}"
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
    if isinstance(config.old, StoredVectors):
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
        known = load_classifier(config.old).class_names
        rows = repeat_unseen(rows, train.class_names, known, config.unseen_copies)
        inputs = replace(inputs, rows=rows)
    return fit_upgrade(inputs, progress, digests)


def _rows_of(
    sources: Sources,
    some: Listing,
    config: UpgradeConfig,
    rows: Mapping[str, Tensor],
    picked: NDArray[np.int64],
) -> dict[str, Tensor]:
    """The features of some of the images; views that mix are made anew, of these alone."""
    if config.mixed_views:
        return upgrade_rows(sources, some, config, config.views, config.mixed_views)
    return {name: tensor[picked] for name, tensor in rows.items()}


def fit_upgrade(
    inputs: UpgradeInputs, progress: Progress, digests: Mapping[str, str]
) -> Checkpoint:
    """Train, or solve, the upgrade of `inputs`; `digests` say which models it belongs to."""
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
    if isinstance(config.old, StoredVectors | PublishedSource):
        facts["old_release"] = config.old.release
    if method.solve is not None:
        if config.keep_best:
            raise ConfigurationError(f"keep_best: {config.method} is solved and has no epochs")
        method.solve(upgrade, inputs)
        return finish({"upgrade": upgrade}, config, inputs.class_names, facts)
    assert method.objective is not None
    objective = method.objective(upgrade, inputs)
    return fit(objective, inputs.rows, config, inputs.class_names, progress=progress, facts=facts)


def load_upgrade(checkpoint: Checkpoint) -> Upgrade:
    """The finished upgrade of a checkpoint, in eval mode."""
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


def read_upgrade(run_dir: Path) -> tuple[Upgrade, Checkpoint]:
    """The finished upgrade of a run folder."""
    checkpoint = read_finished(run_dir)
    return load_upgrade(checkpoint), checkpoint
