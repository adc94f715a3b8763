"""The life of spaces in a gallery: staged, filled, flipped, rolled back, dropped.

Whatever is done here is one transaction. A gallery always has exactly one active space.
"""

from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from gallery.index import Labels
from gallery.spec import Origin, SpaceSpec
from gallery.store import Item, Store


def begin(store: Store, spec: SpaceSpec) -> None:
    """Add a staging space; a space that is there already is left as it is.

    Raises InvalidInputError if it is there with another dimension, metric or side space.
    """
    raise NotImplementedError


def write(
    store: Store,
    space: str,
    labels: Labels,
    embedding: ArrayLike,
    *,
    side: ArrayLike | None = None,
    uncertainty: ArrayLike | None = None,
    origin: Origin = "upgraded",
    replace: bool = False,
) -> Labels:
    """Write vectors of existing items into a space, in one durable transaction.

    `embedding` [n, dim], `side` [n, side_dim], `uncertainty` [n]. Labels deleted meanwhile are
    skipped, and so are those that have a vector there, unless `replace` (a backfill: re-embedded).
    Returns the labels written. Raises InvalidInputError, IncompatibleSpaceError, BusyError,
    CannotWriteError.
    """
    raise NotImplementedError


def left_behind(store: Store, space: str) -> int:
    """Number of items without a vector in `space`."""
    raise NotImplementedError


def left_behind_items(store: Store, space: str, after: int = 0, limit: int = 1000) -> list[Item]:
    """Those items by increasing label, after label `after`: a page."""
    raise NotImplementedError


def flip(
    store: Store, space: str, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
) -> None:
    """Make `space` the active one; what was active becomes previous. `state` is set with it.

    Raises PreconditionError when items lack a vector in `space`, unless `leave_behind`.
    """
    raise NotImplementedError


def rollback(
    store: Store, *, leave_behind: bool = False, state: Mapping[str, Any] | None = None
) -> str:
    """Return to the space that was active before; the present one becomes staging, kept as it is.

    Returns the space now active. Raises NotFoundError if none is kept, PreconditionError when items
    lack a vector there, unless `leave_behind`.
    """
    raise NotImplementedError


def drop(store: Store, space: str) -> None:
    """Remove a space that is not active, with all its vectors, and scrub them from the file.

    Raises PreconditionError for the active one.
    """
    raise NotImplementedError


def least_certain(store: Store, space: str, limit: int = 100) -> list[Item]:
    """Upgraded items by falling uncertainty, largest first."""
    raise NotImplementedError
