"""The galleries of a gateway: one folder each, opened at the start, made and deleted by name."""

import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import structlog

from gallery import staging
from gallery.spec import SpaceSpec
from gallery.store import Store
from release import durable
from release.errors import AlreadyExistsError, BusyError, InvalidInputError, NotFoundError
from release.manifest import Manifest
from server.galleries import order
from server.galleries.hosted import Hosted
from server.galleries.order import Level
from server.state import State

log = structlog.get_logger("server.galleries")

_NAME = re.compile(r"^[a-z0-9_-]{1,64}\Z")
_FILE = "gallery.sqlite"
# A folder with this prefix is a gallery being made or deleted when the gateway died.
_UNFINISHED = ".tmp-"
CREATED = "created"
# How long a deletion waits for the calls that still work with the gallery.
_LEAVE_S = 60.0


class Galleries:
    """Open galleries by name. The mapping is replaced, never changed, so readers need no lock.

    Whoever works with a gallery is counted among its users, through `using`, `all` or `holding`; a
    deletion closes it when the last of them has left.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = threading.Lock()
        self._hosted: Mapping[str, Hosted] = {}

    def open_all(self, state: State, manifests: Mapping[int, Manifest]) -> None:
        """Open what is there and sweep what was never finished.

        Raises VerificationError for a damaged gallery, CannotWriteError.
        """
        durable.make_dir(self._folder, 0o700)
        durable.sweep(self._folder)
        hosted = {}
        for folder in sorted(self._folder.iterdir()):
            if _NAME.match(folder.name) and (folder / _FILE).is_file():
                gallery = Hosted(folder.name, folder, Store.open(folder / _FILE))
                gallery.replan(state, manifests)
                hosted[folder.name] = gallery
                log.info("serving gallery", gallery=folder.name)
        self._hosted = hosted

    @contextmanager
    def using(self, name: str) -> Iterator[Hosted]:
        """A gallery, kept open to the end of the block. Raises NotFoundError."""
        hosted = self.get(name)
        if hosted.leaving or not hosted.users.enter():
            raise _unknown(name)
        try:
            with order.holding(Level.GALLERY, name):
                yield hosted
        finally:
            hosted.users.leave()

    def names(self) -> set[str]:
        """Names that are taken."""
        return set(self._hosted)

    def all(self) -> Iterator[Hosted]:
        """Every gallery, by name; each is kept open until the next is asked for."""
        for _, hosted in sorted(self._hosted.items()):
            if hosted.users.enter():
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
                    leaving.enter_context(order.holding(Level.GALLERY, hosted.name))
                    found.append(hosted)
            yield found

    def get(self, name: str) -> Hosted:
        """A gallery that the caller does not work with. Raises NotFoundError."""
        try:
            return self._hosted[name]
        except KeyError:
            raise _unknown(name) from None

    def create(
        self, name: str, specs: list[SpaceSpec], state: State, manifests: Mapping[int, Manifest]
    ) -> Hosted:
        """Make a gallery whose active space is the last of `specs`; the others are kept as
        previous, so that a rollback finds what is put from now on.

        Raises InvalidInputError for a name, AlreadyExistsError, CannotWriteError.
        """
        if not _NAME.match(name):
            raise InvalidInputError(
                f"expected a gallery name of 1 to 64 of a-z, 0-9, '-', '_', got {name[:80]!r}"
            )
        with self._taking():
            if name in self._hosted:
                raise AlreadyExistsError(f"gallery {name!r} exists already")
            unfinished = self._folder / f"{_UNFINISHED}{name}-{uuid.uuid4().hex}"
            durable.make_dir(unfinished, 0o700)
            with Store.create(unfinished / _FILE, specs[0]) as store:
                for spec in specs[1:]:
                    staging.begin(store, spec)
                    staging.flip(store, spec.space)
                store.state_set({CREATED: time.time()})
            durable.publish_dir(unfinished, self._folder / name)
            hosted = Hosted(name, self._folder / name, Store.open(self._folder / name / _FILE))
            hosted.replan(state, manifests)
            self._hosted = {**self._hosted, name: hosted}
            return hosted

    def delete(self, name: str) -> None:
        """Delete a gallery with all in it, once nobody works with it; new calls are told that it is
        gone while the last ones end.

        Raises NotFoundError, BusyError when they do not end (then it stays), CannotWriteError.
        """
        with self._taking():
            hosted = self.get(name)
            if hosted.leaving:
                raise _unknown(name)
            hosted.leaving = True
        try:
            if not hosted.users.close(_LEAVE_S):
                raise BusyError(f"gallery {name!r} is still in use; delete it again later")
            gone = self._folder / f"{_UNFINISHED}{name}-{uuid.uuid4().hex}"
            with self._taking():
                # Renamed first: from here on it is gone, whatever happens to the rest.
                durable.publish_dir(hosted.folder, gone)
                self._hosted = {n: h for n, h in self._hosted.items() if n != name}
        except BaseException:
            hosted.leaving = False
            hosted.users.reopen()
            raise
        hosted.close()
        durable.remove_tree(gone)

    def close(self) -> None:
        for hosted in self._hosted.values():
            hosted.close()

    @contextmanager
    def _taking(self) -> Iterator[None]:
        order.check(Level.NAMES)
        with self._names, order.holding(Level.NAMES):
            yield


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"no gallery is called {name[:64]!r}; create it first")
