"""GalleryService."""

from collections.abc import Iterator, Mapping
from contextlib import suppress

import grpc

from nobackfill.errors import InvalidInputError, NotFoundError, TooLargeError
from nobackfill.server.galleries.contents import Bare, Put
from nobackfill.server.galleries.galleries import CREATED, Galleries
from nobackfill.server.galleries.hosted import NOTE, Hosted
from nobackfill.server.galleries.plan import BOTH, SOURCE
from nobackfill.server.galleries.puts import Putting
from nobackfill.server.galleries.quotas import Quotas
from nobackfill.server.galleries.sizes import searched
from nobackfill.server.grpc import calls
from nobackfill.server.grpc.errors import without_folders
from nobackfill.server.grpc.messages import LARGEST_COUNT
from nobackfill.server.grpc.services import items
from nobackfill.server.grpc.services.convert import to_end
from nobackfill.server.grpc.services.healing import from_source, to_source
from nobackfill.server.grpc.tokens import Role
from nobackfill.server.healing.registration import Source
from nobackfill.server.rollout.lifecycle import Lifecycle
from nobackfill.server.state import GatewayState
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1.gallery_pb2_grpc import GalleryServiceServicer
from nobackfill.wire.values import from_value

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
        self, galleries: Galleries, putting: Putting, lifecycle: Lifecycle, state: GatewayState
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
                self._lifecycle.ask_both(hosted, request.both_models)
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
        galleries, caller = self._galleries, calls.current().principal
        if request.page_size > items.LARGEST_PAGE:
            raise InvalidInputError(
                f"page_size: expected at most {items.LARGEST_PAGE}, got {request.page_size}"
            )
        left = sorted(n for n in galleries.names() if n > request.page_token and caller.may_use(n))
        page = left[: request.page_size or None]
        response = pb.ListGalleriesResponse()
        for name in page:
            calls.current().check()
            if reason := galleries.aside().get(name):
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
            caller, ids = calls.current().principal, [put.id for put in puts]
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
            return items.get(hosted, request.id)

    def ListItems(  # noqa: N802
        self, request: pb.ListItemsRequest, context: grpc.ServicerContext
    ) -> pb.ListItemsResponse:
        with self._galleries.using(request.gallery) as hosted:
            return items.page(hosted, request)

    def CountItems(  # noqa: N802
        self, request: pb.CountItemsRequest, context: grpc.ServicerContext
    ) -> pb.CountItemsResponse:
        with self._galleries.using(request.gallery) as hosted:
            return pb.CountItemsResponse(items=items.count(hosted, request.filter))

    def SetMetadata(  # noqa: N802
        self, request: pb.SetMetadataRequest, context: grpc.ServicerContext
    ) -> pb.SetMetadataResponse:
        with self._galleries.using(request.gallery) as hosted:
            return pb.SetMetadataResponse(items=items.set_metadata(hosted, request))

    def DeleteItems(  # noqa: N802
        self, request: pb.DeleteItemsRequest, context: grpc.ServicerContext
    ) -> pb.DeleteItemsResponse:
        with self._galleries.using(request.gallery) as hosted:
            deleted = items.delete(hosted, request)
        if deleted:
            self._audit("delete", f"{deleted} items of gallery {request.gallery}")
        return pb.DeleteItemsResponse(deleted=deleted)

    def _audit(self, what: str, of_what: str) -> None:
        self._state.audit(calls.current().principal.name, what, of_what)

    def _gallery(self, hosted: Hosted) -> pb.Gallery:
        return _gallery(hosted, self._state.now.ends)


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
        told = calls.current().principal.role is Role.ADMIN
        gallery.source.CopyFrom(to_source(Source.from_state(kept), address=told))
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
