"""Define limits of the wire contract; a gateway refuses more, a client sends less."""

# Bytes of a request: the largest image that images.py reads, and its envelope.
LARGEST_REQUEST = 33 * 2**20
# Bytes of an answer that a client accepts.
LARGEST_ANSWER = 64 * 2**20
# Hits of a query.
LARGEST_K = 1000
# Bytes of a blob of ciphertext.
LARGEST_BLOB = 64 * 2**20
