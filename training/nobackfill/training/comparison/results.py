"""The results of a comparison as a JSON file: all that its tables, claims and picture show."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from nobackfill.durable import write_file
from nobackfill.errors import InvalidInputError, NotFoundError

MAIN, UNSEEN = "main", "unseen"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# Mean and standard deviation over seeds, shares 0..1; one seed has no deviation.
Figure = tuple[float, float | None]


class Made(_Strict):
    """How the results came about, so that a reader can have them again. `configured`: the digest
    of configured.py.
    """

    command: str
    machine: str
    configured: str


class HeldTo(_Strict):
    """The row whose new/new is the largest of all that learned the same, over the same seeds."""

    row: str
    value: float


class RowResult(_Strict):
    """A row of one split.

    `cells`: by query/gallery and figure (cmc1, cmc5, map). `held_to`: by figure; empty where no
    row is there to be held to. `extras`: shares and gains of mAP unless their names say CMC-1, and
    what cells.py measures. `shared`: it serves the vectors of the old model that the table's rows
    share, on the split's own test, by what it learned elsewhere: it may be ranked with them.
    """

    seeds: int
    shared: bool
    cells: dict[str, dict[str, Figure]]
    held_to: dict[str, HeldTo]
    extras: dict[str, float]

    def mean(self, cell: str, figure: str) -> float | None:
        """None where the row has no such cell."""
        return self.cells[cell][figure][0] if cell in self.cells else None


class Outcome(_Strict):
    """One figure of a claim: the mean difference with the bounds of its interval over `classes`
    classes, None where these are too few. `rival`: the row that a superlative ("the strongest
    BCT") turned out to be.

    An outcome without `classes` was written before classes were drawn: its interval took queries
    of one class as independent, so its verdict is withdrawn.
    """

    rival: str | None = None
    seeds: int
    difference: float
    bounds: tuple[float, float] | None
    verdict: Literal["holds", "fails", "undecided", "withdrawn"]
    classes: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _withdrawn(cls, told: dict[str, Any]) -> dict[str, Any]:
        if told.get("classes") is None:
            return {**told, "bounds": None, "verdict": "withdrawn"}
        return told


class SplitResult(_Strict):
    """Rows by name, claims by text and figure."""

    rows: dict[str, RowResult]
    claims: dict[str, dict[str, Outcome]]


class CostResult(_Strict):
    """Bytes stored and microseconds of transform an item."""

    stored: float
    microseconds: float


class Results(_Strict):
    """`splits`: `main` and, where it was measured, `unseen`."""

    data: str
    metric: str
    seeds: tuple[int, ...]
    made: Made
    splits: dict[str, SplitResult]
    costs: dict[str, CostResult]

    @property
    def main(self) -> SplitResult:
        """The split whose test holds every class."""
        return self.splits[MAIN]

    def unseen(self, row: str) -> RowResult | None:
        """The row where it is tested on classes that no model trained on."""
        split = self.splits.get(UNSEEN)
        return None if split is None else split.rows.get(row)


def write_results(path: Path, results: Results) -> None:
    """Write the JSON file whole or not at all."""
    write_file(path, (results.model_dump_json(indent=1) + "\n").encode(), 0o644)


def read_results(path: Path) -> Results:
    """Raises NotFoundError for no file, InvalidInputError for one that holds other things."""
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
