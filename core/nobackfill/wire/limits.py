"""Bounds of the wire contract that both ends keep: a gateway refuses more, a client sends less."""

# Hits of a query.
LARGEST_K = 1000
# Bytes of a blob of ciphertext.
LARGEST_BLOB = 64 * 2**20
