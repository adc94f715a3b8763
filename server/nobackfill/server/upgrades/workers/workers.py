"""What an upgrade asks of those who carry its windows."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from nobackfill.gallery.search.index import Labels
from nobackfill.server.upgrades.workers.window import Piece, Work

# A piece that lost its worker so often is not the worker's misfortune any more.
TRIES = 5
# Pieces under way for each worker: the next one waits where it is wanted.
AHEAD = 2


class Workers(Protocol):
    """Processes that carry pieces."""

    def carry(self, work: Work, pieces: Iterable[Piece]) -> Iterator[Labels]:
        """Labels written of each piece, as they end, in no order; `pieces` are asked for as workers
        have time. A piece whose worker ends is carried by another.

        Raises what a piece raises, once those under way have ended; UnavailableError where workers
        end again and again, or there are none.
        """
        ...

    def close(self) -> None:
        """End them, if there are any; twice is harmless."""
        ...
