"""Texts of known classes, listed as images in class folders are."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing
from nobackfill.errors import InvalidInputError
from nobackfill.text_lines import TextLine, read_texts
from nobackfill.tokenizing import check_text

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
