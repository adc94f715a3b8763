"""Re-embed items from images or texts; of many, those first that the upgrade was least
certain of.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from nobackfill.errors import InvalidInputError, PreconditionError, join_few
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.release.manifest import Manifest
from nobackfill.server.embedding.embedding import LARGEST_BATCH, EmbeddingService
from nobackfill.server.galleries.hosted import HostedGallery
from nobackfill.vectors import Vectors

Result = TypeVar("Result")


def backfill(
    hosted: HostedGallery,
    embedding: EmbeddingService,
    images: Mapping[str, bytes],
    budget: int,
    on_batch: Callable[[int], None],
) -> None:
    """Re-embed migrated items of the active space from their images; each batch is one commit.

    The least certain items come first, those of unknown uncertainty last. Items that do not exist,
    were re-embedded already, or are beyond the budget are skipped. Batches before an error stay.
    The plan stays in use until the end. Items whose id `images` lacks stay as they are.

    Args:
        hosted: the gallery.
        embedding: embeds the images.
        images: encoded image by item id; without any nothing happens.
        budget: most items, at least 0; 0 means all.
        on_batch: called with the number of vectors that a durable batch has replaced, perhaps 0.

    Raises:
        InvalidInputError: an image cannot be decoded or has no vector; the others are done.
        TooLargeError: the images together are too large; nothing is done.
        OverloadedError: too many images are being decoded; nothing is done.
        PreconditionError: the gallery is being upgraded.
        NoEncoderError: the release embeds no images.
        UnavailableError: the model server or the database does not answer.
        DeadlineError: the call's time is over.
        CancelledError: the caller has cancelled the call.
        NotFoundError: the gallery is closed or deleted.
        BusyError: the store is locked for too long.
        CannotWriteError: the store cannot be written.
        VerificationError: the store, or a model's output, is damaged.
        ConfigurationError: the database refuses the statement, as without rights.
        Exception: an error of `on_batch`; its batch is stored.
    """
    with hosted.use_plan() as plan:
        manifest = plan.parts[-1].query_manifest
        if manifest.space != hosted.active_spec().space:
            raise PreconditionError(
                f"gallery {hosted.name!r} is being upgraded, so its items cannot be re-embedded "
                "now; send the images again when `gateway watch` shows that the upgrade is done"
            )
        items = hosted.store.find_migrated(manifest.space, list(images))[: budget or None]
        reasons = list[str]()
        with embedding.decoder.admit_batch([images[item.id] for item in items]):
            for start in range(0, len(items), LARGEST_BATCH):
                batch = items[start : start + LARGEST_BATCH]
                contents = [images[item.id] for item in batch]
                on_batch(
                    len(re_embed_images(hosted, embedding, manifest, batch, contents, reasons))
                )
    if reasons:
        raise InvalidInputError(
            f"{len(reasons)} of {len(items)} images were refused, the others are re-embedded: "
            f"{join_few(reasons)}. Correct these images and send them again"
        )


def re_embed_images(
    hosted: HostedGallery,
    embedding: EmbeddingService,
    manifest: Manifest,
    items: Sequence[StoredItem],
    images: Sequence[bytes],
    reasons: list[str],
) -> list[int]:
    """Re-embed one batch of items from their images, in one commit.

    Side-information is replaced, too, and the origin becomes re-embedded. `reasons` is extended in
    place, also if an error follows. Without a usable image nothing is written. Call it within
    `embedding.decoder.admit_batch`, which limits the memory. A vector that another call has
    re-embedded meanwhile is replaced, too.

    Args:
        hosted: the gallery.
        embedding: embeds the images.
        manifest: the release of the space.
        items: the items.
        images: encoded image of each item.
        reasons: gets the id and reason of each image that cannot be used.

    Returns:
        Labels whose vector was replaced, increasing; deleted items are left out.

    Raises:
        UnavailableError: the model server or the database does not answer.
        DeadlineError: the call's time is over.
        CancelledError: the caller has cancelled the call.
        BusyError: the store is locked for too long.
        CannotWriteError: the store cannot be written.
        NoEncoderError: the release embeds no images.
        IncompatibleSpaceError: the gallery does not have the space.
        NotFoundError: the gallery is closed or deleted.
        VerificationError: the store, or a model's output, is damaged.
        ConfigurationError: the database refuses the statement, as without rights.
        ValueError: there are not as many images as items; nothing is written.
    """
    frame = manifest.frame
    decoded = _usable_results(items, embedding.decoder.decode_each(images, [frame]), reasons)
    pixels = {item.label: pictures[frame] for item, pictures in decoded}
    rows = embedding.embed_each(manifest, list(pixels.values()))
    vectors = _usable_results([item for item, _ in decoded], rows, reasons)
    if not vectors:
        return []
    side = embedding.compute_side(manifest, [pixels[item.label] for item, _ in vectors])
    return _replace(hosted, manifest, vectors, side)


def re_embed_texts(
    hosted: HostedGallery,
    embedding: EmbeddingService,
    manifest: Manifest,
    items: Sequence[StoredItem],
    texts: Sequence[str],
    reasons: list[str],
) -> list[int]:
    """Re-embed one batch of items from their texts, in one commit.

    The vectors have no side-information, and the origin becomes re-embedded. `reasons` is extended
    in place. Without a usable text nothing is written. A vector that another call has re-embedded
    meanwhile is replaced, too.

    Args:
        hosted: the gallery.
        embedding: embeds the texts.
        manifest: the release of the space.
        items: the items.
        texts: text of each item.
        reasons: gets the id and reason of each text that cannot be used.

    Returns:
        Labels whose vector was replaced, increasing; deleted items are left out.

    Raises:
        NoEncoderError: the release embeds no texts.
        UnavailableError: the model server or the database does not answer.
        DeadlineError, CancelledError: the call's time is over, or its caller has gone.
        IncompatibleSpaceError: the gallery does not have the space.
        NotFoundError: the gallery is closed or deleted.
        BusyError: the store is locked for too long.
        CannotWriteError: the store cannot be written.
        VerificationError: the store, or a model's output, is damaged.
        TooLargeError: the texts together are too large for one call.
        ConfigurationError: the database refuses the statement, as without rights.
        ValueError: there are not as many texts as items; nothing is written.
    """
    rows = embedding.embed_each_text(manifest, texts, "document")
    vectors = _usable_results(items, rows, reasons)
    return _replace(hosted, manifest, vectors, None) if vectors else []


def _usable_results(
    items: Sequence[StoredItem], results: Sequence[Result | InvalidInputError], reasons: list[str]
) -> list[tuple[StoredItem, Result]]:
    """Return the results that are no errors, with their items; `reasons` gets the errors."""
    usable = []
    for item, result in zip(items, results, strict=True):
        if isinstance(result, InvalidInputError):
            reasons.append(f"{item.id}: {result}")
        else:
            usable.append((item, result))
    return usable


def _replace(
    hosted: HostedGallery, manifest: Manifest, vectors: Sequence[tuple[StoredItem, Vectors]],
    side: Vectors | None,
) -> list[int]:  # fmt: skip
    labels = np.array([item.label for item, _ in vectors], np.int64)
    written = hosted.store.write_vectors(
        manifest.space, labels, np.concatenate([vector for _, vector in vectors]), side=side,
        origin="re-embedded", replace=True,
    )  # fmt: skip
    return [int(label) for label in written]
