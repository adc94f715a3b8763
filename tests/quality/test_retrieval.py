import numpy as np
import pytest

from nobackfill.class_folders import Listing, list_images
from nobackfill.errors import InvalidInputError
from nobackfill.metrics.ranking import same_label
from nobackfill.quality.cells import parse_cell
from nobackfill.quality.embedded import Published
from nobackfill.quality.retrieval import measure_cell, search_cell
from nobackfill.release.trust.publication import read_publication
from nobackfill.vectors import Vectors
from tests.training.life import Life

N, QUERIES = 2100, 150


class Scattered(Published):
    """Vectors in 40 clouds, more of them than HNSW answers exactly."""

    def native(self, release: int) -> Vectors:
        rng = np.random.default_rng(release)
        centres = np.random.default_rng(99).normal(size=(40, 16))
        labels = self.listing.labels
        vectors = centres[labels] + 1.2 * rng.normal(size=(len(labels), 16))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors, np.float32)


@pytest.fixture
def scattered(life: Life) -> Scattered:
    labels = np.arange(N) % 40
    names = tuple(f"{i:02d}" for i in range(40))
    listing = Listing(life.data, names, tuple(map(str, range(N))), labels)
    return Scattered(listing, life.repo, read_publication(life.repo).manifests)


def test_the_real_index_gives_what_exact_search_gives(scattered: Scattered) -> None:
    some = scattered.listing.select(np.arange(QUERIES))
    queries = Scattered(some, scattered.files, scattered.manifests)
    relevance = same_label(
        some.labels, scattered.listing.labels, some.paths, scattered.listing.paths
    )
    cell = parse_cell("2/2")
    approximate = search_cell(cell, queries, scattered, relevance)
    again = search_cell(cell, queries, scattered, relevance)
    true = measure_cell(cell, queries, scattered, relevance)
    assert np.array_equal(approximate.neighbours, again.neighbours)
    for name in ("cmc1", "cmc5", "map"):
        got, expected = getattr(approximate, name), getattr(true, name)
        assert np.nanmean(got) == pytest.approx(np.nanmean(expected), abs=0.01)


def test_raw_vectors_of_other_dimensions_are_not_compared(life: Life) -> None:
    published = read_publication(life.repo).manifests

    class Wide(Published):
        def native(self, release: int) -> Vectors:
            return np.zeros((80, 8 * release), np.float32)

    wide = Wide(list_images(life.data / "queries"), life.repo, published)
    relevance = same_label(wide.listing.labels, wide.listing.labels)
    with pytest.raises(InvalidInputError, match="dimensions 16 and 8 cannot be compared"):
        search_cell(parse_cell("2/1"), wide, wide, relevance)
