"""Define a vector space as a gallery sees it, its state there, and an item's metadata."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from nobackfill.errors import IncompatibleSpaceError
from nobackfill.vectors import Metric as Metric
from nobackfill.vectors import Origin as Origin

if TYPE_CHECKING:
    # Importing pydantic would take half the time of a search on a device.
    from nobackfill.release.manifest import Manifest

# active: it answers queries. staging: an upgrade fills it. previous: it is kept for a rollback, or
# as the source of a later direct upgrade.
State = Literal["active", "staging", "previous"]

# A value of an item's metadata. bool is a kind of its own: True is not 1. Integers have 64 bits,
# lists contain texts.
MetadataValue = str | int | float | bool | Sequence[str]
Metadata = Mapping[str, MetadataValue]


@dataclass(frozen=True)
class SpaceSpec:
    """A vector space and the side-information that is stored with its vectors.

    Attributes:
        space: Its id.
        release: The release whose space it is.
        dim: Dimension of a vector.
        metric: How distances are computed.
        unit_norm: Whether every vector has norm 1.
        side_space: Id of the side space; None without side-information.
        side_dim: Dimension of the side-information, 0 without.
    """

    space: str
    release: int
    dim: int
    metric: Metric
    unit_norm: bool
    side_space: str | None
    side_dim: int

    @classmethod
    def of(cls, manifest: "Manifest") -> Self:
        """Return the space of a release, as its manifest declares it.

        Without a side encoder, `side_dim` is 0.
        """
        return cls(
            space=manifest.space,
            release=manifest.release,
            dim=manifest.embedder.dim,
            metric=manifest.embedder.metric,
            unit_norm=manifest.embedder.unit,
            side_space=manifest.side_space,
            side_dim=manifest.side_encoder.dim if manifest.side_encoder else 0,
        )


@dataclass(frozen=True)
class SpaceInfo:
    """A space in one gallery.

    Attributes:
        spec: The space.
        state: active, staging or previous.
        table_number: Names its table, `vectors_<number>`.
        activation_rank: Counts activations: the larger, the more recently it was active; 0 for
            never.
    """

    spec: SpaceSpec
    state: State
    table_number: int
    activation_rank: int


def select_space(spaces: Collection[SpaceInfo], space: str) -> SpaceInfo:
    """Return one of a gallery's spaces by its id.

    Raises:
        IncompatibleSpaceError: `spaces` does not contain it; the message lists them.
    """
    for info in spaces:
        if info.spec.space == space:
            return info
    raise missing_space_error(spaces, space)


def missing_space_error(spaces: Collection[SpaceInfo], space: str) -> IncompatibleSpaceError:
    """Return, without raising it, the error for a space that a gallery does not have.

    Args:
        spaces: The gallery's spaces, which the message lists; they may be empty.
        space: Id of the missing space.
    """
    listed = ", ".join(f"release {info.spec.release} ({info.state})" for info in spaces)
    return IncompatibleSpaceError(
        f"the gallery has no vectors of the space {space}; it has those of "
        f"{listed or 'no release'}. Use a model of one of these releases"
    )


def plan_side_passes(
    source: SpaceSpec, target: SpaceSpec, *, needs_side: bool
) -> tuple[bool | None, ...]:
    """Return the passes of an upgrade through its source.

    Args:
        source: The space that it reads.
        target: The space that it writes.
        needs_side: Whether items without side-information are left out. The source must have it
            then; this is not checked.

    Returns:
        For each pass, in order: only items with side-information (True), only items without
        (False), or all items alike (None). There is one pass, unless both spaces have
        side-information and the upgrade can do without.
    """
    if needs_side:
        return (True,)
    return (None,) if source.side_space is None or target.side_space is None else (True, False)
