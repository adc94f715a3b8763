"""How the last sync went, in five numbers, for a gateway that is told on request only."""

from functools import partial
from typing import Any, Literal

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.errors import ConfigurationError, NotFoundError
from nobackfill.gallery import staging
from nobackfill.gallery.neighbours import neighbours_kept

Failure = Literal["none", "no_route", "refused", "left_behind"]


def remember(
    device: GalleryFile, release: int, failure: Failure, seconds: float = 0.0, *, kept: bool = False
) -> float | None:
    """Keep how a sync to `release` went; `kept`: look how many neighbours it kept, too.

    Returns that share, of up to 1,000 random items that are in the space before as well; None
    where it was not looked at, or they are too few.
    """
    share = None
    if kept:
        active = device.store.active().spec
        before = device.previous()
        if before is not None:
            sample = partial(staging.sample, device.store)
            share = neighbours_kept(sample, before.spec, active)
    device.store.state_set(
        {
            "last_sync": {
                "release": release,
                "probes_passed": failure != "refused",
                "seconds": round(seconds, 3),
                "neighbours_kept": share,
                "failure": failure,
            }
        }
    )
    return share


def report(device: GalleryFile, to: str | None) -> dict[str, Any]:
    """Send what the last sync left, once, to a gateway; None: send nothing. Returns it: no vector,
    no id of the device or of an item is in it.

    Raises NotFoundError before the first sync to another release, ConfigurationError for an address
    that is no gateway's, UnavailableError, NotPermittedError.
    """
    found: dict[str, Any] | None = device.state("last_sync")
    if found is None:
        raise NotFoundError("no sync has tried another release yet; there is nothing to report")
    if to is None:
        return found
    if not to.startswith(("grpc://", "grpcs://")):
        raise ConfigurationError(f"expected --to grpc(s)://HOST:PORT, got {to!r}")
    from nobackfill.v1 import release_pb2 as pb
    from nobackfill.wire.gateway import Gateway

    failure = found["failure"].upper()
    message = pb.ReportSyncRequest(
        release=found["release"],
        probes_passed=found["probes_passed"],
        seconds=found["seconds"],
        neighbours_kept=found["neighbours_kept"],
        failure="SYNC_FAILURE_UNSPECIFIED" if failure == "NONE" else f"SYNC_FAILURE_{failure}",
    )
    with Gateway(to) as gateway:
        gateway.report_sync(message)
    return found
