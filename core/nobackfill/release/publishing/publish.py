"""Publishing: a release becomes visible wholly or not at all.

Everything is staged beside the publication folder, model folders are renamed into it, then targets
and snapshot metadata, and timestamp.json last: its replacement is the commit point. Under the lock,
whatever no committed metadata names is the leftover of a killed publish and is removed first.
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
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    CannotWriteError,
)
from nobackfill.release.manifest import (
    Converter,
    PublishedFile,
    converter_manifest_path,
    converter_path,
    number_of_converter,
)
from nobackfill.release.models import read_verified
from nobackfill.release.paths import manifest_path, release_of_manifest
from nobackfill.release.publishing.draft import Draft, check_draft
from nobackfill.release.publishing.metadata import (
    ROLES,
    Keys,
    MetadataLedger,
    Role,
    leftovers,
    new_root,
    next_metadata,
    read_ledger,
    read_root,
)
from nobackfill.release.trust.trust import for_share, verified

# Where releases are put together: beside the publication folder, as Triton trips over any other
# folder in it, and on its file system, so that what is complete can be renamed into it.

_DRAFT = "draft-"
_LOCK_SECONDS = 60.0


def staging(repo: Path) -> Path:
    """The folder."""
    return repo.absolute().parent / f"{repo.absolute().name}.staging"


def lock_path(repo: Path) -> Path:
    """The lock of whoever changes the publication, or what is staged for it."""
    return repo.absolute().parent / f"{repo.absolute().name}.lock"


def tidy(repo: Path) -> None:
    """Remove all that is staged but the drafts whose makers live, under the lock."""
    top = staging(repo)
    for path in sorted(top.iterdir()) if top.is_dir() else ():
        if not _in_use(path):
            durable.remove_tree(path)
    if top.is_dir() and not any(top.iterdir()):
        durable.remove_tree(top)


@contextlib.contextmanager
def drafting(repo: Path) -> Iterator[Path]:
    """A folder to put a release together in, removed at the end; that of a killed maker is removed
    by the next, or by the next publish.

    Raises BusyError while somebody publishes for long, CannotWriteError.
    """
    with contextlib.ExitStack() as held:
        with durable.lock(lock_path(repo), _LOCK_SECONDS):
            tidy(repo)
            folder = staging(repo) / f"{_DRAFT}{uuid.uuid4().hex}"
            durable.make_dir(folder)
            held.enter_context(durable.lock(folder / "lock"))
        try:
            yield folder
        finally:
            durable.remove_tree(folder)
            # Somebody else's publish tidies, too.
            with contextlib.suppress(BusyError), durable.lock(lock_path(repo)):
                tidy(repo)


def _in_use(path: Path) -> bool:
    """Whether a draft's maker holds its lock."""
    if not path.name.startswith(_DRAFT) or not (path / "lock").exists():
        return False
    try:
        with durable.lock(path / "lock"):
            return False
    except BusyError:
        return True


@dataclass(frozen=True)
class PublishedRelease:
    """What was published, or with dry_run would have been: paths with their bytes.

    `new_keys` names the folder of development keys, where this publish made them.
    """

    release: int
    files: Mapping[str, int]
    new_keys: Path | None
    written: bool


def publish(
    repo: Path, draft: Draft, keys: Keys | None = None, dry_run: bool = False, share: float = 1.0
) -> PublishedRelease:
    """Check, sign and publish a release into `repo` (made if missing); keys None: those beside it.
    `share`: of the devices that it is for at first, above 0 and at most 1.

    Checks digests, spaces, predecessors, the gate's verdict, every ONNX file and the golden probes.
    Raises AlreadyExistsError (releases are immutable, numbers only grow), GateFailedError,
    VerificationError, ConfigurationError (a key is missing), BusyError (another publisher),
    CannotWriteError. After a kill, running it again converges.
    """
    keys = keys or Keys.beside(repo)
    if dry_run:
        ledger = read_ledger(repo)
        files = _checked_files(repo, draft, ledger)
        check_keys(repo, keys)
        return _published(repo, draft, files, keys, written=False)
    durable.make_dir(repo.absolute())
    with locked(repo):
        ledger = clean(repo)
        files = _checked_files(repo, draft, ledger)
        report = _published(repo, draft, files, keys, written=True)
        signers = signers_of(keys, begin(repo, keys))
        targets = dict(ledger.targets.targets) if ledger else {}
        for path, data in files.items():
            targets[path] = TargetFile.from_data(path, data, ["sha256"])
        if share < 1:
            path = manifest_path(report.release)
            targets[path] = for_share(targets[path], path, share)
        put_files(repo, files)
        put_metadata(repo, next_metadata(ledger, targets, signers))
        return report


@contextmanager
def locked(repo: Path) -> Iterator[None]:
    """Hold the lock of a publication folder that exists. Raises BusyError, CannotWriteError."""
    folder = repo.absolute()
    with durable.lock(lock_path(repo)):
        if folder.stat().st_dev != folder.parent.stat().st_dev:
            raise CannotWriteError(
                f"{folder}: is on another file system than the folder around it, so nothing can be "
                "renamed into it; publish into a folder below it"
            )
        yield


def clean(repo: Path) -> MetadataLedger | None:
    """Remove what a killed publish left, under the lock; the committed metadata."""
    ledger = read_ledger(repo)
    tidy(repo)
    durable.sweep(repo)
    for path in leftovers(repo, ledger):
        durable.remove_tree(path)
    return ledger


def put_metadata(repo: Path, files: list[tuple[str, bytes]]) -> None:
    """Stage metadata files, move them into `repo` in their order, and be done with staging."""
    durable.make_dir(staging(repo))
    for name, data in files:
        durable.write_file(staging(repo) / name, data)
    for name, _ in files:
        durable.replace(staging(repo) / name, repo / name)
    tidy(repo)


def _checked_files(repo: Path, draft: Draft, ledger: MetadataLedger | None) -> dict[str, bytes]:
    """Every file that the release adds, by published path, once the draft has passed all checks."""
    manifest = draft.manifest
    published = {} if ledger is None else dict(ledger.targets.targets)
    newest = max((release_of_manifest(path) or 0 for path in published), default=0)
    if manifest.release <= newest:
        raise AlreadyExistsError(
            f"release {manifest.release}: expected a number above {newest}, the newest published; "
            "releases are immutable and numbers only grow"
        )
    carried = {file.path for file in manifest.files() if _is_published(file, published)}
    files = {path: repo / path for path in carried} | dict(draft.files)
    check_draft(Draft(manifest, files), repo, published)
    new = {
        file.path: read_verified(files, file)
        for file in manifest.files()
        if file.path not in carried
    }
    new |= {path: text.encode() for path, text in manifest.triton_configs().items()}
    new[manifest_path(manifest.release)] = (manifest.model_dump_json(indent=1) + "\n").encode()
    return new


def _is_published(file: PublishedFile, published: Mapping[str, TargetFile]) -> bool:
    target = published.get(file.path)
    if target is None:
        return False
    if target.hashes.get("sha256") != file.sha256 or target.length != file.length:
        raise AlreadyExistsError(f"{file.path}: is published already with another content")
    return True


def _published(
    repo: Path, draft: Draft, files: Mapping[str, bytes], keys: Keys, *, written: bool
) -> PublishedRelease:
    new_keys = keys.folder if read_root(repo) is None and not keys.complete() else None
    sizes = {path: len(data) for path, data in files.items()}
    return PublishedRelease(draft.manifest.release, sizes, new_keys, written)


def signers_of(keys: Keys, root: Root) -> dict[Role, Signer]:
    """The keys that sign releases. Raises ConfigurationError if one is not at hand."""
    return {role: keys.signer(role, root) for role in ROLES if role != "root"}


def check_keys(repo: Path, keys: Keys) -> None:
    """Raises ConfigurationError if the publication has begun and one of them is not at hand."""
    if (found := read_root(repo)) is not None:
        signers_of(keys, found[0])


def refuse_begun(repo: Path) -> None:
    """Raises AlreadyExistsError if the publication has root metadata."""
    if read_root(repo) is not None:
        raise AlreadyExistsError(f"{repo}: has its keys already; exchange them with rotate")


def begin_publication(repo: Path, keys: Keys) -> None:
    """Make the keys and the root metadata of a publication before its first release.

    Raises AlreadyExistsError if it has them, BusyError, ConfigurationError, CannotWriteError.
    """
    refuse_begun(repo)
    durable.make_dir(repo.absolute())
    with locked(repo):
        refuse_begun(repo)
        begin(repo, keys)


def begin(repo: Path, keys: Keys) -> Root:
    """The publication's root metadata, under the lock; keys and version 1 are made if missing."""
    found = read_root(repo)
    if found is None:
        first = new_root(dict(keys.create()))
        put_metadata(repo, [("1.root.json", first)])
        return verified(Root, first, None, "1.root.json")
    return found[0]


def put_files(repo: Path, files: Mapping[str, bytes]) -> None:
    """Stage files to be published, then rename folders and files into the publication."""
    top = staging(repo)
    durable.make_dir(top)
    for path, data in files.items():
        durable.make_dir((top / path).parent)
        durable.write_file(top / path, data)
    for name in sorted({path.split("/")[0] for path in files}):
        if (top / name).is_dir():
            durable.publish_dir(top / name, repo / name)
        else:
            durable.replace(top / name, repo / name)


def publish_converter(
    repo: Path,
    data: bytes,
    described: Callable[[int, PublishedFile], Converter],
    keys: Keys | None = None,
) -> Converter:
    """Sign and publish an ONNX map under the next number, in `repo` (made if missing).

    `described` makes the manifest from the number and the file. Raises BusyError, CannotWriteError,
    ConfigurationError (a key is missing). After a kill, running it again converges.
    """
    keys = keys or Keys.beside(repo)
    durable.make_dir(repo.absolute())
    with locked(repo):
        ledger = clean(repo)
        targets = dict(ledger.targets.targets) if ledger else {}
        number = 1 + max((number_of_converter(path) or 0 for path in targets), default=0)
        path = converter_path(number)
        file = PublishedFile(path=path, sha256=sha256_bytes(data), length=len(data))
        manifest = described(number, file)
        signers = signers_of(keys, begin(repo, keys))
        text = (manifest.model_dump_json(indent=1) + "\n").encode()
        files = {path: data, converter_manifest_path(number): text}
        for name, content in files.items():
            targets[name] = TargetFile.from_data(name, content, ["sha256"])
        put_files(repo, files)
        put_metadata(repo, next_metadata(ledger, targets, signers))
        return manifest
