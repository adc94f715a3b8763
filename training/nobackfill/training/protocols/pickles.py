"""Reading a pickle that others made, without running anything of it.

The revisited Oxford and Paris ground truth is published as a pickle. Only plain containers,
numbers, strings and numpy arrays come through; every other name is refused before it is looked up.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core import multiarray, numeric

from nobackfill.errors import InvalidInputError, NotFoundError


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into an old pickle protocol; no other codec comes through."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the codec {encoding} is not plain data")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """How Python 3 writes empty bytes into an old protocol; a number in there could be huge."""
    return b""


# Both spellings: numpy 2 moved its core, files were written before and after.
_ALLOWED: Mapping[tuple[str, str], object] = {
    (module, name): value
    for prefix in ("numpy.core", "numpy._core")
    for (module, name), value in {
        (f"{prefix}.multiarray", "_reconstruct"): multiarray._reconstruct,
        (f"{prefix}.multiarray", "scalar"): multiarray.scalar,
        (f"{prefix}.numeric", "_frombuffer"): numeric.__dict__["_frombuffer"],
    }.items()
} | {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
    ("builtins", "bytes"): _no_bytes,
    ("__builtin__", "bytes"): _no_bytes,
}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the name {module}.{name} is not plain data")
        return _ALLOWED[module, name]


def read_plain(path: Path) -> Any:
    """The data in a pickle. Raises NotFoundError; InvalidInputError where it holds
    anything else.
    """
    try:
        with path.open("rb") as file:
            # Files of Python 2 hold bytes where text is meant.
            return _Plain(file, encoding="latin1").load()
    except FileNotFoundError as error:
        raise NotFoundError(f"no protocol file {path}") from error
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidInputError(f"{path}: expected a pickle of plain data: {error}") from error
