"""GalleryService."""

from collections.abc import Iterator, Mapping
from contextlib import suppress

import grpc

from nobackfill.errors import InvalidInputError, NotFoundError, TooLargeError
from nobackfill.gallery import edits
from nobackfill.gallery.edits import Chosen
from nobackfill.gallery.filters import check
from nobackfill.gallery.listing import ListingPlace
from nobackfill.gallery.reading import StoredItem
from nobackfill.server.galleries.galleries import CREATED, GalleryRegistry
from nobackfill.server.galleries.hosted import NOTE, Hosted
from nobackfill.server.galleries.indexing import searched
from nobackfill.server.galleries.plan import BOTH, SOURCE
from nobackfill.server.galleries.puts import Bare, Put, Putting, Quotas
from nobackfill.server.grpc import context
from nobackfill.server.grpc.access import Role
from nobackfill.server.grpc.admission import LARGEST_COUNT
from nobackfill.server.grpc.context import current, without_folders
from nobackfill.server.grpc.services.convert import (
    from_filter,
    keys_of,
    to_end,
    to_metadata,
)
from nobackfill.server.healing.healer import HealingProgress
from nobackfill.server.healing.registration import HealingSource
from nobackfill.server.rollout.lifecycle import Lifecycle
from nobackfill.server.state import GatewayState
from nobackfill.v1 import gallery_pb2, upgrade_pb2
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1 import types_pb2 as types
from nobackfill.v1.gallery_pb2_grpc import GalleryServiceServicer
from nobackfill.wire.values import ORIGINS, from_value

# Items of a gallery, for GalleryService: pages, and changes by ids or by filter.

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
        ListingPlace.read(request.page_token, least_certain=least_certain)
        if request.page_token
        else None
    )
    filtered = from_filter(request.filter)
    allowed = None if filtered is None else hosted.filtering.passing(filtered)
    keys = keys_of(request.fields if request.HasField("fields") else None)
    response, size = pb.ListItemsResponse(), 0
    left = request.page_size or DEFAULT_PAGE
    while left > 0:
        context.current().check()
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
    return edits.delete(hosted.store, _chosen(hosted, request), context.current().check)


def set_metadata(hosted: Hosted, request: pb.SetMetadataRequest) -> int:
    """How many have it. Raises InvalidInputError, TooLargeError."""
    if not request.ids and not request.HasField("filter"):
        raise InvalidInputError("expected ids or a filter, got neither")
    values = {key: from_value(value, key) for key, value in request.set.items()}
    remove = frozenset(request.remove)
    if both := remove & set(values):
        raise InvalidInputError(f"expected {min(both)[:64]!r} to be set or removed, got both")
    chosen = _chosen(hosted, request)
    return edits.describe(hosted.store, chosen, values, remove, context.current().check)


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


def _tell_vector(item: StoredItem, into: pb.GetItemResponse | pb.ListedItem) -> None:
    """What there is to say of its vector in the active space, if it has one there."""
    if item.origin is not None:
        into.origin = ORIGINS[item.origin]
    if item.uncertainty is not None:
        into.uncertainty = item.uncertainty


# Sources of images, and how far a gallery has healed, as messages.


def from_source(message: gallery_pb2.ItemSource) -> HealingSource | None:
    """None for an empty address. Raises InvalidInputError."""
    if not message.address:
        return None
    return HealingSource.checked(
        message.address,
        hits=message.hits,
        seconds=message.patience.ToTimedelta().total_seconds(),
        bytes_a_query=message.bytes_a_query,
        concurrency=message.concurrency,
        a_day=message.items_a_day,
    )


def to_source(source: HealingSource, *, address: bool) -> gallery_pb2.ItemSource:
    """`address`: whether the caller may know where it is."""
    message = gallery_pb2.ItemSource(
        address=source.address if address else "",
        hits=source.hits,
        bytes_a_query=source.bytes_a_query,
        concurrency=source.concurrency,
        items_a_day=source.a_day,
    )
    message.patience.FromNanoseconds(int(1e9 * source.seconds))
    return message


def to_healing(progress: HealingProgress) -> upgrade_pb2.Healing:
    """What WatchUpgrade tells."""
    cost = progress.cost
    message = upgrade_pb2.Healing(
        items=progress.items,
        carried=progress.carried,
        today=progress.today,
        a_day=progress.a_day,
        embedded=cost.embedded,
        failed=cost.failed,
        bytes_read=cost.bytes,
    )
    if context.current().principal.role is Role.ADMIN:
        message.last_failure = cost.last_failure
    message.seconds.FromNanoseconds(int(1e9 * cost.seconds))
    return message


# Refused items that an answer names.
LISTED_ERRORS = 1_000

_STATES = {
    "active": pb.SPACE_STATE_ACTIVE,
    "staging": pb.SPACE_STATE_STAGING,
    "previous": pb.SPACE_STATE_PREVIOUS,
}


class GalleryService(GalleryServiceServicer):
    """See protos/nobackfill/v1/gallery.proto."""

    def __init__(
        self,
        galleries: GalleryRegistry,
        putting: Putting,
        lifecycle: Lifecycle,
        state: GatewayState,
    ) -> None:
        self._galleries = galleries
        self._quotas = Quotas(galleries)
        self._putting = putting
        self._lifecycle = lifecycle
        self._state = state

    def CreateGallery(  # noqa: N802 - the contract's name
        self, request: pb.CreateGalleryRequest, context: grpc.ServicerContext
    ) -> pb.CreateGalleryResponse:
        self._lifecycle.create(request.name)
        with self._galleries.using(request.name) as hosted:
            if request.exact_distances:
                hosted.answer_exactly(True)
            return pb.CreateGalleryResponse(gallery=self._gallery(hosted))

    def UpdateGallery(  # noqa: N802
        self, request: pb.UpdateGalleryRequest, context: grpc.ServicerContext
    ) -> pb.UpdateGalleryResponse:
        with self._galleries.using(request.name) as hosted:
            if request.HasField("exact_distances"):
                hosted.answer_exactly(request.exact_distances)
            if request.HasField("source"):
                self._lifecycle.register(hosted, from_source(request.source))
                self._audit("register a source of", f"gallery {request.name}")
            if request.HasField("both_models"):
                self._lifecycle.set_both_models(hosted, request.both_models)
                self._audit("set both models of", f"gallery {request.name}")
            return pb.UpdateGalleryResponse(gallery=self._gallery(hosted))

    def GetGallery(  # noqa: N802
        self, request: pb.GetGalleryRequest, context: grpc.ServicerContext
    ) -> pb.GetGalleryResponse:
        with self._galleries.using(request.name) as hosted:
            return pb.GetGalleryResponse(gallery=self._gallery(hosted))

    def ListGalleries(  # noqa: N802
        self, request: pb.ListGalleriesRequest, context: grpc.ServicerContext
    ) -> pb.ListGalleriesResponse:
        galleries, caller = self._galleries, current().principal
        if request.page_size > LARGEST_PAGE:
            raise InvalidInputError(
                f"page_size: expected at most {LARGEST_PAGE}, got {request.page_size}"
            )
        left = sorted(n for n in galleries.names() if n > request.page_token and caller.may_use(n))
        page = left[: request.page_size or None]
        response = pb.ListGalleriesResponse()
        for name in page:
            current().check()
            if reason := galleries.set_aside_reasons().get(name):
                response.galleries.add(name=name, set_aside=without_folders(reason))
                continue
            # Deleted since the names were looked at.
            with suppress(NotFoundError), galleries.using(name) as hosted:
                response.galleries.append(self._gallery(hosted))
        if len(left) > len(page):
            response.next_page_token = page[-1]
        return response

    def DeleteGallery(  # noqa: N802
        self, request: pb.DeleteGalleryRequest, context: grpc.ServicerContext
    ) -> pb.DeleteGalleryResponse:
        self._lifecycle.delete(request.name)
        self._audit("delete", f"gallery {request.name}")
        return pb.DeleteGalleryResponse()

    def PutItems(  # noqa: N802
        self, request_iterator: Iterator[pb.PutItemsRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.PutItemsResponse]:
        name, stored, refused = "", 0, 0
        for request in request_iterator:
            name = name or request.gallery
            if request.gallery not in ("", name):
                raise InvalidInputError("expected one gallery a stream; open another stream")
            # Before anything is made of the items.
            self._galleries.get(name)
            puts, errors = _puts(request)
            caller, ids = current().principal, [put.id for put in puts]
            # Not kept open while the client makes its next message.
            with (
                self._quotas.taking(caller, name, ids) as allowance,
                self._galleries.using(name) as hosted,
            ):
                outcome = self._putting.put(hosted, puts, allowance)
            stored += outcome.stored
            errors += [pb.ItemError(id=id_, message=why) for id_, why in outcome.refused]
            refused += len(errors)
            yield pb.PutItemsResponse(stored=stored, errors=errors[:LISTED_ERRORS], refused=refused)

    def GetItem(  # noqa: N802
        self, request: pb.GetItemRequest, context: grpc.ServicerContext
    ) -> pb.GetItemResponse:
        with self._galleries.using(request.gallery) as hosted:
            return get(hosted, request.id)

    def ListItems(  # noqa: N802
        self, request: pb.ListItemsRequest, context: grpc.ServicerContext
    ) -> pb.ListItemsResponse:
        with self._galleries.using(request.gallery) as hosted:
            return page(hosted, request)

    def CountItems(  # noqa: N802
        self, request: pb.CountItemsRequest, context: grpc.ServicerContext
    ) -> pb.CountItemsResponse:
        with self._galleries.using(request.gallery) as hosted:
            return pb.CountItemsResponse(items=count(hosted, request.filter))

    def SetMetadata(  # noqa: N802
        self, request: pb.SetMetadataRequest, context: grpc.ServicerContext
    ) -> pb.SetMetadataResponse:
        with self._galleries.using(request.gallery) as hosted:
            return pb.SetMetadataResponse(items=set_metadata(hosted, request))

    def DeleteItems(  # noqa: N802
        self, request: pb.DeleteItemsRequest, context: grpc.ServicerContext
    ) -> pb.DeleteItemsResponse:
        with self._galleries.using(request.gallery) as hosted:
            deleted = delete(hosted, request)
        if deleted:
            self._audit("delete", f"{deleted} items of gallery {request.gallery}")
        return pb.DeleteItemsResponse(deleted=deleted)

    def _audit(self, what: str, of_what: str) -> None:
        self._state.audit(current().principal.name, what, of_what)

    def _gallery(self, hosted: Hosted) -> pb.Gallery:
        return _gallery(hosted, self._state.current.ends)


def _puts(request: pb.PutItemsRequest) -> tuple[list[Put], list[pb.ItemError]]:
    """What is to be put, and which items are none. Raises TooLargeError for too many."""
    if len(request.items) > LARGEST_COUNT:
        raise TooLargeError(
            f"expected at most {LARGEST_COUNT} items in a message, got {len(request.items)}; send "
            "several messages"
        )
    puts, errors = [], []
    for item in request.items:
        try:
            puts.append(_put(item))
        except InvalidInputError as error:
            errors.append(pb.ItemError(id=item.id[:256], message=str(error)))
    return puts, errors


def _put(item: pb.PutItem) -> Put:
    kind = item.WhichOneof("content")
    # No metadata and empty metadata are the same message: neither erases what is there.
    metadata = {key: from_value(value, key) for key, value in item.metadata.items()} or None
    if kind == "image":
        return Put(item.id, item.image, metadata)
    if kind == "text":
        return Put(item.id, item.text, metadata)
    if kind is None:
        raise InvalidInputError("expected an image, a text or vectors, got none")
    embedding = item.vectors.embedding
    if not item.vectors.HasField("side_info"):
        return Put(item.id, Bare(embedding.space, embedding.values, None, None), metadata)
    side = item.vectors.side_info
    return Put(item.id, Bare(embedding.space, embedding.values, side.space, side.values), metadata)


def _gallery(hosted: Hosted, ends: Mapping[str, float]) -> pb.Gallery:
    counts, views = hosted.sizes(), hosted.views()
    gallery = pb.Gallery(
        name=hosted.name,
        items=hosted.count(),
        release=hosted.plan.query.release,
        note=str(hosted.state(NOTE) or ""),
        exact_distances=hosted.exact,
        both_models=bool(hosted.state(BOTH)),
        both_with=hosted.plan.both.part.release if hosted.plan.both else 0,
    )
    if kept := hosted.state(SOURCE):
        told = current().principal.role is Role.ADMIN
        gallery.source.CopyFrom(to_source(HealingSource.from_state(kept), address=told))
    gallery.created.FromSeconds(int(hosted.state(CREATED) or 0))
    for info in hosted.spaces():
        space = gallery.spaces.add(
            space=info.spec.space,
            release=info.spec.release,
            items=counts.get(info.spec.space, 0),
            state=_STATES[info.state],
        )
        to_end(info.spec.space, ends, space.ends_at)
        if info.spec.space in views:
            found = searched(views[info.spec.space])
            space.index.CopyFrom(
                pb.IndexInfo(
                    in_graph=found.graph, compared=found.exact, delta=found.delta, due=found.due
                )
            )
    return gallery
