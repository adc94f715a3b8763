"""What a vector space is to a gallery, and the state it is in there; an item's metadata."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from nobackfill.errors import IncompatibleSpaceError
from nobackfill.vectors import Metric, Origin

if TYPE_CHECKING:
    # pydantic would take half of the time in which the edge answers a search.
    from nobackfill.release.manifest import Manifest

# active: queries are answered here. staging: an upgrade fills it. previous: kept for a rollback, or
# as the original that a later direct upgrade reads.
State = Literal["active", "staging", "previous"]

# Of an item. bool is a kind of its own: True is not 1. Integers have 64 bits, lists hold texts.
MetadataValue = str | int | float | bool | Sequence[str]
Metadata = Mapping[str, MetadataValue]

__all__ = [
    "Metadata",
    "MetadataValue",
    "Metric",
    "Origin",
    "SpaceInfo",
    "SpaceSpec",
    "State",
    "side_passes",
    "space_of",
]


@dataclass(frozen=True)
class SpaceSpec:
    """A vector space and the side-information kept beside its vectors.

    `unit`: every embedding has norm 1. `side_dim` is 0 where `side_space` is None.
    """

    space: str
    release: int
    dim: int
    metric: Metric
    unit: bool
    side_space: str | None
    side_dim: int

    @classmethod
    def of(cls, manifest: "Manifest") -> Self:
        """The space of a release."""
        return cls(
            space=manifest.space,
            release=manifest.release,
            dim=manifest.embedder.dim,
            metric=manifest.embedder.metric,
            unit=manifest.embedder.unit,
            side_space=manifest.side_space,
            side_dim=manifest.side_encoder.dim if manifest.side_encoder else 0,
        )


@dataclass(frozen=True)
class SpaceInfo:
    """A space as it is in one gallery. `activated` counts up: the larger, the more recently active.

    `number` names its table, `vectors_<number>`. 0 in `activated`: never active.
    """

    spec: SpaceSpec
    state: State
    number: int
    activated: int


def space_of(spaces: Collection[SpaceInfo], space: str) -> SpaceInfo:
    """One of a gallery's spaces by its id. Raises IncompatibleSpaceError if it is none of them."""
    for info in spaces:
        if info.spec.space == space:
            return info
    have = ", ".join(f"release {info.spec.release} ({info.state})" for info in spaces)
    raise IncompatibleSpaceError(
        f"space {space} is not one of this gallery's ({have}); use a model of one of these releases"
    )


def side_passes(
    source: SpaceSpec, target: SpaceSpec, *, needs_side: bool
) -> tuple[bool | None, ...]:
    """The passes in which an upgrade goes through its source: items with side-information (True),
    without (False), or all of them alike (None).

    Those without are left out where the runner `needs_side`; where it may carry some, they come
    last.
    """
    if needs_side:
        return (True,)
    return (None,) if source.side_space is None or target.side_space is None else (True, False)
