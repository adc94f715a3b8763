from pathlib import Path

import pytest

from nobackfill.client.sync import SyncLeg, SyncPlan, embedding_files
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.release.manifest import Cell, Manifest, RouteEvidence
from nobackfill.release.routes import plan_route
from nobackfill.report.page import download_sizes, manifest_facts, render_page
from tests.support.publication import manifests_of


@pytest.fixture(scope="module")
def manifests(chain_repo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Manifest]:
    return manifests_of(chain_repo, tmp_path_factory.mktemp("state"))


def test_a_device_downloads_what_the_report_says(manifests: dict[int, Manifest]) -> None:
    for old in (1, 2):
        route = plan_route(manifests, old, 3, manifests[old].side_space)
        assert route is not None
        source = SpaceInfo(SpaceSpec.of(manifests[old]), "active", 1, 1)
        plan = SyncPlan(manifests[3], (SyncLeg(source, route, 10),), int8=True)
        held = {file.path for file in embedding_files(manifests[old])}
        fetched = [file.length for file in plan.files() if file.path not in held]
        told = download_sizes(manifests, old, 3, route.releases)
        assert sum(told.values()) == sum(fetched)
        assert list(told) == ["new model", "side-information encoder", "transform", "probes"]
        twins = [upgrade.int8_file for _, upgrade in route.steps]
        assert told["transform"] == sum(twin.length for twin in twins if twin is not None)


def test_a_side_encoder_that_stays_is_not_downloaded_again(manifests: dict[int, Manifest]) -> None:
    old, new = manifests[2], manifests[3]
    kept = new.model_copy(
        update={"side_encoder": old.side_encoder, "side_space": old.side_space, "upgrades": ()}
    )
    told = download_sizes({2: old, 3: kept}, 2, 3, ())
    assert list(told) == ["new model", "probes"]


def test_every_release_of_a_route_is_told_with_its_digests(manifests: dict[int, Manifest]) -> None:
    page = render_page(manifests, 3, 1, None, None, seed=0)
    assert "Route: 1 → 2 → 3" in page
    for manifest in manifests.values():
        for name, value in manifest_facts(manifest):
            assert name in page
            assert value in page


def test_published_figures_are_told_with_what_is_known_of_them(
    manifests: dict[int, Manifest],
) -> None:
    figures = {("2", "2"): 0.5, ("3", "2"): 0.1, ("3", "2>3"): 0.8, ("3", "3"): 0.9}
    cells = tuple(
        Cell(query=query, gallery=gallery, cmc1=0.7, cmc5=0.95, map=value, queries=70, items=80)
        for (query, gallery), value in figures.items()
    )
    # The int8 transform, which is run by default, keeps less than the exact one.
    route = RouteEvidence(releases=(2, 3), map=0.8, cmc1=0.7, kept=0.8 / 0.9, int8_map=0.72)
    new = manifests[3].model_copy(update={"evidence": cells, "routes": (route,)})
    page = render_page({**manifests, 3: new}, 3, 2, None, None, seed=0)
    assert ">80.0 %<" in page
    assert "<b>72.0</b>" in page
    assert "70 searches in 80 images" in page
    assert "int8 transform" in page
    exact = route.model_copy(update={"int8_map": None})
    new = new.model_copy(update={"routes": (exact,)})
    page = render_page({**manifests, 3: new}, 3, 2, None, None, seed=0)
    assert "<b>80.0</b>" in page
    assert "int8 transform" not in page
