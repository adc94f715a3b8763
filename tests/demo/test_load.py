from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from demo.latency import ActivationWindow, latency_summary
from demo.load import OK, SEARCH, Answer, Load, judge_response, read_requests, write_requests
from nobackfill.v1 import search_pb2


def response(*hits: tuple[str, float]) -> search_pb2.SearchResponse:
    return search_pb2.SearchResponse(
        hits=[search_pb2.Hit(id=id_, distance=distance) for id_, distance in hits]
    )


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (response(("a", 0.1), ("b", 0.1), ("c", 2)), "OK"),
        (response(), "WRONG: no hits"),
        (response(("a", 0.2), ("b", 0.1)), "WRONG: not nearest first"),
        (response(("a", 0.1), ("a", 0.1)), "WRONG: an item twice"),
    ],
)
def test_an_answer_that_is_wrong_counts_as_failed(
    answer: search_pb2.SearchResponse, verdict: str
) -> None:
    assert judge_response(answer) == verdict


def test_an_item_that_is_known_stands_first_among_k() -> None:
    found = response(("a", 0), ("b", 0.1))
    assert judge_response(found, "a", 2) == "OK"
    assert judge_response(found, "b", 2) == "WRONG: asked b, got a at 0.0"
    assert judge_response(found, "a", 3) == "WRONG: asked 3 items, got 2"
    assert judge_response(response(("a", 0.5)), "a", 1) == "WRONG: asked a, got a at 0.5"


@pytest.fixture
def echo() -> Iterator[str]:
    with echoing() as (address, _):
        yield address


@contextmanager
def echoing() -> Iterator[tuple[str, grpc.Server]]:
    """A server that answers every search with one hit, named by its gallery; refuses `none`."""

    def search(request: bytes, context: grpc.ServicerContext) -> bytes:
        gallery = search_pb2.SearchRequest.FromString(request).gallery
        if gallery == "none":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such gallery")
        answer = response((gallery, 0))
        answer.release = 7
        return answer.SerializeToString()

    handler: Any = grpc.unary_unary_rpc_method_handler(search)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_registered_method_handlers("nobackfill.v1.SearchService", {"Search": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", server
    server.stop(None)


def test_a_run_notes_every_answer(echo: str, tmp_path: Path) -> None:
    messages = [
        search_pb2.SearchRequest(gallery=name, k=1).SerializeToString()
        for name in ("a", "b", "none")
    ]
    requests = write_requests(tmp_path / "requests", messages, ["a", "c", "a"])
    assert read_requests(requests) == list(zip(messages, ["a", "c", "a"], strict=True))
    with Load() as load:
        timed = load.run(echo, SEARCH, requests, 2, 0.1)
        load.begin(echo, SEARCH, requests, 2, least=30, judged=True)
        met = load.end()
    refused, wrong = "NOT_FOUND: no such gallery", "WRONG: asked c, got b at 0.0"
    # Bytes that nobody looks at are neither right nor wrong.
    assert set(timed.failures) == {refused} and set(timed.releases) == {0}
    assert timed.seconds >= 0.1 and len(met.answers) >= 30
    assert set(met.failures) == {refused, wrong}
    assert {(a.outcome, a.release) for a in met.answers} == {(OK, 7), (refused, 0), (wrong, 7)}


def test_what_one_of_several_does_not_answer_the_next_does(tmp_path: Path) -> None:
    messages = [search_pb2.SearchRequest(gallery=name, k=1).SerializeToString() for name in "ab"]
    requests = write_requests(tmp_path / "requests", messages)
    with echoing() as (first, ending), echoing() as (second, _), Load() as load:
        load.begin(f"{first},{second}", SEARCH, requests, 3, least=20, judged=True)
        ending.stop(None)
        met = load.end()
        load.begin(f"{first},{second}", SEARCH, requests, 3, least=20, judged=True)
        assert (load.end().failures, met.failures) == ([], []) and len(met.answers) >= 20


def test_latencies_are_told_apart_by_the_swap() -> None:
    before = [Answer(n / 100, 0.002, "OK", 1) for n in range(100)]
    # The first began before the swap and was answered in it: the swap made it wait.
    during = [Answer(1.99, 0.5, "OK", 1), Answer(2.4, 0.1, "UNAVAILABLE", 0)]
    after = [Answer(3.01 + n / 100, 0.004, "OK", 2) for n in range(10)]
    figures = latency_summary([*before, *during, *after], ActivationWindow(2.0, 3.0))
    assert figures["requests"] == 112
    assert figures["failed"] == 1
    assert figures["p50_ms_steady"] == figures["p99_ms_steady"] == 2.0
    assert figures["p50_ms_swap"] == 300.0
    assert figures["p99_ms_after"] == 4.0
