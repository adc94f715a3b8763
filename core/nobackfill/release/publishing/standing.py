"""What new metadata says of a release that is published: a share of the devices, or taken back."""

from pathlib import Path

from tuf.api.metadata import TargetFile

from nobackfill.errors import InvalidInputError, NotFoundError, PreconditionError
from nobackfill.release.paths import manifest_path
from nobackfill.release.publishing.keys import Keys
from nobackfill.release.publishing.metadata import (
    Ledger,
    for_share,
    next_metadata,
    require_ledger,
    share_of,
    withdrawn,
)
from nobackfill.release.publishing.publish import clean, locked, put_metadata, signers_of


def withdraw(
    repo: Path, release: int, reason: str, keys: Keys | None = None, dry_run: bool = False
) -> bool:
    """Take a release back: new metadata that says so, for devices to follow. True if it was news.

    Its files stay, as galleries may still be in its space. Raises NotFoundError, BusyError,
    ConfigurationError (a key is missing), CannotWriteError.
    """
    keys = keys or Keys.beside(repo)
    if not reason.strip():
        raise PreconditionError("expected a reason that devices can show")
    path = manifest_path(release)
    ledger = require_ledger(repo)
    news = _is_news(ledger, path, reason)
    if dry_run:
        signers_of(keys, ledger.root)
        return news
    with locked(repo):
        clean(repo)
        ledger = require_ledger(repo)
        if not _is_news(ledger, path, reason):
            return False
        signers = signers_of(keys, ledger.root)
        marked = {**ledger.targets.targets[path].to_dict(), "custom": {"withdrawn": reason}}
        targets = {**ledger.targets.targets, path: TargetFile.from_dict(marked, path)}
        put_metadata(repo, next_metadata(ledger, targets, signers))
        return True


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
    keys = keys or Keys.beside(repo)
    if not 0 < share <= 1:
        raise InvalidInputError(f"share: expected above 0 and at most 1, got {share:g}")
    ledger = require_ledger(repo)
    news = _grows(ledger, release, share)
    if dry_run:
        signers_of(keys, ledger.root)
        return news
    with locked(repo):
        clean(repo)
        ledger = require_ledger(repo)
        if not _grows(ledger, release, share):
            return False
        path = manifest_path(release)
        signers = signers_of(keys, ledger.root)
        marked = for_share(ledger.targets.targets[path], path, share)
        put_metadata(repo, next_metadata(ledger, {**ledger.targets.targets, path: marked}, signers))
        return True


def _grows(ledger: Ledger, release: int, share: float) -> bool:
    """Whether this is another share than the release has."""
    target = ledger.targets.targets.get(manifest_path(release))
    if target is None:
        raise NotFoundError(f"release {release} is not published here")
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


def _is_news(ledger: Ledger, path: str, reason: str) -> bool:
    if path not in ledger.targets.targets:
        raise NotFoundError(f"{path}: is not published, so there is nothing to take back")
    return withdrawn(ledger.targets.targets[path]) != reason
