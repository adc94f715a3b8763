"""What a vector space is to a gallery, and the state it is in there."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from nobackfill.vectors import Metric, Origin

if TYPE_CHECKING:
    # pydantic would take half of the time in which the edge answers a search.
    from nobackfill.release.manifest import Manifest

# active: queries are answered here. staging: an upgrade fills it. previous: kept for a rollback, or
# as the original that a later direct upgrade reads.
State = Literal["active", "staging", "previous"]

__all__ = ["Metric", "Origin", "SpaceInfo", "SpaceSpec", "State"]


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
