"""Texts to vectors: checked one by one, embedded in batches of many callers."""

from collections.abc import Callable, Sequence

from nobackfill.errors import InvalidInputError, UnusableOutputError
from nobackfill.release.encoders import TextRole
from nobackfill.release.manifest import Manifest
from nobackfill.release.text_models import no_text_vector
from nobackfill.server.embedding.batching import Batcher
from nobackfill.server.embedding.models import Models
from nobackfill.server.grpc import context
from nobackfill.tokenizing import check_text, check_texts
from nobackfill.vectors import Vectors

# Of 256 tokens each: a second of a small model's work on one core.
LARGEST_BATCH = 32
# As of images: while one batch is in the model server, the next is on its way.
_AT_ONCE = 2

# float32 [1,dim], or why a text has none.
Row = Vectors | InvalidInputError


class Texts:
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
                largest=LARGEST_BATCH, at_once=_AT_ONCE, observe=self._observe,
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
        for start in range(0, len(good), LARGEST_BATCH):
            context.current().check()
            self._batch(manifest, texts, role, good[start : start + LARGEST_BATCH], found)
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
