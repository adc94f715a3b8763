import pytest

from demo.latency import Window, summary
from demo.load import Answer, judge
from nobackfill.v1 import search_pb2


def response(*hits: tuple[str, float]) -> search_pb2.SearchResponse:
    return search_pb2.SearchResponse(
        hits=[search_pb2.Hit(id=id_, distance=distance) for id_, distance in hits]
    )


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (response(("a", 0.1), ("b", 0.1), ("c", 2)), "OK"),
        (response(), "EMPTY"),
        (response(("a", 0.2), ("b", 0.1)), "UNSORTED"),
        (response(("a", 0.1), ("a", 0.1)), "DOUBLE"),
    ],
)
def test_an_answer_that_is_wrong_counts_as_failed(
    answer: search_pb2.SearchResponse, verdict: str
) -> None:
    assert judge(answer) == verdict


def test_latencies_are_told_apart_by_the_swap() -> None:
    before = [Answer(n / 100, 0.002, "OK", 1) for n in range(100)]
    # The first began before the swap and was answered in it: the swap made it wait.
    during = [Answer(1.99, 0.5, "OK", 1), Answer(2.4, 0.1, "UNAVAILABLE", 0)]
    after = [Answer(3.01 + n / 100, 0.004, "OK", 2) for n in range(10)]
    figures = summary([*before, *during, *after], Window(2.0, 3.0))
    assert figures["requests"] == 112
    assert figures["failed"] == 1
    assert figures["p50_ms_steady"] == figures["p99_ms_steady"] == 2.0
    assert figures["p50_ms_swap"] == 300.0
    assert figures["p99_ms_after"] == 4.0
