"""Searches of a gallery whose vectors are in this process: through its live views."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nobackfill.gallery.matches import Matches
from nobackfill.gallery.search import origins
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Neighbours
from nobackfill.gallery.search.view import Snapshot
from nobackfill.server.galleries.bases import inherit_index
from nobackfill.server.galleries.plan import Part
from nobackfill.vectors import Vectors

if TYPE_CHECKING:
    from nobackfill.server.galleries.hosted import Hosted


def search(
    hosted: "Hosted", parts: Sequence[Part], queries: Sequence[Vectors], k: int,
    allowed: Matches | None, ef: int,
) -> list[Neighbours]:  # fmt: skip
    """See Hosted.search."""
    snapshots = _snapshots(hosted, parts)
    found = [
        best(hosted, part, snapshot, column, k, allowed, ef)
        for part, snapshot, column in zip(parts, snapshots, queries, strict=True)
    ]
    if not ef:
        # What was asked of a graph, which is tuned on some of it.
        for part, snapshot, column in zip(parts, snapshots, queries, strict=True):
            if not isinstance(snapshot.base.index, ExactIndex):
                hosted.view(part.space).asked.see(column)
    return found


def best(
    hosted: "Hosted", part: Part, snapshot: Snapshot, queries: Vectors, k: int,
    allowed: Matches | None = None, ef: int = 0,
) -> Neighbours:  # fmt: skip
    """What a part answers, its snapshot being this: the nearest, or, where carried and native
    vectors do not compare, the best along its scale."""
    mask = None if allowed is None else allowed.mask
    carried = hosted.origins.mixed(part, len(snapshot))
    if carried is None or part.scale is None:
        return snapshot.search(queries, k, mask, ef)
    return origins.search(
        lambda chosen: snapshot.search(queries, k, chosen, ef),
        carried.origins, part.scale, k, mask,
    )  # fmt: skip


def _snapshots(hosted: "Hosted", parts: Sequence[Part]) -> list[Snapshot]:
    """One snapshot a part, each item in the first part that has it.

    The later part is taken first: what moves to the earlier part between the two is then left out
    of the later one, and never missing from both.
    """
    if len(parts) == 1:
        return [hosted.view(parts[0].space).snapshot()]
    new, old = parts
    before = hosted.view(old.space).snapshot()
    upgraded = hosted.view(new.space).snapshot()
    return [upgraded, hosted.rest(before, upgraded)]


def compares(hosted: "Hosted", part: Part, ef: int) -> bool:
    """See Hosted.compares."""
    base = hosted.view(part.space).snapshot().base
    return isinstance(base.index, ExactIndex) or ef >= len(base.index.labels)


def make_ready(hosted: "Hosted", space: str, between: Callable[[], None]) -> None:
    """See Hosted.make_ready. Where the release was active before a rollback, its own index is still
    there; what cannot be inherited is built."""
    source = hosted.view(hosted.spec().space)
    view = hosted.view(space, source, between)
    inherit_index(hosted, space, view, source, between)
