"""Report the content of a gallery, offline.

This is apart from maintenance.py, which imports the code that downloads and verifies: `status` is a
command that people run often.
"""

from typing import Any

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.vault.queue import VaultQueue
from nobackfill.gallery import staging
from nobackfill.gallery.spec import SpaceInfo

_LEAST_CERTAIN = 10


def status(device: GalleryFile) -> dict[str, Any]:
    """Report the content of a gallery, its spaces, its vault and what it holds back.

    Counts items, and reads no vector. Counts of different rows may be of different moments if
    another process writes. Reads the key file, but connects to no vault.

    Args:
        device: the open gallery.

    Returns:
        The object that `edge-client status --json` prints. `rollback_to` is None if no rollback is
        possible, and `vault_key_problem` is None if the vault's key fits or nothing was pushed.

    Raises:
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        IncompatibleSpaceError: another process dropped a space during the call.
        CannotWriteError: the file cannot be opened, or the disk fails.
        NotFoundError: the gallery was closed.
        OSError: a file of the gallery disappears meanwhile, or cannot be read.
    """
    active = device.store.active()
    previous = device.previous_space()
    vault: dict[str, int] = {"sealed": 0, "stored": 0, "removing": 0}
    for entry in VaultQueue(device.store).entries():
        vault[entry.state] += 1
    least = staging.least_certain_items(device.store, active.spec.space, _LEAST_CERTAIN)
    return {
        "gallery": str(device.path),
        "items": device.store.count(),
        "release": active.spec.release,
        "space": active.spec.space,
        "source": device.state("source"),
        "rollback_to": None if previous is None else previous.spec.release,
        "keep_original": bool(device.state("keep_original")),
        "spaces": [_space(device, space) for space in device.store.spaces()],
        "held_back": device.state("held_back", {}),
        "bytes_on_disk": disk_bytes(device),
        "vault": vault,
        "vault_key_problem": _key_problem(device) if any(vault.values()) else None,
        "least_certain": [
            {"id": i.id, "path": i.metadata.get("path"), "uncertainty": i.uncertainty}
            for i in least
        ],
    }


def _key_problem(device: GalleryFile) -> str | None:
    # Imported here: only galleries with a vault load the library of keys.
    from nobackfill.client.vault.keys import explain_key_problem

    return explain_key_problem(device)


def _space(device: GalleryFile, space: SpaceInfo) -> dict[str, Any]:
    items = device.store.count(space.spec.space)
    return {
        "release": space.spec.release,
        "space": space.spec.space,
        "state": space.state,
        "items": items,
        "bytes": items * 4 * (space.spec.dim + space.spec.side_dim),
    }


def disk_bytes(device: GalleryFile) -> int:
    """Return the bytes of a gallery's file and of all files whose names begin with its name.

    These are also files that only happen to have such a name, and files in such folders at any
    depth.

    Raises:
        OSError: a file or folder disappears or cannot be read during the call.
    """
    names = device.path.parent.glob(f"{device.path.name}*")
    files = (p for name in names for p in ([name] if name.is_file() else name.rglob("*")))
    return sum(path.stat().st_size for path in files if path.is_file())
