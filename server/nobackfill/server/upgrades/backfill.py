"""Backfill: embed again, from images the caller supplies, what an upgrade was least sure of."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from nobackfill.errors import InvalidInputError, PreconditionError, few
from nobackfill.gallery.reading import StoredItem
from nobackfill.release.manifest import Manifest
from nobackfill.server.embedding.embedding import LARGEST_BATCH, Embedding, size_of
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.vectors import Vectors


def backfill(
    hosted: Hosted,
    embedding: Embedding,
    images: Mapping[str, bytes],
    budget: int,
    on_batch: Callable[[int], None],
) -> None:
    """Replace upgraded vectors of the active space by those of the items' images, a model call and
    a commit a batch; `on_batch` gets how many each durable batch replaced.

    At most `budget` items (0: all), the least certain first; items that are gone or were embedded
    from their image already are passed over. Raises InvalidInputError for what is no image, when
    the others are done; TooLargeError, OverloadedError for images that cost too much together,
    PreconditionError while the gallery's active space is not searched by its own release,
    UnavailableError, DeadlineError, CancelledError.
    """
    with hosted.using() as plan:
        manifest = plan.parts[-1].query
        if manifest.space != hosted.spec().space:
            raise PreconditionError(
                "the gallery is being upgraded; backfill it when that has ended"
            )
        chosen = hosted.store.upgraded(manifest.space, list(images))[: budget or None]
        refused = list[str]()
        with embedding.decoding.batch([images[item.id] for item in chosen]):
            for start in range(0, len(chosen), LARGEST_BATCH):
                batch = chosen[start : start + LARGEST_BATCH]
                contents = [images[item.id] for item in batch]
                on_batch(len(embed_again(hosted, embedding, manifest, batch, contents, refused)))
    if refused:
        raise InvalidInputError(
            f"{len(refused)} of {len(chosen)} images are refused: {few(refused)}"
        )


def embed_again(
    hosted: Hosted,
    embedding: Embedding,
    manifest: Manifest,
    items: Sequence[StoredItem],
    images: Sequence[bytes],
    refused: list[str],
) -> list[int]:
    """Replace the vectors of one batch in the release's space, in one commit; the labels of those
    that were there. What is no image is added to `refused`, with the reason. Raises
    UnavailableError, DeadlineError, CancelledError, BusyError, CannotWriteError."""
    size, seen = size_of(manifest), []
    for item, decoded in zip(items, embedding.decoding.each(images, [size]), strict=True):
        if isinstance(decoded, InvalidInputError):
            refused.append(f"{item.id}: {decoded}")
        else:
            seen.append((item, decoded[size]))
    good = []
    rows = embedding.rows(manifest, [pixels for _, pixels in seen])
    for (item, pixels), row in zip(seen, rows, strict=True):
        if isinstance(row, InvalidInputError):
            refused.append(f"{item.id}: {row}")
        else:
            good.append((item.label, pixels, row))
    if not good:
        return []
    labels, kept, vectors = zip(*good, strict=True)
    return _replace(hosted, manifest, labels, vectors, embedding.sides(manifest, kept))


def read_again(
    hosted: Hosted,
    embedding: Embedding,
    manifest: Manifest,
    items: Sequence[StoredItem],
    texts: Sequence[str],
    refused: list[str],
) -> list[int]:
    """As `embed_again`, of texts. Raises NoEncoderError, too."""
    good = []
    rows = embedding.texts.rows(manifest, texts, "document")
    for item, row in zip(items, rows, strict=True):
        if isinstance(row, InvalidInputError):
            refused.append(f"{item.id}: {row}")
        else:
            good.append((item.label, row))
    if not good:
        return []
    labels, vectors = zip(*good, strict=True)
    return _replace(hosted, manifest, labels, vectors, None)


def _replace(
    hosted: Hosted, manifest: Manifest, labels: Sequence[int], vectors: Sequence[Vectors],
    side: Vectors | None,
) -> list[int]:  # fmt: skip
    written = hosted.store.write(
        manifest.space, np.array(labels, np.int64), np.concatenate(vectors), side=side,
        origin="re-embedded", replace=True,
    )  # fmt: skip
    return [int(label) for label in written]
