"""Implement GalleryService: galleries and their items."""

from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from nobackfill.errors import (
    CannotWriteError,
    InvalidInputError,
    NotFoundError,
    TooLargeError,
    VerificationError,
)
from nobackfill.gallery import edits
from nobackfill.gallery.edits import Selection
from nobackfill.gallery.filters import check_filter
from nobackfill.gallery.listing import ListingPosition
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.server.galleries.hosted import CREATED_KEY, NOTE, GalleryRegistry, HostedGallery
from nobackfill.server.galleries.indexing import count_index
from nobackfill.server.galleries.item_writer import (
    ExternalVectors,
    ItemWriter,
    NewItem,
    TokenQuotas,
)
from nobackfill.server.galleries.plan import RANK_FUSION_KEY, SOURCE_KEY
from nobackfill.server.grpc.context import Role, current_call, without_folders
from nobackfill.server.grpc.rpc import MAX_ITEMS_PER_MESSAGE
from nobackfill.server.grpc.services.convert import (
    fill_metadata,
    fill_space_end,
    parse_filter,
    requested_metadata_keys,
)
from nobackfill.server.healing.healer import HealingProgress
from nobackfill.server.healing.registration import HealingSource
from nobackfill.server.rollout.lifecycle import GalleryOperations
from nobackfill.server.state import GatewayState
from nobackfill.v1 import gallery_pb2, upgrade_pb2
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1.gallery_pb2_grpc import GalleryServiceServicer
from nobackfill.wire.values import ORIGINS, read_metadata_value

MAX_CHANGED_IDS = 10_000
MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100
# A page ends with the item that makes it larger than this.
PAGE_BYTES = 1 << 20
# Items that are read at once; each may have 64 KiB of metadata.
_ITEMS_PER_READ = 50


def list_items_page(hosted: HostedGallery, request: pb.ListItemsRequest) -> pb.ListItemsResponse:
    """List a page of items, in the order in which they were put, or the least certain first.

    A page ends after DEFAULT_PAGE_SIZE (100) items if the request has no page size, or early once
    it has PAGE_BYTES (1 MiB). An empty next_page_token ends the list; a page before the last may be
    the last one that has items. Items that are put or deleted between two pages may be missing or
    listed.

    Args:
        hosted: the gallery.
        request: the request; its page size is at most MAX_PAGE_SIZE (1000).

    Raises:
        InvalidInputError: the page size, order, token or filter is not valid.
        DeadlineError: the call's time is over.
        CancelledError: the caller has cancelled the call.
        NotFoundError: the gallery was deleted.
        UnavailableError: the database does not answer.
        BusyError: the database is busy.
        VerificationError: the gallery is damaged.
        CannotWriteError: the gallery's file cannot be opened, or the disk fails.
        IncompatibleSpaceError: the active space was deleted meanwhile.
        ConfigurationError: the database refuses the statement, as without rights.
    """
    if request.page_size > MAX_PAGE_SIZE:
        raise InvalidInputError(
            f"page_size: expected at most {MAX_PAGE_SIZE} items, got {request.page_size}; send "
            "several requests with the page_token"
        )
    if request.order not in (pb.ITEM_ORDER_UNSPECIFIED, pb.ITEM_ORDER_LEAST_CERTAIN):
        raise InvalidInputError(
            "order: expected ITEM_ORDER_UNSPECIFIED or ITEM_ORDER_LEAST_CERTAIN, got "
            f"{request.order}; send one of these"
        )
    least_certain = request.order == pb.ITEM_ORDER_LEAST_CERTAIN
    place = None
    if request.page_token:
        place = ListingPosition.from_token(request.page_token, least_certain=least_certain)
    filtered = parse_filter(request.filter)
    matches = None if filtered is None else hosted.filtering.find_matches(filtered)
    keys = requested_metadata_keys(request.fields if request.HasField("fields") else None)
    response, size = pb.ListItemsResponse(), 0
    remaining = request.page_size or DEFAULT_PAGE_SIZE
    while remaining > 0:
        current_call().check()
        space, count = hosted.active_spec().space, min(remaining, _ITEMS_PER_READ)
        listed, place = hosted.store.list_page(
            space, count, start_after=place, matches=matches, least_certain=least_certain
        )
        for item, item_place in listed:
            message = response.items.add(id=item.id)
            fill_metadata(item.metadata, keys, message.metadata)
            _fill_vector(item, message)
            remaining -= 1
            size += message.ByteSize()
            if size > PAGE_BYTES:
                response.next_page_token = item_place.to_token()
                return response
        if place is None:
            return response
    response.next_page_token = place.to_token() if place is not None else ""
    return response


def _select_items(
    hosted: HostedGallery, request: pb.DeleteItemsRequest | pb.SetMetadataRequest
) -> Selection:
    if not request.HasField("filter"):
        if len(request.ids) > MAX_CHANGED_IDS:
            raise TooLargeError(
                f"ids: expected at most {MAX_CHANGED_IDS} in one call, got {len(request.ids)}; "
                "send several calls"
            )
        return edits.select_ids(hosted.store, list(request.ids))
    filtered = parse_filter(request.filter)
    if request.ids or filtered is None or not check_filter(filtered):
        raise InvalidInputError(
            "items to change: expected either ids or a filter with at least one condition, because "
            "a filter without one matches all items; send one of them"
        )
    return edits.select_matches(hosted.filtering, filtered)


def _fill_vector(item: StoredItem, into: pb.GetItemResponse | pb.ListedItem) -> None:
    """Fill in the origin and uncertainty of an item's vector in the active space, if it has one."""
    if item.origin is not None:
        into.origin = ORIGINS[item.origin]
    if item.uncertainty is not None:
        into.uncertainty = item.uncertainty


def parse_source(message: gallery_pb2.ItemSource) -> HealingSource | None:
    """Parse the source of an UpdateGallery request; the address is not checked, and nothing is
    opened.

    Args:
        message: the source; limits of 0 mean the defaults.

    Returns:
        The source; None for an empty address, which removes the gallery's source.

    Raises:
        InvalidInputError: a limit is out of its range.
    """
    if not message.address:
        return None
    return HealingSource.checked(
        message.address,
        hits=message.hits,
        # Not by a timedelta, which holds fewer seconds than a message.
        seconds=message.patience.seconds + message.patience.nanos / 1e9,
        bytes_a_query=message.bytes_a_query,
        concurrency=message.concurrency,
        a_day=message.items_a_day,
    )


def source_message(source: HealingSource, *, includes_address: bool) -> gallery_pb2.ItemSource:
    """Encode a source with its limits.

    Args:
        source: the source.
        includes_address: include the address, for callers that may see it; otherwise it is empty.

    Raises:
        TypeError: a limit other than the seconds is a float.
    """
    message = gallery_pb2.ItemSource(
        address=source.address if includes_address else "",
        hits=source.hits,
        bytes_a_query=source.bytes_a_query,
        concurrency=source.concurrency,
        items_a_day=source.a_day,
    )
    message.patience.FromNanoseconds(int(1e9 * source.seconds))
    return message


def healing_message(progress: HealingProgress, role: Role) -> upgrade_pb2.Healing:
    """Encode the progress of re-embedding for callers of a role.

    Numbers that are not known yet stay unset. Only admins see the last failure.
    """
    cost = progress.cost
    message = upgrade_pb2.Healing(
        items=progress.item_count,
        carried=progress.migrated_count,
        today=progress.begun_today,
        a_day=progress.daily_limit,
        embedded=cost.embedded_count,
        failed=cost.failed_count,
        bytes_read=cost.bytes_read,
    )
    if role is Role.ADMIN:
        message.last_failure = cost.last_failure
    message.seconds.FromNanoseconds(int(1e9 * cost.seconds))
    return message


# Most refused items that an answer lists.
LISTED_ERRORS = 1_000


@dataclass(eq=False)
class GalleryService(GalleryServiceServicer):
    """Implement the calls of protos/nobackfill/v1/gallery.proto."""

    _galleries: GalleryRegistry
    _quotas: TokenQuotas
    _item_writer: ItemWriter
    _lifecycle: GalleryOperations
    _state: GatewayState

    def CreateGallery(  # noqa: N802 - the contract's name
        self, request: pb.CreateGalleryRequest, context: grpc.ServicerContext
    ) -> pb.CreateGalleryResponse:
        """Create an empty gallery in the active release's space.

        If exact distances cannot be set after the gallery was created, the gallery stays.

        Raises:
            InvalidInputError: the name is not valid, or a space has too many dimensions for the
                database.
            AlreadyExistsError: a gallery has this name.
            PreconditionError: no release is active.
            BusyError: an activation or a rollback is under way, or the database is busy.
            CannotWriteError: the gallery cannot be written.
            UnavailableError: the database does not answer.
            VerificationError: a release's manifest cannot be used, or the new gallery is damaged.
            NotFoundError: a release is not published any more, or the gallery was deleted
                meanwhile.
            ConfigurationError: the database refuses the statement.
        """
        self._lifecycle.create(request.name)
        with self._galleries.use_gallery(request.name) as hosted:
            if request.exact_distances:
                hosted.set_exact_distances(True)
            return pb.CreateGalleryResponse(gallery=self._gallery(hosted))

    def UpdateGallery(  # noqa: N802
        self, request: pb.UpdateGalleryRequest, context: grpc.ServicerContext
    ) -> pb.UpdateGalleryResponse:
        """Change the fields of a gallery that the request has, one after the other, durably.

        A change before an error stays. A request without any of them only returns the gallery.
        Changes of the source and of both models are recorded in the audit.

        Raises:
            NotFoundError: no gallery has this name, or the source's folder or file does not exist.
            InvalidInputError: a limit of the source is out of its range. Or the source's file of
                texts has an invalid line, or is no regular file.
            ConfigurationError: the operator's settings do not allow the source, or the database
                refuses the statement.
            VerificationError: the gallery is set aside or damaged.
            UnavailableError: the source does not open within 20 s, or the database does not answer.
            BusyError: the gallery's store is busy.
            CannotWriteError: the gallery cannot be written.
            OSError: this user may not look into the source's folder.
            RuntimeError, ValueError: the source's path has a loop of links, or a zero byte.
        """
        with self._galleries.use_gallery(request.name) as hosted:
            if request.HasField("exact_distances"):
                hosted.set_exact_distances(request.exact_distances)
            if request.HasField("source"):
                self._lifecycle.set_source(hosted, parse_source(request.source))
                self._audit("register a source of", f"gallery {request.name}")
            if request.HasField("both_models"):
                self._lifecycle.set_rank_fusion(hosted, request.both_models)
                self._audit("set both models of", f"gallery {request.name}")
            return pb.UpdateGalleryResponse(gallery=self._gallery(hosted))

    def GetGallery(  # noqa: N802
        self, request: pb.GetGalleryRequest, context: grpc.ServicerContext
    ) -> pb.GetGalleryResponse:
        """Return a gallery with its spaces and counts; the source's address is for admins only.

        A source that a newer version registered is left out, and the note says so.

        Raises:
            NotFoundError: no gallery has this name.
            VerificationError: the gallery is set aside.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement.
        """
        with self._galleries.use_gallery(request.name) as hosted:
            return pb.GetGalleryResponse(gallery=self._gallery(hosted))

    def ListGalleries(  # noqa: N802
        self, request: pb.ListGalleriesRequest, context: grpc.ServicerContext
    ) -> pb.ListGalleriesResponse:
        """List the galleries that the caller's role is for, by name.

        Without a page size, all are listed. A page begins after the name in the token, which need
        not exist. A gallery that is not served has only its name and the reason, without folders of
        this machine. A source that a newer version registered is left out, and the note says so.

        Raises:
            InvalidInputError: the page size is above MAX_PAGE_SIZE (1000).
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            ConfigurationError: the database refuses the statement.
        """
        galleries, caller = self._galleries, current_call().principal
        if request.page_size > MAX_PAGE_SIZE:
            raise InvalidInputError(
                f"page_size: expected at most {MAX_PAGE_SIZE} galleries, got {request.page_size}; "
                "send several requests with the page_token"
            )
        names = sorted(n for n in galleries.names() if n > request.page_token and caller.may_use(n))
        listed_names = names[: request.page_size or None]
        response = pb.ListGalleriesResponse()
        for name in listed_names:
            current_call().check()
            if reason := galleries.quarantine_reasons().get(name):
                response.galleries.add(name=name, set_aside=without_folders(reason))
                continue
            try:
                with galleries.use_gallery(name) as hosted:
                    response.galleries.append(self._gallery(hosted))
            except NotFoundError:
                # It was deleted since the names were listed.
                continue
            except (VerificationError, CannotWriteError) as error:
                # The file of one gallery must not hide the others.
                response.galleries.add(name=name, set_aside=without_folders(str(error)))
        if len(names) > len(listed_names):
            response.next_page_token = listed_names[-1]
        return response

    def DeleteGallery(  # noqa: N802
        self, request: pb.DeleteGalleryRequest, context: grpc.ServicerContext
    ) -> pb.DeleteGalleryResponse:
        """Delete a gallery with all its items for good, once no call uses it, and record that in
        the audit.

        A gallery that is set aside can be deleted, too. After an error the audit has no entry.

        Raises:
            NotFoundError: no gallery has this name.
            BusyError: an activation is under way, or calls use the gallery for a minute.
            CannotWriteError: the gallery cannot be deleted; or it is gone, but its storage cannot
                be freed before the next start.
            UnavailableError: the database does not answer.
            VerificationError: the shared state or a new gallery is damaged; nothing was deleted.
            ConfigurationError: the database refuses the statement.
        """
        self._lifecycle.delete(request.name)
        self._audit("delete", f"gallery {request.name}")
        return pb.DeleteGalleryResponse()

    def PutItems(  # noqa: N802
        self, request_iterator: Iterator[pb.PutItemsRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.PutItemsResponse]:
        """Store the items of each message, and answer once they are durable.

        An answer counts the stored and the refused items of the whole stream, and lists the errors
        of its own message, at most LISTED_ERRORS. Later messages may leave the gallery's name
        empty. Items that were stored before an error stay; sending all of them again is safe. The
        last of several items with one id in a message wins.

        Raises:
            InvalidInputError: a later message names another gallery.
            NotFoundError: no gallery has this name, the first message names none, or the gallery
                was deleted meanwhile.
            TooLargeError: a message has too many items, or its texts are too large together.
            NotPermittedError: the caller's role is not for the gallery.
            ItemQuotaError: the caller's galleries would have too many items.
            VerificationError: the gallery is set aside or damaged, or a model fails its trial or
                makes invalid vectors.
            UnavailableError: the model server or the database does not answer.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            BusyError: the store is locked for too long.
            CannotWriteError: the store cannot be written.
            IncompatibleSpaceError: a space of the gallery was deleted meanwhile.
            ConfigurationError: the database refuses the statement.
        """
        name, stored_count, refused_count = "", 0, 0
        for request in request_iterator:
            name = name or request.gallery
            if request.gallery not in ("", name):
                raise InvalidInputError(
                    f"PutItems: expected items for gallery {name!r} in this stream, got "
                    f"{request.gallery[:64]!r}; open another stream for another gallery"
                )
            # Refuse an unknown gallery before the items are parsed.
            self._galleries.peek(name)
            item_writers, errors = _parse_items(request)
            caller, ids = current_call().principal, [put.id for put in item_writers]
            # The gallery is not held open while the client prepares its next message.
            with (
                self._quotas.reserve(caller, name, ids) as allowance,
                self._galleries.use_gallery(name) as hosted,
            ):
                outcome = self._item_writer.put(hosted, item_writers, allowance)
            stored_count += outcome.stored_count
            errors += [pb.ItemError(id=id_, message=why) for id_, why in outcome.refusals]
            refused_count += len(errors)
            yield pb.PutItemsResponse(
                stored=stored_count, errors=errors[:LISTED_ERRORS], refused=refused_count
            )

    def GetItem(  # noqa: N802
        self, request: pb.GetItemRequest, context: grpc.ServicerContext
    ) -> pb.GetItemResponse:
        """Return an item's metadata and spaces, and the origin of its vector in the active space.

        Without a vector there, origin and uncertainty stay unset.

        Raises:
            NotFoundError: no gallery has this name, or no item this id.
            VerificationError: the gallery is set aside or damaged.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            IncompatibleSpaceError: the active space was deleted meanwhile.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        with self._galleries.use_gallery(request.gallery) as hosted:
            entry = hosted.store.get(request.id)
            if entry is None:
                raise NotFoundError(
                    f"gallery {hosted.name!r} has no item with the id {request.id[:80]!r}; "
                    "ListItems lists its items"
                )
            item = hosted.store.items([entry.label], hosted.active_spec().space)[0] or entry
            response = pb.GetItemResponse(id=item.id, spaces=hosted.spaces_of(item.label))
        fill_metadata(item.metadata, None, response.metadata)
        _fill_vector(item, response)
        return response

    def ListItems(  # noqa: N802
        self, request: pb.ListItemsRequest, context: grpc.ServicerContext
    ) -> pb.ListItemsResponse:
        """List a page of items; see `list_items_page` for its order and its end.

        Raises:
            InvalidInputError: the page size, order, token or filter is not valid.
            NotFoundError: no gallery has this name.
            VerificationError: the gallery is set aside or damaged.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            IncompatibleSpaceError: the active space was deleted meanwhile.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        with self._galleries.use_gallery(request.gallery) as hosted:
            return list_items_page(hosted, request)

    def CountItems(  # noqa: N802
        self, request: pb.CountItemsRequest, context: grpc.ServicerContext
    ) -> pb.CountItemsResponse:
        """Count the items that pass a filter; all items without a condition, with or without a
        vector.

        Raises:
            InvalidInputError: the filter is not valid.
            NotFoundError: no gallery has this name.
            VerificationError: the gallery is set aside or damaged.
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            CannotWriteError: the gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        with self._galleries.use_gallery(request.gallery) as hosted:
            condition = parse_filter(request.filter)
            if condition is None:
                return pb.CountItemsResponse(items=hosted.store.count())
            return pb.CountItemsResponse(items=len(hosted.filtering.find_matches(condition)))

    def SetMetadata(  # noqa: N802
        self, request: pb.SetMetadataRequest, context: grpc.ServicerContext
    ) -> pb.SetMetadataResponse:
        """Change the metadata of items by ids or by a filter, durably, in several transactions.

        Other keys stay as they are. Items that were changed before an error stay changed. Unknown
        ids are skipped. A request that neither sets nor removes a key changes nothing, but counts
        the items.

        Returns:
            The number of selected items, changed or not.

        Raises:
            InvalidInputError: ids and filter are both given, or both missing; a key is set and
                removed; a key, a value or the filter is not valid; the filter has no condition; or
                an item's metadata would become too large (its piece of the change is not made,
                earlier ones stay).
            TooLargeError: there are more than MAX_CHANGED_IDS (10,000) ids.
            NotFoundError: no gallery has this name.
            VerificationError: the gallery is set aside or damaged.
            BusyError: the store is locked for too long.
            CannotWriteError: the store cannot be written.
            UnavailableError: the database does not answer.
            DeadlineError: the call's time is over; items that were changed before stay changed.
            CancelledError: the caller has cancelled the call, likewise.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        with self._galleries.use_gallery(request.gallery) as hosted:
            if not request.ids and not request.HasField("filter"):
                raise InvalidInputError(
                    "SetMetadata: expected ids or a filter of items, got neither; send one of them"
                )
            values = {key: read_metadata_value(value, key) for key, value in request.set.items()}
            remove = frozenset(request.remove)
            if both := remove & set(values):
                raise InvalidInputError(
                    f"metadata key {min(both)[:64]!r}: expected the key in `set` or in `remove`, "
                    "got it in both; send it in one of them"
                )
            selection, check = _select_items(hosted, request), current_call().check
            changed = edits.change_metadata(hosted.store, selection, values, remove, check)
        return pb.SetMetadataResponse(items=changed)

    def DeleteItems(  # noqa: N802
        self, request: pb.DeleteItemsRequest, context: grpc.ServicerContext
    ) -> pb.DeleteItemsResponse:
        """Delete items by ids or by a filter, durably, in several transactions, and record their
        number in the audit.

        After an error, items that were deleted stay deleted, and the audit has no entry. Unknown
        ids are skipped; without ids and filter nothing is deleted.

        Raises:
            InvalidInputError: ids and filter are both given, or the filter has no condition or is
                not valid.
            TooLargeError: there are more than MAX_CHANGED_IDS (10,000) ids.
            NotFoundError: no gallery has this name.
            VerificationError: the gallery is set aside or damaged.
            BusyError: the store is locked for too long.
            CannotWriteError: the store cannot be written.
            UnavailableError: the database does not answer.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        with self._galleries.use_gallery(request.gallery) as hosted:
            selection = _select_items(hosted, request)
            deleted = edits.delete_selected(hosted.store, selection, current_call().check)
        if deleted:
            self._audit("delete", f"{deleted} items of gallery {request.gallery}")
        return pb.DeleteItemsResponse(deleted=deleted)

    def _audit(self, what: str, of_what: str) -> None:
        self._state.record_audit(current_call().principal.name, what, of_what)

    def _gallery(self, hosted: HostedGallery) -> pb.Gallery:
        counts, views = hosted.vector_counts(), hosted.views()
        gallery = pb.Gallery(
            name=hosted.name,
            items=hosted.count(),
            release=hosted.plan.query_manifest.release,
            note=str(hosted.state_value(NOTE) or ""),
            exact_distances=hosted.exact_distances,
            both_models=bool(hosted.state_value(RANK_FUSION_KEY)),
            both_with=hosted.plan.fusion.old_part.release if hosted.plan.fusion else 0,
        )
        if source := hosted.state_value(SOURCE_KEY):
            is_admin = current_call().principal.role is Role.ADMIN
            try:
                gallery.source.CopyFrom(
                    source_message(HealingSource.from_state(source), includes_address=is_admin)
                )
            except VerificationError as error:
                gallery.note = "; ".join(filter(None, (gallery.note, str(error))))
        gallery.created.FromSeconds(int(hosted.state_value(CREATED_KEY) or 0))
        for info in hosted.spaces():
            space = gallery.spaces.add(
                space=info.spec.space,
                release=info.spec.release,
                items=counts.get(info.spec.space, 0),
                state=f"SPACE_STATE_{info.state.upper()}",
            )
            fill_space_end(info.spec.space, self._state.current.ends, space.ends_at)
            if info.spec.space in views:
                counts_by_index = count_index(views[info.spec.space])
                space.index.CopyFrom(
                    pb.IndexInfo(
                        in_graph=counts_by_index.graph,
                        compared=counts_by_index.exact,
                        delta=counts_by_index.delta,
                        due=counts_by_index.needs_graph,
                    )
                )
        return gallery


def _parse_items(request: pb.PutItemsRequest) -> tuple[list[NewItem], list[pb.ItemError]]:
    """Parse the items of a message.

    Returns:
        The items, and the errors of those that are not valid.

    Raises:
        TooLargeError: there are too many items.
    """
    if len(request.items) > MAX_ITEMS_PER_MESSAGE:
        raise TooLargeError(
            f"PutItems: expected at most {MAX_ITEMS_PER_MESSAGE} items in a message, got "
            f"{len(request.items)}; send several messages"
        )
    item_writers, errors = [], []
    for item in request.items:
        try:
            item_writers.append(_put(item))
        except InvalidInputError as error:
            errors.append(pb.ItemError(id=item.id[:256], message=str(error)))
    return item_writers, errors


def _put(item: pb.PutItem) -> NewItem:
    kind = item.WhichOneof("content")
    # Missing and empty metadata are the same on the wire: neither deletes what the item has.
    metadata = {
        key: read_metadata_value(value, key) for key, value in item.metadata.items()
    } or None
    if kind == "image":
        return NewItem(item.id, item.image, metadata)
    if kind == "text":
        return NewItem(item.id, item.text, metadata)
    if kind is None:
        raise InvalidInputError(
            "item: expected an image, a text or vectors as its content, got none of them; send one"
        )
    embedding, side = item.vectors.embedding, item.vectors.side_info
    side_parts = (side.space, side.values) if item.vectors.HasField("side_info") else (None, None)
    return NewItem(
        item.id, ExternalVectors(embedding.space, embedding.values, *side_parts), metadata
    )
