"""What counts as an answer: an image of the query's class, other than the query's own picture."""

from nobackfill.class_folders import Listing, digests
from nobackfill.errors import InvalidInputError
from nobackfill.metrics.ranking import Relevance, same_label


def among_others(listing: Listing) -> Relevance:
    """Every image is a query, and all the others are the gallery (fct.txt section 4.2)."""
    return same_label(listing.labels, listing.labels, listing.paths, listing.paths)


def of_class(queries: Listing, gallery: Listing) -> Relevance:
    """Same class name = relevant; nothing is left out. Raises InvalidInputError where no class name
    is in both."""
    known = {name: label for label, name in enumerate(gallery.class_names)}
    labels = [known.get(queries.class_names[label], -1) for label in queries.labels]
    if not set(labels) & set(gallery.labels.tolist()):
        raise InvalidInputError(f"{queries.root} and {gallery.root} have no class name in common")
    return same_label(labels, gallery.labels)


def same_class(queries: Listing, gallery: Listing) -> tuple[Relevance, int]:
    """Same class name = relevant; a query's own picture, and copies of it, known by their content,
    are left out: of how many queries.

    Raises InvalidInputError where no class name is in both folders, or a file cannot be read.
    """
    known = {name: label for label, name in enumerate(gallery.class_names)}
    labels = [known.get(queries.class_names[label], -1) for label in queries.labels]
    if all(label < 0 for label in labels):
        raise InvalidInputError(
            f"{queries.root} and {gallery.root} have no class folder name in common"
        )
    relevance = same_label(labels, gallery.labels, digests(queries), digests(gallery))
    return relevance, sum(len(ignored) > 0 for ignored in relevance.ignored)
