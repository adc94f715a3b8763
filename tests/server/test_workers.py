"""An upgrade carried by worker processes; that they may die is in tests/scale."""

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from nobackfill.errors import ConfigurationError, NobackfillError, UnusableOutputError
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.store import Change
from nobackfill.release.manifest import Manifest
from nobackfill.server.settings import load_settings
from nobackfill.server.upgrades.workers.processes import WorkerProcesses
from nobackfill.server.upgrades.workers.workers import MigrationPiece, UpgradeWork, WorkerUpgrades
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, running
from tests.support.carried import Carried
from tests.support.postgres import Server


def test_an_activation_is_carried_by_workers(
    repo: Path, stages: Stages, tmp_path: Path, postgres: Server
) -> None:
    with (
        postgres.database() as url,
        running(repo, tmp_path / "data", store=url, workers=1) as gateway,
        Client(gateway.address) as client,
    ):
        client.create_gallery("g")
        client.put_images(images(8))
        publish_stage(repo, stages[2])
        client.swap(2, "cutover")
        hit = client.find(images(1)[0]).hits[0]
        assert (hit.id, hit.origin, hit.release) == ("i0", "upgraded", 2)


@pytest.mark.parametrize(
    "given",
    [{"workers": 2}, {"ray": "auto"}, {"workers": 1, "ray": "auto", "store": "postgresql://x"}],
)
def test_workers_want_a_database_and_one_kind(given: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="workers"):
        load_settings(given, None)


def test_errors_come_whole_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(UnusableOutputError("no vector", [3, 5])))
    assert (str(error), error.unusable_rows) == ("no vector", (3, 5))
    assert isinstance(error, NobackfillError)


class Dying(WorkerProcesses):
    """A worker that ends when it has carried half of each piece, and one that repeats it; what the
    first has written nobody tells."""

    def migrate_pieces(
        self, work: UpgradeWork, pieces: Iterable[MigrationPiece]
    ) -> Iterator[Labels]:
        for piece in pieces:
            half = MigrationPiece(piece.labels[: len(piece.labels) // 2], piece.with_side)
            assert sum(map(len, super().migrate_pieces(work, [half]))) == len(half.labels)
            yield from super().migrate_pieces(work, [piece])


def test_what_a_worker_wrote_before_it_ended_is_told_as_well(
    stages: Stages, one: Manifest, two: Manifest, postgres: Server
) -> None:
    with postgres.database() as url:
        carried = Carried(url, stages[2], one, two, 50)
        workers, changed = Dying(1), list[Change]()
        carried.store.subscribe(changed.append)
        try:
            done = WorkerUpgrades(workers, stages[2]).run(
                carried.store, carried.route, carried.target, lambda _: None, lambda: False
            )
            assert done.left_behind_count == 0 and done.written_count == 25
            told = {label for change in changed for label in change.metadata_labels.tolist()}
            assert told == set(carried.store.load_vectors(carried.target.space)[0].tolist())
        finally:
            workers.close()
            carried.database.close()
