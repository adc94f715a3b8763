import random

import pytest
from sklearn.metrics import average_precision_score

from demo.ranking import average_precision, compute_quality, measure_agreement


@pytest.mark.parametrize("seed", range(20))
def test_average_precision_agrees_with_scikit_learn(seed: int) -> None:
    chance = random.Random(seed)
    matches = [chance.random() < 0.3 for _ in range(50)] + [True]
    scores = [-rank for rank in range(len(matches))]
    assert average_precision(matches, sum(matches)) == pytest.approx(
        average_precision_score(matches, scores)
    )


def test_quality_of_a_ranking_worked_out_by_hand() -> None:
    items = ["a/1", "a/2", "b/1", "b/2", "b/3", "b/4", "b/5", "b/6"]
    answers = {
        # found at ranks 1 and 3: (1 + 2/3) / 2
        "q/a/x": ["a/1", "b/1", "a/2", *items[3:]],
        # the other class first, five times: not among the first five, found at 6 and never again
        "q/a/y": ["b/1", "b/2", "b/3", "b/4", "b/5", "a/1"],
        # a class that the gallery does not hold
        "q/c/z": items,
    }
    expected = (5 / 6 + 1 / 12) / 2
    assert compute_quality(answers, items) == {
        "cmc1": 50.0,
        "cmc5": 50.0,
        "map": round(100 * expected, 2),
    }


def test_agreement_is_the_share_of_common_first_hits() -> None:
    one = {"p": ["a", "b", "c"], "q": ["a", "b", "c"]}
    other = {"p": ["b", "a", "d"], "q": ["a", "c", "b"]}
    assert measure_agreement(one, other, 2) == 75.0
    assert measure_agreement(one, one, 3) == 100.0
