"""Adding images: each file is read, embedded, stored durably, and left where it is."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nobackfill.client.cli.output import Advance
from nobackfill.client.device import Device
from nobackfill.client.photos.encoding import Encoder
from nobackfill.client.photos.files import read_image
from nobackfill.errors import InvalidInputError, UnusableOutputError
from nobackfill.gallery.store import Metadata, NewVectors
from nobackfill.images import Pixels
from nobackfill.release.models import no_vector

_BATCH = 32


@dataclass
class Added:
    """What `add` did: paths added, how many images were held before, why others were refused."""

    added: list[str] = field(default_factory=list)
    held: int = 0
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Photo:
    """One image to be stored, decoded for each encoder.

    The same picture is the same item: its id is the head of its digest.
    """

    path: Path
    sha256: str
    pixels: tuple[Pixels, ...]

    @property
    def id(self) -> str:
        return item_id(self.sha256)

    @property
    def metadata(self) -> Metadata:
        return {"path": str(self.path), "folder": self.path.parent.name, "name": self.path.name}


def item_id(sha256: str) -> str:
    """The id of an image: the first 16 of the 64 hex digits of its digest."""
    return sha256[:16]


def add(device: Device, files: Sequence[Path], notes: Metadata, advance: Advance) -> Added:
    """Add images that the gallery does not hold yet; those that are none are named and skipped.

    `notes` becomes metadata of each, beside its path, folder and name. A batch is durable before
    the next begins, so a kill loses at most the one at hand, and adding the same files again goes
    on. Raises VerificationError, BusyError, CannotWriteError.
    """
    report = Added()
    adder = _Adder(device, notes, report)
    for start in range(0, len(files), _BATCH):
        adder.store(files[start : start + _BATCH])
        advance(min(start + _BATCH, len(files)), len(files))
    return report


class _Adder:
    """Embeds for the space that answers and for the one that a rollback would return to."""

    def __init__(self, device: Device, notes: Metadata, report: Added) -> None:
        self._device = device
        self._notes = notes
        self._report = report
        self._open: dict[str, Encoder] = {}

    def store(self, files: Iterable[Path], *, held_too: bool = False) -> None:
        """Store one batch, durably; with `held_too` also what the gallery holds already."""
        encoders = self._current()
        photos, vectors = self._embedded(list(self._photos(files, encoders, held_too)), encoders)
        if not photos:
            return
        self._device.store.put(
            [photo.id for photo in photos],
            vectors,
            digests=[photo.sha256 for photo in photos],
            metadata=[{**self._notes, **photo.metadata} for photo in photos],
        )
        if self._device.store.active().spec.space not in {e.manifest.space for e in encoders}:
            # A sync flipped in between: the same images once more, for the new space too.
            self.store([photo.path for photo in photos], held_too=True)
        elif not held_too:
            self._report.added += [str(photo.path) for photo in photos]

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
                    self._report.refused |= {str(photos[row].path): why for row in error.rows}
                    photos = [one for row, one in enumerate(photos) if row not in error.rows]
                    break
            else:
                return photos, vectors
        return [], []

    def _current(self) -> list[Encoder]:
        spaces = [self._device.store.active(), self._device.previous()]
        specs = [space.spec for space in spaces if space is not None]
        for spec in specs:
            if spec.space not in self._open:
                manifest = self._device.manifest(spec.release)
                self._open[spec.space] = Encoder(self._device.models, manifest)
        return [self._open[spec.space] for spec in specs]

    def _photos(
        self, files: Iterable[Path], encoders: Sequence[Encoder], held_too: bool
    ) -> Iterator[Photo]:
        seen = set[str]()
        for path in files:
            try:
                data, sha256 = read_image(path)
                if sha256 in seen or not (held_too or self._lacks(sha256)):
                    self._report.held += 1
                    continue
                yield Photo(path, sha256, tuple(encoder.pixels(data) for encoder in encoders))
                seen.add(sha256)
            except InvalidInputError as error:
                self._report.refused[str(path)] = str(error)

    def _lacks(self, sha256: str) -> bool:
        """Whether the image is new, or its file has moved: then its path is stored anew."""
        item = self._device.store.get(item_id(sha256))
        return item is None or not Path(str(item.metadata.get("path", ""))).exists()
