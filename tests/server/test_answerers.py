"""Answerers say what `Searching` said before there were any, in every mode and store."""

import contextvars
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from nobackfill.errors import InvalidInputError, NobackfillError
from nobackfill.gallery.filters import Filter, OneOf, Range, Scalar
from nobackfill.gallery.search.index import EVERY
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import Query, QueryAnswer
from nobackfill.server.galleries.ranking import SearchResult
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.grpc import context
from nobackfill.server.grpc.access import LOCAL
from nobackfill.v1 import release_pb2 as pb
from tests.server.canaried import wait_for
from tests.server.conftest import Stages, publish_stage
from tests.server.old_canaries import Canaries as OldCanaries
from tests.server.old_searching import Question, Searching
from tests.server.support import Client, images, running, vector
from tests.server.test_both_models import second
from tests.server.test_healing import register
from tests.support import postgres as servers
from tests.support import trials
from tests.support.blocks import manifest, png
from tests.support.picture_host import PictureHost
from tests.support.waiting import wait_until

OLD, ALL = 8, 14
Outcome = TypeVar("Outcome")


@pytest.fixture(params=["file", "postgresql"])
def _store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "file":
        yield
        return
    server: servers.Server = request.getfixturevalue("postgres")
    with server.database() as url:
        monkeypatch.setenv("NOBACKFILL_STORE", url)
        yield


@dataclass(frozen=True)
class OldHealing:
    """What the oracle asks of it."""

    served: GatewayServer

    def heals(self, hosted: Hosted, space: str) -> bool:
        return hosted.plan.heals == space and not self.served.healing.whole(hosted, space)

    def find(self, questions: Sequence[Question], allowed: object) -> list[QueryAnswer]:
        return self.served.healing.find(questions, allowed)  # type: ignore[arg-type]


class Pair:
    """A gateway's searching, and the oracle beside it."""

    def __init__(self, served: GatewayServer) -> None:
        self.served = served
        self.canaries = OldCanaries(served.state, served.metrics)
        self.old = Searching(
            served.embedding, served.catalog, served.state, served.metrics, self.canaries,
            OldHealing(served),
        )  # fmt: skip
        self.hosted = served.galleries.get("g")
        self.compared = 0
        # What the batches of one kept from their callers.
        self.refused_whole = 0

    def single(self, query: Query, k: int, filtered: Filter | None, ef: int, key: str = "") -> None:
        old = outcome(lambda: told(self.old.search(self.hosted, query, k, filtered, ef)), key)
        new = outcome(
            lambda: told(self.served.searching.search(self.hosted, query, k, filtered, ef)), key
        )
        assert new == old, (query, k, filtered, ef)
        self.compared += 1

    def batch(
        self, queries: Sequence[Query], k: int, filtered: Filter | None, ef: int, *, heal: bool,
        key: str = "",
    ) -> None:  # fmt: skip
        def ask(searching: object, queries: Sequence[Query]) -> object:
            answers = searching.batch(self.hosted, queries, k, filtered, ef, heal=heal)  # type: ignore[attr-defined]
            return [told(answer) for answer in answers]

        old = outcome(lambda: ask(self.old, queries), key)
        new = outcome(lambda: ask(self.served.searching, queries), key)
        self.compared += 1
        if new == old:
            return
        assert isinstance(old, tuple) and issubclass(old[0], InvalidInputError), (old, new)
        if old[1].startswith("filter"):
            # Where every query was refused, nothing is filtered.
            assert isinstance(new, list) and all(isinstance(one[0], type) for one in new)
            return
        # A question that was left alone in its batch was refused with all of them.
        assert isinstance(new, list) and old in new
        self.refused_whole += 1
        for query, answer in zip(queries, new, strict=True):
            if answer != old:
                again = outcome(lambda query=query: ask(self.old, [query]), key)  # type: ignore[misc]
                assert again in ([answer], answer)


def told(answer: QueryAnswer) -> object:
    if isinstance(answer, InvalidInputError):
        return type(answer), str(answer)
    assert isinstance(answer, SearchResult)
    hits = [(hit.item.id, *hit[1:]) for hit in answer.hits]
    return hits, answer.release, answer.space, answer.request_id


def outcome(ask: Callable[[], Outcome], key: str) -> Outcome | tuple[type, str]:
    def within_a_call() -> Outcome | tuple[type, str]:
        context.begin(context.Call(LOCAL, time.monotonic() + 60, key=key, request_id=f"r-{key}"))
        try:
            return ask()
        except NobackfillError as error:
            return type(error), str(error)

    return contextvars.copy_context().run(within_a_call)


def queries(one: Manifest, two: Manifest | None) -> list[Query]:
    """Of every kind."""
    near, far = images(4)[3], images(2, seed=9)[1]
    bytes_of = {one.space: vector(one, near).tobytes()}
    made: list[Query] = [png(near), png(far), b"no image", "a text", bytes_of, {"?": b"1234"}]
    made += [{one.space: b"12"}, {one.space: b"\xff" * (4 * one.embedder.dim)}]
    if two is not None:
        new = vector(two, far).tobytes()
        nan = np.full(two.embedder.dim, np.nan, "<f4").tobytes()
        made += [{two.space: new}, {two.space: nan}, bytes_of | {two.space: new}]
        made += [bytes_of | {two.space: b"1"}, {one.space: nan, two.space: new}]
    return made


def has_nan(query: Mapping[str, bytes]) -> bool:
    return any(np.isnan(np.frombuffer(v[: len(v) // 4 * 4], "<f4")).any() for v in query.values())


def compare(both: Pair, asked: Sequence[Query], keys: Sequence[str] = ("",)) -> None:
    rng = np.random.default_rng(0)
    red, nobody, number = OneOf("shelf", ("red",)), OneOf("shelf", ("none",)), OneOf("number", (3,))
    wrong = Range("number", at_least=float("nan"))
    for key in keys:
        for query in asked:
            for k, filtered, ef in (
                (3, None, 0), (100, None, 0), (2, red, 0), (3, number, 0), (5, nobody, 7),
                (4, red, EVERY), (4, None, EVERY), (2, wrong, 0),
            ):  # fmt: skip
                both.single(query, k, filtered, ef, key)
        if key:
            # Where such a vector was alone, the release on trial was blamed for it.
            asked = [one for one in asked if isinstance(one, bytes | str) or not has_nan(one)]
        for _ in range(25):
            some = [asked[n] for n in rng.integers(0, len(asked), rng.integers(1, 6))]
            k, filtered = (
                int(rng.choice([1, 3, 100])),
                [None, None, red, nobody, wrong][rng.integers(5)],
            )
            both.batch(
                some, k, filtered, int(rng.choice([0, 0, 9])), heal=rng.random() < 0.7, key=key
            )


def fill(client: Client, first: int, last: int) -> None:
    pictures = {f"i{n}": png(image) for n, image in enumerate(images(last)) if n >= first}
    notes: dict[str, dict[str, Scalar]] = {
        f"i{n}": {"shelf": ["red", "blue"][n % 2], "number": n} for n in range(first, last)
    }
    assert not client.put("g", pictures, notes)


@contextmanager
def plain(repo: Path, data: Path, stages: Stages) -> Iterator[GatewayServer]:
    with running(repo, data) as served, Client(served.address) as client:
        client.create_gallery("g")
        fill(client, 0, OLD)
        yield served


@contextmanager
def two_spaces(repo: Path, data: Path, stages: Stages, rollout: str) -> Iterator[GatewayServer]:
    with plain(repo, data, stages) as served, Client(served.address) as client:
        client.pause_upgrade("g")
        publish_stage(repo, stages[2])
        client.begin(2, rollout)
        fill(client, OLD, ALL)
        yield served
        client.rollback(confirm=True)


@contextmanager
def swapped(repo: Path, data: Path, stages: Stages) -> Iterator[GatewayServer]:
    """Two kept spaces, one of which answers."""
    with plain(repo, data, stages) as served, Client(served.address) as client:
        publish_stage(repo, stages[2])
        client.swap(2)
        fill(client, OLD, ALL)
        yield served


@pytest.mark.usefixtures("_store")
def test_a_plain_plan(repo: Path, stages: Stages, tmp_path: Path, one: Manifest) -> None:
    with plain(repo, tmp_path / "data", stages) as served:
        both = Pair(served)
        compare(both, queries(one, None))
        assert both.compared > 50


@pytest.mark.usefixtures("_store")
def test_after_a_swap(
    repo: Path, stages: Stages, tmp_path: Path, one: Manifest, two: Manifest
) -> None:
    with swapped(repo, tmp_path / "data", stages) as served:
        compare(Pair(served), queries(one, two))
        with Client(served.address) as client:
            client.retire()
            wait_until(lambda: len(client.get_gallery("g").spaces) == 1, "it is not dropped")
        compare(Pair(served), queries(one, two))


@pytest.mark.usefixtures("_store")
@pytest.mark.parametrize("rollout", ["dual", "direct"])
def test_a_plan_of_two_spaces(
    direct_stages: Stages, stages: Stages, tmp_path: Path, rollout: str
) -> None:
    some = direct_stages if rollout == "direct" else stages
    repo = shutil.copytree(some[1], tmp_path / "repo")
    with two_spaces(repo, tmp_path / "data", some, rollout) as served:
        assert len(served.galleries.get("g").plan.parts) == 2
        compare(Pair(served), queries(manifest(some[2], 1), manifest(some[2], 2)))


@pytest.mark.usefixtures("_store")
def test_a_plan_that_asks_both_models(stages: Stages, tmp_path: Path, one: Manifest) -> None:
    for name in ("keys", "drafts"):
        shutil.copytree(stages[1].parent / f"repo.{name}", tmp_path / f"repo.{name}")
    repo = shutil.copytree(stages[1], tmp_path / "repo")
    with plain(repo, tmp_path / "data", stages) as served, Client(served.address) as client:
        client.update_gallery("g", both_models=True)
        two = second(repo)
        client.swap(2)
        fill(client, OLD, ALL)
        assert served.galleries.get("g").plan.both is not None
        compare(Pair(served), queries(one, two))


@pytest.mark.usefixtures("_store")
@pytest.mark.parametrize("lacks", [True, False])
def test_a_plan_that_heals(
    repo: Path, stages: Stages, tmp_path: Path, one: Manifest, two: Manifest, lacks: bool
) -> None:
    pictures = {} if lacks else {f"i{n}": png(image) for n, image in enumerate(images(OLD))}
    with PictureHost(pictures) as host, ExitStack() as closing:
        given = {"item_hosts": ("127.0.0.1",)}
        served = closing.enter_context(running(repo, tmp_path / "data", **given))
        client = closing.enter_context(Client(served.address))
        client.create_gallery("g")
        fill(client, 0, OLD)
        publish_stage(repo, stages[2])
        client.swap(2)
        fill(client, OLD, ALL)
        register(client, "g", host.address, a_day=1000)
        hosted = served.galleries.get("g")
        assert hosted.plan.heals == two.space
        if not lacks:
            wait_until(lambda: served.healing.whole(hosted, two.space), "some are not embedded")
        else:
            served.searching.search(hosted, png(images(1)[0]), 100)
        compare(Pair(served), queries(one, two))


@pytest.mark.usefixtures("_store")
@pytest.mark.parametrize("shadow", [False, True])
def test_a_plan_with_a_canary(
    repo: Path, stages: Stages, tmp_path: Path, one: Manifest, two: Manifest, shadow: bool
) -> None:
    with (
        plain(repo, tmp_path / "data", stages) as served,
        Client(served.address) as client,
        trials.near(),
    ):
        publish_stage(repo, stages[2])
        wait_for(lambda: 2 in client.states())
        events = client.activate(2, canary=pb.Canary(share=0.5, shadow=shadow))
        assert any(event.phase == pb.PHASE_CANARY for event in events)
        both = Pair(served)
        assert both.hosted.plan.canary is not None
        compare(both, queries(one, two), [f"session {n}" for n in range(4)])

        def figures(canaries: object) -> object:
            report = canaries.report()  # type: ignore[attr-defined]
            pairs = [replace(p, p50=0, p99=0, score=None) for p in (report.old, report.new)]
            return *pairs, report.compared + report.skipped, report.release

        wait_until(
            lambda: figures(served.canaries) == figures(both.canaries), "they count otherwise"
        )
        both.canaries.close()
        client.rollback(confirm=True, to=1)


def test_of_a_batch_one_is_refused_by_itself(
    repo: Path, stages: Stages, tmp_path: Path, one: Manifest
) -> None:
    """The one difference: a vector that is none, alone with queries that are refused before."""
    nan: Mapping[str, bytes] = {one.space: b"\xff" * (4 * one.embedder.dim)}
    with plain(repo, tmp_path / "data", stages) as served:
        both = Pair(served)
        both.batch([b"no image", nan], 3, None, 0, heal=True)
        assert both.refused_whole == 1
