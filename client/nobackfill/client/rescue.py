"""`rescue`: a new gallery of all intact rows of a damaged one, with what lies beside it."""

import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nobackfill import durable
from nobackfill.client.gallery_file import beside
from nobackfill.client.vault.queue import TABLE
from nobackfill.errors import AlreadyExistsError, NotFoundError
from nobackfill.gallery.creation import refuse_leftovers
from nobackfill.gallery.rescue import rescue as save

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
