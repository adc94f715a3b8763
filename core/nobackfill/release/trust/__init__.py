"""Verify a publication as a reader, wherever its files come from.

>>> from nobackfill.release.trust import Trust, fetcher_for, first_root
>>> fetcher, url = fetcher_for(str(model_repo))
>>> trust = Trust(folder / "trust", fetcher, url, first_root(fetcher, url))
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
        fingerprint as fingerprint,
        first_root as first_root,
        read_publication as read_publication,
        require_release as require_release,
    )
else:
    __getattr__ = export_lazily(
        __name__,
        {
            "trust": (
                "Fetcher FolderFetcher HttpFetcher Publication Trust TrustedFolder fetcher_for "
                "fingerprint first_root read_publication require_release"
            ),
        },
    )
