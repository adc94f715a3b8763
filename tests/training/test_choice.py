"""What `choose` leaves open: which images decide, by which rule, and what the upgrade gets."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.training.config import UpgradeConfig
from nobackfill.training.export.assembly import upgrade_recipe
from nobackfill.training.loop.loop import ProgressBars
from nobackfill.training.loop.run import read_checkpoint
from nobackfill.training.loop.upgrade import (
    Ints,
    best_option_values,
    fit_upgrade,
    load_upgrade,
    make_groups,
    select_options,
)
from nobackfill.training.method import UpgradeInputs
from nobackfill.training.methods import upgrade_method
from nobackfill.training.methods.residual import ResidualMap
from nobackfill.training.networks.transform import UpgradeNetwork
from tests.training.life import train_quietly, upgrade_config
from tests.training.methods import features


def test_the_usual_stays_unless_another_is_better_by_more_than_its_error() -> None:
    rng = np.random.default_rng(0)
    usual = rng.uniform(0, 1, 100)
    noisy = usual + rng.normal(0.05, 1, 100)
    assert best_option_values({(1.0,): usual, (0.5,): usual - 0.1, (0.0,): noisy}) == (1.0,)
    assert best_option_values(
        {(1.0,): usual, (0.5,): usual + 0.1 + noisy / 100, (0.0,): usual}
    ) == (0.5,)
    assert best_option_values({(1.0,): usual, (0.5,): usual}) == (1.0,)


def test_every_class_is_held_back_once_or_every_cluster_where_images_have_no_class(
    tmp_path: Path,
) -> None:
    inputs = features.inputs(tmp_path, method="residual")
    by_class = make_groups(inputs)
    assert by_class.description == "5 classes, a third held back at a time"
    assert sorted(np.concatenate(by_class.folds)) == [0, 1, 2, 3, 4]
    assert [len(fold) for fold in by_class.folds] == [2, 2, 1]
    assert np.array_equal(by_class.group_ids, inputs.training_features["labels"].numpy())
    other = make_groups(replace(inputs, config=inputs.config.model_copy(update={"seed": 5})))
    assert [list(fold) for fold in other.folds] != [list(fold) for fold in by_class.folds]
    nameless = {**inputs.training_features, "labels": torch.zeros(400, dtype=torch.int64)}
    clustered = make_groups(replace(inputs, training_features=nameless))
    assert clustered.description == "10 clusters, a third held back at a time"
    assert (
        sorted(np.concatenate(clustered.folds))
        == sorted(set(clustered.group_ids))
        == list(range(10))
    )
    # Images are nearer to their own cluster's than to others'.
    new = inputs.training_features["new"][:, 0]
    apart = torch.cdist(new, new).numpy()
    same = clustered.group_ids[:, None] == clustered.group_ids[None, :]
    assert apart[same].mean() < 0.7 * apart[~same].mean()
    alike = {**nameless, "new": torch.ones(400, 2, 7)}
    with (
        pytest.warns(ConvergenceWarning),
        pytest.raises(InvalidInputError, match="new embeddings of the images, got 1"),
    ):
        make_groups(replace(inputs, training_features=alike))
    few = {name: tensor[:99] for name, tensor in nameless.items()}
    with pytest.raises(InvalidInputError, match="at least 100 images, got 1 class folders with 99"):
        make_groups(replace(inputs, training_features=few))


def test_short_trainings_see_nothing_of_the_classes_that_decide(tmp_path: Path) -> None:
    """Upgrades whose networks add noise are judged: the straight part alone must be chosen."""
    inputs = features.inputs(tmp_path, method="residual", choose=("share", "classification"))
    asked: list[UpgradeInputs] = []

    def rows_of(picked: Ints) -> Mapping[str, Tensor]:
        return {name: tensor[picked] for name, tensor in inputs.training_features.items()}

    def train(trial: UpgradeInputs) -> UpgradeNetwork:
        asked.append(trial)
        made = upgrade_method("residual").build_network(inputs.config, inputs.shape).eval()
        assert isinstance(made.h, ResidualMap)
        made.h.solve(*(inputs.training_features[name][:, 0] for name in ("old", "side", "new")))
        torch.manual_seed(len(asked))
        last = made.h.residual[-1]
        assert isinstance(last, torch.nn.Linear)
        torch.nn.init.normal_(last.weight, std=30.0)
        return made

    found = select_options(upgrade_method("residual"), inputs, rows_of, train)
    assert found.selected_options["share"] == 0.0 and set(found.selected_options) == {
        "share",
        "classification",
    }
    assert (
        found.selection_images == make_groups(inputs).description
        and found.training_features is inputs.training_features
    )
    assert [trial.selected_options["classification"] for trial in asked] == [0.0] * 3 + [1.0] * 3
    held_back = [
        set(range(5)) - {int(label) for label in trial.training_features["labels"]}
        for trial in asked[:3]
    ]
    assert held_back == [{int(label) for label in fold} for fold in make_groups(inputs).folds]
    for trial in asked:
        assert not trial.held_out_features and (trial.config.epochs, trial.config.choose) == (4, ())
    assert len({trial.config.run_dir for trial in asked}) == 6


def test_an_upgrade_is_given_what_was_chosen(tmp_path: Path) -> None:
    kept = features.inputs(tmp_path / "whole", method="residual", epochs=3)
    fewer = features.inputs(tmp_path / "half", method="residual", epochs=3)
    fewer = replace(fewer, selected_options={"share": 0.25}, selection_images="2 of 5 classes")
    checkpoints = [fit_upgrade(one, ProgressBars(visible=False), {}) for one in (kept, fewer)]
    assert checkpoints[1].facts["chosen_share"] == 0.25
    assert checkpoints[1].facts["chosen_on"] == "2 of 5 classes"
    # A manifest tells it.
    told = [upgrade_recipe("upgrade_1", checkpoint) for checkpoint in checkpoints]
    assert told[1]["upgrade_1.chosen_share"] == 0.25
    assert told[1]["upgrade_1.chosen_on"] == "2 of 5 classes"
    assert not any("chosen" in key for key in told[0])
    view = {
        name: tensor[:, 0] for name, tensor in features.rows(50, 7, 1).items() if name != "labels"
    }
    maps = [load_upgrade(checkpoint).h for checkpoint in checkpoints]
    outputs = [network(view["old"], view["side"]) for network in maps]
    assert isinstance(maps[0], ResidualMap)
    straight = maps[0].straight(maps[0].whiten_inputs(view["old"], view["side"]))
    torch.testing.assert_close(outputs[1], straight + 0.25 * (outputs[0] - straight))
    # Its variances are those of what is served.
    assert kept.held_out_features["old"].shape == fewer.held_out_features["old"].shape
    offsets = [float(one.tensors["upgrade.log_variance.offset"]) for one in checkpoints]
    assert offsets[0] != offsets[1]


def test_a_training_chooses_by_itself_and_once(runs: Path, digits: Path, tmp_path: Path) -> None:
    keys: dict[str, object] = {"mixed_views": 1, "epochs": 3, "batch_size": 16, "held_out": 0.0}
    config = upgrade_config(
        runs, digits / "queries", tmp_path / "u", method="residual", choose=["share"], **keys
    )
    assert isinstance(config, UpgradeConfig)
    train_quietly(config)
    facts = read_checkpoint(tmp_path / "u").facts
    assert facts["chosen_on"] == "10 classes, a third held back at a time"
    assert facts["chosen_share"] in upgrade_method("residual").option_values["share"]
    assert read_checkpoint(tmp_path / "u" / "choice" / "2").epoch == 1
    written = (tmp_path / "u" / "checkpoint.safetensors").stat().st_mtime_ns
    train_quietly(config)
    assert (tmp_path / "u" / "checkpoint.safetensors").stat().st_mtime_ns == written
    cases: list[tuple[dict[str, object], str]] = [
        (
            {"choose": ["shares"]},
            "has no option 'shares' .* expected one of: share, classification",
        ),
        (
            {"choose": ["share"], "options": {"share": 0.5}},
            "share is named twice in the key choose, or also in the key options",
        ),
        ({"choose": ["share", "share"]}, "share is named twice"),
        ({"choose": ["share"], "method": "affine"}, "expected one of: none"),
    ]
    for changed, told in cases:
        wrong = {"method": "residual", **keys, **changed}
        with pytest.raises(ConfigurationError, match=told):
            train_quietly(upgrade_config(runs, digits / "queries", tmp_path / "no", **wrong))
