"""Searching by a picture that is no item: dropped, pasted or chosen."""

from starlette.requests import Request
from starlette.responses import Response

from nobackfill.client.browse.items import COMPARED, HITS, Items, read_where
from nobackfill.client.browse.view import View
from nobackfill.pages import Site


class Searches:
    """Pictures are looked at and forgotten: nothing of them is kept."""

    def __init__(self, view: View, items: Items, site: Site) -> None:
        self._view = view
        self._items = items
        self._site = site

    def by_picture(self, request: Request, picture: bytes) -> Response:
        """What is nearest to the picture, and what was before the last upgrade."""
        where = read_where(request)
        active, previous = self._view.active(), self._view.previous()
        found = self._view.by_image(active, picture, HITS, where)
        changed = None
        if previous is not None:
            before = self._view.by_image(previous, picture, COMPARED, where)
            changed = self._items.compared(before, found)
        return self._site.show(
            request,
            "found.html.j2",
            hits=self._items.tiles(found),
            beyond=found.beyond_calibration,
            changed=changed,
            release=active.spec.release,
            before=None if previous is None else previous.spec.release,
        )
