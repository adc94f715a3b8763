"""Publish releases: drafts, keys, renewal, and checks of a whole publication folder.

The functions `publish` and `withdraw` are in the modules `publish` and `renew`; the command is
`publication`.

>>> from nobackfill.release.publishing import list_releases, verify_publication
>>> [entry.release for entry in list_releases(model_repo)]
[1, 2]
>>> verify_publication(model_repo, release=2).releases
(2,)
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.release.publishing.draft import Draft as Draft, describe_file as describe_file
    from nobackfill.release.publishing.inspection import (
        PublicationEntry as PublicationEntry,
        PublicationHealth as PublicationHealth,
        list_releases as list_releases,
        verify_publication as verify_publication,
    )
    from nobackfill.release.publishing.metadata import SigningKeys as SigningKeys
    from nobackfill.release.publishing.renew import (
        Renewal as Renewal,
        resign as resign,
        rotate as rotate,
    )
    from nobackfill.release.publishing.publish import draft_folder as draft_folder
else:
    __getattr__ = export_lazily(__name__)
