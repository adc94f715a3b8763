"""The galleries of a gateway: opened at the start, made and deleted by name."""

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
# How long a deletion waits for the calls that still work with the gallery.
_LEAVE_S = 60.0
# A gallery of more items is read at the start, others when they are first used.
_SMALL = 1_000
# What the files of one gallery can do to it, whatever is damaged.
UNUSABLE = (NobackfillError, OSError, sqlite3.Error, ValueError)


class GalleryRegistry:
    """Open galleries by name. The mapping is replaced, never changed, so readers need no lock.

    Whoever works with a gallery is counted among its users, through `using`, `all` or `hold_all`; a
    deletion closes it when the last of them has left.
    """

    def __init__(
        self, home: Home, catalog: Catalog, state: GatewayState, answerer_of: AnswererOf
    ) -> None:
        """`home`: where they are kept. `answerer_of`: what answers searches by a plan."""
        self._home = home
        self._answerer_of = answerer_of
        self._catalog = catalog
        self._state = state
        self._names = threading.Lock()
        self._hosted: Mapping[str, Hosted] = {}
        # Galleries that cannot be served, with the reason; those that were opened are in both.
        self._aside: Mapping[str, str] = {}
        self._leaf = threading.Lock()
        # Called when one is set aside, and when one of them is deleted.
        self.on_set_aside: Callable[[], None] = lambda: None

    def open_all(self) -> None:
        """Open what is there and sweep what was never finished. A gallery that cannot be served is
        set aside.

        Raises VerificationError when none of them can be, CannotWriteError, UnavailableError.
        """
        self._home.sweep()
        hosted = {}
        for name in self._home.names():
            try:
                hosted[name] = self._open(name)
            except UnavailableError:
                # A database that is away says nothing about the gallery.
                raise
            except UNUSABLE as error:
                self.set_aside(name, error)
        log.info("serving galleries", count=len(hosted), set_aside=len(self._aside))
        if self._aside and not hosted:
            name, reason = next(iter(self._aside.items()))
            raise VerificationError(
                f"none of {len(self._aside)} galleries can be served, the first, {name!r}, because "
                f"of: {reason}"
            )
        self._hosted = hosted

    def _open(self, name: str, before: Callable[[Plan], None] = lambda plan: None) -> Hosted:
        hosted = self._home.open(name)
        try:
            self.replan(hosted, before)
            # Vectors are counted page by page, a second of a million, unless views count them.
            if hosted.count() > _SMALL:
                hosted.wake()
            # Kept for whoever lists them: the file is open now, and may be closed again soon.
            hosted.sizes()
            hosted.check_whole()
        except BaseException:
            hosted.store.close()
            raise
        return hosted

    def replan(self, hosted: Hosted, before: Callable[[Plan], None] = lambda plan: None) -> Plan:
        """Make a gallery's plan anew, by what is known now. As Hosted.replan."""
        return hosted.replan(
            self._state.current, self._catalog.manifests, self._answerer_of, before
        )

    def set_aside(self, name: str, error: Exception) -> None:
        """Refuse calls to a gallery that turns out unusable, with the reason. Who works with it
        goes on; it is closed when it is deleted, or with the others."""
        log.error("gallery set aside", gallery=name, error=str(error))
        with self._leaf:
            self._aside = {**self._aside, name: str(error)}
        self.on_set_aside()

    def set_aside_reasons(self) -> Mapping[str, str]:
        """Galleries that are set aside, with the reason."""
        return self._aside

    @contextmanager
    def using(self, name: str) -> Iterator[Hosted]:
        """A gallery, kept open to the end of the block. Raises like `get`."""
        hosted = self.get(name)
        if hosted.leaving or not hosted.users.enter():
            raise _unknown(name)
        try:
            with locks.hold_level(Level.GALLERY, name):
                yield hosted
        except (GoneError, OutdatedError):
            try:
                hosted.check_whole()
            except DamagedError as error:
                self.set_aside(name, error)
                raise
            raise
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
        return hosted is not None and hosted.slow

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
    def hold_all(self) -> Iterator[list[Hosted]]:
        """Every gallery, by name, all kept open to the end of the block."""
        with ExitStack() as leaving:
            found = []
            for hosted in self.all():
                if hosted.users.enter():
                    leaving.callback(hosted.users.leave)
                    leaving.enter_context(locks.hold_level(Level.GALLERY, hosted.name))
                    found.append(hosted)
            yield found

    def get(self, name: str) -> Hosted:
        """A gallery that the caller does not work with. Raises NotFoundError, VerificationError for
        one that is set aside."""
        if self._state.shared and name not in self.names():
            # Another gateway may just have made it.
            self._state.catch_up()
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
        releases = (*self._state.current.previous, self._state.active())
        specs = [SpaceSpec.of(self._catalog.manifest(release)) for release in releases]
        if not NAME.match(name):
            raise InvalidInputError(
                f"expected a gallery name of 1 to 64 of a-z, 0-9, '-', '_', got {name[:80]!r}"
            )
        with self._taking():
            if name in self.names():
                raise AlreadyExistsError(f"gallery {name!r} exists already")
            self._home.create(name, specs, {CREATED: time.time()})
            hosted = self._open(name)
            hosted.wake()
            with self._leaf:
                # The other gateways' follower may have found and opened it already.
                self._hosted = {name: hosted, **self._hosted}

    def follow(self, before: Callable[[Plan], None]) -> list[Hosted]:
        """Look what there is, open what other gateways have made, let go of what they have deleted;
        those whose plan is outdated. `before` as in Hosted.replan. Raises UnavailableError."""
        # In this order: what is made here after the look is not in it, and stays.
        known = self._hosted
        marks = self._state.look()
        gone = {
            name for name, one in known.items() if name not in marks or marks[name][0] != one.number
        }
        for name in gone:
            known[name].leaving = True
        opened = {}
        for name in marks:
            if (name not in known or name in gone) and name not in self._aside:
                # Deleted since it was listed, or of a release that has still to come here.
                with suppress(NotFoundError, ConfigurationError):
                    opened[name] = self._open(name, before)
        with self._leaf:
            kept = {
                name: one
                for name, one in self._hosted.items()
                if name not in gone or one is not known[name]
            }
            self._hosted = {**opened, **kept}
        return [
            one
            for name, one in known.items()
            if name not in gone and one.plan.epoch != marks[name][1]
        ]

    def delete(self, name: str) -> None:
        """Delete a gallery with all in it, once nobody works with it; new calls are refused as if
        it were gone while the last ones end.

        Raises NotFoundError, BusyError when they do not end (then it stays), CannotWriteError.
        """
        self._state.catch_up()
        with self._taking():
            hosted = self._hosted.get(name)
            if hosted is None and name in self._aside:
                finish = self._home.remove(name)
                self._serve_again(name)
                finish()
                return
            if hosted is None or hosted.leaving:
                raise _unknown(name)
            hosted.leaving = True
        try:
            if not hosted.users.close(_LEAVE_S):
                raise BusyError(f"gallery {name!r} is still in use; delete it again later")
            with self._taking():
                hosted.store.rest()
                finish = self._home.remove(name)
                with self._leaf:
                    self._hosted = {n: h for n, h in self._hosted.items() if n != name}
                self._serve_again(name)
        except BaseException:
            hosted.leaving = False
            hosted.users.reopen()
            raise
        hosted.close()
        finish()

    def close(self) -> None:
        for hosted in self._hosted.values():
            hosted.close()

    def _serve_again(self, name: str) -> None:
        """A gallery of this name that is made now is another."""
        if name not in self._aside:
            return
        with self._leaf:
            self._aside = {n: why for n, why in self._aside.items() if n != name}
        self.on_set_aside()

    @contextmanager
    def _taking(self) -> Iterator[None]:
        locks.check_lock_order(Level.NAMES)
        with self._names, locks.hold_level(Level.NAMES):
            yield


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"no gallery is called {name[:64]!r}; create it first")
