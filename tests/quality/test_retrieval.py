import numpy as np
import pytest

from nobackfill.class_folders import Listing, list_images
from nobackfill.errors import InvalidInputError
from nobackfill.metrics.distances import unit
from nobackfill.metrics.ranking import same_label
from nobackfill.quality.cells import parse_cell
from nobackfill.quality.criterion import criterion
from nobackfill.quality.embedded import Published, cell_vectors
from nobackfill.quality.matrix import evaluate_cells
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


class Longer(Published):
    """Release 2 has 16 numbers, the first 8 of which are release 1's, and noise behind them."""

    def native(self, release: int) -> Vectors:
        labels = self.listing.labels
        rng = np.random.default_rng(0)
        first = np.eye(8)[labels % 8] + 0.6 * rng.normal(size=(len(labels), 8))
        noise = np.random.default_rng(1).normal(size=(len(labels), 8))
        vectors = first if release == 1 else np.concatenate((first, 3 * noise), 1)
        return unit(vectors).astype(np.float32)


def test_longer_queries_meet_raw_vectors_by_their_first_elements(life: Life) -> None:
    """BCT section 3.6, in matrices, in the strict criterion and in verification."""
    published = read_publication(life.repo).manifests
    listing = list_images(life.data / "queries")
    both = Longer(listing, life.repo, published)
    relevance = same_label(listing.labels, listing.labels)
    asking, held = cell_vectors(parse_cell("2/1"), both, both)
    np.testing.assert_allclose(asking, held, atol=1e-6)
    assert np.allclose(np.linalg.norm(asking, axis=1), 1, atol=1e-5)
    cells = [parse_cell(cell) for cell in ("1/1", "2/1", "2/2")]
    measured = {str(m.name): m for m in evaluate_cells(cells, both, both, relevance, neighbours=0)}
    for figure in ("cmc1", "map", "tar_at_far_0.001"):
        old, raw = (measured[cell].figures.get(figure) for cell in ("1/1", "2/1"))
        assert raw == pytest.approx(old), figure
    told = criterion(list(measured.values()), both, both, relevance, None)["2/1"]
    # The same distances, so no pair of two classes is nearer and none of one is farther.
    assert told["strict_apart"] == told["strict_together"] == 1
    with pytest.raises(InvalidInputError, match="have one dimension, got 16 and 8"):
        search_cell(parse_cell("2/1"), both, both, relevance)
    with pytest.raises(InvalidInputError, match="dimensions 8 and 16 cannot be compared"):
        cell_vectors(parse_cell("1/2"), both, both)
