"""What a manifest says of how good a release is, measured on the exported files."""

from pydantic import Field

from nobackfill.release.encoders import ReleaseNumber, Strict


class HealingEvidence(Strict):
    """Quality while 0, 10 … 100 % of the items are embedded again, in a random order.

    `map`, `cmc1`: all ranked by distance; `scaled_map`, `scaled_cmc1`: the distances of carried
    items brought to where they mean what those of embedded ones do.
    """

    map: tuple[float, ...] = Field(min_length=2)
    cmc1: tuple[float, ...] = Field(min_length=2)
    scaled_map: tuple[float, ...] = Field(min_length=2)
    scaled_cmc1: tuple[float, ...] = Field(min_length=2)

    @property
    def valley(self) -> float:
        """How far mAP or CMC-1 by distance falls below the lower of its ends, at most."""
        return max(_fall(self.map), _fall(self.cmc1))

    @property
    def scaled_valley(self) -> float:
        """The same of what is brought to one scale."""
        return max(_fall(self.scaled_map), _fall(self.scaled_cmc1))


def _fall(curve: tuple[float, ...]) -> float:
    return max(0.0, min(curve[0], curve[-1]) - min(curve))


class BothEvidence(Strict):
    """How both models together rank what a route has carried, where that is worse than neither.

    Numbers of `nobackfill.release.calibration.Joint`, fitted on one half of the held-out items;
    shares of the other, of queries by both models, with the lower bounds of the paired bootstrap of
    what they gain over staying (old/old).
    """

    new: float = Field(ge=0)
    old: float = Field(gt=0)
    offset: float
    map: float = Field(ge=0, le=1)
    cmc1: float = Field(ge=0, le=1)
    map_gain_low: float
    cmc1_gain_low: float


class RouteEvidence(Strict):
    """What a route into this release keeps, measured on the exported files."""

    # Releases on the way, from the first one's space to this one's: [1, 3], or chained [1, 2, 3].
    releases: tuple[ReleaseNumber, ...] = Field(min_length=2)
    # Of float32 files alone.
    map: float = Field(ge=0, le=1)
    cmc1: float = Field(ge=0, le=1)
    # mAP of the same route with int8 files, where they exist.
    int8_map: float | None = None
    # Share of new/new mAP that is left as it is served: with int8 files, where they exist.
    kept: float = Field(ge=0)
    healing: HealingEvidence | None = Field(None, exclude_if=lambda healing: healing is None)
    both: BothEvidence | None = Field(None, exclude_if=lambda both: both is None)


class Unlabelled(Strict):
    """A cell by what needs no labels, where there are classes, beside staying (old/old): shares.

    A second view of a picture, or a part of a text, asks for what it is of (`recall1`, `mrr`);
    `agreement`: of its ten nearest with those of new/new. `similar`, `very_item`: whether the
    verdict holds for either kind of search, too.
    """

    query: str
    gallery: str
    agreement: float = Field(ge=0, le=1)
    stayed_agreement: float = Field(ge=0, le=1)
    recall1: float = Field(ge=0, le=1)
    stayed_recall1: float = Field(ge=0, le=1)
    mrr: float = Field(ge=0, le=1)
    stayed_mrr: float = Field(ge=0, le=1)
    similar: bool
    very_item: bool
    queries: int = Field(ge=1)
    items: int = Field(ge=1)

    @property
    def name(self) -> str:
        """As in `2/1>2`."""
        return f"{self.query}/{self.gallery}"


class Cell(Strict):
    """One cell of the compatibility matrix, shares between 0 and 1."""

    query: str
    gallery: str
    cmc1: float = Field(ge=0, le=1)
    cmc5: float = Field(ge=0, le=1)
    map: float = Field(ge=0, le=1)
    queries: int = Field(ge=1)
    items: int = Field(ge=1)

    @property
    def name(self) -> str:
        """As in `2/1>2`."""
        return f"{self.query}/{self.gallery}"
