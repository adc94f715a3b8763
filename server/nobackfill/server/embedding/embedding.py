"""Images and texts to vectors: decoded in turns, embedded in batches of many callers."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from nobackfill.errors import InvalidInputError, UnusableOutputError
from nobackfill.images import Pixels
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import Images, no_vector
from nobackfill.server.embedding.batching import Batcher
from nobackfill.server.embedding.decoding import Decoding, Size
from nobackfill.server.embedding.models import Models
from nobackfill.server.embedding.texts import Texts
from nobackfill.server.grpc import context
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.vectors import Vectors

LARGEST_BATCH = 64
# While one batch is in the model server, the next is on its way.
_AT_ONCE = 2
# More are never on their way from one thread to another.
_KEPT = 64

# float32 [1,dim], or why an image has none.
Row = Vectors | InvalidInputError


class Embedding:
    """The embedders of all loaded releases."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self.models = models
        self._observe = metrics.batch_size.labels("embed").observe
        self.decoding = Decoding()
        self.texts = Texts(models, self._observe)
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
