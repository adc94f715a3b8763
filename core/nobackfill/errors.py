"""Define every error that nobackfill raises on purpose.

Each class carries the exit code of a process. `nobackfill.wire.statuses` maps each class to a gRPC
status, for both ends of a call. A message says what was expected, what was found and what to do
next. It never holds vectors, tokens or image bytes, and `join_few` shortens its lists.
"""

import errno
import re
from collections.abc import Iterable, Sequence
from typing import Any


def join_few(values: Iterable[object]) -> str:
    """Join up to three values for a sentence and count the others: "a, b, c and 239 more".

    Args:
        values: Values to list, read to the end; an empty iterable gives "".
    """
    listed = [str(value) for value in values]
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!_-]{0,39}")


def describe_writer(version: object) -> str:
    """Name the program that wrote what this one cannot read.

    Args:
        version: The version that is stored with it, as it was read from outside; None without one.

    Returns:
        "nobackfill 1.2.3, which wrote it", or "the newer nobackfill that wrote it" where no
        version stands there or it does not look like one.
    """
    if isinstance(version, str) and _VERSION.fullmatch(version):
        return f"nobackfill {version}, which wrote it"
    return "the newer nobackfill that wrote it"


class NobackfillError(Exception):
    """Base class of every error that this project raises on purpose."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error with the attributes of its class, whatever arguments its constructor
        takes."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    kind: type[NobackfillError], arguments: tuple[Any, ...], attributes: dict[str, Any]
) -> NobackfillError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(attributes)
    return error


class NotFoundError(NobackfillError):
    """The release, gallery, item or file does not exist."""

    exit_code = 66


class AlreadyExistsError(NobackfillError):
    """The name or number is in use; releases are immutable."""

    exit_code = 73


class InvalidInputError(NobackfillError):
    """The data cannot be used: wrong dimension, NaN, not an image, an image too large."""

    exit_code = 65


class TooLargeError(InvalidInputError):
    """The call carries more bytes, queries or items than one call may."""


class DefectiveTokenizerError(InvalidInputError):
    """The tokenizer of a model crashes by a defect of its own, on one text or on all."""


class OutOfRangeError(InvalidInputError):
    """The offset lies past the end of a file."""


class UnusableItemsError(InvalidInputError):
    """The model rejects at least one of several items; others may be usable."""


class UnusableRowsError(InvalidInputError):
    """Some of many vectors are unusable; the others are valid.

    Attributes:
        unusable_rows: Indices of the unusable vectors, from 0.
    """

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message)
        self.unusable_rows = tuple(rows)


class VerificationError(NobackfillError):
    """A digest, signature, ONNX check or golden probe failed; nothing was changed."""

    exit_code = 65


class DamagedError(VerificationError):
    """A gallery file has pages or rows that differ from what was written.

    Attributes:
        path: The file; None where the code that reads a row does not know it.
        damage: The difference, in words.
    """

    def __init__(self, path: object, damage: object) -> None:
        self.path, self.damage = path, damage
        super().__init__(
            f"{path or 'the gallery file'} is damaged ({damage}); restore a backup, or create the "
            "gallery again"
        )


class UnusableOutputError(VerificationError):
    """A model returned no usable vector for some of its inputs.

    Attributes:
        unusable_rows: Indices of these inputs, from 0.
    """

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message)
        self.unusable_rows = tuple(rows)


class UnfitError(VerificationError):
    """A release has valid signatures, but this program cannot use it.

    Either the release needs a newer version of this program, or it breaks the release rules.
    Readers log such a release and use another.
    """


class GateFailedError(NobackfillError):
    """The release does not beat its predecessor (BCT Eq. 2), or its quality was not measured."""

    exit_code = 65


class PreconditionError(NobackfillError):
    """The request cannot be answered in the present state.

    Attributes:
        reason: A word that programs can read; gRPC sends it in ErrorInfo.
    """

    exit_code = 65
    reason = "PRECONDITION"


class IncompatibleSpaceError(PreconditionError):
    """The query's space differs from the gallery's, and no verified release allows the pair."""

    reason = "INCOMPATIBLE_SPACE"


class NeedsImageError(PreconditionError):
    """The gallery has vectors in several spaces at present; send the image, or a vector for each
    space."""

    reason = "NEEDS_IMAGE"


class NoEncoderError(PreconditionError):
    """The release has no model for this kind of input, image or text."""

    reason = "NO_ENCODER"


class ReleaseRetiredError(PreconditionError):
    """The announced end of the query's space has passed."""

    reason = "RELEASE_RETIRED"


class QuotaExceededError(PreconditionError):
    """The vault holds as many bytes as this name may store."""

    reason = "QUOTA_EXCEEDED"


class ItemQuotaError(QuotaExceededError):
    """The galleries of this token hold as many items as it may store."""


class UnavailableError(NobackfillError):
    """A server, host or child process does not answer."""

    exit_code = 69


class DeadlineError(UnavailableError):
    """The caller's deadline passed before the answer was ready."""


class CancelledError(UnavailableError):
    """The caller cancelled the call before the answer was ready."""


class CannotWriteError(NobackfillError):
    """A write failed: disk full, no permission, a read-only or missing folder."""

    exit_code = 73


class BusyError(NobackfillError):
    """Another process holds the lock; try again later."""

    exit_code = 75


class OverloadedError(BusyError):
    """The gateway has as much work as it accepts; try again after a delay."""


class NotPermittedError(NobackfillError):
    """The token is missing or wrong, or its role lacks the right."""

    exit_code = 77


class UnauthenticatedError(NotPermittedError):
    """The token is missing, unknown or expired."""


class ConfigurationError(NobackfillError):
    """The configuration cannot work: unknown key, unknown name, contradictory values."""

    exit_code = 78


_NO_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.EILSEQ)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def error_from_os(error: OSError) -> NobackfillError | None:
    """Translate the system's error for a file that a user named into an error of this project.

    Args:
        error: The error; its file, if it has one, becomes part of the message.

    Returns:
        InvalidInputError for a name that no file can have; CannotWriteError for a full or read-only
        disk and missing permissions; None for any other error.
    """
    if error.errno in _NO_NAMES:
        return InvalidInputError(
            f"{str(error.filename)[:80]}: no file can have this name ({error.strerror}); name "
            "another"
        )
    if error.errno not in _NOT_WRITABLE:
        return None
    place = f"{error.filename}:" if error.filename else "a file"
    return CannotWriteError(
        f"{place} cannot be read or written ({error.strerror}); free some space or fix the "
        "permissions"
    )
