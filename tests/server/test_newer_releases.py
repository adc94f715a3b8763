"""A gateway serves on beside a signed release that it cannot read, and says which it is."""

from pathlib import Path

import pytest

from nobackfill.errors import CannotWriteError, VerificationError
from nobackfill.release.paths import NEWEST_FORMAT
from nobackfill.release.trust.trust import TrustedFolder
from nobackfill.server.catalog import Catalog
from nobackfill.server.grpc.metrics import Metrics
from tests.support import blocks
from tests.support.publication import publish_manifest
from tests.support.waiting import wait_until


def test_a_release_for_newer_versions_is_not_the_newest(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    blocks.publish_block_release(repo, 1)
    publish_manifest(repo, 2, b'{"format": %d}' % (NEWEST_FORMAT + 1))
    catalog = Catalog(repo, tmp_path / "state", None, Metrics())
    catalog.refresh()
    assert catalog.newest_release() == 1
    assert set(catalog.manifests) == {1}
    with pytest.raises(VerificationError, match="release 2 needs a newer nobackfill"):
        catalog.find_manifest(2)


def test_a_release_that_could_not_be_read_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "repo"
    blocks.publish_block_release(repo, 1)
    catalog, refused = Catalog(repo, tmp_path / "state", None, Metrics()), list[int]()
    refresh = TrustedFolder.refresh

    def full_at_first(trust: TrustedFolder) -> None:
        if not refused:
            refused.append(1)
            raise CannotWriteError("the disk is full")
        refresh(trust)

    monkeypatch.setattr(TrustedFolder, "refresh", full_at_first)
    catalog.watch()
    try:
        wait_until(lambda: catalog.newest_release() == 1, "release 1 was not read")
    finally:
        catalog.close()
    assert refused
