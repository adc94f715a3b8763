"""Compute the digests that name files and vector spaces, and the hash that assigns callers to a
share."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from nobackfill.errors import InvalidInputError
from nobackfill.vectors import Metric

# Prefix of the id of a release's space; no other digest has it.
SPACE_PREFIX = "sp-"


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a regular file, as 64 hex digits.

    Raises:
        OSError: The file is missing, a folder, or cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 of bytes, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def space_id(
    embedder_sha256: str | None,
    *,
    height: int | None,
    width: int | None,
    dim: int,
    metric: Metric,
    unit_norm: bool,
    more_fields: Mapping[str, str | int] = MappingProxyType({}),
) -> str:
    """Return the id of a release's vector space: `sp-` and 64 hex digits.

    The id covers all that changes what a vector means or how two vectors are compared. Without an
    embedder and `more_fields`, releases of equal dimension, metric and norm share an id.

    Args:
        embedder_sha256: SHA-256 of the image embedder's file in hex, None without one. It is part
            of the id only if height and width are there, too.
        height: Rows of the embedder's input in pixels, None without one.
        width: Columns of the embedder's input in pixels, None without one.
        dim: The dimension of a vector.
        metric: How distances are computed.
        unit_norm: Whether vectors have norm 1.
        more_fields: Further fields of the digest, such as a text encoder; they replace fields of
            the same name.

    Raises:
        InvalidInputError: `embedder_sha256` is not 64 lower-case hex digits.
        TypeError: A value of `more_fields` cannot be written as JSON.
    """
    fields: dict[str, str | int | bool] = {
        "dim": dim,
        "metric": metric,
        "unit": unit_norm,
        **more_fields,
    }
    if embedder_sha256 is not None and height is not None and width is not None:
        fields |= {"embedder": _hex64(embedder_sha256), "height": height, "width": width}
    return SPACE_PREFIX + _digest(fields)


def side_space_id(encoder_sha256: str) -> str:
    """Return the id of a side-information encoder's space: `ss-` and 64 hex digits.

    Args:
        encoder_sha256: SHA-256 of the encoder's file in hex.

    Raises:
        InvalidInputError: It is not 64 lower-case hex digits.
    """
    return "ss-" + _digest({"side_encoder": _hex64(encoder_sha256)})


def _hex64(digest: str) -> str:
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise InvalidInputError(
            "digest of a model file: expected a SHA-256 of 64 lower-case hex digits, got "
            f"{digest!r}; compute it with sha256sum"
        )
    return digest


def _digest(fields: dict[str, str | int | bool]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return sha256_bytes(text.encode())


def share_digest(release: int, key: str) -> int:
    """Hash the key of a caller or device to 64 bits, differently for each release.

    The hash depends on the release, so that different callers are the first to get each release.

    Args:
        release: Number of the release.
        key: Any text that identifies the caller or device.

    Returns:
        0 to 2^64 - 1, the same on every machine.
    """
    text = f"{release}/{key}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def is_in_share(key: int, share: float) -> bool:
    """Check whether a key belongs to a share of all keys.

    Args:
        key: The digest of the key, from `share_digest`.
        share: 0 to 1; 0 contains no key, 1 all of them.
    """
    return key < share * 2.0**64


def parse_percent(text: str) -> float:
    """Parse a share in percent, with or without the sign: "5%" gives 0.05.

    Args:
        text: A number, with or without spaces around it; "100%" gives 1.

    Returns:
        A share above 0 and at most 1.

    Raises:
        InvalidInputError: The text is no number, or not above 0 and at most 100.
    """
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidInputError(
            f"expected a share of more than 0 and at most 100 percent, such as 5%, got {text!r}"
        )
    return share
