"""List the data that is measured: texts, relevance, and two halves.

One half fits the calibration, the other decides the gate.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import ImageListing, hash_files, order_rows_by_digest
from nobackfill.errors import InvalidInputError, join_few
from nobackfill.metrics.ranking import Relevance, relevance_by_label
from nobackfill.text import TextLine, check_text, read_text_lines

_LABEL, _QUERY = "label", "query"
_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])")


@dataclass(frozen=True)
class TextListing(ImageListing):
    """Texts, listed like images in class folders.

    Attributes:
        root: The JSONL file.
        paths: Ids of the texts.
        texts: The texts.
        queries: A query for each text, if the texts have no classes: each text is then its own
            class.
    """

    texts: tuple[str, ...]
    queries: tuple[str, ...] = ()

    def select(self, rows: NDArray[np.int64]) -> Self:
        """Return a listing of some texts with their queries, with the same classes and labels.

        Args:
            rows: int64 [m], indices of the n texts, from 0; they may repeat, in any order. Negative
                ones count from the end.

        Raises:
            IndexError: An index is outside the listing.
        """
        paths = tuple(self.paths[row] for row in rows)
        texts = tuple(self.texts[row] for row in rows)
        queries = tuple(self.queries[row] for row in rows) if self.queries else ()
        return type(self)(self.root, self.class_names, paths, self.labels[rows], texts, queries)

    def as_queries(self) -> Self:
        """Return the queries as a listing of texts without queries, each in the class of its text.

        Call it only where `queries` is not empty.
        """
        return type(self)(self.root, self.class_names, self.paths, self.labels, self.queries)

    def split_first_sentences(self) -> Self:
        """Return the texts without their first sentence, which becomes the query; each is its own
        class.

        Texts without two parts are left out. A single sentence is cut after a third of its words,
        or of its letters where it has no spaces. The texts' own classes and queries are dropped.
        Ids stay, and may be used to find the text. The result may be empty.
        """
        cut = [_cut(text) for text in self.texts]
        rows = [row for row, parts in enumerate(cut) if all(map(_readable, parts))]
        paths = tuple(self.paths[row] for row in rows)
        queries, texts = (tuple(cut[row][part] for row in rows) for part in (0, 1))
        return type(self)(self.root, paths, paths, np.arange(len(rows)), texts, queries)


def list_texts(file: Path) -> TextListing:
    """List the texts of a JSONL file with the keys `id`, `text` and `label`, the name of the class.

    If no text has a label, each text must be found by its `query`, and is its own class. If no text
    has a query either, its first sentence becomes the query and is removed from it (the inverse
    cloze task of Lee et al. 2019, section 4: a sentence searches for its context). If any text has
    a label, queries are ignored. A file without texts gives an empty listing. A label may be a
    whole number; 1 and "1" are one class.

    Returns:
        The texts in the order of the file; class names are sorted, or are the ids in that order if
        no text has a label.

    Raises:
        NotFoundError: The file is missing or cannot be read.
        InvalidInputError: A line is no JSON object with an id and a text, or the file is neither
            regular nor a pipe. Or a text lacks a label or query that others have, or has the id of
            another. Or a text or query is blank, cannot be cut in two, or is larger than 64 KiB
            (TooLargeError).
    """
    lines = list(read_text_lines(file))
    ids = [one.id for one in lines]
    duplicates = [name for name, times in Counter(ids).items() if times > 1]
    if duplicates:
        raise InvalidInputError(
            f"{file}: expected each id once, got {duplicates[0]!r} again; remove one of the lines"
        )
    for one in lines:
        _check(one.text, file, one)
    if not any(_LABEL in one.other_keys for one in lines):
        return _known_items(file, lines)
    labels = []
    for one in lines:
        label = one.other_keys.get(_LABEL)
        if not isinstance(label, str | int):
            raise InvalidInputError(
                f"{file}: {one.id}: expected the key {_LABEL!r} with the name of the text's "
                "class, because other lines have it; complete the line"
            )
        labels.append(str(label))
    names = sorted(set(labels))
    places = {name: place for place, name in enumerate(names)}
    numbers = np.array([places[label] for label in labels], np.int64)
    return TextListing(file, tuple(names), tuple(ids), numbers, tuple(one.text for one in lines))


def _known_items(file: Path, lines: list[TextLine]) -> TextListing:
    with_queries = any(_QUERY in one.other_keys for one in lines)
    queries, texts = [], []
    for one in lines:
        query, text = (one.other_keys.get(_QUERY), one.text) if with_queries else _cut(one.text)
        if not isinstance(query, str):
            raise InvalidInputError(
                f"{file}: {one.id}: expected the key {_QUERY!r} with a text that should find this "
                "one, in every line or in none; complete the line, or remove the key from all"
            )
        queries.append(_check(query, file, one))
        texts.append(_check(text, file, one))
    ids = tuple(one.id for one in lines)
    numbers = np.arange(len(lines), dtype=np.int64)
    return TextListing(file, ids, ids, numbers, tuple(texts), tuple(queries))


def _cut(text: str) -> tuple[str, str]:
    """Split off the first sentence; of a single sentence, a third of its words, or of its letters
    where it has no spaces."""
    first, *others = _SENTENCE.split(text.strip(), maxsplit=1)
    if others and others[0]:
        return first, others[0]
    space, words = " ", text.split()
    if len(words) == 1:
        space, words = "", list(words[0])
    count = max(1, len(words) // 3)
    return space.join(words[:count]), space.join(words[count:])


def _readable(text: str) -> bool:
    try:
        check_text(text)
    except InvalidInputError:
        return False
    return True


def _check(text: str, file: Path, line: TextLine) -> str:
    try:
        return check_text(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"{file}: {line.id}: {error}") from error


def relevance_among_others(listing: ImageListing) -> Relevance:
    """Make every image or text a query, and all the others of its class relevant (FCT section 4.2);
    the query itself is ignored. A query alone in its class has no relevant item."""
    return relevance_by_label(listing.labels, listing.labels, listing.paths, listing.paths)


def relevance_by_class(queries: ImageListing, gallery: ImageListing) -> Relevance:
    """Make items with the query's class name relevant; nothing is ignored.

    Returns:
        For each query, the gallery positions of its class; empty if the gallery has none.

    Raises:
        InvalidInputError: The two listings have no class in common that has items, or there are no
            queries.
    """
    numbers = {name: label for label, name in enumerate(gallery.class_names)}
    labels = [numbers.get(queries.class_names[label], -1) for label in queries.labels]
    if not set(labels) & set(gallery.labels.tolist()):
        raise InvalidInputError(
            f"{queries.root} and {gallery.root} have no class name in common, so that no query "
            "could find anything; use the same names in both"
        )
    return relevance_by_label(labels, gallery.labels)


def relevance_without_copies(queries: ImageListing, gallery: ImageListing) -> tuple[Relevance, int]:
    """Make items with the query's class name relevant; ignore copies of the query's own picture.

    Copies are recognised by their content.

    Reads every file of both listings. Copies are equal byte for byte.

    Returns:
        The relevance, and the number of queries with a copy in the gallery.

    Raises:
        InvalidInputError: The two listings have no class in common that has items, there are no
            queries, or a file cannot be read.
    """
    relevant = relevance_by_class(queries, gallery).relevant
    copies = relevance_by_label(hash_files(queries), hash_files(gallery)).relevant
    return Relevance(relevant, copies), sum(len(rows) > 0 for rows in copies)


# A half must have this many classes with this many images each, to compare anything.
CLASSES = 2
IMAGES = 2
# The same for texts that are their own class.
ITEMS = 20

Rows = NDArray[np.int64]


def split_halves(listing: ImageListing, seed: int) -> tuple[Rows, Rows]:
    """Split a listing into two disjoint halves of every class, by a digest of path and seed.

    Odd images go to the halves in turn. A class of two images stays together, so that both halves
    have pairs. Texts that are their own class are split as one class.

    Args:
        listing: The images or texts.
        seed: Changes the split, any whole number; a seed gives the same split again, on every
            machine.

    Returns:
        Rows of each half, int64, increasing.

    Raises:
        InvalidInputError: A half is too small to compare anything: fewer than 2 classes with 2
            images each, or of 40 texts that are their own class.
    """
    if isinstance(listing, TextListing) and listing.queries:
        return _of_items(listing, seed)
    second = np.zeros(len(listing), bool)
    # Classes whose pair only one of the halves can have take turns separately.
    turns = {True: False, False: False}
    for rows in order_rows_by_digest(listing, seed):
        size = len(rows) // 2
        if len(rows) % 2 or len(rows) == IMAGES:
            single = len(rows) in (IMAGES, IMAGES + 1)
            turns[single] = not turns[single]
            goes_here = not turns[single]
            size = len(rows) * goes_here if len(rows) == IMAGES else size + goes_here
        second[rows[:size]] = True
    split = np.flatnonzero(~second), np.flatnonzero(second)
    for half in split:
        _check_enough(listing, half)
    return split


def _of_items(listing: TextListing, seed: int) -> tuple[Rows, Rows]:
    """Split texts that are each their own class. Raises InvalidInputError for too few."""
    if len(listing) < 2 * ITEMS:
        raise InvalidInputError(
            f"--eval-texts {listing.root}: half of the texts are for calibration and half for the "
            f"gate; expected at least {2 * ITEMS} texts, got {len(listing)}; add texts"
        )
    one_class = ImageListing(listing.root, ("",), listing.paths, np.zeros(len(listing), np.int64))
    (every,) = order_rows_by_digest(one_class, seed)
    return np.sort(every[::2]), np.sort(every[1::2])


def _check_enough(listing: ImageListing, half: Rows) -> None:
    counts = np.bincount(listing.labels[half], minlength=len(listing.class_names))
    if (counts >= IMAGES).sum() >= CLASSES:
        return
    totals = np.bincount(listing.labels, minlength=len(listing.class_names))
    examples = join_few(
        f"{n}: {count}" for n, count in zip(listing.class_names, totals, strict=True)
    )
    raise InvalidInputError(
        f"--eval {listing.root}: half of the images are for calibration and half for the gate, and "
        f"each half needs {CLASSES} classes with {IMAGES} images; expected {CLASSES} classes of "
        f"{2 * IMAGES} images or {2 * CLASSES} of {IMAGES}, got {len(listing)} images in "
        f"{len(listing.class_names)} classes ({examples}); add images"
    )
