"""Upgrade methods on imagined features: each learns, is read back whole, and says what it cannot
do.
"""

import dataclasses
from pathlib import Path

import pytest
import torch

from nobackfill.errors import ConfigurationError
from nobackfill.training.loop.loop import ProgressBars
from nobackfill.training.loop.run import read_checkpoint
from nobackfill.training.loop.upgrade import fit_upgrade, load_upgrade
from nobackfill.training.method import UpgradeInputs
from nobackfill.training.methods import UPGRADE_METHODS, upgrade_method
from nobackfill.training.methods.forward import new_classifier
from nobackfill.training.methods.rbt import RbtOptions, ResidualBottlenecks
from nobackfill.training.methods.residual import ResidualMap, ResidualObjective
from nobackfill.training.methods.soft_prototypes import SoftPrototypes
from nobackfill.training.networks.transform import UpgradeNetwork
from tests.training.methods import features

OPTIONS: dict[str, dict[str, int]] = {"soft_prototypes": {"classes": 5}, "low_rank": {"rank": 5}}
DIVERGENCES = ("kl", "reversed_kl", "lce")
# Of the methods that map side-information.
FEW = (
    "fct", "affine", pytest.param("fastfill", marks=pytest.mark.numerics),
    pytest.param("residual", marks=pytest.mark.numerics),
)  # fmt: skip


def trained(inputs: UpgradeInputs) -> UpgradeNetwork:
    """Train, and read the upgrade back from its checkpoint."""
    checkpoint = fit_upgrade(inputs, ProgressBars(visible=False), {})
    again = load_upgrade(read_checkpoint(inputs.config.run_dir))
    live = load_upgrade(checkpoint)
    view = features.rows(9, 5, 1)
    out, expected = (u(view["old"][:, 0], view["side"][:, 0]) for u in (again, live))
    assert torch.equal(out.embedding, expected.embedding)
    return again


def relative_error(upgrade: UpgradeNetwork, unit: bool) -> float:
    """Squared error on fresh images over the spread of the truth; 1 = no better than the mean."""
    view = {k: v[:, 0] for k, v in features.rows(300, 7, 1, unit).items() if v.ndim == 3}
    upgraded = upgrade(view["old"], view["side"]).embedding
    spread = (view["new"] - view["new"].mean(0)).square().sum()
    return float((upgraded - view["new"]).square().sum() / spread)


def accuracy(upgrade: UpgradeNetwork, inputs: UpgradeInputs, unit: bool) -> float:
    """Share of fresh images that the new head still recognises after the upgrade."""
    rows = features.rows(300, 7, 1, unit)
    assert inputs.new_head is not None
    upgraded = upgrade(rows["old"][:, 0], rows["side"][:, 0]).embedding
    return float((inputs.new_head.logits(upgraded).argmax(1) == rows["labels"]).float().mean())


# The tests below train a few methods without unit norms.
@pytest.mark.parametrize("unit", [pytest.param(False, marks=pytest.mark.numerics), True])
@pytest.mark.parametrize("name", sorted(UPGRADE_METHODS))
def test_every_method_learns_and_is_read_back(name: str, unit: bool, tmp_path: Path) -> None:
    inputs = features.inputs(
        tmp_path / "run", unit=unit, method=name, options=OPTIONS.get(name, {})
    )
    upgrade = trained(inputs)
    if name not in DIVERGENCES:
        limit = 0.85 if name in ("procrustes", "rbt", "soft_prototypes") else 0.6
        assert relative_error(upgrade, unit) < limit
    if name != "procrustes":
        assert accuracy(upgrade, inputs, unit) > 0.6
    if unit:
        rows = features.rows(20, 8, 1, unit)
        upgraded = upgrade(rows["old"][:, 0], rows["side"][:, 0]).embedding
        torch.testing.assert_close(upgraded.norm(dim=1), torch.ones(20))


@pytest.mark.parametrize("name", FEW)
def test_side_information_is_mapped_where_the_configuration_asks(name: str, tmp_path: Path) -> None:
    upgrade = trained(
        features.inputs(
            tmp_path / "run", method=name, maps_side=True, side="maps", new_side=tmp_path
        )
    )
    rows = features.rows(300, 7, 1)
    side = upgrade(rows["old"][:, 0], rows["side"][:, 0]).side
    truth = rows["new_side"][:, 0]
    assert side is not None
    assert (side - truth).square().sum() < 0.5 * (truth - truth.mean(0)).square().sum()


@pytest.mark.parametrize("name", FEW)
def test_side_information_is_worth_something_and_may_stand_alone(name: str, tmp_path: Path) -> None:
    both = trained(features.inputs(tmp_path / "both", method=name))
    without = features.inputs(tmp_path / "without", method=name, reads_side=False)
    fit_upgrade(without, ProgressBars(visible=False), {})
    alone = load_upgrade(read_checkpoint(tmp_path / "without"))
    side_only = trained(features.inputs(tmp_path / "side", method=name, reads_embedding=False))
    error = relative_error(both, False)
    assert relative_error(alone, False) > 1.15 * error
    assert relative_error(side_only, False) > 1.15 * error
    view = features.rows(9, 5, 1)
    one, other = (side_only(e, view["side"][:, 0]).embedding for e in (view["old"][:, 0], None))
    assert torch.equal(one, other)


def test_affine_is_the_least_squares_solution(tmp_path: Path) -> None:
    inputs = features.inputs(tmp_path / "run", method="affine")
    upgrade = trained(inputs)
    x = (
        torch.cat((inputs.training_features["old"], inputs.training_features["side"]), 2)
        .flatten(0, 1)
        .double()
    )
    ones = torch.cat((x, torch.ones(len(x), 1, dtype=torch.float64)), 1)
    y = inputs.training_features["new"].flatten(0, 1).double()
    expected = ones @ torch.linalg.lstsq(ones, y).solution
    found = upgrade(x[:, :6].float(), x[:, 6:].float()).embedding
    assert (found - expected).abs().max() < 0.05 * y.abs().max()


def noisy(rows: dict[str, torch.Tensor], seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same with new embeddings that noise makes hard to foresee wherever side[0] > 0, and
    where.
    """
    hard = rows["side"][..., :1] > 0
    noise = torch.randn(rows["new"].shape, generator=torch.Generator().manual_seed(seed))
    return {**rows, "new": rows["new"] + 1.5 * noise * hard}, hard[:, 0, 0]


def test_fastfills_variance_finds_the_hard_images_and_is_calibrated(tmp_path: Path) -> None:
    plain = features.inputs(tmp_path / "run", method="fastfill", epochs=20)
    train, held_out = (
        noisy(dict(plain.training_features), 1)[0],
        noisy(dict(plain.held_out_features), 2)[0],
    )
    inputs = dataclasses.replace(plain, training_features=train, held_out_features=held_out)
    upgrade = trained(inputs)
    rows, hard = noisy(features.rows(1000, 9, 1), 3)
    upgraded = upgrade(rows["old"][:, 0], rows["side"][:, 0])
    residual = (upgraded.embedding - rows["new"][:, 0]).square().mean(1)
    variance = upgraded.log_variance
    assert variance is not None
    assert variance[hard].mean() > variance[~hard].mean() + 1
    assert 0.6 < float((residual / variance.exp()).mean()) < 1.6


@pytest.mark.parametrize("unit", [False, True])
def test_a_published_model_gets_a_classifier_of_class_averages(unit: bool, tmp_path: Path) -> None:
    inputs = features.inputs(tmp_path, unit=unit, method="fastfill")
    headless = UpgradeInputs(
        inputs.config,
        inputs.shape,
        inputs.class_names,
        inputs.training_features,
        inputs.held_out_features,
        None,
        (),
    )
    classifier, labels = new_classifier(headless)
    assert labels.tolist() == [0, 1, 2, 3, 4]
    rows = features.rows(300, 7, 1, unit)
    new = rows["new"][:, 0]
    means = torch.stack([new[rows["labels"] == c].mean(0) for c in range(5)])
    nearest = torch.cdist(new, means).argmin(1)
    agreed = (classifier.logits(new).argmax(1) == nearest).float().mean()
    assert agreed > 0.9


def test_residual_starts_at_the_affine_solution(tmp_path: Path) -> None:
    inputs = features.inputs(tmp_path / "run", method="residual")
    made = features.objective(inputs)
    assert isinstance(made, ResidualObjective) and isinstance(made.upgrade.h, ResidualMap)
    affine = trained(features.inputs(tmp_path / "affine", method="affine"))
    rows = features.rows(50, 4, 1)
    view = rows["old"][:, 0], rows["side"][:, 0]
    made.upgrade.eval()
    apart = (made.upgrade(*view).embedding - affine(*view).embedding).square().sum()
    assert apart < 0.02 * affine(*view).embedding.square().sum()
    assert made.upgrade.h.embedding is not None
    assert not made.upgrade.h.embedding.rotate.weight.requires_grad


def test_ours_reads_no_labels(tmp_path: Path) -> None:
    found = []
    for name in ("labels", "others"):
        inputs = features.inputs(tmp_path / name, method="residual", epochs=2)
        if name == "others":
            other = {
                **inputs.training_features,
                "labels": inputs.training_features["labels"].flip(0).roll(3),
            }
            inputs = dataclasses.replace(inputs, training_features=other)
        found.append(fit_upgrade(inputs, ProgressBars(visible=False), {}).tensors)
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_soft_prototypes_print_class_averages_alone(tmp_path: Path) -> None:
    inputs = features.inputs(tmp_path / "run", method="soft_prototypes", options={"classes": 5})
    upgrade = trained(inputs)
    assert isinstance(upgrade.h, SoftPrototypes)
    rows = features.rows(100, 4, 1)
    upgraded = upgrade(rows["old"][:, 0], rows["side"][:, 0]).embedding
    # Every output is a convex mix of five points: at most four dimensions.
    singular = torch.linalg.svdvals(upgraded - upgraded.mean(0))
    assert singular[4] < 1e-4 * singular[0]
    with pytest.raises(ConfigurationError, match=r"expected the option classes: 5, .* got 4"):
        features.objective(
            features.inputs(tmp_path, method="soft_prototypes", options={"classes": 4})
        )


def test_what_a_method_cannot_do_is_refused(tmp_path: Path) -> None:
    def build(name: str, **changes: object) -> None:
        inputs = features.inputs(tmp_path, method=name, **changes)  # type: ignore[arg-type]
        upgrade_method(name).build_network(inputs.config, inputs.shape)

    with pytest.raises(ConfigurationError, match="reads_embedding: true"):
        build("procrustes", reads_embedding=False)
    with pytest.raises(
        ConfigurationError, match=r"cannot compute new side-information .* use method: affine"
    ):
        build("low_rank", maps_side=True)
    with pytest.raises(ConfigurationError, match="rank of 1 to 7, the smallest dimension, got 8"):
        build("low_rank", options={"rank": 8})
    with pytest.raises(ConfigurationError, match=r"rank: Extra inputs .* has no options"):
        build("affine", options={"rank": 8})
    with pytest.raises(ConfigurationError, match="the options blocks, bottleneck"):
        build("rbt", options={"width": 8})
    with pytest.raises(ConfigurationError, match="classes: Field required"):
        build("soft_prototypes")
    with pytest.raises(
        ConfigurationError, match="unknown upgrade method 'afine'; expected one of affine"
    ):
        upgrade_method("afine")


def test_rbts_bottleneck_is_half_of_the_space_unless_it_is_told() -> None:
    def widths(**options: int) -> list[int]:
        h = ResidualBottlenecks(12, 8, RbtOptions(**options), unit_norm=False)
        return [m.out_features for m in h.modules() if isinstance(m, torch.nn.Linear)]

    assert widths() == [8, *(3 * [4, 8])]
    assert widths(blocks=1, bottleneck=3) == [8, 3, 8]
