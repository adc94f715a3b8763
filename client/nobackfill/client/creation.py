"""Make a gallery: verify its publisher, download the newest release, create the SQLite file."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuf.api.metadata import Root

from nobackfill import durable
from nobackfill.client import sync
from nobackfill.client.gallery_file import sidecar_path
from nobackfill.client.output import Output
from nobackfill.client.sync import embedding_files
from nobackfill.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_file import refuse_leftover_log
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.release.trust.trust import Trust, fetch_first_root, verify_metadata

Confirm = Callable[[bytes], None]


def init(
    path: Path, source: str, root: bytes | None, confirm: Confirm, output: Output
) -> dict[str, Any]:
    """Make an empty gallery file that follows a publication; the file appears as the last step.

    Verifies the metadata, downloads the encoders of the newest release that includes this device,
    and tries them. Files that lie there from a failed try are removed first. Downloads of a failed
    try stay, and are continued.

    Creates the folder of models, and with it the folder of the gallery if it is missing. Holds a
    lock during the call. Only the token and certificate in the environment are used for a gateway.

    Args:
        path: the gallery file to make.
        source: a gateway, a static host or a publication folder.
        root: the root metadata to trust. None: download the publication's first root metadata and
            pass it to `confirm`.
        confirm: raises if the downloaded root metadata must not be trusted; its errors pass
            through. Not called if `root` is given.
        output: where to write progress.

    Returns:
        `gallery` (its path), `source`, `release`, and `bytes` (downloaded).

    Raises:
        InvalidInputError: the path is not UTF-8.
        AlreadyExistsError: a file exists at `path`, or files of an earlier gallery.
        ConfigurationError: `source` has an unknown form, or its folder does not exist; or the token
            or certificate for a gateway cannot be read.
        NotFoundError: the source has published no release.
        VerificationError: the publication fails verification, a model fails its trial, also because
            it needs the extra `text`, or this program can use no release (UnfitError).
        NotPermittedError: the gateway refuses the token.
        UnavailableError: the source does not answer.
        BusyError: another process makes this gallery. This does not wait.
        CannotWriteError: the disk is full or read-only.
        OSError: this user may not look into the folder.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{path}: expected a name in UTF-8 for the gallery file; choose another name"
        ) from error
    if path.exists():
        raise AlreadyExistsError(f"{path}: already exists; name another file with --gallery")
    refuse_leftover_log(path)
    source = sync.normalise_source(source)
    models = sidecar_path(path, "models")
    draft = path.with_name(f"{durable.TEMPORARY_PREFIX}{path.name}")
    with durable.lock_file(models / "sync.lock"), sync.open_source(source) as (fetcher, base_url):
        # Trusted metadata of an earlier, failed try must not decide whom to trust now.
        durable.remove_tree(models / "trusted.json")
        for leftover in sorted(path.parent.glob(f"{draft.name}*")):
            durable.remove_tree(leftover)
        if root is None:
            root = fetch_first_root(fetcher, base_url)
            confirm(root)
        verify_metadata(Root, root, None, "the given root metadata")
        trust = Trust(models, fetcher, base_url, root)
        trust.refresh()
        cohort = secrets.token_hex(16)
        newest = trust.newest_release(cohort)
        if newest is None:
            raise NotFoundError(
                f"{source}: no release is published there yet; run the command again when one is"
            )
        manifest = trust.manifest(newest)
        fetched = sync.download_files(models, trust, embedding_files(manifest), output)
        sync.check_models(models, manifest, set())
        with SqliteGallery.create(draft, SpaceSpec.of(manifest)) as store:
            store.update_state(
                {
                    "source": source,
                    "root": root.decode(),
                    "cohort": cohort,
                    "floor": trust.version_floor().model_dump(),
                    "installed": {str(newest): sync.manifest_digest(trust, newest)},
                }
            )
        durable.remove_tree(draft.with_name(f"{draft.name}.lock"))
        durable.replace_file(draft, path)
    return {"gallery": str(path), "source": source, "release": newest, "bytes": fetched}
