"""Turn images and texts into vectors with the models of the served releases.

Pictures are decoded a few at a time, cheap ones first, and none that no caller waits for. Queries
of several calls are embedded in one batch. Images of queries are decoded and embedded on a few
threads (`ImageQueue`), so that no thread of a call waits for them.
"""

import heapq
import itertools
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import structlog

from nobackfill.errors import (
    DeadlineError,
    InvalidInputError,
    NobackfillError,
    OverloadedError,
    TooLargeError,
    UnavailableError,
    UnusableOutputError,
)
from nobackfill.framing import Frame
from nobackfill.images import Pixels, check_header, decode_with_header
from nobackfill.release.manifest import Manifest, QueryAdapter, TextRole
from nobackfill.release.models import (
    AdapterModel,
    ImageEmbedder,
    Images,
    SideEncoder,
    no_vector_error,
    open_adapter,
    open_embedder,
    open_side_encoder,
)
from nobackfill.release.text_models import TextModel, no_text_vector_error, open_text_encoder
from nobackfill.server.grpc import context
from nobackfill.server.grpc.context import error_boundary
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.text import check_text, check_texts
from nobackfill.vectors import Vectors

# Costs are in pixels of a plain JPEG, 7 ns each on one core; see core/nobackfill/images.py.
# MAX_DECODE_COST is the most for the pictures of one call, or of one message of a stream.
MAX_DECODE_COST = 2_000_000_000
_SECONDS_PER_PIXEL = 7e-9
# Most cost that is decoded at once: about 500 MB of memory at worst.
_MAX_COST_AT_ONCE = 200_000_000
# Calls above this cost are expensive; so many of them may hold threads of calls.
_EXPENSIVE = 250_000_000
_MAX_EXPENSIVE_CALLS = 3
# Below this cost (28 ms) a picture does not wait for a turn.
CHEAP_DECODE_COST = 4_000_000
# Seconds between two checks of a waiting picture whether it is still wanted.
_CHECK_SECONDS = 0.25

Size = Frame
Decoded = Mapping[Size, Pixels]


class ImageDecoder:
    """Decode pictures on the callers' threads, in turns."""

    def __init__(self, core_count: int | None = None) -> None:
        self._turns = _DecodingTurns(core_count or len(os.sched_getaffinity(0)), _MAX_COST_AT_ONCE)
        self._expensive_calls = threading.BoundedSemaphore(_MAX_EXPENSIVE_CALLS)

    def decode_each(
        self, images: Sequence[bytes], sizes: Collection[Size]
    ) -> list[Decoded | InvalidInputError]:
        """Decode images on this thread, in turns with other calls, each in every size.

        A turn waits until a core is free; cheap and early pictures go first.

        Args:
            images: encoded images; empty gives no results.
            sizes: the sizes.

        Returns:
            For each image, in order, its pixels by size, or why it was refused.

        Raises:
            DeadlineError: the call's time is over, between images or while waiting.
            CancelledError: the caller has cancelled the call.
        """
        began, spent = time.monotonic(), 0
        results: list[Decoded | InvalidInputError] = []
        for image in images:
            context.current_call().check()
            try:
                header = check_header(image)
                spent += header.decoding_cost * len(sizes)
                with self._turns.turn(began + _SECONDS_PER_PIXEL * spent, header.decoding_cost):
                    results.append({size: decode_with_header(header, *size) for size in sizes})
            except InvalidInputError as error:
                results.append(error)
        return results

    @contextmanager
    def admit_batch(self, images: Sequence[bytes]) -> Iterator[None]:
        """Admit a call whose images are all needed at once, or refuse it before any is decoded;
        never waits.

        At most three calls above a quarter of a billion pixels are admitted at once, until their
        blocks end. An image that is not valid costs nothing here, and is refused later.

        Args:
            images: encoded images; only their headers are read.

        Raises:
            TooLargeError: the images cost more than MAX_DECODE_COST.
            OverloadedError: too many expensive calls are being decoded.
        """
        cost = sum(_decoding_costs(images))
        if cost > MAX_DECODE_COST:
            raise _decode_cost_error(cost)
        if cost <= _EXPENSIVE:
            yield
            return
        if not self._expensive_calls.acquire(blocking=False):
            raise OverloadedError(
                f"{_MAX_EXPENSIVE_CALLS} calls with large pictures are being decoded, as many as "
                "the gateway accepts; try again with a growing delay, or send smaller copies"
            )
        try:
            yield
        finally:
            self._expensive_calls.release()


def decode_if_cheap(image: bytes, size: Size) -> Pixels | None:
    """Decode an image on this thread if that takes a few milliseconds; None if it must wait for a
    turn.

    Args:
        image: the encoded image.
        size: the frame of the result.

    Raises:
        InvalidInputError: the image is not valid.
    """
    header = check_header(image)
    return decode_with_header(header, *size) if header.decoding_cost <= CHEAP_DECODE_COST else None


def decode_budget_errors(images: Sequence[bytes]) -> list[TooLargeError | None]:
    """Return for each image the error if it and those before it cost more than MAX_DECODE_COST,
    else None. An image that is not valid costs nothing.
    """
    return [
        _decode_cost_error(cost) if cost > MAX_DECODE_COST else None
        for cost in itertools.accumulate(_decoding_costs(images))
    ]


def _decode_cost_error(cost: int) -> TooLargeError:
    """Make the error for images that cost too much in total, in pixels of a plain JPEG."""
    return TooLargeError(
        f"cannot decode images of {-(-cost // 10**6)} million pixels at once, expected at most "
        f"{MAX_DECODE_COST // 10**6} million (a pixel of a PNG counts as 3; of a WebP, HEIC or "
        "AVIF as 8; of a JPEG with many scans as several); send fewer images in a call, or smaller "
        "copies"
    )


def _decoding_costs(images: Sequence[bytes]) -> Iterator[int]:
    for image in images:
        try:
            yield check_header(image).decoding_cost
        except InvalidInputError:
            # It is refused later, on its own.
            yield 0


class _Place:
    """Hold a waiting picture; its `turn` is locked until it may be decoded."""

    __slots__ = ("cost", "turn")

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.turn = threading.Lock()
        self.turn.acquire()


class _DecodingTurns:
    """Limit the number and cost of pictures that are decoded at once; the earliest key goes first.

    A key is a time, so a picture that has waited long goes before all that come later.
    """

    def __init__(self, at_once: int, max_cost: int) -> None:
        self._free, self._free_cost, self._max_cost = at_once, max_cost, max_cost
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, _Place]] = []
        self._numbers = itertools.count()

    @contextmanager
    def turn(self, key: float, cost: int) -> Iterator[None]:
        """Wait for a turn, and hold it during a block.

        Raises:
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
        """
        # A picture above the limit waits until nothing else is decoded.
        place = _Place(min(cost, self._max_cost))
        waiting = key, next(self._numbers), place
        with self._lock:
            heapq.heappush(self._waiting, waiting)
            self._wake()
        self._wait(waiting)
        try:
            yield
        finally:
            self._end(place)

    def _wait(self, waiting: tuple[float, int, _Place]) -> None:
        place = waiting[2]
        try:
            while not place.turn.acquire(timeout=_CHECK_SECONDS):
                context.current_call().check()
        except BaseException:
            with self._lock:
                has_turn = waiting not in self._waiting
                if not has_turn:
                    self._waiting.remove(waiting)
                    heapq.heapify(self._waiting)
                    self._wake()
            if has_turn:
                self._end(place)
            raise

    def _end(self, place: _Place) -> None:
        with self._lock:
            self._free, self._free_cost = self._free + 1, self._free_cost + place.cost
            self._wake()

    def _wake(self) -> None:
        """Wake the pictures whose turn has come; the caller holds the lock."""
        while self._waiting and self._free and self._free_cost >= self._waiting[0][2].cost:
            place = heapq.heappop(self._waiting)[2]
            self._free, self._free_cost = self._free - 1, self._free_cost - place.cost
            place.turn.release()


log = structlog.get_logger("server.models")


class Models(Protocol):
    """Run the encoders of the loaded releases; each call names its release.

    Methods raise NoEncoderError if the release has no such model, UnavailableError while nothing
    can be embedded, DeadlineError when the call's time is over, VerificationError if no output is a
    vector of the release's space, and UnusableOutputError if only some outputs are none.
    """

    def start(self) -> None:
        """Start the model server before its first use.

        Call it once. Returns once it answers, or once it is known that it does not answer yet. A
        server that cannot start raises nothing: it is logged, and tried again in the background.
        """

    def load(self, manifest: Manifest) -> None:
        """Load a release, and return once it is ready; do nothing if it is loaded.

        After an error the release does not count as loaded, but some of its models may stay in the
        model server; a repeated call uses them.

        Raises:
            UnavailableError: the model server does not answer, or cannot load a model.
            VerificationError: a model file does not match its signed digest, or cannot be loaded.
            ConfigurationError: the release embeds texts, and the extra `text` is not installed.
            DeadlineError: the call's time is over.
        """

    def load_when_ready(self, manifest: Manifest) -> None:
        """Load a release now if the model server answers, else once it does; do not wait for it to
        answer.

        A model server that does not load it in time is logged, and the load is tried again.

        Raises:
            VerificationError: a model file does not match its signed digest, or cannot be loaded.
            ConfigurationError: the release embeds texts, and the extra `text` is not installed.
        """

    def unload(self, release: int) -> None:
        """Free the models of a release that no caller uses any more; an unknown release is
        ignored.
        """

    def embed_images(self, manifest: Manifest, images: Images) -> Vectors:
        """Embed images.

        Args:
            manifest: the release.
            images: uint8 [n, H, W, 3] in the release's frame, n at least 1.

        Returns:
            float32 [n, dim].

        Raises:
            NoEncoderError: the release embeds no images.
            UnavailableError: the release is not loaded, or the model server does not answer.
            DeadlineError: the call's time is over.
            VerificationError: no output is a vector of the release's space.
            UnusableOutputError: only some outputs are none; it has their rows.
        """

    def embed_texts(self, manifest: Manifest, texts: Sequence[str], role: TextRole) -> Vectors:
        """Embed texts.

        Args:
            manifest: the release.
            texts: at least one text.
            role: whether they are queries or documents.

        Returns:
            float32 [n, dim].

        Raises:
            InvalidInputError: a text cannot be read.
            NoEncoderError: the release embeds no texts.
            UnavailableError: the release is not loaded, or the model server does not answer.
            DeadlineError: the call's time is over.
            VerificationError: no output is a vector of the release's space.
            UnusableOutputError: only some outputs are none; it has their rows.
        """

    def compute_side(self, manifest: Manifest, images: Images) -> Vectors:
        """Compute the side-information of images; all of them are one batch.

        Args:
            manifest: the release, which has a side encoder.
            images: uint8 [n, H, W, 3], n at least 1.

        Returns:
            float32 [n, side_dim].

        Raises:
            UnavailableError: the release is not loaded, or the model server does not answer.
            InvalidInputError: models in this process got images of another shape or dtype.
            DeadlineError: the call's time is over.
            VerificationError: the output has another shape.
            UnusableOutputError: some outputs are not finite; it has their rows.
        """

    def is_ready(self) -> bool:
        """Tell whether images can be embedded now, without waiting."""

    def close(self) -> None:
        """Stop what `start` has started, and free all models; call it once."""


@dataclass(frozen=True)
class _LoadedModels:
    """Hold the models of a release; None for each model that it does not have."""

    images: ImageEmbedder | None
    texts: TextModel | None
    side: SideEncoder | None


class InProcessModels:
    """Run models by onnxruntime inside the gateway, for platforms without Triton's wheel and for
    tests.
    """

    def __init__(self, model_repo: Path) -> None:
        self._files = model_repo
        self._lock = threading.Lock()
        self._loaded: dict[int, _LoadedModels] = {}

    def start(self) -> None:
        """Do nothing: this process runs the models."""

    def load(self, manifest: Manifest) -> None:
        """Load a release, and return once it is ready; do nothing if it is loaded.

        Other loads and unloads wait meanwhile; embeddings with other releases go on. After an error
        the release is not loaded.

        Raises:
            VerificationError: a file is missing, differs from the manifest's, or cannot be loaded.
            ConfigurationError: the release embeds texts, and the extra `text` is not installed.
        """
        with self._lock:
            if manifest.release in self._loaded:
                return
            self._loaded[manifest.release] = _LoadedModels(
                open_embedder(self._files, manifest) if manifest.embedder.file else None,
                open_text_encoder(self._files, manifest) if manifest.text_encoder else None,
                open_side_encoder(self._files, manifest) if manifest.side_encoder else None,
            )
        log.info("loaded in process", release=manifest.release)

    def load_when_ready(self, manifest: Manifest) -> None:
        """Load a release, and return once it is ready.

        Raises:
            VerificationError: a file is missing, differs from the manifest's, or cannot be loaded.
            ConfigurationError: the release embeds texts, and the extra `text` is not installed.
        """
        self.load(manifest)

    def unload(self, release: int) -> None:
        """Free the models of a release that no caller uses any more; ignore an unknown release."""
        with self._lock:
            self._loaded.pop(release, None)

    def embed_images(self, manifest: Manifest, images: Images) -> Vectors:
        """Embed images on this thread; the call's deadline is not checked.

        Args:
            manifest: the release.
            images: uint8 [n, H, W, 3] in the release's frame.

        Returns:
            float32 [n, dim].

        Raises:
            UnavailableError: the release is not loaded.
            NoEncoderError: the release embeds no images.
            InvalidInputError: the images have another shape or dtype.
            VerificationError: the model cannot be run, or its output has another shape.
            UnusableOutputError: some outputs are no vectors of the space; it has their rows.
        """
        model = self._loaded_models(manifest).images
        if model is None:
            raise manifest.no_images_error()
        return model.run(images)

    def embed_texts(self, manifest: Manifest, texts: Sequence[str], role: TextRole) -> Vectors:
        """Embed texts on this thread; the call's deadline is not checked.

        Args:
            manifest: the release.
            texts: at least one text.
            role: whether they are queries or documents.

        Returns:
            float32 [n, dim].

        Raises:
            UnavailableError: the release is not loaded.
            NoEncoderError: the release embeds no texts.
            InvalidInputError: the tokenizer refuses a text, or crashes on it
                (DefectiveTokenizerError).
            VerificationError: the model cannot be run, or its output has another shape.
            UnusableOutputError: some outputs are no vectors of the space; it has their rows.
        """
        model = self._loaded_models(manifest).texts
        if model is None:
            raise manifest.no_texts_error()
        return model.run(texts, role)

    def compute_side(self, manifest: Manifest, images: Images) -> Vectors:
        """Compute the side-information of images on this thread.

        Args:
            manifest: the release, which has a side encoder.
            images: uint8 [n, H, W, 3].

        Returns:
            float32 [n, side_dim].

        Raises:
            UnavailableError: the release is not loaded.
            InvalidInputError: the images have another shape or dtype.
            VerificationError: the model cannot be run, or its output has another shape.
            UnusableOutputError: some outputs are not finite; it has their rows.
        """
        encoder = self._loaded_models(manifest).side
        assert encoder is not None, "the release has a side encoder"
        return encoder.run(images)

    def is_ready(self) -> bool:
        """Return True: this process runs the models, whether or not any is loaded."""
        return True

    def close(self) -> None:
        """Free all models; a later embedding raises UnavailableError."""
        self._loaded.clear()

    def _loaded_models(self, manifest: Manifest) -> _LoadedModels:
        try:
            return self._loaded[manifest.release]
        except KeyError:
            raise UnavailableError(
                f"the models of release {manifest.release} are not loaded in this gateway; try "
                "again in a few seconds"
            ) from None


class QueryAdapters:
    """Map queries to older spaces with the query adapters of activated releases.

    An adapter runs in this process, as upgrades do. It is opened at its first query and stays open:
    it has the size of a matrix.
    """

    def __init__(self, model_repo: Path) -> None:
        self._files = model_repo
        self._lock = threading.Lock()
        self._loaded_models: dict[tuple[int, int], AdapterModel] = {}

    def map_queries(self, manifest: Manifest, adapter: QueryAdapter, queries: Vectors) -> Vectors:
        """Map queries of a release to the space of its adapter.

        Args:
            manifest: the release; its adapter has passed a trial.
            adapter: one of its adapters.
            queries: float32 [n, dim], n at least 1; the values are checked here.

        Returns:
            float32 [n, to_dim].

        Raises:
            InvalidInputError: a query is not a valid vector, or the adapter has no usable vector
                for it.
            VerificationError: the file is missing, is not as signed, or cannot be run.
        """
        key = manifest.release, adapter.to_release
        model = self._loaded_models.get(key)
        if model is None:
            with self._lock:
                model = self._loaded_models.get(key)
                if model is None:
                    model = self._loaded_models[key] = open_adapter(self._files, manifest, adapter)
        try:
            return model.run(queries)
        except UnusableOutputError as error:
            raise InvalidInputError(
                f"query: the query adapter of release {manifest.release} returns no usable vector "
                f"in the space of release {adapter.to_release} for this query; send another query"
            ) from error


Query = TypeVar("Query")
Answer = TypeVar("Answer")


class _Entry(Generic[Query, Answer]):
    """Hold one thread's query.

    `turn` is locked until there is an answer, an error, or a batch to lead.
    """

    __slots__ = ("answer", "deadline", "error", "leads", "query", "turn")

    def __init__(self, query: Query) -> None:
        self.query = query
        self.deadline = context.current_call().deadline
        self.turn = threading.Lock()
        self.turn.acquire()
        self.leads = False
        self.answer: Answer | None = None
        self.error: Exception | None = None


class Batcher(Generic[Query, Answer]):
    """Run queries of many threads in batches, on the threads themselves.

    Queries that wait while a batch runs become the next batch. A thread that finds nothing running
    leads: it runs all queries that wait, its own first, and passes the lead to the next thread.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Query]], Sequence[Answer]],
        *,
        largest_batch: int,
        max_concurrent: int = 1,
        observe_size: Callable[[float], None] = lambda _size: None,
    ) -> None:
        """Make a batcher; it has no threads of its own.

        Args:
            run: answers 1 to `largest_batch` queries, in order; its error reaches every thread of
                the batch. During a batch of several, the current call has the last of their
                deadlines.
            largest_batch: most queries of a batch.
            max_concurrent: most batches that run at the same time.
            observe_size: called with the size of each batch.
        """
        self._run = run
        self._largest = largest_batch
        self._free = max_concurrent
        self._observe = observe_size
        self._lock = threading.Lock()
        # While anything waits here, `at_once` batches are running.
        self._waiting: deque[_Entry[Query, Answer]] = deque()

    def __call__(self, query: Query) -> Answer:
        """Answer a query, on this thread or on that of the batch's leader.

        It waits while as many batches run as may run at once.

        Args:
            query: the query; it may be run although its caller has given up.

        Returns:
            The answer to this query.

        Raises:
            DeadlineError: the call's time is over while the query waits.
            ValueError: `run` returned another number of answers.
            Exception: the error of `run` or `observe_size`, for every query of the batch.
        """
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
        # An error before the entry has left the queue would make it a leader that never runs.
        timeout = min(max(entry.deadline - time.monotonic(), 0.0), context.MAX_WAIT_SECONDS)
        if entry.turn.acquire(timeout=timeout):
            return
        with self._lock:
            if entry in self._waiting:
                self._waiting.remove(entry)
                raise DeadlineError(
                    "the call's deadline passed while its image or text waited for the model; "
                    "allow more time"
                )
        # Its batch began to run, or it became the leader, just now.
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
                with context.work_until(max(entry.deadline for entry in batch)):
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


# A text has at most 256 tokens; so many take a small model a second on one core.
LARGEST_TEXT_BATCH = 32
# While one batch is in the model server, the next one is on its way.
_AT_ONCE = 2

# A vector float32 [1, dim], or why an image or a text has none.
VectorsOrError = Vectors | InvalidInputError


LARGEST_BATCH = 64
# Most vectors that `EmbeddingService.remember_query` holds for calls on other threads.
_MAX_REMEMBERED = 64


class EmbeddingService:
    """Embed images and texts with the loaded releases."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self.models = models
        self.decoder = ImageDecoder()
        self._observe = metrics.batch_size.labels("embed").observe
        self._image_batchers: dict[int, Batcher[Pixels, VectorsOrError]] = {}
        self._text_batchers: dict[int, Batcher[str, VectorsOrError]] = {}
        # Vectors of images that another thread is about to ask for.
        self._remembered: OrderedDict[tuple[int, bytes], Vectors] = OrderedDict()

    def embed_query(self, manifest: Manifest, item: bytes | str) -> Vectors:
        """Embed an encoded image or a text as a query, in one batch with those of other calls at
        this moment.

        It waits while two batches of the release run. An image is decoded on this thread, in turns.
        A vector that `remember_query` holds for the image is used, and forgotten. An error of the
        model reaches every query of the batch.

        Args:
            manifest: the release.
            item: an encoded image or a text.

        Returns:
            float32 [1, dim].

        Raises:
            InvalidInputError: the item is not valid, or has no vector.
            TooLargeError: the text is too large.
            NoEncoderError: the release does not embed such items.
            UnavailableError: the release is not loaded, or the model server does not answer.
            VerificationError: the model's output has another shape.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
        """
        with context.trace_part("embed"):
            if isinstance(item, str):
                row = self._embed_text(manifest, item)
            else:
                row = self._embed_image(manifest, item)
        if isinstance(row, InvalidInputError):
            raise row
        return row

    def _embed_text(self, manifest: Manifest, text: str) -> VectorsOrError:
        if manifest.text_encoder is None:
            raise manifest.no_texts_error()
        batcher = self._text_batchers.get(manifest.release)
        if batcher is None:
            new_batcher: Batcher[str, VectorsOrError] = Batcher(
                lambda texts: self.embed_each_text(manifest, texts, "query"),
                largest_batch=LARGEST_TEXT_BATCH, max_concurrent=_AT_ONCE,
                observe_size=self._observe,
            )  # fmt: skip
            batcher = self._text_batchers.setdefault(manifest.release, new_batcher)
        return batcher(check_text(text))

    def _embed_image(self, manifest: Manifest, image: bytes) -> VectorsOrError:
        if self._remembered:
            row = self._remembered.pop((manifest.release, image), None)
            if row is not None:
                return row
        batcher = self._image_batchers.get(manifest.release)
        if batcher is None:
            new_batcher: Batcher[Pixels, VectorsOrError] = Batcher(
                lambda images: self.embed_each(manifest, images),
                largest_batch=LARGEST_BATCH, max_concurrent=_AT_ONCE, observe_size=self._observe,
            )  # fmt: skip
            batcher = self._image_batchers.setdefault(manifest.release, new_batcher)
        (decoded,) = self.decoder.decode_each([image], [manifest.frame])
        if isinstance(decoded, InvalidInputError):
            raise decoded
        return batcher(decoded[manifest.frame])

    def remember_query(self, manifest: Manifest, image: bytes, vector: Vectors) -> None:
        """Remember the vector of an image for the `embed_query` that follows at once; it is used
        once.

        At most 64 vectors are held; above that the oldest is forgotten. A second call for the same
        image replaces its vector, which is not copied.

        Args:
            manifest: the release.
            image: the encoded image.
            vector: float32 [1, dim].
        """
        self._remembered[manifest.release, image] = vector
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def embed_queries(
        self, manifests: Sequence[Manifest], items: Sequence[bytes | str]
    ) -> list[tuple[Vectors, ...] | InvalidInputError]:
        """Embed images and texts as queries with several releases, apart from other calls.

        Args:
            manifests: the releases, at least one.
            items: encoded images and texts; empty gives no rows.

        Returns:
            For each item, in order, its vectors float32 [1, dim] in the order of `manifests`, or
            why it has none.

        Raises:
            NoEncoderError: a release does not embed such items.
            UnavailableError: a release is not loaded, or the model server does not answer.
            VerificationError: a model's output has another shape.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call.
            TooLargeError: the images, or the texts, cost too much together.
            OverloadedError: too many expensive calls are being decoded.
        """
        images = [item for item in items if isinstance(item, bytes)]
        texts = [item for item in items if isinstance(item, str)]
        with context.trace_part("embed"):
            image_rows = iter(self._embed_encoded_images(manifests, images) if images else ())
            columns = [self.embed_each_text(m, texts, "query") for m in manifests] if texts else []
        text_rows = iter(_row_of_vectors(rows) for rows in zip(*columns, strict=True))
        return [next(text_rows) if isinstance(item, str) else next(image_rows) for item in items]

    def _embed_encoded_images(
        self, manifests: Sequence[Manifest], images: Sequence[bytes]
    ) -> list[tuple[Vectors, ...] | InvalidInputError]:
        with self.decoder.admit_batch(images):
            decoded = self.decoder.decode_each(images, {manifest.frame for manifest in manifests})
        valid = [one for one in decoded if not isinstance(one, InvalidInputError)]
        columns = [self.embed_each(m, [one[m.frame] for one in valid]) for m in manifests]
        rows = iter(zip(*columns, strict=True))
        return [
            one if isinstance(one, InvalidInputError) else _row_of_vectors(next(rows))
            for one in decoded
        ]

    def embed_each(self, manifest: Manifest, images: Sequence[Pixels]) -> list[VectorsOrError]:
        """Embed decoded images, each on its own terms: one without a vector refuses no other.

        If some have none, the others are embedded again without them.

        Args:
            manifest: the release.
            images: decoded images of the release's frame; empty gives no rows.

        Returns:
            For each image, in order, float32 [1, dim], or why it has none.

        Raises:
            NoEncoderError: the release embeds no images.
            UnavailableError: the release is not loaded, or the model server does not answer.
            InvalidInputError: models in this process got images of another frame.
            ValueError: the images differ in shape.
            VerificationError: the model's output has another shape.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call, between batches.
        """
        rows: list[VectorsOrError] = [no_vector_error(manifest)] * len(images)
        places = list(range(len(images)))
        while places:
            try:
                vectors = self.embed_images(manifest, [images[place] for place in places])
            except UnusableOutputError as error:
                places = [
                    place for row, place in enumerate(places) if row not in error.unusable_rows
                ]
            else:
                for row, place in enumerate(places):
                    rows[place] = vectors[row : row + 1]
                break
        return rows

    def embed_images(self, manifest: Manifest, images: Sequence[Pixels]) -> Vectors:
        """Embed decoded images, in batches of 64.

        Args:
            manifest: the release.
            images: at least one decoded image of the release's frame.

        Returns:
            float32 [n, dim].

        Raises:
            NoEncoderError: the release embeds no images.
            UnavailableError: the release is not loaded, or the model server does not answer.
            InvalidInputError: models in this process got images of another frame.
            ValueError: there is no image, or the images differ in shape.
            VerificationError: the model's output has another shape.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call, between batches.
            UnusableOutputError: some images have no vector; it has their numbers, of all batches.
        """
        return _run_in_batches(lambda chunk: self.models.embed_images(manifest, chunk), images)

    def compute_side(self, manifest: Manifest, images: Sequence[Pixels]) -> Vectors | None:
        """Compute the side-information of decoded images, in batches of 64.

        Args:
            manifest: the release.
            images: at least one decoded image of the release's frame.

        Returns:
            float32 [n, side_dim]; None if the release has none.

        Raises:
            UnavailableError: the release is not loaded, or the model server does not answer.
            InvalidInputError: models in this process got images of another frame.
            ValueError: there is no image, or the images differ in shape; only with a side encoder.
            VerificationError: the model's output has another shape.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call, between batches.
            UnusableOutputError: some outputs are not finite; it has the images' numbers, of all
                batches.
        """
        if manifest.side_encoder is None:
            return None
        return _run_in_batches(partial(self.models.compute_side, manifest), images)

    def embed_each_text(
        self, manifest: Manifest, texts: Sequence[str], role: TextRole
    ) -> list[VectorsOrError]:
        """Embed texts, each on its own terms: one that is not valid refuses no other.

        Shorter texts are embedded first, in batches of 32.

        Args:
            manifest: the release.
            texts: the texts; empty gives no rows.
            role: whether they are queries or documents.

        Returns:
            For each text, in order, float32 [1, dim], or why it has none.

        Raises:
            NoEncoderError: the release embeds no texts.
            TooLargeError: the valid texts are too large together.
            UnavailableError: the release is not loaded, or the model server does not answer.
            VerificationError: the model's output has another shape.
            DeadlineError: the call's time is over.
            CancelledError: the caller has cancelled the call, between batches.
        """
        if manifest.text_encoder is None:
            raise manifest.no_texts_error()
        rows: list[VectorsOrError] = [no_text_vector_error(manifest)] * len(texts)
        valid_places = []
        for place, text in enumerate(texts):
            try:
                check_text(text)
                valid_places.append(place)
            except InvalidInputError as error:
                rows[place] = error
        check_texts([texts[place] for place in valid_places])
        # A batch takes as long as its longest text.
        valid_places.sort(key=lambda place: len(texts[place]))
        for start in range(0, len(valid_places), LARGEST_TEXT_BATCH):
            context.current_call().check()
            batch = valid_places[start : start + LARGEST_TEXT_BATCH]
            self._embed_texts(manifest, texts, role, batch, rows)
        return rows

    def _embed_texts(
        self, manifest: Manifest, texts: Sequence[str], role: TextRole, places: list[int],
        rows: list[VectorsOrError],
    ) -> None:  # fmt: skip
        """Fill in the rows of the texts at some places."""
        while places:
            try:
                vectors = self.models.embed_texts(
                    manifest, [texts[place] for place in places], role
                )
            except UnusableOutputError as error:
                places = [
                    place for row, place in enumerate(places) if row not in error.unusable_rows
                ]
            except InvalidInputError as error:
                if len(places) == 1:
                    rows[places[0]] = error
                    return
                # The tokenizer cannot take one of them: find out which.
                for place in places:
                    self._embed_texts(manifest, texts, role, [place], rows)
                return
            else:
                for row, place in enumerate(places):
                    rows[place] = vectors[row : row + 1]
                return


def _row_of_vectors(rows: Sequence[VectorsOrError]) -> tuple[Vectors, ...] | InvalidInputError:
    vectors = [row for row in rows if not isinstance(row, InvalidInputError)]
    if len(vectors) == len(rows):
        return tuple(vectors)
    return next(row for row in rows if isinstance(row, InvalidInputError))


def _run_in_batches(run: Callable[[Images], Vectors], images: Sequence[Pixels]) -> Vectors:
    """Run a model on images in batches; images without an output refuse only their own batch."""
    parts, unusable, reason = [], list[int](), ""
    for start in range(0, len(images), LARGEST_BATCH):
        context.current_call().check()
        try:
            parts.append(run(np.stack(images[start : start + LARGEST_BATCH])))
        except UnusableOutputError as error:
            unusable += [start + row for row in error.unusable_rows]
            reason = str(error)
    if unusable:
        raise UnusableOutputError(reason, unusable)
    return np.concatenate(parts)


Owner = TypeVar("Owner")

# While one batch is in the model server, another of the same release is sent once it has _ENOUGH
# images: a call takes a millisecond, with one image or with sixteen.
_MODEL_CALLS = 2
# An idle model server waits for so many images, or so long (seconds) since the first, while others
# are decoded.
_FULL_BATCH, _BATCH_SECONDS = 16, 0.001
# Most images, and time (seconds), that a thread decodes in a row; it leaves the others to other
# threads.
_MAX_DECODE, _DECODE_SECONDS = 16, 0.004


@dataclass(eq=False)
class QueuedImage(Generic[Owner]):
    """Hold an image to embed.

    Attributes:
        owner: identifies the call that the image belongs to.
        manifest: the release whose model embeds it.
        image: the encoded image.
        deadline: latest time for the vector, on the monotonic clock.
        is_wanted: tells whether the caller still waits.
        pixels: the decoded image; None before.
        decoded_at: when it was decoded, on the monotonic clock; 0 before.
    """

    owner: Owner
    manifest: Manifest
    image: bytes
    deadline: float
    is_wanted: Callable[[], bool]
    pixels: Pixels | None = None
    decoded_at: float = 0.0


class ImageQueue(Generic[Owner]):
    """Decode images, embed them in batches, and pass the vectors on."""

    def __init__(
        self,
        embedding: EmbeddingService,
        metrics: Metrics,
        answer: Callable[[Sequence[tuple[QueuedImage[Owner], Vectors | None]]], None],
    ) -> None:
        """Start the threads: one for each core, and two more; `close` stops them.

        Args:
            embedding: embeds the images.
            metrics: counts batches and errors.
            answer: called once for each image, on a thread of the queue, with its vector, float32
                [1, dim]. None means that it has none, is not wanted, is expensive to decode, or
                that the model failed. Its errors are logged and counted; those of a call by `add`
                or `close` pass through.

        Raises:
            RuntimeError: the system has no thread left; threads that were started stay.
        """
        self._embedding = embedding
        self._metrics = metrics
        self._observe = metrics.batch_size.labels("embed").observe
        self._answer = answer
        self._changed = threading.Condition()
        self._encoded: deque[QueuedImage[Owner]] = deque()
        self._decoded: deque[QueuedImage[Owner]] = deque()
        self._cores = len(os.sched_getaffinity(0))
        self._decoding = 0
        # The releases whose models are called now.
        self._embeds: list[int] = []
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"images-{number}", daemon=True)
            for number in range(self._cores + _MODEL_CALLS)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, image: QueuedImage[Owner]) -> None:
        """Add an image, without waiting; `begin` follows once all images that came together were
        added.

        Any thread may call it. While the image waits, only `is_wanted` is looked at, not the
        deadline. After `close` the image is answered without a vector, on this thread.
        """
        with self._changed:
            if not self._is_closed:
                self._encoded.append(image)
                return
        self._answer([(image, None)])

    def begin(self) -> None:
        """Wake a thread, which wakes the next one if there is more. Without images, do nothing."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Stop the threads, and wait for the work that they have begun; images that wait are
        answered without a vector, on this thread.

        Call it once, and not from `answer`: a second call answers those images again.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        # Includes images that were being decoded.
        self._answer([(waiting, None) for waiting in (*self._encoded, *self._decoded)])

    def _work(self) -> None:
        while not self._is_closed:
            with error_boundary(self._metrics, "images"):
                while (turn := self._next()) is not None:
                    turn()

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next task; None once the queue is closed."""
        with self._changed:
            while not self._is_closed:
                turn = self._next_task()
                if turn is not None:
                    if self._encoded or self._decoded:
                        self._changed.notify()
                    return turn
                self._changed.wait()
        return None

    def _next_task(self) -> Callable[[], None] | None:
        """Return the next task, if there is one; the caller holds the lock."""
        release = self._ready_release()
        if release is not None:
            self._embeds.append(release)
            return partial(self._embed, self._take_batch(release))
        if self._encoded and self._decoding < self._cores:
            self._decoding += 1
            count = min(_MAX_DECODE, len(self._encoded))
            return partial(self._decode, [self._encoded.popleft() for _ in range(count)])
        return None

    def _ready_release(self) -> int | None:
        """Return the release whose images go to the model server before more are decoded; None
        without one.
        """
        if not self._decoded or len(self._embeds) == _MODEL_CALLS:
            return None
        nothing_comes = not self._encoded and not self._decoding
        since = time.monotonic() - self._decoded[0].decoded_at
        is_time = nothing_comes or since >= _BATCH_SECONDS
        for release, count in Counter(image.manifest.release for image in self._decoded).items():
            if count >= _FULL_BATCH or (is_time and release not in self._embeds):
                return release
        return None

    def _take_batch(self, release: int) -> list[QueuedImage[Owner]]:
        batch: list[QueuedImage[Owner]] = []
        others: deque[QueuedImage[Owner]] = deque()
        for image in self._decoded:
            fits = image.manifest.release == release and len(batch) < LARGEST_BATCH
            (batch if fits else others).append(image)
        self._decoded = others
        return batch

    def _decode(self, images: Sequence[QueuedImage[Owner]]) -> None:
        began, decoded = time.monotonic(), list[QueuedImage[Owner]]()
        try:
            for image in images:
                decoded.append(image)
                image.pixels = self._decode_image(image)
                image.decoded_at = time.monotonic()
                if image.decoded_at - began > _DECODE_SECONDS:
                    break
        finally:
            with self._changed:
                self._decoding -= 1
                self._encoded.extendleft(reversed(images[len(decoded) :]))
                self._decoded += [image for image in decoded if image.pixels is not None]
            self._answer([(image, None) for image in decoded if image.pixels is None])

    def _decode_image(self, image: QueuedImage[Owner]) -> Pixels | None:
        try:
            return decode_if_cheap(image.image, image.manifest.frame) if image.is_wanted() else None
        except NobackfillError:
            return None  # the call's own thread gets the error

    def _embed(self, batch: Sequence[QueuedImage[Owner]]) -> None:
        rows: dict[QueuedImage[Owner], VectorsOrError] = {}
        try:
            # Some callers may have left by now.
            wanted = [image for image in batch if image.is_wanted()]
            pixels = [image.pixels for image in wanted if image.pixels is not None]
            if wanted:
                self._observe(len(wanted))
                with context.work_until(max(image.deadline for image in wanted)):
                    results = self._embedding.embed_each(wanted[0].manifest, pixels)
                rows.update(zip(wanted, results, strict=True))
        except NobackfillError:
            pass  # the calls' own threads get the error
        finally:
            with self._changed:
                self._embeds.remove(batch[0].manifest.release)
                if self._decoded:
                    self._changed.notify()
            vectors = {
                image: row for image, row in rows.items() if not isinstance(row, InvalidInputError)
            }
            self._answer([(image, vectors.get(image)) for image in batch])
