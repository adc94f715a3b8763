"""TPIR@FPIR against a loop written from the definition."""

import numpy as np
import pytest

from nobackfill.metrics.identification import OpenSetSearch, open_set_search, tpir_at_fpir
from nobackfill.metrics.ranking import Relevance, relevance_by_label
from tests.metrics import slow


def loop(probes: np.ndarray, gallery: np.ndarray, relevance: Relevance, fpir: float) -> float:
    """Best TPIR over all thresholds whose false-positive identification rate is within `fpir`."""
    tops = []
    for probe, mates, ignored in zip(probes, relevance.relevant, relevance.ignored, strict=True):
        ranked = sorted(
            (slow.distance(probe.tolist(), item.tolist(), "l2"), position in mates)
            for position, item in enumerate(gallery)
            if position not in ignored
        )
        tops.append((*ranked[0], any(is_mate for _, is_mate in ranked)))
    non_mated = [distance for distance, _, mated in tops if not mated]
    mated = [(distance, hit) for distance, hit, is_mated in tops if is_mated]
    best = 0.0
    for threshold in [-1.0, *(distance for distance, _, _ in tops)]:
        if np.mean([distance <= threshold for distance in non_mated]) <= fpir + 1e-12:
            best = max(best, float(np.mean([hit and d <= threshold for d, hit in mated])))
    return best


def people(tied: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Probes [120, 4] of 45 people, their labels, gallery [40, 4] of the first 30, its labels."""
    rng = np.random.default_rng(5)
    gallery_labels = np.concatenate((np.arange(30), rng.integers(0, 30, 10)))
    probe_labels = rng.integers(0, 45, 120)
    centres = rng.normal(size=(45, 4))
    probes = centres[probe_labels] + 0.4 * rng.normal(size=(120, 4))
    gallery = centres[gallery_labels] + 0.4 * rng.normal(size=(40, 4))
    if tied:
        probes, gallery = probes.round(0), gallery.round(0)
    return probes, probe_labels, gallery, gallery_labels


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fpir", [0.0, 0.01, 0.1, 0.3, 1.0])
def test_agrees_with_the_loop(fpir: float, tied: bool) -> None:
    probes, probe_labels, gallery, gallery_labels = people(tied)
    relevance = relevance_by_label(probe_labels, gallery_labels)
    search = open_set_search(probes, gallery, relevance)
    assert len(search.non_mated_distances) == np.sum(probe_labels >= 30) > 0
    expected = loop(probes, gallery, relevance, fpir)
    assert 0 <= expected <= 1
    assert tpir_at_fpir(search, fpir) == pytest.approx(expected)


@pytest.mark.parametrize("fpir", [0.0, 0.1, 0.3])
def test_ignored_items_are_neither_answers_nor_mates(fpir: float) -> None:
    """Of every probe the item that stands first is taken out: a mate of some, a stranger of
    others; who loses the only mate is non-mated."""
    probes, probe_labels, gallery, gallery_labels = people(tied=False)
    plain = relevance_by_label(probe_labels, gallery_labels)
    first = [np.argmin(((gallery - probe) ** 2).sum(1), keepdims=True) for probe in probes]
    relevance = Relevance(plain.relevant, first)
    search = open_set_search(probes, gallery, relevance)
    lost = [bool(len(m)) and set(m) <= set(i) for m, i in zip(plain.relevant, first, strict=True)]
    assert len(search.non_mated_distances) == np.sum(probe_labels >= 30) + sum(lost)
    assert 0 < sum(lost) < len(search.mated_distances)
    expected = loop(probes, gallery, relevance, fpir)
    assert expected != loop(probes, gallery, plain, fpir)
    assert tpir_at_fpir(search, fpir) == pytest.approx(expected)


def test_a_hit_needs_rank_1_whatever_the_threshold() -> None:
    search = open_set_search(
        np.array([[0.0], [9.0]]), np.array([[1.0], [2.0]]), relevance_by_label([7, 3], [5, 7])
    )
    assert np.isinf(search.mated_distances).all()
    assert tpir_at_fpir(search, 1) == 0


def test_both_kinds_of_probes_are_needed() -> None:
    with pytest.raises(ValueError, match="one non-mated probe, got 1 and 0"):
        tpir_at_fpir(OpenSetSearch(np.array([1.0]), np.array([])), 0.1)
