"""One search: what is asked, what is found, and who says which release answers it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.filters import Filter
from nobackfill.gallery.matches import Matches
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import Part, Plan
from nobackfill.server.galleries.queries import Question
from nobackfill.server.galleries.ranking import Hit

# A query by embedding: space id to little-endian float32 values.
ByEmbedding = Mapping[str, bytes]
# An image, a text, or vectors.
Query = bytes | str | ByEmbedding


@dataclass(frozen=True)
class Found:
    """Hits of one query, nearest first, and what answered it."""

    hits: list[Hit]
    release: int
    space: str
    # What a feedback about it names, where somebody asks for that.
    request_id: str = ""


@dataclass(frozen=True)
class Asked:
    """One search. `ef` as in Index.search; `aside`: nobody waits for it, and no one else's queries
    are answered together with it."""

    hosted: Hosted
    query: Query
    k: int
    filtered: Filter | None
    ef: int
    aside: bool = False


# Answers one query in a plan: by the release on trial, where its part is given.
Search = Callable[[Asked, Plan, Part | None], Found]


Answers = TypeVar("Answers")


class Canary(Protocol):
    """Who says which queries meet a release on trial."""

    def search(self, asked: Asked, plan: Plan, on_trial: Part, search: Search) -> Found:
        """Answer one query, wholly by one pair of query model and gallery."""
        ...

    def batch(self, on_trial: Part, answer: Callable[[Part | None], Answers]) -> Answers:
        """Answer several queries of one call, all of them by the same pair."""
        ...


class Heals(Protocol):
    """Who embeds hits again before they are shown."""

    def heals(self, hosted: Hosted, space: str) -> bool:
        """Whether answers in a space of a gallery are healed at present; looked at for each query
        that might be answered quickly."""
        ...

    def find(
        self, questions: Sequence[Question], allowed: Matches | None
    ) -> list[Found | InvalidInputError]:
        """Answer questions in one space that it heals. Raises as Searching.search."""
        ...
