"""Planning: the same choice as a search through every route, without walking every route."""

import itertools
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobackfill.release.manifest import Manifest, RouteEvidence, Upgrade
from nobackfill.release.routes import Route, iterate_routes, plan_route
from tests.support.releases import draft

RELEASES = range(1, 7)
EFFECTS = st.sampled_from(["maps", "carries", "drops"])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Release 2 with an upgrade from release 1, of which planning reads a few keys."""
    folder = tmp_path_factory.mktemp("life")
    first = draft(folder, 1).manifest
    return draft(folder, 2, [first]).manifest


def release(
    template: Manifest,
    number: int,
    side_space: str | None,
    upgrades: Mapping[int, Mapping[str, Any]],
    kept: Mapping[tuple[int, ...], float],
) -> Manifest:
    made: list[Upgrade] = [
        template.upgrades[0].model_copy(
            update={"from_release": source, "from_space": f"sp-{source}", **values}
        )
        for source, values in upgrades.items()
    ]
    evidence = [
        RouteEvidence(releases=chain, map=0.5, cmc1=0.5, kept=share)
        for chain, share in kept.items()
        if chain[-1] == number
    ]
    return template.model_copy(
        update={
            "release": number,
            "space": f"sp-{number}",
            "side_space": side_space,
            "upgrades": tuple(made),
            "routes": tuple(evidence),
        }
    )


SIDES = st.sampled_from([None, "ss-a", "ss-b"])


@st.composite
def graphs(draw: st.DrawFn, template: Manifest) -> dict[int, Manifest]:
    """Releases with any upgrades, any use of side-information, and evidence of some chains."""
    spaces = {number: draw(SIDES) for number in RELEASES}
    # Few values, so that there are ties.
    shares = st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.25])
    chains = st.sets(st.sampled_from(RELEASES), min_size=2).map(lambda some: tuple(sorted(some)))
    kept = draw(st.dictionaries(chains, shares, max_size=12))
    made = {}
    for number in RELEASES:
        upgrades = {}
        for source in range(1, number):
            if not draw(st.booleans()):
                continue
            wanted = draw(SIDES)
            upgrades[source] = {"from_side_space": wanted, "side": draw(EFFECTS)}
            if draw(st.booleans()):
                kept[source, number] = draw(shares)
        made[number] = release(template, number, spaces[number], upgrades, kept)
    for number in draw(st.sets(st.sampled_from(RELEASES[:-1]), max_size=2)):
        del made[number]
    return made


def best_of_all(manifests: Mapping[int, Manifest], side: str | None) -> Route | None:
    """The choice as it is defined: every route looked at."""
    routes = iterate_routes(manifests, RELEASES[0], RELEASES[-1], side)
    return min(
        routes, key=lambda r: (r.retention is None, -(r.retention or 0), len(r.steps)), default=None
    )


@pytest.mark.long
@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(data=st.data(), side=SIDES)
def test_the_plan_is_the_best_of_every_route(
    template: Manifest, data: st.DataObject, side: str | None
) -> None:
    manifests = data.draw(graphs(template))
    planned = plan_route(manifests, RELEASES[0], RELEASES[-1], side)
    assert planned == best_of_all(manifests, side)


def without_side(route: Route) -> bool:
    """Whether an item that has no side-information passes every step of a route, step by step."""
    side: str | None = None
    for manifest, upgrade in route.steps:
        if upgrade.from_side_space is not None and side != upgrade.from_side_space:
            return False
        if upgrade.side != "carries":
            side = manifest.side_space if upgrade.side == "maps" else None
    return True


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_route_reads_side_where_an_item_without_any_cannot_pass(
    template: Manifest, data: st.DataObject
) -> None:
    manifests = data.draw(graphs(template))
    for route in iterate_routes(manifests, RELEASES[0], RELEASES[-1], data.draw(SIDES)):
        assert route.reads_side == (not without_side(route))


def test_side_information_may_be_carried_first_and_read_later(template: Manifest) -> None:
    carries = {"from_side_space": None, "side": "carries"}
    reads = {"from_side_space": "ss-a", "side": "drops"}
    manifests = {
        1: release(template, 1, "ss-a", {}, {}),
        2: release(template, 2, "ss-a", {1: carries}, {}),
        3: release(template, 3, None, {2: reads}, {}),
    }
    route = plan_route(manifests, 1, 3, "ss-a")
    assert route is not None
    assert route.reads_side
    # What a step maps is made for every item.
    maps = {"from_side_space": None, "side": "maps"}
    manifests[2] = release(template, 2, "ss-a", {1: maps}, {})
    route = plan_route(manifests, 1, 3, "ss-a")
    assert route is not None
    assert not route.reads_side


def linked(template: Manifest, count: int) -> dict[int, Manifest]:
    """Every release with an upgrade from each older one, each measured."""
    kept: dict[tuple[int, ...], float] = {
        (a, b): 0.99 ** ((b - a) ** 2) for b in range(2, count + 1) for a in range(1, b)
    }
    way = {"from_side_space": "ss-a", "side": "maps"}
    return {
        number: release(template, number, "ss-a", dict.fromkeys(range(1, number), way), kept)
        for number in range(1, count + 1)
    }


def test_planning_grows_slowly_with_releases(template: Manifest) -> None:
    """Every release doubles the routes between fully linked ones; planning must not follow."""

    def seconds(count: int) -> float:
        manifests = linked(template, count)
        started = time.process_time()
        for _ in range(5):
            route = plan_route(manifests, 1, count, "ss-a")
        assert route is not None
        assert route.releases == tuple(range(1, count + 1))
        return time.process_time() - started

    assert seconds(32) < 200 * seconds(8)


def test_a_chain_measured_whole_wins_and_loses_by_its_measurement(template: Manifest) -> None:
    manifests = linked(template, 5)
    every_step = (1, 2, 3, 4, 5)
    for share, expected in ((0.5, (1, 2, 3, 5)), (1.5, every_step)):
        bad = RouteEvidence(releases=every_step, map=0.5, cmc1=0.5, kept=share)
        changed = manifests[5].model_copy(update={"routes": (*manifests[5].routes, bad)})
        route = plan_route({**manifests, 5: changed}, 1, 5, "ss-a")
        assert route is not None
        assert len(route.releases) == len(expected)
        assert (route.releases == every_step) == (expected == every_step)


def test_every_route_begins_with_the_shortest(template: Manifest) -> None:
    """Twenty fully linked releases: a quarter of a million routes, of which one takes a few."""
    links = {"from_side_space": None, "side": "drops"}
    manifests = {
        n: release(template, n, None, {m: dict(links) for m in range(1, n)}, {})
        for n in range(1, 21)
    }
    lengths = [len(r.steps) for r in itertools.islice(iterate_routes(manifests, 1, 20, None), 32)]
    assert lengths == [1] + 18 * [2] + 13 * [3]
