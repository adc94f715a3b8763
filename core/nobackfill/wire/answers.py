"""Define the answers of galleries, the same on a gateway and on a device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

from nobackfill.gallery.spec import Metadata

# An encoded JPEG, PNG or WebP picture: its bytes, or the path of its file.
Image = bytes | str | Path


@dataclass(frozen=True)
class Hit:
    """An item of an answer.

    Attributes:
        id: The id of the item.
        distance: Distance to the query; smaller is nearer.
        score: Calibrated probability of a match, 0 to 1; None where the release has no calibration.
        release: The release whose space the item's vector is in.
        origin: native, direct, upgraded, re-embedded or old-model.
        metadata: The item's metadata.
        beyond_calibration: Whether the calibration hardly saw a distance as small, or as large; the
            score is then a bound.
    """

    id: str
    distance: float
    score: float | None
    release: int
    origin: str
    metadata: Metadata = field(default_factory=dict)
    beyond_calibration: bool = False


AnyHit = TypeVar("AnyHit", bound=Hit, covariant=True)


@dataclass(frozen=True)
class Answer(Generic[AnyHit]):
    """The hits of one query, and the release and space that answered it.

    Attributes:
        hits: Nearest first.
        release: The release that answered.
        space: The id of its space.
        space_end_time: When queries in this space will be refused; None while no end is announced.
        error: Why this one of several queries has no hits; empty where it has some.
        request_id: Names the answer in a feedback; empty while the gateway collects none.
    """

    hits: Sequence[AnyHit]
    release: int
    space: str
    space_end_time: datetime | None = None
    error: str = ""
    request_id: str = ""

    @property
    def beyond_calibration(self) -> bool:
        """Tell whether all hits are beyond the calibration; False without hits.

        Their scores then do not tell them apart. The query or the gallery may differ from the data
        of the calibration. A hit of a release without calibration counts as not beyond.
        """
        return bool(self.hits) and all(hit.beyond_calibration for hit in self.hits)


@dataclass(frozen=True)
class Item:
    """An item of a gallery.

    Attributes:
        id: Its id.
        metadata: Its metadata.
        origin: How its vector in the active space was made; None where it has none.
        uncertainty: Uncertainty of the upgrade that made the vector; larger is less certain; None
            without one.
    """

    id: str
    metadata: Metadata
    origin: str | None = None
    uncertainty: float | None = None


@dataclass(frozen=True)
class Status:
    """The state of a gallery.

    Attributes:
        item_count: Number of items.
        release: The release that answers.
    """

    item_count: int
    release: int
