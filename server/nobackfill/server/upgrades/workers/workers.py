"""Run an upgrade in other processes: the work that they share, and the loop that hands it out."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.staging import UpgradeOutcome, UpgradeProgress, migrate_window
from nobackfill.release.models import CHUNK_ROWS
from nobackfill.release.routes import Route, open_route
from nobackfill.server.stores.postgresql.database import Database
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.upgrades.workers.cache import OpenCache, write_files

Shared = TypeVar("Shared")
Part = TypeVar("Part")
Result = TypeVar("Result")

# A worker reads a piece of items, transforms their vectors and writes them. This may be repeated:
# another worker does a piece whose worker died, and a piece that two workers did is stored once.

# Labels of a piece. It has several chunks, because handing it out costs as much as reading a chunk.
PIECE = 4 * CHUNK_ROWS
# Database connections of a worker, which does one piece at a time.
_CONNECTIONS = 2
# Longest wait (seconds) of a worker for a database that restarts.
_WAIT_S = 60.0


@dataclass(frozen=True)
class UpgradeWork:
    """Describe the upgrade of one gallery to workers.

    It is a secret: `database_url` lets its reader write to the database.

    Attributes:
        cache_key: identifies the work, so that a worker opens connections and models once.
        database_url: address of the database.
        gallery_number: number of the gallery.
        source_space: id of the space that is read.
        target_space: the space that is written.
        route: upgrades from the source's release to the target's.
        model_files: the publication folder, for workers of this machine; or the model files by
            published path, from `read_route_files`. Each file is checked against its signed digest
            when it is opened.
    """

    cache_key: str
    database_url: str = field(repr=False)
    gallery_number: int
    source_space: str
    target_space: SpaceSpec
    route: Route = field(repr=False)
    model_files: Path | Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class MigrationPiece:
    """Name items to migrate.

    Attributes:
        labels: labels of the items, int64 [n].
        with_side: read side-information too; items without it are skipped.
    """

    labels: Labels
    with_side: bool


def read_route_files(folder: Path, route: Route) -> dict[str, bytes]:
    """Read the model files of a route into memory (megabytes), by their published paths.

    Files are not checked here. Both files of an upgrade that is quantised are read.

    Args:
        folder: the publication folder.
        route: the route; one without steps has no files.

    Raises:
        OSError: a file cannot be read.
    """
    paths = {
        file.path
        for _, upgrade in route.steps
        for file in (upgrade.file, upgrade.int8_file)
        if file is not None
    }
    return {path: (folder / path).read_bytes() for path in sorted(paths)}


class _OpenUpgrade:
    """Hold the connections and models that a worker keeps open between the pieces of one work."""

    def __init__(self, work: UpgradeWork, closing: ExitStack) -> None:
        self._target = work.target_space
        files = work.model_files
        folder = files if isinstance(files, Path) else write_files(files, closing)
        self._runner = open_route(folder, work.route, 1, int8=True)
        database = Database(work.database_url, _CONNECTIONS, _WAIT_S)
        closing.callback(database.close)
        database.open(lambda _: None)
        self._gallery = PostgresqlGallery(database, work.gallery_number)
        self._windows = self._gallery.windows_of_missing_vectors(
            work.source_space, work.target_space, self._runner.reads_side
        )

    def carry(self, piece: MigrationPiece) -> Labels:
        """Migrate a piece in chunks; each is durable before the next is read.

        Returns:
            The labels that were written, increasing.
        """
        chunks = range(0, len(piece.labels), CHUNK_ROWS)
        results = [
            self._chunk(piece.labels[start : start + CHUNK_ROWS], piece.with_side)
            for start in chunks
        ]
        return np.concatenate(results)

    def _chunk(self, labels: Labels, with_side: bool) -> Labels:
        existing, embedding, side = self._windows.read(labels, with_side)
        if not len(existing):
            return np.empty(0, np.int64)
        return migrate_window(self._gallery, self._runner, self._target, existing, embedding, side)


_open_upgrades = OpenCache(_OpenUpgrade)


def migrate_piece(work: UpgradeWork, piece: MigrationPiece) -> Labels:
    """Migrate the items of a piece in this process, and store their vectors durably.

    The first call for a work opens its connections and models; they stay open until the first call
    for another work. Items that were deleted, and items that have a vector in the target already,
    are skipped.

    A piece is written in chunks, each in a commit of its own; chunks before an error stay.

    Args:
        work: the upgrade.
        piece: the items.

    Returns:
        The labels that were written, increasing; they may be fewer than those of the piece.

    Raises:
        VerificationError: a model file is missing or differs from its signed digest, or an output
            is not valid.
        IncompatibleSpaceError: the gallery has lost the source or the target.
        UnavailableError: the database does not answer for a minute.
        CannotWriteError: the database cannot write.
        OSError: `work.model_files` is no folder, and the disk of temporary files cannot be written.
        GalleryDeletedError: the gallery was deleted.
        BusyError: the database is busy.
        InvalidInputError: an output is not valid for the target.
        ConfigurationError: the database refuses a statement.
    """
    return _open_upgrades.open_for(work, work.cache_key).carry(piece)


# A piece whose worker ended so often makes the upgrade fail: the items may be the cause.
TRIES = 5
# Pieces handed out for each worker: one that it does, and one that it begins without a wait.
AHEAD = 2


class Workers(Protocol):
    """Migrate pieces in other processes."""

    def migrate_pieces(
        self, work: UpgradeWork, pieces: Iterable[MigrationPiece]
    ) -> Iterator[Labels]:
        """Hand out pieces, and yield the labels that were written of each piece when it ends.

        The order of the results is not that of `pieces`. A piece whose worker ends is given to
        another one. Without pieces nothing is yielded.

        Args:
            work: the upgrade.
            pieces: the pieces; the next one is taken when a worker has time.

        Yields:
            The labels, int64, increasing; perhaps none.

        Raises:
            NobackfillError: as `migrate_piece`; raised once the pieces under way have ended.
            UnavailableError: workers end again and again, or there are none.
            OSError: as `migrate_piece`.
        """

    def close(self) -> None:
        """End the workers, after the pieces under way; without workers, and at a second call, do
        nothing.
        """


class Cluster(Workers, Protocol):
    """Run other tasks as well; plug-ins of `nobackfill.workers` return a cluster for an address."""

    def run(
        self, function: Callable[[Shared, Part], Result], work: Shared, parts: Iterable[Part]
    ) -> Iterator[Result]:
        """Call a function for each part on some worker, and yield the results as the calls end.

        The order of the results is not that of `parts`.

        Args:
            function: the function; a call may be repeated on another worker.
            work: the first argument of every call; it is sent to each node once.
            parts: the second arguments; the next one is taken when a worker has time.

        Raises:
            NobackfillError: as `function`; raised once the calls under way have ended.
            UnavailableError: workers end again and again, or there are none.
            Exception: any other error of `function`.
        """


class WorkerUpgrades:
    """Run upgrades of galleries in PostgreSQL by workers, for the gateway."""

    def __init__(self, workers: Workers, publication_folder: Path) -> None:
        """Take over workers.

        Nothing is started or read yet.

        Args:
            workers: the workers; `close` ends them.
            publication_folder: the publication folder.
        """
        self._workers = workers
        self._files = publication_folder

    def run(
        self, store: GalleryStore, route: Route, target: SpaceSpec,
        on_progress: Callable[[UpgradeProgress], None], should_stop: Callable[[], bool],
    ) -> UpgradeOutcome:  # fmt: skip
        """Fill a space from the active space of a gallery, as `gallery.staging.run_upgrade` does in
        one thread.

        The missing items are handed out in passes, until a whole pass finds none. Running it again
        continues where an earlier run ended. Listeners of the store hear of the labels of each
        piece, and at an error of all labels that may have been written.

        Args:
            store: the gallery, which must be in PostgreSQL.
            route: upgrades from the active space's release to the target's.
            target: the space to fill; it is created if it is missing.
            on_progress: called with the progress after each piece.
            should_stop: called before each piece; True stops the upgrade, once the pieces under way
                have ended.

        Returns:
            The number of vectors that were written, of items without one, and whether `should_stop`
            ended it.

        Raises:
            NobackfillError: as `migrate_piece`.
            UnavailableError: no worker is left, or the database does not answer.
            BusyError: the gallery could not be locked; try again.
            VerificationError: a model file is missing or differs from its signed digest, or an
                output is not valid.
            InvalidInputError: the target exists as another space, or has too many dimensions.
            IncompatibleSpaceError: the gallery has no such source, or has lost a space.
            GalleryDeletedError: the gallery was deleted.
            CannotWriteError: the database cannot write.
            OSError: a worker cannot be started, or a Ray cluster is used and a model file cannot
                be read.
            ConfigurationError: the database refuses a statement.
            AssertionError: the gallery is not in PostgreSQL, which the settings exclude.
            Exception: an error of `on_progress` or `should_stop`; vectors that were written stay.
        """
        assert isinstance(store, PostgresqlGallery), "the settings refuse workers with a folder"
        source = store.active().spec.space
        work = UpgradeWork(
            uuid.uuid4().hex, store.database.url, store.number, source, target, route, self._files
        )
        store.add_staging_space(target)
        windows = store.windows_of_missing_vectors(source, target, route.reads_side)
        started = time.monotonic()
        total = store.count()
        first_complete = total - store.count_items_without_vector(target.space)
        writes, is_stopped, has_items = 0, False, True
        unreported: set[int] = set()

        def pieces() -> Iterator[MigrationPiece]:
            nonlocal has_items, is_stopped
            for labels, with_side in windows.pieces("label", PIECE):
                if should_stop():
                    is_stopped = True
                    return
                has_items = True
                unreported.update(labels.tolist())
                yield MigrationPiece(labels, with_side)

        try:
            while has_items and not is_stopped:
                has_items = False
                for labels in self._workers.migrate_pieces(work, pieces()):
                    writes += len(labels)
                    unreported.difference_update(labels.tolist())
                    store.announce_external_writes(labels)
                    complete = first_complete + writes
                    seconds = time.monotonic() - started
                    on_progress(UpgradeProgress(complete, max(total, complete), writes, seconds))
        finally:
            # A worker that ended may have written items that no result names.
            if unreported:
                store.announce_external_writes(np.array(sorted(unreported), np.int64))
        return UpgradeOutcome(writes, store.count_items_without_vector(target.space), is_stopped)

    def close(self) -> None:
        """End the workers; a second call does nothing.

        `WorkerProcesses` finish the pieces under way, which is waited for, and a later `run` starts
        new ones. A Ray cluster is left at once, and its running tasks are cancelled.
        """
        self._workers.close()
