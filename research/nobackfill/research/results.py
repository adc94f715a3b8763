"""The results of a comparison as a JSON file, from which tables, claims and picture are made.

The picture (SVG) shows the mAP kept against bytes and microseconds per item.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from nobackfill.durable import write_file
from nobackfill.errors import InvalidInputError, NotFoundError

MAIN, UNSEEN = "main", "unseen"


class _ResultPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# Mean and standard deviation over seeds, shares 0..1; one seed has no deviation.
Figure = tuple[float, float | None]


class Provenance(_ResultPart):
    """How to reproduce the results. `configured` is the digest of `catalogue.digest_of_rows`."""

    command: str
    machine: str
    configured: str


class HeldTo(_ResultPart):
    """The row with the largest new/new of all that learned the same, over the same seeds."""

    row: str
    value: float


class RowResult(_ResultPart):
    """A row of one split.

    Attributes:
        cells: figures (cmc1, cmc5, map) by query/gallery.
        held_to: the best new/new by figure; empty without one.
        extras: what cells.py measures, and shares and gains of mAP unless a name says CMC-1.
        shared: the row serves vectors of the table's old model, on the split's own test, without
            having seen it; such rows may be ranked together.
    """

    seeds: int
    shared: bool
    cells: dict[str, dict[str, Figure]]
    held_to: dict[str, HeldTo]
    extras: dict[str, float]

    def mean(self, cell: str, figure: str) -> float | None:
        """Return a figure; None if the row has no such cell."""
        return self.cells[cell][figure][0] if cell in self.cells else None


class ClaimOutcome(_ResultPart):
    """One figure of a claim: the mean difference, and the bounds of its interval over `classes`.

    There are no bounds with too few classes. `rival` is the row that a superlative ("the strongest
    BCT") refers to. An outcome without `classes` comes from a version that did not resample
    classes: its interval treated queries of one class as independent, so its verdict is withdrawn.
    """

    rival: str | None = None
    seeds: int
    difference: float
    bounds: tuple[float, float] | None
    verdict: Literal["holds", "fails", "undecided", "withdrawn"]
    classes: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _withdrawn(cls, notes: dict[str, Any]) -> dict[str, Any]:
        if notes.get("classes") is None:
            return {**notes, "bounds": None, "verdict": "withdrawn"}
        return notes


class SplitResult(_ResultPart):
    """Rows by name, claims by text and figure."""

    rows: dict[str, RowResult]
    claims: dict[str, dict[str, ClaimOutcome]]


class CostResult(_ResultPart):
    """Bytes stored and microseconds of transform, per item."""

    stored: float
    microseconds: float


class Results(_ResultPart):
    """All results. `splits` has `main` and, if it was measured, `unseen`."""

    data: str
    metric: str
    seeds: tuple[int, ...]
    made: Provenance
    splits: dict[str, SplitResult]
    costs: dict[str, CostResult]

    @property
    def main(self) -> SplitResult:
        """The split that tests every class."""
        return self.splits[MAIN]

    def unseen(self, row: str) -> RowResult | None:
        """Return the row's result on classes that no model was trained on; None without one."""
        split = self.splits.get(UNSEEN)
        return None if split is None else split.rows.get(row)


def write_results(path: Path, results: Results) -> None:
    """Write the JSON file atomically."""
    write_file(path, (results.model_dump_json(indent=1) + "\n").encode(), 0o644)


def read_results(path: Path) -> Results:
    """Read results. Raises NotFoundError, or InvalidInputError for a file with other content."""
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file; compare.py writes it as OUT/NAME.json")
    try:
        return Results.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInputError(
            f"{path}: expected results of compare.py, but {where or 'the file'}: {first['msg']}"
        ) from None


@dataclass(frozen=True)
class CostPoint:
    """A way to serve an old gallery; `kept` is its mAP relative to the best new/new, 0..1."""

    name: str
    stored: float
    microseconds: float
    kept: float


def points(results: Results) -> list[CostPoint]:
    """List the rows that serve the shared old model's vectors and have a reference."""
    return [
        CostPoint(name, cost.stored, cost.microseconds, row.extras["kept_map"])
        for name, row in results.main.rows.items()
        if row.shared and row.held_to and (cost := results.costs[name])
    ]


def front(points: Sequence[CostPoint], cost: str) -> list[CostPoint]:
    """Return the Pareto front, ascending by cost."""
    chosen: list[CostPoint] = []
    for point in sorted(points, key=lambda p: (getattr(p, cost), -p.kept)):
        if not chosen or point.kept > chosen[-1].kept:
            chosen.append(point)
    return chosen


_PANELS: Mapping[str, str] = {
    "stored": "bytes stored for an item",
    "microseconds": "microseconds of transform an item, one thread",
}


def draw(points: Sequence[CostPoint], title: str) -> bytes:
    """Draw all points in grey, and the front joined, coloured and named; return an SVG."""
    # Imported here: only the last step of compare.py draws.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (cost, label) in zip(panels, _PANELS.items(), strict=True):

        def place(
            displayed: Sequence[CostPoint], cost: str = cost
        ) -> tuple[list[float], list[float]]:
            return [getattr(p, cost) for p in displayed], [100 * p.kept for p in displayed]

        best = front(points, cost)
        axes.plot(*place(points), ".", color="#c8ccd0")
        axes.plot(*place(best), drawstyle="steps-post", color="#c8ccd0", zorder=1)
        for point in best:
            notes = f"{point.name}: {getattr(point, cost):.3g}, {100 * point.kept:.1f} %"
            axes.plot(*place([point]), "o", label=notes)
        axes.legend(loc="lower right", fontsize=8)
        axes.set_xlabel(label)
    # symlog shows 0, the cost of direct search, and values from tenths to tens.
    panels[1].set_xscale("symlog", linthresh=0.1)
    panels[0].set_ylabel("mAP kept of embedding everything again, %")
    image = io.BytesIO()
    # A fixed salt gives the same bytes for the same points.
    with rc_context({"svg.hashsalt": "nobackfill"}):
        figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()
