"""Notes: texts that are embedded on the device, found by texts, and left where they are."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.photos import threads
from nobackfill.errors import InvalidInputError, UnusableOutputError
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.store import NewVectors, check_batch
from nobackfill.release.manifest import Manifest, TextRole
from nobackfill.release.text_models import TextModel, no_text_vector, open_text_encoder
from nobackfill.text import TextLine, check_text
from nobackfill.vectors import Vectors

_BATCH = 32


@dataclass
class AddedTexts:
    """Ids of texts that were stored, and why others were refused, by id."""

    added: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def add(device: GalleryFile, texts: Iterable[TextLine]) -> AddedTexts:
    """Store texts by id, in place of what is there; the other keys of each are its metadata, and
    without any an unchanged text keeps what it has. The text itself is not kept.

    A batch is durable before the next begins. Raises NoEncoderError where the release that answers
    embeds no texts, VerificationError, BusyError, CannotWriteError, and what `texts` does.
    """
    kept, encoders = AddedTexts(), _Encoders(device)
    left = iter(texts)
    while batch := list(islice(left, _BATCH)):
        _store(device, encoders, list(_readable(batch, kept)), kept)
    return kept


def put(
    device: GalleryFile, texts: Mapping[str, str], metadata: Mapping[str, Metadata] | None = None
) -> dict[str, str]:
    """Store texts by id; why some were refused, by id. Raises like `add`."""
    notes = metadata or {}
    lines = (TextLine(name, text, notes.get(name, {})) for name, text in texts.items())
    return add(device, lines).refused


def embed(device: GalleryFile, manifest: Manifest, texts: Sequence[str], role: TextRole) -> Vectors:
    """Texts, at least one, to float32 [n,dim]. Raises NoEncoderError, InvalidInputError for one
    that has no vector, VerificationError."""
    model = open_text_encoder(device.models, manifest, threads())
    try:
        return model.run([check_text(text) for text in texts], role)
    except UnusableOutputError as error:
        worst = texts[error.rows[0]][:64]
        raise InvalidInputError(f"{worst!r}: {no_text_vector(manifest)}") from error


class _Encoders:
    """Of the space that answers, and of the one that a rollback would return to, if it reads
    texts."""

    def __init__(self, device: GalleryFile) -> None:
        self._device = device
        self._open: dict[str, TextModel] = {}

    def current(self) -> list[tuple[Manifest, TextModel]]:
        """Raises NoEncoderError where the active release embeds no texts."""
        active, previous = self._device.store.active(), self._device.previous()
        manifests = [self._device.manifest(active.spec.release)]
        if previous is not None:
            before = self._device.manifest(previous.spec.release)
            manifests += [before] if before.text_encoder is not None else []
        for manifest in manifests:
            if manifest.space not in self._open:
                made = open_text_encoder(self._device.models, manifest, threads())
                self._open[manifest.space] = made
        return [(manifest, self._open[manifest.space]) for manifest in manifests]


def _readable(batch: Sequence[TextLine], kept: AddedTexts) -> Iterator[TextLine]:
    for one in batch:
        try:
            check_text(one.text)
            check_batch([one.id], None, [one.metadata()])
            yield one
        except InvalidInputError as error:
            kept.refused[one.id] = str(error)


def _store(
    device: GalleryFile, encoders: _Encoders, batch: list[TextLine], kept: AddedTexts
) -> None:
    # The last of a kind wins, and an id is in a batch once.
    batch = list({one.id: one for one in batch}.values())
    while batch:
        now = encoders.current()
        try:
            vectors = [
                NewVectors(m.space, model.run([one.text for one in batch], "document"), None)
                for m, model in now
            ]
        except UnusableOutputError as error:
            why = str(no_text_vector(now[0][0]))
            kept.refused |= {batch[row].id: why for row in error.rows}
            batch = [one for row, one in enumerate(batch) if row not in error.rows]
            continue
        except InvalidInputError as error:
            if len(batch) == 1:
                kept.refused[batch[0].id] = str(error)
                return
            # One that its tokenizer cannot take: find out which.
            for one in batch:
                _store(device, encoders, [one], kept)
            return
        device.store.put(
            [one.id for one in batch],
            vectors,
            digests=[hashlib.sha256(one.text.encode()).hexdigest() for one in batch],
            metadata=[one.metadata() or None for one in batch],
        )
        if device.store.active().spec.space in {manifest.space for manifest, _ in now}:
            kept.added += [one.id for one in batch]
            return
        # A sync flipped in between: the same texts once more, for the new space too.
