"""Verify a publication as a reader, wherever its files come from.

>>> from nobackfill.release.trust import Trust, fetcher_for, fetch_first_root
>>> fetcher, url = fetcher_for(str(model_repo))
>>> trust = Trust(folder / "trust", fetcher, url, fetch_first_root(fetcher, url))
>>> trust.refresh()
True
>>> sorted(dict(trust.manifests()))
[1, 2]
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.release.trust.trust import (
        Fetcher as Fetcher,
        FolderFetcher as FolderFetcher,
        HttpFetcher as HttpFetcher,
        Publication as Publication,
        Trust as Trust,
        TrustedFolder as TrustedFolder,
        fetcher_for as fetcher_for,
        format_root_fingerprint as format_root_fingerprint,
        fetch_first_root as fetch_first_root,
        read_publication as read_publication,
        find_published_manifest as find_published_manifest,
    )
else:
    __getattr__ = export_lazily(__name__)
