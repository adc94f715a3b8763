"""One window carried wherever it is called: what a worker is given, and what it keeps.

Read, transform, write may be repeated: a window whose worker died half-way is carried by another,
and one that two workers carried is there once.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.upgrade import carry
from nobackfill.release.models import CHUNK
from nobackfill.release.routes import Route, open_route
from nobackfill.server.stores.postgresql.database import Database
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.upgrades.workers.kept import Kept, laid_out

# Labels of a piece: several chunks, for handing out a piece costs as much as reading a chunk.
PIECE = 4 * CHUNK
# A worker has one window under way.
_CONNECTIONS = 2
# How long it waits for a database that is restarted.
_WAIT_S = 60.0


@dataclass(frozen=True)
class Work:
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


class _Open:
    """Connections, and the models."""

    def __init__(self, work: Work, closing: ExitStack) -> None:
        self._target = work.target
        files = work.files
        folder = files if isinstance(files, Path) else laid_out(files, closing)
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
        return carry(self._gallery, self._runner, self._target, labels, embedding, side)


_kept = Kept(_Open)


def carry_piece(work: Work, piece: Piece) -> Labels:
    """Carry a piece; the labels written, increasing. Raises what `upgrade.carry` raises."""
    return _kept.of(work, work.key).carry(piece)
