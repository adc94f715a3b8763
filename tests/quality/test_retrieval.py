import numpy as np
import pytest

from nobackfill.class_folders import ImageListing, list_images
from nobackfill.errors import InvalidInputError
from nobackfill.metrics.distances import to_unit_norm
from nobackfill.metrics.ranking import relevance_by_label
from nobackfill.metrics.retrieval import mean_of_answerable, search_and_score
from nobackfill.quality.cells import parse_cell
from nobackfill.quality.criterion import compute_criteria
from nobackfill.quality.embedded import PublishedListing, cell_vectors
from nobackfill.quality.retrieval import (
    evaluate_cells,
    measure_cell,
    search_and_measure,
    search_cell,
)
from nobackfill.release.trust.trust import read_publication
from nobackfill.vectors import Vectors
from tests.training.life import Life

N, QUERIES = 2100, 150


class Scattered(PublishedListing):
    """Vectors in 40 clouds, more of them than HNSW answers exactly."""

    def native_vectors(self, release: int) -> Vectors:
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
    listing = ImageListing(life.data, names, tuple(map(str, range(N))), labels)
    return Scattered(listing, life.repo, read_publication(life.repo).manifests)


def test_the_real_index_gives_what_exact_search_gives(scattered: Scattered) -> None:
    some = scattered.listing.select(np.arange(QUERIES))
    queries = Scattered(some, scattered.files, scattered.manifests)
    relevance = relevance_by_label(
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


class Longer(PublishedListing):
    """Release 2 has 16 numbers: the first 8 are release 1's with less noise, the others noise."""

    def native_vectors(self, release: int) -> Vectors:
        labels = self.listing.labels
        off, rest = np.random.default_rng(0).normal(size=(2, len(labels), 8))
        centres = np.eye(8)[labels % 8]
        first = centres + (0.6 if release == 1 else 0.3) * off
        vectors = first if release == 1 else np.concatenate((first, 3 * rest), 1)
        return to_unit_norm(vectors).astype(np.float32)


def test_longer_queries_meet_raw_vectors_by_their_first_elements(life: Life) -> None:
    """BCT section 3.6, in matrices, in verification and in the strict criterion."""
    published = read_publication(life.repo).manifests
    listing = list_images(life.data / "queries")
    both = Longer(listing, life.repo, published)
    relevance = relevance_by_label(listing.labels, listing.labels)
    new, old = both.native_vectors(2)[:, :8], both.native_vectors(1)
    new = new / np.linalg.norm(new, axis=1, keepdims=True)
    cells = [parse_cell(cell) for cell in ("1/1", "2/1", "2/2")]
    measured = evaluate_cells(cells, both, both, relevance, neighbour_count=0)
    raw = measured[1].figures
    assert raw["map"] == pytest.approx(
        mean_of_answerable(search_and_score(new, old, relevance, "cosine")["map"])
    )
    assert measured[2].figures["map"] < measured[0].figures["map"] < raw["map"]
    # Verification: the impostor that one in a thousand comes nearer than.
    crossed = new @ old.T
    alike = listing.labels[:, None] == listing.labels
    bar = np.sort(crossed[~alike])[-int(0.001 * (~alike).sum()) - 1]
    assert raw["tar_at_far_0.001"] == pytest.approx(np.mean(crossed[alike] > bar), abs=0.01)
    told = compute_criteria(measured, both, both, relevance)["2/1"]
    before = old @ old.T
    apart, together = (crossed <= before)[~alike], (crossed >= before)[alike]
    assert told["strict_apart"] == pytest.approx(np.mean(apart), abs=1e-3)
    assert told["strict_together"] == pytest.approx(np.mean(together), abs=1e-3)
    with pytest.raises(InvalidInputError, match="vectors of one dimension, got 16 of"):
        search_cell(parse_cell("2/1"), both, both, relevance)
    with pytest.raises(InvalidInputError, match="dimensions 8 and 16 cannot be compared"):
        cell_vectors(parse_cell("1/2"), both, both)


def test_a_search_without_queries_has_empty_figures() -> None:
    nobody, items = np.empty((0, 3), np.float32), np.eye(3, dtype=np.float32)
    figures = search_and_measure(
        nobody, items, relevance_by_label([], [0, 1, 2]), neighbour_count=2
    )
    assert (len(figures.map), figures.neighbours.shape) == (0, (0, 2))
