"""Read texts with an id from JSONL files, and turn them into the tokens of a text encoder."""

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
from nobackfill.extras import require_extra

# Bytes of a text in UTF-8. A model reads a few hundred tokens; owners split longer texts into
# passages.
LARGEST_TEXT_BYTES = 64 * 2**10
# Bytes of all texts of one call.
LARGEST_CALL_BYTES = 4 * 2**20

# `input_ids`, `attention_mask` and `token_type_ids`, each int64 [n,t].
Tokens = dict[str, NDArray[np.int64]]

_SAVE = "expected a tokenizer.json: write it again by Tokenizer.save() of the tokenizers library"
_CHANGE = "leave out or change the text that it cannot read, or use another tokenizer.json"


class BatchTokenizer:
    """A tokenizer.json that truncates texts; a batch is padded to its longest text."""

    def __init__(self, data: bytes, max_tokens: int, error_name: str) -> None:
        """Load a tokenizer.

        Args:
            data: The bytes of tokenizer.json.
            max_tokens: Tokens after which a text is truncated, at least 1, those that the tokenizer
                adds included.
            error_name: The name of the file in messages.

        Raises:
            InvalidInputError: The data is no tokenizer, or leaves no room for text within
                `max_tokens`.
            DefectiveTokenizerError: The tokenizer crashes.
            ConfigurationError: The extra `text` is not installed.
        """
        with require_extra("text"):
            from tokenizers import Tokenizer
        with _translate_errors(error_name, "load the tokenizer", _SAVE):
            self._tokenizer: Any = Tokenizer.from_buffer(data)
            self._tokenizer.enable_truncation(max_tokens)
            padding = self._tokenizer.padding or {}
            self._tokenizer.enable_padding(
                pad_id=padding.get("pad_id", self._first_id("[PAD]", "<pad>")),
                pad_type_id=padding.get("pad_type_id", 0),
                pad_token=padding.get("pad_token", "[PAD]"),
            )
            own_tokens = self._tokenizer.num_special_tokens_to_add(False)
        if own_tokens >= max_tokens:
            raise InvalidInputError(
                f"{error_name}: this tokenizer adds {own_tokens} tokens of its own to each text, "
                f"and texts are truncated to {max_tokens} tokens (max_length), so no token is left "
                "for the text; declare a larger max_length"
            )
        self._what = error_name

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Tokenize a batch of texts; their size is not checked.

        A text of too many tokens is truncated, and shorter ones are padded to the longest.

        Args:
            texts: n texts; n may be 0.

        Returns:
            `input_ids`, `attention_mask` and `token_type_ids`, each int64 [n, tokens of the longest
            text]; without texts each is empty, of shape [0].

        Raises:
            InvalidInputError: The tokenizer refuses a text.
            DefectiveTokenizerError: The tokenizer crashes on a text.
        """
        with _translate_errors(self._what, "tokenize a text", _CHANGE):
            encoded = self._tokenizer.encode_batch(list(texts))
        return {
            "input_ids": np.array([one.ids for one in encoded], np.int64),
            "attention_mask": np.array([one.attention_mask for one in encoded], np.int64),
            "token_type_ids": np.array([one.type_ids for one in encoded], np.int64),
        }

    def largest_token_id(self) -> int:
        """Return the largest id that a token can have, 0 for an empty vocabulary."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def _first_id(self, *names: str) -> int:
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((one for one in ids if one is not None), 0)


class BagTokenizer:
    """A tokenizer.json for models that average the vectors of a text's tokens.

    Special tokens are not added, and nothing is padded.
    """

    def __init__(self, data: bytes, error_name: str) -> None:
        """Load a tokenizer; it truncates texts as its file says.

        Args:
            data: The bytes of tokenizer.json.
            error_name: The name of the file in messages.

        Raises:
            InvalidInputError: The data is no tokenizer.
            DefectiveTokenizerError: The tokenizer crashes.
            ConfigurationError: The extra `text` is not installed.
        """
        with require_extra("text"):
            from tokenizers import Tokenizer
        with _translate_errors(error_name, "load the tokenizer", _SAVE):
            self._tokenizer: Any = Tokenizer.from_buffer(data)
            self._tokenizer.no_padding()
        self._what = error_name

    def truncate_at(self, max_tokens: int | None) -> None:
        """Truncate texts after other tokens than the file says.

        Args:
            max_tokens: Tokens of a text, at least 1; 0 leaves none. None: no limit.

        Raises:
            OverflowError: It is negative.
        """
        if max_tokens is None:
            self._tokenizer.no_truncation()
        else:
            self._tokenizer.enable_truncation(max_tokens)

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token, with added ones."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def token_ids(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the ids of each text's tokens, int64 [tokens]; a text may have none.

        Raises:
            InvalidInputError: The tokenizer refuses a text.
            DefectiveTokenizerError: The tokenizer crashes on a text.
        """
        with _translate_errors(self._what, "tokenize a text", _CHANGE):
            encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]


@contextmanager
def _translate_errors(name: str, action: str, remedy: str) -> Iterator[None]:
    """Turn everything that a tokenizer raises into an error of this project.

    The classes that its compiled code raises have no common base. A panic of that code is not even
    an Exception: it would pass every handler and end the thread or the process.

    Args:
        name: The name of the tokenizer's file in messages.
        action: The verb and object of the block, such as "load the tokenizer".
        remedy: Advice to the user.
    """
    try:
        yield
    except Exception as error:
        raise InvalidInputError(f"{name}: cannot {action} ({error}); {remedy}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DefectiveTokenizerError(
            f"{name}: cannot {action}, because the tokenizers library crashed "
            f"({str(error)[:200]}); {remedy}"
        ) from error


def check_text(text: str) -> str:
    """Return the text if it can be embedded.

    Raises:
        TooLargeError: It has more than 64 KiB in UTF-8.
        InvalidInputError: It is empty, has an unpaired surrogate, or no printable character but
            spaces.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            "text: expected valid Unicode, got an unpaired surrogate (half of a character); "
            "remove it from the text"
        ) from error
    if size > LARGEST_TEXT_BYTES:
        raise TooLargeError(
            f"text: expected at most {LARGEST_TEXT_BYTES} bytes, got {size}; cut it into passages"
        )
    if not any(sign.isprintable() and not sign.isspace() for sign in text):
        raise InvalidInputError(
            "text: expected at least one visible character, got an empty or blank text; leave "
            "this text out"
        )
    return text


def check_texts(texts: Sequence[str]) -> None:
    """Check that all texts together fit into one call; single texts are not checked.

    Args:
        texts: The texts; half of a surrogate pair counts as one byte.

    Raises:
        TooLargeError: They have more than 4 MiB in UTF-8.
    """
    size = sum(len(text.encode(errors="replace")) for text in texts)
    if size > LARGEST_CALL_BYTES:
        raise TooLargeError(
            f"expected texts of at most {LARGEST_CALL_BYTES >> 20} MiB together, got {size} "
            "bytes; send fewer at a time"
        )


@dataclass(frozen=True)
class TextLine:
    """An object of a JSONL file.

    Attributes:
        id: The id of the item.
        text: The text to embed.
        other_keys: The other keys of the object, with their JSON values.
    """

    id: str
    text: str
    other_keys: Mapping[str, Any]

    def metadata(self) -> dict[str, str | int | float | bool | list[str]]:
        """Return the other keys as metadata of an item, without those that are null.

        An empty list counts as a list of texts. Numbers may be NaN or infinite here.

        Returns:
            The values by key, not copied; empty without such keys.

        Raises:
            InvalidInputError: A value is an object, or a list with anything but texts.
        """
        values = {key: value for key, value in self.other_keys.items() if value is not None}
        for key, value in values.items():
            texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
            if not texts and not isinstance(value, str | int | float | bool):
                raise InvalidInputError(
                    f"the key {key[:64]!r}: expected a text, a number, a flag or a list of texts, "
                    "got another type; correct or remove the key"
                )
        return values


def read_text_lines(
    path: Path,
    refusals: dict[str, str] | None = None,
    *,
    id_key: str = "id",
    text_key: str = "text",
) -> Iterator[TextLine]:
    """Yield the objects of a JSONL file in order, with one line in memory at a time.

    Opens the file at the first `next`. Ids may repeat, and the size of texts and lines is not
    checked. Id and text may be empty, a finite number becomes its text, and the other keys become
    `other_keys`.

    Args:
        path: A regular file or a pipe, in UTF-8. Empty lines are skipped, and an empty file yields
            nothing.
        refusals: Receives the reason of each invalid line under the key FILE:LINE, and reading goes
            on. None: the first invalid line raises its error.
        id_key: The key of the id in each object.
        text_key: The key of the text in each object.

    Yields:
        One object for each valid line.

    Raises:
        InvalidInputError: A line is invalid and `refusals` is None, or the file is a device.
        NotFoundError: The file is missing, is a folder, or cannot be read, also by lack of
            permission.
        ValueError: The path has a zero byte, or half a surrogate pair.
    """
    try:
        with path.open("rb") as file:
            kind = os.fstat(file.fileno()).st_mode
            # A pipe ends, a device may not.
            if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
                raise InvalidInputError(
                    f"{path}: expected a regular file or a pipe, got a folder or device; name a "
                    "file"
                )
            # Read bytes: only a line feed ends a line, but JSON may contain other line separators.
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    one = parse_text_line(line, where, id_key, text_key)
                except InvalidInputError as error:
                    if refusals is None:
                        raise
                    refusals[where] = str(error).removeprefix(f"{where}: ")
                else:
                    yield one
    except OSError as error:
        raise NotFoundError(
            f"{path}: the file of texts cannot be read ({error.strerror}); check its name and "
            "permissions"
        ) from error


def _is_text(part: object) -> bool:
    """Tell whether a value is a text, or a number that has one spelling."""
    if isinstance(part, bool) or (isinstance(part, float) and not math.isfinite(part)):
        return False
    return isinstance(part, str | int | float)


def parse_text_line(
    line: bytes, line_name: str, id_key: str = "id", text_key: str = "text"
) -> TextLine:
    """Parse one line of a JSONL file.

    A number becomes its text: 1 gives "1", and 1.0 gives "1.0". If a key is repeated,
    its last value counts.

    Args:
        line: The line in UTF-8, with or without a byte order mark.
        line_name: FILE:LINE, for the message.
        id_key: The key of the id.
        text_key: The key of the text.

    Returns:
        The id, the text and all other keys of the object. Id and text may be empty.

    Raises:
        InvalidInputError: The line is no JSON object with an id and a text, each a text or a finite
            number.
    """
    try:
        one = json.loads(line.decode("utf-8-sig"))
        name, text = one[id_key], one[text_key]
        notes = {note: value for note, value in one.items() if note not in (id_key, text_key)}
        if not all(map(_is_text, (name, text))):
            raise ValueError("no text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInputError(
            f"{line_name}: expected a JSON object with {id_key!r} and {text_key!r}, both texts or "
            "numbers; correct the line"
        ) from error
    return TextLine(str(name), str(text), notes)
