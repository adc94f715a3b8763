"""The reader's side: what may be believed of a publication, wherever its files come from.

>>> from nobackfill.release.trust import Trust, fetcher_for, first_root
>>> fetcher, url = fetcher_for(str(model_repo))
>>> trust = Trust(folder / "trust", fetcher, url, first_root(fetcher, url))
>>> trust.refresh()
True
>>> sorted(dict(trust.manifests()))
[1, 2]
"""

from typing import TYPE_CHECKING

from nobackfill.faces import offer

if TYPE_CHECKING:
    from nobackfill.release.trust.fetchers import (
        Fetcher as Fetcher,
        FolderFetcher as FolderFetcher,
        HttpFetcher as HttpFetcher,
        fetcher_for as fetcher_for,
    )
    from nobackfill.release.trust.trust import (
        Publication as Publication,
        read_publication as read_publication,
        require_release as require_release,
    )
    from nobackfill.release.trust.trust import (
        Trust as Trust,
        TrustedFolder as TrustedFolder,
        fingerprint as fingerprint,
        first_root as first_root,
    )
else:
    __getattr__ = offer(
        __name__,
        {
            "fetchers": "Fetcher FolderFetcher HttpFetcher fetcher_for",
            "trust": (
                "Publication Trust TrustedFolder fingerprint first_root read_publication "
                "require_release"
            ),
        },
    )
