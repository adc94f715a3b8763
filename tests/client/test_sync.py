"""Following releases: routes, the flip, the way back, and what a device remembers."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nobackfill.client.device import Device
from nobackfill.client.maintenance import collect_garbage, verify
from nobackfill.client.photos import ReleaseEncoder, add
from nobackfill.client.status import status
from nobackfill.client.sync import SyncOptions, describe_report, roll_back, sync
from nobackfill.errors import NotFoundError, VerificationError
from nobackfill.gallery import staging
from nobackfill.gallery.store import NewVectors
from nobackfill.images import Pixels
from nobackfill.release.publishing.draft import Draft
from nobackfill.release.publishing.publish import publish
from nobackfill.release.publishing.renew import withdraw
from tests.support import blocks, edge, releases
from tests.support.edge import Setting


def remembered_share(gallery: Path) -> float:
    """The report that the device remembers, and would send to a gateway."""
    with Device(gallery) as device:
        return float(device.state("last_sync")["neighbours_kept"])


def test_every_vector_is_where_the_new_embedder_would_put_it(
    setting: Setting, world: edge.World
) -> None:
    world.publish(setting.repo, 2)
    report = edge.follow(setting.gallery)
    assert (report.state, report.from_release, report.release) == ("upgraded", 1, 2)
    assert (report.items, report.routes) == (12, [[1, 2]])
    assert report.expected_kept == pytest.approx(0.95)
    kept = report.neighbours_kept
    assert kept is not None and kept == remembered_share(setting.gallery)
    assert (
        f"; kept {kept:.1%} of the items' nearest neighbours; on the publisher's"
        in describe_report(report)
    )
    found = edge.contents(setting.gallery)
    expected = edge.embedded(setting.repo, 2, setting.images)
    for path, vector in zip(setting.images, expected, strict=True):
        origin, upgraded = found[str(path)]
        assert origin == "upgraded"
        np.testing.assert_allclose(upgraded, vector, atol=1e-5)
    assert edge.follow(setting.gallery).state == "up-to-date"


def test_a_dry_run_tells_and_changes_nothing(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    before = setting.gallery.read_bytes()
    planned = edge.follow(setting.gallery, SyncOptions(dry_run=True))
    assert (planned.state, planned.release, planned.items) == ("planned", 2, 12)
    # Nothing is carried yet that could be measured.
    assert planned.neighbours_kept is None and " neighbours" not in describe_report(planned)
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
    assert report.notes == [
        "held back here: release 2 was rolled back here; `edge-client sync --retry` tries it again"
    ]
    again = pytest.raises(
        NotFoundError, match=r"rolled back already, .* after a rollback with --retry"
    )
    with Device(setting.gallery) as device, again:
        roll_back(device)
    assert edge.follow(setting.gallery, SyncOptions(retry=True)).state == "upgraded"
    # A daily job finds nothing newer, and keeps the way back for a week.
    assert edge.follow(setting.gallery).confirmed == []
    edge.upgraded_before(setting.gallery, days=6)
    assert edge.follow(setting.gallery).confirmed == []
    edge.upgraded_before(setting.gallery, days=8)
    assert edge.follow(setting.gallery).confirmed == [1]
    with (
        Device(setting.gallery) as device,
        pytest.raises(NotFoundError, match="deleted the vectors of the previous release"),
    ):
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


def test_a_device_whose_only_release_is_withdrawn_is_told_so(setting: Setting) -> None:
    withdraw(setting.repo, 1, "worse on cats")
    for wishes in (SyncOptions(dry_run=True), SyncOptions()):
        report = edge.follow(setting.gallery, wishes)
        assert (report.state, report.release) == ("behind", 1)
        assert report.notes == [
            "release 1 was withdrawn: worse on cats",
            "no other release can be followed from here, so it stays active",
        ]
        assert describe_report(report) == "stays at release 1"


def test_a_release_that_fails_its_probes_is_remembered_and_passed_over(
    setting: Setting, world: edge.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(setting.repo, 2)
    with monkeypatch.context() as careless:
        # A publisher whose machine computes something else than ours.
        careless.setattr(
            "nobackfill.release.publishing.draft.try_release", lambda *args, **options: None
        )
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
    return Draft(draft.manifest.model_copy(update={"probes": probes}), draft.local_files)


def test_images_added_while_a_sync_runs_are_carried_along(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    world.publish(setting.repo, 2)
    late = blocks.write_pngs(tmp_path / "late", 2, seed=9)
    waiting = list(late)

    def add_one() -> None:
        if waiting:
            with Device(setting.gallery) as other:
                add(other, [waiting.pop()], {}, lambda done, total: None)

    with Device(setting.gallery) as device, pytest.MonkeyPatch.context() as patch:
        flip = staging.flip

        def late_flip(*args: object, **options: object) -> None:
            add_one()
            flip(*args, **options)  # type: ignore[arg-type]

        patch.setattr(staging, "flip", late_flip)
        report = sync(device, SyncOptions(), edge.QUIET)
    assert report.items == 14
    got = edge.contents(setting.gallery)
    assert len(got) == 14
    assert {origin for origin, _ in got.values()} == {"upgraded"}


def test_images_are_listed_as_added_although_a_sync_flips_meanwhile(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    world.publish(setting.repo, 2)
    late = blocks.write_pngs(tmp_path / "late", 2, seed=9)
    embed = ReleaseEncoder.embed_with_side

    with Device(setting.gallery) as device, pytest.MonkeyPatch.context() as patch:

        def flip_first(encoder: ReleaseEncoder, pixels: Sequence[Pixels]) -> NewVectors:
            patch.undo()
            edge.follow(setting.gallery)
            return embed(encoder, pixels)

        patch.setattr(ReleaseEncoder, "embed_with_side", flip_first)
        report = add(device, [tmp_path / "late"], {}, lambda done, total: None)
    assert report.added_names == [str(path) for path in late] and not report.refusals
    found = edge.contents(setting.gallery)
    expected = edge.embedded(setting.repo, 2, late)
    for path, vector in zip(late, expected, strict=True):
        assert found[str(path)][0] == "native"
        np.testing.assert_allclose(found[str(path)][1], vector, atol=1e-5)


def test_backfill_re_embeds_the_least_certain_from_their_files(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    # The same pictures in other files: the gallery follows them there once the old ones are gone.
    shutil.copytree(setting.images[0].parent, tmp_path / "own")
    with Device(setting.gallery) as device:
        device.store.delete([item.id for item in device.store.list_items()])
    edge.fill(setting.gallery, tmp_path / "own")
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery)
    with Device(setting.gallery) as device:
        worst = [entry["path"] for entry in status(device)["least_certain"]][:4]
    Path(worst[0]).unlink()
    Path(worst[1]).write_bytes(Path(worst[3]).read_bytes())
    report = edge.follow(setting.gallery, SyncOptions(backfill=3))
    # One file is gone and one holds another picture now: only the third can be embedded again.
    assert report.re_embedded == 1
    origins = {path: origin for path, (origin, _) in edge.contents(setting.gallery).items()}
    assert [origins[path] for path in worst] == ["upgraded", "upgraded", "re-embedded", "upgraded"]


def test_a_backfill_without_uncertainties_says_why_it_does_nothing(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks.publish_block_release(setting.repo, 2, (1,), side="none")
    report = edge.follow(setting.gallery, SyncOptions(backfill=3))
    assert (report.state, report.re_embedded) == ("upgraded", 0)
    assert "has an uncertainty" in capsys.readouterr().err


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
        done = collect_garbage(device)
    assert done["dropped"] == [1]
    assert done["freed_bytes"] > 0
    assert edge.spaces(setting.gallery) == {2: "active"}
    assert edge.contents(setting.gallery)
    models = setting.gallery.with_name("gallery.sqlite.models")
    assert not list(models.rglob("*_1*"))


def test_a_release_that_fails_on_one_vector_of_this_gallery_is_held_back(
    setting: Setting, world: edge.World
) -> None:
    """Its probes pass; what the gallery holds of this item leads its upgrade to nothing."""
    world.publish(setting.repo, 2)
    with Device(setting.gallery) as device:
        space = device.store.active().spec
        strange = np.zeros((1, space.dim), np.float32)
        strange[0, -1] = 1
        side = np.ones((1, space.side_dim), np.float32)
        device.store.put(["strange"], [NewVectors(space.space, strange, side)])
    report = edge.follow(setting.gallery)
    assert (report.state, report.release) == ("behind", 1)
    assert "release 2" in report.notes[0]
    assert "strange" in report.notes[0]
    with Device(setting.gallery) as device:
        assert [info.state for info in device.store.spaces()] == ["active"]
        assert verify(device)["problems"] == []
        assert "strange" in status(device)["held_back"]["2"]
    assert "held back here" in edge.follow(setting.gallery).notes[0]
    with Device(setting.gallery) as device:
        device.store.delete(["strange"])
    assert edge.follow(setting.gallery, SyncOptions(retry=True)).state == "upgraded"


def test_a_sync_killed_while_it_carries_is_no_damage(
    setting: Setting, world: edge.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(setting.repo, 2)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("nobackfill.client.sync.staging.flip", killed)
        with pytest.raises(KeyboardInterrupt):
            edge.follow(setting.gallery)
    with Device(setting.gallery) as device:
        assert [info.state for info in device.store.spaces()] == ["active", "staging"]
        assert verify(device)["problems"] == []
    assert edge.follow(setting.gallery).state == "upgraded"
