"""Which callers belong to a share: by a hash of their key, so that shares only grow."""

import hashlib


def digest(release: int, key: str) -> int:
    """Of a caller's key, 64 bits; another one for each release, so that it is not always the same
    callers who meet the new first."""
    text = f"{release}/{key}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def in_share(key: int, share: float) -> bool:
    """Whether a key, by its digest, belongs to a share of 0 to 1."""
    return key < share * 2.0**64
