"""The one error taxonomy: every refusal is one of these classes.

A class carries the process exit code; nobackfill.wire.statuses holds the gRPC status of each, for
both ends of a call. Messages say what was expected, what came, and what to do next. They
never hold vectors, tokens or image bytes, and list no more than `few` of anything.
"""

from collections.abc import Iterable, Sequence
from typing import Any


def few(values: Iterable[object]) -> str:
    """At most three of them for a sentence, and how many more there are: "a, b, c and 239 more"."""
    listed = [str(value) for value in values]
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


class NobackfillError(Exception):
    """Base of every error this project raises on purpose."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes: with what the class added, whatever its constructor takes."""
        return _again, (type(self), self.args, self.__dict__)


def _again(
    kind: type[NobackfillError], arguments: tuple[Any, ...], added: dict[str, Any]
) -> NobackfillError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(added)
    return error


class NotFoundError(NobackfillError):
    """A release, gallery, item or file that does not exist."""

    exit_code = 66


class AlreadyExistsError(NobackfillError):
    """A name or number that is taken; releases are immutable."""

    exit_code = 73


class InvalidInputError(NobackfillError):
    """Data that cannot be used: a wrong dimension, NaN, not an image, an image too large."""

    exit_code = 65


class TooLargeError(InvalidInputError):
    """More bytes, queries or items than one call may carry."""


class DefectiveTokenizerError(InvalidInputError):
    """A text that a model's tokenizer fails on by a defect of its own, or such a tokenizer."""


class OutOfRangeError(InvalidInputError):
    """An offset past the end of a file."""


class UnusableItemsError(InvalidInputError):
    """Items that a model does not take, or one among them: others may well be taken."""


class UnusableRowsError(InvalidInputError):
    """Some of many vectors cannot be used; `rows` are their numbers, the others are good."""

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class VerificationError(NobackfillError):
    """A digest, signature, ONNX check or golden probe that failed. Nothing was changed."""

    exit_code = 65


class DamagedError(VerificationError):
    """A gallery file with pages or rows that are no longer what was written."""

    def __init__(self, path: object, found: object) -> None:
        super().__init__(f"{path}: damaged ({found}); restore a backup, or make the gallery anew")


class UnusableOutputError(VerificationError):
    """A model gave no vectors for some of its inputs; `rows` are their numbers."""

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class UnfitError(VerificationError):
    """A release that is as it was signed, and yet cannot be used here: it needs a newer version of
    this program, or breaks the rules. Others can be; it is named and passed over."""


class GateFailedError(NobackfillError):
    """The release does not beat what it replaces (BCT Eq. 2), or nobody measured it."""

    exit_code = 65


class PreconditionError(NobackfillError):
    """The request cannot be answered in the present state; `reason` is a word machines can read."""

    exit_code = 65
    reason = "PRECONDITION"


class IncompatibleSpaceError(PreconditionError):
    """A query of one space met a gallery of another, and no verified release allows the pair."""

    reason = "INCOMPATIBLE_SPACE"


class NeedsImageError(PreconditionError):
    """The gallery lives in several spaces at present; the query needs its image or all vectors."""

    reason = "NEEDS_IMAGE"


class NoEncoderError(PreconditionError):
    """The release has no model of what was sent: no images, or no texts, are embedded by it."""

    reason = "NO_ENCODER"


class ReleaseRetiredError(PreconditionError):
    """The query's space has reached its announced end."""

    reason = "RELEASE_RETIRED"


class QuotaExceededError(PreconditionError):
    """The vault holds as much as it may under this name."""

    reason = "QUOTA_EXCEEDED"


class ItemQuotaError(QuotaExceededError):
    """The galleries of a token hold as many items as they may."""


class UnavailableError(NobackfillError):
    """A server, host or child process that does not answer."""

    exit_code = 69


class DeadlineError(UnavailableError):
    """The caller's deadline passed before the answer was there."""


class CancelledError(UnavailableError):
    """The caller gave the call up before the answer was there."""


class CannotWriteError(NobackfillError):
    """Disk full, no permission, a read-only or missing folder."""

    exit_code = 73


class BusyError(NobackfillError):
    """Somebody else holds the lock; trying again later is right."""

    exit_code = 75


class OverloadedError(BusyError):
    """More work at once than the gateway takes on; trying again with a delay is right."""


class NotPermittedError(NobackfillError):
    """No token, a wrong token, or a role without the right."""

    exit_code = 77


class UnauthenticatedError(NotPermittedError):
    """No token, or one that nobody knows or that has expired."""


class ConfigurationError(NobackfillError):
    """A configuration that cannot work: unknown key, unknown name, contradictory values."""

    exit_code = 78
