"""Carrying a gallery into a release's space: staged in chunks, then one flip."""

from dataclasses import dataclass
from typing import Any, ClassVar

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.output import Output
from nobackfill.client.photos.backfill import re_embed
from nobackfill.client.photos.encoding import threads
from nobackfill.client.sync.plan import Plan
from nobackfill.errors import (
    DamagedError,
    PreconditionError,
    UnfitError,
    UnusableOutputError,
    VerificationError,
)
from nobackfill.gallery import staging
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.upgrade import Runner, run_upgrade
from nobackfill.release.models import Upgraded
from nobackfill.release.routes import open_route
from nobackfill.vectors import Vectors


@dataclass(frozen=True)
class Carried:
    """`left_behind` is not 0: nothing was flipped, so many items cannot follow."""

    re_embedded: int
    left_behind: int


def carry(
    device: GalleryFile, plan: Plan, worst: int, state: dict[str, Any], output: Output
) -> Carried:
    """Fill the target's space, re-embed up to `worst` items from their images, flip.

    `state` is set in the flip's own transaction. What earlier runs wrote stays, and images that are
    added meanwhile are carried along. Raises UnusableOutputError for a release whose upgrade
    fails on a vector of this gallery, UnfitError for one whose models fail, VerificationError,
    BusyError, CannotWriteError.
    """
    target = SpaceSpec.of(plan.target)
    for space in device.store.spaces():
        # Begun for a release that was overtaken by a newer one.
        if space.state == "staging" and space.spec.space != target.space:
            staging.drop(device.store, space.spec.space)
    re_embedded = 0
    while True:
        try:
            stuck = _fill(device, plan, target, output)
        except (UnusableOutputError, UnfitError):
            # The release is held back: what it did to the others is of no use.
            staging.drop(device.store, target.space)
            raise
        budget = worst - re_embedded
        re_embedded += re_embed(device, plan.target, budget, output)
        behind = staging.left_behind(device.store, target.space)
        if 0 < behind <= stuck:
            return Carried(re_embedded, behind)
        try:
            staging.flip(device.store, target.space, state=state)
        except PreconditionError:
            # Images were added since the last chunk: carry them along.
            continue
        return Carried(re_embedded, 0)


def _fill(device: GalleryFile, plan: Plan, target: SpaceSpec, output: Output) -> int:
    """Run the legs; the number of items that none of them could carry."""
    stuck = 0
    for leg in plan.legs:
        runner: Runner = _AsTheyAre(leg.source.spec.side_space == target.side_space)
        if leg.route.steps:
            runner = open_route(device.models, leg.route, threads(), int8=plan.int8)
        with output.progress(f"upgrading to release {target.release}") as advance:
            try:
                outcome = run_upgrade(
                    device.store,
                    runner,
                    target,
                    source=leg.source.spec.space,
                    origin="upgraded" if leg.route.steps else "direct",
                    ahead=True,
                    on_progress=lambda progress: advance(progress.done, progress.total),
                )
            except (DamagedError, UnusableOutputError):
                raise
            except VerificationError as error:
                raise UnfitError(f"release {target.release}: {error}") from error
        stuck = outcome.left_behind
    return stuck


@dataclass(frozen=True)
class _AsTheyAre:
    """What carries vectors into a space that searches theirs directly."""

    keeps_side: bool
    reads_side: ClassVar[bool] = False

    def run(self, embedding: Vectors, side: Vectors | None) -> Upgraded:
        return Upgraded(embedding, side if self.keeps_side else None, None)
