"""The gateway's calls as an app makes them: the public client, and what the demo does with it."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nobackfill.errors import InvalidInputError, NobackfillError, UnavailableError
from nobackfill.v1 import gallery_pb2, release_pb2
from nobackfill.wire import Gateway
from nobackfill.wire.limits import LARGEST_K

# Seconds for one call of a demo on a busy machine.
DEADLINE = 60
# And until an activation that nobody watches has ended.
_SETTLED = 300
# Puts of a gallery that meet a model server which is away, and the seconds between them.
_TRIES, _PAUSE = 6, 5.0


def list_images(folder: Path) -> dict[str, Path]:
    """The images of a folder of class folders, by their path CLASS/NAME."""
    return {f"{path.parent.name}/{path.name}": path for path in sorted(folder.glob("*/*"))}


def connect(address: str) -> Gateway:
    # Retries would hide the failures that the demo counts; of several gateways, what one does not
    # answer the next is asked.
    return Gateway(address, seconds=DEADLINE, retries="," in address)


def create_gallery(gateway: Gateway, name: str) -> None:
    """Make an empty gallery, in place of one that a killed run left behind."""
    if name in {gallery.name for gallery in gateway.list_galleries()}:
        gateway.delete_gallery(name)
    gateway.create_gallery(name)


def put_images(
    gateway: Gateway, name: str, folder: Path, stored: Callable[[int], object]
) -> list[str]:
    """Put every image of a folder; the ids, CLASS/NAME. Begins again where the gateway is busy or
    its model server is away, since a put of the same item changes nothing. Raises InvalidInputError
    where an image is refused, UnavailableError after `_TRIES` tries."""
    images = list_images(folder)

    def items() -> Iterator[gallery_pb2.PutItem]:
        for id_, path in images.items():
            yield gallery_pb2.PutItem(id=id_, image=path.read_bytes())

    for tries_left in reversed(range(_TRIES)):
        try:
            refused = gateway.put_items(name, items(), stored)
            break
        except UnavailableError:
            if not tries_left:
                raise
            time.sleep(_PAUSE)
    for id_, reason in refused.items():
        raise InvalidInputError(f"the gateway refused {id_}: {reason}")
    return list(images)


def search_images(
    gateway: Gateway, name: str, queries: Mapping[str, Path], k: int
) -> dict[str, list[str]]:
    """Search for every query's image; the ids of its k nearest items, nearest first."""
    k = min(k, LARGEST_K)
    return {
        query: [hit.id for hit in gateway.search(name, image=path, k=k).hits]
        for query, path in queries.items()
    }


def active_release(gateway: Gateway) -> int | None:
    """The release that answers now, None before there is one."""
    states = {release.number: release.state for release in gateway.list_releases()}
    return next((n for n, s in states.items() if s == release_pb2.RELEASE_STATE_ACTIVE), None)


def wait_for_settled_release(gateway: Gateway) -> int | None:
    """The release that answers, once an activation that a killed run began has come to its end."""
    deadline = time.monotonic() + _SETTLED
    activating = release_pb2.RELEASE_STATE_ACTIVATING
    while any(release.state == activating for release in gateway.list_releases()):
        if time.monotonic() > deadline:
            raise NobackfillError(
                f"an activation has not ended after {_SETTLED} s; see the gateway's log"
            )
        time.sleep(0.2)
    return active_release(gateway)
