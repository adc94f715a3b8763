"""The way back: kept until the new release is confirmed, then gone for good."""

from typing import Any

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.errors import NotFoundError
from nobackfill.gallery import staging
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.gallery.tables import vector_table


def return_to(device: GalleryFile, state: dict[str, Any]) -> int:
    """Make the space that was active before the last upgrade active again; its release.

    What was upgraded stays staged, so that a later sync takes no time. `state` is set in the same
    transaction. Raises NotFoundError if the way back is gone, PreconditionError if items would not
    be found there.
    """
    previous = device.previous()
    if previous is None:
        raise NotFoundError(
            "nothing to return to: there was no upgrade yet, or a later sync or gc confirmed it"
        )
    staging.rollback(device.store, state={**state, "return_to": None})
    return previous.spec.release


def roll_back(device: GalleryFile) -> tuple[int, int]:
    """`rollback`: return to the release before, and hold the present one back on this device.

    Returns (release left, release now active). Raises like return_to; BusyError while a sync
    carries vectors. One that waits for its source goes on from where this leads.
    """
    with device.changing():
        left = device.store.active().spec.release
        digest = device.state("installed", {}).get(str(left))
        held = hold_back(device, left, f"release {left} was rolled back here", digest)
        return left, return_to(device, held)


def hold_back(device: GalleryFile, release: int, reason: str, digest: str | None) -> dict[str, Any]:
    """The state in which a release is not followed: by its number, and the digest of its manifest
    where that is known, so that one published anew is tried."""
    digests = {**device.state("held_digests", {}), str(release): digest}
    return {
        "held_back": {**device.state("held_back", {}), str(release): reason},
        "held_digests": digests,
    }


def confirm(device: GalleryFile, but: str | None = None) -> list[int]:
    """Drop the spaces that only a rollback needs, all `but` one; the releases they belonged to.

    Spaces that hold vectors embedded from images stay where the gallery keeps originals.
    """
    if but is None:
        device.store.state_set({"return_to": None})
    dropped = []
    for space in device.store.spaces():
        superfluous = space.state == "previous" and space.spec.space != but
        if superfluous and not (device.state("keep_original") and _has_originals(device, space)):
            staging.drop(device.store, space.spec.space)
            dropped.append(space.spec.release)
    return dropped


def _has_originals(device: GalleryFile, space: SpaceInfo) -> bool:
    with device.store.reading() as connection:
        table = vector_table(space.number)
        query = f"SELECT 1 FROM {table} WHERE origin = 'native' LIMIT 1"  # noqa: S608
        return connection.execute(query).fetchone() is not None
