"""Routes: over skipped releases, from kept originals, quantised, direct, or none at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nobackfill.client.device import Device
from nobackfill.client.search import Search
from nobackfill.client.status import status
from nobackfill.client.sync import SyncOptions
from nobackfill.gallery.sqlite_file import vector_table_name
from nobackfill.release.manifest import GateVerdict
from tests.server.support import running
from tests.support import blocks, edge, graphs
from tests.support.edge import Setting


@contextmanager
def _served(repo: Path, how: str, folder: Path) -> Iterator[str]:
    if how == "http":
        with edge.http_host(repo) as address:
            yield address
    elif how == "gateway":
        with running(repo, folder / "data") as gateway:
            yield f"grpc://{gateway.address}"
    else:
        yield str(repo)


# Each step keeps 0.95: 1>3>4 is better than a step more by way of 2, and 1>4 is better still.
@pytest.mark.parametrize(("sources", "route"), [((3,), [1, 3, 4]), ((1, 3), [1, 4])])
@pytest.mark.parametrize("served", ["folder", "http", "gateway"])
def test_a_device_of_release_1_skips_to_release_4(
    world: edge.World, tmp_path: Path, served: str, sources: tuple[int, ...], route: list[int]
) -> None:
    repo = tmp_path / "pub" / "repo"
    world.publish(repo, 1)
    images = blocks.write_pngs(tmp_path / "images", 5)
    with _served(repo, served, tmp_path) as source:
        gallery = edge.make_device(repo, tmp_path / "gallery.sqlite", source)
        edge.fill(gallery, tmp_path / "images")
        world.publish(repo, 3)
        blocks.publish_block_release(repo, 4, sources, int8=True)
        assert edge.follow(gallery, SyncOptions(dry_run=True)).int8
        report = edge.follow(gallery, SyncOptions(int8=False))
    assert (report.from_release, report.release, report.routes) == (1, 4, [route])
    assert report.expected_kept == pytest.approx(0.95 ** (len(route) - 1))
    assert edge.spaces(gallery) == {1: "previous", 4: "active"}
    expected = edge.embedded(repo, 4, images)
    got = [edge.contents(gallery)[str(path)][1] for path in images]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_kept_originals_make_a_direct_route_possible(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery, SyncOptions(keep_original=True))
    assert edge.follow(setting.gallery).confirmed == []
    with Device(setting.gallery) as device:
        kept = status(device)
        assert kept["keep_original"]
        previous = next(s for s in kept["spaces"] if s["release"] == 1)
        assert previous["bytes"] == 12 * 4 * (graphs.DIM + graphs.SIDE_DIM)
    world.publish(setting.repo, 3)
    late = blocks.write_pngs(tmp_path / "late", 2, seed=9)
    edge.fill(setting.gallery, late[0].parent)
    report = edge.follow(setting.gallery)
    # Twelve go directly from their originals, 0.95; two natives of release 2 go from there.
    assert report.routes == [[1, 3], [2, 3]]
    assert edge.spaces(setting.gallery) == {1: "previous", 2: "previous", 3: "active"}
    got = edge.contents(setting.gallery)
    images = [*setting.images, *late]
    expected = edge.embedded(setting.repo, 3, images)
    np.testing.assert_allclose([got[str(p)][1] for p in images], expected, atol=1e-5)
    edge.follow(setting.gallery, SyncOptions(keep_original=False))
    assert edge.spaces(setting.gallery) == {2: "previous", 3: "active"}
    edge.upgraded_before(setting.gallery, days=8)
    edge.follow(setting.gallery)
    assert edge.spaces(setting.gallery) == {3: "active"}


@pytest.mark.parametrize("int8", [False, True])
def test_int8_is_taken_where_published_and_close(
    setting: Setting, world: edge.World, int8: bool
) -> None:
    world.publish(setting.repo, 4)
    report = edge.follow(setting.gallery, SyncOptions(int8=int8))
    assert report.int8 == int8
    expected = edge.embedded(setting.repo, 4, setting.images)
    got = np.stack([edge.contents(setting.gallery)[str(p)][1] for p in setting.images])
    error = np.abs(got - expected).max()
    assert error < (0.1 if int8 else 1e-5)
    assert int8 == (error > 1e-5)


def test_no_route_leaves_the_gallery_where_it_is(setting: Setting) -> None:
    blocks.publish_block_release(setting.repo, 2, gate=GateVerdict(verdict="passed"))
    report = edge.follow(setting.gallery)
    assert (report.state, report.release) == ("behind", 1)
    (note,) = report.notes
    assert note.startswith("release 2: no route of upgrades leads there from release 1")
    assert len(edge.contents(setting.gallery)) == 12


def test_a_release_that_searches_old_vectors_directly_takes_them_as_they_are(
    setting: Setting, tmp_path: Path
) -> None:
    blocks.publish_block_release(setting.repo, 2, directly=(1,))
    before = edge.contents(setting.gallery)
    report = edge.follow(setting.gallery)
    assert (report.state, report.routes) == ("upgraded", [[1, 2]])
    after = edge.contents(setting.gallery)
    assert {origin for origin, _ in after.values()} == {"direct"}
    assert all((after[path][1] == vector).all() for path, (_, vector) in before.items())
    with Device(setting.gallery) as device:
        (answer,) = Search(device, {}).by_images([setting.images[4]], 1)
    assert answer.hits[0].path == str(setting.images[4])
    assert answer.hits[0].distance < 1e-5
    assert answer.hits[0].score is not None


@pytest.mark.parametrize("upgrades", [(), (1,)], ids=["adapter", "adapter and upgrade"])
def test_a_device_uses_no_query_adapter(setting: Setting, upgrades: tuple[int, ...]) -> None:
    """Its vectors never stay as they are: it follows an upgrade, or stays where it is."""
    blocks.publish_block_release(setting.repo, 2, upgrades, adapts=(1,))
    report = edge.follow(setting.gallery)
    if upgrades:
        assert (report.state, report.routes) == ("upgraded", [[1, 2]])
        assert {origin for origin, _ in edge.contents(setting.gallery).values()} == {"upgraded"}
        return
    assert (report.state, report.release) == ("behind", 1)
    (note,) = report.notes
    assert note.endswith("its query adapter is for gateways, and devices do not use it")
    assert {origin for origin, _ in edge.contents(setting.gallery).values()} == {"native"}


def test_side_information_that_is_carried_stays(setting: Setting, tmp_path: Path) -> None:
    repo = tmp_path / "carries" / "repo"
    blocks.publish_block_release(repo, 1)
    gallery = edge.make_device(repo, tmp_path / "carries" / "gallery.sqlite")
    edge.fill(gallery, setting.images[0].parent)
    blocks.publish_block_release(repo, 2, (1,), side="carries")
    blocks.publish_block_release(repo, 3, (2,), side="carries")
    assert edge.follow(gallery).routes == [[1, 2, 3]]
    with Device(gallery) as device, device.store.read_snapshot() as connection:
        table = vector_table_name(device.store.active().table_number)
        lacking = f"SELECT count(*) FROM {table} WHERE side IS NULL"
        assert connection.execute(lacking).fetchone() == (0,)
