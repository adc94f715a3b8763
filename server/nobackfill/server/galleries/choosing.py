"""Which spaces a query is compared with: by what it is, by what the gallery lives in."""

import time

from nobackfill.errors import IncompatibleSpaceError, NeedsImageError, ReleaseRetiredError
from nobackfill.release.manifest import Manifest
from nobackfill.server.catalog import Catalog
from nobackfill.server.galleries.asked import ByEmbedding, Query
from nobackfill.server.galleries.plan import Both, Part, Plan, direct_part
from nobackfill.server.state import GatewayState


class Choosing:
    """Of queries by embedding."""

    def __init__(self, catalog: Catalog, state: GatewayState) -> None:
        self._catalog = catalog
        self._state = state

    def parts(self, plan: Plan, query: ByEmbedding) -> tuple[Part, ...]:
        """What it may be compared with, in the spaces that it brings. Raises NeedsImageError,
        ReleaseRetiredError, IncompatibleSpaceError."""
        if all(part.query.space in query for part in plan.parts):
            return plan.parts
        for space, part in plan.alone.items():
            if space in query:
                self._refuse_ended(space, part.query)
                return (part,)
        if plan.query.space in query:
            missing = [p.query for p in plan.parts if p.query.space not in query]
            raise NeedsImageError(
                "the gallery is being upgraded and lives in two spaces; send the image, or an "
                f"embedding of each of releases {plan.query.release} and "
                f"{', '.join(str(m.release) for m in missing)}"
            )
        active, spaces = plan.parts[-1], self._catalog.spaces
        for space in query:
            manifest = spaces.get(space)
            if manifest is not None and manifest.searches(active.space):
                return (direct_part(manifest, spaces[active.space]),)
        raise self._incompatible(plan, query)

    def _refuse_ended(self, space: str, manifest: Manifest) -> None:
        end = self._state.now.ends.get(space)
        if end is not None and time.time() >= end:
            raise _retired(manifest.release)

    def _incompatible(self, plan: Plan, query: ByEmbedding) -> Exception:
        spaces = self._catalog.spaces
        known = [spaces[space].release for space in query if space in spaces]
        if known and max(known) in self._state.now.retired:
            return _retired(max(known))
        sent = f"release {max(known)}" if known else "no release known here"
        return IncompatibleSpaceError(
            f"the gallery answers queries of release {plan.query.release}, the embedding is of "
            f"{sent}; embed the query with release {plan.query.release}, or send the image"
        )


def parts_of(plan: Plan, on_trial: Part | None) -> tuple[Part, ...]:
    """What an image, or a text, is compared with."""
    return plan.parts if on_trial is None else (on_trial,)


def asked_beside(plan: Plan, parts: tuple[Part, ...], query: Query) -> Both | None:
    """The space before, where its model ranks carried items too and can have the query."""
    both = plan.both
    if both is None or parts is not plan.parts:
        return None
    if isinstance(query, bytes):
        return both if both.part.query.embedder.file is not None else None
    if isinstance(query, str):
        return both if both.part.query.text_encoder is not None else None
    return both if both.part.query.space in query else None


def _retired(release: int) -> ReleaseRetiredError:
    return ReleaseRetiredError(
        f"queries of release {release} are no longer answered; embed with the active release"
    )
