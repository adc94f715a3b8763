"""Making a gallery: whom to trust, the newest release's models, an empty SQLite file."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuf.api.metadata import Root

from nobackfill import durable
from nobackfill.client import sources, sync
from nobackfill.client.gallery_file import beside
from nobackfill.client.output import Output
from nobackfill.client.sync import embedding_files
from nobackfill.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from nobackfill.gallery.connections import refuse_leftovers
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.release.trust.trust import Trust, first_root, verified

Confirm = Callable[[bytes], None]


def init(
    path: Path, source: str, root: bytes | None, confirm: Confirm, output: Output
) -> dict[str, Any]:
    """Make an empty gallery at `path` that follows `source`.

    Without `root`, the publication's own first root metadata is shown to `confirm`, which raises if
    it is not to be trusted. The gallery appears as the last step. Raises InvalidInputError for a
    name that is not UTF-8, AlreadyExistsError, NotFoundError (nothing is published),
    VerificationError, UnavailableError, CannotWriteError.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{path}: expected a name in UTF-8; choose another") from error
    if path.exists():
        raise AlreadyExistsError(f"{path}: exists already; name another file with --gallery")
    refuse_leftovers(path)
    source = sources.normalised_source(source)
    models = beside(path, "models")
    draft = path.with_name(f"{durable.TEMPORARY}{path.name}")
    with durable.lock(models / "sync.lock"), sources.open_source(source) as (fetcher, base_url):
        # What an earlier try left says nothing about whom to trust now.
        durable.remove_tree(models / "trusted.json")
        for leftover in sorted(path.parent.glob(f"{draft.name}*")):
            durable.remove_tree(leftover)
        if root is None:
            root = first_root(fetcher, base_url)
            confirm(root)
        verified(Root, root, None, "the given root metadata")
        trust = Trust(models, fetcher, base_url, root)
        trust.refresh()
        cohort = secrets.token_hex(16)
        newest = trust.newest(cohort)
        if newest is None:
            raise NotFoundError(f"{source}: no release is published there yet")
        manifest = trust.manifest(newest)
        fetched = sync.download_files(models, trust, embedding_files(manifest), output)
        sync.check_models(models, manifest, set())
        with SqliteGallery.create(draft, SpaceSpec.of(manifest)) as store:
            store.state_set(
                {
                    "source": source,
                    "root": root.decode(),
                    "cohort": cohort,
                    "floor": trust.floor().model_dump(),
                    "installed": {str(newest): sync.manifest_digest(trust, newest)},
                }
            )
        durable.remove_tree(draft.with_name(f"{draft.name}.lock"))
        durable.replace(draft, path)
    return {"gallery": str(path), "source": source, "release": newest, "bytes": fetched}
