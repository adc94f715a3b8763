"""New metadata of a publication: signed again, with other keys, for a share, or withdrawn."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from securesystemslib.signer import Key, Signer
from tuf.api.metadata import TargetFile

from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    PreconditionError,
)
from nobackfill.release.manifest import converter_manifest_path
from nobackfill.release.paths import manifest_path
from nobackfill.release.publishing.metadata import (
    ROLES,
    TERM,
    Keys,
    MetadataLedger,
    Role,
    next_metadata,
    next_root,
    require_ledger,
)
from nobackfill.release.publishing.publish import (
    clean,
    locked,
    put_metadata,
    signers_of,
)
from nobackfill.release.trust.trust import for_share, share_of, withdrawn


@dataclass(frozen=True)
class Renewed:
    """Which roles were signed anew (with dry_run: would be), and when each expires now."""

    roles: tuple[Role, ...]
    expires: Mapping[Role, datetime]


def expiries(ledger: MetadataLedger) -> dict[Role, datetime]:
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


def _exchange(repo: Path, ledger: MetadataLedger, roles: tuple[Role, ...], keys: Keys) -> None:
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


def _accepted(ledger: MetadataLedger, role: Role, new: Key) -> list[Key]:
    """The keys that root metadata accepts for a role, and the new one."""
    keys = {keyid: ledger.root.keys[keyid] for keyid in ledger.root.roles[role].keyids}
    return list({**keys, new.keyid: new}.values())


def _put_root(repo: Path, ledger: MetadataLedger, data: bytes) -> None:
    put_metadata(repo, [(f"{ledger.root.version + 1}.root.json", data)])


def _clean(repo: Path) -> MetadataLedger:
    clean(repo)
    return require_ledger(repo)


def _due(ledger: MetadataLedger, keys: Keys) -> tuple[Role, ...]:
    offline: tuple[Role, ...] = ("root", "targets")
    due = [role for role in offline if _half_over(ledger, role) and keys.find(role, ledger.root)]
    return (*due, "snapshot", "timestamp")


def _half_over(ledger: MetadataLedger, role: Role) -> bool:
    return expiries(ledger)[role] - datetime.now(UTC) < TERM[role] / 2


def withdraw(
    repo: Path, number: int, reason: str, keys: Keys | None = None, dry_run: bool = False, *,
    converter: bool = False,
) -> bool:  # fmt: skip
    """Take a release, or a converter, back: new metadata that says so, for devices and users to
    follow. True if it was news.

    Its files stay, as galleries may still be in its space. Raises NotFoundError, BusyError,
    ConfigurationError (a key is missing), CannotWriteError.
    """
    if not reason.strip() or not reason.isprintable():
        raise PreconditionError(f"expected a reason that devices can show, got {reason!r}")

    def marked(path: str, target: TargetFile) -> TargetFile | None:
        if withdrawn(target) == reason:
            return None
        return TargetFile.from_dict({**target.to_dict(), "custom": {"withdrawn": reason}}, path)

    path = converter_manifest_path(number) if converter else manifest_path(number)
    return _mark(repo, path, marked, keys, dry_run)


def roll_out(
    repo: Path, release: int, share: float, keys: Keys | None = None, dry_run: bool = False
) -> bool:
    """Let a release go to a share of the devices, above 0 and at most 1, by new metadata that says
    so. True if it was news.

    Shares only grow; one that was published without a share may be given one, and devices that
    followed it before stay. Raises InvalidInputError, NotFoundError, PreconditionError for a share
    that is smaller and for a release that was withdrawn, BusyError, ConfigurationError (a key is
    missing), CannotWriteError.
    """
    if not 0 < share <= 1:
        raise InvalidInputError(f"share: expected above 0 and at most 1, got {share:g}")

    def marked(path: str, target: TargetFile) -> TargetFile | None:
        return for_share(target, path, share) if _grows(target, release, share) else None

    return _mark(repo, manifest_path(release), marked, keys, dry_run)


def _mark(
    repo: Path,
    path: str,
    marked: Callable[[str, TargetFile], TargetFile | None],
    keys: Keys | None,
    dry_run: bool,
) -> bool:
    """Publish what `marked` makes of a manifest's target; False where that is nothing new."""
    keys = keys or Keys.beside(repo)
    ledger = require_ledger(repo)
    news = marked(path, _target(ledger, path))
    if dry_run:
        signers_of(keys, ledger.root)
        return news is not None
    with locked(repo):
        clean(repo)
        ledger = require_ledger(repo)
        news = marked(path, _target(ledger, path))
        if news is None:
            return False
        signers = signers_of(keys, ledger.root)
        put_metadata(repo, next_metadata(ledger, {**ledger.targets.targets, path: news}, signers))
        return True


def _target(ledger: MetadataLedger, path: str) -> TargetFile:
    target = ledger.targets.targets.get(path)
    if target is None:
        what = path.removesuffix(".json").replace("-", " ")
        raise NotFoundError(f"{what} is not published here")
    return target


def _grows(target: TargetFile, release: int, share: float) -> bool:
    """Whether this is another share than the release has."""
    reason = withdrawn(target)
    if reason is not None:
        raise PreconditionError(f"release {release} was withdrawn ({reason}); publish another")
    now, share = share_of(target), round(share, 6)
    if target.custom is not None and share < now:
        raise PreconditionError(
            f"release {release} is for {now:.3g} of the devices, and shares only grow, got "
            f"{share:.3g}; `publication withdraw {release}` takes it back"
        )
    return target.custom is None or share != now
