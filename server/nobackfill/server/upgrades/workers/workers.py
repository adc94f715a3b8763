"""What an upgrade asks of those who carry its windows."""

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
from nobackfill.release.models import CHUNK
from nobackfill.release.routes import Route, open_route
from nobackfill.server.stores.postgresql.database import Database
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.upgrades.workers.cache import OpenCache, write_files

Shared = TypeVar("Shared")
Part = TypeVar("Part")
Result = TypeVar("Result")

# One window carried wherever it is called: what a worker is given, and what it keeps.
#
# Read, transform, write may be repeated: a window whose worker died half-way is carried by another,
# and one that two workers carried is there once.

# Labels of a piece: several chunks, for handing out a piece costs as much as reading a chunk.
PIECE = 4 * CHUNK
# A worker has one window under way.
_CONNECTIONS = 2
# How long it waits for a database that is restarted.
_WAIT_S = 60.0


@dataclass(frozen=True)
class UpgradeWork:
    """An upgrade of one gallery, named by its number. `files`: the publication folder, for workers
    of this machine, or what `files_of` it holds; each is checked against its signed digest where it
    is opened. Whoever sees this may write to the database."""

    key: str
    url: str = field(repr=False)
    gallery: int
    source: str
    target: SpaceSpec
    route: Route = field(repr=False)
    files: Path | Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class Piece:
    """Labels to carry, with their side-information or without."""

    labels: Labels
    with_side: bool


def files_of(folder: Path, route: Route) -> dict[str, bytes]:
    """The route's files, by their published paths: megabytes. Raises OSError."""
    wanted = {
        file.path
        for _, upgrade in route.steps
        for file in (upgrade.file, upgrade.int8_file)
        if file is not None
    }
    return {path: (folder / path).read_bytes() for path in sorted(wanted)}


class _OpenUpgrade:
    """Connections, and the models."""

    def __init__(self, work: UpgradeWork, closing: ExitStack) -> None:
        self._target = work.target
        files = work.files
        folder = files if isinstance(files, Path) else write_files(files, closing)
        self._runner = open_route(folder, work.route, 1, int8=True)
        database = Database(work.url, _CONNECTIONS, _WAIT_S)
        closing.callback(database.close)
        database.open(lambda _: None)
        self._gallery = PostgresqlGallery(database, work.gallery)
        self._windows = self._gallery.windows(work.source, work.target, self._runner.reads_side)

    def carry(self, piece: Piece) -> Labels:
        """Chunk by chunk, each durable before the next is read."""
        chunks = range(0, len(piece.labels), CHUNK)
        written = [
            self._chunk(piece.labels[start : start + CHUNK], piece.with_side) for start in chunks
        ]
        return np.concatenate(written)

    def _chunk(self, wanted: Labels, with_side: bool) -> Labels:
        labels, embedding, side = self._windows.read(wanted, with_side)
        if not len(labels):
            return np.empty(0, np.int64)
        return migrate_window(self._gallery, self._runner, self._target, labels, embedding, side)


_kept = OpenCache(_OpenUpgrade)


def carry_piece(work: UpgradeWork, piece: Piece) -> Labels:
    """Carry a piece; the labels written, increasing. Raises what `sync.carry` raises."""
    return _kept.of(work, work.key).carry(piece)


# A piece that lost its worker so often is not the worker's misfortune any more.
TRIES = 5
# Pieces under way for each worker: the next one waits where it is wanted.
AHEAD = 2


class Workers(Protocol):
    """Processes that carry pieces."""

    def carry(self, work: UpgradeWork, pieces: Iterable[Piece]) -> Iterator[Labels]:
        """Labels written of each piece, as they end, in no order; `pieces` are asked for as workers
        have time. A piece whose worker ends is carried by another.

        Raises what a piece raises, once those under way have ended; UnavailableError where workers
        end again and again, or there are none.
        """
        ...

    def close(self) -> None:
        """End them, if there are any; twice is harmless."""
        ...


class Cluster(Workers, Protocol):
    """Workers that run other tasks, too: what a plug-in of `nobackfill.workers` makes of an
    address."""

    def run(
        self, do: Callable[[Shared, Part], Result], work: Shared, parts: Iterable[Part]
    ) -> Iterator[Result]:
        """What `do(work, part)` returns of each part, as they end; otherwise as `carry`."""
        ...


# An upgrade by workers: what is lacking is handed out until a whole pass finds nothing.


class ByWorkers:
    """What the gateway keeps of them."""

    def __init__(self, workers: Workers, files: Path) -> None:
        """`files`: the publication folder."""
        self._workers = workers
        self._files = files

    def run(
        self, store: GalleryStore, route: Route, target: SpaceSpec,
        on_progress: Callable[[UpgradeProgress], None], should_stop: Callable[[], bool],
    ) -> UpgradeOutcome:  # fmt: skip
        """Fill `target` from the active space of a gallery in PostgreSQL; as run_by_workers."""
        assert isinstance(store, PostgresqlGallery), "workers are refused beside a folder"
        work = UpgradeWork(
            uuid.uuid4().hex, store.database.url, store.number, store.active().spec.space, target,
            route, self._files,
        )  # fmt: skip
        return run_by_workers(
            store, self._workers, work, on_progress=on_progress, should_stop=should_stop
        )

    def close(self) -> None:
        self._workers.close()


def run_by_workers(
    store: PostgresqlGallery, workers: Workers, work: UpgradeWork, *,
    on_progress: Callable[[UpgradeProgress], None], should_stop: Callable[[], bool],
) -> UpgradeOutcome:  # fmt: skip
    """As gallery.staging.run_upgrade does in one thread. Raises what it raises, UnavailableError
    where no worker is left."""
    store.add_staging_space(work.target)
    windows = store.windows(work.source, work.target, work.route.reads_side)
    started = time.monotonic()
    total = store.count()
    before = total - store.count_left_behind(work.target.space)
    written, stopped, found = 0, False, True
    untold: set[int] = set()

    def pieces() -> Iterator[Piece]:
        nonlocal found, stopped
        for labels, with_side in windows.pieces("label", PIECE):
            if should_stop():
                stopped = True
                return
            found = True
            untold.update(labels.tolist())
            yield Piece(labels, with_side)

    try:
        while found and not stopped:
            found = False
            for labels in workers.carry(work, pieces()):
                written += len(labels)
                untold.difference_update(labels.tolist())
                store.written_elsewhere(labels)
                done = before + written
                on_progress(
                    UpgradeProgress(done, max(total, done), written, time.monotonic() - started)
                )
    finally:
        # A worker that ends half-way has written what neither it nor who repeats the piece tells.
        if untold:
            store.written_elsewhere(np.array(sorted(untold), np.int64))
    return UpgradeOutcome(written, store.count_left_behind(work.target.space), stopped)
