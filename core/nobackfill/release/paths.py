"""Define the name and the newest format of manifests, for readers that do not import pydantic."""

import re

# The newest format of manifests that this program reads.
NEWEST_FORMAT = 5

# No more digits than a manifest may have in its number.
_MANIFEST = re.compile(r"release-(0|[1-9][0-9]{0,6})\.json")


def manifest_path(release: int) -> str:
    """Return the published path of a release's manifest. The number is not checked."""
    return f"release-{release}.json"


def release_of_manifest(path: str) -> int | None:
    """Return N of `release-N.json`, None for every other path. Zero counts as a number; leading
    zeros and more than seven digits do not."""
    match = _MANIFEST.fullmatch(path)
    return int(match[1]) if match is not None else None
