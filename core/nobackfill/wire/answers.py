"""What galleries answer, on a gateway and on a device alike."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

from nobackfill.gallery.spec import Metadata

# Encoded JPEG, PNG or WebP: its bytes, or a file.
Image = bytes | str | Path


@dataclass(frozen=True)
class Hit:
    """An item that was found. `distance`: smaller is nearer; `score`: calibrated probability of a
    match, 0 to 1, None where the release carries no calibration; `release`: whose space its vector
    lives in; `origin`: native, direct, upgraded, re-embedded or old-model; `beyond_calibration`:
    hardly a distance as small, or as large, was seen while calibrating; the score is a bound."""

    id: str
    distance: float
    score: float | None
    release: int
    origin: str
    metadata: Metadata = field(default_factory=dict)
    beyond_calibration: bool = False


Found = TypeVar("Found", bound=Hit, covariant=True)


@dataclass(frozen=True)
class Answer(Generic[Found]):
    """Hits of one query, nearest first, and the release and space that it was answered in.

    `space_ends`: when queries in that space are refused; None while no end is announced. `error`:
    why this one of several queries has no answer; empty where it has one. `request_id`: what a
    feedback about it names; empty while nobody asks for that.
    """

    hits: Sequence[Found]
    release: int
    space: str
    space_ends: datetime | None = None
    error: str = ""
    request_id: str = ""

    @property
    def beyond_calibration(self) -> bool:
        """Whether that is so of every hit: the scores do not tell these hits apart then, and the
        query or the gallery may be unlike what the release was calibrated on."""
        return bool(self.hits) and all(hit.beyond_calibration for hit in self.hits)


@dataclass(frozen=True)
class Item:
    """An item of a gallery. `origin` and `uncertainty` (of an upgrade; larger is less certain) are
    those of its vector in the active space, None where it has none."""

    id: str
    metadata: Metadata
    origin: str | None = None
    uncertainty: float | None = None


@dataclass(frozen=True)
class Status:
    """How many items a gallery holds, and the release that answers in it."""

    items: int
    release: int
