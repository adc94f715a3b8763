"""Image files of the device: found, read, embedded, stored durably, and left where they are."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.output import Advance
from nobackfill.errors import InvalidInputError, UnusableOutputError
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.spec import Metadata, SpaceSpec
from nobackfill.gallery.store import NewVectors
from nobackfill.images import Pixels, decode, read_file
from nobackfill.picture_files import is_clutter, is_picture, suffix_refusal
from nobackfill.release.models import no_vector, open_embedder, open_side_encoder
from nobackfill.vectors import Vectors

if TYPE_CHECKING:
    from nobackfill.release.manifest import Manifest


# Of one command: their names are held in memory, 0.1 GB.
MOST_FILES = 250_000


@dataclass
class FoundImages:
    """Absolute paths of images, why other files were not taken, and what belongs to the system, to
    programs or to a gallery, and was passed over."""

    files: list[Path] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def find_images(named: Sequence[Path], gallery: Path | None = None) -> FoundImages:
    """Find the files named, and those in the folders named that have an image's suffix.

    A folder that cannot be read is among them, to be refused by its name. `gallery`: its own files
    are passed over. Raises InvalidInputError for a path that is not there, and for more than
    `MOST_FILES`.
    """
    found = FoundImages()
    files: dict[Path, None] = {}
    for path in named:
        # Not resolved: a person knows a linked folder by the link's name.
        for file in _files(path, found, gallery):
            files[Path(os.path.abspath(file))] = None  # noqa: PTH100
            if len(files) > MOST_FILES:
                raise InvalidInputError(
                    f"{path}: expected at most {MOST_FILES} images at a time, there are more; name "
                    "some of the files or folders below it"
                )
    found.files = list(files)
    return found


def _files(path: Path, found: FoundImages, gallery: Path | None) -> Iterator[str]:
    try:
        if not path.is_dir():
            path.stat()
            yield str(path)
            return
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise InvalidInputError(f"{path}: no such file or folder") from error
        raise InvalidInputError(f"{path}: cannot be read ({error.strerror})") from error
    unreadable: list[str] = []
    for folder, folders, files in os.walk(path, onerror=lambda e: unreadable.append(e.filename)):
        enter = []
        for name in sorted(folders):
            # A Path each takes twice as long.
            inside = os.path.join(folder, name)  # noqa: PTH118
            if is_clutter(name) or _is_own(folder, name, gallery):
                found.skipped.append(inside)
            elif os.path.islink(inside):  # noqa: PTH114
                found.refused[inside] = "a link to a folder; name it to add what is in it"
            else:
                enter.append(name)
        folders[:] = enter
        for name in sorted(files):
            inside = os.path.join(folder, name)  # noqa: PTH118
            if is_clutter(name) or _is_own(folder, name, gallery):
                found.skipped.append(inside)
            elif not is_picture(name):
                found.refused[inside] = suffix_refusal(name)
            else:
                yield inside
    yield from unreadable


def _is_own(folder: str, name: str, gallery: Path | None) -> bool:
    """Whether it is of the gallery's own files, or small copies of images that one keeps."""
    if gallery is not None and name.startswith(gallery.name):
        return os.path.abspath(folder) == os.path.abspath(gallery.parent)  # noqa: PTH100
    owner, _, what = name.rpartition(".")
    return what == "thumbs" and os.path.isfile(os.path.join(folder, owner))  # noqa: PTH113, PTH118


def read_image(path: Path) -> tuple[bytes, str]:
    """An image file's bytes and their digest.

    Raises InvalidInputError, also for what is no regular file, is too large, or has a name that is
    not text.
    """
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError("its name is not valid text; rename it") from error
    data = read_file(path)
    return data, hashlib.sha256(data).hexdigest()


def local_image(item: StoredItem) -> bytes | None:
    """The image an item was made from, if its file is still there and unchanged."""
    try:
        data = read_file(Path(str(item.metadata.get("path", ""))))
    except InvalidInputError:
        return None
    return data if hashlib.sha256(data).hexdigest() == item.digest else None


def threads() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Encoder:
    """Embedder and side encoder of one release."""

    def __init__(self, models: Path, manifest: "Manifest", *, side: bool = True) -> None:
        """`side` False: a query needs no side-information. Raises VerificationError."""
        self.manifest = manifest
        self._embedder = open_embedder(models, manifest, threads())
        has_side = side and manifest.side_encoder is not None
        self._side = open_side_encoder(models, manifest, threads()) if has_side else None

    def pixels(self, image: bytes) -> Pixels:
        """The image at this release's size. Raises InvalidInputError."""
        return decode(image, *self.manifest.frame)

    def embed(self, pixels: Sequence[Pixels]) -> Vectors:
        """Embeddings [n, dim] of n images."""
        return self._embedder.run(np.stack(pixels))

    def vectors(self, pixels: Sequence[Pixels]) -> NewVectors:
        """Embeddings and side-information of n images, to be stored in this release's space."""
        side = None if self._side is None else self._side.run(np.stack(pixels))
        return NewVectors(self.manifest.space, self.embed(pixels), side, "native")


_BATCH = 32


@dataclass
class Added:
    """The result of `add`: paths added, how many images were held before, why others were refused,
    and the system's and programs' own files that were passed over."""

    added: list[str] = field(default_factory=list)
    held: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def reasons(self) -> dict[str, list[str]]:
        """Refused paths, grouped by their common reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            by_reason.setdefault(reason, []).append(name)
        return by_reason


@dataclass(frozen=True)
class PhotoSource:
    """An image to be stored: a file, or an image's bytes.

    Without an `id`, the same picture is the same item: its id is the head of its digest.
    """

    image: Path | bytes
    notes: Metadata | None = None
    id: str | None = None

    @property
    def name(self) -> str:
        """As reports call it."""
        return self.id or str(self.image)

    def read(self) -> tuple[bytes, str]:
        """The image and its digest. Raises InvalidInputError."""
        if isinstance(self.image, bytes):
            return self.image, hashlib.sha256(self.image).hexdigest()
        return read_image(self.image)

    @property
    def metadata(self) -> Metadata | None:
        """The notes; of a file also where it is, so that it is found again."""
        path = self.image
        if isinstance(path, bytes):
            return self.notes
        notes = self.notes or {}
        return {**notes, "path": str(path), "folder": path.parent.name, "name": path.name}


@dataclass(frozen=True)
class Photo:
    """One image to be stored, decoded for each encoder."""

    source: PhotoSource
    sha256: str
    pixels: tuple[Pixels, ...]

    @property
    def id(self) -> str:
        return self.source.id or item_id(self.sha256)


def item_id(sha256: str) -> str:
    """The id of an image: the first 16 of the 64 hex digits of its digest."""
    return sha256[:16]


def add(device: GalleryFile, named: Sequence[Path], notes: Metadata, advance: Advance) -> Added:
    """Add the images named, and those below folders named, that the gallery does not hold yet; what
    is none, or is not taken, is named and skipped.

    `notes` becomes metadata of each, beside its path, folder and name. A batch is durable before
    the next begins, so a kill loses at most the one at hand, and adding the same files again goes
    on. Raises InvalidInputError as `find_images`, VerificationError, BusyError, CannotWriteError.
    """
    found = find_images(named, device.path)
    done = _stored(device, [PhotoSource(path, notes) for path in found.files], advance)
    done.refused |= found.refused
    done.skipped = found.skipped
    return done


def put(
    device: GalleryFile,
    images: Mapping[str, Path | bytes],
    metadata: Mapping[str, Metadata] | None = None,
) -> dict[str, str]:
    """Store images by id, in place of what is there; why some were refused, by id.

    Raises like `add`, and InvalidInputError for an id that is none.
    """
    notes = metadata or {}
    sources = [PhotoSource(image, notes.get(name), name) for name, image in images.items()]
    return _stored(device, sources, lambda done, total: None).refused


def _stored(device: GalleryFile, sources: Sequence[PhotoSource], advance: Advance) -> Added:
    report = Added()
    adder = _Adder(device, report)
    for start in range(0, len(sources), _BATCH):
        adder.store(sources[start : start + _BATCH])
        advance(min(start + _BATCH, len(sources)), len(sources))
    return report


class _Adder:
    """Embeds for the space that answers and for the one that a rollback would return to."""

    def __init__(self, device: GalleryFile, report: Added) -> None:
        self._device = device
        self._report = report
        self._open: dict[str, Encoder] = {}

    def store(self, sources: Iterable[PhotoSource], *, held_too: bool = False) -> None:
        """Store one batch, durably; with `held_too` also what the gallery holds already."""
        encoders = self._current()
        photos, vectors = self._embedded(list(self._photos(sources, encoders, held_too)), encoders)
        if not photos:
            return
        self._device.store.put(
            [photo.id for photo in photos],
            vectors,
            digests=[photo.sha256 for photo in photos],
            metadata=[photo.source.metadata for photo in photos],
        )
        if self._device.store.active().spec.space not in {e.manifest.space for e in encoders}:
            # A sync flipped in between: the same images once more, for the new space too.
            self.store([photo.source for photo in photos], held_too=True)
        elif not held_too:
            self._report.added += [photo.source.name for photo in photos]

    def _embedded(
        self, photos: list[Photo], encoders: Sequence[Encoder]
    ) -> tuple[list[Photo], list[NewVectors]]:
        """The photos that every encoder makes a vector of, with those; the others are named."""
        while photos:
            vectors = []
            for number, encoder in enumerate(encoders):
                try:
                    vectors.append(encoder.vectors([photo.pixels[number] for photo in photos]))
                except UnusableOutputError as error:
                    why = str(no_vector(encoder.manifest))
                    self._report.refused |= {photos[row].source.name: why for row in error.rows}
                    photos = [one for row, one in enumerate(photos) if row not in error.rows]
                    break
            else:
                return photos, vectors
        return [], []

    def _current(self) -> list[Encoder]:
        spaces = [self._device.store.active(), self._device.previous()]
        specs: list[SpaceSpec] = []
        for spec in (space.spec for space in spaces if space is not None):
            manifest = self._device.manifest(spec.release)
            if specs and manifest.embedder.file is None:
                # A rollback finds what was added since only where that release embeds images, too.
                continue
            specs.append(spec)
            if spec.space not in self._open:
                self._open[spec.space] = Encoder(self._device.models, manifest)
        return [self._open[spec.space] for spec in specs]

    def _photos(
        self, sources: Iterable[PhotoSource], encoders: Sequence[Encoder], held_too: bool
    ) -> Iterator[Photo]:
        seen = set[str]()
        for source in sources:
            try:
                data, sha256 = source.read()
                by_content = source.id is None
                if by_content and (sha256 in seen or not (held_too or self._lacks(sha256))):
                    self._report.held += 1
                    continue
                yield Photo(source, sha256, tuple(encoder.pixels(data) for encoder in encoders))
                seen.add(sha256)
            except InvalidInputError as error:
                self._report.refused[source.name] = str(error)

    def _lacks(self, sha256: str) -> bool:
        """Whether the image is new, or its file has moved: then its path is stored anew."""
        item = self._device.store.get(item_id(sha256))
        # False also where nobody may look, which Path.exists raises for.
        return item is None or not os.path.exists(str(item.metadata.get("path", "")))  # noqa: PTH110
