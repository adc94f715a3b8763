"""What new metadata says of a release or a converter: a share of the devices, or taken back."""

from collections.abc import Callable
from pathlib import Path

from tuf.api.metadata import TargetFile

from nobackfill.errors import InvalidInputError, NotFoundError, PreconditionError
from nobackfill.release.converter import converter_manifest_path
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


def _target(ledger: Ledger, path: str) -> TargetFile:
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
