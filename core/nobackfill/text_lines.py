"""Texts in lines of JSON: an id, a text, and whatever else is to be kept beside it."""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nobackfill.errors import InvalidInputError, NotFoundError


@dataclass(frozen=True)
class TextLine:
    """`notes`: the other keys of the object, as JSON has them."""

    id: str
    text: str
    notes: Mapping[str, Any]

    def metadata(self) -> dict[str, str | int | float | bool | list[str]]:
        """The notes as an item keeps them, without those that are null. Raises InvalidInputError
        for objects and lists of anything but texts."""
        kept = {key: value for key, value in self.notes.items() if value is not None}
        for key, value in kept.items():
            texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
            if not texts and not isinstance(value, str | int | float | bool):
                raise InvalidInputError(
                    f"{key[:64]!r}: expected a text, a number, a flag or a list of texts"
                )
        return kept


def read_texts(
    path: Path, refused: dict[str, str] | None = None, *, key: str = "id", column: str = "text"
) -> Iterator[TextLine]:
    """The objects of a JSONL file, in order, one line in memory.

    `refused` gets the reason of each line that is none, by FILE:LINE, and the next one is read;
    None: the first such line raises InvalidInputError. Raises NotFoundError.
    """
    try:
        with path.open("rb") as file:
            kind = os.fstat(file.fileno()).st_mode
            # A pipe has an end, a device may have none.
            if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
                raise InvalidInputError(f"{path}: expected a regular file or a pipe")
            # Bytes: only a line feed ends a line, JSON may hold other separators of lines.
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    one = read_line(line, where, key, column)
                except InvalidInputError as error:
                    if refused is None:
                        raise
                    refused[where] = str(error).removeprefix(f"{where}: ")
                else:
                    yield one
    except OSError as error:
        raise NotFoundError(f"{path}: cannot be read ({error})") from error


def _is_text(part: object) -> bool:
    """Whether it is a text, or a number with one way to be written."""
    if isinstance(part, bool) or (isinstance(part, float) and not math.isfinite(part)):
        return False
    return isinstance(part, str | int | float)


def read_line(line: bytes, where: str, key: str = "id", column: str = "text") -> TextLine:
    """One object. Raises InvalidInputError, which says `where`."""
    try:
        one = json.loads(line.decode("utf-8-sig"))
        name, text = one[key], one[column]
        notes = {note: value for note, value in one.items() if note not in (key, column)}
        if not all(map(_is_text, (name, text))):
            raise ValueError("no text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInputError(
            f"{where}: expected a JSON object with {key!r} and {column!r}, both texts or numbers"
        ) from error
    return TextLine(str(name), str(text), notes)
