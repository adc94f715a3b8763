"""Listings that are measured: texts as images in class folders, what is relevant, and two halves.

One half fits the calibration, the other decides the gate.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing, by_digest, digests
from nobackfill.errors import InvalidInputError, few
from nobackfill.metrics.ranking import Relevance, same_label
from nobackfill.text import TextLine, check_text, read_texts

_LABEL, _QUERY = "label", "query"
_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])")


@dataclass(frozen=True)
class TextListing(Listing):
    """`paths` are the texts' ids, `root` is their file. `queries`: what asks for each text, where
    nobody has said their classes: each is then a class of its own."""

    texts: tuple[str, ...]
    queries: tuple[str, ...] = ()

    def select(self, rows: NDArray[np.int64]) -> Self:
        paths = tuple(self.paths[row] for row in rows)
        texts = tuple(self.texts[row] for row in rows)
        queries = tuple(self.queries[row] for row in rows) if self.queries else ()
        return type(self)(self.root, self.class_names, paths, self.labels[rows], texts, queries)

    def asking(self) -> Self:
        """The queries, each of the class of the text that it finds."""
        return type(self)(self.root, self.class_names, self.paths, self.labels, self.queries)

    def by_parts(self) -> Self:
        """Its texts without their first sentence, which asks for the rest; each a class of its own.
        What has no two parts is left out."""
        cut = [_cut(text) for text in self.texts]
        whole = [row for row, parts in enumerate(cut) if all(map(_readable, parts))]
        paths = tuple(self.paths[row] for row in whole)
        queries, texts = (tuple(cut[row][part] for row in whole) for part in (0, 1))
        return type(self)(self.root, paths, paths, np.arange(len(whole)), texts, queries)


def list_texts(file: Path) -> TextListing:
    """The texts of a JSONL file, each with `id`, `text` and `label`, the name of its class.

    Without a label in any: each text is to be found by its `query`, or, without that in any, by its
    first sentence, which is then left out of it (the inverse cloze task of Lee et al. 2019, section
    4: a sentence asks for its context). Raises NotFoundError, InvalidInputError for a text of
    neither kind, or one that cannot be embedded, or an id that comes twice.
    """
    lines = list(read_texts(file))
    ids = [one.id for one in lines]
    twice = [name for name, times in Counter(ids).items() if times > 1]
    if twice:
        raise InvalidInputError(f"{file}: expected each id once, got {twice[0]!r} again")
    for one in lines:
        _checked(one.text, file, one)
    if not any(_LABEL in one.notes for one in lines):
        return _known_items(file, lines)
    labels = []
    for one in lines:
        label = one.notes.get(_LABEL)
        if not isinstance(label, str | int):
            raise InvalidInputError(
                f"{file}: {one.id}: expected a {_LABEL!r}, the name of its class"
            )
        labels.append(str(label))
    names = sorted(set(labels))
    places = {name: place for place, name in enumerate(names)}
    numbers = np.array([places[label] for label in labels], np.int64)
    return TextListing(file, tuple(names), tuple(ids), numbers, tuple(one.text for one in lines))


def _known_items(file: Path, lines: list[TextLine]) -> TextListing:
    given = any(_QUERY in one.notes for one in lines)
    queries, texts = [], []
    for one in lines:
        query, text = (one.notes.get(_QUERY), one.text) if given else _cut(one.text)
        if not isinstance(query, str):
            raise InvalidInputError(
                f"{file}: {one.id}: expected a {_QUERY!r} in each, what asks for it, or in none"
            )
        queries.append(_checked(query, file, one))
        texts.append(_checked(text, file, one))
    ids = tuple(one.id for one in lines)
    numbers = np.arange(len(lines), dtype=np.int64)
    return TextListing(file, ids, ids, numbers, tuple(texts), tuple(queries))


def _cut(text: str) -> tuple[str, str]:
    """The first sentence and the others; of one sentence the first third of its words, or of its
    letters where it is written without spaces."""
    first, *rest = _SENTENCE.split(text.strip(), maxsplit=1)
    if rest and rest[0]:
        return first, rest[0]
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


def _checked(text: str, file: Path, line: TextLine) -> str:
    try:
        return check_text(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"{file}: {line.id}: {error}") from error


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


# What a half needs, so that anything can be compared in it: classes with so many images.
CLASSES = 2
IMAGES = 2
# And of texts that are to be found again.
ITEMS = 20

Rows = NDArray[np.int64]


def halves(listing: Listing, seed: int) -> tuple[Rows, Rows]:
    """Rows [a] and [b] of two disjoint halves of every class, by digest of name and seed.

    Of a class with an odd number the halves get one more in turn, and a class of two goes to one of
    them whole: pairs are left in both. Texts that are each a class of their own are halved as one
    class. Raises InvalidInputError where a half cannot compare anything.
    """
    if isinstance(listing, TextListing) and listing.queries:
        return _of_items(listing, seed)
    second = np.zeros(len(listing), bool)
    # Classes whose pair only one of the halves can have take turns of their own.
    turns = {True: False, False: False}
    for rows in by_digest(listing, seed):
        size = len(rows) // 2
        if len(rows) % 2 or len(rows) == IMAGES:
            single = len(rows) in (IMAGES, IMAGES + 1)
            turns[single] = not turns[single]
            here = not turns[single]
            size = len(rows) * here if len(rows) == IMAGES else size + here
        second[rows[:size]] = True
    split = np.flatnonzero(~second), np.flatnonzero(second)
    for half in split:
        _check_enough(listing, half)
    return split


def _of_items(listing: TextListing, seed: int) -> tuple[Rows, Rows]:
    """Rows of two disjoint halves of texts that are each a class of their own. Raises
    InvalidInputError for fewer than can be compared."""
    if len(listing) < 2 * ITEMS:
        raise InvalidInputError(
            f"--eval-texts {listing.root}: half of them are for calibration and half for the gate; "
            f"expected at least {2 * ITEMS} texts to find again, got {len(listing)}"
        )
    one_class = Listing(listing.root, ("",), listing.paths, np.zeros(len(listing), np.int64))
    (every,) = by_digest(one_class, seed)
    return np.sort(every[::2]), np.sort(every[1::2])


def _check_enough(listing: Listing, half: Rows) -> None:
    counts = np.bincount(listing.labels[half], minlength=len(listing.class_names))
    if (counts >= IMAGES).sum() >= CLASSES:
        return
    whole = np.bincount(listing.labels, minlength=len(listing.class_names))
    examples = few(f"{n}: {count}" for n, count in zip(listing.class_names, whole, strict=True))
    raise InvalidInputError(
        f"--eval {listing.root}: half of it is for calibration and half for the gate, and each "
        f"needs {CLASSES} classes with {IMAGES} images; expected {CLASSES} classes of "
        f"{2 * IMAGES} images or {2 * CLASSES} of {IMAGES}, got {len(listing)} images in "
        f"{len(listing.class_names)} classes ({examples}); add images"
    )
