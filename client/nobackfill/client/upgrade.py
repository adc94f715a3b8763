"""Carrying a gallery into a release's space: staged in chunks, then one flip.

Backfill, as a choice: the items whose upgrade is least certain are embedded again from their
images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.output import Output
from nobackfill.client.photos import Encoder, local_image, threads
from nobackfill.client.plan import SyncPlan
from nobackfill.errors import (
    ConfigurationError,
    DamagedError,
    InvalidInputError,
    NotFoundError,
    NotPermittedError,
    PreconditionError,
    UnavailableError,
    UnfitError,
    UnusableOutputError,
    VerificationError,
)
from nobackfill.gallery import staging
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.upgrade import Runner, run_upgrade
from nobackfill.images import Pixels
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import Upgraded
from nobackfill.release.routes import open_route
from nobackfill.vectors import Vectors

_BATCH = 32


def re_embed(device: GalleryFile, manifest: Manifest, budget: int, output: Output) -> int:
    """Embed up to `budget` items in a release's space from their images; how many it did.

    Items without a vector there come first, then the least certain ones. An image is taken from its
    file, if that still holds what was added, else from the vault; items whose image cannot be had,
    or makes no vector, keep what they have. Raises VerificationError, CannotWriteError, BusyError.
    """
    if budget <= 0:
        return 0
    space = manifest.space
    chosen = staging.left_behind_items(device.store, space, limit=budget)
    chosen += staging.least_certain(device.store, space, limit=budget - len(chosen))
    if not chosen:
        output.note(
            f"release {manifest.release}: no upgraded item has an uncertainty, so none is "
            "re-embedded"
        )
        return 0
    return embed_again(device, manifest, chosen, output)


def embed_again(
    device: GalleryFile, manifest: Manifest, chosen: Sequence[StoredItem], output: Output
) -> int:
    """Embed these items in a release's space from their images; how many it did. Like `re_embed`
    otherwise."""
    encoder = Encoder(device.models, manifest)
    done = 0
    with output.progress("re-embedding") as advance, _Images(device, output) as images:
        for start in range(0, len(chosen), _BATCH):
            batch = {
                item.label: pixels
                for item in chosen[start : start + _BATCH]
                if (pixels := images.pixels_of(item, encoder)) is not None
            }
            done += _write(device, encoder, batch)
            advance(start + _BATCH, len(chosen))
    return done


def _write(device: GalleryFile, encoder: Encoder, batch: dict[int, Pixels]) -> int:
    if not batch:
        return 0
    try:
        vectors = encoder.vectors(list(batch.values()))
    except UnusableOutputError as error:
        good = [label for row, label in enumerate(batch) if row not in error.rows]
        return _write(device, encoder, {label: batch[label] for label in good})
    written = staging.write(
        device.store,
        vectors.space,
        np.fromiter(batch, np.int64),
        vectors.embedding,
        side=vectors.side,
        origin="re-embedded",
        replace=True,
    )
    return len(written)


class _Images:
    """Images of items, from their files or from the vault, for as long as that answers."""

    def __init__(self, device: GalleryFile, output: Output) -> None:
        # Only here, as most syncs need neither gRPC nor age.
        from nobackfill.client.vault.transfer import Vaulted

        self._output = output
        self._vault: Vaulted | None = Vaulted(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._vault is not None:
            self._vault.close()

    def pixels_of(self, item: StoredItem, encoder: Encoder) -> Pixels | None:
        """The image at the encoder's size; None if it cannot be had or be decoded."""
        image = self.of(item)
        try:
            return None if image is None else encoder.pixels(image)
        except InvalidInputError as error:
            self._output.note(f"{item.id}: {error}")
        return None

    def of(self, item: StoredItem) -> bytes | None:
        """The image an item was made from; None if it cannot be had."""
        image = local_image(item)
        if image is not None or self._vault is None:
            return image
        try:
            return self._vault.image(item.id)
        except (UnavailableError, NotPermittedError, ConfigurationError) as error:
            self._output.note(f"no images from the vault: {error}")
            self._vault.close()
            self._vault = None
        except (VerificationError, NotFoundError) as error:
            self._output.note(f"{item.id}: {error}")
        return None


@dataclass(frozen=True)
class CarryOutcome:
    """`left_behind` is not 0: nothing was flipped, so many items cannot follow."""

    re_embedded: int
    left_behind: int


def carry(
    device: GalleryFile, plan: SyncPlan, worst: int, state: dict[str, Any], output: Output
) -> CarryOutcome:
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
            return CarryOutcome(re_embedded, behind)
        try:
            staging.flip(device.store, target.space, state=state)
        except PreconditionError:
            # Images were added since the last chunk: carry them along.
            continue
        return CarryOutcome(re_embedded, 0)


def _fill(device: GalleryFile, plan: SyncPlan, target: SpaceSpec, output: Output) -> int:
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
