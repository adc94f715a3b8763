"""Change the metadata of a publication: sign it again, rotate keys, widen a share, withdraw."""

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
    VALIDITY,
    Role,
    SignedMetadata,
    SigningKeys,
    make_next_metadata,
    make_next_root,
    require_signed_metadata,
)
from nobackfill.release.publishing.publish import (
    load_signers,
    lock_publication,
    put_metadata,
    remove_leftovers,
)
from nobackfill.release.trust.trust import read_offered_share, with_offered_share, withdrawal_reason


@dataclass(frozen=True)
class Renewal:
    """The roles whose metadata was signed (or would be, in a dry run), and when each role expires.

    Attributes:
        signed_roles: The roles that were signed.
        expiry_by_role: UTC, of all roles.
    """

    signed_roles: tuple[Role, ...]
    expiry_by_role: Mapping[Role, datetime]


def metadata_expiries(metadata: SignedMetadata) -> dict[Role, datetime]:
    """Return when the metadata of each role expires, UTC. The past counts, too."""
    return {role: getattr(metadata, role).expires for role in ROLES}


def resign(repo: Path, keys: SigningKeys | None = None, dry_run: bool = False) -> Renewal:
    """Sign snapshot and timestamp metadata again.

    Root and targets metadata are renewed, too, once half of their term is over, if their keys are
    available. Leftovers of an interrupted publish are removed first. Expired metadata can be
    renewed. After an interruption, run it again.

    Args:
        repo: The publication folder.
        keys: The signing keys; None: those in `<repo>.keys/`.
        dry_run: Only report; a missing key is still an error.

    Returns:
        The signed roles, and the new expiries; in a dry run, those of the present metadata.

    Raises:
        NotFoundError: Nothing is published there.
        ConfigurationError: The snapshot or timestamp key is missing, or a key file is invalid or
            may be read by others.
        BusyError: Another publisher holds the lock; it is not waited for.
        CannotWriteError: A file cannot be written, or the folder is a mount point.
        VerificationError: The published metadata is invalid.
    """
    keys = keys or SigningKeys.of_publication(repo)
    ledger = require_signed_metadata(repo)
    if dry_run:
        roles = _roles_to_sign(ledger, keys)
        for role in roles:
            keys.require_key(role, ledger.root)
        return Renewal(roles, metadata_expiries(ledger))
    with lock_publication(repo):
        ledger = _clean(repo)
        roles = _roles_to_sign(ledger, keys)
        signers: dict[Role, Signer] = {role: keys.require_key(role, ledger.root) for role in roles}
        if "root" in roles:
            _put_root(repo, ledger, make_next_root(ledger.root, {}, [signers["root"]]))
        targets = dict(ledger.targets.targets) if "targets" in roles else None
        put_metadata(repo, make_next_metadata(ledger, targets, signers))
        return Renewal(roles, metadata_expiries(_clean(repo)))


def rotate(
    repo: Path, roles: Collection[Role], keys: SigningKeys | None = None, dry_run: bool = False
) -> Renewal:
    """Replace the keys of roles; readers reject the old keys afterwards. The old keys are not
    needed.

    Needs the root key, since root metadata lists the keys. The publication is valid at every
    moment: root metadata first accepts old and new keys, then the new keys sign the metadata, then
    root metadata drops the old keys. After an interruption, run it again. The new key files replace
    the old ones, which are lost.

    Args:
        repo: The publication folder.
        roles: The roles whose keys are replaced, at least one; duplicates count once.
        keys: The signing keys; None: those in `<repo>.keys/`.
        dry_run: Check that the root key is there, and report; nothing is written.

    Returns:
        The roles in the order of ROLES, and the expiries of all; in a dry run, those of the present
        metadata.

    Raises:
        ConfigurationError: No role, an unknown one, or the key of root, snapshot or timestamp is
            missing, is no key, or may be read by others.
        NotFoundError: Nothing is published there.
        BusyError: Another publisher holds the lock; it is not waited for.
        CannotWriteError: A file cannot be written, or the folder is a mount point.
        VerificationError: The published metadata is invalid.
    """
    keys = keys or SigningKeys.of_publication(repo)
    if not roles or not set(roles) <= set(ROLES):
        raise ConfigurationError(
            f"--role: expected at least one of {', '.join(ROLES)}, got "
            f"{', '.join(sorted(roles)) or 'none'}"
        )
    ordered = tuple(role for role in ROLES if role in roles)
    ledger = require_signed_metadata(repo)
    if dry_run:
        keys.require_key("root", ledger.root)
        return Renewal(ordered, metadata_expiries(ledger))
    with lock_publication(repo):
        ledger = _clean(repo)
        for role in ROLES:
            keys.finish_rotation(role, ledger.root)
        _exchange(repo, ledger, ordered, keys)
        return Renewal(ordered, metadata_expiries(_clean(repo)))


def _exchange(
    repo: Path, ledger: SignedMetadata, roles: tuple[Role, ...], keys: SigningKeys
) -> None:
    root_signer = keys.require_key("root", ledger.root)
    new: dict[Role, Signer] = {role: keys.create_next(role) for role in roles}
    both: dict[Role, list[Key]] = {
        role: _add_key(ledger, role, new[role].public_key) for role in roles if role != "root"
    }
    if both:
        if any(len(both[role]) != len(ledger.root.roles[role].keyids) for role in both):
            _put_root(repo, ledger, make_next_root(ledger.root, both, [root_signer]))
            ledger = require_signed_metadata(repo)
        others: list[Role] = ["snapshot", "timestamp"]
        signers: dict[Role, Signer] = {role: keys.require_key(role, ledger.root) for role in others}
        signers |= new
        targets = dict(ledger.targets.targets) if "targets" in new else None
        put_metadata(repo, make_next_metadata(ledger, targets, signers))
    only: dict[Role, list[Key]] = {role: [new[role].public_key] for role in roles}
    own: list[Signer] = [new["root"]] if "root" in new else []
    _put_root(repo, ledger, make_next_root(ledger.root, only, [root_signer, *own]))
    settled = require_signed_metadata(repo)
    for role in roles:
        keys.finish_rotation(role, settled.root)


def _add_key(ledger: SignedMetadata, role: Role, new: Key) -> list[Key]:
    """Return the keys that root metadata accepts for a role, and the new one."""
    keys = {keyid: ledger.root.keys[keyid] for keyid in ledger.root.roles[role].keyids}
    return list({**keys, new.keyid: new}.values())


def _put_root(repo: Path, ledger: SignedMetadata, data: bytes) -> None:
    put_metadata(repo, [(f"{ledger.root.version + 1}.root.json", data)])


def _clean(repo: Path) -> SignedMetadata:
    remove_leftovers(repo)
    return require_signed_metadata(repo)


def _roles_to_sign(ledger: SignedMetadata, keys: SigningKeys) -> tuple[Role, ...]:
    offline: tuple[Role, ...] = ("root", "targets")
    expiring = [
        role for role in offline if _half_over(ledger, role) and keys.find_key(role, ledger.root)
    ]
    return (*expiring, "snapshot", "timestamp")


def _half_over(ledger: SignedMetadata, role: Role) -> bool:
    return metadata_expiries(ledger)[role] - datetime.now(UTC) < VALIDITY[role] / 2


def withdraw(
    repo: Path, number: int, reason: str, keys: SigningKeys | None = None, dry_run: bool = False, *,
    is_converter: bool = False,
) -> bool:  # fmt: skip
    """Withdraw a release or a converter, by new metadata that devices and users follow.

    Its files stay, since galleries may still be in its space. Another reason replaces the former
    one. A withdrawal cannot be undone here, and it removes the release's share.

    Args:
        repo: The publication folder.
        number: Number of the release or converter.
        reason: Shown to devices and users; printable, not empty.
        keys: The signing keys; None: those in `<repo>.keys/`.
        dry_run: Only check and report; the keys are checked, too.
        is_converter: Withdraw a converter instead of a release.

    Returns:
        Whether metadata is (or would be) written; False if it is withdrawn already, for the same
        reason.

    Raises:
        PreconditionError: The reason is empty, blank or not printable.
        NotFoundError: No such release or converter.
        ConfigurationError: The targets, snapshot or timestamp key is missing or invalid, or others
            may read it. A real run that has nothing to change does not read keys; a dry run always
            does.
        BusyError: Another publisher holds the lock; it is not waited for.
        CannotWriteError: A file cannot be written, or the folder is a mount point.
        VerificationError: The published metadata is invalid.
    """
    if not reason.strip() or not reason.isprintable():
        raise PreconditionError(
            "--reason: expected a printable text on one line, which devices show, got "
            f"{reason!r}; write another reason"
        )

    def mark(path: str, target: TargetFile) -> TargetFile | None:
        if withdrawal_reason(target) == reason:
            return None
        return TargetFile.from_dict({**target.to_dict(), "custom": {"withdrawn": reason}}, path)

    path = converter_manifest_path(number) if is_converter else manifest_path(number)
    return _mark(repo, path, mark, keys, dry_run)


def roll_out(
    repo: Path, release: int, share: float, keys: SigningKeys | None = None, dry_run: bool = False
) -> bool:
    """Offer a release to a share of the devices, by new metadata.

    Shares only grow. A release that was published without a share may be given one; devices that
    use it already keep it.

    Args:
        repo: The publication folder.
        release: Number of the release.
        share: Above 0, at most 1; rounded to millionths, and at least one.
        keys: The signing keys; None: those in `<repo>.keys/`.
        dry_run: Only check and report; the keys are checked, too.

    Returns:
        Whether metadata is (or would be) written; False if the release has this share already. A
        release without a share gets any share, also 1.

    Raises:
        InvalidInputError: A share outside of these bounds.
        NotFoundError: No such release.
        PreconditionError: The share would shrink, or the release is withdrawn.
        ConfigurationError: The targets, snapshot or timestamp key is missing or invalid, or others
            may read it. A real run that has nothing to change does not read keys; a dry run always
            does.
        BusyError: Another publisher holds the lock; it is not waited for.
        CannotWriteError: A file cannot be written, or the folder is a mount point.
        VerificationError: The published metadata is invalid.
    """
    if not 0 < share <= 1:
        raise InvalidInputError(
            f"share of the devices: expected above 0 and at most 1, got {share:g}; pass a "
            "fraction, not a percentage"
        )

    def mark(path: str, target: TargetFile) -> TargetFile | None:
        return with_offered_share(target, path, share) if _grows(target, release, share) else None

    return _mark(repo, manifest_path(release), mark, keys, dry_run)


def _mark(
    repo: Path,
    path: str,
    mark: Callable[[str, TargetFile], TargetFile | None],
    keys: SigningKeys | None,
    dry_run: bool,
) -> bool:
    """Publish the entry that `mark` makes of a manifest's entry; return False where it returns
    None."""
    keys = keys or SigningKeys.of_publication(repo)
    ledger = require_signed_metadata(repo)
    news = mark(path, _target(ledger, path))
    if dry_run:
        load_signers(keys, ledger.root)
        return news is not None
    with lock_publication(repo):
        ledger = _clean(repo)
        news = mark(path, _target(ledger, path))
        if news is None:
            return False
        signers = load_signers(keys, ledger.root)
        put_metadata(
            repo, make_next_metadata(ledger, {**ledger.targets.targets, path: news}, signers)
        )
        return True


def _target(ledger: SignedMetadata, path: str) -> TargetFile:
    target = ledger.targets.targets.get(path)
    if target is None:
        what = path.removesuffix(".json").replace("-", " ")
        raise NotFoundError(
            f"{what} is not published in this folder; `publication list` shows what is"
        )
    return target


def _grows(target: TargetFile, release: int, share: float) -> bool:
    """Tell whether a share differs from the present one. Raises PreconditionError where it may not
    change."""
    reason = withdrawal_reason(target)
    if reason is not None:
        raise PreconditionError(
            f"release {release} was withdrawn ({reason}) and cannot be offered again; publish a "
            "new release"
        )
    present, share = read_offered_share(target), round(share, 6)
    if target.custom is not None and share < present:
        raise PreconditionError(
            f"share of the devices: expected at least {present:.3g}, the present one of release "
            f"{release}, because shares only grow; got {share:.3g}. `publication withdraw "
            f"{release}` withdraws it from all"
        )
    return target.custom is None or share != present
