"""The galleries of a gateway: one folder each, opened at the start, made and deleted by name."""

import re
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import structlog

from nobackfill import durable
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    VerificationError,
)
from nobackfill.gallery.residents import Residents
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.server.catalog import Catalog
from nobackfill.server.galleries import lock_order
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.lock_order import Level
from nobackfill.server.state import StateFile

log = structlog.get_logger("server.galleries")

_NAME = re.compile(r"^[a-z0-9_-]{1,64}\Z")
_FILE = "gallery.sqlite"
# A folder with this prefix is a gallery being made or deleted when the gateway died.
_UNFINISHED = ".tmp-"
CREATED = "created"
# How long a deletion waits for the calls that still work with the gallery.
_LEAVE_S = 60.0
# A gallery of more vectors is read at the start, others when they are first used.
_SMALL = 1_000
# What the files of one gallery can do to it, whatever is damaged.
UNUSABLE = (NobackfillError, OSError, sqlite3.Error, ValueError)


class Galleries:
    """Open galleries by name. The mapping is replaced, never changed, so readers need no lock.

    Whoever works with a gallery is counted among its users, through `using`, `all` or `holding`; a
    deletion closes it when the last of them has left.
    """

    def __init__(
        self, folder: Path, residents: Residents, catalog: Catalog, state: StateFile
    ) -> None:
        """`residents` bounds how many of their files are open at once."""
        self._folder = folder
        self._residents = residents
        self._catalog = catalog
        self._state = state
        self._names = threading.Lock()
        self._hosted: Mapping[str, Hosted] = {}
        # Galleries that cannot be served, with the reason; those that were opened are in both.
        self._aside: Mapping[str, str] = {}
        self._leaf = threading.Lock()
        # Called when one is set aside.
        self.on_set_aside: Callable[[], None] = lambda: None

    def open_all(self) -> None:
        """Open what is there and sweep what was never finished. A gallery that cannot be served is
        set aside.

        Raises VerificationError when none of them can be, CannotWriteError.
        """
        durable.make_dir(self._folder, 0o700)
        durable.sweep(self._folder)
        hosted = {}
        for folder in sorted(self._folder.iterdir()):
            if _NAME.match(folder.name) and (folder / _FILE).is_file():
                try:
                    hosted[folder.name] = self._open(folder.name)
                except UNUSABLE as error:
                    self.set_aside(folder.name, error)
        log.info("serving galleries", count=len(hosted), set_aside=len(self._aside))
        if self._aside and not hosted:
            name, reason = next(iter(self._aside.items()))
            raise VerificationError(
                f"none of {len(self._aside)} galleries can be served, the first, {name!r}, because "
                f"of: {reason}"
            )
        self._hosted = hosted

    def _open(self, name: str) -> Hosted:
        folder = self._folder / name
        store = SqliteGallery.open(folder / _FILE, self._residents)
        try:
            hosted = Hosted(name, folder, store)
            hosted.replan(self._state.now, self._catalog.manifests)
            if sum(hosted.sizes().values()) > _SMALL:
                hosted.wake()
            # Kept for whoever lists them: the file is open now, and may be closed again soon.
            hosted.count()
        except BaseException:
            store.close()
            raise
        return hosted

    def set_aside(self, name: str, error: Exception) -> None:
        """Refuse calls to a gallery that turns out unusable, with the reason. Who works with it
        goes on; it is closed when it is deleted, or with the others."""
        log.error("gallery set aside", gallery=name, error=str(error))
        with self._leaf:
            self._aside = {**self._aside, name: str(error)}
        self.on_set_aside()

    def aside(self) -> Mapping[str, str]:
        """Galleries that are set aside, with the reason."""
        return self._aside

    @contextmanager
    def using(self, name: str) -> Iterator[Hosted]:
        """A gallery, kept open to the end of the block. Raises like `get`."""
        hosted = self.get(name)
        if hosted.leaving or not hosted.users.enter():
            raise _unknown(name)
        try:
            with lock_order.holding(Level.GALLERY, name):
                yield hosted
        finally:
            hosted.users.leave()

    def at_hand(self, name: str) -> Hosted | None:
        """A gallery that can be searched without waiting for anything, by who touches its memory
        only; None: `using` says why, or gets it."""
        hosted = self._hosted.get(name)
        return None if hosted is None or hosted.leaving or name in self._aside else hosted

    def slow(self, name: str) -> bool:
        """Whether searches of a gallery take long at present; False for one that is not there."""
        hosted = self._hosted.get(name)
        return hosted is not None and hosted.speed.slow

    def names(self) -> set[str]:
        """Names that are taken."""
        return {*self._hosted, *self._aside}

    def all(self) -> Iterator[Hosted]:
        """Every gallery, by name; each is kept open until the next is asked for."""
        for name, hosted in sorted(self._hosted.items()):
            if name not in self._aside and hosted.users.enter():
                try:
                    yield hosted
                finally:
                    hosted.users.leave()

    @contextmanager
    def holding(self) -> Iterator[list[Hosted]]:
        """Every gallery, by name, all kept open to the end of the block."""
        with ExitStack() as leaving:
            found = []
            for hosted in self.all():
                if hosted.users.enter():
                    leaving.callback(hosted.users.leave)
                    leaving.enter_context(lock_order.holding(Level.GALLERY, hosted.name))
                    found.append(hosted)
            yield found

    def get(self, name: str) -> Hosted:
        """A gallery that the caller does not work with. Raises NotFoundError, VerificationError for
        one that is set aside."""
        if reason := self._aside.get(name):
            raise VerificationError(
                f"gallery {name!r} is set aside: {reason}; restore it from a backup and start the "
                "gateway again, or delete it"
            )
        if hosted := self._hosted.get(name):
            return hosted
        raise _unknown(name)

    def create(self, name: str) -> None:
        """Make an empty gallery in the active release's space, and in those that a rollback may
        return to, so that it finds what is put from now on.

        Raises InvalidInputError for a name, AlreadyExistsError, CannotWriteError,
        PreconditionError before the first release is active.
        """
        releases = (*self._state.now.previous, self._state.active())
        specs = [SpaceSpec.of(self._catalog.manifest(release)) for release in releases]
        if not _NAME.match(name):
            raise InvalidInputError(
                f"expected a gallery name of 1 to 64 of a-z, 0-9, '-', '_', got {name[:80]!r}"
            )
        with self._taking():
            if name in self.names():
                raise AlreadyExistsError(f"gallery {name!r} exists already")
            unfinished = self._folder / f"{_UNFINISHED}{name}-{uuid.uuid4().hex}"
            durable.make_dir(unfinished, 0o700)
            with SqliteGallery.create(unfinished / _FILE, specs[0]) as store:
                for spec in specs[1:]:
                    store.begin(spec)
                    store.flip(spec.space)
                store.state_set({CREATED: time.time()})
            durable.publish_dir(unfinished, self._folder / name)
            hosted = self._open(name)
            hosted.wake()
            self._hosted = {**self._hosted, name: hosted}

    def delete(self, name: str) -> None:
        """Delete a gallery with all in it, once nobody works with it; new calls are refused as if
        it were gone while the last ones end.

        Raises NotFoundError, BusyError when they do not end (then it stays), CannotWriteError.
        """
        gone = self._folder / f"{_UNFINISHED}{name}-{uuid.uuid4().hex}"
        with self._taking():
            hosted = self._hosted.get(name)
            if hosted is None and name in self._aside:
                durable.publish_dir(self._folder / name, gone)
                self._serve_again(name)
                durable.remove_tree(gone)
                return
            if hosted is None or hosted.leaving:
                raise _unknown(name)
            hosted.leaving = True
        try:
            if not hosted.users.close(_LEAVE_S):
                raise BusyError(f"gallery {name!r} is still in use; delete it again later")
            with self._taking():
                # Renamed first: from here on it is gone, whatever happens to the rest.
                hosted.store.rest()
                durable.publish_dir(hosted.folder, gone)
                self._hosted = {n: h for n, h in self._hosted.items() if n != name}
                self._serve_again(name)
        except BaseException:
            hosted.leaving = False
            hosted.users.reopen()
            raise
        hosted.close()
        durable.remove_tree(gone)

    def close(self) -> None:
        for hosted in self._hosted.values():
            hosted.close()

    def _serve_again(self, name: str) -> None:
        """A gallery of this name that is made now is another."""
        with self._leaf:
            self._aside = {n: why for n, why in self._aside.items() if n != name}

    @contextmanager
    def _taking(self) -> Iterator[None]:
        lock_order.check(Level.NAMES)
        with self._names, lock_order.holding(Level.NAMES):
            yield


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"no gallery is called {name[:64]!r}; create it first")
