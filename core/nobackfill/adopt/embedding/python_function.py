"""A function of the user's own Python: texts, or paths of images, to vectors."""

import importlib
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

import numpy as np

from nobackfill.adopt.sources.source import even
from nobackfill.digests import sha256_bytes, sha256_file
from nobackfill.errors import (
    InvalidInputError,
    NotFoundError,
    UnusableItemsError,
    UnusableRowsError,
)
from nobackfill.items.kind import Kind
from nobackfill.vectors import Vectors, check_vectors

_DIGEST = re.compile("[0-9a-f]{64}")


class PythonFunction:
    """`module:function`, the module found from the working folder as well. What names its model is
    the module's FINGERPRINT, or else the digest of the module's source, whose weights nobody knows.
    """

    kind: Kind | None = None
    reads = ""

    def __init__(self, name: str) -> None:
        module, _, function = name.partition(":")
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.import_module(module)
            self._function = getattr(found, function)
        except (ImportError, AttributeError) as error:
            raise NotFoundError(f"{name}: cannot be imported ({error})") from error
        if not callable(self._function):
            raise InvalidInputError(f"{name}: is no function")
        self._name = name
        self.fingerprint = _fingerprint(found, name)

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        try:
            made = self._function(items)
        except Exception as error:
            # Anything may come of the user's own code, and of one item of many.
            line = traceback.extract_tb(error.__traceback__)[-1]
            raise UnusableItemsError(
                f"{self._name}: {type(error).__name__} in line {line.lineno} of "
                f"{Path(line.filename).name} ({error})"
            ) from error
        try:
            rows = list(made)
            vectors = even(rows, [str(item) for item in items], self._name)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{self._name}: expected numbers [n, dim], a vector for each item ({error})"
            ) from error
        if len(rows) != len(items):
            raise InvalidInputError(f"{self._name}: expected {len(items)} vectors, got {len(rows)}")
        try:
            return check_vectors(np.asarray(vectors), vectors.shape[1], what=self._name)
        except UnusableRowsError as error:
            raise UnusableItemsError(str(error)) from error


def _fingerprint(module: ModuleType, name: str) -> str:
    """64 hex digits, as FINGERPRINT has them or digested from it. Raises InvalidInputError."""
    declared = getattr(module, "FINGERPRINT", None)
    if declared is None:
        code = sha256_file(Path(module.__file__)) if module.__file__ else ""
        return sha256_bytes(f"{name}\n{code}".encode())
    if not isinstance(declared, str) or not declared:
        raise InvalidInputError(
            f"{name}: expected FINGERPRINT to be a text that changes with the model, its name and "
            f"version say, got {declared!r}"
        )
    return declared if _DIGEST.fullmatch(declared) else sha256_bytes(declared.encode())
