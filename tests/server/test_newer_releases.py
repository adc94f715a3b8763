"""A gateway serves on beside a signed release that it cannot read, and says which it is."""

from pathlib import Path

import pytest

from release.errors import VerificationError
from server.border.metrics import Metrics
from server.catalog import Catalog
from tests.support import blocks
from tests.support.publication import publish_manifest


def test_a_release_for_newer_versions_is_not_the_newest(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    blocks.publish_block_release(repo, 1)
    publish_manifest(repo, 2, b'{"format": 2}')
    catalog = Catalog(repo, tmp_path / "state", None, Metrics())
    catalog.refresh()
    assert catalog.newest() == 1
    assert set(catalog.manifests) == {1}
    with pytest.raises(VerificationError, match="release 2 needs a newer nobackfill"):
        catalog.find(2)
