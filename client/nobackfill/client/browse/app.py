"""The pages of one gallery put together, behind the guard."""

from collections.abc import Iterable
from pathlib import Path

from nobackfill.client.browse.items import Items
from nobackfill.client.browse.releases import Releases
from nobackfill.client.browse.searches import Searches
from nobackfill.client.browse.task import Desk
from nobackfill.client.browse.view import View
from nobackfill.client.device import Device
from nobackfill.client.photos.thumbnails import Thumbnails
from nobackfill.images import LARGEST_BYTES
from nobackfill.pages import Guard, Site

_LINKS = (("/", "Photos"), ("/uncertain", "Least certain"), ("/release", "Release"))


def pages(device: Device, hosts: Iterable[str], token: str) -> Guard:
    """The site of an opened gallery, for those who know the `token` in its address."""
    site = Site(Path(__file__).parent / "templates", device.path.stem, _LINKS)
    view, desk = View(device), Desk()
    items = Items(device, view, Thumbnails(device.path), site)
    searches = Searches(view, items, site)
    releases = Releases(device, desk, site)
    site.get("/", items.photos)
    site.get("/uncertain", items.uncertain)
    site.get("/item/{label:int}", items.item)
    site.get("/thumb/{label:int}", items.thumbnail)
    site.get("/picture/{label:int}", items.picture)
    site.post("/search", searches.by_picture, LARGEST_BYTES)
    site.get("/release", releases.release)
    site.get("/release/preview", releases.preview)
    site.post("/sync", releases.sync)
    site.post("/rollback", releases.rollback)
    site.post("/again", releases.again)
    site.stream("/progress", releases.progress)
    return Guard(site.app(), hosts, token)
