"""What a release's manifest proves, as the pages show it."""

from collections.abc import Mapping
from dataclasses import dataclass

from nobackfill.release.manifest import Manifest

QUERIES, GALLERIES = ("old", "new"), ("old", "served", "new")
TITLES = {"old": "stored by the old model", "served": "after the upgrade", "new": "embedded again"}
BOUNDS = {("old", "old"): "lower bound", ("new", "new"): "upper bound"}
MARKS = BOUNDS | {("new", "old"): "naive swap", ("new", "served"): "what you get"}


@dataclass(frozen=True)
class MatrixCellView:
    """A cell in percent, and how dark it is drawn, 0 to 1 of the best cell."""

    map: float
    cmc1: float
    cmc5: float
    shade: float


def matrix(manifest: Manifest, old: int) -> Mapping[tuple[str, str], MatrixCellView]:
    """The compatibility matrix of a release against an older one, as it was published with it;
    what was not measured is missing. What is served comes by the shortest route that was."""
    new = manifest.release
    routes = sorted(
        (route.releases for route in manifest.routes if route.releases[0] == old), key=len
    )
    names = {f"{old}/{old}": ("old", "old"), f"{new}/{old}": ("new", "old"),
             f"{new}/{new}": ("new", "new")}  # fmt: skip
    if routes:
        names[f"{new}/{'>'.join(map(str, routes[0]))}"] = ("new", "served")
    found = {names[cell.name]: cell for cell in manifest.evidence if cell.name in names}
    best = max((cell.map for cell in found.values()), default=0.0) or 1.0
    return {
        place: MatrixCellView(100 * cell.map, 100 * cell.cmc1, 100 * cell.cmc5, cell.map / best)
        for place, cell in found.items()
    }
