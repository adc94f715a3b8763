"""The Python API of a gallery on this device."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from nobackfill.client.gallery_file import GalleryFile, create_reserve
from nobackfill.client.output import Output
from nobackfill.errors import ConfigurationError, InvalidInputError, NotFoundError
from nobackfill.wire.answers import Answer, Hit, Image, Item, Status

if TYPE_CHECKING:
    from nobackfill.client.photos import AddReport
    from nobackfill.client.sync import SyncReport
    from nobackfill.gallery.filters import Filter, Scalar
    from nobackfill.gallery.search.index import Labels


def _image(image: Image) -> Path | bytes:
    return image if isinstance(image, bytes) else Path(image).absolute()


class Device(GalleryFile):
    """An open gallery on this device; close it, or use it in a `with` statement.

        from nobackfill.client import Device

        with Device.create("gallery.sqlite", "grpc://127.0.0.1:50051", "1.root.json") as device:
            device.put({"cat": "cat.png"})
            for hit in device.search(image="query.png", k=5).hits:
                print(hit.id, hit.distance, hit.score)
            device.sync()

    Every method except `create` and `sync` works offline; `sync` may also read images from the
    vault. Methods and answers are those of nobackfill.wire.Gateway. Every method may raise
    BusyError (another process holds the file), VerificationError (a file is damaged) and, if it
    writes, CannotWriteError.
    """

    @classmethod
    def create(cls, path: str | Path, source: str, root: str | Path) -> Self:
        """Make an empty gallery that follows the releases of a publication, and open it.

        Downloads the models of the newest release that includes this device.

        Also creates a file of 2 MiB next to the gallery, from which `gc` takes space on a full
        disk. After an error there is no gallery; downloads stay, and the next call continues them.
        It blocks until the downloads and the trial of the models have ended. A missing folder of
        `path` is made.

        Args:
            path: the gallery file to make.
            source: a gateway (grpc://HOST:PORT, grpcs:// with TLS), a static host (https://…) or a
                publication folder.
            root: the publisher's root metadata, 1.root.json, received by another way than `source`.

        Returns:
            The open gallery, which the caller closes.

        Raises:
            InvalidInputError: `path` is not UTF-8.
            AlreadyExistsError: a file exists at `path`, or files of an earlier gallery.
            NotFoundError: the source has published no release.
            VerificationError: the publication is not signed by `root`, a model fails its trial,
                also because it needs the extra `text`, or this program can use no release
                (UnfitError).
            NotPermittedError: the gateway refuses the token.
            UnavailableError: the source does not answer.
            ConfigurationError: `root` cannot be read, `source` has an unknown form or names a
                missing folder, or the token or certificate for the gateway cannot be read.
            BusyError: another process makes this gallery. This does not wait.
            CannotWriteError: the disk is full or read-only.
            OSError: this user may not look into the folder.
        """
        from nobackfill.client import creation

        try:
            trusted = Path(root).read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"{root}: this file of root metadata cannot be read ({error.strerror}); check its "
                "name and permissions"
            ) from error
        creation.init(Path(path), source, trusted, lambda _: None, Output(show_progress=False))
        create_reserve(Path(path))
        return cls(path)

    def put(
        self,
        images: Mapping[str, Image],
        metadata: Mapping[str, "Mapping[str, Scalar]"] | None = None,
    ) -> Mapping[str, str]:
        """Store images by id; they are durable when this returns.

        An existing id is replaced unless its content is identical. Equal images under two ids are
        two items. Images are also embedded for the release that a rollback would return to. Each
        batch of 32 is durable before the next begins.

        Args:
            images: a path or encoded bytes (JPEG, PNG, WebP) by id; none: nothing is done. An item
                of a file also gets the metadata path, folder and name.
            metadata: metadata by id, in place of an item's earlier metadata; ids without an image
                are ignored. An identical image without metadata here keeps its own. None: none.

        Returns:
            The reason by id for every image that was refused; empty if all were stored.

        Raises:
            InvalidInputError: an id is empty or longer than 256 characters, or metadata is not
                valid. Earlier batches stay stored.
            NoEncoderError: the release embeds no images.
            VerificationError: a file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            NotFoundError: the active release is not installed, or the gallery was closed.
        """
        from nobackfill.client import photos

        return photos.put(self, {name: _image(one) for name, one in images.items()}, metadata)

    def put_texts(
        self, texts: Mapping[str, str], metadata: Mapping[str, "Mapping[str, Scalar]"] | None = None
    ) -> Mapping[str, str]:
        """Store the vectors of texts by id; they are durable when this returns.

        The texts themselves are not stored. An existing id is replaced unless its text is
        identical. Texts are also embedded for the release that a rollback would return to, if it
        embeds texts. Each batch of 32 is durable before the next begins.

        Args:
            texts: texts of at most 64 KiB with a visible character, by id; none: nothing is done.
            metadata: metadata by id, in place of an item's earlier metadata; ids without a text are
                ignored. An identical text without metadata here keeps its own. None: none.

        Returns:
            The reason by id for every text that was refused, also for an id or metadata that is not
            valid; empty if all were stored.

        Raises:
            NoEncoderError: the release embeds no texts.
            ConfigurationError: the extra `text` is not installed.
            VerificationError: a file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            NotFoundError: the active release is not installed, or the gallery was closed.
        """
        from nobackfill.client import notes

        return notes.put(self, texts, metadata)

    def add(self, paths: "Sequence[str | Path]") -> "AddReport":
        """Store image files, and those below folders, by their content, as `edge-client add` does.

        Images that the gallery holds already are skipped; one whose file has moved gets its new
        path, and keeps its other metadata. The files stay in place. A new item's id is the first 16
        hex digits of the SHA-256 of its image. Folders are searched at any depth, and links in them
        are not followed. Hidden files are skipped unless they are given. Two equal images are one
        item. Each batch of 32 images is durable before the next begins.

        Args:
            paths: files and folders; none: nothing is done.

        Returns:
            The paths that were added and skipped, the refused ones with reasons, and the number of
            duplicates.

        Raises:
            InvalidInputError: a path does not exist or cannot be read, or there are more than
                250,000 images; nothing is added.
            NoEncoderError: the release embeds no images.
            VerificationError: a file of the gallery is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            NotFoundError: the active release is not installed, or the gallery was closed.
        """
        from nobackfill.client import photos

        return photos.add(self, list(map(Path, paths)), {}, lambda count, total: None)

    def search(
        self,
        *,
        image: Image | None = None,
        text: str | None = None,
        embeddings: Mapping[str, Sequence[float]] | None = None,
        k: int = 10,
        where: "Mapping[str, Scalar] | Filter | None" = None,
    ) -> Answer[Hit]:
        """Return the items nearest to an image, a text or an embedding, by exact search.

        Give exactly one of the three. Equal distances are ordered as the items were stored. Each
        call reads the vectors of the gallery; for many queries, open a
        nobackfill.client.search.Search once.

        Args:
            image: a path or encoded bytes (JPEG, PNG, WebP).
            text: a text of at most 64 KiB to embed as a query.
            embeddings: vectors by space id; the vector of the active space is used.
            k: the largest number of hits, 1 to 1000.
            where: a filter, or values by key that every hit must have; None or empty: all items.

        Returns:
            The hits, nearest first; fewer than `k` if fewer items pass `where`.

        Raises:
            InvalidInputError: not exactly one query, or a query that cannot be read or embedded, or
                a `k` or filter that is not valid.
            NoEncoderError: the release has no encoder for this kind of query.
            ConfigurationError: the extra `text` is not installed.
            IncompatibleSpaceError: `embeddings` has no vector of the active space, or a sync
                dropped the searched space during the call.
            VerificationError: a file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            NotFoundError: the active release is not installed, or the gallery was closed.
            CannotWriteError: the file cannot be opened, or the disk fails.
            ValueError: `embeddings` has values that are no numbers.
            TypeError: `embeddings` has values of another type than numbers, such as a mapping; or
                `where` is no filter, or a value in it is None or a list.
        """
        from nobackfill.client.search import Search

        if sum(one is not None for one in (image, text, embeddings)) != 1:
            raise InvalidInputError(
                "search: expected exactly one of image=, text= and embeddings= as the query, got "
                "none or several; pass one of them"
            )
        view = Search(self, {} if where is None else where)
        if image is not None:
            return view.by_images([_image(image)], k)[0]
        if text is not None:
            return view.by_texts([text], k)[0]
        return view.by_embedding(embeddings or {}, k)

    def get(self, id: str) -> Item:
        """Return one item, with the origin of its vector in the active space.

        Args:
            id: the item's id; a path is no id.

        Returns:
            The item; its origin and uncertainty are None if it has no vector in the active space.

        Raises:
            NotFoundError: there is no such item, or the gallery was closed.
            VerificationError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
            IncompatibleSpaceError: a sync dropped the active space during the call.
        """
        row = self.store.get(id)
        item = None if row is None else self.store.items([row.label], self._space())[0]
        if item is None:
            raise NotFoundError(
                f"{id}: this gallery has no item of this id; `edge-client list` lists the ids"
            )
        return Item(item.id, item.metadata, item.origin, item.uncertainty)

    def list(
        self, *, where: "Mapping[str, Scalar] | Filter | None" = None, least_certain: bool = False
    ) -> Iterator[Item]:
        """Yield items, oldest first, read in pages of 500.

        Nothing is read before the first item, so errors are raised there or later. Items that are
        added during the iteration may come too, and one that is replaced may come twice.

        Args:
            where: a filter, or values by key that every item must have; None or empty: all items.
                It is evaluated at the start.
            least_certain: only items whose vector has an uncertainty, because it was migrated; the
                least certain first.

        Raises:
            InvalidInputError: the filter is not valid.
            VerificationError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            IncompatibleSpaceError: the space that was active at the start was dropped during the
                iteration.
            CannotWriteError: the file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed, or its file is gone.
            TypeError: `where` is no filter, or a value in it is None or a list.
        """
        from nobackfill.gallery.listing import read_items_page

        passing, space, place = self._passing(where), self._space(), None
        while True:
            items, place = read_items_page(
                self.store,
                space,
                500,
                start_after=place,
                matches=passing,
                least_certain=least_certain,
            )
            for item, _ in items:
                yield Item(item.id, item.metadata, item.origin, item.uncertainty)
            if place is None:
                return

    def count(self, *, where: "Mapping[str, Scalar] | Filter | None" = None) -> int:
        """Count the items.

        Args:
            where: a filter, or values by key that every counted item must have; None or empty: all
                items.

        Returns:
            The number of items, with or without a vector in the active space.

        Raises:
            InvalidInputError: the filter is not valid.
            VerificationError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed, or its file is gone.
            TypeError: `where` is no filter, or a value in it is None or a list.
        """
        passing = self._passing(where)
        return self.store.count() if passing is None else len(passing)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete items by id; the next push deletes their ciphertext in the vault.

        The image files stay. Unknown ids are ignored, and an id that is given twice counts once.
        Vectors, thumbnails and unsent ciphertext are deleted too. After an error, the call can be
        repeated.

        Returns:
            The number of ids that existed.

        Raises:
            VerificationError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            NotFoundError: the gallery was closed.
        """
        from nobackfill.client.maintenance import delete

        return delete(self, ids)[0]

    def status(self) -> Status:
        """Return the number of items and the active release.

        Returns:
            The items count with or without a vector in the active space.

        Raises:
            VerificationError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed.
        """
        return Status(self.store.count(), self.store.active().spec.release)

    def sync(self, *, backfill: int = 0) -> "SyncReport":
        """Upgrade the gallery to the newest release that it can follow, without the images.

        Blocks until it is complete: it downloads, tries the models in a child process, migrates,
        and then activates. Searches use the old release until then. A killed or failed sync is
        continued by the next one. A release that fails its trial or upgrade is held back, and the
        next older one is tried. If the active release was withdrawn and no newer one can be
        followed, it returns to the previous release. A sync that finds nothing newer for a week
        drops the previous release.

        Args:
            backfill: how many of the least certain items to re-embed from their files or the vault;
                0 or less: none.

        Returns:
            A report. If no newer release can be followed, its `state` is "behind", and nothing is
            raised.

        Raises:
            BusyError: another sync runs (this does not wait), another command changes the gallery
                for more than 60 seconds, or other commands keep changing the gallery.
            ConfigurationError: the stored source does not exist any more, the token or certificate
                of the gateway cannot be read, or the extra `text`, which the release needs, is not
                installed.
            VerificationError: the publication fails verification, and nothing was changed; or a
                file of the gallery is damaged.
            NotFoundError: nothing is published at the source, or it lacks a release that the
                gallery uses; or the gallery was closed.
            NoEncoderError: `backfill` is not 0, and the release embeds no images.
            NotPermittedError: the gateway refuses the token.
            UnavailableError: the source does not answer; finished downloads stay.
            CannotWriteError: the disk is full or read-only.
            OSError: a file of the models folder cannot be read.
        """
        from nobackfill.client.sync import SyncOptions, sync

        return sync(self, SyncOptions(backfill=backfill), Output(show_progress=False))

    def rollback(self) -> Status:
        """Return to the previous release, and hold the present one back: later syncs skip it.

        No vector is computed, and the present release's vectors stay for a later sync. Only
        `edge-client sync --retry` tries it again. The rollback does not wait for a sync that writes
        vectors.

        Returns:
            The number of items, and the release that is active now.

        Raises:
            NotFoundError: there is no previous release to return to: there was no upgrade yet, or
                it was confirmed; or the gallery was closed.
            PreconditionError: some items have no vector in the previous space; nothing is changed.
            VerificationError: the gallery file is damaged.
            BusyError: a sync is writing vectors, or another process holds the gallery file.
            CannotWriteError: the disk is full or read-only.
        """
        from nobackfill.client.sync import roll_back

        roll_back(self)
        return self.status()

    def _space(self) -> str:
        return self.store.active().spec.space

    def _passing(self, where: "Mapping[str, Scalar] | Filter | None") -> "Labels | None":
        from nobackfill.gallery.filter_engine import passing_labels
        from nobackfill.gallery.filters import as_filter

        filtered = None if where is None else as_filter(where)
        return None if filtered is None else passing_labels(self.store, filtered)
