"""Putting items: images and texts embedded for every space the gallery keeps, made durable,
acknowledged."""

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
from nobackfill.release.models import no_vector
from nobackfill.release.routes import RouteRunner
from nobackfill.server.embedding.decoding import Decoded, affordable, too_dear
from nobackfill.server.embedding.embedding import Embedding, size_of
from nobackfill.server.galleries.galleries import GalleryRegistry
from nobackfill.server.galleries.hosted import Allowance, Hosted
from nobackfill.server.galleries.plan import Plan
from nobackfill.server.grpc import context
from nobackfill.server.grpc.access import Principal
from nobackfill.server.state import OutdatedError
from nobackfill.vectors import from_bytes

# What is put: items with an image, a text, or vectors that were made elsewhere.


@dataclass(frozen=True)
class Bare:
    """Vectors made elsewhere: bytes of float32 values with the ids of their spaces."""

    space: str
    embedding: bytes
    side_space: str | None
    side: bytes | None


@dataclass(frozen=True)
class Put:
    """An item to store: an encoded image, a text, or vectors. `metadata` None: what it has, if
    anything."""

    id: str
    content: bytes | str | Bare
    metadata: Metadata | None

    def digest(self) -> str:
        """Of the content: the same content again is no change."""
        if isinstance(self.content, bytes):
            return "image-" + hashlib.sha256(self.content).hexdigest()
        if isinstance(self.content, str):
            return "text-" + hashlib.sha256(self.content.encode()).hexdigest()
        bare = self.content
        parts = (bare.space.encode(), bare.embedding, (bare.side_space or "").encode(), bare.side)
        return "vectors-" + hashlib.sha256(b"\0".join(part or b"" for part in parts)).hexdigest()


@dataclass
class PutOutcome:
    """`stored` items are durable; the others were refused, each with its reason."""

    stored: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class _ReadyPut:
    """An item whose vectors are made, one for each space it goes to, of one row each."""

    put: Put
    vectors: tuple[NewVectors, ...]


# Carries bare vectors of an older release to another; None where no route leads there.
RunnerOf = Callable[[Manifest, Manifest, str | None], RouteRunner | None]


class Putting:
    """Stores items in galleries."""

    def __init__(
        self, embedding: Embedding, runner_of: RunnerOf, catch_up: Callable[[], None]
    ) -> None:
        """`runner_of`: source, target, space of the side-information at hand. `catch_up`: as
        GatewayState's."""
        self._embedding = embedding
        self._runner_of = runner_of
        self._catch_up = catch_up

    def put(
        self, hosted: Hosted, puts: Sequence[Put], allowance: Allowance | None = None
    ) -> PutOutcome:
        """Store what can be stored; returns when it is durable.

        Raises ItemQuotaError, UnavailableError, DeadlineError, CancelledError, BusyError,
        CannotWriteError; what was stored until then stays, and putting everything again is right.
        """
        hosted.wake()
        outcome = PutOutcome()
        for group in _without_repeats(_affordable(puts, outcome)):
            while True:
                plan = hosted.plan
                try:
                    if self._try(hosted, group, allowance, outcome):
                        break
                except OutdatedError:
                    self._catch_up()
                    if hosted.plan is plan:
                        # This gateway cannot follow, or the gallery is gone.
                        raise
        return outcome

    def _try(
        self, hosted: Hosted, puts: Sequence[Put], allowance: Allowance | None, outcome: PutOutcome
    ) -> bool:
        """Make vectors for the present plan and store them; False if the plan changed meanwhile."""
        with hosted.using() as plan:
            refused: list[tuple[str, str]] = []
            with context.part("embed"):
                ready = self._make(plan, puts, refused)
            with context.part("store"), hosted.write_lock.shared():
                if hosted.plan is not plan:
                    return False
                for group in _by_spaces(ready):
                    _store(hosted, plan, group, allowance)
        outcome.stored += len(ready)
        outcome.refused += refused
        return True

    def _make(
        self, plan: Plan, puts: Sequence[Put], refused: list[tuple[str, str]]
    ) -> list[_ReadyPut]:
        ready: list[_ReadyPut] = []
        images: list[Put] = []
        texts: list[tuple[Put, str]] = []

        def refuse(put: Put, error: Exception) -> None:
            refused.append((put.id[:MAX_ID_CHARACTERS], str(error)))

        for put in puts:
            try:
                check_batch([put.id], None, [put.metadata])
                if isinstance(put.content, bytes):
                    if plan.query.embedder.file is None:
                        raise plan.query.no_images()
                    images.append(put)
                elif isinstance(put.content, str):
                    if plan.query.text_encoder is None:
                        raise plan.query.no_texts()
                    texts.append((put, put.content))
                else:
                    ready.append(_ReadyPut(put, self._bare(plan, put.content)))
            except (InvalidInputError, IncompatibleSpaceError, NoEncoderError) as error:
                refuse(put, error)
        ready += self._read(plan, texts, refuse)
        sizes = {size_of(manifest) for manifest in _of_images(plan)}
        contents = [put.content for put in images if isinstance(put.content, bytes)]
        decoded: list[tuple[Put, Decoded]] = []
        for put, found in zip(images, self._embedding.decoding.each(contents, sizes), strict=True):
            if isinstance(found, InvalidInputError):
                refuse(put, found)
            else:
                decoded.append((put, found))
        while decoded:
            try:
                return ready + self._embed(plan, decoded)
            except UnusableOutputError as error:
                for row in error.rows:
                    refuse(decoded[row][0], no_vector(plan.query))
                decoded = [one for row, one in enumerate(decoded) if row not in error.rows]
        return ready

    def _embed(self, plan: Plan, images: Sequence[tuple[Put, Decoded]]) -> list[_ReadyPut]:
        """Embedding and side-information of each image, for every release that the plan writes."""
        columns = []
        for manifest in _of_images(plan):
            pixels = [decoded[size_of(manifest)] for _, decoded in images]
            embeddings = self._embedding.many(manifest, pixels)
            columns.append((manifest.space, embeddings, self._embedding.sides(manifest, pixels)))
        return [
            _ReadyPut(
                put,
                tuple(
                    NewVectors(
                        space, embeddings[i : i + 1], None if sides is None else sides[i : i + 1]
                    )
                    for space, embeddings, sides in columns
                ),
            )
            for i, (put, _) in enumerate(images)
        ]

    def _read(
        self, plan: Plan, texts: Sequence[tuple[Put, str]], refuse: Callable[[Put, Exception], None]
    ) -> Iterator[_ReadyPut]:
        """Embeddings of each text, for every release that the plan writes and that reads texts. No
        side-information: nobody has found any of texts that an upgrade would gain by."""
        if not texts:
            return
        manifests = [manifest for manifest in plan.writes if manifest.text_encoder]
        columns = [
            self._embedding.texts.rows(manifest, [text for _, text in texts], "document")
            for manifest in manifests
        ]
        for (put, _), rows in zip(texts, zip(*columns, strict=True), strict=True):
            refusal = next((row for row in rows if isinstance(row, InvalidInputError)), None)
            if refusal is not None:
                refuse(put, refusal)
                continue
            yield _ReadyPut(
                put,
                tuple(
                    NewVectors(manifest.space, row, None)
                    for manifest, row in zip(manifests, rows, strict=True)
                    if not isinstance(row, InvalidInputError)
                ),
            )

    def _bare(self, plan: Plan, bare: Bare) -> tuple[NewVectors, ...]:
        """Bare vectors, and where their space is no longer searched by default, carried on."""
        manifest = next((m for m in plan.writes if m.space == bare.space), None)
        if manifest is None or bare.space not in plan.accepts:
            raise IncompatibleSpaceError(
                f"expected vectors of release {plan.query.release}, or an image; got vectors of "
                "another space"
            )
        spec, encoder = manifest.embedder, manifest.side_encoder
        what = f"embedding of release {manifest.release}"
        embedding = from_bytes(bare.embedding, spec.dim, what=what, unit=spec.unit)
        side = None
        if bare.side is not None:
            if encoder is None or bare.side_space != manifest.side_space:
                raise IncompatibleSpaceError(
                    f"expected side-information of release {manifest.release}, got another's"
                )
            what = f"side-information of release {manifest.release}"
            side = from_bytes(bare.side, encoder.dim, what=what)
        own = NewVectors(bare.space, embedding, side)
        if any(part.space == bare.space for part in plan.parts):
            return (own,)
        runner = self._runner_of(manifest, plan.query, None if side is None else bare.side_space)
        if runner is None:
            raise IncompatibleSpaceError(
                f"no published upgrade carries vectors of release {manifest.release} to release "
                f"{plan.query.release} with the side-information sent; send the image"
            )
        carried = runner.run(embedding, side)
        return (
            NewVectors(plan.query.space, carried.embedding, carried.side, "upgraded"),
            own,
        )


def _of_images(plan: Plan) -> list[Manifest]:
    """Releases that the plan writes and that embed images."""
    return [manifest for manifest in plan.writes if manifest.embedder.file is not None]


def _store(
    hosted: Hosted, plan: Plan, group: Sequence[_ReadyPut], allowance: Allowance | None
) -> None:
    vectors = [
        NewVectors(
            first.space,
            np.concatenate([ready.vectors[i].embedding for ready in group]),
            None
            if first.side is None
            else np.concatenate([np.asarray(ready.vectors[i].side) for ready in group]),
            first.origin,
        )
        for i, first in enumerate(group[0].vectors)
    ]
    hosted.put(
        plan, [ready.put.id for ready in group], vectors, [ready.put.digest() for ready in group],
        [ready.put.metadata for ready in group], allowance,
    )  # fmt: skip


def _by_spaces(ready: Sequence[_ReadyPut]) -> list[list[_ReadyPut]]:
    """Items that go to the same spaces, together."""
    groups: dict[tuple[tuple[str, bool, str], ...], list[_ReadyPut]] = {}
    for one in ready:
        key = tuple((new.space, new.side is None, new.origin) for new in one.vectors)
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _without_repeats(puts: Sequence[Put]) -> list[list[Put]]:
    """Cut where an id comes again, so that the last of a kind wins."""
    groups: list[list[Put]] = [[]]
    seen: set[str] = set()
    for put in puts:
        if put.id in seen:
            groups.append([])
            seen.clear()
        seen.add(put.id)
        groups[-1].append(put)
    return groups


def _affordable(puts: Sequence[Put], outcome: PutOutcome) -> list[Put]:
    """Those whose images may be decoded, with those before them, in one message."""
    contents = [put.content if isinstance(put.content, bytes) else b"" for put in puts]
    kept = []
    for put, may in zip(puts, affordable(contents), strict=True):
        if may:
            kept.append(put)
        else:
            outcome.refused.append((put.id[:MAX_ID_CHARACTERS], str(too_dear())))
    return kept


# How many items the galleries of a token may hold: looked at before each message is stored.

# How old, in seconds, a count may be: other gateways put, too. Where there is room for fewer items
# than a second brings, none is kept.
_COUNTED_S, _FAR = 1.0, 100_000


class Quotas:
    """Of all tokens that have one, at one gateway."""

    def __init__(self, galleries: GalleryRegistry) -> None:
        self._galleries = galleries
        self._known: dict[Allowance, _Quota] = {}

    @contextmanager
    def taking(
        self, principal: Principal, gallery: str, ids: Collection[str]
    ) -> Iterator[Allowance | None]:
        """Put items under `ids` into `gallery` within the block, which the caller's role is for. A
        store that others write, too, has to keep to the allowance, where there is one.

        Raises ItemQuotaError where those that are new are too many, NotFoundError for no gallery,
        DeadlineError, CancelledError.
        """
        names, most = principal.galleries, principal.items
        if names is None or most is None:
            yield None
            return
        allowance = Allowance(names, most)
        quota = self._known.setdefault(allowance, _Quota(self._galleries, allowance))
        with quota.taking(gallery, set(ids)):
            yield allowance if quota.near else None


class _Quota:
    """Counts now and then, and adds what is put here meanwhile."""

    def __init__(self, galleries: GalleryRegistry, allowance: Allowance) -> None:
        self._galleries, self._allowance = galleries, allowance
        self._turn = threading.Condition()
        self._counted, self._at = 0, float("-inf")
        # Items of messages that are being stored.
        self._under_way = 0

    @property
    def near(self) -> bool:
        """Whether there is room for so few items that none counted before is to be relied on."""
        return self._allowance.items - self._counted < _FAR

    @contextmanager
    def taking(self, gallery: str, ids: set[str]) -> Iterator[None]:
        with self._turn:
            many = self._admit(gallery, ids)
            self._under_way += many
        try:
            yield
        finally:
            with self._turn:
                self._under_way -= many
                self._counted += many
                self._turn.notify_all()

    def _admit(self, gallery: str, ids: set[str]) -> int:
        """How many items it may become more."""
        while True:
            old = time.monotonic() - self._at > _COUNTED_S
            if old or self.near:
                self._count()
            if self._counted + self._under_way + len(ids) <= self._allowance.items:
                return len(ids)
            if not self._under_way:
                return self._admit_new(gallery, ids)
            # What is counted may hold some of those under way already.
            self._turn.wait(min(_COUNTED_S, context.current().remaining()))
            context.current().check()

    def _admit_new(self, gallery: str, ids: set[str]) -> int:
        self._count()
        with self._galleries.using(gallery) as hosted:
            new = len(ids) - len(hosted.store.labels_of(list(ids)))
        self._allowance.check(self._counted, new)
        return new

    def _count(self) -> None:
        counted = 0
        for name in self._allowance.galleries:
            with suppress(NotFoundError, VerificationError), self._galleries.using(name) as hosted:
                counted += hosted.store.count()
        self._counted, self._at = counted, time.monotonic()
