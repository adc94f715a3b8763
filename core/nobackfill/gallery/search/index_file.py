"""An index on disk: a cache with a header of our own, checked before any engine sees a byte.

    8 bytes magic | sha256 of all that follows | header length, uint32 | header, JSON | arrays

The header names the space, dim, metric, count and last label, and lays out the arrays.
"""

import contextlib
import hashlib
import json
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobackfill import durable
from nobackfill.errors import NotFoundError, VerificationError
from nobackfill.gallery.spec import SpaceSpec

MAGIC = b"nobfidx1"
_FIXED = struct.Struct("<8s32sI")
_MAX_HEADER = 1 << 20

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class IndexFile:
    """What was read: the engine's own parameters, and its arrays (read-only)."""

    parameters: Mapping[str, Any]
    arrays: Arrays


def write(
    path: Path, spec: SpaceSpec, engine: str, parameters: Mapping[str, Any], arrays: Arrays
) -> None:
    """Put an index at `path`, wholly or not at all. `arrays` holds `labels` among others; `engine`
    names the library and version that understands the rest. One writer a path at a time: what a
    killed one left is removed. Raises CannotWriteError.
    """
    for stale in path.parent.glob(f"{durable.TEMPORARY}{path.name}-*"):
        durable.remove_tree(stale)
    labels = arrays["labels"]
    header = json.dumps(
        _identity(spec, engine)
        | {
            "count": len(labels),
            "last_label": int(labels[-1]) if len(labels) else 0,
            "parameters": dict(parameters),
            "arrays": [[name, a.dtype.str, list(a.shape)] for name, a in arrays.items()],
        }
    ).encode()
    # As they lie in memory: a copy as bytes is made while nobody else has the interpreter, .1 s
    # for a million rows.
    bodies = [np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in arrays.values()]
    digest = hashlib.sha256(struct.pack("<I", len(header)) + header)
    for body in bodies:
        digest.update(body)
    temporary = path.parent / f"{durable.TEMPORARY}{path.name}-{uuid.uuid4().hex}"
    try:
        fixed = _FIXED.pack(MAGIC, digest.digest(), len(header))
        durable.append(temporary, fixed + header, mode=0o600)
        for body in bodies:
            durable.append(temporary, body)
        durable.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, spec: SpaceSpec, engine: str) -> IndexFile:
    """Read and check an index of `spec`, written for `engine`.

    Raises NotFoundError; VerificationError for anything else than exactly what was written.
    """
    try:
        # One read, then checks and use of the same bytes: the file may change under us.
        content = np.frombuffer(path.read_bytes(), np.uint8)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no index file; build the index") from error
    except OSError as error:
        raise VerificationError(f"{path}: cannot be read ({error.strerror})") from error
    header, start = _header(path, content)
    expected = _identity(spec, engine)
    if differing := sorted(key for key in expected if header[key] != expected[key]):
        raise VerificationError(
            f"{path}: made for another {' and '.join(differing)}; build the index anew"
        )
    arrays = {}
    for name, dtype, shape in header["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        # Copied only where an engine would meet misaligned numbers.
        arrays[name] = np.require(
            content[start : start + size].view(dtype).reshape(shape), requirements=["A"]
        )
        start += size
    return IndexFile(header["parameters"], arrays)


def _identity(spec: SpaceSpec, engine: str) -> dict[str, Any]:
    return {"space": spec.space, "dim": spec.dim, "metric": spec.metric, "engine": engine}


def _header(path: Path, content: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    """The header, and where the arrays begin, of a file whose digest is right."""
    damaged = VerificationError(f"{path}: not a whole index file; build the index anew")
    if len(content) < _FIXED.size:
        raise damaged
    magic, digest, length = _FIXED.unpack(content[: _FIXED.size].tobytes())
    # The digest covers the header's length, too.
    if magic != MAGIC or hashlib.sha256(content[_FIXED.size - 4 :].data).digest() != digest:
        raise damaged
    header: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        header = json.loads(content[_FIXED.size : _FIXED.size + length].tobytes())
    return header, _FIXED.size + length
