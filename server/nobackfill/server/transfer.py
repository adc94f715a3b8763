"""Galleries and a vault carried from one store to another, beside a gateway that serves the first.

Page by page, in the order of labels, what differs is written and what is gone is removed; the same
again writes only what changed meanwhile. The last time is once the gateway has ended: then both
are alike, which is checked, and the gateway's state goes along.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nobackfill import durable
from nobackfill.digests import sha256_file
from nobackfill.errors import (
    AlreadyExistsError,
    ConfigurationError,
    PreconditionError,
    VerificationError,
    few,
)
from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.listing import ListingPlace
from nobackfill.gallery.reading import StoredItem, StoredVectors
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.server.state import State
from nobackfill.server.storage import Storage
from nobackfill.server.vault import PART

_PAGE = 1000
# Bytes of a blob that are copied at once.
_CHUNK = 4 * 2**20
# Items whose vectors are compared at the end.
_SAMPLE = 200


@dataclass
class Transferred:
    """`items` of the gallery, of which `written` differed and `deleted` were gone; `alike`: what
    the two hold was the same at the end."""

    items: int = 0
    written: int = 0
    deleted: int = 0
    alike: bool = False


def specs_of(source: GalleryStore) -> list[SpaceSpec]:
    """The spaces to make a target with: those that were active before, then the active one."""
    kept = [info for info in source.spaces() if info.state != "staging"]
    return [info.spec for info in sorted(kept, key=lambda info: info.activated)]


def transfer(source: GalleryStore, target: GalleryStore) -> Transferred:
    """Make `target`, which nobody serves, hold what `source` holds.

    Raises what the stores raise; until then everything that was written stays, and doing it again
    is right.
    """
    done = Transferred()
    _spaces(source, target)
    active = source.active().spec.space
    for items in _pages(source, active):
        done.items += len(items)
        done.written += _page(source, target, items)
    for items in _pages(target, active):
        there = {item.id for item in _by_ids(source, [item.id for item in items])}
        done.deleted += target.delete([item.id for item in items if item.id not in there])
    target.state_set(dict.fromkeys(target.state()) | source.state())
    done.alike = _alike(source, target) and not _differing(source, target, active)
    return done


def _spaces(source: GalleryStore, target: GalleryStore) -> None:
    """The spaces of the source, in its states."""
    there = {info.spec.space: info.state for info in target.spaces()}
    wanted = source.spaces()
    for info in wanted:
        if info.spec.space not in there:
            target.begin(info.spec)
    active = source.active().spec.space
    if target.active().spec.space != active:
        target.flip(active, leave_behind=True)
    for space in set(there) - {info.spec.space for info in wanted}:
        target.drop(space)


def _pages(store: GalleryStore, space: str) -> Iterator[list[StoredItem]]:
    after: ListingPlace | None = None
    while True:
        found, after = store.page(space, _PAGE, after=after)
        if found:
            yield [item for item, _ in found]
        if after is None:
            return


def _by_ids(store: GalleryStore, ids: Sequence[str]) -> list[StoredItem]:
    return [item for item in store.items(store.labels_of(ids)) if item is not None]


def _page(source: GalleryStore, target: GalleryStore, items: Sequence[StoredItem]) -> int:
    """Write what differs of some items; how many did."""
    ids = [item.id for item in items]
    there = {item.id: item for item in _by_ids(target, ids)}
    new = [item for item in items if not _same(item, there.get(item.id))]
    if new:
        target.put(
            [item.id for item in new], [], digests=[item.digest for item in new],
            metadata=[item.metadata for item in new],
        )  # fmt: skip
        there = {item.id: item for item in _by_ids(target, ids)}
    written = {item.id for item in new}
    of_target = {item.label: there[item.id].label for item in items if item.id in there}
    names = {item.label: item.id for item in items}
    for info in source.spaces():
        space = info.spec.space
        rows = source.stored(np.array([*of_target], np.int64), space)
        labels = np.array([of_target[label] for label in rows.labels.tolist()], np.int64)
        kept = target.stored(labels, space)
        known = {label: kept.row(row) for row, label in enumerate(kept.labels.tolist())}
        differ = [
            row for row, label in enumerate(labels.tolist()) if known.get(label) != rows.row(row)
        ]
        written.update(names[label] for label in rows.labels[differ].tolist())
        _write(target, space, labels, rows, np.array(differ, np.intp), info.spec.side_dim)
    return len(written)


def _same(item: StoredItem, other: StoredItem | None) -> bool:
    return other is not None and (item.digest, item.metadata) == (other.digest, other.metadata)


def _write(
    target: GalleryStore, space: str, labels: Labels, rows: StoredVectors,
    differ: np.ndarray[tuple[int], np.dtype[np.intp]], side_dim: int,
) -> None:  # fmt: skip
    for some in rows.alike(differ):
        sides = b"".join(rows.sides[row] or b"" for row in some.tolist())
        doubt = [rows.uncertainties[row] for row in some.tolist()]
        target.write(
            space, labels[some], rows.embedding[some],
            side=np.frombuffer(sides, "<f4").reshape(len(some), side_dim) if sides else None,
            uncertainty=None if doubt[0] is None else np.array(doubt, np.float64),
            origin=rows.origins[int(some[0])], replace=True,
        )  # fmt: skip


def _alike(source: GalleryStore, target: GalleryStore) -> bool:
    """Whether states of spaces, and counts of items and of each space's vectors are the same."""
    states = [{i.spec: i.state for i in store.spaces()} for store in (source, target)]
    spaces = [None, *(info.spec.space for info in source.spaces())]
    return states[0] == states[1] and all(
        source.count(space) == target.count(space) for space in spaces
    )


def _differing(source: GalleryStore, target: GalleryStore, space: str) -> int:
    """Of some items at random, how many have another vector in a space, or none."""
    labels, _, _ = source.sample(space, space, _SAMPLE)
    names = {item.id: item.label for item in source.items(labels) if item is not None}
    there = {item.label: names[item.id] for item in _by_ids(target, [*names])}
    first = source.stored(labels, space)
    second = target.stored(np.array([*there], np.int64), space)
    rows = {label: first.row(row) for row, label in enumerate(first.labels.tolist())}
    good = sum(
        rows.get(there[label]) == second.row(row)
        for row, label in enumerate(second.labels.tolist())
    )
    return len(rows) - good


def blobs_of(vault: Path) -> dict[Path, int]:
    """Bytes of each whole blob of a vault's folder, by its path below that."""
    found = {}
    for path in vault.glob("*/??/*"):
        if path.suffix != PART and not path.name.startswith(durable.TEMPORARY):
            with suppress(FileNotFoundError):
                found[path.relative_to(vault)] = path.stat().st_size
    return found


def vaults_of(source: Path | None, target: Path | None) -> tuple[Path, Path] | None:
    """The folders of the vaults that belong to two data folders; None where both are one, or there
    is nothing to carry.

    Raises ConfigurationError where a vault's folder is not known, or the target lies inside the
    source, AlreadyExistsError where another
    gateway has served from the target.
    """
    if source is None:
        raise ConfigurationError(
            "--from is a database, and the vault lies in its gateway's data folder; name that "
            "with --from-data FOLDER"
        )
    blobs = len(blobs_of(source / "vault"))
    if target is None:
        if blobs == 0:
            return None
        raise ConfigurationError(
            f"{source / 'vault'} holds {blobs} blobs, and --to is a database, which keeps no "
            "vault; name the data folder of the gateway that will serve it with --to-data FOLDER"
        )
    if target.resolve() == source.resolve():
        return None
    durable.refuse_inside(target, source)
    if (target / "trust").exists():
        raise AlreadyExistsError(
            f"{target}: a gateway has served from it, and its vault would be lost; give an empty "
            "folder"
        )
    return source / "vault", target / "vault"


def transfer_vault(source: Path, target: Path) -> Transferred:
    """Make the vault in folder `target`, which nobody serves, hold what the one in `source` holds.

    Uploads that are not whole stay behind: devices begin them anew. Raises VerificationError for a
    blob that is damaged, CannotWriteError.
    """
    done = Transferred()
    wanted, there = blobs_of(source), blobs_of(target)
    for path in there.keys() - wanted.keys():
        durable.remove_tree(target / path)
        done.deleted += 1
    for path, size in wanted.items():
        done.items += 1
        if there.get(path) != size:
            # Deleted meanwhile, if a gateway serves it.
            with suppress(FileNotFoundError):
                _copy_blob(source / path, target / path)
                done.written += 1
    done.alike = blobs_of(source) == blobs_of(target)
    return done


def _copy_blob(source: Path, target: Path) -> None:
    part = target.with_name(f"{durable.TEMPORARY}{target.name}")
    with source.open("rb") as handle:
        durable.make_dir(target.parent, 0o700)
        durable.remove_tree(part)
        while chunk := handle.read(_CHUNK):
            durable.append(part, chunk, 0o600)
    if sha256_file(part) != target.suffix[1:]:
        durable.remove_tree(part)
        raise VerificationError(
            f"{source}: the blob is damaged; delete the file, and let its device push again"
        )
    durable.replace(part, target)


def transfer_all(
    source: Storage, target: Storage, vaults: tuple[Path, Path] | None, *, with_state: bool
) -> tuple[dict[str, Transferred], Transferred | None]:
    """Every gallery, by name, and the vault in the first of the folders `vaults` into the second,
    if given. `with_state`: nobody serves the source, so this is the last time.

    Raises PreconditionError where no gateway has served, and during an activation,
    AlreadyExistsError where one has served the target, VerificationError where the last time leaves
    the two unlike.
    """
    if source.state.current.active is None:
        raise PreconditionError("no gateway has served from --from; look at its address")
    if target.state.current != State():
        raise AlreadyExistsError(
            "a gateway has served from --to, and what it holds would be lost; give an empty one"
        )
    if source.state.current.activation is not None:
        raise PreconditionError(
            "a release is being activated there; move when that has ended, or was rolled back"
        )
    names = list(source.home.names())
    target.home.sweep()
    there = set(target.home.names())
    for name in there - set(names):
        target.home.remove(name)()
    done = {}
    for name in names:
        with closing(source.home.open(name)) as old:
            if name not in there:
                target.home.create(name, specs_of(old.store), {})
            with closing(target.home.open(name)) as new:
                done[name] = transfer(old.store, new.store)
    vault = None if vaults is None else transfer_vault(*vaults)
    if with_state:
        unlike = [name for name, one in done.items() if not one.alike]
        if vault is not None and not vault.alike:
            unlike.append("the vault")
        if unlike:
            raise VerificationError(f"{few(unlike)}: not alike in both stores; move again")
        target.state.change(**dict(source.state.current))
    return done, vault
