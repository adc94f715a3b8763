"""Server and device carry the same items along random routes, with the same bits."""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from nobackfill.client.device import Device
from nobackfill.client.sync import download_files, migrate, open_source, plan_sync, try_plan
from nobackfill.gallery import staging
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.store import NewVectors
from nobackfill.release.manifest import Manifest
from nobackfill.release.publishing.publish import publish
from nobackfill.release.routes import Route
from nobackfill.server.catalog import Catalog
from nobackfill.server.galleries.hosted_file import HostedInFile
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.state import StateFile
from nobackfill.server.upgrades.upgrading import GalleryUpgrades
from tests.gallery.making import rows
from tests.support import edge, graphs
from tests.support.blocks import Side
from tests.support.memory import memory_folder
from tests.support.releases import Way, draft

Rows = dict[int, tuple[bytes, bytes | None, str]]
# Of six items, those that have side-information.
WITH_SIDE = ("item-0", "item-2", "item-3")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """pytest's, but in memory if there is enough: publishing waits for the disk."""
    with memory_folder(tmp_path) as folder:
        yield folder


def ways_into(
    rng: random.Random, side: Side, side_space: str | None, sources: Mapping[int, Manifest]
) -> dict[int, Way]:
    """For some older releases, the newest among them, an upgrade that does with side-information
    what it may; `side_space`: the encoder's that the release keeps."""
    ways: dict[int, Way] = {}
    for number, source in sources.items():
        # Mostly chains.
        if rng.random() < 0.8 and number != max(sources):
            continue
        reads = [False] if source.side_space is None else [False, True]
        effects: list[Literal["maps", "carries", "drops"]] = ["drops"]
        if side == "maps":
            effects = ["drops", "maps"]
        elif side == "carries" and source.side_space == side_space:
            effects = ["carries"]
        ways[number] = (rng.choice(reads), rng.choice(effects))
    return ways


def publish_next(repo: Path, rng: random.Random, made: dict[int, Manifest]) -> None:
    """A release with a side encoder of its own, the one before it, or none; any upgrades."""
    number = len(made) + 1
    newest = made.get(number - 1)
    side: Side = rng.choice(["maps", "carries", "carries", "none"])
    if newest is None or (side == "carries" and newest.side_encoder is None):
        side = "maps"
    ways = ways_into(rng, side, None if newest is None else newest.side_space, made)
    sources = [made[source] for source in sorted(ways, reverse=True)]
    one = draft(repo.with_name("drafts"), number, sources, side=side, ways=ways)
    publish(repo, one)
    made[number] = one.manifest


def fill(store: SqliteGallery, space: str) -> None:
    """Six items, half of them with side-information."""
    rng = np.random.default_rng(1)
    for number in range(6):
        name = f"item-{number}"
        embedding = rng.standard_normal((1, graphs.DIM)).astype(np.float32)
        embedding /= np.linalg.norm(embedding)
        side = rng.standard_normal((1, graphs.SIDE_DIM)).astype(np.float32)
        store.put([name], [NewVectors(space, embedding, side if name in WITH_SIDE else None)])


def on_server(
    repo: Path, folder: Path, made: Mapping[int, Manifest]
) -> tuple[Route | None, set[str], Rows]:
    """The route that a gateway takes to the newest release, who stays behind, and what it wrote."""
    metrics = Metrics()
    catalog = Catalog(repo, folder / "trust", None, metrics)
    catalog.refresh()
    upgrading = GalleryUpgrades(repo, catalog, StateFile(folder / "state.json"), metrics)
    target = made[max(made)]
    with SqliteGallery.create(folder / "g.sqlite", SpaceSpec.of(made[1])) as store:
        fill(store, made[1].space)
        hosted = HostedInFile("g", folder, store)
        route = upgrading.best_route(hosted, target.release)
        if route is None:
            return None, set(), {}
        upgrading.run_upgrade(hosted, target, 0.0, lambda: False)
        behind = {item.id for item in staging.items_without_vector(store, target.space)}
        return route, behind, rows(store, target.space)


def on_device(
    repo: Path, gallery: Path, made: Mapping[int, Manifest]
) -> tuple[Route | None, set[str], Rows]:
    """The same on a device."""
    target = made[max(made)]
    with Device(gallery) as device, open_source(str(repo)) as (fetcher, base_url):
        fill(device.store, made[1].space)
        trust = device.trust(fetcher, base_url)
        trust.refresh()
        plan = plan_sync(device, trust, target.release, int8=True)
        if plan is None:
            return None, set(), {}
        download_files(device.models, trust, plan.files(), edge.QUIET)
        try_plan(device, plan)
        migrate(device, plan, 0, {}, edge.QUIET)
        behind = {item.id for item in staging.items_without_vector(device.store, target.space)}
        return plan.legs[0].route, behind, rows(device.store, target.space)


@pytest.mark.parametrize("seed", range(4))
def test_server_and_device_carry_alike(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    repo, made = tmp_path / "repo", dict[int, Manifest]()
    publish_next(repo, rng, made)
    gallery = edge.make_device(repo, tmp_path / "gallery.sqlite")
    while len(made) < 4:
        publish_next(repo, rng, made)
    (tmp_path / "server").mkdir()
    route, behind, written = on_server(repo, tmp_path / "server", made)
    device_route, device_behind, device_written = on_device(repo, gallery, made)
    assert (device_route and device_route.releases) == (route and route.releases)
    assert device_behind == behind
    assert device_written == written
    if route is not None:
        assert (not behind) == (not route.reads_side)


def test_side_information_carried_first_and_read_later_moves_who_has_it(tmp_path: Path) -> None:
    """Release 3 has no side space: 1->2 carries release 1's side-information, 2->3 reads it."""
    repo, made = tmp_path / "repo", dict[int, Manifest]()
    plans: list[tuple[Side, dict[int, Way]]] = [
        ("maps", {}),
        ("carries", {1: (False, "carries")}),
        ("none", {2: (True, "drops")}),
    ]
    for number, (side, ways) in enumerate(plans, 1):
        sources = [made[source] for source in ways]
        one = draft(tmp_path / "drafts", number, sources, side=side, ways=ways)
        publish(repo, one)
        made[number] = one.manifest
        if number == 1:
            gallery = edge.make_device(repo, tmp_path / "gallery.sqlite")
    (tmp_path / "server").mkdir()
    route, behind, written = on_server(repo, tmp_path / "server", made)
    assert route is not None
    assert route.releases == (1, 2, 3)
    assert behind == {"item-1", "item-4", "item-5"}
    assert len(written) == len(WITH_SIDE)
    assert on_device(repo, gallery, made)[1:] == (behind, written)
