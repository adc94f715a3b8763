"""Publish releases: drafts, keys, renewal, and checks of a whole publication folder.

The functions `publish` and `withdraw` are in the modules `publish` and `renew`; the command is
`publication`.

>>> from nobackfill.release.publishing import list_releases, verify
>>> [entry.release for entry in list_releases(model_repo)]
[1, 2]
>>> verify(model_repo, release=2).releases
(2,)
"""

from typing import TYPE_CHECKING

from nobackfill.faces import offer

if TYPE_CHECKING:
    from nobackfill.release.publishing.draft import Draft as Draft, describe_file as describe_file
    from nobackfill.release.publishing.inspection import (
        PublicationEntry as PublicationEntry,
        Health as Health,
        list_releases as list_releases,
        verify as verify,
    )
    from nobackfill.release.publishing.metadata import Keys as Keys
    from nobackfill.release.publishing.renew import (
        Renewal as Renewal,
        resign as resign,
        rotate as rotate,
    )
    from nobackfill.release.publishing.publish import drafting as drafting
else:
    __getattr__ = offer(
        __name__,
        {
            "draft": "Draft describe_file",
            "inspection": "Health PublicationEntry list_releases verify",
            "metadata": "Keys",
            "publish": "drafting",
            "renew": "Renewal resign rotate",
        },
    )
