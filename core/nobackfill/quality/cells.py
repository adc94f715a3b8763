"""Name the cells of the compatibility matrix, and list those that exist.

A cell is written QUERY/GALLERY: `2/2`, `2/1` (vectors of release 1 as they are), `2/1>2` (migrated
along the route 1 -> 2).
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nobackfill.errors import ConfigurationError
from nobackfill.release.manifest import Manifest
from nobackfill.release.routes import iterate_routes

# Routes that are measured from each source: all, if fewer than six releases lie between.
MOST_ROUTES = 32
_CELL = re.compile(r"^(\d+)/(\d+(?:>\d+)*)\Z")


@dataclass(frozen=True)
class CellName:
    """The query model of a cell, and the releases of its gallery: the source, then the route."""

    query_release: int
    gallery_releases: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.query_release}/{self.gallery_name}"

    @property
    def gallery_name(self) -> str:
        """Return the gallery's side, such as `1>2`."""
        return ">".join(map(str, self.gallery_releases))

    @property
    def searches_unmigrated(self) -> bool:
        """Tell whether vectors of another release are searched as they are. False for a release's
        own vectors and for migrated ones."""
        return self.gallery_releases != (self.query_release,) and len(self.gallery_releases) == 1


def native_cell(release: int) -> CellName:
    """Return the cell of a release's queries on its own vectors."""
    return CellName(release, (release,))


def parse_cell(text: str) -> CellName:
    """Parse a cell such as `2/1>2`; spaces around it are ignored.

    Whether the releases and the route exist is not checked.

    Args:
        text: The text, such as `2/2`, `2/1` or `2/1>2`.

    Raises:
        ConfigurationError: Any other text.
    """
    match = _CELL.match(text.strip())
    if match is None:
        raise ConfigurationError(
            "--cells: expected a cell like 2/2, 2/1 or 2/1>2 (RELEASE OF THE QUERIES/RELEASE OF "
            f"THE GALLERY, then >RELEASE for each upgrade of the gallery), got {text!r}; correct "
            "the cell"
        )
    return CellName(int(match[1]), tuple(int(part) for part in match[2].split(">")))


def upgrade_cells(
    old_release: int, new_release: int, route: tuple[int, ...]
) -> dict[str, CellName]:
    """Return the four cells of an upgrade by name: old/old, new/old, new/served and new/new.

    Args:
        old_release: The source.
        new_release: The target.
        route: Releases of the route that the served vectors took; empty: the old vectors as they
            are.
    """
    return {
        "old/old": native_cell(old_release),
        "new/old": CellName(new_release, (old_release,)),
        "new/served": CellName(new_release, route or (old_release,)),
        "new/new": native_cell(new_release),
    }


def served_cells(
    new: Manifest, manifests: Mapping[int, Manifest], withdrawn: frozenset[int] = frozenset()
) -> Iterator[CellName]:
    """Yield the ways in which a release would answer from older vectors.

    They are direct search, where `new` declares it, and the MOST_ROUTES shortest routes from each
    older release: twenty fully linked releases have a quarter of a million routes. Other routes are
    planned by the product of their parts. No route leads through a withdrawn release, but a gallery
    may still be in its space.

    Args:
        new: The release; its own number among `withdrawn` gives no routes.
        manifests: The releases by number, `new` among them: without it there are no routes. Newer
            ones are ignored.
        withdrawn: Numbers of withdrawn releases.

    Yields:
        Cells, by ascending number of the older release: direct search first, then routes, the
        shortest first. None without older releases.
    """
    usable = {n: manifest for n, manifest in manifests.items() if n not in withdrawn}
    for number, old in sorted(manifests.items()):
        if number >= new.release:
            continue
        if new.searches_space_directly(old.space):
            yield CellName(new.release, (number,))
        routes = iterate_routes(usable | {number: old}, number, new.release, old.side_space)
        for route in itertools.islice(routes, MOST_ROUTES):
            yield CellName(new.release, route.releases)


def list_cells(manifests: Mapping[int, Manifest]) -> list[CellName]:
    """List each release on its own, every way of serving older vectors, and the naive swaps.

    A naive swap searches raw vectors of an older release of the same dimension. Withdrawn releases
    are not left out. From each older release, only the MOST_ROUTES shortest routes are listed.

    Returns:
        The cells, each once, ascending by the query's release; empty without releases. For a
        release they are its own cell, then those that it serves, then the naive swaps, each by the
        older release.
    """
    cells: list[CellName] = []
    for number, manifest in sorted(manifests.items()):
        cells.append(native_cell(number))
        cells += list(served_cells(manifest, manifests))
        cells += [
            CellName(number, (old,))
            for old in sorted(manifests)
            if old < number and manifests[old].embedder.dim == manifest.embedder.dim
        ]
    return list(dict.fromkeys(cells))
