"""Keeping a publication alive: metadata signed anew before it expires, and keys exchanged."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from securesystemslib.signer import Key, Signer

from nobackfill.errors import ConfigurationError
from nobackfill.release.publishing.keys import ROLES, Keys, Role
from nobackfill.release.publishing.metadata import (
    TERM,
    Ledger,
    next_metadata,
    next_root,
    require_ledger,
)
from nobackfill.release.publishing.publish import clean, locked, put_metadata


@dataclass(frozen=True)
class Renewed:
    """Which roles were signed anew (with dry_run: would be), and when each expires now."""

    roles: tuple[Role, ...]
    expires: Mapping[Role, datetime]


def expiries(ledger: Ledger) -> dict[Role, datetime]:
    """When each role's metadata expires, UTC."""
    return {
        "root": ledger.root.expires,
        "targets": ledger.targets.expires,
        "snapshot": ledger.snapshot.expires,
        "timestamp": ledger.timestamp.expires,
    }


def resign(repo: Path, keys: Keys | None = None, dry_run: bool = False) -> Renewed:
    """Sign snapshot and timestamp anew; root and targets too, once half of their term is over and
    their keys are at hand.

    Raises NotFoundError, ConfigurationError (an online key is missing), BusyError,
    CannotWriteError.
    """
    keys = keys or Keys.beside(repo)
    ledger = require_ledger(repo)
    if dry_run:
        roles = _due(ledger, keys)
        for role in roles:
            keys.signer(role, ledger.root)
        return Renewed(roles, expiries(ledger))
    with locked(repo):
        ledger = _clean(repo)
        roles = _due(ledger, keys)
        signers: dict[Role, Signer] = {role: keys.signer(role, ledger.root) for role in roles}
        if "root" in roles:
            _put_root(repo, ledger, next_root(ledger.root, {}, [signers["root"]]))
        targets = dict(ledger.targets.targets) if "targets" in roles else None
        put_metadata(repo, next_metadata(ledger, targets, signers))
        return Renewed(roles, expiries(_clean(repo)))


def rotate(
    repo: Path, roles: Collection[Role], keys: Keys | None = None, dry_run: bool = False
) -> Renewed:
    """Give roles new keys; the old ones are worth nothing afterwards, and need not be at hand.

    The root key is needed, as root metadata says which keys count. At every moment what is
    published is valid: root metadata first accepts old and new keys, then the metadata is signed by
    the new ones, then root metadata forgets the old ones. Raises ConfigurationError, NotFoundError,
    BusyError, CannotWriteError. After a kill, running it again converges.
    """
    keys = keys or Keys.beside(repo)
    if not roles or not set(roles) <= set(ROLES):
        raise ConfigurationError(f"expected roles among {', '.join(ROLES)}, got {sorted(roles)}")
    ordered = tuple(role for role in ROLES if role in roles)
    ledger = require_ledger(repo)
    if dry_run:
        keys.signer("root", ledger.root)
        return Renewed(ordered, expiries(ledger))
    with locked(repo):
        ledger = _clean(repo)
        for role in ROLES:
            keys.settle(role, ledger.root)
        _exchange(repo, ledger, ordered, keys)
        return Renewed(ordered, expiries(_clean(repo)))


def _exchange(repo: Path, ledger: Ledger, roles: tuple[Role, ...], keys: Keys) -> None:
    root_signer = keys.signer("root", ledger.root)
    new: dict[Role, Signer] = {role: keys.create_next(role) for role in roles}
    both: dict[Role, list[Key]] = {
        role: _accepted(ledger, role, new[role].public_key) for role in roles if role != "root"
    }
    if both:
        if any(len(both[role]) != len(ledger.root.roles[role].keyids) for role in both):
            _put_root(repo, ledger, next_root(ledger.root, both, [root_signer]))
            ledger = require_ledger(repo)
        others: list[Role] = ["snapshot", "timestamp"]
        signers: dict[Role, Signer] = {role: keys.signer(role, ledger.root) for role in others}
        signers |= new
        targets = dict(ledger.targets.targets) if "targets" in new else None
        put_metadata(repo, next_metadata(ledger, targets, signers))
    only: dict[Role, list[Key]] = {role: [new[role].public_key] for role in roles}
    own: list[Signer] = [new["root"]] if "root" in new else []
    _put_root(repo, ledger, next_root(ledger.root, only, [root_signer, *own]))
    settled = require_ledger(repo)
    for role in roles:
        keys.settle(role, settled.root)


def _accepted(ledger: Ledger, role: Role, new: Key) -> list[Key]:
    """The keys that root metadata accepts for a role, and the new one."""
    keys = {keyid: ledger.root.keys[keyid] for keyid in ledger.root.roles[role].keyids}
    return list({**keys, new.keyid: new}.values())


def _put_root(repo: Path, ledger: Ledger, data: bytes) -> None:
    put_metadata(repo, [(f"{ledger.root.version + 1}.root.json", data)])


def _clean(repo: Path) -> Ledger:
    clean(repo)
    return require_ledger(repo)


def _due(ledger: Ledger, keys: Keys) -> tuple[Role, ...]:
    offline: tuple[Role, ...] = ("root", "targets")
    due = [role for role in offline if _half_over(ledger, role) and keys.find(role, ledger.root)]
    return (*due, "snapshot", "timestamp")


def _half_over(ledger: Ledger, role: Role) -> bool:
    return expiries(ledger)[role] - datetime.now(UTC) < TERM[role] / 2
