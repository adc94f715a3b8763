"""What speaks against a release on trial, and what does not: its callers, or what it shares."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nobackfill.errors import DeadlineError, NobackfillError, OverloadedError, UnavailableError
from nobackfill.release.manifest import Manifest
from nobackfill.release.publishing.publish import publish
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.grpc import context
from nobackfill.server.state import OutdatedPlanError
from nobackfill.v1 import release_pb2 as pb
from nobackfill.v1 import search_pb2, types_pb2
from tests.server.canaried import (
    ITEMS,
    SESSIONS,
    ask,
    begin,
    expected,
    report,
    wait_for,
    whole,
)
from tests.server.canaried import (
    client as client,
)
from tests.server.canaried import (
    served as served,
)
from tests.server.support import Client, embedding, images, running
from tests.support import releases, text_releases
from tests.support.blocks import manifest, png

OLD, NEW = ([s for s in SESSIONS if expected(s, 0.5) == release] for release in (1, 2))
Models = Callable[[Callable[[int], None]], None]


@pytest.fixture
def before(served: tuple[GatewayServer, Client], monkeypatch: pytest.MonkeyPatch) -> Models:
    """What it is given is done from then on before a release, by its number, embeds an image."""
    embed = served[0].models.embed_images

    def begin(work: Callable[[int], None]) -> None:
        def instead(manifest: Manifest, images: Any) -> Any:
            work(manifest.release)
            return embed(manifest, images)

        monkeypatch.setattr(served[0].models, "embed_images", instead)

    return begin


def too_slow(release: int) -> None:
    """As a model server that has not answered when the call's time is over."""
    if release == 2:
        time.sleep(context.current_call().remaining())
        raise DeadlineError("the model of release 2 did not answer within the call's time")


def send(
    client: Client, query: search_pb2.Query, session: str, seconds: float = 60
) -> search_pb2.SearchResponse:
    request = search_pb2.SearchRequest(gallery="g", query=query, k=3)
    return client.raw.searches.Search(request, timeout=seconds, metadata=(("x-session", session),))


def picture(number: int) -> search_pb2.Query:
    return search_pb2.Query(image=png(images(ITEMS)[number]))


def nothing_said(client: Client) -> None:
    shown = report(client)
    assert shown.state == pb.CANARY_STATE_RUNNING
    assert shown.new_pair.errors == 0
    assert max(shown.evidence.values()) <= 1


def test_a_model_slower_than_callers_wait_stops_it_and_they_are_answered(
    client: Client, before: Models
) -> None:
    begin(client, pb.Canary(share=0.5))
    for n in range(200):
        ask(client, OLD[n % len(OLD)], n % ITEMS)
    patience = max(0.5, 10 * report(client).old_pair.p99)
    before(too_slow)
    asked = 0
    while report(client).state == pb.CANARY_STATE_RUNNING:
        asked += 1
        assert send(client, picture(0), f"another {asked}", patience).release == 1
        assert asked < 200
    assert report(client).message.startswith("latency: ")
    wait_for(lambda: client.states() == {1: "ACTIVE", 2: "FAILED"})


@pytest.mark.long
def test_a_model_that_never_answers_stops_it_before_it_is_known_how_long_others_take(
    client: Client, before: Models
) -> None:
    begin(client, pb.Canary(share=1.0))
    before(too_slow)
    asked = 0
    while report(client).state == pb.CANARY_STATE_RUNNING:
        asked += 1
        assert send(client, picture(0), "any", 4).release == 1
        assert asked < 10
    assert report(client).message.startswith("errors: ")


@pytest.mark.long
def test_callers_that_hardly_wait_say_nothing(client: Client, before: Models) -> None:
    begin(client, pb.Canary(share=1.0))
    before(too_slow)
    for _ in range(4):
        assert send(client, picture(0), "any", 1.2).release == 1
    nothing_said(client)


@pytest.mark.parametrize("shadow", [False, True])
def test_vectors_that_only_the_new_pair_cannot_use_say_nothing(
    client: Client, one: Manifest, two: Manifest, shadow: bool
) -> None:
    begin(client, pb.Canary(share=0.5, shadow=shadow))
    good = embedding(one, images(1)[0])
    bad = types_pb2.Embedding(space=two.space, values=bytes(12))
    query = search_pb2.Query(embeddings=search_pb2.Embeddings(embeddings=[good, bad]))
    for _ in range(4):
        assert send(client, query, NEW[0]).release == 1
    # What comes after them in the mirror has been compared.
    assert ask(client, NEW[0], 0).release == (1 if shadow else 2)
    wait_for(lambda: report(client).compared == 1)
    nothing_said(client)


@pytest.mark.parametrize("error", [OverloadedError("too many"), OutdatedPlanError("replanned")])
def test_what_is_nobodys_fault_says_nothing(
    client: Client, before: Models, error: NobackfillError
) -> None:
    begin(client, pb.Canary(share=1.0))

    def fail(release: int) -> None:
        if release == 2:
            raise error

    before(fail)
    for _ in range(4):
        assert whole(ask(client, "any", 0), "i0") == 1
    nothing_said(client)


def test_a_model_server_that_is_away_for_a_moment_fails_no_shadow(
    client: Client, before: Models
) -> None:
    begin(client, pb.Canary(share=1.0, shadow=True))
    away, asked = threading.Event(), list[int]()

    def fail(release: int) -> None:
        asked.append(release)
        if release == 2 and len(asked) < 9:
            away.set()
        if away.is_set():
            raise UnavailableError("the model server is being started again")

    before(fail)
    for times in range(1, 4):
        assert whole(ask(client, "any", 0), "i0") == 1
        # The new pair's model, and the old one's once more.
        wait_for(lambda times=times: len(asked) == 3 * times)  # type: ignore[misc]
        away.clear()
    assert asked == [1, 2, 1] * 3
    assert whole(ask(client, "any", 0), "i0") == 1
    wait_for(lambda: report(client).compared == 1)
    nothing_said(client)


def test_batches_count_where_they_succeed_as_where_they_fail(
    client: Client, before: Models
) -> None:
    begin(client, pb.Canary(share=0.5))
    batch = search_pb2.SearchBatchRequest(gallery="g", queries=[picture(0), picture(1)], k=3)

    def answered_by() -> set[int]:
        answers = client.raw.searches.SearchBatch(batch, metadata=(("x-session", NEW[0]),))
        return {answer.release for answer in answers.responses}

    for _ in range(50):
        assert answered_by() == {2}
    shown = report(client)
    assert (shown.new_pair.queries, shown.new_pair.errors) == (50, 0)
    assert shown.evidence["errors"] < 1
    failures = [UnavailableError("for a moment")]

    def fail(release: int) -> None:
        if release == 2 and failures:
            raise failures.pop()

    before(fail)
    assert answered_by() == {1}
    shown = report(client)
    assert (shown.new_pair.queries, shown.new_pair.errors) == (51, 1)
    assert shown.state == pb.CANARY_STATE_RUNNING


def test_queries_that_wait_to_be_compared_are_bounded_in_bytes(
    client: Client, before: Models, one: Manifest, two: Manifest
) -> None:
    begin(client, pb.Canary(share=1.0, shadow=True))
    go_on = threading.Event()

    def wait(release: int) -> None:
        if release == 2:
            go_on.wait(60)

    before(wait)
    try:
        ask(client, "any", 0)
        both = [embedding(model, images(1)[0]) for model in (one, two)]
        large = types_pb2.Embedding(space="another", values=bytes(20 << 20))
        query = search_pb2.Query(embeddings=search_pb2.Embeddings(embeddings=[*both, large]))
        for _ in range(4):
            assert send(client, query, "any").release == 1
        assert report(client).skipped == 1
    finally:
        go_on.set()
    wait_for(lambda: report(client).compared == 4)


@pytest.mark.long
def test_texts_are_answered_by_the_pair_that_reads_them(near_gate: None, tmp_path: Path) -> None:
    repo, drafts = tmp_path / "repo", tmp_path / "drafts"
    publish(repo, text_releases.draft(drafts, 1, [], reads="both"))
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(ITEMS))
        publish(repo, releases.draft(drafts, 2, [manifest(repo, 1)], side="none"))
        gateway.catalog.refresh()
        wait_for(lambda: 2 in client.states())
        begin(client, pb.Canary(share=0.5))
        text = search_pb2.Query(text="w3")
        for session in (OLD[0], NEW[0]):
            answer = send(client, text, session)
            assert (answer.release, answer.hits[0].id) == (1, "i3")
            answers = client.raw.searches.SearchBatch(
                search_pb2.SearchBatchRequest(gallery="g", queries=[text], k=3),
                metadata=(("x-session", session),),
            )
            assert [answer.release for answer in answers.responses] == [1]
        nothing_said(client)
        assert ask(client, NEW[0], 0).release == 2
