"""Compute upgrades in worker processes on this machine."""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import structlog

from nobackfill.errors import UnavailableError
from nobackfill.gallery.search.index import Labels
from nobackfill.processes import end_with_parent
from nobackfill.server.upgrades.workers.workers import (
    AHEAD,
    TRIES,
    MigrationPiece,
    UpgradeWork,
    migrate_piece,
)

log = structlog.get_logger("server.upgrading")

# Nice value of workers: searches come first.
_NICE = 10


class WorkerProcesses:
    """Run work in processes, which start with the first piece; implements Workers.

    The processes have a low priority, and end with this one. They stay for the next upgrade, until
    `close`.
    """

    def __init__(self, count: int) -> None:
        """Start no process yet.

        Args:
            count: number of processes, at least 1.
        """
        self._count = count
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None

    def migrate_pieces(
        self, work: UpgradeWork, pieces: Iterable[MigrationPiece]
    ) -> Iterator[Labels]:
        """Hand out pieces, and yield the labels that were written of each piece when it ends; see
        Workers.migrate_pieces.

        Twice as many pieces as processes are under way. If the iterator ends early or raises,
        pieces that wait are dropped, and those under way are waited for. A piece is given up after
        five times in which a process ended while the piece was under way, even another piece's
        process. Several threads may call it; they share the processes.

        Args:
            work: the upgrade.
            pieces: the pieces; the next one is taken when a worker has time.

        Yields:
            The labels written of one piece, int64, increasing, in the order in which pieces end.

        Raises:
            UnavailableError: worker processes end again and again, or the database does not answer.
            VerificationError: a model file is missing or differs from its signed digest, or an
                output is not valid.
            IncompatibleSpaceError: the gallery has lost the source or the target.
            BusyError: the database is busy.
            CannotWriteError: the database cannot write.
            NotFoundError: the gallery was deleted.
            OSError: a process cannot be started, or the disk of temporary files cannot be written.
            ConfigurationError: the database refuses a statement.
            InvalidInputError: an output is not valid for the target.
            NobackfillError: whatever the iterator of `pieces` raises.
            concurrent.futures.CancelledError: another thread has called `close` meanwhile.
        """
        waiting = iter(pieces)
        retries: list[tuple[MigrationPiece, int]] = []
        under_way: dict[Future[Labels], tuple[MigrationPiece, int]] = {}
        try:
            while True:
                while len(under_way) < AHEAD * self._count:
                    piece, tries = retries.pop() if retries else (next(waiting, None), 0)
                    if piece is None:
                        break
                    under_way[self._submit(work, piece)] = piece, tries + 1
                if not under_way:
                    return
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    piece, tries = under_way.pop(future)
                    if isinstance(future.exception(), BrokenProcessPool):
                        if tries == TRIES:
                            raise UnavailableError(
                                f"upgrade: {TRIES} worker processes ended, one after another, "
                                f"while each upgraded the same {len(piece.labels)} items; check "
                                "the memory of this machine, and serve with fewer --workers than "
                                f"{self._count}"
                            )
                        retries.append((piece, tries))
                        self._renew()
                    else:
                        yield future.result()
        finally:
            for future in under_way:
                future.cancel()
            wait(under_way)

    def _submit(self, work: UpgradeWork, piece: MigrationPiece) -> Future[Labels]:
        for _ in range(TRIES):
            with self._lock:
                if self._pool is None:
                    self._pool = ProcessPoolExecutor(
                        self._count, get_context("spawn"), initializer=_begin
                    )
                try:
                    return self._pool.submit(migrate_piece, work, piece)
                except BrokenProcessPool:
                    self._pool = None
        raise UnavailableError(
            f"upgrade: {TRIES} times, the {self._count} worker processes ended as soon as they "
            "started; read their error in the gateway's log, or serve without --workers"
        )

    def _renew(self) -> None:
        with self._lock:
            if self._pool is not None:
                log.warning(
                    "a worker process ended before its work was done; another one upgrades its "
                    "items"
                )
                self._pool.shutdown(wait=False)
                self._pool = None

    def close(self) -> None:
        """End the workers; without workers, and at a second call, do nothing; see Workers.close.

        It waits for the pieces under way; those that wait are dropped. A later `migrate_pieces`
        starts new processes. Any thread may call it.
        """
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
                self._pool = None


def _begin() -> None:
    """Prepare a worker: give it low priority, and end it with the gateway."""
    os.nice(_NICE)
    end_with_parent()
