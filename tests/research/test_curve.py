"""Cost and quality of a row, class ranges, and the picture of the curve."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nobackfill.class_folders import list_images
from nobackfill.research.catalogue import list_rows
from nobackfill.research.cells import Cells, add_class_ranges, is_class_known_to_old
from nobackfill.research.presets import DIGITS
from nobackfill.research.results import CostPoint, draw_costs, pareto_front
from nobackfill.research.rows import ComparisonPlace, TrainingRun
from nobackfill.research.serve import exported_session, stored_bytes
from nobackfill.training.networks.transform import FctTransform, UpgradeNetwork


def random_points(seed: int, n: int = 40) -> list[CostPoint]:
    """With ties in cost and in quality."""
    rng = np.random.default_rng(seed)
    return [
        CostPoint(str(i), float(rng.integers(8)), float(rng.integers(8)), rng.integers(10) / 10)
        for i in range(n)
    ]


@pytest.mark.parametrize("cost", ["stored_bytes", "microseconds"])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_beats_a_point_of_the_front(seed: int, cost: str) -> None:
    points = random_points(seed)

    def beaten(point: CostPoint) -> bool:
        mine = getattr(point, cost)
        return any(
            (getattr(o, cost) < mine and o.kept_map >= point.kept_map)
            or (getattr(o, cost) <= mine and o.kept_map > point.kept_map)
            for o in points
        )

    expected = {(getattr(p, cost), p.kept_map) for p in points if not beaten(p)}
    found = [(getattr(p, cost), p.kept_map) for p in pareto_front(points, cost)]
    assert set(found) == expected and len(found) == len(expected)
    assert found == sorted(found)


def test_the_picture_names_the_front_and_is_the_same_each_time() -> None:
    points = [
        CostPoint("plain", 128, 0, 0.5),
        CostPoint("best", 256, 2, 0.9),
        CostPoint("poor", 300, 3, 0.4),
    ]
    image = draw_costs(points, "a title")
    assert image == draw_costs(points, "a title")
    comments = image.decode()
    assert ET.fromstring(image).tag.endswith("svg")
    assert "<!-- best: 256, 90.0 % -->" in comments and "<!-- plain: 0, 50.0 % -->" in comments
    assert "poor" not in comments and "<!-- a title -->" in comments


def test_stored_bytes_count_bits_as_bits(tmp_path: Path) -> None:
    place = ComparisonPlace(DIGITS, DIGITS.splits[0], 0, tmp_path / "data", tmp_path / "runs")
    rows = {row.name: row for row in list_rows(place, ("sizes", "fct_none", "fct_doubled"))}
    sizes = {name: stored_bytes(row) for name, row in rows.items()}
    assert sizes == {
        "fct_none": 128,
        "fct_doubled": 256,
        "fct_simclr": 128 + 128,
        "fct_width_half": 128 + 128,
        "fct_width_double": 128 + 128,
        "fct_side_quarter": 128 + 32,
        "fct_side_half": 128 + 64,
        "fct_side_double": 128 + 256,
        "fct_binary_simclr": 128 + 4,
        "fct_bits_double": 128 + 8,
        "fct_bits_fourfold": 128 + 16,
    }


@pytest.mark.long
@pytest.mark.parametrize("int8", [False, True])
def test_the_exported_upgrade_computes_what_torch_computes(int8: bool) -> None:
    torch.manual_seed(0)
    h = FctTransform(6, 5, 7, projection_dim=16, inner_dim=32, unit_norm=True)
    upgrade = UpgradeNetwork(h, reads_side=True).eval()
    old, side = torch.randn(20, 6), torch.randn(20, 5)
    session = exported_session(upgrade, 6, 5, int8=int8)
    (found,) = session.run(["upgraded"], {"embedding": old.numpy(), "side": side.numpy()})
    expected = upgrade(old, side).embedding.detach().numpy()
    assert np.abs(found - expected).max() < (0.05 if int8 else 1e-5)
    assert (np.abs(found - expected).max() > 1e-4) == int8


def test_ranges_leave_the_other_classes_out(tmp_path: Path) -> None:
    for part, names in (("train", "abcd"), ("test", "abcd")):
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "0.png").touch()
            (tmp_path / part / name / "1.png").touch()
    place = ComparisonPlace(DIGITS, DIGITS.splits[0], 0, tmp_path, tmp_path / "runs")
    row = list_rows(place, ("independent",))[0]
    of_two = replace(row, old_run=TrainingRun({**row.old_run.config_values, "classes": 2}))
    known = is_class_known_to_old(of_two, list_images(tmp_path / "test"))
    assert known.tolist() == [True] * 4 + [False] * 4
    values = np.array([1.0, np.nan, 0.5, 0.0, 0.25, 0.25, 1.0, np.nan])
    figures = {cell: {"map": values} for cell in ("new/new", "new/served")}
    cells = Cells(figures, {"cka": 0.5}, np.repeat(["0", "1", "2", "3"], 2))
    ranged = add_class_ranges(cells, known).figures_by_query["new/new, new classes"]["map"]
    assert np.isnan(ranged[:4]).all()
    np.testing.assert_array_equal(ranged[4:], values[4:])
    assert add_class_ranges(cells, np.zeros(8, bool)) is cells
