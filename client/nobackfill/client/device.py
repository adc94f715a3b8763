"""The gallery of this device from Python."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from nobackfill.client.gallery_file import GalleryFile, keep_reserve
from nobackfill.client.output import Output
from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
)
from nobackfill.wire.answers import Answer, Hit, Image, Item, Status

if TYPE_CHECKING:
    from nobackfill.client.photos import Added
    from nobackfill.client.sync import SyncReport
    from nobackfill.gallery.filters import Filter, Scalar
    from nobackfill.gallery.search.index import Labels


def _image(image: Image) -> Path | bytes:
    return image if isinstance(image, bytes) else Path(image).absolute()


class Device(GalleryFile):
    """An opened gallery; close it, or use it in a `with` statement.

        from nobackfill.client import Device

        with Device.create("gallery.sqlite", "grpc://127.0.0.1:50051", "1.root.json") as device:
            device.put({"cat": "cat.png"})
            for hit in device.search(image="query.png", k=5).hits:
                print(hit.id, hit.distance, hit.score)
            device.sync()

    All but `create` and `sync` work offline. The verbs are those of nobackfill.wire.Gateway, and so
    are their answers; methods load what they need, and raise the errors of nobackfill.errors.
    """

    @classmethod
    def create(cls, path: str | Path, source: str, root: str | Path) -> Self:
        """Make an empty gallery that follows `source`, and trusts its publisher's root metadata.

        `source`: a gateway (grpc://HOST:PORT, grpcs:// with TLS), a static host (https://…) or a
        publication folder; `root`: the file 1.root.json. Raises AlreadyExistsError, NotFoundError,
        VerificationError, UnavailableError, ConfigurationError.
        """
        from nobackfill.client import creation

        try:
            trusted = Path(root).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{root}: cannot be read ({error.strerror})") from error
        creation.init(Path(path), source, trusted, lambda _: None, Output(bars=False))
        keep_reserve(Path(path))
        return cls(path)

    def put(
        self,
        images: Mapping[str, Image],
        metadata: Mapping[str, "Mapping[str, Scalar]"] | None = None,
    ) -> Mapping[str, str]:
        """Store images by id; durable when this returns. Returns {id: why it was refused}.

        An id that exists is replaced, unless it has the very same content. Of a file the item keeps
        path, folder and name as metadata, too.
        """
        from nobackfill.client import photos

        return photos.put(self, {name: _image(one) for name, one in images.items()}, metadata)

    def put_texts(
        self,
        texts: Mapping[str, str],
        metadata: Mapping[str, "Mapping[str, Scalar]"] | None = None,
    ) -> Mapping[str, str]:
        """As `put`, of texts of at most 64 KiB: notes. Nothing of a text is kept but its vector.
        Raises NoEncoderError where the release embeds no texts."""
        from nobackfill.client import notes

        return notes.put(self, texts, metadata)

    def add(self, paths: "Sequence[str | Path]") -> "Added":
        """Store the image files named and those below the folders named, by their content, as
        `edge-client add` does: what the gallery holds already is passed over."""
        from nobackfill.client import photos

        named = [Path(path) for path in paths]
        return photos.add(self, named, {}, lambda done, total: None)

    def search(
        self,
        *,
        image: Image | None = None,
        text: str | None = None,
        embeddings: Mapping[str, Sequence[float]] | None = None,
        k: int = 10,
        where: "Mapping[str, Scalar] | Filter | None" = None,
    ) -> Answer[Hit]:
        """The `k` (1 to 1000) items nearest to an image, to a text, or to an embedding of the
        active space.

        `where`: see nobackfill.wire.Gateway.search. Raises InvalidInputError,
        NoEncoderError for what the release does not embed, IncompatibleSpaceError.
        """
        from nobackfill.client.search import Search

        if sum(one is not None for one in (image, text, embeddings)) != 1:
            raise InvalidInputError("expected one of image=, text= and embeddings=")
        view = Search(self, {} if where is None else where)
        if image is not None:
            return view.by_images([_image(image)], k)[0]
        if text is not None:
            return view.by_texts([text], k)[0]
        return view.by_embedding(embeddings or {}, k)

    def get(self, id: str) -> Item:
        """One item. Raises NotFoundError."""
        found = self.store.get(id)
        item = None if found is None else self.store.items([found.label], self._space())[0]
        if item is None:
            raise NotFoundError(f"{id}: no such item; `edge-client list` names them")
        return Item(item.id, item.metadata, item.origin, item.uncertainty)

    def list(
        self,
        *,
        where: "Mapping[str, Scalar] | Filter | None" = None,
        least_certain: bool = False,
    ) -> Iterator[Item]:
        """Items as they were put, all or those that pass `where`.

        `least_certain`: those that an upgrade made, the least certain first.
        """
        from nobackfill.gallery.listing import page

        allowed, space, after = self._passing(where), self._space(), None
        while True:
            found, after = page(
                self.store, space, 500, after=after, allowed=allowed, least_certain=least_certain
            )
            for item, _ in found:
                yield Item(item.id, item.metadata, item.origin, item.uncertainty)
            if after is None:
                return

    def count(self, *, where: "Mapping[str, Scalar] | Filter | None" = None) -> int:
        """How many items there are, or pass `where`."""
        allowed = self._passing(where)
        return self.store.count() if allowed is None else len(allowed)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete items by id, their ciphertext in the vault at the next push; how many existed."""
        from nobackfill.client.maintenance import delete

        return delete(self, ids)[0]

    def status(self) -> Status:
        """How many items the gallery holds, and which release answers."""
        return Status(self.store.count(), self.store.active().spec.release)

    def sync(self, *, backfill: int = 0) -> "SyncReport":
        """Follow the newest release without the images; the `backfill` least certain items are
        embedded again from their files. Raises BusyError, VerificationError (nothing changed),
        UnavailableError, CannotWriteError."""
        from nobackfill.client.sync import Wishes, sync

        return sync(self, Wishes(backfill=backfill), Output(bars=False))

    def rollback(self) -> Status:
        """Return to the release before, and follow the present one no more. Raises NotFoundError
        where there is none to return to, PreconditionError, BusyError."""
        from nobackfill.client.sync import roll_back

        roll_back(self)
        return self.status()

    def _space(self) -> str:
        return self.store.active().spec.space

    def _passing(self, where: "Mapping[str, Scalar] | Filter | None") -> "Labels | None":
        from nobackfill.gallery.filter_engine import passing_labels
        from nobackfill.gallery.filters import every

        filtered = None if where is None else every(where)
        return None if filtered is None else passing_labels(self.store, filtered)
