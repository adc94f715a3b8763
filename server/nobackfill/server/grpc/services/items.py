"""Items of a gallery, for GalleryService: pages, and changes by ids or by filter."""

from nobackfill.errors import InvalidInputError, NotFoundError, TooLargeError
from nobackfill.gallery import edits
from nobackfill.gallery.edits import Chosen
from nobackfill.gallery.filters import check
from nobackfill.gallery.listing import Place
from nobackfill.gallery.store import Item
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.grpc import calls
from nobackfill.server.grpc.services.convert import (
    from_filter,
    keys_of,
    to_metadata,
)
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1 import types_pb2 as types
from nobackfill.wire.values import ORIGINS, from_value

LARGEST_CHANGE = 10_000
LARGEST_PAGE = 1000
DEFAULT_PAGE = 100
# A page ends at the item that makes it larger.
PAGE_BYTES = 1 << 20
# Items read together, of which each may have 64 KiB of metadata.
_READ = 50


def get(hosted: Hosted, name: str) -> pb.GetItemResponse:
    """Raises NotFoundError."""
    found = hosted.store.get(name)
    if found is None:
        raise NotFoundError(f"gallery {hosted.name!r} has no item of that id")
    item = hosted.store.items([found.label], hosted.spec().space)[0] or found
    response = pb.GetItemResponse(id=item.id, spaces=hosted.spaces_of(item.label))
    to_metadata(item.metadata, None, response.metadata)
    _tell_vector(item, response)
    return response


def page(hosted: Hosted, request: pb.ListItemsRequest) -> pb.ListItemsResponse:
    """Raises InvalidInputError for a size, a token or a filter that is none."""
    if request.page_size > LARGEST_PAGE:
        raise InvalidInputError(
            f"page_size: expected at most {LARGEST_PAGE}, got {request.page_size}"
        )
    if request.order not in (pb.ITEM_ORDER_UNSPECIFIED, pb.ITEM_ORDER_LEAST_CERTAIN):
        raise InvalidInputError(f"order: expected a known one, got {request.order}")
    least_certain = request.order == pb.ITEM_ORDER_LEAST_CERTAIN
    after = (
        Place.read(request.page_token, least_certain=least_certain) if request.page_token else None
    )
    filtered = from_filter(request.filter)
    allowed = None if filtered is None else hosted.filtering.passing(filtered)
    keys = keys_of(request.fields if request.HasField("fields") else None)
    response, size = pb.ListItemsResponse(), 0
    left = request.page_size or DEFAULT_PAGE
    while left > 0:
        calls.current().check()
        found, after = hosted.store.page(
            hosted.spec().space,
            min(left, _READ),
            after=after,
            allowed=allowed,
            least_certain=least_certain,
        )
        for item, place in found:
            listed = response.items.add(id=item.id)
            to_metadata(item.metadata, keys, listed.metadata)
            _tell_vector(item, listed)
            left -= 1
            size += listed.ByteSize()
            if size > PAGE_BYTES:
                response.next_page_token = place.token()
                return response
        if after is None:
            return response
    response.next_page_token = after.token() if after is not None else ""
    return response


def count(hosted: Hosted, filtered: types.Filter) -> int:
    """Items that pass."""
    asked = from_filter(filtered)
    return hosted.store.count() if asked is None else len(hosted.filtering.passing(asked))


def delete(hosted: Hosted, request: pb.DeleteItemsRequest) -> int:
    """How many are gone. Raises InvalidInputError, TooLargeError."""
    return edits.delete(hosted.store, _chosen(hosted, request), calls.current().check)


def set_metadata(hosted: Hosted, request: pb.SetMetadataRequest) -> int:
    """How many have it. Raises InvalidInputError, TooLargeError."""
    if not request.ids and not request.HasField("filter"):
        raise InvalidInputError("expected ids or a filter, got neither")
    values = {key: from_value(value, key) for key, value in request.set.items()}
    remove = frozenset(request.remove)
    if both := remove & set(values):
        raise InvalidInputError(f"expected {min(both)[:64]!r} to be set or removed, got both")
    chosen = _chosen(hosted, request)
    return edits.describe(hosted.store, chosen, values, remove, calls.current().check)


def _chosen(hosted: Hosted, request: pb.DeleteItemsRequest | pb.SetMetadataRequest) -> Chosen:
    if not request.HasField("filter"):
        if len(request.ids) > LARGEST_CHANGE:
            raise TooLargeError(
                f"expected at most {LARGEST_CHANGE} ids, got {len(request.ids)}; send several calls"
            )
        return edits.chosen_by_ids(hosted.store, list(request.ids))
    filtered = from_filter(request.filter)
    if request.ids or filtered is None or not check(filtered):
        raise InvalidInputError(
            "expected either ids or a filter with a condition: one without lets every item pass"
        )
    return edits.chosen_by_filter(hosted.filtering, filtered)


def _tell_vector(item: Item, into: pb.GetItemResponse | pb.ListedItem) -> None:
    """What there is to say of its vector in the active space, if it has one there."""
    if item.origin is not None:
        into.origin = ORIGINS[item.origin]
    if item.uncertainty is not None:
        into.uncertainty = item.uncertainty
