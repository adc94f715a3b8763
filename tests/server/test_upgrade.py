"""UpgradeService: what it will cost, how far it is, pause and resume, backfill by uncertainty."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import InvalidInputError, PreconditionError
from nobackfill.gallery import staging
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import neighbour_overlap
from nobackfill.gallery.store import Change, NewVectors
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import Images
from nobackfill.server.embedding.embedding import LARGEST_BATCH
from nobackfill.server.galleries.hosted import HostedGallery
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.upgrades import upgrading
from nobackfill.server.upgrades.upgrading import Job, JobState, Throttle
from nobackfill.v1 import release_pb2, upgrade_pb2
from nobackfill.vectors import Vectors
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, ids, images, in_file, refused
from tests.server.test_indexing import put
from tests.support.blocks import png
from tests.support.waiting import wait_until

COUNT = 40


@pytest.fixture
def ready(client: Client, repo: Path, stages: Stages) -> Client:
    """COUNT items in release 1, release 2 published."""
    client.create_gallery("g")
    client.put_images(images(COUNT))
    publish_stage(repo, stages[2])
    return client


def test_an_estimate_changes_nothing(ready: Client) -> None:
    answer = ready.estimate_upgrade("g", 2)
    assert answer.items == COUNT
    assert list(answer.route) == [1, 2]
    assert answer.expected_kept == pytest.approx(0.95)
    assert answer.bytes > COUNT * 4 * 32
    assert answer.duration.ToNanoseconds() >= 0
    assert answer.left_behind == 0
    assert [space.release for space in ready.get_gallery("g").spaces] == [1]


def test_an_image_put_again_after_an_upgrade_gets_its_own_vector(ready: Client) -> None:
    assert ready.swap(2, "cutover").phase == release_pb2.PHASE_DONE
    again = images(COUNT)[:3]
    before = {ready.find(image, k=1).hits[0].origin for image in again}
    assert before == {"upgraded"}
    ready.put_images(again)
    for i, image in enumerate(again):
        (hit,) = ready.find(image, k=1).hits
        assert (hit.id, hit.origin) == (f"i{i}", "native")
    assert ready.get_gallery("g").items == COUNT


def scrub(hosted: HostedGallery) -> None:
    assert isinstance(hosted.store, SqliteGallery) and hosted.store.scrub()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.long
def test_an_estimate_is_near_what_it_then_takes(
    gateway: GatewayServer, client: Client, repo: Path, stages: Stages, one: Manifest
) -> None:
    """Time until the new space answers, and the disk; both within generous factors."""
    client.create_gallery("g")
    put(client, one, 0, 6000)
    hosted = in_file(gateway)
    wait_until(hosted.index_path(one.space).exists, "no index file")
    publish_stage(repo, stages[2])
    told = client.estimate_upgrade("g", 2, spare_cores=0.9)
    scrub(hosted)
    before = size(hosted.folder)
    times = {
        event.phase: event.time.ToNanoseconds() / 1e9
        for event in client.activate(2, rollout="cutover", spare_cores=0.9)
        if not event.done or event.phase != release_pb2.PHASE_UPGRADING
    }
    took = times[release_pb2.PHASE_SWITCHING] - times[release_pb2.PHASE_UPGRADING]
    scrub(hosted)
    # Beside other work on two cores a probe may be slowed down many times; it must not be too low.
    assert took / 4 < told.duration.ToTimedelta().total_seconds() < took * 15
    assert 0.5 < told.bytes / (size(hosted.folder) - before) < 2
    assert told.index_duration.ToNanoseconds() > 0
    # Two graphs, as ADR 0039 measured them: 2.2 times the vectors, at 512 dims.
    links = told.items * upgrading._ELEMENT_BYTES
    assert told.memory_bytes == 2 * (told.items * 4 * one.embedder.dim + links)


def test_progress_is_streamed_through_pause_and_resume(ready: Client) -> None:
    assert ready.pause_upgrade("g").state == upgrade_pb2.UPGRADE_STATE_PAUSED
    ready.begin(2, "cutover")
    seen = []
    for progress in ready.watch_upgrade("g"):
        seen.append(progress)
        if progress.state == upgrade_pb2.UPGRADE_STATE_PAUSED:
            assert progress.done == 0
            assert ready.find(images(1)[0]).release == 1
            ready.start_upgrade("g", 0)
    assert seen[-1].state == upgrade_pb2.UPGRADE_STATE_DONE
    assert (seen[-1].done, seen[-1].total) == (COUNT, COUNT)
    assert (seen[-1].from_release, seen[-1].to_release) == (1, 2)
    assert seen[-1].items_per_second > 0
    # Every release has the same geometry in its block, so all neighbours are kept.
    assert seen[-1].neighbours_kept == pytest.approx(1)
    assert ready.find(images(1)[0]).release == 2


def test_backfill_takes_the_least_certain_first(
    gateway: GatewayServer, ready: Client, two: Manifest
) -> None:
    ready.swap(2)
    store = gateway.galleries.peek("g").store
    listed, _ = store.list_page(two.space, COUNT, least_certain=True)
    doubtful = [item.id for item, _ in listed]
    assert len(doubtful) == COUNT
    supplied = doubtful[::2]
    backfill = {name: png(images(COUNT)[int(name[1:])]) for name in sorted(supplied)}
    progress = ready.start_upgrade("g", 0, backfill=backfill, budget=5)
    assert progress.re_embedded == 5
    hits = ready.find(images(1)[0], k=COUNT).hits
    fresh = {hit.id for hit in hits if hit.origin == "re-embedded"}
    assert fresh == set(supplied[:5])
    assert len(hits) == COUNT
    # Those are done; the next five follow.
    assert ready.start_upgrade("g", 0, backfill=backfill, budget=5).re_embedded == 10


def test_a_client_backfills_the_least_certain_of_the_whole_gallery(
    gateway: GatewayServer, ready: Client, two: Manifest
) -> None:
    """A call with few images at a time, as a client with a folder of millions makes it."""
    ready.swap(2)
    store = gateway.galleries.peek("g").store
    listed, _ = store.list_page(two.space, COUNT, least_certain=True)
    doubtful = [item.id for item, _ in listed]
    again: list[str] = []
    for _ in range(3):
        page = [item.id for item in itertools.islice(ready.list("g", least_certain=True), 4)]
        sent = {name: png(images(COUNT)[int(name[1:])]) for name in page}
        ready.start_upgrade("g", 0, backfill=sent)
        again += page
    assert again == doubtful[:12]
    hits = ready.find(images(1)[0], k=COUNT).hits
    fresh = {hit.id for hit in hits if hit.origin == "re-embedded"}
    assert fresh == set(again)


def test_backfill_refuses_what_is_no_image_and_takes_the_rest(
    gateway: GatewayServer, ready: Client, two: Manifest
) -> None:
    ready.swap(2)
    sent = {f"i{i}": png(images(COUNT)[i]) if i > 4 else b"no" for i in range(8)}
    with refused(InvalidInputError, "5 of 8 images were refused") as caught:
        ready.start_upgrade("g", 0, backfill=sent)
    assert sum(f"i{i}: " in str(caught.value) for i in range(5)) == 3
    assert ready.start_upgrade("g", 0).re_embedded == 3


def test_backfill_takes_one_model_call_and_one_commit_a_batch(
    gateway: GatewayServer,
    client: Client,
    repo: Path,
    stages: Stages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 2 * LARGEST_BATCH + 2
    client.create_gallery("g")
    client.put_images(images(count))
    publish_stage(repo, stages[2])
    client.swap(2)
    models, store = gateway.models, gateway.galleries.peek("g").store
    embed, sizes, commits = models.embed_images, list[int](), list[Change]()

    def counted(manifest: Manifest, pixels: Images) -> Vectors:
        sizes.append(len(pixels))
        return embed(manifest, pixels)

    monkeypatch.setattr(models, "embed_images", counted)
    store.subscribe(commits.append)
    sent = {f"i{i}": png(image) for i, image in enumerate(images(count))}
    assert client.start_upgrade("g", 0, backfill=sent).re_embedded == count
    assert sizes == [LARGEST_BATCH, LARGEST_BATCH, 2]
    assert len(commits) == len(sizes)


def kept(gateway: GatewayServer) -> float | None:
    name = "nobackfill_upgrade_neighbours_kept"
    return gateway.metrics.registry.get_sample_value(name, {"release": "2"})


def test_neighbours_are_looked_at_again_after_a_backfill(
    gateway: GatewayServer, ready: Client, two: Manifest
) -> None:
    assert kept(gateway) is None
    ready.swap(2)
    assert kept(gateway) == pytest.approx(1)
    # Other pictures under the same ids: their neighbours are others now.
    sent = {f"i{i}": png(image) for i, image in enumerate(images(COUNT, 9))}
    progress = ready.start_upgrade("g", 0, backfill=sent)
    assert progress.neighbours_kept < 0.9
    assert kept(gateway) == pytest.approx(progress.neighbours_kept)


def test_probes_of_neighbours_are_drawn_from_the_whole_gallery(tmp_path: Path) -> None:
    """The first 2,000 items keep all their neighbours, the other 8,000 none."""
    rng, count, dim = np.random.default_rng(3), 10_000, 8
    old = SpaceSpec("sp-old", 1, dim, "squared_l2", False, None, 0)
    new = SpaceSpec("sp-new", 2, dim, "squared_l2", False, None, 0)
    before = rng.standard_normal((count, dim)).astype(np.float32)
    after = np.concatenate([before[:2000], rng.permutation(before[2000:])])
    with SqliteGallery.create(tmp_path / "g.sqlite", old) as store:
        assert neighbour_overlap(store.sample_pairs, old, old) is None
        staging.add_staging_space(store, new)
        names = [f"i{i}" for i in range(count)]
        store.put(names, [NewVectors("sp-old", before), NewVectors("sp-new", after)])
        store.delete(names[::3])
        figures = {neighbour_overlap(store.sample_pairs, old, new) for _ in range(3)}
        assert all(figure is not None and 0.01 < figure < 0.3 for figure in figures)
        assert len(figures) > 1
        assert neighbour_overlap(store.sample_pairs, old, old) == 1


def test_only_the_active_release_is_upgraded_to(ready: Client) -> None:
    with refused(PreconditionError, "gateway activate"):
        ready.start_upgrade("g", 2)


def test_items_put_and_deleted_meanwhile_are_right_after(ready: Client) -> None:
    ready.pause_upgrade("g")
    ready.begin(2, "cutover")
    ready.delete("g", ["i0"])
    other = images(1, 5)[0]
    ready.put("g", {"i1": png(other), "new": png(images(1, 6)[0])})
    ready.start_upgrade("g", 0)
    for _ in ready.watch_upgrade("g"):
        pass
    ready.create_when_idle("idle")
    answer = ready.find(other, k=100)
    assert answer.release == 2
    assert sorted(ids(answer)) == sorted([*(f"i{i}" for i in range(1, COUNT)), "new"])
    assert answer.hits[0].id == "i1"
    assert answer.hits[0].origin == "native"


@pytest.mark.parametrize(("spare", "least"), [(0.0, 0.95), (0.5, 0.4), (0.9, 0.05)])
def test_the_throttle_leaves_the_cores_it_was_told(spare: float, least: float) -> None:
    throttle = Throttle(spare)
    share = throttle.threads / (1 + throttle.pause_per_second)
    cores = throttle.cores
    assert share / cores == pytest.approx(max(0.05, 1 - spare), rel=0.01)
    assert share / cores >= least
    assert np.isfinite(share)


def test_a_saved_job_has_the_keys_of_older_gateways() -> None:
    job = Job("g", 1, 2, JobState.PAUSED, complete=3, total=5)
    saved = json.loads(job.to_json())
    assert (saved["done"], saved["total"], saved["state"]) == (3, 5, "paused")
    assert "complete" not in saved
    assert upgrading.job_from_json(job.to_json()) == job
