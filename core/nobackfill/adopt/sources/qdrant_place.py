"""Where a Qdrant is, what its ids are, and what its errors mean."""

import os
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nobackfill.adopt.sources.server_address import STATUSES, server_address
from nobackfill.errors import (
    BusyError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from nobackfill.extras import extra

with extra("qdrant"):
    from qdrant_client import QdrantClient
    from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

# The variable that holds a server's key.
KEY = "NOBACKFILL_QDRANT_KEY"
_SECONDS = 60
_FOLDERS: "weakref.WeakValueDictionary[Path, QdrantClient]" = weakref.WeakValueDictionary()


class Clients:
    """A client of a place for each process that asks: a forked one shares no connection. A folder
    stays its opener's; another process is refused by BusyError."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._by_process: dict[int, QdrantClient] = {}

    @property
    def own(self) -> QdrantClient:
        """Raises as `opened`."""
        process = os.getpid()
        if process not in self._by_process:
            self._by_process[process] = opened(self._place)
        return self._by_process[process]


def _forked() -> None:
    """Forget the parent's client: closing it in a child would free the parent's lock."""
    for client in _FOLDERS.values():
        # Not closed yet, or a client of tests that locks nothing.
        if (lock := getattr(client._client, "_flock_file", None)) is not None:
            lock.close()
    _FOLDERS.clear()


os.register_at_fork(after_in_child=_forked)


def opened(place: str) -> QdrantClient:
    """A server's client, or that of a folder. Raises NotFoundError, ConfigurationError, BusyError.

    Vectors are private: a server on another machine is asked by https:// only.
    """
    if "://" not in place:
        if not (Path(place) / "meta.json").is_file():
            raise NotFoundError(f"{place}: no folder of Qdrant's local mode is there")
        return _folder(Path(place).resolve())
    server_address(place, "qdrant", KEY)
    key = os.environ.get(KEY)
    # Its check of versions asks the server before anybody wants to know, and warns.
    return QdrantClient(url=place, api_key=key, timeout=_SECONDS, check_compatibility=False)


def _folder(path: Path) -> QdrantClient:
    """A folder has one client in a process: it locks what it opens, until nobody uses it."""
    found = _FOLDERS.get(path)
    if found is None:
        with refused(str(path)):
            found = QdrantClient(path=str(path), force_disable_check_same_thread=True)
        _FOLDERS[path] = found
        weakref.finalize(found, found._client.close)
    return found


def id_of(name: str) -> int | str | None:
    """A point's id from its text; None where no point can have it."""
    if name.isascii() and name.isdecimal() and str(int(name)) == name:
        return int(name)
    try:
        return name if str(uuid.UUID(name)) == name else None
    except ValueError:
        return None


def order(key: Any) -> tuple[bool, Any]:
    """Numbers come before UUIDs."""
    return (False, key) if isinstance(key, int) else (True, uuid.UUID(str(key)).int)


@contextmanager
def refused(name: str) -> Iterator[None]:
    """Errors of Qdrant in the block become ours."""
    try:
        yield
    except UnexpectedResponse as error:
        ours = STATUSES.get(error.status_code or 0, InvalidInputError)
        raise ours(f"{name}: Qdrant says: {error.status_code} {error.content[:200]!r}") from error
    except ResponseHandlingException as error:
        raise UnavailableError(f"{name}: Qdrant does not answer ({error})") from error
    except KeyError as error:
        # The local mode's way to say that a point is not there.
        raise NotFoundError(f"{name}: no point {error}") from error
    except (ValueError, RuntimeError) as error:
        kind = BusyError if "already accessed" in str(error) else InvalidInputError
        raise kind(f"{name}: Qdrant says: {error}") from error
