"""Move galleries and a vault from one store to another, while a gateway may serve the first.

Pages are compared in the order of labels: differences are written, and deleted items removed. A
second run writes only later changes. The last run, once the gateway has stopped, checks that both
stores are equal, and copies the gateway's state.
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
    join_few,
)
from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.listing import ListingPosition
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_file import StoredItem, StoredVectors
from nobackfill.server.state import State
from nobackfill.server.storage import Storage
from nobackfill.server.vault import PART

_PAGE = 1000
# Bytes of a blob that are copied at once.
_CHUNK = 4 * 2**20
# Items whose vectors are compared at the end.
_SAMPLE = 200


@dataclass
class TransferReport:
    """Report the transfer of a gallery or a vault.

    Attributes:
        item_count: items, or blobs, of the source.
        written_count: items of the source that the target lacked or had otherwise, and that were
            written.
        deleted_count: items that the source lacks, and that were removed from the target.
        is_identical: both stores were equal when they were compared at the end.
    """

    item_count: int = 0
    written_count: int = 0
    deleted_count: int = 0
    is_identical: bool = False

    def to_json(self) -> dict[str, int | bool]:
        """Return the values by the names of `--json`: items, written, deleted and alike."""
        return {
            "items": self.item_count,
            "written": self.written_count,
            "deleted": self.deleted_count,
            "alike": self.is_identical,
        }


def space_specs(source: GalleryStore) -> list[SpaceSpec]:
    """Return the spaces for a new target: earlier active ones in the order of their activation,
    then the active one. Spaces of an unfinished upgrade are left out.

    Raises:
        NotFoundError: the gallery is closed or deleted.
        BusyError, UnavailableError: the store is busy, or does not answer.
        VerificationError: the store is damaged.
        CannotWriteError: the file cannot be opened, or the disk fails.
        ConfigurationError: the database refuses the statement, as without rights.
    """
    infos = [info for info in source.spaces() if info.state != "staging"]
    return [info.spec for info in sorted(infos, key=lambda info: info.activation_rank)]


def transfer_gallery(source: GalleryStore, target: GalleryStore) -> TransferReport:
    """Make one gallery equal to another: spaces, items, metadata, vectors and state.

    Items of the target that the source lacks are deleted, and so are its spaces and keys of state.
    A vector that only the target has of an item stays; `is_identical` is then False. A gateway may
    serve the source; changes that it makes during the run may be missed. Running it again after an
    error is safe: earlier writes stay, and equal items are not written.

    Args:
        source: the source; it is only read.
        target: the target, which no gateway serves.

    Returns:
        The numbers of items; `is_identical` compares spaces and counts, and the vectors of 200
        random items.

    Raises:
        BusyError: a store is locked; run it again.
        UnavailableError: a store does not answer.
        CannotWriteError: the target cannot be written.
        NotFoundError: a gallery was deleted.
        VerificationError: a gallery is damaged.
        ConfigurationError: a database refuses a statement, as without rights.
        InvalidInputError: the target has a space of the same id with another release, dimension,
            metric or norm, or the space has too many dimensions for a database.
    """
    result = TransferReport()
    _copy_spaces(source, target)
    active = source.active().spec.space
    for items in _item_pages(source, active):
        result.item_count += len(items)
        result.written_count += _copy_page(source, target, items)
    for items in _item_pages(target, active):
        present = {item.id for item in _items_by_id(source, [item.id for item in items])}
        result.deleted_count += target.delete([item.id for item in items if item.id not in present])
    target.update_state(dict.fromkeys(target.state()) | source.state())
    result.is_identical = _is_equal(source, target) and not _count_different(source, target, active)
    return result


def _copy_spaces(source: GalleryStore, target: GalleryStore) -> None:
    """Give the target the spaces of the source, in the same states."""
    states = {info.spec.space: info.state for info in target.spaces()}
    infos = source.spaces()
    for info in infos:
        if info.spec.space not in states:
            target.add_staging_space(info.spec)
    active = source.active().spec.space
    if target.active().spec.space != active:
        target.flip(active, leave_behind=True)
    for space in set(states) - {info.spec.space for info in infos}:
        target.drop_space(space)


def _item_pages(store: GalleryStore, space: str) -> Iterator[list[StoredItem]]:
    place: ListingPosition | None = None
    while True:
        entries, place = store.list_page(space, _PAGE, start_after=place)
        if entries:
            yield [item for item, _ in entries]
        if place is None:
            return


def _items_by_id(store: GalleryStore, ids: Sequence[str]) -> list[StoredItem]:
    return [item for item in store.items(store.labels_of(ids)) if item is not None]


def _copy_page(source: GalleryStore, target: GalleryStore, items: Sequence[StoredItem]) -> int:
    """Write the items of a page that differ; returns their number."""
    ids = [item.id for item in items]
    present = {item.id: item for item in _items_by_id(target, ids)}
    new = [item for item in items if not _is_same_item(item, present.get(item.id))]
    if new:
        target.put(
            [item.id for item in new], [], digests=[item.digest for item in new],
            metadata=[item.metadata for item in new],
        )  # fmt: skip
        present = {item.id: item for item in _items_by_id(target, ids)}
    written = {item.id for item in new}
    of_target = {item.label: present[item.id].label for item in items if item.id in present}
    names = {item.label: item.id for item in items}
    for info in source.spaces():
        space = info.spec.space
        rows = source.stored_vectors(np.array([*of_target], np.int64), space)
        labels = np.array([of_target[label] for label in rows.labels.tolist()], np.int64)
        target_rows = target.stored_vectors(labels, space)
        rows_by_label = {
            label: target_rows.comparable_row(row)
            for row, label in enumerate(target_rows.labels.tolist())
        }
        differ = [
            row
            for row, label in enumerate(labels.tolist())
            if rows_by_label.get(label) != rows.comparable_row(row)
        ]
        written.update(names[label] for label in rows.labels[differ].tolist())
        _write_differing(target, space, labels, rows, np.array(differ, np.intp), info.spec.side_dim)
    return len(written)


def _is_same_item(item: StoredItem, other: StoredItem | None) -> bool:
    return other is not None and (item.digest, item.metadata) == (other.digest, other.metadata)


def _write_differing(
    target: GalleryStore, space: str, labels: Labels, rows: StoredVectors,
    differ: np.ndarray[tuple[int], np.dtype[np.intp]], side_dim: int,
) -> None:  # fmt: skip
    for group in rows.writable_groups(differ):
        sides = b"".join(rows.side_blobs[row] or b"" for row in group.tolist())
        uncertainties = [rows.uncertainties[row] for row in group.tolist()]
        target.write_vectors(
            space, labels[group], rows.embedding[group],
            side=np.frombuffer(sides, "<f4").reshape(len(group), side_dim) if sides else None,
            uncertainty=None if uncertainties[0] is None else np.array(uncertainties, np.float64),
            origin=rows.origins[int(group[0])], replace=True,
        )  # fmt: skip


def _is_equal(source: GalleryStore, target: GalleryStore) -> bool:
    """Tell whether both have the same states of spaces, and as many items and vectors."""
    states = [{info.spec: info.state for info in store.spaces()} for store in (source, target)]
    spaces = [None, *(info.spec.space for info in source.spaces())]
    return states[0] == states[1] and all(
        source.count(space) == target.count(space) for space in spaces
    )


def _count_different(source: GalleryStore, target: GalleryStore, space: str) -> int:
    """Return how many of some random items have another vector in a space, or none."""
    labels, _, _ = source.sample_pairs(space, space, _SAMPLE)
    names = {item.id: item.label for item in source.items(labels) if item is not None}
    source_labels = {item.label: names[item.id] for item in _items_by_id(target, [*names])}
    first = source.stored_vectors(labels, space)
    second = target.stored_vectors(np.array([*source_labels], np.int64), space)
    rows = {label: first.comparable_row(row) for row, label in enumerate(first.labels.tolist())}
    equal = sum(
        rows.get(source_labels[label]) == second.comparable_row(row)
        for row, label in enumerate(second.labels.tolist())
    )
    return len(rows) - equal


def blob_sizes(vault_folder: Path) -> dict[Path, int]:
    """Return the size in bytes of each complete blob of a vault, by its path in the vault, in any
    order.

    A missing vault has no blobs. Blobs that are deleted during the call are left out.

    Unfinished uploads are left out, and nothing is verified.

    Raises:
        OSError: a blob's size cannot be read.
    """
    sizes = {}
    for path in vault_folder.glob("*/??/*"):
        if path.suffix != PART and not path.name.startswith(durable.TEMPORARY_PREFIX):
            with suppress(FileNotFoundError):
                sizes[path.relative_to(vault_folder)] = path.stat().st_size
    return sizes


def vault_folders(source: Path | None, target: Path | None) -> tuple[Path, Path] | None:
    """Return the vaults of two data folders, the folders `vault` in them, source first; neither
    need exist.

    Returns None if there is nothing to copy: both are one folder, or the target has no folder and
    the source's vault is empty.

    Args:
        source: data folder of the source; None for a database without one.
        target: data folder of the target; None for a database without one.

    Raises:
        ConfigurationError: a data folder is unknown, or the target is inside the source.
        AlreadyExistsError: another gateway has served from the target.
        OSError: a blob's size in the source's vault cannot be read.
        RuntimeError: a data folder is a loop of links.
    """
    if source is None:
        raise ConfigurationError(
            "--from is a database, and its vault is in the gateway's data folder; name that folder "
            "with --from-data"
        )
    blobs = len(blob_sizes(source / "vault"))
    if target is None:
        if blobs == 0:
            return None
        raise ConfigurationError(
            f"{source / 'vault'} has {blobs} blobs, and --to is a database, which stores no "
            "vault; name the data folder of the gateway that will serve it with --to-data FOLDER"
        )
    if target.resolve() == source.resolve():
        return None
    durable.refuse_copy_into_itself(target, source)
    if (target / "trust").exists():
        raise AlreadyExistsError(
            f"{target}: a gateway has served from this folder, and its vault would be replaced; "
            "name a new folder with --to-data"
        )
    return source / "vault", target / "vault"


def transfer_vault(source_folder: Path, target_folder: Path) -> TransferReport:
    """Make a vault equal to another; the digest of each copied blob is checked.

    A blob of the same name and size counts as equal, and is not read. Blobs of the target that the
    source lacks are deleted. Unfinished uploads are left out; devices upload them again. Running it
    again after an error is safe.

    Args:
        source_folder: its vault may be served meanwhile; a missing one has no blobs.
        target_folder: its vault is not served; it is created with the first blob.

    Returns:
        The numbers of blobs; `is_identical` compares names and sizes.

    Raises:
        VerificationError: a blob is damaged, or cannot be read; those before it are copied.
        CannotWriteError: the target cannot be written.
        OSError: the size of a blob cannot be read, or a copy that was just written.
    """
    result = TransferReport()
    source_blobs, target_blobs = blob_sizes(source_folder), blob_sizes(target_folder)
    for path in target_blobs.keys() - source_blobs.keys():
        durable.remove_tree(target_folder / path)
        result.deleted_count += 1
    for path, size in source_blobs.items():
        result.item_count += 1
        if target_blobs.get(path) != size:
            # It may have been deleted in the meantime.
            with suppress(FileNotFoundError):
                _copy_blob(source_folder / path, target_folder / path)
                result.written_count += 1
    result.is_identical = blob_sizes(source_folder) == blob_sizes(target_folder)
    return result


def _copy_blob(source: Path, target: Path) -> None:
    part = target.with_name(f"{durable.TEMPORARY_PREFIX}{target.name}")
    try:
        with source.open("rb") as handle:
            durable.make_dir(target.parent, 0o700)
            durable.remove_tree(part)
            while chunk := handle.read(_CHUNK):
                durable.append_bytes(part, chunk, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise VerificationError(
            f"{source}: the blob cannot be read ({error.strerror}); check its permissions and the "
            "disk, then run the command again"
        ) from error
    if sha256_file(part) != target.suffix[1:]:
        durable.remove_tree(part)
        raise VerificationError(
            f"{source}: the blob is damaged: its digest is not the one in its name. "
            "Delete the file, run the command again, and push the blob from its device again"
        )
    durable.replace_file(part, target)


def transfer_all(
    source: Storage, target: Storage, vaults: tuple[Path, Path] | None, *, with_state: bool
) -> tuple[dict[str, TransferReport], TransferReport | None]:
    """Copy every gallery, and the vault, to another store.

    Galleries of the target that the source lacks are deleted. The source stays as it is. Running it
    again after an error, or before the last run, is safe. Earlier copies stay then.

    Args:
        source: the source.
        target: the target, in which no gateway has written a state.
        vaults: folders of both vaults; None copies no vault.
        with_state: the source is not served any more, so this run is the last one: differences
            raise VerificationError, and the gateway's state is written to the target. Otherwise
            differences raise nothing.

    Returns:
        The report of each gallery by name, and that of the vault; None without one.

    Raises:
        PreconditionError: the source has no active release, or an activation is under way.
        AlreadyExistsError: a gateway has served from the target.
        VerificationError: a gallery or a blob is damaged; or, after the last run, the stores are
            not equal, and no state is written.
        NotFoundError: a gallery was deleted meanwhile.
        BusyError: a store is locked; run it again.
        UnavailableError: a store does not answer.
        CannotWriteError: the target cannot be written.
        ConfigurationError: a database refuses a statement, as without rights.
        InvalidInputError: a space has too many dimensions for the database.
        OSError: a folder of galleries cannot be read.
    """
    if source.state.current.active is None:
        raise PreconditionError(
            "--from: expected a store whose gateway has an active release, found none; check its "
            "address"
        )
    if target.state.current != State():
        raise AlreadyExistsError(
            "--to: a gateway has served from this store, and its galleries would be replaced; name "
            "an empty store"
        )
    if source.state.current.activation is not None:
        raise PreconditionError(
            f"--from: release {source.state.current.activation.release} is being activated there; "
            "run the command again when `gateway watch` shows that this has ended, or end it with "
            "`gateway rollback --yes`"
        )
    names = list(source.galleries.names())
    target.galleries.remove_leftovers()
    present = set(target.galleries.names())
    for name in present - set(names):
        target.galleries.remove(name)()
    reports = {}
    for name in names:
        with closing(source.galleries.open(name)) as old:
            if name not in present:
                target.galleries.create(name, space_specs(old.store), {})
            with closing(target.galleries.open(name)) as new:
                reports[name] = transfer_gallery(old.store, new.store)
    vault = None if vaults is None else transfer_vault(*vaults)
    if with_state:
        different = [name for name, report in reports.items() if not report.is_identical]
        if vault is not None and not vault.is_identical:
            different.append("the vault")
        if different:
            raise VerificationError(
                f"{join_few(different)}: expected the same content in --from and --to, found "
                "differences; make sure that no gateway serves either store, then run the command "
                "again"
            )
        target.state.change(**dict(source.state.current))
    return reports, vault
