"""Decisions of a gateway as tables, without a socket: plans, spaces of a query, the pair of a
canary, the quota of a token, the places of a lane."""

import contextvars
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from nobackfill.digests import is_in_share, share_digest
from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    ItemQuotaError,
    NeedsImageError,
    NobackfillError,
    OverloadedError,
    ReleaseRetiredError,
)
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.gallery.spec import State as SpaceState
from nobackfill.gallery.sqlite_file import SuspendablePool
from nobackfill.gallery.store import NewVectors
from nobackfill.release.manifest import Manifest
from nobackfill.server.canary.canaries import Canaries, CanaryAnswerer
from nobackfill.server.catalog import Catalog
from nobackfill.server.embedding.embedding import EmbeddingService, InProcessModels, QueryAdapters
from nobackfill.server.galleries.answering import AnswererFactory, PlainAnswerer, SpaceChoice
from nobackfill.server.galleries.hosted import GalleryRegistry, HostedGallery, UseCounter
from nobackfill.server.galleries.hosted_file import FileGalleryStorage
from nobackfill.server.galleries.item_writer import TokenQuotas
from nobackfill.server.galleries.plan import (
    CANARY_KEY,
    FillMode,
    Plan,
    SearchRequest,
    make_plan,
    own_part,
)
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import LOCAL, Principal, Role
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Lane, LaneSize
from nobackfill.server.healing.healing import Healing, HealingAnswerer
from nobackfill.server.settings import Settings
from nobackfill.server.state import Activation, Canary, State, StateFile
from tests.support import graphs, releases

Result = TypeVar("Result")
ACTIVATION = Activation(release=2, rollout="cutover", spare_cores=0.5, old_space_seconds=0)
TRIAL = ACTIVATION.model_copy(update={"canary": Canary(share=0.5)})


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Manifest]:
    """Release 1; 2 with weights of both models; 3, which searches 2 directly; 4, which has a query
    adapter to 2."""
    folder = tmp_path_factory.mktemp("drafts")
    one = releases.draft(folder, 1).manifest
    two = releases.draft(folder, 2, [one], both=(0.5, 0.5, 0.0)).manifest
    three = releases.draft(folder, 3, [one, two], directly=[two]).manifest
    four = releases.draft(folder, 4, adapts=[two]).manifest
    return {1: one, 2: two, 3: three, 4: four}


@dataclass(frozen=True)
class Parts:
    """Those of a gateway that decide."""

    manifests: Mapping[int, Manifest]
    state: StateFile
    catalog: Catalog
    canaries: Canaries
    answerers: AnswererFactory
    galleries: GalleryRegistry

    def plan(
        self, spaces: Sequence[tuple[int, SpaceState]], state: State, rollout: FillMode | None,
        *, source: bool = False, both: bool = False,
    ) -> Plan:  # fmt: skip
        infos = [
            SpaceInfo(SpaceSpec.of(self.manifests[release]), kind, number, number)
            for number, (release, kind) in enumerate(spaces)
        ]
        return make_plan(
            infos,
            state,
            self.manifests,
            self.answerers.make_answerer,
            UseCounter(),
            rollout,
            has_source=source,
            with_fusion=both,
        )


@pytest.fixture
def parts(manifests: Mapping[int, Manifest], tmp_path: Path) -> Iterator[Parts]:
    metrics, state = Metrics(), StateFile(tmp_path / "state.json")
    state.change(active=2, previous=(1,))
    catalog = Catalog(tmp_path / "repo", tmp_path / "trust", None, metrics)
    catalog.manifests = manifests
    catalog.manifest_by_space = {manifest.space: manifest for manifest in manifests.values()}
    embedding = EmbeddingService(InProcessModels(tmp_path), metrics)
    canaries = Canaries(state, metrics)
    healing = Healing(embedding, Settings(model_repo=tmp_path, data=tmp_path), metrics)
    adapters = QueryAdapters(tmp_path)
    answerers = AnswererFactory(
        embedding,
        adapters,
        catalog,
        state,
        metrics,
        partial(CanaryAnswerer, canaries),
        partial(HealingAnswerer, healing),
    )
    home = FileGalleryStorage(tmp_path / "galleries", SuspendablePool(8))
    galleries = GalleryRegistry(home, catalog, state, answerers.make_answerer)
    yield Parts(manifests, state, catalog, canaries, answerers, galleries)
    canaries.close()
    galleries.close()


# By what a plan is made of: queries of which release meet vectors of which, and what answers.
PLANS: dict[str, tuple[dict[str, object], tuple[object, ...]]] = {
    "one space": (
        {"spaces": [(1, "active")]}, ([(1, 1)], {1}, [1], "PlainAnswerer"),
    ),
    "after a swap": (
        {"spaces": [(1, "previous"), (2, "active")]}, ([(2, 2)], {1, 2}, [2, 1], "PlainAnswerer"),
    ),
    "the old one retired": (
        {"spaces": [(1, "previous"), (2, "active")], "state": State(active=2, retired=(1,))},
        ([(2, 2)], {2}, [2], "PlainAnswerer"),
    ),
    "cutover": (
        {"spaces": [(1, "active"), (2, "staging")], "rollout": "cutover",
         "state": State(active=1, activation=ACTIVATION)},
        ([(1, 1)], {1}, [1, 2], "PlainAnswerer"),
    ),
    "dual": (
        {"spaces": [(1, "active"), (2, "staging")], "rollout": "dual"},
        ([(2, 2), (1, 1)], {1}, [1, 2], "PlainAnswerer"),
    ),
    "direct": (
        {"spaces": [(2, "active"), (3, "staging")], "rollout": "direct", "state": State(active=3)},
        ([(3, 3), (3, 2)], {2}, [2, 3], "PlainAnswerer"),
    ),
    "direct by a query adapter": (
        {"spaces": [(2, "active"), (4, "staging")], "rollout": "direct", "state": State(active=4)},
        ([(4, 4), (4, 2)], {2}, [2, 4], "PlainAnswerer"),
    ),
    "a space that a rollback left": (
        {"spaces": [(1, "active"), (2, "staging")], "rollout": "dual", "state": State(active=1)},
        ([(1, 1)], {1}, [1], "PlainAnswerer"),
    ),
    "a canary": (
        {"spaces": [(1, "active"), (2, "staging")], "rollout": CANARY_KEY,
         "state": State(active=1, activation=TRIAL)},
        ([(1, 1)], {1}, [1, 2], "CanaryAnswerer"),
    ),
    "a canary that is not asked yet": (
        {"spaces": [(1, "active"), (2, "staging")], "rollout": "cutover",
         "state": State(active=1, activation=TRIAL)},
        ([(1, 1)], {1}, [1, 2], "PlainAnswerer"),
    ),
    "a canary that was promoted": (
        {"spaces": [(1, "active"), (2, "staging")], "rollout": CANARY_KEY,
         "state": State(active=2, activation=TRIAL)},
        ([(1, 1)], {1}, [1, 2], "PlainAnswerer"),
    ),
    "a source": (
        {"spaces": [(1, "previous"), (2, "active")], "source": True},
        ([(2, 2)], {1, 2}, [2, 1], "HealingAnswerer"),
    ),
    "a source beside a space that is filled": (
        {"spaces": [(1, "active"), (2, "staging")], "rollout": "dual", "source": True},
        ([(2, 2), (1, 1)], {1}, [1, 2], "PlainAnswerer"),
    ),
    "both models": (
        {"spaces": [(1, "previous"), (2, "active")], "both": True},
        ([(2, 2)], {1, 2}, [2, 1], "FusionAnswerer"),
    ),
    "both models, a source": (
        {"spaces": [(1, "previous"), (2, "active")], "both": True, "source": True},
        ([(2, 2)], {1, 2}, [2, 1], "HealingAnswerer"),
    ),
    "both models without weights": (
        {"spaces": [(2, "previous"), (3, "active")], "both": True, "state": State(active=3)},
        ([(3, 3)], {2, 3}, [3, 2], "PlainAnswerer"),
    ),
    "both models, none kept": (
        {"spaces": [(2, "active")], "both": True}, ([(2, 2)], {2}, [2], "PlainAnswerer"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("given, expected", PLANS.values(), ids=PLANS)
def test_plans(parts: Parts, given: dict[str, object], expected: tuple[object, ...]) -> None:
    plan = parts.plan(**({"state": State(active=2), "rollout": None} | given))  # type: ignore[arg-type]
    assert (
        [(part.query_manifest.release, part.release) for part in plan.parts],
        {part.release for part in plan.single_parts.values()},
        [manifest.release for manifest in plan.written_releases],
        type(plan.answerer).__name__,
    ) == expected
    assert plan.query_manifest is plan.parts[0].query_manifest
    adapted = [part.release for part in plan.parts if part.adapter is not None]
    assert adapted == ([2] if plan.query_manifest.release == 4 else [])


AFTER_SWAP: Sequence[tuple[int, SpaceState]] = [(1, "previous"), (2, "active")]
DUAL: Sequence[tuple[int, SpaceState]] = [(1, "active"), (2, "staging")]
# Spaces of a gallery, releases whose embeddings a query brings, and the parts or the refusal.
CHOICES: list[tuple[Sequence[tuple[int, SpaceState]], set[int], object, str]] = [
    (AFTER_SWAP, {2}, [(2, 2)], ""),
    (AFTER_SWAP, {1}, [(1, 1)], ""),
    (AFTER_SWAP, {1, 2}, [(2, 2)], ""),
    (AFTER_SWAP, {3}, [(3, 2)], ""),
    (AFTER_SWAP, {4}, IncompatibleSpaceError, "embedding of release 2, .* got one of release 4"),
    (AFTER_SWAP, {5}, IncompatibleSpaceError, "embedding of release 2, .* unknown to this gateway"),
    (DUAL, {1, 2}, [(2, 2), (1, 1)], ""),
    (DUAL, {1}, [(1, 1)], ""),
    (DUAL, {2}, NeedsImageError, "an embedding of each of releases 2 and 1"),
    (DUAL, {3}, IncompatibleSpaceError, "embedding of release 2, .* got one of release 3"),
    (
        [(2, "active")],
        {1},
        IncompatibleSpaceError,
        "embedding of release 2, .* got one of release 1",
    ),
]


@pytest.mark.parametrize("spaces, brings, expected, words", CHOICES)
def test_spaces_of_a_query(
    parts: Parts, spaces: Sequence[tuple[int, SpaceState]], brings: set[int], expected: object,
    words: str,
) -> None:  # fmt: skip
    plan = parts.plan(spaces, State(active=2), "dual" if spaces is DUAL else None)
    choosing = SpaceChoice(parts.catalog, parts.state, plan.parts, plan.single_parts)
    query = {parts.manifests[n].space if n in parts.manifests else "other": b"" for n in brings}
    if isinstance(expected, type) and issubclass(expected, NobackfillError):
        with pytest.raises(expected, match=words):
            choosing.choose_parts(query, plan.parts)
    else:
        chosen = choosing.choose_parts(query, plan.parts)
        assert [(part.query_manifest.release, part.release) for part in chosen] == expected


def test_an_adapter_is_used_by_the_active_release_alone(parts: Parts) -> None:
    """Its activation has tried it."""
    plan = parts.plan([(2, "active")], State(active=4), None)
    choosing = SpaceChoice(parts.catalog, parts.state, plan.parts, plan.single_parts)
    query = {parts.manifests[4].space: b""}
    with pytest.raises(IncompatibleSpaceError):
        choosing.choose_parts(query, plan.parts)
    parts.state.change(active=4)
    (part,) = choosing.choose_parts(query, plan.parts)
    assert (part.query_manifest.release, part.release) == (4, 2)
    assert part.adapter == parts.manifests[4].adapters[0]


def test_a_space_ends_at_its_time_and_when_it_is_retired(parts: Parts) -> None:
    one = parts.manifests[1].space
    plan = parts.plan(AFTER_SWAP, State(active=2), None)
    choosing = SpaceChoice(parts.catalog, parts.state, plan.parts, plan.single_parts)
    for end in (time.time() + 3600, None):
        parts.state.change(ends={} if end is None else {one: end})
        assert [part.space for part in choosing.choose_parts({one: b""}, plan.parts)] == [one]
    parts.state.change(ends={one: time.time() - 1})
    with pytest.raises(ReleaseRetiredError, match="embeddings of release 1"):
        choosing.choose_parts({one: b""}, plan.parts)
    parts.state.change(ends={}, retired=(1,))
    plan = parts.plan(AFTER_SWAP, parts.state.current, None)
    choosing = SpaceChoice(parts.catalog, parts.state, plan.parts, plan.single_parts)
    with pytest.raises(ReleaseRetiredError, match="embeddings of release 1"):
        choosing.choose_parts({one: b""}, plan.parts)


# A caller whose key is in half of the callers' share, and one whose key is not.
IN = next(f"s{n}" for n in range(99) if is_in_share(share_digest(2, f"s{n}"), 0.5))
OUT = next(f"s{n}" for n in range(99) if not is_in_share(share_digest(2, f"s{n}"), 0.5))
SHADOW = Canary(share=0.5, shadow=True)
# The setting, a caller, releases whose vector a query brings (negative: one that is none), whether
# it is one of a batch; the release that answers, and queries and errors counted of the new pair.
TRIALS: list[tuple[Canary | None, str, set[int], bool, object, tuple[int, int]]] = [
    (None, IN, {1, 2}, False, 1, (0, 0)),
    (Canary(share=0.5), IN, {1, 2}, False, 2, (1, 0)),
    (Canary(share=0.5), OUT, {1, 2}, False, 1, (0, 0)),
    (Canary(share=1.0), OUT, {1, 2}, False, 2, (1, 0)),
    (Canary(share=0.5), IN, {1}, False, 1, (0, 0)),
    (Canary(share=0.5), IN, {2}, False, 2, (1, 0)),
    (SHADOW, IN, {2}, False, IncompatibleSpaceError, (0, 0)),
    (Canary(share=0.5), OUT, {2}, False, IncompatibleSpaceError, (0, 0)),
    (SHADOW, OUT, {1, 2}, False, 1, (0, 0)),
    # The caller's fault says nothing about the pair.
    (Canary(share=0.5), IN, {1, -2}, False, 1, (0, 0)),
    (Canary(share=0.5), OUT, {-1, 2}, False, InvalidInputError, (0, 0)),
    (Canary(share=0.5), IN, {1, 2}, True, 2, (1, 0)),
    (Canary(share=0.5), OUT, {1, 2}, True, 1, (0, 0)),
    (SHADOW, IN, {1, 2}, True, 1, (0, 0)),
    (Canary(share=0.5), IN, {1, -2}, True, InvalidInputError, (1, 0)),
]


@pytest.mark.parametrize("setting, key, brings, batch, expected, counted", TRIALS)
def test_the_pair_of_a_canary(
    parts: Parts, setting: Canary | None, key: str, brings: set[int], batch: bool,
    expected: object, counted: tuple[int, int],
) -> None:  # fmt: skip
    hosted = gallery(parts, "g", 5)
    parts.state.change(activation=TRIAL.model_copy(update={"canary": setting}), active=1)
    old, new = (
        PlainAnswerer(
            parts.answerers, (own_part(parts.manifests[n]),),
            SpaceChoice(parts.catalog, parts.state, (own_part(parts.manifests[1]),), {}),
        )
        for n in (1, 2)
    )  # fmt: skip
    answerer = CanaryAnswerer(parts.canaries, old, new)
    query = {
        parts.manifests[abs(n)].space: (item(1) if n > 0 else item(1) * np.nan).tobytes()
        for n in brings
    }
    request = SearchRequest((query,), 3, is_single=not batch)
    try:
        (answer,) = in_a_call(key, lambda: answerer.answer(hosted, request))
    except NobackfillError as error:
        answer = error  # type: ignore[assignment]
    if isinstance(expected, int):
        assert not isinstance(answer, Exception), answer
        assert answer.release == expected
        assert answer.hits[0].item.id == "i1"
        # Feedback names an answer that both pairs can give.
        both = brings == {1, 2} and not batch
        assert bool(answer.request_id) == (setting is not None and both)
    else:
        assert isinstance(answer, expected)  # type: ignore[arg-type]
    report = parts.canaries.last_report().new_pair
    if setting is not None and not setting.shadow:
        assert (report.query_count, report.error_count) == counted


def in_a_call(key: str, ask: Callable[[], Result]) -> Result:
    def asked() -> Result:
        context.set_current_call(
            context.Call(LOCAL, time.monotonic() + 60, canary_key=key, request_id="r")
        )
        return ask()

    return contextvars.copy_context().run(asked)


def item(number: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.eye(graphs.DIM, dtype="<f4")[number : number + 1]


def gallery(parts: Parts, name: str, items: int) -> HostedGallery:
    """One with items of both spaces."""
    if name not in parts.galleries.names():
        parts.galleries.create(name)
    hosted = parts.galleries.peek(name)
    there = {info.spec.space for info in hosted.spaces()}
    spaces = [m.space for m in parts.manifests.values() if m.space in there]
    for number in range(items):
        vectors = [NewVectors(space, item(number), None) for space in spaces]
        hosted.store.put([f"i{number}"], vectors, digests=[None], metadata=[None])
    return hosted


# Items that are there in both galleries, of ids put now, what is taken: of at most 10.
QUOTAS = [
    (8, ["new1", "new2"], True),
    (8, ["new1", "new2", "new3"], False),
    (10, ["i0", "i1", "i2"], True),
    (10, ["i0", "new"], False),
    (14, ["i0"], True),
    (14, ["new"], False),
]


@pytest.mark.parametrize("there, ids, taken", QUOTAS)
def test_the_quota_of_a_token(parts: Parts, there: int, ids: list[str], taken: bool) -> None:
    parts.state.change(active=2, previous=(1,))
    gallery(parts, "mine", there // 2)
    gallery(parts, "more", there - there // 2)
    quotas = TokenQuotas(parts.galleries)
    app = Principal("app", Role.WRITER, frozenset({"mine", "more"}), 10)

    def take() -> None:
        with quotas.reserve(app, "mine", ids) as allowance:
            # A store that others write, too, keeps to it.
            assert allowance is not None and allowance.max_items == 10

    if taken:
        in_a_call("", take)
    else:
        with pytest.raises(ItemQuotaError, match=f"found {there} and [13] new"):
            in_a_call("", take)
    for free in (LOCAL, Principal("free", Role.WRITER, frozenset({"mine"}))):
        with quotas.reserve(free, "mine", ["a", "b", "c"]) as allowance:
            assert allowance is None


# Places held by callers of a role, of 32: of which one caller has half and each role two of its
# own where callers are told apart.
PLACES = [
    (True, [("a", Role.WRITER, 15)], ("a", Role.WRITER), True),
    (True, [("a", Role.WRITER, 16)], ("a", Role.WRITER), False),
    (True, [("a", Role.WRITER, 16)], ("b", Role.WRITER), True),
    (False, [("a", Role.WRITER, 31)], ("a", Role.WRITER), True),
    (False, [("a", Role.WRITER, 32)], ("a", Role.WRITER), False),
    (False, [("a", Role.WRITER, 32)], ("b", Role.ADMIN), False),
    (True, [("a", Role.WRITER, 14), ("b", Role.WRITER, 12)], ("c", Role.WRITER), False),
    (True, [("a", Role.WRITER, 14), ("b", Role.WRITER, 12)], ("c", Role.READER), True),
]


@pytest.mark.parametrize("shared, held, caller, enters", PLACES)
def test_the_places_of_a_lane(
    shared: bool, held: list[tuple[str, Role, int]], caller: tuple[str, Role], enters: bool
) -> None:
    # Four roles: what three others have of their own is six places.
    lane = Lane("calls", LaneSize(thread_count=1, capacity=32), limits_callers=shared)
    try:
        for name, role, many in held:
            for _ in range(many):
                lane.enter(name, role)
        count = lane.occupied_count()
        if enters:
            lane.enter(*caller)
            lane.leave(*caller)
        else:
            with pytest.raises(OverloadedError, match="expected at most 32 calls at once"):
                lane.enter(*caller)
        assert lane.occupied_count() == count == sum(many for _, _, many in held)
    finally:
        lane.close()
