"""Retrieval quality of ranked answers, in percent: the three figures of the demo's table."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

# Answers: query path -> item paths, nearest first; paths are CLASS/NAME.
Answers = Mapping[str, Sequence[str]]


def class_of(path: str) -> str:
    return path.rsplit("/", 2)[-2]


def average_precision(matches: Sequence[bool], relevant: int) -> float:
    """Mean, over all `relevant` items of the gallery, of the precision where each was found.

    A relevant item that is missing from the answer counts as zero.
    """
    found = 0
    total = 0.0
    for rank, match in enumerate(matches, start=1):
        if match:
            found += 1
            total += found / rank
    return total / relevant


def compute_quality(answers: Answers, items: Iterable[str]) -> dict[str, float]:
    """CMC-1, CMC-5 and mAP in percent of `answers` over a gallery of `items` (paths CLASS/NAME).

    Queries whose class the gallery does not hold are left out, as there is nothing to find.
    """
    sizes = Counter(class_of(item) for item in items)
    cmc1 = cmc5 = precision = 0.0
    asked = [query for query in answers if sizes[class_of(query)]]
    for query in asked:
        matches = [class_of(item) == class_of(query) for item in answers[query]]
        cmc1 += any(matches[:1])
        cmc5 += any(matches[:5])
        precision += average_precision(matches, sizes[class_of(query)])
    sums = {"cmc1": cmc1, "cmc5": cmc5, "map": precision}
    return {name: round(100 * value / len(asked), 2) for name, value in sums.items()}


def measure_agreement(one: Answers, other: Answers, k: int) -> float:
    """Percent of the first k hits that two answers to the same query share, in any order."""
    shared = sum(len(set(one[query][:k]) & set(other[query][:k])) for query in one)
    return round(100 * shared / (k * len(one)), 2)
