"""TAR@FAR against scikit-learn's ROC curve and a loop over every threshold."""

import numpy as np
import pytest
from sklearn.metrics import roc_curve

from nobackfill.metrics.verification import tar_at_far, threshold_at_error_rate

RATES = [0.0, 0.001, 0.01, 0.05, 0.1, 0.29, 0.5, 1.0]


def pairs(seed: int, decimals: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances of 200 genuine and 1,000 impostor pairs; few decimals make many ties."""
    rng = np.random.default_rng(seed)
    return rng.normal(1, 0.4, 200).round(decimals), rng.normal(2, 0.5, 1000).round(decimals)


def loop(genuine: np.ndarray, impostor: np.ndarray, far: float) -> float:
    """Try every threshold between the observed distances."""
    best = 0.0
    values = sorted({*genuine, *impostor})
    for threshold in [-1.0, *values]:
        false_accepts = sum(d <= threshold for d in impostor) / len(impostor)
        if false_accepts <= far + 1e-12:
            best = max(best, sum(d <= threshold for d in genuine) / len(genuine))
    return best


@pytest.mark.parametrize("decimals", [1, 6])
@pytest.mark.parametrize("far", RATES)
def test_agrees_with_scikit_learn(far: float, decimals: int) -> None:
    genuine, impostor = pairs(0, decimals)
    labels = np.r_[np.ones(200), np.zeros(1000)]
    fpr, tpr, _ = roc_curve(labels, -np.r_[genuine, impostor], drop_intermediate=False)
    assert tar_at_far(genuine, impostor, far) == pytest.approx(tpr[fpr <= far + 1e-12].max())


@pytest.mark.parametrize("far", RATES)
def test_agrees_with_a_loop_over_thresholds(far: float) -> None:
    genuine, impostor = pairs(1, 1)
    genuine, impostor = genuine[:40], impostor[:100]
    assert tar_at_far(genuine, impostor, far) == pytest.approx(loop(genuine, impostor, far))


def test_tied_impostors_come_in_together_or_not_at_all() -> None:
    impostor = np.array([1.0, 2.0, 2.0, 2.0, 3.0])
    assert threshold_at_error_rate(impostor, 0.2) == 2
    assert threshold_at_error_rate(impostor, 0.6) == 2
    assert threshold_at_error_rate(impostor, 0.8) == 3
    assert threshold_at_error_rate(impostor, 1) == np.inf


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0 genuine and 1 impostor pairs"):
        tar_at_far(np.array([]), np.array([1.0]), 0.1)
    with pytest.raises(ValueError, match="rate of 0 to 1"):
        tar_at_far(np.array([1.0]), np.array([1.0]), 1.5)
