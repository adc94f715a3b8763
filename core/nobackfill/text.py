"""Texts: lines of a file with an id each, and the tokens that a text encoder reads."""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import (
    DefectiveTokenizerError,
    InvalidInputError,
    NotFoundError,
    TooLargeError,
)
from nobackfill.extras import extra

# In UTF-8. A model reads some hundred tokens of it; its owner cuts what is longer into passages.
LARGEST_BYTES = 64 * 2**10
# Of all texts of one call.
LARGEST_CALL = 4 * 2**20

# `input_ids`, `attention_mask` and `token_type_ids`, each int64 [n,t].
Tokens = dict[str, NDArray[np.int64]]


class Tokenizing:
    """A tokenizer.json that cuts texts after `length` tokens; a batch is as long as its longest."""

    def __init__(self, data: bytes, length: int, what: str) -> None:
        """`what` names the file in messages. Raises InvalidInputError for what is no tokenizer,
        ConfigurationError without the extra `text`."""
        with extra("text"):
            from tokenizers import Tokenizer
        with _contained(f"{what}: is no tokenizer.json"):
            self._tokenizer: Any = Tokenizer.from_buffer(data)
            self._tokenizer.enable_truncation(length)
            own = self._tokenizer.padding or {}
            self._tokenizer.enable_padding(
                pad_id=own.get("pad_id", self._known("[PAD]", "<pad>")),
                pad_type_id=own.get("pad_type_id", 0),
                pad_token=own.get("pad_token", "[PAD]"),
            )
            own_tokens = self._tokenizer.num_special_tokens_to_add(False)
        if own_tokens >= length:
            raise InvalidInputError(
                f"{what}: puts {own_tokens} tokens around each text, which is to be cut after "
                f"{length}; declare a larger max_length"
            )
        self._what = what

    def tokens(self, texts: Sequence[str]) -> Tokens:
        """Raises InvalidInputError for texts that the tokenizer cannot take,
        DefectiveTokenizerError where it fails by a defect of its own."""
        with _contained(f"{self._what}: cannot read a text"):
            encoded = self._tokenizer.encode_batch(list(texts))
        return {
            "input_ids": np.array([one.ids for one in encoded], np.int64),
            "attention_mask": np.array([one.attention_mask for one in encoded], np.int64),
            "token_type_ids": np.array([one.type_ids for one in encoded], np.int64),
        }

    def largest(self) -> int:
        """The largest id that a token can have."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def _known(self, *names: str) -> int:
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((one for one in ids if one is not None), 0)


@contextmanager
def _contained(what: str) -> Iterator[None]:
    """Turn whatever a tokenizer raises into an error of ours.

    The classes that its compiled code raises have no common base, and a panic of that code is not
    even an Exception: it would pass every handler and end the thread, or the process.
    """
    try:
        yield
    except Exception as error:
        raise InvalidInputError(f"{what} ({error})") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DefectiveTokenizerError(f"{what} ({str(error)[:200]})") from error


def check_text(text: str) -> str:
    """`text`, where it can be embedded. Raises TooLargeError above 64 KiB, InvalidInputError for
    one in which nothing can be read."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInputError("text: expected valid Unicode, got half of a character") from error
    if size > LARGEST_BYTES:
        raise TooLargeError(
            f"text: expected at most {LARGEST_BYTES} bytes, got {size}; cut it into passages"
        )
    if not any(sign.isprintable() and not sign.isspace() for sign in text):
        raise InvalidInputError("text: expected something to read, got none")
    return text


def check_texts(texts: Sequence[str]) -> None:
    """Raises TooLargeError for more than one call may carry."""
    size = sum(len(text.encode(errors="replace")) for text in texts)
    if size > LARGEST_CALL:
        raise TooLargeError(
            f"expected texts of at most {LARGEST_CALL >> 20} MiB together, got {size} bytes; send "
            "fewer at a time"
        )


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
