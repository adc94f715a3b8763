"""How a command ends that cannot do what it is asked for."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from nobackfill.errors import CannotWriteError, InvalidInputError, NobackfillError
from nobackfill.terminal import visible

# Met outside the modules that write: the folder of a command's own output, say.
_NO_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.EILSEQ)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


@contextmanager
def refusing() -> Iterator[None]:
    """A refusal becomes one sentence on stderr and its exit code."""
    # gRPC's core would print lines of its own; what they mean is in the errors.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        yield
    except NobackfillError as error:
        _refuse(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Who reads the answer has gone; what is left of it goes nowhere, without a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except UnicodeEncodeError as error:
        _refuse(InvalidInputError(f"{error.object[:80]!r}: expected UTF-8 text; rename it"))
    except OSError as error:
        if error.errno in _NO_NAMES:
            _refuse(InvalidInputError(f"{str(error.filename)[:80]}…: {error.strerror}"))
        if error.errno not in _NOT_WRITABLE:
            raise
        named = f"{error.filename}: " if error.filename else ""
        _refuse(CannotWriteError(f"{named}{error.strerror}; free some space, or get the right to"))


def _refuse(error: NobackfillError) -> NoReturn:
    print(visible(f"edge-client: {error}"), file=sys.stderr)
    sys.exit(error.exit_code)
