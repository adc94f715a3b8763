"""Maintain a gallery: remove items, set metadata, gc, verify, and rescue a damaged file."""

import contextlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile, sidecar_path
from nobackfill.client.pictures import Thumbnails
from nobackfill.client.status import disk_bytes
from nobackfill.client.sync import (
    drop_rollback_spaces,
    embedding_files,
    missing_files,
    remove_unused_models,
)
from nobackfill.client.vault import keys
from nobackfill.client.vault.queue import TABLE, VaultQueue
from nobackfill.digests import sha256_file
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    ConfigurationError,
    DamagedError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
    UnusableRowsError,
    join_few,
)
from nobackfill.gallery import staging
from nobackfill.gallery.rescue import rescue_gallery as save
from nobackfill.gallery.spec import Metadata, SpaceInfo
from nobackfill.gallery.sqlite_file import (
    refuse_leftover_log,
    vector_table_name,
    vectors_from_blobs,
)
from nobackfill.vectors import check_vectors

_ROWS = 4096
# Pages given back in one transaction; other processes can write between transactions.
_PAGES = 256


def remove(device: GalleryFile, names: Sequence[str]) -> dict[str, Any]:
    """Remove items from every space, from the file's free pages and from its log.

    Ciphertext in the outbox is deleted at once, ciphertext in the vault at the next push. The image
    files stay. Thumbnails are deleted too.

    Args:
        device: the gallery.
        names: ids, or paths; a path, relative to the working folder, stands for every item that was
            added from it. An id is tried first; none: nothing is removed.

    Returns:
        `removed`: how many items; `left_in_vault`: for how many the vault may still hold
        ciphertext, also if its upload was not complete.

    Raises:
        NotFoundError: a name is neither an id nor a path; nothing was removed; or the gallery was
            closed.
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        UnicodeEncodeError: a name is neither an id nor valid UTF-8.
    """
    ids = list(dict.fromkeys(i for name in names for i in _find(device, name)))
    removed, in_vault = delete(device, ids)
    return {"removed": removed, "left_in_vault": in_vault}


def delete(device: GalleryFile, ids: Sequence[str]) -> tuple[int, int]:
    """Remove items by id from every space, from the file's free pages and from its log.

    Ciphertext in the outbox is deleted at once, ciphertext in the vault at the next push. The image
    files stay. Thumbnails are deleted too. After an error, the call can be repeated; ciphertext may
    be gone already.

    Args:
        device: the gallery.
        ids: ids; unknown ones are ignored, but ciphertext that is left of them is deleted and
            counts. An id that is given twice counts once.

    Returns:
        How many items existed, and for how many the vault may still hold ciphertext, also if its
        upload was not complete.

    Raises:
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        NotFoundError: the gallery was closed.
    """
    queue = VaultQueue(device.store)
    outbox = sidecar_path(device.path, "outbox")
    in_vault = 0
    for item_id in ids:
        entries = [e for e in queue.entries(item_id=item_id) if e.state != "removing"]
        for entry in entries:
            # Mark the vault's row first: after a kill here, the item can be removed again.
            queue.set_state(entry.blob_id, "removing")
            durable.remove_tree(outbox / entry.blob_id)
        in_vault += bool(entries)
    items = [item for item in map(device.store.get, ids) if item is not None]
    removed = device.store.delete(ids)
    Thumbnails(device.path).delete_thumbnails(item.label for item in items)
    return removed, in_vault


def _find(device: GalleryFile, name: str) -> list[str]:
    """Return the ids of an item or of a path; a file that was edited and added again has two."""
    if device.store.get(name) is not None:
        return [name]
    with device.store.read_snapshot() as connection:
        rows = connection.execute(
            "SELECT i.id FROM items i JOIN attributes a USING (label)"
            " WHERE a.key = 'path' AND a.kind = 'text' AND a.value = ? ORDER BY label",
            (str(Path(name).absolute()),),
        ).fetchall()
    if not rows:
        raise NotFoundError(
            f"{name}: no item of this gallery has this id or path; `edge-client list` lists them"
        )
    return [item_id for (item_id,) in rows]


def change_metadata(device: GalleryFile, names: Sequence[str], notes: Metadata) -> int:
    """Set metadata of items; their other metadata and their vectors stay.

    Batches of 4,096 items are written one after another; after an error, earlier ones stay.

    Args:
        device: the gallery.
        names: ids, or paths; a path, relative to the working folder, stands for every item that was
            added from it. An id is tried first; none: nothing is changed.
        notes: the metadata to set, by key; existing values of these keys are replaced. Empty:
            nothing changes, and the items count all the same.

    Returns:
        The number of items that were written.

    Raises:
        NotFoundError: a name is neither an id nor a path; nothing was changed; or the gallery was
            closed.
        InvalidInputError: a key is path, folder or name, which locate the file; or a key or value
            is not valid, or an item's metadata would become too large.
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        UnicodeEncodeError: a name is neither an id nor valid UTF-8.
    """
    reserved = {"path", "folder", "name"} & notes.keys()
    if reserved:
        raise InvalidInputError(
            f"metadata key {join_few(sorted(reserved))}: the gallery stores the place of each "
            "item's file under this key; use another key"
        )
    ids = list(dict.fromkeys(i for name in names for i in _find(device, name)))
    items = [item for item in map(device.store.get, ids) if item is not None]
    for start in range(0, len(items), _ROWS):
        batch = items[start : start + _ROWS]
        device.store.put(
            [item.id for item in batch],
            [],
            digests=[item.digest for item in batch],
            metadata=[{**item.metadata, **notes} for item in batch],
        )
    return len(items)


def collect_garbage(device: GalleryFile) -> dict[str, Any]:
    """Run `gc`: confirm the active release, and delete what only a rollback or a killed run needs.

    Drops spaces of earlier and of unfinished releases, downloaded files without a use, and
    thumbnails and ciphertext of deleted items. With `--keep-original`, spaces with vectors that
    were embedded from images stay. Files of a running sync or push stay. No rollback is possible
    afterwards. Gives free pages back to the file system, unless another process holds the gallery
    file.

    This does not wait for a sync. After an error, a part is deleted; run it again.

    Returns:
        `dropped`: earlier releases whose space was dropped. `freed_bytes`: the difference on disk,
        negative if files grew meanwhile.

    Raises:
        BusyError: a sync is writing vectors, or another `gc` or rollback runs, or another process
            holds the gallery file.
        NotFoundError: the release of a space is not installed, or the gallery was closed.
        VerificationError: a manifest or the gallery file is damaged.
        CannotWriteError: the disk is full or read-only.
        OSError: a file of the gallery disappears meanwhile.
    """
    with device.change_lock():
        bytes_before = disk_bytes(device)
        for space in device.store.spaces():
            if space.state == "staging":
                staging.drop_space(device.store, space.spec.space)
        dropped = drop_rollback_spaces(device)
        with contextlib.suppress(BusyError), device.sync_lock():
            durable.remove_temporary_files(device.models)
            remove_unused_models(device)
        with contextlib.suppress(BusyError), device.vault_lock():
            for box in ("inbox", "outbox"):
                VaultQueue(device.store).sweep(sidecar_path(device.path, box))
        Thumbnails(device.path).delete_orphans(device.store)
        # Skipped while another process holds the file.
        with contextlib.suppress(BusyError):
            device.store.compact(_PAGES)
        return {"dropped": dropped, "freed_bytes": bytes_before - disk_bytes(device)}


def verify(device: GalleryFile) -> dict[str, Any]:
    """Check the file's pages, every vector, the models' digests, keys, ciphertext and the vault.

    Reads everything and changes nothing. Problems are reported, not raised. The vault is asked for
    its list of blobs, for at most 5 seconds a page.

    Returns:
        `items`, `vectors`: counts, None if the file is damaged. `problems`: sentences with advice;
        empty if all is well. `notes`: the reason why the vault was not checked; an unreachable
        vault is no problem of the gallery.

    Raises:
        BusyError: another process holds the gallery file, before or between the checks.
        DamagedError: the gallery's state or a row of its vault table is damaged.
        CannotWriteError: the file cannot be opened, or the disk fails.
        OSError: a model file or ciphertext cannot be read.
        NotFoundError: the gallery was closed.
    """
    problems: list[str] = []
    vectors = 0
    try:
        with device.store.read_snapshot() as connection:
            rows = connection.execute("PRAGMA integrity_check(4)").fetchall()
            pages = [line for (text,) in rows for line in text.splitlines()]
            strays = connection.execute("PRAGMA foreign_key_check").fetchall()
        if pages != ["ok"] or strays:
            damage = join_few(pages) if pages != ["ok"] else f"{len(strays)} rows belong to no item"
            raise DamagedError(device.path, damage)
        items = device.store.count()
        spaces = device.store.spaces()
        device.store.active()
    except DamagedError as error:
        # Further checks would repeat the same damage row by row.
        return {"items": None, "vectors": None, "problems": [str(error)], "notes": []}
    for space in spaces:
        if space.state == "staging" and not device.state("installed", {}).get(
            str(space.spec.release)
        ):
            # The next sync continues this space and installs its manifest at the flip.
            vectors += device.store.count(space.spec.space)
            continue
        try:
            vectors += _check_space(device, space)
            manifest = device.manifest(space.spec.release)
        except NobackfillError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{file.path}: missing or changed; run `edge-client sync` to download it again"
            for file in missing_files(device.models, embedding_files(manifest))
        ]
    problems += _check_outbox(device)
    lacking, notes = _compare_vault(device)
    problems += lacking
    return {"items": items, "vectors": vectors, "problems": problems, "notes": notes}


def _compare_vault(device: GalleryFile) -> tuple[list[str], list[str]]:
    """Return problems with the vault, and notes if it could not be checked."""
    if device.state("vault") is None:
        return [], []
    # Imported here: most galleries have no vault, and gRPC is slow to import.
    from nobackfill.client.vault.transport import explain_vault_problem

    try:
        problem = explain_vault_problem(device)
    except (UnavailableError, NotPermittedError, ConfigurationError, BusyError) as error:
        return [], [f"the vault was not checked: {error}"]
    except NobackfillError as error:
        return [str(error)], []
    return [] if problem is None else [problem], []


def _check_space(device: GalleryFile, space: SpaceInfo) -> int:
    spec = space.spec
    count = 0
    with device.store.read_snapshot() as connection:
        rows = connection.execute(f"SELECT embedding FROM {vector_table_name(space.table_number)}")  # noqa: S608
        while batch := rows.fetchmany(_ROWS):
            vectors = vectors_from_blobs([blob for (blob,) in batch], spec.dim)
            description = f"vectors of release {spec.release}"
            try:
                check_vectors(vectors, spec.dim, error_name=description, unit_norm=spec.unit_norm)
            except UnusableRowsError as error:
                damage = (
                    f"{len(error.unusable_rows)} {description} are not finite, or have a wrong norm"
                )
                raise DamagedError(device.path, damage) from error
            count += len(vectors)
    if space.state == "active" and count < device.store.count():
        lacking = device.store.count() - count
        raise NotFoundError(
            f"{lacking} items have no vector of release {spec.release}, which answers searches; "
            "add their images again with `edge-client add`"
        )
    return count


def _check_outbox(device: GalleryFile) -> list[str]:
    problems = []
    for entry in VaultQueue(device.store).entries("sealed"):
        path = sidecar_path(device.path, "outbox") / entry.blob_id
        if not path.is_file() or sha256_file(path) != entry.blob_sha256:
            problems.append(f"{path}: ciphertext is lost or damaged; `push` encrypts it again")
    key_trouble = keys.explain_key_problem(device)
    return [*problems, *([] if key_trouble is None else [key_trouble])]


# The identity file and the outbox are private.
_MODE = 0o600


def rescue(path: Path, target: Path) -> dict[str, Any]:
    """Make a new gallery file from every row of a damaged one that passes its checks.

    The damaged gallery is not changed, but a lock file may be made next to it. An intact gallery is
    copied, too. Its models, key and outbox are copied. Vault rows are copied with their items;
    blobs of lost items stay in the vault, for `pull --unknown`. The new file appears as the last
    step. After an error there is no file at `target`, but copied files may lie next to it.

    Args:
        path: the damaged gallery.
        target: the file to make; its folder is made if it is missing. Copies of other files
            overwrite those of the same name.

    Returns:
        The object that `edge-client rescue --json` prints: counts of saved `items` and `vectors`,
        of `unreadable` and `refused` rows by table, `lost` (true if a row was lost), and
        `not_copied`, the paths of files that cannot be read.

    Raises:
        NotFoundError: there is no file at `path`.
        AlreadyExistsError: a file exists at `target`, or files of an earlier gallery.
        DamagedError: nothing can be saved, because the tables that list the spaces cannot be read.
        BusyError: another process has the gallery open; only an exclusive holder is waited for, 5
            seconds.
        CannotWriteError: the disk is full or read-only, or the damaged file cannot be read.
        OSError: this user may not look into the folder of `path` or `target`.
    """
    if not path.is_file():
        raise NotFoundError(
            f"{path}: this gallery file does not exist; name the damaged gallery with --gallery"
        )
    if target.exists():
        raise AlreadyExistsError(f"{target}: already exists; name another file with --to")
    refuse_leftover_log(target)
    durable.make_dir(target.parent, mode=0o700)
    durable.remove_temporary_files(target.parent, target.name)
    draft = target.with_name(f"{durable.TEMPORARY_PREFIX}{target.name}-{uuid.uuid4().hex}")
    try:
        saved = save(path, draft, {"vault": TABLE})
        not_copied = [
            name
            for suffix in ("models", "identity", "outbox")
            for name in _copy(path, target, suffix)
        ]
        durable.replace_file(draft, target)
    finally:
        for name in target.parent.glob(f"{draft.name}*"):
            name.unlink()
    return {
        "gallery": str(target), "items": saved.saved_item_count,
        "vectors": saved.saved_vector_counts,
        "unreadable": saved.unreadable_label_counts, "refused": saved.invalid_row_counts,
        "lost": saved.missing_rows,
        "not_copied": not_copied,
    }  # fmt: skip


def _copy(path: Path, to: Path, suffix: str) -> list[str]:
    """Copy one file or folder of a gallery; return the paths that were not copied."""
    source, target = sidecar_path(path, suffix), sidecar_path(to, suffix)
    not_copied = []
    if source.is_symlink():
        # A link may lead to files of other users.
        return [str(source)]
    for name in [source] if source.is_file() else sorted(source.rglob("*")):
        if name.is_symlink():
            not_copied.append(str(name))
            continue
        if not name.is_file() or name.name.endswith("lock"):
            continue
        try:
            data = name.read_bytes()
        except OSError:
            not_copied.append(str(name))
            continue
        destination = target if name == source else target / name.relative_to(source)
        durable.make_dir(destination.parent, mode=0o700)
        # Temporary files of a killed rescue.
        durable.remove_temporary_files(destination.parent, f"{destination.name}-")
        durable.write_file(destination, data, _MODE)
    return not_copied
