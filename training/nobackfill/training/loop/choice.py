"""Options that `choose` names, by how an upgrade does on classes that it was not shown.

A gallery has classes that no training set has. So for each combination of values upgrades are
trained for a third of the epochs, each without a third of the classes, and carry all images; the
new model's embeddings of the classes that were held back search these. Images in fewer class
folders than five are clustered by their new embeddings: no label is needed.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.metrics.ranking import rank, same_label
from nobackfill.metrics.retrieval import average_precision, cmc
from nobackfill.training.config import UpgradeConfig
from nobackfill.training.method import UpgradeInputs, UpgradeMethod
from nobackfill.training.networks.transform import Upgrade

# Fewer groups are too few to judge by, and to train without a third of.
_FEWEST_GROUPS, _CLUSTERS, _FOLDS = 5, 10, 3
# Images of a cluster; and of the gallery, as searches cost its square.
_FEWEST_IN_CLUSTER, _MOST_SEARCHED = 10, 2000
_SHARE_OF_EPOCHS = 3

Ints = NDArray[np.int64]
Scores = NDArray[np.float64]
Values = dict[str, float]


@dataclass(frozen=True)
class Groups:
    """Of which class or cluster each training image [n] is, 0 to count - 1, and which of these are
    held back together.
    """

    of: Ints
    count: int
    folds: tuple[Ints, ...]
    told: str


def check_choices(method: UpgradeMethod, config: UpgradeConfig) -> None:
    """Raise ConfigurationError for an option in `choose` that is not to be chosen, or is set."""
    for name in config.choose:
        if name not in method.choices:
            known = ", ".join(method.choices) or "none"
            raise ConfigurationError(
                f"choose: method {config.method} has no option {name!r} to choose; it has {known}"
            )
        if name in config.options or config.choose.count(name) > 1:
            raise ConfigurationError(f"choose: {name} is named twice, or set in options, too")


def choose(
    method: UpgradeMethod,
    inputs: UpgradeInputs,
    rows_of: Callable[[Ints], Mapping[str, Tensor]],
    train: Callable[[UpgradeInputs], Upgrade],
) -> UpgradeInputs:
    """`inputs` with what was chosen. `rows_of` gives the features of some of the images, in views
    that show no others; `train` gives a finished upgrade. Errors are those of `divide`.
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
    """The training by which values are judged."""
    changed = {
        "run_dir": config.run_dir / "choice" / name,
        "epochs": -(-config.epochs // _SHARE_OF_EPOCHS),
        "warmup_epochs": config.warmup_epochs / _SHARE_OF_EPOCHS,
        "keep_best": False,
        "choose": (),
    }
    return config.model_copy(update=changed)


def by_rule(scores: Mapping[tuple[float, ...], Scores]) -> tuple[float, ...]:
    """The values of the largest mean score over groups [g]; the first, which are the usual, where
    no others are better by more than the standard error of the difference.
    """
    usual, best = next(iter(scores)), max(scores, key=lambda values: float(scores[values].mean()))
    gains = scores[best] - scores[usual]
    return best if gains.mean() > gains.std(ddof=1) / len(gains) ** 0.5 else usual


def divide(inputs: UpgradeInputs) -> Groups:
    """Classes, or clusters, in three parts drawn by the seed.

    Raises InvalidInputError for too few images to cluster.
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
        # Imported here: it takes a second of every training that clusters nothing.
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
    """Of the values tried, the usual ones first."""
    for values in itertools.product(*(method.choices[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _scores(upgrade: Upgrade, inputs: UpgradeInputs, groups: Groups, fold: Ints) -> Scores:
    """By group of the fold, the mean of CMC-1 and mAP of its new embeddings, which search all
    carried ones.
    """
    drawn = np.random.default_rng(inputs.config.seed).permutation(len(groups.of))[:_MOST_SEARCHED]
    view = {name: rows[drawn, 0] for name, rows in inputs.rows.items() if rows.ndim > 2}
    with torch.no_grad():
        carried = upgrade(view["old"], view.get("side")).embedding.numpy()
    own = groups.of[drawn]
    asking = np.flatnonzero(np.isin(own, fold))
    relevance = same_label(own[asking], own, asking, np.arange(len(own)))
    ranking = rank(view["new"].numpy()[asking], carried, relevance)
    both = (cmc(ranking, 1) + average_precision(ranking)) / 2
    # An image without another one of its group has nothing to find.
    found = [both[(own[asking] == group) & np.isfinite(both)] for group in fold]
    return np.array([one.mean() if len(one) else 0.0 for one in found])
