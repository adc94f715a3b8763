"""Gains, the two criteria and flips, with the papers' own figures where they print them."""

import numpy as np
import pytest

from nobackfill.metrics.classes import mean_by_class, worst_class
from nobackfill.metrics.compatibility import (
    closed_gap_share,
    degradation,
    is_compatible,
    negative_flips,
    retention,
    strict_criterion,
    update_gain,
    upgrade_gain,
)
from nobackfill.metrics.distances import Metric
from nobackfill.metrics.ranking import relevance_by_label
from tests.metrics import slow


def test_update_gain_is_that_of_bcts_table_1() -> None:
    # TAR@FAR=1e-4: lower bound 77.86, upper bound 86.96. The paper prints 26.26 % for BCT.
    assert update_gain(0.8025, 0.7786, 0.8696) == pytest.approx(0.2626, abs=1e-4)
    # TPIR@FPIR=1e-2: 59.34 and 76.88; 64.77 % for synthesised weights.
    assert update_gain(0.7070, 0.5934, 0.7688) == pytest.approx(0.6477, abs=1e-4)


def test_update_gain_is_not_defined_where_the_criterion_fails() -> None:
    assert update_gain(0.77, 0.78, 0.87) is None
    assert update_gain(0.78, 0.78, 0.87) is None
    assert update_gain(0.9, 0.8, 0.8) is None
    assert not is_compatible(0.78, 0.78) and is_compatible(0.79, 0.78)


def test_the_two_deltas_are_those_of_dmus_table_1() -> None:
    # GLDv2, 30 % -> 100 % data: old 18.93, oracle 25.58, DMU 25.00 / 22.56, BCT 24.55 / 21.12.
    assert upgrade_gain(22.56, 18.93) == pytest.approx(0.1918, abs=1e-4)
    assert degradation(25.00, 25.58) == pytest.approx(0.0227, abs=1e-4)
    assert upgrade_gain(21.12, 18.93) == pytest.approx(0.1157, abs=1e-4)
    assert degradation(24.55, 25.58) == pytest.approx(0.0403, abs=1e-4)
    with pytest.raises(ValueError, match="another figure is divided by this one"):
        upgrade_gain(0.5, 0)


def test_shares_of_the_new_model() -> None:
    # FCT Table 1: old 46.5, served 65.0, new 68.1.
    assert retention(0.65, 0.681) == pytest.approx(0.9545, abs=1e-4)
    assert closed_gap_share(0.65, 0.465, 0.681) == pytest.approx(0.8565, abs=1e-4)
    closed = closed_gap_share(0.4, 0.465, 0.681)
    assert closed is not None and closed < 0
    assert closed_gap_share(0.5, 0.6, 0.6) is None


def test_negative_flips_counts_only_what_was_right() -> None:
    before = np.array([1, 1, 1, 0, 0, np.nan])
    after = np.array([1, 0, 0, 1, 0, np.nan])
    assert negative_flips(before, after) == 0.4
    assert negative_flips(after, before) == 0.2
    assert negative_flips(before, before) == 0
    with pytest.raises(ValueError, match="same queries"):
        negative_flips(before, np.ones(6))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_the_strict_criterion_agrees_with_a_loop(
    metric: Metric, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`own`: the first queries are images of the gallery, and not compared with themselves."""
    rng = np.random.default_rng(0)
    new, old, gallery = (rng.normal(size=(n, 4)) for n in (23, 23, 31))
    query_labels, gallery_labels = rng.integers(0, 3, 23), rng.integers(0, 3, 31)
    kept = {True: 0, False: 0}
    pairs = {True: 0, False: 0}
    for i in range(23):
        for j in range(31):
            if own and i == j:
                continue
            crossed = slow.distance(new[i].tolist(), gallery[j].tolist(), metric)
            before = slow.distance(old[i].tolist(), gallery[j].tolist(), metric)
            same = bool(query_labels[i] == gallery_labels[j])
            pairs[same] += 1
            kept[same] += crossed <= before if same else crossed >= before
    monkeypatch.setattr("nobackfill.metrics.distances.BLOCK_DISTANCES", 5 * 31)
    images = (np.arange(23), np.arange(31)) if own else (None, None)
    relevance = relevance_by_label(query_labels, gallery_labels, *images)
    ours = strict_criterion(new, old, gallery, relevance, metric)
    assert ours.different_class_share == pytest.approx(kept[False] / pairs[False])
    assert ours.same_class_share == pytest.approx(kept[True] / pairs[True])
    # BCT's remark: the old model itself satisfies Eq. (1).
    same_model = strict_criterion(old, old, gallery, relevance, metric)
    assert same_model.different_class_share == 1 and same_model.same_class_share == 1


def test_classes_worst_and_ranges() -> None:
    values = np.array([1.0, 0.0, 0.5, np.nan, 0.75])
    labels = [0, 0, 1, 1, 2]
    assert mean_by_class(values, labels) == {0: 0.5, 1: 0.5, 2: 0.75}
    assert worst_class(np.array([1.0, 0.2]), [4, 9]) == (9, 0.2)
    with pytest.raises(ValueError, match="one for each query"):
        mean_by_class(values, [0, 1])
