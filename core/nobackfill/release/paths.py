"""The name and the newest format of a release's manifest, for readers that load no pydantic."""

import re

# The newest format of manifests.
NEWEST_FORMAT = 4

# No more digits than a manifest may declare.
_MANIFEST = re.compile(r"release-(0|[1-9][0-9]{0,6})\.json")


def manifest_path(release: int) -> str:
    """The manifest of release N in the publication folder."""
    return f"release-{release}.json"


def release_of_manifest(path: str) -> int | None:
    """N of `release-N.json`, None for every other path."""
    named = _MANIFEST.fullmatch(path)
    return int(named[1]) if named is not None else None
