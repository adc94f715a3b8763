"""Texts of known classes, listed as images in class folders are."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Listing
from nobackfill.errors import InvalidInputError
from nobackfill.text_lines import read_texts
from nobackfill.tokenizing import check_text

_LABEL = "label"


@dataclass(frozen=True)
class TextListing(Listing):
    """`paths` are the texts' ids, `root` is their file."""

    texts: tuple[str, ...]

    def select(self, rows: NDArray[np.int64]) -> Self:
        paths = tuple(self.paths[row] for row in rows)
        texts = tuple(self.texts[row] for row in rows)
        return type(self)(self.root, self.class_names, paths, self.labels[rows], texts)


def list_texts(file: Path) -> TextListing:
    """The texts of a JSONL file, each with `id`, `text` and `label`, the name of its class.

    Raises NotFoundError, InvalidInputError for a text without a label, or one that cannot be
    embedded, or an id that comes twice.
    """
    lines = list(read_texts(file))
    ids = [one.id for one in lines]
    twice = [name for name, times in Counter(ids).items() if times > 1]
    if twice:
        raise InvalidInputError(f"{file}: expected each id once, got {twice[0]!r} again")
    labels = []
    for one in lines:
        label = one.notes.get(_LABEL)
        if not isinstance(label, str | int):
            raise InvalidInputError(
                f"{file}: {one.id}: expected a {_LABEL!r}, the name of its class"
            )
        try:
            check_text(one.text)
        except InvalidInputError as error:
            raise InvalidInputError(f"{file}: {one.id}: {error}") from error
        labels.append(str(label))
    names = sorted(set(labels))
    places = {name: place for place, name in enumerate(names)}
    numbers = np.array([places[label] for label in labels], np.int64)
    return TextListing(file, tuple(names), tuple(ids), numbers, tuple(one.text for one in lines))
