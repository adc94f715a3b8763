"""The galleries of a gateway: one folder each, opened at the start, made and deleted by name."""

import re
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import structlog

from gallery import staging
from gallery.spec import SpaceSpec
from gallery.store import Store
from release import durable
from release.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from release.manifest import Manifest
from server.galleries.hosted import Hosted
from server.state import State

log = structlog.get_logger("server.galleries")

_NAME = re.compile(r"^[a-z0-9_-]{1,64}$")
_FILE = "gallery.sqlite"
# A folder with this prefix is a gallery being made or deleted when the gateway died.
_UNFINISHED = ".tmp-"
CREATED = "created"


class Galleries:
    """Open galleries by name. The mapping is replaced, never changed, so readers need no lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
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

    def all(self) -> list[Hosted]:
        """Every gallery, by name."""
        return [hosted for _, hosted in sorted(self._hosted.items())]

    def get(self, name: str) -> Hosted:
        """Raises NotFoundError."""
        try:
            return self._hosted[name]
        except KeyError:
            raise NotFoundError(f"no gallery is called {name[:64]!r}; create it first") from None

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
        with self._lock:
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
        """Delete a gallery with all in it, once nobody searches it. Raises NotFoundError."""
        with self._lock:
            hosted = self.get(name)
            self._hosted = {n: h for n, h in self._hosted.items() if n != name}
            with hosted.writes.alone():
                hosted.plan.users.wait_until_none(60)
                hosted.close()
                # Renamed first: from here on it is gone, whatever happens to the rest.
                gone = self._folder / f"{_UNFINISHED}{name}-{uuid.uuid4().hex}"
                durable.publish_dir(hosted.folder, gone)
                durable.remove_tree(gone)

    def close(self) -> None:
        for hosted in self.all():
            hosted.close()
