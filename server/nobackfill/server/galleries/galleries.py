"""Keep the galleries of a gateway: open them at the start, create, find and delete them by name."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import structlog

from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    ConfigurationError,
    DamagedError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    UnavailableError,
    VerificationError,
)
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.server.catalog import Catalog
from nobackfill.server.galleries import locks
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.hosted_file import NAME, Home
from nobackfill.server.galleries.locks import Level
from nobackfill.server.galleries.plan import AnswererOf, Plan
from nobackfill.server.state import GatewayState, GoneError, OutdatedError

log = structlog.get_logger("server.galleries")

CREATED = "created"
# Longest time (seconds) that a deletion waits for calls that use the gallery.
_DRAIN_SECONDS = 60.0
# Larger galleries make their views at the start, others at their first use.
_LAZY_ITEMS = 1_000
# Errors that damaged files of one gallery can cause.
UNUSABLE = (NobackfillError, OSError, sqlite3.Error, ValueError)


class GalleryRegistry:
    """Keep open galleries by name.

    The mapping is replaced, never changed, so readers need no lock. A caller that works with a
    gallery counts as its user, through `using`, `all` or `hold_all`. A deletion closes the gallery
    when its last user has left.
    """

    def __init__(
        self, home: Home, catalog: Catalog, state: GatewayState, answerer_of: AnswererOf
    ) -> None:
        """Start without galleries.

        Args:
            home: where galleries are stored.
            catalog: published releases.
            state: the gateway's state.
            answerer_of: makes the answerer of a plan.
        """
        self._home = home
        self._answerer_of = answerer_of
        self._catalog = catalog
        self._state = state
        self._names = threading.Lock()
        self._hosted: Mapping[str, Hosted] = {}
        # Galleries that are set aside (not served), with the reason; an open one is in both
        # mappings.
        self._reasons: Mapping[str, str] = {}
        self._update_lock = threading.Lock()
        # Called when a gallery is set aside, and when such a gallery is deleted.
        self.on_set_aside: Callable[[], None] = lambda: None

    def open_all(self) -> None:
        """Open all galleries, and remove what an interrupted creation or deletion left.

        A gallery that cannot be served is set aside.

        Raises:
            VerificationError: there are galleries, and none can be served.
            CannotWriteError: leftovers cannot be removed.
            UnavailableError: the database does not answer.
        """
        self._home.sweep()
        hosted = {}
        for name in self._home.names():
            try:
                hosted[name] = self._open(name)
            except UnavailableError:
                # An unreachable database is not the gallery's fault.
                raise
            except UNUSABLE as error:
                self.set_aside(name, error)
        log.info("serving galleries", count=len(hosted), set_aside=len(self._reasons))
        if self._reasons and not hosted:
            name, reason = next(iter(self._reasons.items()))
            raise VerificationError(
                f"none of the {len(self._reasons)} galleries can be served; the first is {name!r}: "
                f"{reason}"
            )
        self._hosted = hosted

    def _open(self, name: str, check: Callable[[Plan], None] = lambda plan: None) -> Hosted:
        hosted = self._home.open(name)
        try:
            self.replan(hosted, check)
            # Without views vectors are counted page by page: a second for a million.
            if hosted.count() > _LAZY_ITEMS:
                hosted.wake()
            # Count now, while the file is open: it may be closed again before somebody lists it.
            hosted.sizes()
            hosted.check_complete()
        except BaseException:
            hosted.store.close()
            raise
        return hosted

    def replan(self, hosted: Hosted, check: Callable[[Plan], None] = lambda plan: None) -> Plan:
        """Make a gallery's plan again for the present state; see Hosted.replan."""
        return hosted.replan(self._state.current, self._catalog.manifests, self._answerer_of, check)

    def set_aside(self, name: str, error: Exception) -> None:
        """Stop serving a gallery that turns out to be unusable: new calls to it are refused.

        Calls that use it go on; it is closed when it is deleted, or with the others.

        Args:
            name: the gallery.
            error: the reason.
        """
        log.error("gallery set aside", gallery=name, error=str(error))
        with self._update_lock:
            self._reasons = {**self._reasons, name: str(error)}
        self.on_set_aside()

    def set_aside_reasons(self) -> Mapping[str, str]:
        """Return why each set-aside gallery is not served, by name."""
        return self._reasons

    @contextmanager
    def using(self, name: str) -> Iterator[Hosted]:
        """Use a gallery during a block; it stays open until the end.

        Args:
            name: the gallery.

        Raises:
            NotFoundError: no gallery has this name, or it is being deleted.
            VerificationError: the gallery is set aside.
        """
        hosted = self.get(name)
        if hosted.is_closing or not hosted.users.enter():
            raise _unknown(name)
        try:
            with locks.hold_level(Level.GALLERY, name):
                yield hosted
        except (GoneError, OutdatedError):
            try:
                hosted.check_complete()
            except DamagedError as error:
                self.set_aside(name, error)
                raise
            raise
        finally:
            hosted.users.leave()

    def ready_gallery(self, name: str) -> Hosted | None:
        """Return a gallery that can be searched without waiting; None otherwise.

        The caller may read its memory only, and does not count as a user.
        """
        hosted = self._hosted.get(name)
        return None if hosted is None or hosted.is_closing or name in self._reasons else hosted

    def is_slow(self, name: str) -> bool:
        """Tell whether searches of a gallery are slow at present; False for an unknown one."""
        hosted = self._hosted.get(name)
        return hosted is not None and hosted.is_slow

    def names(self) -> set[str]:
        """Return all names in use."""
        return {*self._hosted, *self._reasons}

    def all(self) -> Iterator[Hosted]:
        """Yield every served gallery by name; each stays open until the next one is requested."""
        for name, hosted in sorted(self._hosted.items()):
            if name not in self._reasons and hosted.users.enter():
                try:
                    yield hosted
                finally:
                    hosted.users.leave()

    @contextmanager
    def hold_all(self) -> Iterator[list[Hosted]]:
        """Hold every served gallery open during a block, in the order of the names."""
        with ExitStack() as stack:
            galleries = []
            for hosted in self.all():
                if hosted.users.enter():
                    stack.callback(hosted.users.leave)
                    stack.enter_context(locks.hold_level(Level.GALLERY, hosted.name))
                    galleries.append(hosted)
            yield galleries

    def get(self, name: str) -> Hosted:
        """Return a gallery without counting as its user.

        Raises:
            NotFoundError: no gallery has this name.
            VerificationError: the gallery is set aside.
        """
        if self._state.shared and name not in self.names():
            # Another gateway may have created it a moment ago.
            self._state.catch_up()
        if reason := self._reasons.get(name):
            raise VerificationError(
                f"gallery {name!r} is set aside: {reason}; restore it from a backup and restart "
                "the gateway, or delete the gallery"
            )
        if hosted := self._hosted.get(name):
            return hosted
        raise _unknown(name)

    def create(self, name: str) -> None:
        """Create an empty gallery.

        It has the active release's space, and those of the releases that a rollback can return to.

        Args:
            name: 1 to 64 characters of a-z, 0-9, '-' and '_'.

        Raises:
            InvalidInputError: the name is not valid.
            AlreadyExistsError: a gallery has this name.
            PreconditionError: no release is active.
            CannotWriteError: the gallery cannot be written.
        """
        releases = (*self._state.current.previous, self._state.active())
        specs = [SpaceSpec.of(self._catalog.manifest(release)) for release in releases]
        if not NAME.match(name):
            raise InvalidInputError(
                f"expected a gallery name of 1 to 64 of a-z, 0-9, '-', '_', got {name[:80]!r}"
            )
        with self._lock_names():
            if name in self.names():
                raise AlreadyExistsError(f"gallery {name!r} exists already")
            self._home.create(name, specs, {CREATED: time.time()})
            hosted = self._open(name)
            hosted.wake()
            with self._update_lock:
                # The thread that follows other gateways may have opened it already.
                self._hosted = {name: hosted, **self._hosted}

    def follow(self, check: Callable[[Plan], None]) -> list[Hosted]:
        """Open galleries that other gateways have created, and close those that they have deleted.

        Args:
            check: called with each new plan before it is used; it may raise to refuse the plan.

        Returns:
            The galleries whose plan is outdated.

        Raises:
            UnavailableError: the database does not answer.
        """
        # Read this first: a gallery that is created here after the look is not in it, and stays.
        open_before = self._hosted
        marks = self._state.look()
        deleted = {
            name
            for name, hosted in open_before.items()
            if name not in marks or marks[name][0] != hosted.number
        }
        for name in deleted:
            open_before[name].is_closing = True
        opened = {}
        for name in marks:
            if (name not in open_before or name in deleted) and name not in self._reasons:
                # It was deleted since it was listed, or its release is not published here yet.
                with suppress(NotFoundError, ConfigurationError):
                    opened[name] = self._open(name, check)
        with self._update_lock:
            remaining = {
                name: hosted
                for name, hosted in self._hosted.items()
                if name not in deleted or hosted is not open_before[name]
            }
            self._hosted = {**opened, **remaining}
        return [
            hosted
            for name, hosted in open_before.items()
            if name not in deleted and hosted.plan.epoch != marks[name][1]
        ]

    def delete(self, name: str) -> None:
        """Delete a gallery once no call uses it; new calls are refused at once.

        Args:
            name: the gallery, which may be set aside.

        Raises:
            NotFoundError: no gallery has this name.
            BusyError: calls use it for too long; the gallery stays.
            CannotWriteError: the gallery cannot be deleted.
        """
        self._state.catch_up()
        with self._lock_names():
            hosted = self._hosted.get(name)
            if hosted is None and name in self._reasons:
                finish = self._home.remove(name)
                self._clear_reason(name)
                finish()
                return
            if hosted is None or hosted.is_closing:
                raise _unknown(name)
            hosted.is_closing = True
        try:
            if not hosted.users.close(_DRAIN_SECONDS):
                raise BusyError(f"gallery {name!r} is still in use; try again later")
            with self._lock_names():
                hosted.store.suspend()
                finish = self._home.remove(name)
                with self._update_lock:
                    self._hosted = {n: h for n, h in self._hosted.items() if n != name}
                self._clear_reason(name)
        except BaseException:
            hosted.is_closing = False
            hosted.users.reopen()
            raise
        hosted.close()
        finish()

    def close(self) -> None:
        """Close all galleries."""
        for hosted in self._hosted.values():
            hosted.close()

    def _clear_reason(self, name: str) -> None:
        """Forget why a gallery was set aside: a new one of this name is another gallery."""
        if name not in self._reasons:
            return
        with self._update_lock:
            self._reasons = {n: why for n, why in self._reasons.items() if n != name}
        self.on_set_aside()

    @contextmanager
    def _lock_names(self) -> Iterator[None]:
        locks.check_lock_order(Level.NAMES)
        with self._names, locks.hold_level(Level.NAMES):
            yield


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(
        f"no gallery has the name {name[:64]!r}; create it first (`gateway status` lists all)"
    )
