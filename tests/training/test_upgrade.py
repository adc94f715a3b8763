import json
from pathlib import Path

import numpy as np
import pytest
import torch

from nobackfill.class_folders import list_images
from nobackfill.errors import ConfigurationError
from nobackfill.release.trust.trust import read_publication
from nobackfill.training.config import UpgradeConfig
from nobackfill.training.data.folders import hold_out
from nobackfill.training.data.pictures import ReadingOptions
from nobackfill.training.loop.upgrade import (
    make_upgrade_features,
    open_sources,
    read_upgrade,
    repeat_unseen_classes,
)
from nobackfill.training.networks.frozen import augmented_views, encoder_of_run
from tests.training.life import Life, copy_publication, run_export, train_quietly, upgrade_config


def of_kind(config: object) -> UpgradeConfig:
    assert isinstance(config, UpgradeConfig)
    return config


def test_features_of_one_row_are_of_one_view(runs: Path, digits: Path, tmp_path: Path) -> None:
    """The old, side and new features of a view come from the same pixels."""
    moving = {"rotate_degrees": 15}
    config = of_kind(
        upgrade_config(runs, digits / "queries", tmp_path / "u", views=3, augmentation=moving)
    )
    listing = list_images(digits / "queries", 2)
    rows = make_upgrade_features(open_sources(config), listing, config, 3)
    assert {name: tuple(t.shape) for name, t in rows.items()} == {
        "old": (16, 3, 16),
        "side": (16, 3, 12),
        "new": (16, 3, 16),
        "new_side": (16, 3, 12),
        "labels": (16,),
    }
    views = augmented_views(
        listing, (8, 8, 8, 8), 3, config.augmentation, config.split_seed, ReadingOptions()
    )
    for number, images in enumerate(views):
        for name, run, kind in (
            ("old", "embedder-1", "embedder"),
            ("side", "side-1", "side_encoder"),
            ("new", "embedder-2", "embedder"),
        ):
            pixels = torch.cat(list(images[8].chunks())).numpy()
            expected = encoder_of_run(runs / run, kind).encode(pixels)
            assert np.allclose(rows[name][:, number].numpy(), expected, atol=1e-6)


def test_a_folder_without_classes_trains_ours_on_mixed_views(
    runs: Path, digits: Path, tmp_path: Path
) -> None:
    """All images are in one folder, and nothing reads a label."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "all").symlink_to(digits / "queries" / "3")
    keys: dict[str, object] = {"views": 1, "mixed_views": 3, "epochs": 2, "batch_size": 4}
    config = of_kind(
        upgrade_config(
            runs, tmp_path / "images", tmp_path / "u", method="residual", held_out=0.0, **keys
        )
    )
    train_quietly(config)
    assert read_upgrade(tmp_path / "u")[1].is_finished
    listing = list_images(tmp_path / "images")
    rows = make_upgrade_features(open_sources(config), listing, config, 1, 3)
    assert rows["old"].shape == (len(listing), 4, 16)


def test_held_out_images_train_nobody(runs: Path, digits: Path) -> None:
    """phi_old, psi and phi_new hold out the same images as the upgrade does."""
    listing = list_images(digits / "train")
    few = list_images(digits / "train", 5)
    held = {listing.paths[row] for row in hold_out(listing, 0.1, 0)[1]}
    assert held >= {few.paths[row] for row in hold_out(few, 0.1, 0)[1]}
    trained = {few.paths[row] for row in hold_out(few, 0.1, 0)[0]}
    assert not held & trained


def test_no_side_information_is_read_where_it_is_turned_off(
    runs: Path, digits: Path, tmp_path: Path
) -> None:
    config = upgrade_config(
        runs, digits / "queries", tmp_path / "u", reads_side=False, epochs=2, side="drops"
    )
    train_quietly(config)
    upgrade, checkpoint = read_upgrade(tmp_path / "u")
    assert not upgrade.reads_side
    assert (checkpoint.facts["side_dim"], checkpoint.facts["new_side_dim"]) == (0, 0)
    assert upgrade(torch.randn(3, 16)).embedding.shape == (3, 16)


@pytest.mark.long
def test_an_upgrade_between_published_releases_needs_no_run(life: Life, tmp_path: Path) -> None:
    """Trained from the publication alone, and published with the run that release 2 was made of."""
    config = upgrade_config(
        life.runs,
        life.data / "train",
        tmp_path / "u",
        epochs=40,
        old={"model_repo": str(life.repo), "release": 1},
        new={"model_repo": str(life.repo), "release": 2},
        old_side=None,
        new_side=None,
    )
    train_quietly(config)
    _, checkpoint = read_upgrade(tmp_path / "u")
    manifest = read_publication(life.repo).manifests[2]
    published = manifest.embedder.file
    assert published is not None
    assert checkpoint.facts["new_digest"] == published.sha256
    assert checkpoint.facts["old_release"] == 1


@pytest.mark.long
def test_an_upgrade_from_a_release_is_published_from_that_release(
    life: Life, tmp_path: Path
) -> None:
    config = upgrade_config(
        life.runs,
        life.data / "train",
        tmp_path / "u",
        epochs=40,
        old={"model_repo": str(life.repo), "release": 1},
        old_side=None,
    )
    train_quietly(config)
    repo = tmp_path / "model_repo"
    copy_publication(life.first, repo)
    result = run_export(
        repo,
        2,
        *("--embedder", life.runs / "embedder-2", "--side-encoder", life.runs / "side-2"),
        *("--upgrade", tmp_path / "u", "--eval", life.data / "eval"),
        # Whose release it starts from is asked here: the gate's queries are few.
        "--force",
    )
    assert result.exit_code == 0, result.output
    (upgrade,) = read_publication(repo).manifests[2].upgrades
    assert (upgrade.from_release, upgrade.side) == (1, "maps")
    assert upgrade.from_side_space == read_publication(repo).manifests[1].side_space


def test_an_upgrade_is_no_embedder(runs: Path) -> None:
    with pytest.raises(ConfigurationError, match="kind embedder, got one of kind upgrade"):
        encoder_of_run(runs / "upgrade-1-2", "embedder")


def test_the_distance_on_held_out_images_is_logged_and_falls(runs: Path) -> None:
    lines = (runs / "upgrade-1-2" / "stats.jsonl").read_text("utf-8").splitlines()
    logged = [json.loads(line)["held_out_distance"] for line in lines]
    assert logged[-1] < 0.7 * logged[0]
    assert all(json.loads(line)["loss"] != logged[0] for line in lines)


def test_images_of_unknown_classes_are_repeated() -> None:
    labels = torch.tensor([0, 2, 1, 2])
    rows = {"old": torch.arange(8.0).view(4, 1, 2), "labels": labels}
    repeated = repeat_unseen_classes(rows, ("ant", "bee", "cat"), ("bee", "ant"), 3)
    expected = []
    for row, label in enumerate(labels.tolist()):
        expected += [row] * (3 if label == 2 else 1)
    assert repeated["labels"].tolist() == [labels[row] for row in expected]
    assert torch.equal(repeated["old"], rows["old"][expected])
    with pytest.raises(ConfigurationError, match="trained on every class"):
        repeat_unseen_classes(rows, ("ant", "bee"), ("ant", "bee"), 3)


def test_an_upgrade_draws_unknown_classes_more_often(
    runs: Path, digits: Path, tmp_path: Path
) -> None:
    """Release 1 knows 5 of 10 classes: with 3 copies of the others, an epoch is twice as long."""
    keys: dict[str, object] = {"epochs": 2, "batch_size": 16}
    plain = train_quietly(upgrade_config(runs, digits / "train", tmp_path / "plain", **keys))
    copied = upgrade_config(runs, digits / "train", tmp_path / "c", unseen_copies=3, **keys)
    assert abs(train_quietly(copied).step - 2 * plain.step) <= 2
    stored = {"vectors": "v.npy", "paths": "p.txt", "release": 1}
    with pytest.raises(ConfigurationError, match="unseen_copies needs the key old"):
        upgrade_config(runs, digits / "train", tmp_path / "s", unseen_copies=3, old=stored)
