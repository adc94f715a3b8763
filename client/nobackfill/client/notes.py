"""Store and embed texts; a gallery stores their vectors, not the texts."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.errors import InvalidInputError, UnusableOutputError
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.store import NewVectors, check_batch
from nobackfill.release.manifest import Manifest, TextRole
from nobackfill.release.models import count_cores
from nobackfill.release.text_models import TextModel, no_text_vector_error, open_text_encoder
from nobackfill.text import TextLine, check_text
from nobackfill.vectors import Vectors

_BATCH = 32


@dataclass
class AddTextsReport:
    """The result of adding texts.

    Attributes:
        added: the ids that were stored.
        refusals: the reason by id of a text that was not stored.
    """

    added: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)


def add(device: GalleryFile, texts: Iterable[TextLine]) -> AddTextsReport:
    """Store texts by id; an existing id is replaced. Only the vectors are stored, not the texts.

    Each batch of 32 is durable before the next begins. An unchanged text without metadata keeps the
    metadata that it has. If a batch has several texts with one id, the last one is stored. Texts
    are also embedded for the release that a rollback would return to, if it embeds texts. If a sync
    flips meanwhile, a batch is embedded and stored again, for the new space.

    Args:
        device: the gallery.
        texts: ids, texts and metadata; none: nothing is opened or stored. Errors of this iterable
            pass through, and earlier batches stay.

    Returns:
        The ids that were stored, once for each batch, and those that were refused. A text that
        cannot be embedded, or has an id or metadata that is not valid, does not affect the others.

    Raises:
        NoEncoderError: the active release embeds no texts.
        ConfigurationError: the extra `text` is not installed.
        VerificationError: a model file or the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        NotFoundError: the release of a space is not installed, or the gallery was closed.
    """
    report, models = AddTextsReport(), dict[str, TextModel]()
    remaining = iter(texts)
    while batch := list(islice(remaining, _BATCH)):
        _store(device, models, list(_readable(batch, report)), report)
    return report


def put(
    device: GalleryFile, texts: Mapping[str, str], metadata: Mapping[str, Metadata] | None = None
) -> dict[str, str]:
    """Store texts by id; an existing id is replaced unless its text is identical.

    Each batch of 32 is durable before the next begins. The texts themselves are not stored. The
    release of a rollback, and a flip meanwhile, are treated as in `add`.

    Args:
        device: the gallery.
        texts: texts of at most 64 KiB by id; none: nothing is done.
        metadata: metadata by id; ids without a text are ignored. An identical text without metadata
            here keeps its own. None: none.

    Returns:
        The reason by id for every text that was refused, because it, its id or its metadata is not
        valid; empty if all were stored.

    Raises:
        NoEncoderError: the active release embeds no texts.
        ConfigurationError: the extra `text` is not installed.
        VerificationError: a model file or the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        NotFoundError: the release of a space is not installed, or the gallery was closed.
    """
    notes = metadata or {}
    lines = (TextLine(name, text, notes.get(name, {})) for name, text in texts.items())
    return add(device, lines).refusals


def embed(device: GalleryFile, manifest: Manifest, texts: Sequence[str], role: TextRole) -> Vectors:
    """Embed one or more texts with the text encoder of a release; stores nothing.

    Opens the model at each call.

    Args:
        device: the gallery, whose folder holds the model.
        manifest: the release.
        texts: n texts of at most 64 KiB, n at least 1.
        role: "query" or "document"; some models embed them differently.

    Returns:
        float32 [n, dim].

    Raises:
        NoEncoderError: the release embeds no texts.
        ConfigurationError: the extra `text` is not installed.
        InvalidInputError: a text is empty, longer than 64 KiB (TooLargeError), or has no vector. No
            vector is returned then.
        VerificationError: a model file is damaged.
        ValueError: `texts` is empty.
    """
    model = open_text_encoder(device.models, manifest, count_cores())
    try:
        return model.run([check_text(text) for text in texts], role)
    except UnusableOutputError as error:
        worst = texts[error.unusable_rows[0]][:64]
        raise InvalidInputError(f"{worst!r}: {no_text_vector_error(manifest)}") from error


def _open_encoders(
    device: GalleryFile, models: dict[str, TextModel]
) -> list[tuple[Manifest, TextModel]]:
    """Open the text encoders of the active space and, if its release embeds texts, of the space
    that a rollback would return to.

    `models` holds those of earlier calls, by space. Raises NoEncoderError if the active release
    embeds no texts.
    """
    active, *previous = device.embedding_manifests()
    manifests = [active, *(one for one in previous if one.text_encoder is not None)]
    for manifest in manifests:
        if manifest.space not in models:
            models[manifest.space] = open_text_encoder(device.models, manifest, count_cores())
    return [(manifest, models[manifest.space]) for manifest in manifests]


def _readable(batch: Sequence[TextLine], report: AddTextsReport) -> Iterator[TextLine]:
    for line in batch:
        try:
            check_text(line.text)
            check_batch([line.id], None, [line.metadata()])
            yield line
        except InvalidInputError as error:
            report.refusals[line.id] = str(error)


def _store(
    device: GalleryFile, models: dict[str, TextModel], batch: list[TextLine], report: AddTextsReport
) -> None:
    # The last text of an id wins, and a batch holds each id once.
    batch = list({line.id: line for line in batch}.values())
    while batch:
        active_encoders = _open_encoders(device, models)
        try:
            vectors = [
                NewVectors(m.space, model.run([line.text for line in batch], "document"), None)
                for m, model in active_encoders
            ]
        except UnusableOutputError as error:
            why = str(no_text_vector_error(active_encoders[0][0]))
            report.refusals |= {batch[row].id: why for row in error.unusable_rows}
            batch = [line for row, line in enumerate(batch) if row not in error.unusable_rows]
            continue
        except InvalidInputError as error:
            if len(batch) == 1:
                report.refusals[batch[0].id] = str(error)
                return
            # The tokenizer rejects at least one text: find it by storing one at a time.
            for line in batch:
                _store(device, models, [line], report)
            return
        device.store.put(
            [line.id for line in batch],
            vectors,
            digests=[hashlib.sha256(line.text.encode()).hexdigest() for line in batch],
            metadata=[line.metadata() or None for line in batch],
        )
        if device.store.active().spec.space in {manifest.space for manifest, _ in active_encoders}:
            report.added += [line.id for line in batch]
            return
        # A sync flipped since: store the same texts for the new space too.
