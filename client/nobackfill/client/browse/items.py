"""Pages of items: the grid, one item with its nearest, and their pictures."""

from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from nobackfill.client import conditions
from nobackfill.client.browse.view import View
from nobackfill.client.device import Device
from nobackfill.client.photos.files import local_image
from nobackfill.client.photos.search import Answer
from nobackfill.client.photos.thumbnails import Thumbnails
from nobackfill.errors import IncompatibleSpaceError, NotFoundError
from nobackfill.gallery.filter_engine import passing_labels
from nobackfill.gallery.filters import All
from nobackfill.gallery.listing import Place, page
from nobackfill.gallery.store import Item
from nobackfill.pages import Site

# Items of one page of the grid, hits of a search, and those compared before and after.
GRID, HITS, COMPARED = 60, 24, 10

_MISSING = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 240 240"><rect width="240" height="240" '
    'fill="#e3e7eb"/><g fill="#46525e" font-family="sans-serif" font-size="22" '
    'text-anchor="middle"><text x="120" y="114">original</text><text x="120" y="142">missing'
    "</text></g></svg>"
)
_ORIGINS = {
    "native": "embedded from its file",
    "upgraded": "carried over without its image",
    "re-embedded": "embedded again from its file",
    "direct": "as an older release stored it: this release searches it directly",
}


@dataclass(frozen=True)
class Tile:
    """A small picture of an item that was found, and what is said below it."""

    label: int
    name: str
    score: float | None = None
    # Beside another ranking: "new" or "gone", or how many places it moved.
    kind: str = ""
    note: str = ""


class Items:
    """What is shown of items."""

    def __init__(self, device: Device, view: View, thumbnails: Thumbnails, site: Site) -> None:
        self._device = device
        self._view = view
        self._thumbnails = thumbnails
        self._site = site

    def photos(self, request: Request) -> Response:
        """The grid, in the order in which items were added."""
        return self._grid(request, least_certain=False)

    def uncertain(self, request: Request) -> Response:
        """The grid of those that an upgrade made, the least certain first."""
        return self._grid(request, least_certain=True)

    def _grid(self, request: Request, *, least_certain: bool) -> Response:
        store = self._device.store
        asked = request.query_params.getlist("where")
        where = conditions.read(asked)
        allowed = passing_labels(store, where) if asked else None
        token = request.query_params.get("after")
        after = None if token is None else Place.read(token, least_certain=least_certain)
        found, last = page(
            store, store.active().spec.space, GRID,
            after=after, allowed=allowed, least_certain=least_certain,
        )  # fmt: skip
        pairs = [("where", one) for one in asked]
        more = None if last is None else urlencode([*pairs, ("after", last.token())])
        without = [(one, urlencode([pair for pair in pairs if pair[1] != one])) for one in asked]
        return self._site.show(
            request,
            "tiles.html.j2" if "hx-request" in request.headers else "photos.html.j2",
            items=[item for item, _ in found],
            name=name,
            more=more,
            asked=asked,
            without=without,
            least_certain=least_certain,
            total=store.count() if allowed is None else len(allowed),
            release=store.active().spec.release,
        )

    def item(self, request: Request) -> Response:
        """One item, what is like it, and how it came to be where it is."""
        item = self._one(request)
        active, previous = self._view.active(), self._view.previous()
        near = active.by_id(item.id, HITS)
        before = None
        if previous is not None:
            try:
                before = previous.by_id(item.id, COMPARED)
            except NotFoundError:
                # Added since the upgrade, while its old model could make no vector of it.
                before = None
        carried = self._device.state("carried", {}).get(str(active.spec.release), {})
        return self._site.show(
            request,
            "item.html.j2",
            item=item,
            name=name(item),
            missing=local_image(item) is None,
            hits=self.tiles(near),
            changed=None if before is None else self.compared(before, near),
            release=active.spec.release,
            before=None if previous is None else previous.spec.release,
            how=_ORIGINS.get(item.origin or "", "not searchable in this release's space"),
            carried=_moment(carried.get("at")) if item.origin in ("upgraded", "direct") else None,
            routes=carried.get("routes", []),
        )

    def thumbnail(self, request: Request) -> Response:
        """A small copy, or a picture that says that there is none."""
        return self._jpeg(self._thumbnails.of(self._one(request)))

    def picture(self, request: Request) -> Response:
        """A copy of at most LARGE_SIDE pixels, without what a camera writes beside its picture."""
        return self._jpeg(self._thumbnails.large(self._one(request)))

    def tiles(self, answer: Answer) -> list[Tile]:
        """The hits of an answer as the pages show them."""
        items = [(hit, self._device.store.get(hit.id)) for hit in answer.hits]
        return [Tile(item.label, name(item), hit.score) for hit, item in items if item is not None]

    def compared(self, before: Answer, after: Answer) -> tuple[list[Tile], list[Tile]]:
        """The first COMPARED of both, and in each what the other does not have."""
        old, new = (self.tiles(answer)[:COMPARED] for answer in (before, after))
        place = {tile.label: at for at, tile in enumerate(old)}
        kept = {tile.label for tile in new}
        left = [
            tile if tile.label in kept else Tile(tile.label, tile.name, tile.score, "gone", "gone")
            for tile in old
        ]
        right = []
        for at, tile in enumerate(new):
            moved = place.get(tile.label)
            note = "new" if moved is None else f"{moved + 1} → {at + 1}" if moved != at else ""
            kind = "new" if moved is None else ""
            right.append(Tile(tile.label, tile.name, tile.score, kind, note))
        return left, right

    def _one(self, request: Request) -> Item:
        label = request.path_params["label"]
        # Larger ones are none of SQLite's.
        if label < 2**63:
            for _ in range(2):
                try:
                    space = self._device.store.active().spec.space
                    (item,) = self._device.store.items([label], space)
                except IncompatibleSpaceError:
                    # A sync flipped in between.
                    continue
                if item is not None:
                    return item
        raise NotFoundError("There is no such picture in the gallery (any more).")

    def _jpeg(self, content: bytes | None) -> Response:
        if content is None:
            return Response(_MISSING, media_type="image/svg+xml")
        kept = {"Cache-Control": "private, max-age=86400"}
        return Response(content, media_type="image/jpeg", headers=kept)


def name(item: Item) -> str:
    """What people call it: its file's name, else its id."""
    return str(item.metadata.get("name") or item.id)


def read_where(request: Request) -> All:
    """The conditions that a page was asked with."""
    return conditions.read(request.query_params.getlist("where"))


def _moment(text: object) -> str | None:
    try:
        return f"{datetime.fromisoformat(str(text)):%d %B %Y, %H:%M} UTC"
    except ValueError:
        return None
