"""An upgrade by workers: what is lacking is handed out until a whole pass finds nothing."""

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.upgrade import Outcome, Progress
from nobackfill.release.routes import Route
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.upgrades.workers.window import PIECE, Piece, Work
from nobackfill.server.upgrades.workers.workers import Workers


class ByWorkers:
    """What the gateway keeps of them."""

    def __init__(self, workers: Workers, files: Path) -> None:
        """`files`: the publication folder."""
        self._workers = workers
        self._files = files

    def run(
        self, store: GalleryStore, route: Route, target: SpaceSpec,
        on_progress: Callable[[Progress], None], should_stop: Callable[[], bool],
    ) -> Outcome:  # fmt: skip
        """Fill `target` from the active space of a gallery in PostgreSQL; as run_by_workers."""
        assert isinstance(store, PostgresqlGallery), "workers are refused beside a folder"
        work = Work(
            uuid.uuid4().hex, store.database.url, store.number, store.active().spec.space, target,
            route, self._files,
        )  # fmt: skip
        return run_by_workers(
            store, self._workers, work, on_progress=on_progress, should_stop=should_stop
        )

    def close(self) -> None:
        self._workers.close()


def run_by_workers(
    store: PostgresqlGallery, workers: Workers, work: Work, *,
    on_progress: Callable[[Progress], None], should_stop: Callable[[], bool],
) -> Outcome:  # fmt: skip
    """As gallery.upgrade.run_upgrade does in one thread. Raises what it raises, UnavailableError
    where no worker is left."""
    store.begin(work.target)
    windows = store.windows(work.source, work.target, work.route.reads_side)
    started = time.monotonic()
    total = store.count()
    before = total - store.left_behind(work.target.space)
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
                on_progress(Progress(done, max(total, done), written, time.monotonic() - started))
    finally:
        # A worker that ends half-way has written what neither it nor who repeats the piece tells.
        if untold:
            store.written_elsewhere(np.array(sorted(untold), np.int64))
    return Outcome(written, store.left_behind(work.target.space), stopped)
