"""A transformer follows a CNN: compatible with it, and reached by upgrades (DMU appendix B)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nobackfill.class_folders import decode_listing, list_images
from nobackfill.training.loop.upgrade import read_upgrade
from nobackfill.training.networks.frozen import encoder_of_run, load_encoder
from tests.training.life import config_of, train_quietly, upgrade_config


@pytest.mark.long
def test_a_swin_learns_beside_a_cnn_and_an_upgrade_leads_to_it(
    digits: Path, runs: Path, tmp_path: Path
) -> None:
    """One step of DMU and a few of FCT's h, between models of different input sizes."""
    images, old, new = digits / "queries", runs / "embedder-1", tmp_path / "swin"
    trained = train_quietly(
        config_of(
            "embedder", new, images, method="dmu", old=str(old), backbone="swin_t", image_size=32,
            options={"hidden_dim": 32}, epochs=1, warmup_epochs=0, batch_size=64, lr=0.01,
        )
    )  # fmt: skip
    assert trained.is_finished and trained.step == 1
    told = (new / "stats.jsonl").read_text("utf-8")
    assert all(f'"{term}"' in told for term in ("classification", "selective", "forward"))
    encoder, _ = load_encoder(new)
    assert any("attn" in name for name, _ in encoder.named_parameters())

    listing = list_images(images)
    vectors = {}
    for name, run in (("old", old), ("new", new)):
        frozen = encoder_of_run(run, "embedder")
        vectors[name] = frozen.encode(decode_listing(listing, frozen.image_size))
    # Of one dimension, so that they can be compared as they are.
    assert vectors["old"].shape == vectors["new"].shape == (80, 16)

    upgrade = tmp_path / "upgrade"
    keys = {"new": str(new), "new_side": None, "side": "drops", "views": 1, "epochs": 20}
    train_quietly(upgrade_config(runs, images, upgrade, **keys))
    h, checkpoint = read_upgrade(upgrade)
    side = encoder_of_run(runs / "side-1", "side_encoder").encode(decode_listing(listing, 8))
    with torch.no_grad():
        upgraded = h(torch.from_numpy(vectors["old"]), torch.from_numpy(side)).embedding.numpy()
    assert checkpoint.facts["new_dim"] == 16
    # What it was trained for: nearer to the new vectors than the old ones are.
    distances = [((v - vectors["new"]) ** 2).sum(1).mean() for v in (upgraded, vectors["old"])]
    assert distances[0] < 0.5 * distances[1]
    np.testing.assert_allclose(np.linalg.norm(upgraded, axis=1), 1, atol=1e-5)
