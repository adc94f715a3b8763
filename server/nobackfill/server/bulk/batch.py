"""One batch of pictures or texts, embedded and put wherever it is called: what a worker is given.

It may be repeated: an item that is there with the same content is left as it is.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nobackfill.errors import InvalidInputError, UnusableOutputError
from nobackfill.images import Pixels
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import no_vector, read_verified
from nobackfill.server.bulk.places import Place, open_place
from nobackfill.server.embedding.embedding import Embedding, size_of
from nobackfill.server.embedding.models import InProcessModels
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.upgrades.workers.kept import Kept, laid_out
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1 import types_pb2 as types
from nobackfill.vectors import Vectors
from nobackfill.wire.gateway import Gateway

# A worker that meets a gateway that is restarted asks again for so long.
_SECONDS = 120.0
# Files that say who calls: nobackfill.wire.channel.
CREDENTIALS = tuple(f"NOBACKFILL_{what}_FILE" for what in ("CA", "CERT", "KEY", "TOKEN"))


@dataclass(frozen=True)
class Filling:
    """Pictures of `place`, or texts, to put into a gallery. `models`: the release's, by their
    published paths; each is checked against its digest where it is opened. `credentials`: contents
    of files, by the variable that names them. Whoever sees this may write to the gallery."""

    key: str
    server: str
    gallery: str
    place: str
    manifest: Manifest = field(repr=False)
    models: Mapping[str, bytes] = field(repr=False)
    credentials: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class Done:
    """`stored` items are durable; the others were refused, each with its reason."""

    stored: int
    refused: Mapping[str, str]


def models_of(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """What `Filling.models` holds. Raises VerificationError for files other than published."""
    return {file.path: read_verified(folder, file) for file in manifest.embedding_files()}


def credentials_of(environment: Mapping[str, str]) -> dict[str, bytes]:
    """What `Filling.credentials` holds. Raises OSError."""
    named = {name: environment[name] for name in CREDENTIALS if environment.get(name)}
    return {name: Path(path).read_bytes() for name, path in named.items()}


class _Open:
    """Models, and a connection."""

    def __init__(self, work: Filling, closing: ExitStack) -> None:
        self._work = work
        folder = laid_out(work.models, closing)
        models = InProcessModels(folder)
        models.load(work.manifest)
        self._embedding = Embedding(models, Metrics())
        for name, content in work.credentials.items():
            (folder / name).write_bytes(content)
            os.environ[name] = str(folder / name)
        self._gateway = closing.enter_context(Gateway(work.server, seconds=_SECONDS))

    @cached_property
    def _place(self) -> Place:
        return open_place(self._work.place)

    def put(self, names: Sequence[str]) -> Done:
        refused: dict[str, str] = {}
        decoded: list[tuple[str, Pixels]] = []
        size = size_of(self._work.manifest)
        for name in names:
            try:
                (found,) = self._embedding.decoding.each([self._place.read(name)], [size])
            except InvalidInputError as error:
                found = error
            if isinstance(found, InvalidInputError):
                refused[name] = str(found)
            else:
                decoded.append((name, found[size]))
        items = self._embedded(decoded, refused)
        refused |= self._gateway.put_items(self._work.gallery, items)
        return Done(len(names) - len(refused), refused)

    def read(self, texts: Sequence[pb.PutItem]) -> Done:
        manifest, refused, items = self._work.manifest, dict[str, str](), []
        rows = self._embedding.texts.rows(manifest, [one.text for one in texts], "document")
        for one, row in zip(texts, rows, strict=True):
            if isinstance(row, InvalidInputError):
                refused[one.id] = str(row)
                continue
            item = pb.PutItem()
            item.CopyFrom(one)
            # In place of the text.
            item.vectors.CopyFrom(_vectors(manifest, row))
            items.append(item)
        refused |= self._gateway.put_items(self._work.gallery, items)
        return Done(len(texts) - len(refused), refused)

    def _embedded(
        self, pictures: Sequence[tuple[str, Pixels]], refused: dict[str, str]
    ) -> list[pb.PutItem]:
        manifest = self._work.manifest
        while pictures:
            pixels = [one for _, one in pictures]
            try:
                embeddings = self._embedding.many(manifest, pixels)
                sides = self._embedding.sides(manifest, pixels)
                break
            except UnusableOutputError as error:
                refused |= {pictures[row][0]: str(no_vector(manifest)) for row in error.rows}
                pictures = [one for n, one in enumerate(pictures) if n not in error.rows]
        items = []
        for row, (name, _) in enumerate(pictures):
            vectors = _vectors(manifest, embeddings[row])
            if sides is not None:
                vectors.side_info.space = str(manifest.side_space)
                vectors.side_info.values = sides[row].astype("<f4").tobytes()
            items.append(pb.PutItem(id=name, vectors=vectors))
        return items


def _vectors(manifest: Manifest, embedding: Vectors) -> pb.Vectors:
    values = embedding.astype("<f4").tobytes()
    return pb.Vectors(embedding=types.Embedding(space=manifest.space, values=values))


_kept = Kept(_Open)


def put_batch(work: Filling, names: Sequence[str]) -> Done:
    """Embed and put the pictures of those names. Raises what open_place, ObjectStore.read and
    Gateway.put_items raise."""
    return _kept.of(work, work.key).put(names)


def put_texts(work: Filling, texts: Sequence[pb.PutItem]) -> Done:
    """The same of texts, which come with the call. Raises TooLargeError, too."""
    return _kept.of(work, work.key).read(texts)
