"""The results of a comparison as a JSON file, from which tables, claims and picture are made.

The picture (SVG) shows the mAP kept against bytes and microseconds per item.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nobackfill.durable import write_file
from nobackfill.errors import InvalidInputError, NotFoundError

MAIN, UNSEEN = "main", "unseen"


class ResultPart(BaseModel):
    """A part of a results file: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


_File = TypeVar("_File", bound=ResultPart)
# Mean and standard deviation over seeds, shares 0..1; one seed has no deviation.
Figure = tuple[float, float | None]


class Provenance(ResultPart):
    """How to reproduce the results.

    Attributes:
        command: the command line, without paths of the machine.
        machine: processor, accelerator and torch's version.
        configured: the digest of the rows' configurations (`catalogue.digest_of_rows`).
    """

    command: str
    machine: str
    configured: str


class BestNewNew(ResultPart):
    """The row with the largest new/new of all that learned the same, over the same seeds.

    Attributes:
        row: its name.
        value: its mean figure, a share 0 to 1.
    """

    row: str
    value: float


class RowResult(ResultPart):
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
    held_to: dict[str, BestNewNew]
    extras: dict[str, float]

    def mean(self, cell: str, figure: str) -> float | None:
        """Return a mean over seeds, 0 to 1; None if the row has no such cell.

        Args:
            cell: such as new/old.
            figure: cmc1, cmc5 or map.

        Raises:
            KeyError: the row has the cell, but the cell has no such figure.
        """
        return self.cells[cell][figure][0] if cell in self.cells else None


class ClaimOutcome(ResultPart):
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


class SplitResult(ResultPart):
    """Rows by name, claims by text and figure."""

    rows: dict[str, RowResult]
    claims: dict[str, dict[str, ClaimOutcome]]


class CostResult(ResultPart):
    """The cost of an item.

    Attributes:
        stored_bytes: bytes of the old embedding (float32) and of the side-information (float32, or
            a bit per element); key `stored` in the file.
        microseconds: time of the transform, in batches of 1,024 on one thread; 0 without one.
    """

    stored_bytes: float = Field(alias="stored")
    microseconds: float


class Results(ResultPart):
    """All results of a comparison, as they are in its JSON file.

    Attributes:
        data: the title of the comparison.
        metric: how vectors were compared.
        seeds: the seeds of the comparison; some rows may have fewer.
        provenance: how to reproduce the results; key `made` in the file.
        splits: `main` and, if it was measured, `unseen`.
        costs: by row.
    """

    data: str
    metric: str
    seeds: tuple[int, ...]
    provenance: Provenance = Field(alias="made")
    splits: dict[str, SplitResult]
    costs: dict[str, CostResult]

    @property
    def main(self) -> SplitResult:
        """The split that tests every class.

        Raises:
            KeyError: the results have no such split.
        """
        return self.splits[MAIN]

    def unseen(self, row: str) -> RowResult | None:
        """Return the row's result on classes that no model was trained on; None without one."""
        split = self.splits.get(UNSEEN)
        return None if split is None else split.rows.get(row)


def write_results(path: Path, results: Results) -> None:
    """Write results as a JSON file, atomically; its folder must exist.

    An existing file is replaced.

    Raises:
        CannotWriteError: the file cannot be written; an existing one stays.
    """
    write_file(path, (results.model_dump_json(indent=1, by_alias=True) + "\n").encode(), 0o644)


def read_results(path: Path) -> Results:
    """Read the results that `write_results` wrote, of this or an older version.

    Verdicts of versions that did not draw classes are read as withdrawn.

    Raises:
        NotFoundError, InvalidInputError, OSError: as in `read_result_file`.
    """
    return read_result_file(path, Results, "compare.py", "OUT/NAME.json")


def read_result_file(path: Path, kind: type[_File], command: str, name: str) -> _File:
    """Read a results file.

    Args:
        path: the file.
        kind: its content.
        command, name: the command that writes it, and the name that it gives, for messages.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: it has other content, or unknown keys; the message names the first place.
        OSError: it cannot be read.
    """
    if not path.is_file():
        raise NotFoundError(
            f"the results file {path} does not exist; {command} writes it as {name}"
        )
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInputError(
            f"{path}: expected results of {command}, but {where or 'the file'}: {first['msg']}; "
            f"run {command} again"
        ) from None


@dataclass(frozen=True)
class CostPoint:
    """The cost and quality of a row that serves an old gallery.

    Attributes:
        name: the row.
        stored_bytes: bytes stored per item.
        microseconds: time of the transform per item.
        kept_map: its mAP relative to the best new/new; 1 is a full backfill.
    """

    name: str
    stored_bytes: float
    microseconds: float
    kept_map: float


def cost_points(results: Results) -> list[CostPoint]:
    """List the rows of the main split that serve the shared old model and have a reference.

    Returns:
        In the order of the results.

    Raises:
        KeyError: such a row has no cost, or no `kept_map`.
    """
    return [
        CostPoint(name, cost.stored_bytes, cost.microseconds, row.extras["kept_map"])
        for name, row in results.main.rows.items()
        if row.shared and row.held_to and (cost := results.costs[name])
    ]


def pareto_front(points: Sequence[CostPoint], cost: str) -> list[CostPoint]:
    """Return the points that no other one beats at the same or less cost, ascending by cost.

    Args:
        points: the points; none gives none.
        cost: the attribute that is the cost, stored_bytes or microseconds.

    Returns:
        The front; of equal points the first. A point with more cost must keep more mAP.

    Raises:
        AttributeError: `cost` is another name.
    """
    best: list[CostPoint] = []
    for point in sorted(points, key=lambda p: (getattr(p, cost), -p.kept_map)):
        if not best or point.kept_map > best[-1].kept_map:
            best.append(point)
    return best


_PANELS: Mapping[str, str] = {
    "stored_bytes": "bytes stored for an item",
    "microseconds": "microseconds of transform an item, one thread",
}


def draw_costs(points: Sequence[CostPoint], title: str) -> bytes:
    """Draw quality against both costs as an SVG: all points in grey, the Pareto front named.

    The same points give the same bytes with one version of matplotlib.

    Args:
        points: the points.
        title: the title above both panels.

    Returns:
        The SVG. Without points it has empty panels.

    Raises:
        ImportError: matplotlib is not installed.
    """
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
            return [getattr(p, cost) for p in displayed], [100 * p.kept_map for p in displayed]

        best = pareto_front(points, cost)
        axes.plot(*place(points), ".", color="#c8ccd0")
        axes.plot(*place(best), drawstyle="steps-post", color="#c8ccd0", zorder=1)
        for point in best:
            notes = f"{point.name}: {getattr(point, cost):.3g}, {100 * point.kept_map:.1f} %"
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
