"""Galleries in files: a folder each, made and deleted by a rename."""

import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nobackfill import durable
from nobackfill.gallery.residents import Residents
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.hosted_file import HostedInFile

NAME = re.compile(r"^[a-z0-9_-]{1,64}\Z")
_FILE = "gallery.sqlite"
# A folder with this prefix is a gallery being made or deleted when the gateway died.
_UNFINISHED = ".tmp-"


class Home(Protocol):
    """Where galleries are kept, by name."""

    def sweep(self) -> None:
        """Remove what was never finished, before anything is opened. Raises CannotWriteError."""
        ...

    def names(self) -> Iterable[str]:
        """Those that are there, in order."""
        ...

    def open(self, name: str) -> Hosted:
        """Raises VerificationError, NotFoundError, BusyError, UnavailableError."""
        ...

    def create(self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]) -> None:
        """A gallery with these spaces, the last of them active, as the last step. Raises
        CannotWriteError, AlreadyExistsError."""
        ...

    def remove(self, name: str) -> Callable[[], None]:
        """Take a gallery away that nobody uses: from here on it is gone. What is returned is to be
        called once it is closed. Raises CannotWriteError."""
        ...


class InFiles:
    """What is said of each method: Home."""

    def __init__(self, folder: Path, residents: Residents) -> None:
        """`residents` bounds how many of their files are open at once."""
        self._folder = folder
        self._residents = residents

    def sweep(self) -> None:
        durable.make_dir(self._folder, 0o700)
        durable.sweep(self._folder)

    def names(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        folders = sorted(self._folder.iterdir())
        return [one.name for one in folders if NAME.match(one.name) and (one / _FILE).is_file()]

    def open(self, name: str) -> Hosted:
        folder = self._folder / name
        store = SqliteGallery.open(folder / _FILE, self._residents)
        try:
            return HostedInFile(name, folder, store)
        except BaseException:
            store.close()
            raise

    def create(self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]) -> None:
        unfinished = self._unfinished(name)
        durable.make_dir(unfinished, 0o700)
        with SqliteGallery.create(unfinished / _FILE, specs[0]) as store:
            for spec in specs[1:]:
                store.begin(spec)
                store.flip(spec.space)
            store.state_set(state)
        durable.publish_dir(unfinished, self._folder / name)

    def remove(self, name: str) -> Callable[[], None]:
        gone = self._unfinished(name)
        durable.publish_dir(self._folder / name, gone)
        return lambda: durable.remove_tree(gone)

    def _unfinished(self, name: str) -> Path:
        return self._folder / f"{_UNFINISHED}{name}-{uuid.uuid4().hex}"
