"""`keep_best`: the epoch that held-out images choose, on features that h can learn by heart."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.loop.loop import ProgressBars
from nobackfill.training.loop.run import STATS, read_checkpoint, read_finished
from nobackfill.training.loop.upgrade import fit_upgrade, load_upgrade
from nobackfill.training.method import UpgradeInputs
from nobackfill.training.methods.fct import BestEpoch
from tests.training.methods import features
from tests.training.test_loop import StopAfter


def overfitting(run_dir: Path, **changes: Any) -> UpgradeInputs:
    """Few images with noise in their new embeddings: the last epoch is not the best one."""
    inputs = features.inputs(run_dir, epochs=30, batch_size=20, lr=0.01, log_every=1, **changes)
    few = {name: tensor[:40] for name, tensor in inputs.training_features.items()}
    noise = torch.randn(few["new"].shape, generator=torch.Generator().manual_seed(5))
    return replace(inputs, training_features={**few, "new": few["new"] + 1.5 * noise})


def held_out_distance(run_dir: Path, held_out: dict[str, Tensor]) -> float:
    """Mean squared distance of the finished upgrade on the held-out images, image by image."""
    upgrade = load_upgrade(read_finished(run_dir))
    total = 0.0
    for row in range(len(held_out["labels"])):
        one = {k: held_out[k][row] for k in ("old", "side", "new")}
        output = upgrade(one["old"], one["side"]).embedding[0].tolist()
        total += sum((a - b) ** 2 for a, b in zip(output, one["new"][0].tolist(), strict=True))
    return total / len(held_out["labels"])


@pytest.mark.parametrize("method", ["fct", "residual"])
def test_the_best_epoch_is_kept(method: str, tmp_path: Path) -> None:
    quiet = ProgressBars(visible=False)
    last = overfitting(tmp_path / "last", method=method)
    best = overfitting(tmp_path / "best", method=method, keep_best=True)
    for inputs in (last, best):
        fit_upgrade(inputs, quiet, {})
    lines = [json.loads(x) for x in (tmp_path / "best" / STATS).read_text("utf-8").splitlines()]
    logged = [line["held_out_distance"] for line in lines]
    kept, ended = (
        held_out_distance(tmp_path / name, dict(best.held_out_features))
        for name in ("best", "last")
    )
    # Measured before each epoch; the weights after the last one are no candidate left out.
    assert kept == pytest.approx(min(*logged, ended), rel=1e-4)
    assert kept < 0.95 * ended
    assert (
        read_finished(tmp_path / "best").tensors.keys()
        == read_finished(tmp_path / "last").tensors.keys()
    )


@pytest.mark.long
def test_a_resumed_training_knows_the_best_epoch_before_its_end(tmp_path: Path) -> None:
    quiet = ProgressBars(visible=False)
    keys = {"keep_best": True, "checkpoint_every": 1}
    fit_upgrade(overfitting(tmp_path / "whole", **keys), quiet, {})
    broken = overfitting(tmp_path / "broken", **keys)
    with pytest.raises(KeyboardInterrupt):
        fit_upgrade(broken, StopAfter(25), {})
    # Beyond the best epoch: what is kept comes from before the kill.
    found = read_checkpoint(tmp_path / "broken").tensors["best.least"]
    fit_upgrade(broken, quiet, {})
    whole, resumed = (read_finished(tmp_path / name).tensors for name in ("whole", "broken"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert held_out_distance(tmp_path / "broken", dict(broken.held_out_features)) == pytest.approx(
        float(found), rel=1e-4
    )


def test_the_least_figure_wins_and_ties_keep_the_first() -> None:
    network = nn.Linear(1, 1, bias=False)
    best = BestEpoch(network)
    for weight, figure in ((1.0, 0.5), (2.0, 0.25), (3.0, 0.25), (4.0, 0.75)):
        nn.init.constant_(network.weight, weight)
        best.keep_if_better(network, figure)
    best.restore(network)
    assert network.weight.tolist() == [[2.0]] and float(best.least) == 0.25


def test_what_has_no_best_epoch_is_refused(tmp_path: Path) -> None:
    quiet = ProgressBars(visible=False)
    inputs = features.inputs(tmp_path / "a", keep_best=True)
    with pytest.raises(ConfigurationError, match="no held-out image"):
        fit_upgrade(replace(inputs, held_out_features={}), quiet, {})
    with pytest.raises(
        ConfigurationError, match="affine is solved in closed form and has no epochs"
    ):
        fit_upgrade(features.inputs(tmp_path / "b", method="affine", keep_best=True), quiet, {})
