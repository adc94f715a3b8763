"""TPIR@FPIR against a loop written from the definition."""

import numpy as np
import pytest

from metrics.identification import OpenSetSearch, open_set_search, tpir_at_fpir
from metrics.ranking import same_label
from tests.metrics import slow


def loop(
    probes: np.ndarray,
    probe_labels: np.ndarray,
    gallery: np.ndarray,
    gallery_labels: np.ndarray,
    fpir: float,
) -> float:
    """Best TPIR over all thresholds whose false-positive identification rate is within `fpir`."""
    tops = []
    for probe, label in zip(probes, probe_labels, strict=True):
        ranked = sorted(
            (slow.distance(probe.tolist(), item.tolist(), "l2"), bool(label == other))
            for item, other in zip(gallery, gallery_labels, strict=True)
        )
        tops.append((*ranked[0], bool(label in gallery_labels)))
    non_mated = [distance for distance, _, mated in tops if not mated]
    mated = [(distance, hit) for distance, hit, is_mated in tops if is_mated]
    best = 0.0
    for threshold in [-1.0, *(distance for distance, _, _ in tops)]:
        if np.mean([distance <= threshold for distance in non_mated]) <= fpir + 1e-12:
            best = max(best, float(np.mean([hit and d <= threshold for d, hit in mated])))
    return best


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fpir", [0.0, 0.01, 0.1, 0.3, 1.0])
def test_agrees_with_the_loop(fpir: float, tied: bool) -> None:
    rng = np.random.default_rng(5)
    gallery_labels = np.arange(30)
    probe_labels = rng.integers(0, 45, 120)
    centres = rng.normal(size=(45, 4))
    probes = centres[probe_labels] + 0.4 * rng.normal(size=(120, 4))
    gallery = centres[:30] + 0.4 * rng.normal(size=(30, 4))
    if tied:
        probes, gallery = probes.round(0), gallery.round(0)
    search = open_set_search(probes, gallery, same_label(probe_labels, gallery_labels))
    assert len(search.non_mated) == np.sum(probe_labels >= 30) > 0
    expected = loop(probes, probe_labels, gallery, gallery_labels, fpir)
    assert 0 <= expected <= 1
    assert tpir_at_fpir(search, fpir) == pytest.approx(expected)


def test_a_hit_needs_rank_1_whatever_the_threshold() -> None:
    search = open_set_search(
        np.array([[0.0], [9.0]]), np.array([[1.0], [2.0]]), same_label([7, 3], [5, 7])
    )
    assert np.isinf(search.hit_distances).all()
    assert tpir_at_fpir(search, 1) == 0


def test_both_kinds_of_probes_are_needed() -> None:
    with pytest.raises(ValueError, match="mated and non-mated probes, got 1 and 0"):
        tpir_at_fpir(OpenSetSearch(np.array([1.0]), np.array([])), 0.1)
