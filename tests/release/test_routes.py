"""Routes: the best measured way, against a search through every way."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.release.manifest import Cell, Manifest, RouteEvidence, Upgrade
from nobackfill.release.models import open_embedder, open_side_encoder
from nobackfill.release.routes import Route, open_route, plan_route, route_along
from tests.support.releases import draft, images


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Manifest]:
    """Releases 1 to 4 with an upgrade from each older one."""
    folder = tmp_path_factory.mktemp("life")
    made: list[Manifest] = []
    for number in range(1, 5):
        made.append(draft(folder, number, made).manifest)
    return dict(enumerate(made, 1))


def life(
    templates: Mapping[int, Manifest],
    edges: Mapping[tuple[int, int], float | None],
    chains: Mapping[tuple[int, ...], float] | None = None,
) -> dict[int, Manifest]:
    """Only the upgrades in `edges`, with what each was measured to keep, and measured chains."""
    measured = {pair: kept for pair, kept in edges.items() if kept is not None}
    everything: dict[tuple[int, ...], float] = dict(chains or {})
    everything.update(measured.items())
    return {
        n: manifest.model_copy(
            update={
                "upgrades": tuple(u for u in manifest.upgrades if (u.from_release, n) in edges),
                "routes": tuple(
                    RouteEvidence(releases=chain, map=0.5, cmc1=0.5, kept=kept)
                    for chain, kept in everything.items()
                    if chain[-1] == n
                ),
            }
        )
        for n, manifest in templates.items()
    }  # fmt: skip


def planned(manifests: Mapping[int, Manifest], source: int, target: int) -> Route | None:
    """The best route of items that have the source's side-information."""
    return plan_route(manifests, source, target, manifests[source].side_space)


def test_direct_or_chained_whichever_keeps_more(templates: dict[int, Manifest]) -> None:
    edges = {(1, 2): 0.99, (2, 3): 0.98, (1, 3): 0.96}
    route = planned(life(templates, edges), 1, 3)
    assert route is not None
    assert route.releases == (1, 2, 3)
    assert route.retention == pytest.approx(0.99 * 0.98)
    assert not route.is_measured_end_to_end
    # A measurement of the whole chain counts more than the product of its parts.
    route = planned(life(templates, edges, {(1, 2, 3): 0.9}), 1, 3)
    assert route is not None
    assert (route.releases, route.retention, route.is_measured_end_to_end) == ((1, 3), 0.96, True)


def test_the_newest_is_reached_across_skipped_releases(templates: dict[int, Manifest]) -> None:
    edges = {(1, 2): 0.9, (2, 4): 0.9}
    route = planned(life(templates, edges), 1, 4)
    assert route is not None
    assert route.releases == (1, 2, 4)


def test_a_withdrawn_release_is_no_stepping_stone(templates: dict[int, Manifest]) -> None:
    manifests = life(templates, {(1, 2): 0.9, (2, 4): 0.9, (1, 4): 0.1})
    del manifests[2]
    route = planned(manifests, 1, 4)
    assert route is not None
    assert route.releases == (1, 4)


def test_unmeasured_routes_come_last(templates: dict[int, Manifest]) -> None:
    route = planned(life(templates, {(1, 2): 0.6, (2, 3): 0.6, (1, 3): None}), 1, 3)
    assert route is not None
    assert route.releases == (1, 2, 3)
    route = planned(life(templates, {(1, 2): None, (2, 3): 0.6, (1, 3): None}), 1, 3)
    assert route is not None
    assert (route.releases, route.retention, route.is_measured_end_to_end) == ((1, 3), None, False)


def test_nothing_to_do_no_way_and_no_such_release(templates: dict[int, Manifest]) -> None:
    route = planned(templates, 2, 2)
    assert route is not None
    assert (route.steps, route.releases, route.retention) == ((), (), 1.0)
    with pytest.raises(InvalidInputError):
        open_route(Path(), route)
    assert planned(life(templates, {(1, 2): 0.9}), 1, 4) is None
    assert planned(templates, 4, 1) is None
    with pytest.raises(NotFoundError, match="9"):
        planned(templates, 1, 9)


def test_the_source_may_be_unknown_by_now(templates: dict[int, Manifest]) -> None:
    manifests = {n: m for n, m in life(templates, {(1, 3): 0.9}).items() if n > 1}
    route = plan_route(manifests, 1, 3, templates[1].side_space)
    assert route is not None
    assert route.releases == (1, 3)
    assert plan_route(manifests, 1, 3, None) is None
    assert plan_route(manifests, 1, 3, templates[2].side_space) is None


def test_upgrades_that_read_side_information_need_it(templates: dict[int, Manifest]) -> None:
    manifests = life(templates, {(1, 2): 0.9})
    assert plan_route(manifests, 1, 2, None) is None
    assert planned(manifests, 1, 2) is not None


def test_vectors_stay_as_they_are_only_where_the_target_searches_them_and_no_upgrade_leads_there(
    templates: dict[int, Manifest],
) -> None:
    old = templates[1]
    strange = life(templates, {})
    declared = templates[3].model_copy(update={"upgrades": (), "searches_directly": (old.space,)})
    cells = [
        Cell(query="3", gallery=gallery, cmc1=0.5, cmc5=0.5, map=share, queries=9, items=9)
        for gallery, share in (("1", 0.6), ("3", 0.8))
    ]
    measured = declared.model_copy(update={"evidence": tuple(cells)})

    def planned_from_1(target: Manifest, space: str | None) -> Route | None:
        return plan_route({**strange, 3: target}, 1, 3, old.side_space, direct_search_space=space)

    assert planned_from_1(strange[3], old.space) is None
    assert planned_from_1(declared, None) is None
    assert planned_from_1(declared, templates[2].space) is None
    assert planned_from_1(declared, old.space) == Route((), None, False)
    found = planned_from_1(measured, old.space)
    assert found is not None
    assert (found.releases, found.is_measured_end_to_end) == ((), True)
    assert found.retention == pytest.approx(0.75)
    both = life(templates, {(1, 3): 0.1})
    both[3] = both[3].model_copy(update={"searches_directly": (old.space,)})
    carried = plan_route(both, 1, 3, old.side_space, direct_search_space=old.space)
    assert carried == planned(both, 1, 3) != Route((), None, False)


def test_a_route_is_found_by_the_releases_on_its_way(templates: dict[int, Manifest]) -> None:
    manifests = life(templates, {(1, 2): 0.9, (2, 4): 0.8, (1, 4): 0.1})
    assert route_along(manifests, (1, 2, 4)) == planned(manifests, 1, 4)
    assert route_along(manifests, (4,)).steps == ()
    with pytest.raises(NotFoundError, match="from release 2 to release 3"):
        route_along(manifests, (1, 2, 3))


def changed(manifest: Manifest, **update: object) -> Manifest:
    upgrade: Upgrade = manifest.upgrades[0].model_copy(update=update)
    return manifest.model_copy(update={"upgrades": (upgrade,)})


def test_dropped_side_information_is_gone_on_the_way(templates: dict[int, Manifest]) -> None:
    manifests = life(templates, {(1, 2): 0.9, (2, 3): 0.9})
    manifests[2] = changed(manifests[2], side="drops")
    assert planned(manifests, 1, 3) is None
    manifests[3] = changed(manifests[3], from_side_space=None)
    assert planned(manifests, 1, 3) is not None


def test_carried_side_information_stays_in_its_space(templates: dict[int, Manifest]) -> None:
    manifests = life(templates, {(1, 2): 0.9, (2, 3): 0.9})
    manifests[2] = changed(manifests[2], side="carries")
    # The upgrade 2->3 reads release 2's own side space, in which these items are not.
    assert planned(manifests, 1, 3) is None
    manifests[3] = changed(manifests[3], from_side_space=manifests[1].side_space)
    assert planned(manifests, 1, 3) is not None


def test_an_upgrade_made_for_another_space_is_no_edge(templates: dict[int, Manifest]) -> None:
    manifests = life(templates, {(1, 2): 0.9})
    manifests[2] = changed(manifests[2], from_space=manifests[3].space)
    assert planned(manifests, 1, 2) is None


PAIRS = list(itertools.combinations(range(1, 5), 2))


@pytest.mark.slow
@settings(deadline=None)
@given(
    edges=st.dictionaries(st.sampled_from(PAIRS), st.none() | st.floats(0.01, 1)),
    chains=st.dictionaries(st.sampled_from([(1, 2, 3), (1, 2, 4), (1, 3, 4), (1, 2, 3, 4)]),
                           st.floats(0.01, 1)),
)  # fmt: skip
def test_no_route_beats_the_planned_one(
    templates: dict[int, Manifest],
    edges: dict[tuple[int, int], float | None],
    chains: dict[tuple[int, ...], float],
) -> None:
    best: float | None = None
    exists = False
    for way in [(1, 4), (1, 2, 4), (1, 3, 4), (1, 2, 3, 4)]:
        pairs = list(itertools.pairwise(way))
        if any(pair not in edges for pair in pairs):
            continue
        exists = True
        kept = chains.get(way) if len(way) > 2 else edges[pairs[0]]
        parts = [edges[pair] for pair in pairs]
        if kept is None and None not in parts:
            kept = float(np.prod([part for part in parts if part is not None]))
        if kept is not None:
            best = kept if best is None else max(best, kept)
    route = planned(life(templates, edges, chains), 1, 4)
    assert (route is not None) == exists
    if route is not None:
        assert route.retention == (None if best is None else pytest.approx(best))


@pytest.mark.parametrize("int8", [False, True])
def test_a_chain_leads_where_the_new_model_would(int8: bool, tmp_path: Path) -> None:
    drafts = [draft(tmp_path, 1)]
    for number in (2, 3):
        drafts.append(draft(tmp_path, number, [drafts[-1].manifest], int8=True))
    manifests = {one.manifest.release: one.manifest for one in drafts}
    files = {path: file for one in drafts for path, file in one.local_files.items()}
    route = planned(manifests, 1, 3)
    assert route is not None
    pixels = images(9)
    embedding = open_embedder(files, manifests[1]).run(pixels)
    side = open_side_encoder(files, manifests[1]).run(pixels)
    got = open_route(files, route, int8=int8).run(embedding, side)
    tolerance = 0.1 if int8 else 1e-5
    native = open_embedder(files, manifests[3])
    np.testing.assert_allclose(got.embedding, native.run(pixels), atol=tolerance)
    assert got.side_information is not None
    expected_side = open_side_encoder(files, manifests[3]).run(pixels)
    np.testing.assert_allclose(got.side_information, expected_side, atol=tolerance)
    # Each step tells the L1 norm of the side-information that it read; the blocks keep it.
    assert got.uncertainty is not None
    rough = 2 * np.abs(side).sum(axis=1)
    np.testing.assert_allclose(got.uncertainty, rough, rtol=0.05 if int8 else 1e-4)
