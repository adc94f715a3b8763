"""Put items: embed images and texts for every space of a gallery, and store them durably."""

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    NoEncoderError,
    NotFoundError,
    UnusableOutputError,
    VerificationError,
)
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.store import MAX_ID_CHARACTERS, NewVectors, check_batch
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import no_vector_error
from nobackfill.release.routes import RouteRunner
from nobackfill.server.embedding.embedding import (
    Decoded,
    EmbeddingService,
    decode_budget_errors,
)
from nobackfill.server.galleries.hosted import GalleryRegistry, HostedGallery, ItemQuota
from nobackfill.server.galleries.plan import Plan
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import Principal
from nobackfill.server.state import OutdatedPlanError
from nobackfill.vectors import vector_from_bytes


@dataclass(frozen=True)
class ExternalVectors:
    """Hold an item's vectors that another program computed; they are checked when they are put.

    Attributes:
        space: id of the embedding's space.
        embedding: little-endian float32 values.
        side_space: id of the side-information's space; None without side-information.
        side: little-endian float32 values; None without side-information.
    """

    space: str
    embedding: bytes
    side_space: str | None
    side: bytes | None


@dataclass(frozen=True)
class NewItem:
    """Hold an item to store.

    Attributes:
        id: id of the item.
        content: an encoded image, a text, or vectors.
        metadata: metadata of the item; None keeps what it has.
    """

    id: str
    content: bytes | str | ExternalVectors
    metadata: Metadata | None

    def digest(self) -> str:
        """Return a digest of the content; putting the same content again is no change.

        Metadata and id are not part of it. The digest begins with the kind: image-, text- or
        vectors-.

        Raises:
            UnicodeEncodeError: a text has a lone surrogate.
        """
        if isinstance(self.content, bytes):
            return "image-" + hashlib.sha256(self.content).hexdigest()
        if isinstance(self.content, str):
            return "text-" + hashlib.sha256(self.content.encode()).hexdigest()
        vectors = self.content
        parts = (
            vectors.space.encode(),
            vectors.embedding,
            (vectors.side_space or "").encode(),
            vectors.side,
        )
        return "vectors-" + hashlib.sha256(b"\0".join(part or b"" for part in parts)).hexdigest()


@dataclass
class PutOutcome:
    """Report a put.

    Attributes:
        stored_count: number of items that are durable.
        refusals: id, cut to the longest valid length, and reason of each other item.
    """

    stored_count: int = 0
    refusals: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class _ReadyPut:
    """Hold an item and its vectors: one row for each space that it goes to."""

    put: NewItem
    vectors: tuple[NewVectors, ...]


# Returns what upgrades bare vectors from one release to another, given the space of their
# side-information (None without); None if no route leads there.
RunnerOf = Callable[[Manifest, Manifest, str | None], RouteRunner | None]


class ItemWriter:
    """Store items in galleries."""

    def __init__(
        self, embedding: EmbeddingService, runner_of: RunnerOf, catch_up: Callable[[], None]
    ) -> None:
        """Use shared parts of the gateway.

        Args:
            embedding: embeds images and texts.
            runner_of: finds the upgrade of bare vectors; None from it refuses the item.
            catch_up: follows other gateways; see GatewayState.catch_up.
        """
        self._embedding = embedding
        self._runner_of = runner_of
        self._catch_up = catch_up

    def put(
        self, hosted: HostedGallery, items: Sequence[NewItem], allowance: ItemQuota | None = None
    ) -> PutOutcome:
        """Store the items that can be stored; returns once they are durable.

        Items that were stored before an error stay; putting all of them again is safe. An item with
        the same content as the stored one keeps its vectors. The last of several items with one id
        wins. If the plan changes meanwhile, here or by another gateway, the items are embedded
        again. The caller is a user of the gallery; views that searches need are made first.

        Args:
            hosted: the gallery.
            items: the items; none are fine.
            allowance: limit of the caller's items, which only a database checks here; None means no
                limit.

        Returns:
            The number of stored items, and the refused ones. Refused are items with an invalid id,
            metadata, image, text or vector, of a space or kind that the gallery does not take, and
            images beyond the limit of one call.

        Raises:
            ItemQuotaError: there would be too many items.
            UnavailableError: the model server or the database does not answer.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            BusyError: the store is locked for too long.
            CannotWriteError: the store cannot be written.
            NotFoundError: the gallery was closed or deleted.
            VerificationError: a model fails its trial or makes invalid vectors, or the store is
                damaged.
            OutdatedPlanError: this gateway cannot follow another one that changed the gallery.
            TooLargeError: the texts together are too large for one call.
            IncompatibleSpaceError: a space of the plan was deleted meanwhile.
            LockOrderError: the thread holds a lock that comes later.
            ConfigurationError: the database refuses the statement.
        """
        hosted.open_views()
        outcome = PutOutcome()
        for group in _without_repeats(_decodable_items(items, outcome)):
            while True:
                plan = hosted.plan
                try:
                    if self._put_for_plan(hosted, group, allowance, outcome):
                        break
                except OutdatedPlanError:
                    self._catch_up()
                    if hosted.plan is plan:
                        # This gateway cannot follow the others, or the gallery is gone.
                        raise
        return outcome

    def _put_for_plan(
        self,
        hosted: HostedGallery,
        items: Sequence[NewItem],
        allowance: ItemQuota | None,
        outcome: PutOutcome,
    ) -> bool:
        """Make vectors for the present plan, and store them; False if the plan changed
        meanwhile.
        """
        with hosted.use_plan() as plan:
            refusals: list[tuple[str, str]] = []
            with context.trace_part("embed"):
                ready = self._make_vectors(plan, items, refusals)
            with context.trace_part("store"), hosted.write_lock.shared():
                if hosted.plan is not plan:
                    return False
                for group in _group_by_spaces(ready):
                    _store(hosted, plan, group, allowance)
        outcome.stored_count += len(ready)
        outcome.refusals += refusals
        return True

    def _make_vectors(
        self, plan: Plan, items: Sequence[NewItem], refusals: list[tuple[str, str]]
    ) -> list[_ReadyPut]:
        ready: list[_ReadyPut] = []
        images: list[NewItem] = []
        texts: list[tuple[NewItem, str]] = []

        def refuse(put: NewItem, error: Exception) -> None:
            refusals.append((put.id[:MAX_ID_CHARACTERS], str(error)))

        for put in items:
            try:
                check_batch([put.id], None, [put.metadata])
                if isinstance(put.content, bytes):
                    if plan.query_manifest.embedder.file is None:
                        raise plan.query_manifest.no_images_error()
                    images.append(put)
                elif isinstance(put.content, str):
                    if plan.query_manifest.text_encoder is None:
                        raise plan.query_manifest.no_texts_error()
                    texts.append((put, put.content))
                else:
                    ready.append(_ReadyPut(put, self._check_external_vectors(plan, put.content)))
            except (InvalidInputError, IncompatibleSpaceError, NoEncoderError) as error:
                refuse(put, error)
        ready += self._embed_texts(plan, texts, refuse)
        sizes = {manifest.frame for manifest in _image_models(plan)}
        contents = [put.content for put in images if isinstance(put.content, bytes)]
        decoded: list[tuple[NewItem, Decoded]] = []
        results = self._embedding.decoder.decode_each(contents, sizes)
        for put, pixels in zip(images, results, strict=True):
            if isinstance(pixels, InvalidInputError):
                refuse(put, pixels)
            else:
                decoded.append((put, pixels))
        while decoded:
            try:
                return ready + self._embed_images(plan, decoded)
            except UnusableOutputError as error:
                for row in error.unusable_rows:
                    refuse(decoded[row][0], no_vector_error(plan.query_manifest))
                decoded = [one for row, one in enumerate(decoded) if row not in error.unusable_rows]
        return ready

    def _embed_images(
        self, plan: Plan, images: Sequence[tuple[NewItem, Decoded]]
    ) -> list[_ReadyPut]:
        """Embed images for every release of the plan, with side-information."""
        columns = []
        for manifest in _image_models(plan):
            pixels = [decoded[manifest.frame] for _, decoded in images]
            embeddings = self._embedding.embed_images(manifest, pixels)
            sides = self._embedding.compute_side(manifest, pixels)
            column = []
            for i in range(len(images)):
                side = None if sides is None else sides[i : i + 1]
                column.append(NewVectors(manifest.space, embeddings[i : i + 1], side))
            columns.append(column)
        rows = zip(*columns, strict=True)
        return [_ReadyPut(put, row) for (put, _), row in zip(images, rows, strict=True)]

    def _embed_texts(
        self,
        plan: Plan,
        texts: Sequence[tuple[NewItem, str]],
        refuse: Callable[[NewItem, Exception], None],
    ) -> Iterator[_ReadyPut]:
        """Embed texts for every release of the plan that reads texts.

        Texts have no side-information: no upgrade is known that gains by it.
        """
        if not texts:
            return
        manifests = [manifest for manifest in plan.written_releases if manifest.text_encoder]
        columns = [
            self._embedding.embed_each_text(manifest, [text for _, text in texts], "document")
            for manifest in manifests
        ]
        for (put, _), rows in zip(texts, zip(*columns, strict=True), strict=True):
            error = next((row for row in rows if isinstance(row, InvalidInputError)), None)
            if error is not None:
                refuse(put, error)
                continue
            yield _ReadyPut(
                put,
                tuple(
                    NewVectors(manifest.space, row, None)
                    for manifest, row in zip(manifests, rows, strict=True)
                    if not isinstance(row, InvalidInputError)
                ),
            )

    def _check_external_vectors(
        self, plan: Plan, external: ExternalVectors
    ) -> tuple[NewVectors, ...]:
        """Check bare vectors, and upgrade them if their space is not searched by default."""
        manifest = next((m for m in plan.written_releases if m.space == external.space), None)
        if manifest is None or external.space not in plan.accepted_spaces:
            raise IncompatibleSpaceError(
                f"item: expected an embedding in the space of release "
                f"{plan.query_manifest.release}, or an image, got an embedding of space "
                f"{external.space[:64]!r}; embed the item with release "
                f"{plan.query_manifest.release}"
            )
        spec, encoder = manifest.embedder, manifest.side_encoder
        name = f"embedding of release {manifest.release}"
        embedding = vector_from_bytes(
            external.embedding, spec.dim, error_name=name, unit_norm=spec.unit
        )
        side = None
        if external.side is not None:
            if encoder is None or external.side_space != manifest.side_space:
                side_space = (
                    f"space {external.side_space[:64]!r}" if external.side_space else "no space"
                )
                raise IncompatibleSpaceError(
                    f"item: expected side-information in the space that release {manifest.release} "
                    f"uses, got {side_space}; compute it with the side-information encoder of that "
                    "release, or leave it out"
                )
            name = f"side-information of release {manifest.release}"
            side = vector_from_bytes(external.side, encoder.dim, error_name=name)
        native = NewVectors(external.space, embedding, side)
        if any(part.space == external.space for part in plan.parts):
            return (native,)
        runner = self._runner_of(
            manifest, plan.query_manifest, None if side is None else external.side_space
        )
        if runner is None:
            raise IncompatibleSpaceError(
                f"item: got vectors of release {manifest.release}, but no published upgrade for "
                "this side-information leads from that release to release "
                f"{plan.query_manifest.release}; send the image instead"
            )
        upgraded = runner.run(embedding, side)
        space, side = plan.query_manifest.space, upgraded.side_information
        return NewVectors(space, upgraded.embedding, side, "upgraded"), native


def _image_models(plan: Plan) -> list[Manifest]:
    """Return the releases of a plan that embed images."""
    return [manifest for manifest in plan.written_releases if manifest.embedder.file is not None]


def _store(
    hosted: HostedGallery, plan: Plan, group: Sequence[_ReadyPut], allowance: ItemQuota | None
) -> None:
    vectors = [
        NewVectors(
            first.space,
            np.concatenate([ready.vectors[i].embedding for ready in group]),
            None
            if first.side_information is None
            else np.concatenate([np.asarray(ready.vectors[i].side_information) for ready in group]),
            first.origin,
        )
        for i, first in enumerate(group[0].vectors)
    ]
    hosted.put(
        plan, [ready.put.id for ready in group], vectors, [ready.put.digest() for ready in group],
        [ready.put.metadata for ready in group], allowance,
    )  # fmt: skip


def _group_by_spaces(ready: Sequence[_ReadyPut]) -> list[list[_ReadyPut]]:
    """Group items that go to the same spaces."""
    groups: dict[tuple[tuple[str, bool, str], ...], list[_ReadyPut]] = {}
    for one in ready:
        key = tuple((new.space, new.side_information is None, new.origin) for new in one.vectors)
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _without_repeats(items: Sequence[NewItem]) -> list[list[NewItem]]:
    """Cut the items into groups without a repeated id, so that the last item of an id wins."""
    groups: list[list[NewItem]] = [[]]
    ids: set[str] = set()
    for put in items:
        if put.id in ids:
            groups.append([])
            ids.clear()
        ids.add(put.id)
        groups[-1].append(put)
    return groups


def _decodable_items(items: Sequence[NewItem], outcome: PutOutcome) -> list[NewItem]:
    """Return the items whose images, together with those before them, may be decoded at once.

    The others are refused in `outcome`.
    """
    contents = [put.content if isinstance(put.content, bytes) else b"" for put in items]
    accepted = []
    for put, error in zip(items, decode_budget_errors(contents), strict=True):
        if error is None:
            accepted.append(put)
        else:
            outcome.refusals.append((put.id[:MAX_ID_CHARACTERS], str(error)))
    return accepted


# Longest age (seconds) of a count: other gateways put, too. If fewer items than _FAR fit, the count
# is not trusted: that many can be put in a second.
_COUNT_SECONDS, _SAFE_MARGIN = 1.0, 100_000


class TokenQuotas:
    """Enforce the item quotas of tokens at one gateway, before each message is stored."""

    def __init__(self, galleries: GalleryRegistry) -> None:
        self._galleries = galleries
        self._quotas: dict[ItemQuota, _Quota] = {}

    @contextmanager
    def reserve(
        self, principal: Principal, gallery: str, ids: Collection[str]
    ) -> Iterator[ItemQuota | None]:
        """Reserve room for items during a block that puts them.

        Puts of one token wait for each other only while the room is uncertain, at most until the
        call's deadline. Room that the block does not use is counted until the next count, about a
        second. Galleries that are missing or set aside count 0. If `gallery` is one of them, its
        error is raised only where room is short.

        Args:
            principal: the caller, who may write to the gallery.
            gallery: the gallery.
            ids: ids of the items; items that the gallery has already need no room.

        Yields:
            The allowance that the store itself must check, because other gateways may put at the
            same time; None if the caller has no quota, or much room is left.

        Raises:
            ItemQuotaError: too many of the items are new; nothing is reserved.
            NotFoundError: no gallery has this name.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            VerificationError: the gallery is set aside.
            BusyError, UnavailableError: a store is busy, or does not answer.
            CannotWriteError: a gallery's file cannot be opened, or the disk fails.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        names, limit = principal.galleries, principal.max_items
        if names is None or limit is None:
            yield None
            return
        allowance = ItemQuota(names, limit)
        quota = self._quotas.setdefault(allowance, _Quota(self._galleries, allowance))
        with quota.reserve(gallery, set(ids)):
            yield allowance if quota.is_near else None


class _Quota:
    """Count the items of a token's galleries now and then, and add what is put here in between."""

    def __init__(self, galleries: GalleryRegistry, allowance: ItemQuota) -> None:
        self._galleries, self._allowance = galleries, allowance
        self._turn = threading.Condition()
        self._count, self._count_time = 0, float("-inf")
        # Items of messages that are being stored now.
        self._reserved = 0

    @property
    def is_near(self) -> bool:
        """Whether so little room is left that an earlier count is not reliable."""
        return self._allowance.max_items - self._count < _SAFE_MARGIN

    @contextmanager
    def reserve(self, gallery: str, ids: set[str]) -> Iterator[None]:
        with self._turn:
            count = self._admit(gallery, ids)
            self._reserved += count
        try:
            yield
        finally:
            with self._turn:
                self._reserved -= count
                self._count += count
                self._turn.notify_all()

    def _admit(self, gallery: str, ids: set[str]) -> int:
        """Return how many new items to reserve; waits while others store items and the room is
        uncertain.

        Raises:
            ItemQuotaError: too many of the items are new.
        """
        while True:
            is_old = time.monotonic() - self._count_time > _COUNT_SECONDS
            if is_old or self.is_near:
                self._recount_items()
            if self._count + self._reserved + len(ids) <= self._allowance.max_items:
                return len(ids)
            if not self._reserved:
                return self._admit_new(gallery, ids)
            # The count may include some of the items that are being stored.
            self._turn.wait(min(_COUNT_SECONDS, context.current_call().remaining()))
            context.current_call().check()

    def _admit_new(self, gallery: str, ids: set[str]) -> int:
        self._recount_items()
        with self._galleries.use_gallery(gallery) as hosted:
            new = len(ids) - len(hosted.store.labels_of(list(ids)))
        self._allowance.check(self._count, new)
        return new

    def _recount_items(self) -> None:
        counted = 0
        for name in self._allowance.galleries:
            with (
                suppress(NotFoundError, VerificationError),
                self._galleries.use_gallery(name) as hosted,
            ):
                counted += hosted.store.count()
        self._count, self._count_time = counted, time.monotonic()
