"""Keeping a gallery in order: remove, set, gc, verify, and rescue of a damaged one."""

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile, beside
from nobackfill.client.pictures import Thumbnails
from nobackfill.client.status import disk_bytes
from nobackfill.client.sync import confirm, embedding_files, missing_files, tidy_models
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
    few,
)
from nobackfill.gallery import staging
from nobackfill.gallery.connections import refuse_leftovers
from nobackfill.gallery.rescue import rescue as save
from nobackfill.gallery.spec import Metadata, SpaceInfo
from nobackfill.gallery.tables import from_blobs, vector_table
from nobackfill.vectors import check_vectors

_ROWS = 4096
# Pages given back in one transaction, so that others can write in between.
_PAGES = 256


def remove(device: GalleryFile, named: Sequence[str]) -> dict[str, Any]:
    """Remove items from every space, the file's free pages and its log.

    `named`: ids, or paths, which stand for every item that was added from there. Their ciphertext
    waiting here goes at once, that in the vault at the next push. The image files themselves stay.
    Raises NotFoundError for a name that is none; nothing is removed then.
    """
    ids = list(dict.fromkeys(i for name in named for i in _find(device, name)))
    removed, in_vault = delete(device, ids)
    return {"removed": removed, "left_in_vault": in_vault}


def delete(device: GalleryFile, ids: Sequence[str]) -> tuple[int, int]:
    """Like `remove`, by ids alone: how many existed, and of how many the vault holds ciphertext."""
    queue = VaultQueue(device.store)
    outbox = beside(device.path, "outbox")
    in_vault = 0
    for item_id in ids:
        entries = [e for e in queue.entries(item=item_id) if e.state != "removing"]
        for entry in entries:
            # First the vault's row: killed here, the image is still named and can be removed again.
            queue.mark(entry.blob, "removing")
            durable.remove_tree(outbox / entry.blob)
        in_vault += bool(entries)
    items = [item for item in map(device.store.get, ids) if item is not None]
    removed = device.store.delete(ids)
    Thumbnails(device.path).forget(item.label for item in items)
    return removed, in_vault


def _find(device: GalleryFile, name: str) -> list[str]:
    """Ids of an item, or of every item of a path: a file that was edited and added again is two."""
    if device.store.get(name) is not None:
        return [name]
    with device.store.reading() as connection:
        rows = connection.execute(
            "SELECT i.id FROM items i JOIN attributes a USING (label)"
            " WHERE a.key = 'path' AND a.kind = 'text' AND a.value = ? ORDER BY label",
            (str(Path(name).absolute()),),
        ).fetchall()
    if not rows:
        raise NotFoundError(f"{name}: neither an id nor a path of this gallery; see `list`")
    return [item_id for (item_id,) in rows]


def describe(device: GalleryFile, named: Sequence[str], notes: Metadata) -> int:
    """Set metadata of items, beside what they have; how many items. `named` as in `remove`.

    Raises NotFoundError for a name that is none, InvalidInputError for a key that says where an
    item's file is; nothing is changed then.
    """
    own = {"path", "folder", "name"} & notes.keys()
    if own:
        raise InvalidInputError(f"{few(sorted(own))}: says where an item's file is; use other keys")
    ids = list(dict.fromkeys(i for name in named for i in _find(device, name)))
    items = [item for item in map(device.store.get, ids) if item is not None]
    for start in range(0, len(items), _ROWS):
        some = items[start : start + _ROWS]
        device.store.put(
            [item.id for item in some],
            [],
            digests=[item.digest for item in some],
            metadata=[{**item.metadata, **notes} for item in some],
        )
    return len(items)


def collect(device: GalleryFile) -> dict[str, Any]:
    """`gc`: confirm the active release and drop what only a rollback or a killed run would need.

    What a sync or a push downloads or sends just now is left. Raises BusyError while a sync carries
    vectors.
    """
    with device.changing():
        before = disk_bytes(device)
        for space in device.store.spaces():
            if space.state == "staging":
                staging.drop(device.store, space.spec.space)
        dropped = confirm(device)
        with contextlib.suppress(BusyError), device.following():
            durable.sweep(device.models)
            tidy_models(device)
        with contextlib.suppress(BusyError), device.vaulting():
            _sweep_boxes(device)
        Thumbnails(device.path).sweep(device.store)
        _compact(device)
        return {"dropped": dropped, "freed_bytes": before - disk_bytes(device)}


def _sweep_boxes(device: GalleryFile) -> None:
    known = {entry.blob for entry in VaultQueue(device.store).entries("sealed")}
    for folder in (beside(device.path, "inbox"), beside(device.path, "outbox")):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name not in known:
                durable.remove_tree(path)


def _compact(device: GalleryFile) -> None:
    """Give free pages back to the file system; not urgent, so not now if others hold the file."""
    with contextlib.suppress(BusyError):
        device.store.compact(_PAGES)


def verify(device: GalleryFile) -> dict[str, Any]:
    """Check the file's pages, every vector, the models' digests, keys, ciphertext, and whether the
    vault holds what was pushed.

    Returns counts and `problems`, each a sentence that says what to do. `notes` say why the vault
    was not asked: that it is away is no problem of this gallery.
    """
    problems: list[str] = []
    vectors = 0
    try:
        with device.store.reading() as connection:
            rows = connection.execute("PRAGMA integrity_check(4)").fetchall()
            pages = [line for (text,) in rows for line in text.splitlines()]
            strays = connection.execute("PRAGMA foreign_key_check").fetchall()
        if pages != ["ok"] or strays:
            found = few(pages) if pages != ["ok"] else f"{len(strays)} rows of no item"
            raise DamagedError(device.path, found)
        items = device.store.count()
        spaces = device.store.spaces()
        device.store.active()
    except DamagedError as error:
        # What follows would say the same again, row by row.
        return {"items": None, "vectors": None, "problems": [str(error)], "notes": []}
    for space in spaces:
        if space.state == "staging" and not device.state("installed", {}).get(
            str(space.spec.release)
        ):
            # What a sync that was killed will go on with: its manifest comes with the flip.
            vectors += device.store.count(space.spec.space)
            continue
        try:
            vectors += _check_space(device, space)
            manifest = device.manifest(space.spec.release)
        except NobackfillError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{file.path}: missing or changed; `edge-client sync` brings it again"
            for file in missing_files(device.models, embedding_files(manifest))
        ]
    problems += _check_outbox(device)
    lacking, notes = _compare_vault(device)
    problems += lacking
    return {"items": items, "vectors": vectors, "problems": problems, "notes": notes}


def _compare_vault(device: GalleryFile) -> tuple[list[str], list[str]]:
    """Problems with the vault, and notes why it was not asked."""
    if device.state("vault") is None:
        return [], []
    # Only here, as most galleries have no vault and gRPC takes a while to load.
    from nobackfill.client.vault.transport import vault_problem

    try:
        problem = vault_problem(device)
    except (UnavailableError, NotPermittedError, ConfigurationError, BusyError) as error:
        return [], [f"the vault was not compared: {error}"]
    except NobackfillError as error:
        return [str(error)], []
    return [] if problem is None else [problem], []


def _check_space(device: GalleryFile, space: SpaceInfo) -> int:
    spec = space.spec
    count = 0
    with device.store.reading() as connection:
        rows = connection.execute(f"SELECT embedding FROM {vector_table(space.number)}")  # noqa: S608
        while some := rows.fetchmany(_ROWS):
            vectors = from_blobs([blob for (blob,) in some], spec.dim)
            what = f"vectors of release {spec.release}"
            try:
                check_vectors(vectors, spec.dim, what=what, unit=spec.unit)
            except UnusableRowsError as error:
                raise DamagedError(device.path, error) from error
            count += len(vectors)
    if space.state == "active" and count < device.store.count():
        lacking = device.store.count() - count
        raise NotFoundError(
            f"{lacking} items have no vector in the active space; add their images again"
        )
    return count


def _check_outbox(device: GalleryFile) -> list[str]:
    problems = []
    for entry in VaultQueue(device.store).entries("sealed"):
        path = beside(device.path, "outbox") / entry.blob
        if not path.is_file() or sha256_file(path) != entry.blob_sha256:
            problems.append(f"{path}: ciphertext is lost or damaged; `push` makes it anew")
    lost = keys.key_problem(device)
    return [*problems, *([] if lost is None else [lost])]


# `rescue`: a new gallery of all intact rows of a damaged one, with what lies beside it.

# Private: the secret key and the ciphertext that waits for the vault.
_MODE = 0o600


def rescue(path: Path, to: Path) -> dict[str, Any]:
    """Make the gallery `to` of every row of `path` that can be read and passes the checks.

    The damaged gallery stays as it is. Of the vault's rows those go along whose items do: what
    belongs to lost items stays in the vault, for `pull --unknown`. The gallery appears as
    the last step. Raises NotFoundError, AlreadyExistsError, DamagedError (nothing can be saved),
    BusyError, CannotWriteError.
    """
    if not path.is_file():
        raise NotFoundError(f"{path}: no gallery there; name the damaged one with --gallery")
    if to.exists():
        raise AlreadyExistsError(f"{to}: exists already; name another file with --to")
    refuse_leftovers(to)
    durable.make_dir(to.parent, mode=0o700)
    durable.sweep(to.parent, to.name)
    draft = to.with_name(f"{durable.TEMPORARY}{to.name}-{uuid.uuid4().hex}")
    try:
        saved = save(path, draft, {"vault": TABLE})
        left = [name for what in ("models", "identity", "outbox") for name in _copy(path, to, what)]
        durable.replace(draft, to)
    finally:
        for name in to.parent.glob(f"{draft.name}*"):
            name.unlink()
    return {"gallery": str(to), **asdict(saved), "lost": saved.lost, "not_copied": left}


def _copy(path: Path, to: Path, what: str) -> list[str]:
    """Copy a file or folder beside the gallery; what could not be read of it."""
    source, target = beside(path, what), beside(to, what)
    left = []
    if source.is_symlink():
        # It may lead to anybody's files.
        return [str(source)]
    for name in [source] if source.is_file() else sorted(source.rglob("*")):
        if name.is_symlink():
            left.append(str(name))
            continue
        if not name.is_file() or name.name.endswith("lock"):
            continue
        try:
            data = name.read_bytes()
        except OSError:
            left.append(str(name))
            continue
        copied = target if name == source else target / name.relative_to(source)
        durable.make_dir(copied.parent, mode=0o700)
        # What a rescue that was killed left of this file.
        durable.sweep(copied.parent, f"{copied.name}-")
        durable.write_file(copied, data, _MODE)
    return left
