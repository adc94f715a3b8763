"""A function of the user's own Python: texts, or paths of images, to vectors."""

import hashlib
import importlib
import sys
from pathlib import Path

import numpy as np

from nobackfill.adopt.sources.source import even
from nobackfill.digests import sha256_file
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.items.kind import Kind
from nobackfill.vectors import Vectors, check_vectors


class PythonFunction:
    """`module:function`, the module found from the working folder as well."""

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
        code = sha256_file(Path(found.__file__)) if found.__file__ else ""
        self.fingerprint = hashlib.sha256(f"{name}\n{code}".encode()).hexdigest()

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        made = self._function(items)
        try:
            rows = list(made)
            vectors = even(rows, [str(item) for item in items], self._name)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{self._name}: expected numbers [n, dim], a vector for each item ({error})"
            ) from error
        if len(rows) != len(items):
            raise InvalidInputError(f"{self._name}: expected {len(items)} vectors, got {len(rows)}")
        return check_vectors(np.asarray(vectors), vectors.shape[1], what=self._name)
