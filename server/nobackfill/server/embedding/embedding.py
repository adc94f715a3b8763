"""Images and texts to vectors: the models of the releases that are served, and calls of several
requests embedded in one batch.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import structlog

from nobackfill.errors import (
    DeadlineError,
    InvalidInputError,
    UnavailableError,
    UnusableOutputError,
)
from nobackfill.images import Pixels
from nobackfill.release.manifest import Manifest, TextRole
from nobackfill.release.models import (
    ImageEmbedder,
    Images,
    SideEncoder,
    no_vector,
    open_embedder,
    open_side_encoder,
)
from nobackfill.release.text_models import TextModel, no_text_vector, open_text_encoder
from nobackfill.server.embedding.decoding import Decoding, Size
from nobackfill.server.grpc import context
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.text import check_text, check_texts
from nobackfill.vectors import Vectors

log = structlog.get_logger("server.models")


class Models(Protocol):
    """Encoders of the loaded releases. Every call names its release.

    Methods raise NoEncoderError for what the release has no model of, UnavailableError while
    nothing can be embedded, DeadlineError when the call's time is over, VerificationError for
    outputs that are no vectors of the release's space, UnusableOutputError where only some are
    none.
    """

    def start(self) -> None:
        """Start what runs them, before anything is asked of it. Returns once it answers, or is
        known not to at first."""
        ...

    def load(self, manifest: Manifest) -> None:
        """Make a release ready; returns when it is. Loading it again does nothing."""
        ...

    def want(self, manifest: Manifest) -> None:
        """Make a release ready now, or as soon as the model server is there; never waits for it."""
        ...

    def unload(self, release: int) -> None:
        """Let go of a release; nobody may use it any more."""
        ...

    def embed(self, manifest: Manifest, images: Images) -> Vectors:
        """uint8 [n,H,W,3] to float32 [n,dim]."""
        ...

    def texts(self, manifest: Manifest, texts: Sequence[str], role: TextRole) -> Vectors:
        """Texts, at least one, to float32 [n,dim]; InvalidInputError where one cannot be read."""
        ...

    def side(self, manifest: Manifest, images: Images) -> Vectors | None:
        """uint8 [n,H,W,3] to float32 [n,side_dim]; None for a release without side encoder."""
        ...

    def ready(self) -> bool:
        """Whether images can be embedded now."""
        ...

    def close(self) -> None:
        """End what was started for it."""
        ...


@dataclass(frozen=True)
class _Loaded:
    """A release's models, as far as it has them."""

    images: ImageEmbedder | None
    texts: TextModel | None
    side: SideEncoder | None


class InProcessModels:
    """onnxruntime inside the gateway: for platforms without Triton's wheel, and for tests."""

    def __init__(self, files: Path) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._loaded: dict[int, _Loaded] = {}

    def start(self) -> None:
        pass

    def load(self, manifest: Manifest) -> None:
        with self._lock:
            if manifest.release in self._loaded:
                return
            self._loaded[manifest.release] = _Loaded(
                open_embedder(self._files, manifest) if manifest.embedder.file else None,
                open_text_encoder(self._files, manifest) if manifest.text_encoder else None,
                open_side_encoder(self._files, manifest) if manifest.side_encoder else None,
            )
        log.info("loaded in process", release=manifest.release)

    def want(self, manifest: Manifest) -> None:
        self.load(manifest)

    def unload(self, release: int) -> None:
        with self._lock:
            self._loaded.pop(release, None)

    def embed(self, manifest: Manifest, images: Images) -> Vectors:
        model = self._models(manifest).images
        if model is None:
            raise manifest.no_images()
        return model.run(images)

    def texts(self, manifest: Manifest, texts: Sequence[str], role: TextRole) -> Vectors:
        model = self._models(manifest).texts
        if model is None:
            raise manifest.no_texts()
        return model.run(texts, role)

    def side(self, manifest: Manifest, images: Images) -> Vectors | None:
        encoder = self._models(manifest).side
        return encoder.run(images) if encoder is not None else None

    def ready(self) -> bool:
        return True

    def close(self) -> None:
        self._loaded.clear()

    def _models(self, manifest: Manifest) -> _Loaded:
        try:
            return self._loaded[manifest.release]
        except KeyError:
            raise UnavailableError(
                f"the models of release {manifest.release} are not loaded"
            ) from None


# Micro-batches: whatever waits while one batch runs becomes the next. Nobody waits when idle.

Query = TypeVar("Query")
Answer = TypeVar("Answer")


class _Entry(Generic[Query, Answer]):
    """One thread's query. `turn` is held until there is an answer, an error, or a batch to lead."""

    __slots__ = ("answer", "deadline", "error", "leads", "query", "turn")

    def __init__(self, query: Query) -> None:
        self.query = query
        self.deadline = context.current().deadline
        self.turn = threading.Lock()
        self.turn.acquire()
        self.leads = False
        self.answer: Answer | None = None
        self.error: Exception | None = None


class Batcher(Generic[Query, Answer]):
    """Runs queries of many threads together, on the threads themselves.

    The thread that finds nothing running leads: it runs all that wait, its own query first, and
    then passes the lead to the next that waits. `run` gets 1 to `largest` queries and gives one
    answer each, in order; an error of `run` reaches every thread of the batch. Up to `at_once`
    batches run at the same time.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Query]], Sequence[Answer]],
        *,
        largest: int,
        at_once: int = 1,
        observe: Callable[[float], None] = lambda _size: None,
    ) -> None:
        self._run = run
        self._largest = largest
        self._free = at_once
        self._observe = observe
        self._lock = threading.Lock()
        # While anything waits here, `at_once` batches are running.
        self._waiting: deque[_Entry[Query, Answer]] = deque()

    def __call__(self, query: Query) -> Answer:
        """The answer to `query`. Raises DeadlineError when the call's time passes while waiting."""
        entry: _Entry[Query, Answer] = _Entry(query)
        with self._lock:
            if self._free:
                self._free -= 1
                entry.leads = True
            else:
                self._waiting.append(entry)
        if not entry.leads:
            self._wait(entry)
        if entry.leads:
            self._lead(entry)
        if entry.error is not None:
            raise entry.error
        return entry.answer  # type: ignore[return-value] # set with the turn

    def _wait(self, entry: _Entry[Query, Answer]) -> None:
        if entry.turn.acquire(timeout=context.current().remaining()):
            return
        with self._lock:
            if entry in self._waiting:
                self._waiting.remove(entry)
                raise DeadlineError("the call's deadline passed in the queue; allow more time")
        # Its batch is running, or it was made leader, just now.
        entry.turn.acquire()

    def _lead(self, first: _Entry[Query, Answer]) -> None:
        batch = [first]
        with self._lock:
            while self._waiting and len(batch) < self._largest:
                batch.append(self._waiting.popleft())
        try:
            self._observe(len(batch))
            if len(batch) == 1:
                answers = self._run([first.query])
            else:
                with context.until(max(entry.deadline for entry in batch)):
                    answers = self._run([entry.query for entry in batch])
            for entry, answer in zip(batch, answers, strict=True):
                entry.answer = answer
        except Exception as error:
            for entry in batch[1:]:
                entry.error = error
            raise
        finally:
            self._pass_on()
            for entry in batch[1:]:
                entry.turn.release()

    def _pass_on(self) -> None:
        with self._lock:
            if not self._waiting:
                self._free += 1
                return
            entry = self._waiting.popleft()
            entry.leads = True
        entry.turn.release()


# Texts to vectors: checked one by one, embedded in batches of many callers.

# Of 256 tokens each: a second of a small model's work on one core.
LARGEST_TEXT_BATCH = 32
# As of images: while one batch is in the model server, the next is on its way.
_AT_ONCE = 2

# float32 [1,dim], or why a text has none.
Row = Vectors | InvalidInputError


class TextEmbedding:
    """The text encoders of all loaded releases."""

    def __init__(self, models: Models, observe: Callable[[float], None]) -> None:
        self._models = models
        self._observe = observe
        self._batchers: dict[int, Batcher[str, Row]] = {}

    def query(self, manifest: Manifest, text: str) -> Row:
        """A query; together with what others ask at this moment. Raises NoEncoderError,
        InvalidInputError, UnavailableError, DeadlineError."""
        if manifest.text_encoder is None:
            raise manifest.no_texts()
        batcher = self._batchers.get(manifest.release)
        if batcher is None:
            made: Batcher[str, Row] = Batcher(
                lambda texts: self.rows(manifest, texts, "query"),
                largest=LARGEST_TEXT_BATCH, at_once=_AT_ONCE, observe=self._observe,
            )  # fmt: skip
            batcher = self._batchers.setdefault(manifest.release, made)
        return batcher(check_text(text))

    def rows(self, manifest: Manifest, texts: Sequence[str], role: TextRole) -> list[Row]:
        """Texts to float32 [1,dim] each, or why there is none, in order.

        Raises NoEncoderError, TooLargeError for texts that are too much together,
        UnavailableError, DeadlineError, CancelledError between batches.
        """
        if manifest.text_encoder is None:
            raise manifest.no_texts()
        found: list[Row] = [no_text_vector(manifest)] * len(texts)
        good = []
        for number, text in enumerate(texts):
            try:
                check_text(text)
                good.append(number)
            except InvalidInputError as error:
                found[number] = error
        check_texts([texts[number] for number in good])
        # A batch is as long as its longest text.
        good.sort(key=lambda number: len(texts[number]))
        for start in range(0, len(good), LARGEST_TEXT_BATCH):
            context.current().check()
            self._batch(manifest, texts, role, good[start : start + LARGEST_TEXT_BATCH], found)
        return found

    def _batch(
        self, manifest: Manifest, texts: Sequence[str], role: TextRole, left: list[int],
        found: list[Row],
    ) -> None:  # fmt: skip
        while left:
            try:
                vectors = self._models.texts(manifest, [texts[number] for number in left], role)
            except UnusableOutputError as error:
                left = [number for row, number in enumerate(left) if row not in error.rows]
            except InvalidInputError as error:
                if len(left) == 1:
                    found[left[0]] = error
                    return
                # One that its tokenizer cannot take: find out which.
                for number in left:
                    self._batch(manifest, texts, role, [number], found)
                return
            else:
                for row, number in enumerate(left):
                    found[number] = vectors[row : row + 1]
                return


# Images and texts to vectors: decoded in turns, embedded in batches of many callers.

LARGEST_BATCH = 64
# While one batch is in the model server, the next is on its way.
# More are never on their way from one thread to another.
_KEPT = 64

# float32 [1,dim], or why an image has none.


class Embedding:
    """The embedders of all loaded releases."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self.models = models
        self._observe = metrics.batch_size.labels("embed").observe
        self.decoding = Decoding()
        self.texts = TextEmbedding(models, self._observe)
        self._batchers: dict[int, Batcher[Pixels, Row]] = {}
        # Images that were embedded for who asks again.
        self._kept: OrderedDict[tuple[int, bytes], Vectors] = OrderedDict()

    def query(self, manifest: Manifest, item: bytes | str) -> Vectors:
        """One encoded image, or a text, to float32 [1,dim]; together with what others ask at this
        moment.

        Raises InvalidInputError for what is no image, or one that has no vector, NoEncoderError,
        UnavailableError, DeadlineError.
        """
        with context.part("embed"):
            row = (
                self.texts.query(manifest, item)
                if isinstance(item, str)
                else self._image(manifest, item)
            )
        if isinstance(row, InvalidInputError):
            raise row
        return row

    def _image(self, manifest: Manifest, image: bytes) -> Row:
        known = self._kept.pop((manifest.release, image), None) if self._kept else None
        if known is not None:
            return known
        batcher = self._batchers.get(manifest.release)
        if batcher is None:
            batcher = self._batchers.setdefault(manifest.release, self._batcher(manifest))
        return batcher(self.decode(manifest, image))

    def keep(self, manifest: Manifest, image: bytes, row: Vectors) -> None:
        """The vector [1,dim] of an image that is asked for again at once, by `query`."""
        self._kept[manifest.release, image] = row
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)

    def queries(
        self, manifests: Sequence[Manifest], items: Sequence[bytes | str]
    ) -> list[tuple[Vectors, ...] | InvalidInputError]:
        """Of each encoded image, or text, its vectors by each release, or why there are none, in
        order.

        Raises NoEncoderError, UnavailableError, DeadlineError, CancelledError; TooLargeError and
        OverloadedError for what costs too much together.
        """
        images = [item for item in items if isinstance(item, bytes)]
        texts = [item for item in items if isinstance(item, str)]
        with context.part("embed"):
            seen = iter(self._images(manifests, images) if images else ())
            columns = [self.texts.rows(m, texts, "query") for m in manifests] if texts else []
        read = iter(_together(rows) for rows in zip(*columns, strict=True))
        return [next(read) if isinstance(item, str) else next(seen) for item in items]

    def _images(
        self, manifests: Sequence[Manifest], images: Sequence[bytes]
    ) -> list[tuple[Vectors, ...] | InvalidInputError]:
        with self.decoding.batch(images):
            decoded = self.decoding.each(images, {size_of(manifest) for manifest in manifests})
        good = [one for one in decoded if not isinstance(one, InvalidInputError)]
        columns = [self.rows(m, [one[size_of(m)] for one in good]) for m in manifests]
        rows = iter(zip(*columns, strict=True))
        return [
            one if isinstance(one, InvalidInputError) else _together(next(rows)) for one in decoded
        ]

    def rows(self, manifest: Manifest, images: Sequence[Pixels]) -> list[Row]:
        """Decoded images to float32 [1,dim] each, or why there is none, in order.

        Raises UnavailableError, DeadlineError.
        """
        found: list[Row] = [no_vector(manifest)] * len(images)
        left = list(range(len(images)))
        while left:
            try:
                vectors = self.many(manifest, [images[row] for row in left])
            except UnusableOutputError as error:
                left = [number for row, number in enumerate(left) if row not in error.rows]
            else:
                for row, number in enumerate(left):
                    found[number] = vectors[row : row + 1]
                break
        return found

    def many(self, manifest: Manifest, images: Sequence[Pixels]) -> Vectors:
        """Decoded images to float32 [n,dim], in order.

        Raises UnavailableError, DeadlineError, UnusableOutputError with the numbers of those that
        have no vector.
        """
        return _in_chunks(lambda chunk: self.models.embed(manifest, chunk), images)

    def sides(self, manifest: Manifest, images: Sequence[Pixels]) -> Vectors | None:
        """Side-information float32 [n,side_dim]; None where the release has none. As `many`."""
        if manifest.side_encoder is None:
            return None

        def side(chunk: Images) -> Vectors:
            vectors = self.models.side(manifest, chunk)
            assert vectors is not None, "the release has an encoder"
            return vectors

        return _in_chunks(side, images)

    def decode(self, manifest: Manifest, image: bytes) -> Pixels:
        """One encoded image to the release's size. Raises InvalidInputError, DeadlineError."""
        size = size_of(manifest)
        (decoded,) = self.decoding.each([image], [size])
        if isinstance(decoded, InvalidInputError):
            raise decoded
        return decoded[size]

    def _batcher(self, manifest: Manifest) -> Batcher[Pixels, Row]:
        return Batcher(
            lambda images: self.rows(manifest, images),
            largest=LARGEST_BATCH,
            at_once=_AT_ONCE,
            observe=self._observe,
        )


def size_of(manifest: Manifest) -> Size:
    """What a release's models read of images. Raises NoEncoderError."""
    return manifest.frame


def _together(rows: Sequence[Row]) -> tuple[Vectors, ...] | InvalidInputError:
    vectors = [row for row in rows if not isinstance(row, InvalidInputError)]
    if len(vectors) == len(rows):
        return tuple(vectors)
    return next(row for row in rows if isinstance(row, InvalidInputError))


def _in_chunks(run: Callable[[Images], Vectors], images: Sequence[Pixels]) -> Vectors:
    parts, bad, why = [], list[int](), ""
    for start in range(0, len(images), LARGEST_BATCH):
        context.current().check()
        try:
            parts.append(run(np.stack(images[start : start + LARGEST_BATCH])))
        except UnusableOutputError as error:
            bad += [start + row for row in error.rows]
            why = str(error)
    if bad:
        raise UnusableOutputError(why, bad)
    return np.concatenate(parts)
