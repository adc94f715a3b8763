"""Digests: the names of files and of vector spaces."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from nobackfill.errors import InvalidInputError
from nobackfill.vectors import Metric

# What the id of a release's space begins with; no other digest does.
SPACE = "sp-"


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a regular file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_bytes(data: bytes) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def space_id(
    embedder_sha256: str | None,
    *,
    height: int | None,
    width: int | None,
    dim: int,
    metric: Metric,
    unit: bool,
    more: Mapping[str, str | int] = MappingProxyType({}),
) -> str:
    """The id of a release's vector space, `sp-` and 64 hex digits.

    It covers all that changes what a vector means or how two are compared: the embedder file and
    its input size in pixels (None without one), the dimension, the metric, whether vectors have
    norm 1, and what there is `more`, as a text encoder.
    """
    fields: dict[str, str | int | bool] = {"dim": dim, "metric": metric, "unit": unit, **more}
    if embedder_sha256 is not None and height is not None and width is not None:
        fields |= {"embedder": _hex64(embedder_sha256), "height": height, "width": width}
    return SPACE + _digest(fields)


def side_space_id(encoder_sha256: str) -> str:
    """The id of a side-information encoder's space, `ss-` and 64 hex digits."""
    return "ss-" + _digest({"side_encoder": _hex64(encoder_sha256)})


def _hex64(digest: str) -> str:
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise InvalidInputError(f"expected a SHA-256 of 64 lower-case hex digits, got {digest!r}")
    return digest


def _digest(fields: dict[str, str | int | bool]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return sha256_bytes(text.encode())


def share_digest(release: int, key: str) -> int:
    """Of a caller's or a device's key, 64 bits; another one for each release, so that it is not
    always the same who meet the new first."""
    text = f"{release}/{key}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def in_share(key: int, share: float) -> bool:
    """Whether a key, by its digest, belongs to a share of 0 to 1."""
    return key < share * 2.0**64


def percent(text: str) -> float:
    """A share written in percent, with or without its sign: "5%" is 0.05.

    Raises InvalidInputError for what is not above 0 and at most 100.
    """
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidInputError(f"expected above 0 and up to 100 percent, as 5%, got {text!r}")
    return share
