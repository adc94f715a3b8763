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
from nobackfill.server.upgrades.workers.workers import AHEAD, TRIES, Piece, UpgradeWork, carry_piece

log = structlog.get_logger("server.upgrading")

# Nice value of workers: searches come first.
_NICE = 10


class Processes:
    """Run work in processes, which start with the first piece; implements Workers."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None

    def carry(self, work: UpgradeWork, pieces: Iterable[Piece]) -> Iterator[Labels]:
        waiting = iter(pieces)
        retries: list[tuple[Piece, int]] = []
        under_way: dict[Future[Labels], tuple[Piece, int]] = {}
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
                                f"a worker process ended {TRIES} times while it upgraded the same "
                                "items; check the memory, and set fewer --workers"
                            )
                        retries.append((piece, tries))
                        self._renew()
                    else:
                        yield future.result()
        finally:
            for future in under_way:
                future.cancel()
            wait(under_way)

    def _submit(self, work: UpgradeWork, piece: Piece) -> Future[Labels]:
        for _ in range(TRIES):
            with self._lock:
                if self._pool is None:
                    self._pool = ProcessPoolExecutor(
                        self._count, get_context("spawn"), initializer=_begin
                    )
                try:
                    return self._pool.submit(carry_piece, work, piece)
                except BrokenProcessPool:
                    self._pool = None
        raise UnavailableError(
            "worker processes end as soon as they start; check the gateway's log"
        )

    def _renew(self) -> None:
        with self._lock:
            if self._pool is not None:
                log.warning("a worker process ended; another one upgrades its items")
                self._pool.shutdown(wait=False)
                self._pool = None

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
                self._pool = None


def _begin() -> None:
    """Prepare a worker: give it low priority, and end it with the gateway."""
    os.nice(_NICE)
    end_with_parent()
