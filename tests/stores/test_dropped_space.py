"""A space that another gateway drops between two readings of this one."""

from pathlib import Path

import pytest

from nobackfill.errors import NotFoundError
from nobackfill.gallery.store import NewVectors
from nobackfill.server.galleries.hosted_database import HostedInDatabase
from nobackfill.server.stores.postgresql.gallery import PostgresqlGalleries, PostgresqlGallery
from tests.gallery.making import ids, spec, vectors

ONE, TWO = spec().space, spec(release=2).space


def test_it_counts_as_empty(empty: PostgresqlGallery, tmp_path: Path) -> None:
    """A gateway that started meanwhile set the gallery aside, and ended if it had no other."""
    empty.put(ids(3), [NewVectors(ONE, vectors(3, 1))])
    empty.add_staging_space(spec(release=2))
    hosted = HostedInDatabase("g", tmp_path, empty)
    assert hosted.vector_counts() == {ONE: 3, TWO: 0}
    hosted._counts = {}
    PostgresqlGallery(empty.database, empty.number).drop_space(TWO)
    assert [info.spec.space for info in hosted.spaces()] == [ONE, TWO]
    assert hosted.vector_counts() == {ONE: 3, TWO: 0}
    assert hosted.count() == 3


def test_another_gateway_sets_exact_distances(empty: PostgresqlGallery, tmp_path: Path) -> None:
    """A gateway went on rounding distances until its restart."""
    here, there = (HostedInDatabase("g", tmp_path, empty) for _ in range(2))
    there.set_exact_distances(True)
    here._read()
    assert here.exact_distances


def test_a_gallery_that_is_gone_has_no_count(empty: PostgresqlGallery, tmp_path: Path) -> None:
    hosted = HostedInDatabase("g", tmp_path, empty)
    PostgresqlGalleries(empty.database).delete("g")
    with pytest.raises(NotFoundError):
        hosted.count()
