"""Flip a name from a collection to its copy, and back: `migrate` for stores of collections.

A name leads to a collection: an alias in Milvus. A copy of the collection gets the new vectors (see
`copied`). The flip lets the name lead to the copy, first of all; then it writes the items that
others changed in the original meanwhile. The copy records how far the flip is, so that a killed one
continues. The store has no lock: an item that a program deletes from the copy during the flip is
known from one that it added to the original by a list of digests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from nobackfill.adopt.sources.copied import (
    DIGEST,
    Collection,
    CollectionCopy,
    CollectionStore,
    CopiedSource,
    Record,
    matches_sketch,
    rows_from_records,
)
from nobackfill.adopt.sources.source import Rows, Target, Window, refuse_lost_vectors
from nobackfill.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    PreconditionError,
)
from nobackfill.vectors import Vectors

# Items that are compared at once; a store may read all for each window.
_PAGE = 10_000
# The fact of a copy that says how far its flip is, and its values: the name leads to the copy, but
# items of the original may be missing; it is complete; it is being taken back.
_FLIP, _BEGUN, _DONE, _BACK = "flip", "begun", "done", "back"


class FlippingStore(CollectionStore, Protocol):
    """A store of collections that can let a name lead to another collection.

    Every method may also raise the errors of a CollectionStore.
    """

    def flip_obstacles(self, name: str, collection: Collection) -> list[str]:
        """Return sentences about what prevents a flip of a name; empty if nothing does.

        Args:
            name: The name that was opened.
            collection: The collection that it leads to.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: There is no such name or collection.
            InvalidInputError: The server refuses the request.
        """

    def complete_copy(self, copy: Collection, original: Collection) -> None:
        """Make what a killed `create_copy` has left out of a copy. A complete copy stays as it is.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection or its copy was deleted.
            InvalidInputError: The server refuses the request.
            CannotWriteError: The store cannot be written.
        """

    def wait_for_index(self, copy: Collection) -> None:
        """Wait until searches of the copy are as fast as they will be.

        Raises:
            BusyError: The store still builds an index, or the server has too many requests.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            NotFoundError: The copy was deleted.
            InvalidInputError: The server refuses the request.
        """

    def redirect_name(self, name: str, collection: str) -> None:
        """Let a name lead to another collection, in one step. May be repeated.

        Raises:
            UnavailableError: The server does not answer; the name may lead to it already.
            NotFoundError: There is no such name or collection.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            InvalidInputError: The server refuses the request.
        """

    def redirect_command(self, name: str, collection: str) -> str:
        """Return the call of the store's client that redirects a name as `redirect_name` does."""

    def record_facts(self, collection: str, facts: Mapping[str, str]) -> None:
        """Record facts of a collection; the other facts stay (see `Collection.copy_facts`).

        An earlier value of a name is replaced.

        Raises:
            NotFoundError: There is no such collection.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            InvalidInputError: The server refuses the request.
        """

    def owner_tasks(self, name: str, old: Collection, new: Collection) -> list[str]:
        """Return sentences that name the owner's tasks after a flip; empty if there are none.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection or its copy was deleted.
            InvalidInputError: The server refuses the request.
        """

    def lock_name(self, name: str) -> AbstractContextManager[Callable[[], None]]:
        """Keep other migrations of a collection out, as `Reversible.migration_lock` does.

        Raises:
            BusyError: Another migration holds the lock, or the server has too many requests.
            CannotWriteError: The lock file cannot be created.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
        """


class FlippingSource(CopiedSource):
    """A CopiedSource whose name can flip to the copy; a WarningSource and Reversible.

    During a flip that was killed, the source is still the original. Every method may also raise
    the errors of a Collection.

    Args:
        store: The store.
        name: The name of the collection, which flips.
        vector: Name of the vectors; empty if they have none.

    Raises:
        NotFoundError: There is no such collection.
        UnavailableError: The server does not answer.
        NotPermittedError: The server refuses the key.
        BusyError: The server has too many requests.
    """

    flip_renames = False
    _store: FlippingStore

    def __init__(self, store: FlippingStore, name: str, vector: str) -> None:
        super().__init__(store, name)
        self._name, self.vector = name, vector
        # The collection that the name leads to.
        self._led = self._here
        if self._led.copy_facts.get(_FLIP) == _BEGUN:
            self._here = self._original() or self._led

    def _original(self) -> Collection | None:
        """Return the collection that this one is a copy of, if it still exists."""
        name = self._here.copy_facts.get("of")
        if not name or name == self._here.name or not self._store.exists(name):
            return None
        return self._store.open_collection(name)

    @property
    def flip_name(self) -> str:
        """Return the collection that the name leads to.

        Raises:
            InvalidInputError: The name cannot flip, or the server refuses the request.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
        """
        if obstacles := self._store.flip_obstacles(self._name, self._here):
            raise InvalidInputError(
                f"{self._name}: searches cannot flip to new vectors: {'; '.join(obstacles)}"
            )
        return self._here.name

    def warnings(self, new_name: str) -> list[str]:
        """Return no sentences: a copy has no side effects.

        Args:
            new_name: Ignored.
        """
        return []

    def flip_obstacles(self, target: Target) -> list[str]:
        """Return sentences about what prevents a flip of the name; empty if nothing does.

        Args:
            target: Ignored: every copy has the same obstacles.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """
        sentences = self._store.flip_obstacles(self._name, self._here)
        if (original := self._original()) is not None:
            sentences.append(
                f"the collection {original.name!r} is left over from an earlier flip: end that "
                "migration with `nobackfill migrate finish` or `nobackfill migrate back`"
            )
        return sentences

    def open_target(self, target: Target) -> "FlippingCopy":
        """Create an empty copy of the collection, or open that of an earlier run of this map.

        A copy that a killed `flip_back` left is deleted first. The dimension of an existing copy is
        not checked.

        Raises:
            AlreadyExistsError: The name belongs to another collection, or to a copy by another map.
                Another program made a collection of the name meanwhile.
            InvalidInputError: The collection holds the vectors of this map already. The store
                refuses the name or the dimension.
            CannotWriteError: The store cannot be written.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
        """
        if self._here.copy_facts.get("map") == target.computer_digest:
            raise InvalidInputError(
                f"{self._here.name}: this collection holds the vectors of this map already, so "
                "nothing is left to do"
            )
        if self._store.exists(target.name):
            found = self._store.open_collection(target.name)
            if self._is_copy(found) and found.copy_facts.get(_FLIP) == _BACK:
                self._store.drop(found.name)
        copy = self._open_copy(target)
        self._store.complete_copy(copy, self._here)
        return FlippingCopy(self._store, self._here, copy, self._name)

    def _is_copy(self, other: Collection) -> bool:
        """Tell whether a collection is a copy of this one, or of the same original as this one."""
        originals = {self._here.name, self._here.copy_facts.get("of")} - {None, ""}
        return other.name != self._here.name and other.copy_facts.get("of") in originals

    def drop_new_vectors(self, name: str) -> bool:
        """Delete a copy of the collection. A flip to it that was killed is taken back.

        Returns:
            False, and nothing changes, if the name is no copy of it, or it has flipped to the copy.

        Raises:
            InvalidInputError: A flip was killed, and programs wrote items into the copy since it
                began. The server refuses the request.
            CannotWriteError: The store cannot be written.
            NotFoundError: The copy was deleted meanwhile.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
        """
        if not self._store.exists(name):
            return False
        found = self._store.open_collection(name)
        if not self._is_copy(found):
            return False
        if found.name == self._led.name:
            if any(_is_written(found, window) for window in found.windows(_PAGE)):
                raise InvalidInputError(
                    f"{self._name}: a flip to {name!r} was killed, and programs have written "
                    "items since; run the same `nobackfill migrate` again to complete the flip, "
                    "then run `nobackfill migrate back`"
                )
            self._store.redirect_name(self._name, self._here.name)
            self._led = self._here
        self._store.drop(found.name)
        return True

    def count_vectors(self, column: str) -> int:
        """Count the items of a copy, also after the flip to it; 0 if no copy has this name.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The copy was deleted meanwhile.
            InvalidInputError: The server refuses the request.
        """
        if not self._store.exists(column):
            return 0
        found = self._store.open_collection(column)
        return found.count() if found.name == self._here.name or self._is_copy(found) else 0

    def refuse_other(self, name: str) -> None:
        """Raise AlreadyExistsError if a name for new vectors belongs to another collection.

        Raises:
            AlreadyExistsError: It does.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted meanwhile.
            InvalidInputError: The server refuses the request.
        """
        if self._store.exists(name) and not self._is_copy(self._store.open_collection(name)):
            raise AlreadyExistsError(
                f"{self._name}: the new vectors go into a collection {name!r}, but another one of "
                "this name exists; rename or delete it"
            )

    def refuse_moved(self, to: str) -> None:
        """Raise PreconditionError if the owner let the name lead away from a migration's vectors.

        Call it where no flip is recorded: the name must lead to the original.

        Args:
            to: Name of the migration's copy, which begins with that of the original.

        Raises:
            PreconditionError: The name leads to a third collection.
            InvalidInputError: The name cannot flip.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
        """
        if f"{self.flip_name}_new" == to:
            return
        to_new = self._store.redirect_command(self._name, to)
        to_old = self._store.redirect_command(self._name, to.removesuffix("_new"))
        raise PreconditionError(
            f"{self._name}: this name leads to the collection {self.flip_name!r} now, which this "
            "migration has neither read nor written, so nothing was changed. Let it lead to the "
            f"new vectors again by {to_new}, or to the old ones by {to_old}, then run this "
            "command again"
        )

    def record_model(self, model: str) -> None:
        """Record the fingerprint of the model of the vectors; an earlier one is replaced.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """
        self._store.record_facts(self._here.name, {"model": model})

    def migration_lock(self) -> AbstractContextManager[Callable[[], None]]:
        """Keep other migrations of the collection out, as its store can.

        Raises:
            BusyError: Another migration holds the lock, or the server has too many requests.
            CannotWriteError: The lock file cannot be created.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            NotFoundError: The collection was deleted.
        """
        # Before and after the flip, by whatever name.
        return self._store.lock_name((self._original() or self._here).name)

    def read_migration_digest(self, column: str) -> str | None:
        """Return the digest of the map of a copy; None after a flip to it, and for other names.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted meanwhile.
            InvalidInputError: The server refuses the request.
        """
        if not self._store.exists(column):
            return None
        found = self._store.open_collection(column)
        return found.copy_facts.get("map") if self._is_copy(found) else None

    def flip_digest(self) -> str | None:
        """Return the digest of the map that computed the collection's own vectors; None if none
        did.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """
        return self._here.copy_facts.get("map")

    def flip_state(self, computer_digest: str) -> Literal["old", "flipped", "finished", "unknown"]:
        """Return whether the name leads to the vectors of a map: old, flipped, finished (the
        original is deleted) or unknown.

        A flip that was killed counts as old. It is unknown where the original of a flip to other
        vectors exists.

        Args:
            computer_digest: Digest of the map of the new vectors.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection was deleted.
            InvalidInputError: The server refuses the request.
        """
        original = self._original()
        if self.flip_digest() != computer_digest:
            return "old" if original is None else "unknown"
        return "finished" if original is None else "flipped"

    def flip_back(self, new_name: str, *, allow_loss: bool = False) -> int:
        """Let the name lead to the original again, and delete the copy.

        An item counts as written since the flip if the original lacks it, or if it is not as
        `carry` wrote it. An item that was deleted from the copy is deleted from the original, and
        is not counted. A killed call can be repeated.

        Args:
            new_name: Name of the copy.
            allow_loss: Go on where items were written since the flip: they are lost.

        Returns:
            The number of items that were lost.

        Raises:
            NotFoundError: There is no original, or the name does not lead to `new_name`.
            InvalidInputError: Items were written since the flip, also during this call, and
                `allow_loss` is False; the name leads to the copy then. The server refuses the
                request.
            CannotWriteError: The store cannot be written.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
        """
        copy, original = self._here, self._original()
        if original is None or copy.name != new_name:
            raise NotFoundError(
                f"{self._name}: there is no collection of old vectors, so there is no flip to "
                f"{new_name!r} that can be undone"
            )
        losses, gone, digests = 0, list[Any](), list[NDArray[np.uint64]]()
        for window in original.windows(_PAGE):
            old = {one.key: one for one in original.records(window)}
            notes = copy.digests(window)
            new = {one.key: one for one in copy.records(window)}
            written = {
                key
                for key, one in new.items()
                if key not in old or not _is_unchanged(old[key], one, notes.get(key, ""))
            }
            losses += len(written)
            digests.append(_short(list(new.values())))
            gone += [key for key in old if key in written or key not in new]
        refuse_lost_vectors(self._name, losses, "items", allow_loss=allow_loss)
        if gone:
            self._remove_old(original, gone)
        self._store.record_facts(copy.name, {_FLIP: _BACK})
        self._store.redirect_name(self._name, original.name)
        if not allow_loss:
            self._refuse_writes_since(np.concatenate(digests), copy)
        self._here = self._led = original
        self._store.drop(copy.name)
        return losses

    def _remove_old(self, original: Collection, keys: Sequence[Any]) -> None:
        """Delete items of the original that the copy does not have any more."""
        original.remove(keys)

    def _refuse_writes_since(self, digests: NDArray[np.uint64], copy: Collection) -> None:
        """Let the name lead to the copy again if programs wrote it before the name led away.

        Args:
            digests: Short digests of the items that it had when it was compared.
            copy: The copy.

        Raises:
            InvalidInputError: They did.
        """
        losses = sum(
            int((~np.isin(_short(copy.records(window)), digests)).sum())
            for window in copy.windows(_PAGE)
        )
        if losses:
            self._store.redirect_name(self._name, copy.name)
            self._store.record_facts(copy.name, {_FLIP: _DONE})
            raise InvalidInputError(
                f"{self._name}: {losses} items were written while the migration was being undone, "
                "so nothing was undone. Stop the programs that write, and run `nobackfill "
                "migrate back` again, or with --yes to lose these items"
            )

    def drop_old(self) -> None:
        """Delete the original after a flip; the flip cannot be undone then.

        Raises:
            NotFoundError: There is no original.
            InvalidInputError: Another name leads to it, or the server refuses the request.
            CannotWriteError: The store cannot be written.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
        """
        if (original := self._original()) is None:
            raise NotFoundError(
                f"{self._name}: there are no old vectors to drop, so nothing was changed"
            )
        self._store.drop(original.name)
        # A later collection of that name is no original of this one.
        self._store.record_facts(self._here.name, {"of": ""})


class FlippingCopy(CollectionCopy):
    """The Flippable of a FlippingSource.

    Every method may also raise the errors of a Collection, for the original or the copy.

    Args:
        store: The store.
        source: The original.
        copy: The copy.
        name: The name that flips.

    Attributes:
        flipped: Whether this object has flipped.
        writers_put_new_vectors: False: items of writers are told from ours.
    """

    writers_put_new_vectors = False
    _store: FlippingStore

    def __init__(
        self, store: FlippingStore, source: Collection, copy: Collection, name: str
    ) -> None:
        super().__init__(store, source, copy)
        self._name, self.flipped = name, False
        self._known: NDArray[np.uint64] | None = None

    def pending(self, window: Window) -> Rows:
        """Delete copies of deleted and changed items; then read the items without a copy.

        An item that a writer put into the copy is never pending, and never deleted. During the flip
        an item without a copy is pending only if it was added or changed since the flip began:
        programs may have deleted the others. The whole collection is read in pieces.

        Raises:
            InvalidInputError: An item has no vector, or the vectors have several dimensions; stale
                copies are deleted already. The server refuses the request.
            CannotWriteError: A copy cannot be deleted.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection or its copy was deleted.
        """
        windows = self._source.windows(_PAGE) if window == Window() else [window]
        records = [one for some in windows for one in self._left(some)]
        return rows_from_records(records, self._source.name)

    def _left(self, window: Window) -> list[Record]:
        notes = {} if self._known is None else self._copy.digests(window)
        left = super()._left(window)
        if self._known is None or not left:
            return left
        fresh = ~np.isin(_short(left), self._known)
        return [
            one
            for one, is_fresh in zip(left, fresh.tolist(), strict=True)
            if is_fresh or notes.get(one.key, one.digest)[:DIGEST] != one.digest
        ]

    def read(self, window: Window) -> Rows:
        """Read the new vectors of a window that nobackfill wrote; those of writers are left out.

        Since a flip began, programs may have replaced some of ours, and some stores keep our note.

        Raises:
            InvalidInputError: An item has no vector, or the vectors have several dimensions. The
                server refuses the request.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The copy was deleted.
        """
        rows = super().read(window)
        if self._copy.copy_facts.get(_FLIP) != _BEGUN:
            return rows
        notes = self._copy.digests(window)
        records = [one for one in rows.keys if isinstance(one, Record)]
        ours = [
            one for one in records if matches_sketch(one.vector, notes.get(one.key, "")[DIGEST:])
        ]
        return rows_from_records(ours, self._copy.name)

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Put copies of items with their new vectors; delete those whose original is gone now.

        A change between the read and the write is found by the next `pending`. An item that a
        writer has put into the copy since the flip began stays.

        Args:
            rows: Rows of `pending`; their keys are Records.
            vectors: Their new vectors, float32 [n, dim].

        Raises:
            CannotWriteError: The store cannot be written.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection or its copy was deleted.
            InvalidInputError: The server refuses the items, as vectors of another dimension.
        """
        if self._known is not None and len(rows):
            keys = [one.key for one in rows.keys if isinstance(one, Record)]
            theirs = self._copy.existing_keys(keys)
            left = [row for row, key in enumerate(keys) if key not in theirs]
            rows, vectors = rows.select(left), vectors[left]
        if len(rows):
            super().write(rows, vectors)

    def prepare_flip(self) -> AbstractContextManager[None]:
        """Wait until searches of the copy are as fast as they will be.

        Raises:
            BusyError: The store still builds an index, or the server has too many requests.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            NotFoundError: The copy was deleted.
            InvalidInputError: The server refuses the request.
        """
        self._store.wait_for_index(self._copy)
        return nullcontext()

    @contextmanager
    def open_flip(self) -> Iterator[None]:
        """Let the name lead to the copy; the block writes what changed in the original meanwhile.

        If the block raises, the name leads to the original again. A killed flip continues when it
        is repeated.

        Raises:
            NotFoundError: The collection, its copy or the name was deleted.
            UnavailableError: The server does not answer; the name may lead to the copy.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            InvalidInputError: The server refuses the request.
        """
        copy, source = self._copy.name, self._source.name
        self._known = self._copied()
        self._store.record_facts(copy, {_FLIP: _BEGUN})
        self._store.redirect_name(self._name, copy)
        try:
            yield
        except BaseException:
            self._store.redirect_name(self._name, source)
            raise
        finally:
            self._known = None
        self._store.record_facts(copy, {_FLIP: _DONE})
        self.flipped = True

    def _copied(self) -> NDArray[np.uint64]:
        """Return a short digest of each item of the original that has a current copy."""
        parts = [np.empty(0, np.uint64)]
        for window in self._source.windows(_PAGE):
            notes = self._copy.digests(window)
            records = self._source.records(window)
            there = [one for one in records if one.key in notes]
            parts.append(
                _short([one for one in there if notes[one.key][:DIGEST] in ("", one.digest)])
            )
        return np.concatenate(parts)

    def owner_tasks(self) -> list[str]:
        """Return sentences that name the owner's tasks after the flip.

        Raises:
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the key.
            BusyError: The server has too many requests.
            NotFoundError: The collection or its copy was deleted.
            InvalidInputError: The server refuses the request.
        """
        return self._store.owner_tasks(self._name, self._source, self._copy)


def _is_written(copy: Collection, window: Window) -> bool:
    """Tell whether a program has written an item of a copy in a window."""
    notes = copy.digests(window)
    return "" in notes.values() or any(
        not matches_sketch(one.vector, notes.get(one.key, "")[DIGEST:])
        for one in copy.records(window)
    )


def _is_unchanged(old: Record, new: Record, note: str) -> bool:
    """Tell whether an item of the copy is as it was written, from the present original."""
    values = replace(old, other_values=new.other_values, partition=new.partition)
    return old.digest == note[:DIGEST] == values.digest and (
        matches_sketch(new.vector, note[DIGEST:])
    )


def _short(records: Sequence[Record]) -> NDArray[np.uint64]:
    """Return a digest of 64 bits of each item, with its key."""
    return np.array(
        [int(one.digest[:16], 16) ^ (hash(one.key) & 0xFFFFFFFFFFFFFFFF) for one in records],
        np.uint64,
    )
