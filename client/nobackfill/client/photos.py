"""Add images of the device: find files, read, embed, store durably; the files stay in place."""

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
from nobackfill.gallery.spec import Metadata
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.gallery.store import NewVectors
from nobackfill.images import Pixels, decode_image, read_file
from nobackfill.picture_files import explain_refused_suffix, is_hidden_or_system, is_picture
from nobackfill.release.models import count_cores, no_vector_error, open_embedder, open_side_encoder
from nobackfill.vectors import Vectors

if TYPE_CHECKING:
    from nobackfill.release.manifest import Manifest


# The most files of one command; their names take 0.1 GB of memory.
MOST_FILES = 250_000


@dataclass
class ImageScan:
    """Result of a search for image files.

    Attributes:
        files: absolute paths of the images, each once.
        refusals: the reason by path of a file or folder that cannot be added.
        system_files: paths that belong to the system, to programs or to a gallery.
    """

    files: list[Path] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    system_files: list[str] = field(default_factory=list)


def find_images(paths: Sequence[Path], gallery_file: Path | None = None) -> ImageScan:
    """Find the given files, and the files with an image suffix below the given folders.

    Links to folders are not followed, unless they are given. Contents are not read. Hidden files
    and folders, those of a system, thumbnails of galleries and files of `gallery_file` are skipped.
    A folder below a given one that cannot be read is listed in `files`, so that reading it gives
    the reason. A file in the gallery's folder counts as its own if its name begins with the
    gallery's name. Given files are never skipped.

    Args:
        paths: files and folders; a given file may have any suffix; none: no files.
        gallery_file: skip the files of this gallery; None: no such gallery.

    Returns:
        The files in the order of `paths`, each folder's sorted by name before its subfolders. Files
        with another suffix, and links to folders, are in `refusals`.

    Raises:
        InvalidInputError: a path does not exist or cannot be read, or there are more than
            MOST_FILES images.
    """
    scan = ImageScan()
    files: dict[Path, None] = {}
    for path in paths:
        # Links stay unresolved: a person knows a linked folder by the link's name.
        for file in _files(path, scan, gallery_file):
            files[Path(os.path.abspath(file))] = None  # noqa: PTH100
            if len(files) > MOST_FILES:
                raise InvalidInputError(
                    f"{path}: expected at most {MOST_FILES} images at a time, found more; name "
                    "some of the files or folders below this one"
                )
    scan.files = list(files)
    return scan


def _files(path: Path, scan: ImageScan, gallery: Path | None) -> Iterator[str]:
    try:
        if not path.is_dir():
            path.stat()
            yield str(path)
            return
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise InvalidInputError(f"{path}: no such file or folder; check the path") from error
        raise InvalidInputError(
            f"{path}: cannot be read ({error.strerror}); check its permissions"
        ) from error
    unreadable: list[str] = []
    for folder, folders, files in os.walk(path, onerror=lambda e: unreadable.append(e.filename)):
        enter = []
        for name in sorted(folders):
            # Building a Path for each name takes twice as long.
            inside = os.path.join(folder, name)  # noqa: PTH118
            if is_hidden_or_system(name) or _is_own(folder, name, gallery):
                scan.system_files.append(inside)
            elif os.path.islink(inside):  # noqa: PTH114
                scan.refusals[inside] = (
                    "a link to a folder, which is not followed; name the link itself to add the "
                    "images behind it"
                )
            else:
                enter.append(name)
        folders[:] = enter
        for name in sorted(files):
            inside = os.path.join(folder, name)  # noqa: PTH118
            if is_hidden_or_system(name) or _is_own(folder, name, gallery):
                scan.system_files.append(inside)
            elif not is_picture(name):
                scan.refusals[inside] = explain_refused_suffix(name)
            else:
                yield inside
    yield from unreadable


def _is_own(folder: str, name: str, gallery: Path | None) -> bool:
    """Return whether a file belongs to the gallery, or is the thumbnail folder of any gallery."""
    if gallery is not None and name.startswith(gallery.name):
        return os.path.abspath(folder) == os.path.abspath(gallery.parent)  # noqa: PTH100
    owner, _, what = name.rpartition(".")
    return what == "thumbs" and os.path.isfile(os.path.join(folder, owner))  # noqa: PTH113, PTH118


def read_image(path: Path) -> tuple[bytes, str]:
    """Read an image file; its content is not decoded.

    Reads at most 32 MiB.

    Returns:
        Its bytes, and their SHA-256 as 64 hex digits.

    Raises:
        InvalidInputError: the path is missing, no regular file, larger than 32 MiB, unreadable, or
            not UTF-8. The message lacks the path.
    """
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            "the name of this file is not valid UTF-8; rename the file"
        ) from error
    data = read_file(path)
    return data, hashlib.sha256(data).hexdigest()


def local_image(item: StoredItem) -> bytes | None:
    """Read the file that an item was added from, if it still has the same content.

    The content is compared by its SHA-256.

    Args:
        item: an item with the metadata `path` and the SHA-256 of its image.

    Returns:
        The encoded image. None if the file is gone, unreadable or changed, larger than 32 MiB, or
        if the item was not added from a file or has no digest.
    """
    try:
        data = read_file(Path(str(item.metadata.get("path", ""))))
    except InvalidInputError:
        return None
    return data if hashlib.sha256(data).hexdigest() == item.digest else None


class ReleaseEncoder:
    """The embedder and the side-information encoder of one release.

    Attributes:
        manifest: the manifest of the release.
    """

    def __init__(self, model_folder: Path, manifest: "Manifest", *, with_side: bool = True) -> None:
        """Open the models of a release.

        Each model file is read and compared with its digest.

        Args:
            model_folder: the folder of the installed files.
            manifest: the release.
            with_side: also open the side-information encoder, if there is one; a query needs none.

        Raises:
            NoEncoderError: the release embeds no images.
            VerificationError: a file is missing or damaged, or cannot be loaded.
        """
        self.manifest = manifest
        self._embedder = open_embedder(model_folder, manifest, count_cores())
        has_side = with_side and manifest.side_encoder is not None
        self._side = open_side_encoder(model_folder, manifest, count_cores()) if has_side else None

    def pixels(self, image: bytes) -> Pixels:
        """Decode an image, scaled and cropped to the size that the embedder reads.

        Orientation by EXIF is applied.

        Args:
            image: JPEG, PNG or WebP; HEIC and AVIF with the extra heic.

        Returns:
            uint8 [height, width, 3], RGB.

        Raises:
            InvalidInputError: the bytes are no such image, damaged or animated, more than 32 MiB,
                or have too many pixels.
        """
        return decode_image(image, *self.manifest.frame)

    def embed(self, pixels: Sequence[Pixels]) -> Vectors:
        """Embed one or more decoded images.

        Args:
            pixels: n images as `pixels` returns them, n at least 1.

        Returns:
            float32 [n, dim].

        Raises:
            UnusableOutputError: the model returned no usable vector (zero or not finite) for some
                images; `rows` names them. No vector is returned then.
            ValueError: `pixels` is empty, or images differ in shape.
        """
        return self._embedder.run(np.stack(pixels))

    def embed_with_side(self, pixels: Sequence[Pixels]) -> NewVectors:
        """Compute the embeddings and the side-information of one or more decoded images.

        Args:
            pixels: n images as `pixels` returns them, n at least 1.

        Returns:
            Native vectors of the release's space: float32 [n, dim], and float32 [n, side_dim] or
            None if no side-information encoder was opened.

        Raises:
            UnusableOutputError: a model returned no usable vector (zero or not finite) for some
                images; `rows` names them. No vector is returned then.
            ValueError: `pixels` is empty, or images differ in shape.
        """
        side = None if self._side is None else self._side.run(np.stack(pixels))
        return NewVectors(self.manifest.space, self.embed(pixels), side, "native")


_BATCH = 32


@dataclass
class AddReport:
    """The result of adding images.

    Attributes:
        added_names: the paths or ids that were stored.
        duplicate_count: how many images the gallery held already.
        refusals: the reason by path or id of an image that was not stored.
        system_files: paths that belong to the system, to programs or to a gallery.
    """

    added_names: list[str] = field(default_factory=list)
    duplicate_count: int = 0
    refusals: dict[str, str] = field(default_factory=dict)
    system_files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PhotoSource:
    """An image to store.

    Attributes:
        file_or_bytes: a file, or the encoded bytes.
        notes: metadata of the item; None: none given.
        id: the item's id; None: the head of the content's digest, so that equal images are one
            item.
    """

    file_or_bytes: Path | bytes
    notes: Metadata | None = None
    id: str | None = None

    @property
    def name(self) -> str:
        """Return the image's name in reports: the id, else the path.

        Bytes without an id are returned as Python writes them, whatever their length.
        """
        return str(self.file_or_bytes) if self.id is None else self.id

    def read(self) -> tuple[bytes, str]:
        """Read the image, from its file if it has one.

        Nothing is decoded, and bytes of any length and content are returned as they are. The file
        is read again at each call.

        Returns:
            The encoded bytes, and their SHA-256 as 64 hex digits.

        Raises:
            InvalidInputError: the file cannot be read, see `read_image`.
        """
        if isinstance(self.file_or_bytes, bytes):
            return self.file_or_bytes, hashlib.sha256(self.file_or_bytes).hexdigest()
        return read_image(self.file_or_bytes)

    @property
    def metadata(self) -> Metadata | None:
        """Return `notes`, and for a file also path, folder and name; None if there are neither.

        The file's own keys replace those of `notes`. Bytes have only `notes`. The path is as given,
        not made absolute.
        """
        path = self.file_or_bytes
        if isinstance(path, bytes):
            return self.notes
        notes = self.notes or {}
        return {**notes, "path": str(path), "folder": path.parent.name, "name": path.name}


@dataclass(frozen=True)
class Photo:
    """One image to store, decoded for each encoder.

    Attributes:
        source: where it comes from.
        sha256: the digest of its encoded bytes, 64 hex digits.
        pixels: for each encoder, uint8 [height, width, 3].
    """

    source: PhotoSource
    sha256: str
    pixels: tuple[Pixels, ...]

    @property
    def id(self) -> str:
        """Return the item's id: the one of the source, else the head of the digest."""
        return item_id(self.sha256) if self.source.id is None else self.source.id


def item_id(sha256: str) -> str:
    """Return the id of an image: the first 16 of the 64 hex digits of its SHA-256.

    The text is not checked.
    """
    return sha256[:16]


def add(device: GalleryFile, paths: Sequence[Path], notes: Metadata, advance: Advance) -> AddReport:
    """Add image files, and those below folders, that the gallery does not hold yet.

    Each batch of 32 is durable before the next begins. After a kill, add the same files again to
    continue. Images are also embedded for the release that a rollback would return to. An image
    whose file has moved gets its new path and `notes`; its other metadata stays. Two equal images
    in one call are one item.

    Args:
        device: the gallery.
        paths: files and folders; none: nothing is done.
        notes: metadata of each new image, in addition to path, folder and name.
        advance: receives the progress, as (number of files so far, number of files). Its error
            passes through; stored batches stay.

    Returns:
        The paths that were stored, refused or skipped. An image that cannot be read or embedded
        does not affect the others. `added_names` is in the order of the search for files.

    Raises:
        InvalidInputError: a path does not exist or cannot be read, there are more than MOST_FILES
            images, or `notes` are not valid. Nothing was added if a path is the reason; earlier
            batches stay otherwise.
        NoEncoderError: the active release embeds no images.
        VerificationError: a model file or the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        NotFoundError: the release of a space is not installed, or the gallery was closed.
    """
    scan = find_images(paths, device.path)
    report = _store_all(device, [PhotoSource(path, notes) for path in scan.files], advance)
    report.refusals |= scan.refusals
    report.system_files = scan.system_files
    return report


def put(
    device: GalleryFile,
    images: Mapping[str, Path | bytes],
    metadata: Mapping[str, Metadata] | None = None,
) -> dict[str, str]:
    """Store images by id; an existing id is replaced unless its content is identical.

    Each batch of 32 is durable before the next begins. Images are also embedded for the release
    that a rollback would return to. Equal images under two ids are two items. A file's path, folder
    and name are stored as metadata, too.

    Args:
        device: the gallery.
        images: a path or encoded bytes by id; none: nothing is done.
        metadata: metadata by id; ids without an image are ignored. An image that is stored already
            under its id keeps its metadata if it has none here. None: none.

    Returns:
        The reason by id for every image that cannot be read or embedded; empty if all were stored.

    Raises:
        InvalidInputError: an id is empty or longer than 256 characters, or metadata is not valid;
            earlier batches stay stored.
        NoEncoderError: the active release embeds no images.
        VerificationError: a model file or the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        NotFoundError: the release of a space is not installed, or the gallery was closed.
    """
    notes = metadata or {}
    sources = [PhotoSource(image, notes.get(name), name) for name, image in images.items()]
    return _store_all(device, sources, lambda count, total: None).refusals


def _store_all(device: GalleryFile, sources: Sequence[PhotoSource], advance: Advance) -> AddReport:
    report = AddReport()
    adder = _Adder(device, report)
    for start in range(0, len(sources), _BATCH):
        adder.store(sources[start : start + _BATCH])
        advance(min(start + _BATCH, len(sources)), len(sources))
    return report


class _Adder:
    """Embeds images for the active space and for the space that a rollback would return to."""

    def __init__(self, device: GalleryFile, report: AddReport) -> None:
        self._device = device
        self._report = report
        self._open: dict[str, ReleaseEncoder] = {}

    def store(self, sources: Iterable[PhotoSource], *, include_existing: bool = False) -> None:
        """Store one batch durably, and add its names and refusals to the report.

        If a sync flips meanwhile, the images are embedded and stored once more, for the new space.
        An image that the new release refuses is not listed as added.

        Args:
            sources: the images; none: nothing is stored.
            include_existing: also store images that the gallery has; they do not count as added.

        Raises:
            InvalidInputError: an id or metadata is not valid; nothing is stored.
            NoEncoderError: the active release embeds no images.
            VerificationError: a model file or the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            NotFoundError: the release of a space is not installed, or the gallery was closed.
        """
        encoders = self._encoders()
        photos, vectors = self._embed(
            list(self._photos(sources, encoders, include_existing)), encoders
        )
        if not photos:
            return
        self._device.store.put(
            [photo.id for photo in photos],
            vectors,
            digests=[photo.sha256 for photo in photos],
            metadata=[self._metadata(photo) for photo in photos],
        )
        if self._device.store.active().spec.space not in {e.manifest.space for e in encoders}:
            # A sync flipped in between: store the same images for the new space too.
            self.store([photo.source for photo in photos], include_existing=True)
        if not include_existing:
            names = [photo.source.name for photo in photos]
            self._report.added_names += [
                name for name in names if name not in self._report.refusals
            ]

    def _metadata(self, photo: Photo) -> Metadata | None:
        """Return the metadata to store; the same image keeps the metadata that nobody replaces."""
        source, item = photo.source, self._device.store.get(photo.id)
        is_same = item is not None and item.digest == photo.sha256
        if item is None or not is_same or (source.id is not None and source.notes is not None):
            return source.metadata
        return {**item.metadata, **(source.metadata or {})}

    def _embed(
        self, photos: list[Photo], encoders: Sequence[ReleaseEncoder]
    ) -> tuple[list[Photo], list[NewVectors]]:
        """Embed the photos; report and leave out those without a vector from every encoder."""
        while photos:
            vectors = []
            for number, encoder in enumerate(encoders):
                try:
                    vectors.append(
                        encoder.embed_with_side([photo.pixels[number] for photo in photos])
                    )
                except UnusableOutputError as error:
                    why = str(no_vector_error(encoder.manifest))
                    self._report.refusals |= {
                        photos[row].source.name: why for row in error.unusable_rows
                    }
                    photos = [
                        one for row, one in enumerate(photos) if row not in error.unusable_rows
                    ]
                    break
            else:
                return photos, vectors
        return [], []

    def _encoders(self) -> list[ReleaseEncoder]:
        active, *previous = self._device.embedding_manifests()
        # If the previous release cannot embed images, a rollback will not find new ones.
        manifests = [active, *(one for one in previous if one.embedder.file is not None)]
        for manifest in manifests:
            if manifest.space not in self._open:
                self._open[manifest.space] = ReleaseEncoder(self._device.models, manifest)
        return [self._open[manifest.space] for manifest in manifests]

    def _photos(
        self,
        sources: Iterable[PhotoSource],
        encoders: Sequence[ReleaseEncoder],
        include_existing: bool,
    ) -> Iterator[Photo]:
        batch_digests = set[str]()
        for source in sources:
            try:
                data, sha256 = source.read()
                by_content = source.id is None
                if by_content and (
                    sha256 in batch_digests or not (include_existing or self._is_missing(sha256))
                ):
                    self._report.duplicate_count += 1
                    continue
                yield Photo(source, sha256, tuple(encoder.pixels(data) for encoder in encoders))
                batch_digests.add(sha256)
            except InvalidInputError as error:
                self._report.refusals[source.name] = str(error)

    def _is_missing(self, sha256: str) -> bool:
        """Return whether the image is new, or its file has moved and its path must be updated."""
        item = self._device.store.get(item_id(sha256))
        # os.path.exists is False for an unreadable folder; Path.exists raises.
        return item is None or not os.path.exists(str(item.metadata.get("path", "")))  # noqa: PTH110
