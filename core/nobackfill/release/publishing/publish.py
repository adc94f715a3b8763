"""Publish releases atomically: readers see a release wholly or not at all.

Everything is staged next to the publication folder. Then model folders are renamed into it, then
targets and snapshot metadata, and timestamp.json last: replacing it is the commit point. Under the
lock, files that no committed metadata lists are leftovers of an interrupted publish; they are
removed first.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from securesystemslib.signer import Signer
from tuf.api.metadata import Root, TargetFile

from nobackfill import durable
from nobackfill.digests import sha256_bytes
from nobackfill.errors import AlreadyExistsError, BusyError, CannotWriteError
from nobackfill.release.manifest import (
    Converter,
    PublishedFile,
    converter_manifest_path,
    converter_path,
    parse_converter_number,
)
from nobackfill.release.models import read_verified_file
from nobackfill.release.paths import manifest_path, release_of_manifest
from nobackfill.release.publishing.draft import Draft, check_draft
from nobackfill.release.publishing.metadata import (
    ROLES,
    Role,
    SignedMetadata,
    SigningKeys,
    list_leftovers,
    make_first_root,
    make_next_metadata,
    read_root,
    read_signed_metadata,
)
from nobackfill.release.trust.trust import verify_metadata, with_offered_share

# Drafts are next to the publication, because Triton fails on any other folder in it. They lie
# on its file system, so that finished ones can be renamed into it.

_DRAFT = "draft-"
_LOCK_SECONDS = 60.0


def staging_folder(repo: Path) -> Path:
    """Return the folder in which releases are staged; it may not exist. It lies next to the
    publication folder, with the suffix .staging."""
    return repo.absolute().parent / f"{repo.absolute().name}.staging"


def lock_path(repo: Path) -> Path:
    """Return the path of the lock file that protects a publication and its staging folder. It lies
    next to the publication folder, with the suffix .lock."""
    return repo.absolute().parent / f"{repo.absolute().name}.lock"


def clear_staging(repo: Path) -> None:
    """Remove everything from the staging folder except drafts in use. Call it under the lock.

    The folder itself is removed if it is empty then. Does nothing without the folder. A draft is in
    use while some process holds the lock of `draft_folder`.

    Raises:
        CannotWriteError: A file cannot be removed; the others may be gone.
        OSError: The folder cannot be listed.
    """
    top = staging_folder(repo)
    for path in sorted(top.iterdir()) if top.is_dir() else ():
        if not _in_use(path):
            durable.remove_tree(path)
    if top.is_dir() and not any(top.iterdir()):
        durable.remove_tree(top)


@contextlib.contextmanager
def draft_folder(repo: Path) -> Iterator[Path]:
    """Provide a folder in which to build a release; remove it at the end of the block.

    Waits up to a minute for another publisher, and makes missing parent folders. Other leftovers in
    the staging folder are removed. The folder of a killed process is removed by the next call, or
    by the next publish. An error of the block removes it, too.

    Args:
        repo: The publication folder; it may not exist yet.

    Yields:
        The folder, empty but for its lock file.

    Raises:
        BusyError: Another process publishes for more than a minute.
        CannotWriteError: The folder cannot be made, or at the end it cannot be removed.
        OSError: The staging folder cannot be listed.
    """
    with contextlib.ExitStack() as locks:
        with durable.lock_file(lock_path(repo), _LOCK_SECONDS):
            clear_staging(repo)
            folder = staging_folder(repo) / f"{_DRAFT}{uuid.uuid4().hex}"
            durable.make_dir(folder)
            locks.enter_context(durable.lock_file(folder / "lock"))
        try:
            yield folder
        finally:
            durable.remove_tree(folder)
            # A publisher that holds the lock tidies, too.
            with contextlib.suppress(BusyError), durable.lock_file(lock_path(repo)):
                clear_staging(repo)


def _in_use(path: Path) -> bool:
    """Tell whether a process holds the lock of a draft."""
    if not path.name.startswith(_DRAFT) or not (path / "lock").exists():
        return False
    try:
        with durable.lock_file(path / "lock"):
            return False
    except BusyError:
        return True


@dataclass(frozen=True)
class PublishedRelease:
    """The result of publishing, or of a dry run.

    Attributes:
        release: Number of the release.
        file_sizes: Bytes of each file by its published path.
        new_key_folder: The folder of the development keys, if this publish makes them.
        dry_run: Whether nothing was written.
    """

    release: int
    file_sizes: Mapping[str, int]
    new_key_folder: Path | None
    dry_run: bool


def publish(
    repo: Path,
    draft: Draft,
    keys: SigningKeys | None = None,
    dry_run: bool = False,
    share: float = 1.0,
) -> PublishedRelease:
    """Check, sign and publish a release.

    Checks digests, spaces, predecessors, the gate's verdict, every ONNX file and the golden probes.
    The checks run in a child and may take minutes; the publication's lock is held meanwhile. All
    new files are in memory at once. Leftovers of an interrupted publish are removed first. Readers
    see the release only after the last step, so an error or a kill before it changes nothing for
    them. After an interruption, run it again. An error after the checks may leave new keys, which
    the next call uses.

    Args:
        repo: The publication folder, made if missing.
        draft: The release.
        keys: The signing keys; None: those in `<repo>.keys/`. The first publish makes keys that are
            missing.
        dry_run: Check everything, write nothing. No lock is taken. Keys are checked where a
            publication has begun.
        share: Share of the devices that it is offered to at first, above 0 and at most 1; this is
            not checked.

    Returns:
        The release that was published, or that a dry run would publish.

    Raises:
        AlreadyExistsError: The number is not above the newest, or a file is published already;
            releases are immutable.
        GateFailedError: The release did not pass its gate and is not forced, or was gated as a
            first release although others are published.
        VerificationError: A check failed, a file of the draft is missing, or the published metadata
            is invalid. UnfitError: also where this program cannot use a published release or the
            draft.
        ConfigurationError: A key is missing or invalid, or others may read it; nothing is
            published.
        BusyError: Another publisher holds the lock; it is not waited for.
        CannotWriteError: The disk fails, or the folder is a mount point. Readers see the old state,
            or the new one if only the last sync failed.
        OSError: The child process cannot be started.
    """
    keys = keys or SigningKeys.of_publication(repo)
    if dry_run:
        ledger = read_signed_metadata(repo)
        files = _checked_files(repo, draft, ledger)
        check_keys(repo, keys)
        return _published(repo, draft, files, keys, dry_run=True)
    durable.make_dir(repo.absolute())
    with lock_publication(repo):
        ledger = remove_leftovers(repo)
        files = _checked_files(repo, draft, ledger)
        report = _published(repo, draft, files, keys, dry_run=False)
        signers = load_signers(keys, ensure_root(repo, keys))
        targets = dict(ledger.targets.targets) if ledger else {}
        for path, data in files.items():
            targets[path] = TargetFile.from_data(path, data, ["sha256"])
        if share < 1:
            path = manifest_path(report.release)
            targets[path] = with_offered_share(targets[path], path, share)
        put_files(repo, files)
        put_metadata(repo, make_next_metadata(ledger, targets, signers))
        return report


@contextmanager
def lock_publication(repo: Path) -> Iterator[None]:
    """Hold the lock of an existing publication folder during the block.

    The lock file lies next to the folder, and stays there. The same process cannot hold it twice:
    the second call raises BusyError.

    Raises:
        BusyError: Another publisher holds it; it is not waited for.
        CannotWriteError: The folder is a mount point, so that nothing can be renamed into it, or
            the lock file cannot be made.
        OSError: The folder is missing. The lock file may stay.
    """
    folder = repo.absolute()
    with durable.lock_file(lock_path(repo)):
        if folder.stat().st_dev != folder.parent.stat().st_dev:
            raise CannotWriteError(
                f"{folder}: this publication folder is on another file system than its parent, so "
                "files cannot be renamed into the folder; publish into a new folder inside this one"
            )
        yield


def remove_leftovers(repo: Path) -> SignedMetadata | None:
    """Remove leftovers of an interrupted publish, and return the committed metadata. Call it under
    the lock.

    Returns:
        The metadata; None before the first commit. Then every release file is a leftover.

    Raises:
        VerificationError: The metadata is invalid or incomplete; nothing is removed then.
        CannotWriteError: A file cannot be removed.
        OSError: The folder is missing.
    """
    ledger = read_signed_metadata(repo)
    clear_staging(repo)
    durable.remove_temporary_files(repo)
    for path in list_leftovers(repo, ledger):
        durable.remove_tree(path)
    return ledger


def put_metadata(repo: Path, files: list[tuple[str, bytes]]) -> None:
    """Stage metadata files, rename them into the publication in order, and tidy. Call it under the
    lock.

    Existing files of these names are replaced.

    Args:
        repo: The publication folder.
        files: Name and content of each file; the last one commits. None: only the staging folder is
            cleared.

    Raises:
        CannotWriteError: A file cannot be written; earlier ones may be in place already. Or the
            file system has no locks (flock); the new metadata is in place then.
    """
    durable.make_dir(staging_folder(repo))
    for name, data in files:
        durable.write_file(staging_folder(repo) / name, data)
    for name, _ in files:
        durable.replace_file(staging_folder(repo) / name, repo / name)
    clear_staging(repo)


def _checked_files(repo: Path, draft: Draft, ledger: SignedMetadata | None) -> dict[str, bytes]:
    """Check a draft, and return each file that its release adds, by published path."""
    manifest = draft.manifest
    published = {} if ledger is None else dict(ledger.targets.targets)
    newest = max((release_of_manifest(path) or 0 for path in published), default=0)
    if manifest.release <= newest:
        raise AlreadyExistsError(
            f"release {manifest.release}: expected a number above {newest}, the newest published "
            "release; a release is never replaced, so give this one the next number"
        )
    unchanged = {file.path for file in manifest.files() if _is_published(file, published)}
    files = {path: repo / path for path in unchanged} | dict(draft.local_files)
    check_draft(Draft(manifest, files), repo, published)
    new = {
        file.path: read_verified_file(files, file)
        for file in manifest.files()
        if file.path not in unchanged
    }
    new |= {path: text.encode() for path, text in manifest.triton_configs().items()}
    new[manifest_path(manifest.release)] = (manifest.model_dump_json(indent=1) + "\n").encode()
    return new


def _is_published(file: PublishedFile, published: Mapping[str, TargetFile]) -> bool:
    target = published.get(file.path)
    if target is None:
        return False
    if target.hashes.get("sha256") != file.sha256 or target.length != file.length:
        raise AlreadyExistsError(
            f"{file.path}: this file is published already with another content, and published "
            "files are never replaced; publish under the next release number"
        )
    return True


def _published(
    repo: Path, draft: Draft, files: Mapping[str, bytes], keys: SigningKeys, *, dry_run: bool
) -> PublishedRelease:
    new_keys = keys.folder if read_root(repo) is None and not keys.is_complete() else None
    sizes = {path: len(data) for path, data in files.items()}
    return PublishedRelease(draft.manifest.release, sizes, new_keys, dry_run)


def load_signers(keys: SigningKeys, root: Root) -> dict[Role, Signer]:
    """Return the signers of a release: one for each role except root.

    Args:
        keys: The key files. Keys that `root` does not accept are passed over. Nothing is written.
        root: The root metadata.

    Raises:
        ConfigurationError: No file has an accepted key of a role; a file is no key, cannot be read,
            or others may read it.
    """
    return {role: keys.require_key(role, root) for role in ROLES if role != "root"}


def check_keys(repo: Path, keys: SigningKeys) -> None:
    """Check that the keys of a publication that has begun are available.

    All keys but root's are checked. Nothing is written.

    Args:
        repo: The publication folder; before its first publish nothing is checked.
        keys: The key files.

    Raises:
        ConfigurationError: A key is missing; a file is no key, cannot be read, or others may read
            it.
        VerificationError: The root metadata is invalid.
    """
    if (root := read_root(repo)) is not None:
        load_signers(keys, root[0])


def refuse_existing_publication(repo: Path) -> None:
    """Refuse a publication that has root metadata already.

    Nothing is written.

    Raises:
        AlreadyExistsError: It has root metadata.
        VerificationError: Its root metadata is invalid.
    """
    if read_root(repo) is not None:
        raise AlreadyExistsError(
            f"{repo}: this publication has its signing keys already; replace them with "
            "`publication rotate`"
        )


def begin_publication(repo: Path, keys: SigningKeys) -> None:
    """Make the keys and the root metadata of a publication before its first release.

    An interrupted call may leave keys; the next call uses them.

    Args:
        repo: The publication folder, made if missing.
        keys: The key files; existing ones are used.

    Raises:
        AlreadyExistsError: The publication has root metadata already.
        BusyError: Another publisher holds the lock; it is not waited for.
        ConfigurationError: A file is no key, or others may read it.
        CannotWriteError: A file cannot be written, or the folder is a mount point.
        VerificationError: The root metadata is invalid.
    """
    refuse_existing_publication(repo)
    durable.make_dir(repo.absolute())
    with lock_publication(repo):
        refuse_existing_publication(repo)
        ensure_root(repo, keys)


def ensure_root(repo: Path, keys: SigningKeys) -> Root:
    """Return the root metadata of a publication; make keys and version 1 if missing. Call it under
    the lock.

    Args:
        repo: The publication folder.
        keys: The key files; they are read only if there is no root metadata. Missing ones are made.

    Returns:
        The newest version.

    Raises:
        VerificationError: The root metadata is invalid.
        ConfigurationError: A file is no key, or others may read it.
        CannotWriteError: A file cannot be written. Or metadata is written, and the file system has
            no locks (flock).
    """
    newest = read_root(repo)
    if newest is None:
        first = make_first_root(dict(keys.create()))
        put_metadata(repo, [("1.root.json", first)])
        return verify_metadata(Root, first, None, "1.root.json")
    return newest[0]


def put_files(repo: Path, files: Mapping[str, bytes]) -> None:
    """Stage files, then rename them and their folders into the publication. Call it under the lock.

    Files are no part of the publication until `put_metadata` lists them. A file at the top of the
    folder is replaced; a model's folder must be new.

    After an error, staged files stay until `clear_staging`.

    Args:
        repo: The publication folder.
        files: Content by published path; none: nothing but the staging folder is made.

    Raises:
        CannotWriteError: A file cannot be written; others may be in place already.
        AlreadyExistsError: A model's folder is published already; others may be in place.
    """
    top = staging_folder(repo)
    durable.make_dir(top)
    for path, data in files.items():
        durable.make_dir((top / path).parent)
        durable.write_file(top / path, data)
    for name in sorted({path.split("/")[0] for path in files}):
        if (top / name).is_dir():
            durable.publish_dir(top / name, repo / name)
        else:
            durable.replace_file(top / name, repo / name)


def publish_converter(
    repo: Path,
    onnx_data: bytes,
    make_manifest: Callable[[int, PublishedFile], Converter],
    keys: SigningKeys | None = None,
) -> Converter:
    """Sign and publish an ONNX map as a converter under the next number.

    The map itself is not checked or run here. Leftovers of an interrupted publish are removed
    first. After an interruption, run it again. An error may leave new keys, which the next call
    uses.

    Args:
        repo: The publication folder, made if missing.
        onnx_data: The ONNX file, at least one byte.
        make_manifest: Makes the manifest from the number and the entry of the file. It is called
            under the lock; its error ends the work before anything is added.
        keys: The signing keys; None: those in `<repo>.keys/`. The first publish makes keys that are
            missing.

    Returns:
        The manifest that was published, from `make_manifest`.

    Raises:
        BusyError: Another publisher holds the lock; it is not waited for.
        CannotWriteError: A file cannot be written, or the folder is a mount point.
        ConfigurationError: A key is missing or invalid, or others may read it.
        VerificationError: The published metadata is invalid.
        pydantic.ValidationError: `onnx_data` is empty.
    """
    keys = keys or SigningKeys.of_publication(repo)
    durable.make_dir(repo.absolute())
    with lock_publication(repo):
        ledger = remove_leftovers(repo)
        targets = dict(ledger.targets.targets) if ledger else {}
        number = 1 + max((parse_converter_number(path) or 0 for path in targets), default=0)
        path = converter_path(number)
        file = PublishedFile(path=path, sha256=sha256_bytes(onnx_data), length=len(onnx_data))
        manifest = make_manifest(number, file)
        signers = load_signers(keys, ensure_root(repo, keys))
        text = (manifest.model_dump_json(indent=1) + "\n").encode()
        files = {path: onnx_data, converter_manifest_path(number): text}
        for name, content in files.items():
            targets[name] = TargetFile.from_data(name, content, ["sha256"])
        put_files(repo, files)
        put_metadata(repo, make_next_metadata(ledger, targets, signers))
        return manifest
