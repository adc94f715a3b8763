"""Cells of the compatibility matrix: their names, and which of them there are.

A cell is written QUERY/GALLERY: `2/2`, `2/1` (vectors of release 1 as they are), `2/1>2` (carried
along the route 1 -> 2).
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nobackfill.errors import ConfigurationError
from nobackfill.release.manifest import Manifest
from nobackfill.release.routes import every_route

# Measured of each source: all of them where fewer than six releases lie between.
MOST_ROUTES = 32
_CELL = re.compile(r"^(\d+)/(\d+(?:>\d+)*)\Z")


@dataclass(frozen=True)
class CellName:
    """`query`'s model against the gallery of the first release, carried along the others."""

    query: int
    gallery: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.query}/{self.carried}"

    @property
    def carried(self) -> str:
        """The gallery's side alone."""
        return ">".join(map(str, self.gallery))

    @property
    def raw(self) -> bool:
        """Whether vectors of another release are searched as they are."""
        return self.gallery != (self.query,) and len(self.gallery) == 1


def alone(release: int) -> CellName:
    """A release's queries against its own vectors."""
    return CellName(release, (release,))


def parse_cell(text: str) -> CellName:
    """Read `2/1>2`. Raises ConfigurationError for anything else."""
    match = _CELL.match(text.strip())
    if match is None:
        raise ConfigurationError(
            f"expected a cell like 2/2, 2/1 or 2/1>2 (query/gallery), got {text!r}"
        )
    return CellName(int(match[1]), tuple(int(part) for part in match[2].split(">")))


def upgrade_cells(old: int, new: int, route: tuple[int, ...]) -> dict[str, CellName]:
    """The cells of one upgrade by what they are to it; `served` are vectors that took `route`, or,
    where that is empty, the old ones as they are."""
    return {
        "old/old": alone(old),
        "new/old": CellName(new, (old,)),
        "new/served": CellName(new, route or (old,)),
        "new/new": alone(new),
    }


def served_cells(
    new: Manifest, manifests: Mapping[int, Manifest], withdrawn: frozenset[int] = frozenset()
) -> Iterator[CellName]:
    """The ways in which `new` would answer from older vectors: direct search, and of each release
    the MOST_ROUTES shortest routes. Twenty releases that are fully linked have a quarter of a
    million; what is not measured is planned by the product of its parts.

    No route is planned through a withdrawn release, but a gallery may still live in its space.
    """
    usable = {n: manifest for n, manifest in manifests.items() if n not in withdrawn}
    for number, old in sorted(manifests.items()):
        if number >= new.release:
            continue
        if new.searches(old.space):
            yield CellName(new.release, (number,))
        routes = every_route(usable | {number: old}, number, new.release, old.side_space)
        for route in itertools.islice(routes, MOST_ROUTES):
            yield CellName(new.release, route.releases)


def every_cell(manifests: Mapping[int, Manifest]) -> list[CellName]:
    """Each release on its own, every way in which old vectors are served, and the naive swaps."""
    cells: list[CellName] = []
    for number, manifest in sorted(manifests.items()):
        cells.append(alone(number))
        cells += list(served_cells(manifest, manifests))
        cells += [
            CellName(number, (old,))
            for old in sorted(manifests)
            if old < number and manifests[old].embedder.dim == manifest.embedder.dim
        ]
    return list(dict.fromkeys(cells))
