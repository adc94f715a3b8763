from pathlib import Path

import pytest
import torch
from torch import nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.config import UpgradeConfig
from nobackfill.training.method import UpgradeShape
from nobackfill.training.methods import upgrade_method
from nobackfill.training.methods.fct import build_fct, draw_view, squared_l2
from nobackfill.training.networks.transform import FctTransform
from tests.training.life import config_of


def transform(old_dim: int, side_dim: int, *, unit: bool = False) -> FctTransform:
    torch.manual_seed(0)
    return FctTransform(
        old_dim, side_dim, 128, projection_dim=256, inner_dim=2048, unit_norm=unit
    ).eval()


def test_the_architecture_is_that_of_appendix_d1() -> None:
    linear = [
        (m.in_features, m.out_features)
        for m in transform(128, 64).modules()
        if isinstance(m, nn.Linear)
    ]
    projections = [(128, 256), (256, 256), (64, 256), (256, 256)]
    assert linear == [*projections, (512, 2048), (2048, 2048), (2048, 128)]
    kinds = [type(m) for m in transform(128, 64).mixer]
    block = [nn.Linear, nn.BatchNorm1d, nn.ReLU]
    assert kinds == [*block, *block, nn.Linear]
    # FCT Table 11's 5.7 M multiply-accumulates are those of the linear layers.
    assert sum(a * b for a, b in [(128, 256), (256, 256)] * 2 + linear[4:]) == pytest.approx(
        5.7e6, rel=0.02
    )


def test_a_branch_left_out_equals_the_zero_vector() -> None:
    """FCT feeds zeros where there is no side-information: the branch is then a constant."""
    whole, without = transform(16, 8), transform(16, 0)
    constant = whole.side_projection(torch.zeros(1, 8))  # type: ignore[misc]
    with torch.no_grad():
        without.embedding_projection.load_state_dict(whole.embedding_projection.state_dict())  # type: ignore[union-attr]
        state = whole.mixer.state_dict()
        first = state["0.weight"]
        state["0.bias"] = state["0.bias"] + (constant @ first[:, 256:].t())[0]
        state["0.weight"] = first[:, :256]
        without.mixer.load_state_dict(state)
        embedding = torch.randn(4, 16)
        expected = whole(embedding, torch.zeros(4, 8))
        assert torch.allclose(without(embedding, None), expected, atol=1e-5)


def test_raw_training_is_the_authors_mse_and_serves_unit_vectors() -> None:
    """The option `raw` of fct: lengths count in training only, and not in other methods."""
    shape = UpgradeShape(16, 8, 12, 0, True)
    values: dict[str, object] = {"old": "a", "new": "b", "projection_dim": 8, "inner_dim": 8}
    embedding, side = torch.randn(6, 16), torch.randn(6, 8)
    outputs = {}
    for raw in (True, False):
        config = config_of("upgrade", Path("r"), Path("i"), **values, options={"raw": raw})
        assert isinstance(config, UpgradeConfig)
        torch.manual_seed(0)
        upgrade = upgrade_method("fct").build_network(config, shape)
        outputs[raw] = upgrade.train()(embedding, side).embedding
        # In eval mode, as exported, both are unit vectors.
        served = upgrade.eval()(embedding, side).embedding
        assert torch.allclose(served.norm(dim=1), torch.ones(6), atol=1e-5)
    assert not torch.allclose(outputs[True].norm(dim=1), torch.ones(6), atol=1e-2)
    assert torch.allclose(nn.functional.normalize(outputs[True]), outputs[False], atol=1e-5)


def test_an_unknown_option_of_fct_is_refused() -> None:
    config = config_of("upgrade", Path("r"), Path("i"), old="a", new="b", options={"row": True})
    assert isinstance(config, UpgradeConfig)
    with pytest.raises(ConfigurationError, match="row"):
        upgrade_method("fct").build_network(config, UpgradeShape(4, 0, 4, 0, True))


def test_unit_outputs_have_norm_one() -> None:
    embedding, side = torch.randn(4, 16), torch.randn(4, 8)
    with torch.no_grad():
        norms = transform(16, 8, unit=True)(embedding, side).norm(dim=1)
        assert torch.allclose(norms, torch.ones(4), atol=1e-5)
        assert not torch.allclose(transform(16, 8)(embedding, side).norm(dim=1), torch.ones(4))


@pytest.mark.parametrize(
    ("keys", "shape", "reads_side", "writes_side"),
    [
        ({}, UpgradeShape(16, 8, 12, 6, True), True, True),
        ({}, UpgradeShape(16, 0, 12, 0, True), False, False),
        ({"reads_embedding": False}, UpgradeShape(16, 8, 12, 0, False), True, False),
    ],
)
def test_h_and_g_follow_the_shape(
    keys: dict[str, object], shape: UpgradeShape, reads_side: bool, writes_side: bool
) -> None:
    config = config_of("upgrade", "r", "i", old="a", new="b", **keys)  # type: ignore[arg-type]
    assert isinstance(config, UpgradeConfig)
    upgrade = build_fct(config, shape).eval()
    assert upgrade.reads_side == reads_side
    result = upgrade(torch.randn(3, 16), torch.randn(3, 8) if reads_side else None)
    assert result.embedding.shape == (3, 12)
    assert (result.side is not None) == writes_side
    if result.side is not None:
        assert result.side.shape == (3, 6)


def test_psi_alone_ignores_the_embedding() -> None:
    config = config_of("upgrade", "r", "i", old="a", new="b", reads_embedding=False)  # type: ignore[arg-type]
    assert isinstance(config, UpgradeConfig)
    upgrade = build_fct(config, UpgradeShape(16, 8, 12, 0, False)).eval()
    side = torch.randn(3, 8)
    first, second = (upgrade(torch.randn(3, 16), side).embedding for _ in range(2))
    assert torch.equal(first, second)


def test_the_loss_is_the_squared_distance() -> None:
    predicted, target = torch.randn(5, 4), torch.randn(5, 4)
    slow = sum(
        sum((p - t) ** 2 for p, t in zip(a, b, strict=True))
        for a, b in zip(predicted.tolist(), target.tolist(), strict=True)
    )
    assert float(squared_l2(predicted, target)) == pytest.approx(slow / 5, rel=1e-5)


def test_a_drawn_view_is_the_same_in_every_feature() -> None:
    number = torch.arange(20.0).reshape(5, 4, 1)
    batch = {"old": number, "new": number + 100, "labels": torch.arange(5)}
    drawn = draw_view(batch, 4)
    assert torch.equal(drawn["new"] - 100, drawn["old"])
    assert torch.equal(drawn["old"][:, 0] // 4, torch.arange(5.0))
    assert torch.equal(drawn["labels"], torch.arange(5))


def test_only_views_of_one_image_keep_its_label() -> None:
    """The first three of four views have labels; with `both`, each row has one of either kind."""
    number = torch.arange(400.0).reshape(100, 4, 1)
    batch = {"old": number, "labels": torch.arange(100), "rows": torch.arange(100)}
    drawn = draw_view(batch, 3)
    labelled = drawn["old"][:, 0] % 4 < 3
    assert 50 < labelled.sum() < 100
    assert torch.equal(drawn["labels"], torch.where(labelled, torch.arange(100), -1))
    both = draw_view(batch, 3, draws_two=True)
    assert torch.equal(both["old"][:, 0] // 4, torch.arange(100.0).repeat(2))
    assert torch.equal(both["rows"], torch.arange(100).repeat(2))
    assert torch.equal(both["labels"], torch.cat((torch.arange(100), torch.full((100,), -1))))
    assert set((both["old"][:100, 0] % 4).tolist()) == {0, 1, 2}
    assert set((both["old"][100:, 0] % 4).tolist()) == {3}
