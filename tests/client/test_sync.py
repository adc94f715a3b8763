"""Following releases: routes, the flip, the way back, and what a device remembers."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from client.add import add, find_images
from client.device import Device
from client.find import Search
from client.retreat import roll_back
from client.sync import Wishes, sync
from client.upkeep import collect, status, verify
from gallery import staging
from gallery.tables import vector_table
from release.draft import Draft
from release.errors import NotFoundError, VerificationError
from release.manifest import GateVerdict
from release.publish import publish, withdraw
from tests.server.support import running
from tests.support import blocks, edge, releases
from tests.support.edge import Setting


def spaces(gallery: Path) -> dict[int, str]:
    with Device(gallery) as device:
        return {space.spec.release: space.state for space in device.store.spaces()}


def test_every_vector_is_where_the_new_embedder_would_put_it(
    setting: Setting, world: edge.World
) -> None:
    world.publish(setting.repo, 2)
    report = edge.follow(setting.gallery)
    assert (report.state, report.from_release, report.release) == ("upgraded", 1, 2)
    assert (report.items, report.routes) == (12, [[1, 2]])
    assert report.expected_kept == pytest.approx(0.95)
    found = edge.contents(setting.gallery)
    expected = edge.embedded(setting.repo, 2, setting.images)
    for path, vector in zip(setting.images, expected, strict=True):
        origin, upgraded = found[str(path)]
        assert origin == "upgraded"
        np.testing.assert_allclose(upgraded, vector, atol=1e-5)
    assert edge.follow(setting.gallery).state == "up-to-date"


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


@pytest.mark.parametrize("served", ["folder", "http", "gateway"])
def test_a_device_of_release_1_skips_to_release_4(
    world: edge.World, tmp_path: Path, served: str
) -> None:
    repo = tmp_path / "pub" / "repo"
    world.publish(repo, 1)
    images = blocks.write_pngs(tmp_path / "images", 5)
    with _served(repo, served, tmp_path) as source:
        gallery = edge.make_device(repo, tmp_path / "gallery.sqlite", source)
        edge.fill(gallery, tmp_path / "images")
        world.publish(repo, 4)
        assert edge.follow(gallery, Wishes(dry_run=True)).int8
        report = edge.follow(gallery, Wishes(int8=False))
    # 1>3 and 3>4 keep 0.95 each; by way of 2 it would be one step more.
    assert report.routes == [[1, 3, 4]]
    assert report.expected_kept == pytest.approx(0.95**2)
    expected = edge.embedded(repo, 4, images)
    got = [edge.contents(gallery)[str(path)][1] for path in images]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_dry_run_tells_and_changes_nothing(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    before = setting.gallery.read_bytes()
    planned = edge.follow(setting.gallery, Wishes(dry_run=True))
    assert (planned.state, planned.release, planned.items) == ("planned", 2, 12)
    assert setting.gallery.read_bytes() == before
    assert edge.follow(setting.gallery).download_bytes == planned.download_bytes > 0


def test_the_way_back_is_kept_until_the_release_is_confirmed(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    world.publish(setting.repo, 2)
    before = edge.contents(setting.gallery)
    edge.follow(setting.gallery)
    late = blocks.write_pngs(tmp_path / "late", 1, seed=9)
    edge.fill(setting.gallery, late[0].parent)
    with Device(setting.gallery) as device:
        assert roll_back(device) == (2, 1)
    after = edge.contents(setting.gallery)
    # What was added in between is embedded in both spaces.
    assert set(after) == set(before) | {str(late[0])}
    assert all((after[path][1] == before[path][1]).all() for path in before)
    report = edge.follow(setting.gallery)
    assert (report.state, report.release) == ("behind", 1)
    assert report.notes == ["held back here: release 2 was rolled back here"]
    assert edge.follow(setting.gallery, Wishes(retry=True)).state == "upgraded"
    assert edge.follow(setting.gallery).confirmed == [1]
    with Device(setting.gallery) as device, pytest.raises(NotFoundError, match="confirmed"):
        roll_back(device)
    assert edge.contents(setting.gallery)[str(late[0])][0] == "native"


def test_a_withdrawn_release_is_left_again(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery)
    withdraw(setting.repo, 2, "worse on cats")
    report = edge.follow(setting.gallery)
    assert (report.state, report.release) == ("rolled-back", 1)
    assert report.notes == ["release 2 was withdrawn: worse on cats"]
    assert edge.follow(setting.gallery).release == 1
    world_after = edge.contents(setting.gallery)
    assert {origin for origin, _ in world_after.values()} == {"native"}


def test_a_release_that_fails_its_probes_is_remembered_and_passed_over(
    setting: Setting, world: edge.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(setting.repo, 2)
    with monkeypatch.context() as careless:
        # A publisher whose machine computes something else than ours.
        careless.setattr("release.draft.check_probes", lambda *args, **options: None)
        publish(setting.repo, _with_other_probes(setting, tmp_path))
    report = edge.follow(setting.gallery)
    assert (report.state, report.release) == ("upgraded", 2)
    assert "golden probe" in report.notes[0]
    again = edge.follow(setting.gallery)
    assert again.release == 2
    assert again.download_bytes == 0
    assert "held back here" in again.notes[0]
    with Device(setting.gallery) as device:
        assert list(status(device)["held_back"]) == ["3"]


def _with_other_probes(setting: Setting, folder: Path) -> Draft:
    draft = releases.draft(folder, 3, [blocks.manifest(setting.repo, n) for n in (1, 2)])
    path = folder / "3" / draft.manifest.probes.file.path
    with np.load(path) as probes:
        arrays = {**probes, "embedding": -probes["embedding"]}
    with path.open("wb") as file:
        np.savez(file, **arrays)
    probes_file = releases.published(folder / "3", path.name)
    probes = draft.manifest.probes.model_copy(update={"file": probes_file})
    return Draft(draft.manifest.model_copy(update={"probes": probes}), draft.files)


def test_kept_originals_make_a_direct_route_possible(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery, Wishes(keep_original=True))
    assert edge.follow(setting.gallery).confirmed == []
    with Device(setting.gallery) as device:
        kept = status(device)
        assert kept["keep_original"]
        previous = next(s for s in kept["spaces"] if s["release"] == 1)
        assert previous["bytes"] == 12 * 4 * (32 + 16)
    world.publish(setting.repo, 3)
    late = blocks.write_pngs(tmp_path / "late", 2, seed=9)
    edge.fill(setting.gallery, late[0].parent)
    report = edge.follow(setting.gallery)
    # Twelve go directly from their originals, 0.95; two natives of release 2 go from there.
    assert report.routes == [[1, 3], [2, 3]]
    assert spaces(setting.gallery) == {1: "previous", 2: "previous", 3: "active"}
    got = edge.contents(setting.gallery)
    images = [*setting.images, *late]
    expected = edge.embedded(setting.repo, 3, images)
    np.testing.assert_allclose([got[str(p)][1] for p in images], expected, atol=1e-5)
    edge.follow(setting.gallery, Wishes(keep_original=False))
    assert spaces(setting.gallery) == {3: "active"}


def test_images_added_while_a_sync_runs_are_carried_along(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    world.publish(setting.repo, 2)
    late = blocks.write_pngs(tmp_path / "late", 2, seed=9)
    waiting = list(late)

    def add_one() -> None:
        if waiting:
            with Device(setting.gallery) as other:
                add(other, find_images([waiting.pop()]), {}, lambda done, total: None)

    with Device(setting.gallery) as device, pytest.MonkeyPatch.context() as patch:
        flip = staging.flip

        def late_flip(*args: object, **options: object) -> None:
            add_one()
            flip(*args, **options)  # type: ignore[arg-type]

        patch.setattr(staging, "flip", late_flip)
        report = sync(device, Wishes(), edge.QUIET)
    assert report.items == 14
    got = edge.contents(setting.gallery)
    assert len(got) == 14
    assert {origin for origin, _ in got.values()} == {"upgraded"}


@pytest.mark.parametrize("int8", [False, True])
def test_int8_is_taken_where_published_and_close(
    setting: Setting, world: edge.World, int8: bool
) -> None:
    world.publish(setting.repo, 4)
    report = edge.follow(setting.gallery, Wishes(int8=int8))
    assert report.int8 == int8
    expected = edge.embedded(setting.repo, 4, setting.images)
    got = np.stack([edge.contents(setting.gallery)[str(p)][1] for p in setting.images])
    error = np.abs(got - expected).max()
    assert error < (0.1 if int8 else 1e-5)
    assert int8 == (error > 1e-5)


def test_backfill_re_embeds_the_least_certain_from_their_files(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    # The same pictures in other files: the gallery follows them there once the old ones are gone.
    shutil.copytree(setting.images[0].parent, tmp_path / "own")
    with Device(setting.gallery) as device:
        device.store.delete([item.id for item in device.store.listing()])
    edge.fill(setting.gallery, tmp_path / "own")
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery)
    with Device(setting.gallery) as device:
        worst = [entry["path"] for entry in status(device)["least_certain"]][:4]
    Path(worst[0]).unlink()
    Path(worst[1]).write_bytes(Path(worst[3]).read_bytes())
    report = edge.follow(setting.gallery, Wishes(backfill=3))
    # One file is gone and one holds another picture now: only the third can be embedded again.
    assert report.re_embedded == 1
    origins = {path: origin for path, (origin, _) in edge.contents(setting.gallery).items()}
    assert [origins[path] for path in worst] == ["upgraded", "upgraded", "re-embedded", "upgraded"]


def test_a_lost_models_folder_lowers_no_guard(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    old = tmp_path / "old" / "repo"
    world.publish(old, 1)
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery)
    for path in sorted((setting.gallery.parent / "gallery.sqlite.models").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    new = setting.repo.rename(tmp_path / "kept")
    old.rename(setting.repo)
    before = setting.gallery.read_bytes()
    with pytest.raises(VerificationError, match="rolled back"):
        edge.follow(setting.gallery)
    assert setting.gallery.read_bytes() == before
    setting.repo.rename(tmp_path / "attack")
    new.rename(setting.repo)
    assert edge.follow(setting.gallery).state == "up-to-date"
    with Device(setting.gallery) as device:
        assert verify(device)["problems"] == []


def test_gc_confirms_and_frees(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery)
    with Device(setting.gallery) as device:
        done = collect(device)
    assert done["dropped"] == [1]
    assert done["freed_bytes"] > 0
    assert spaces(setting.gallery) == {2: "active"}
    assert edge.contents(setting.gallery)
    models = setting.gallery.with_name("gallery.sqlite.models")
    assert not list(models.rglob("*_1*"))


def test_no_route_leaves_the_gallery_where_it_is(setting: Setting) -> None:
    blocks.publish_block_release(setting.repo, 2, gate=GateVerdict(verdict="passed"))
    report = edge.follow(setting.gallery)
    assert (report.state, report.release) == ("behind", 1)
    assert report.notes == ["release 2: no route leads there from release 1"]
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


def test_side_information_that_is_carried_stays(setting: Setting, tmp_path: Path) -> None:
    repo = tmp_path / "carries" / "repo"
    blocks.publish_block_release(repo, 1)
    gallery = edge.make_device(repo, tmp_path / "carries" / "gallery.sqlite")
    edge.fill(gallery, setting.images[0].parent)
    blocks.publish_block_release(repo, 2, (1,), side="carries")
    blocks.publish_block_release(repo, 3, (2,), side="carries")
    assert edge.follow(gallery).routes == [[1, 2, 3]]
    with Device(gallery) as device, device.store.reading() as connection:
        table = vector_table(device.store.active().number)
        lacking = f"SELECT count(*) FROM {table} WHERE side IS NULL"
        assert connection.execute(lacking).fetchone() == (0,)
