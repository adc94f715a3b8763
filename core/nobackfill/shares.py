"""Who belongs to a share: by a hash of a key, so that shares only grow."""

import hashlib

from nobackfill.errors import InvalidInputError


def digest(release: int, key: str) -> int:
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
