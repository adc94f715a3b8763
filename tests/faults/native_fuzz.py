"""Garbage for the compiled search: run by test_native_code.py, under sanitizers."""

import contextlib
import random
import struct
import sys

import numpy as np

from nobackfill.gallery.search import view
from nobackfill.v1 import search_pb2, types_pb2
from tests.gallery.test_compiled_search import made

CASES = 20_000


def message(rng: random.Random) -> bytes:
    """A request, with a few of its bytes changed, cut off or doubled."""
    good = struct.pack("<16f", *(rng.gauss(0, 1) for _ in range(16)))
    values = rng.choice([good, good, rng.randbytes(rng.choice([0, 12, 64]))])
    embedding = types_pb2.Embedding(space="sp-1", values=values)
    embeddings = search_pb2.Embeddings(embeddings=[embedding] * rng.choice([1, 1, 1, 2]))
    query = search_pb2.Query(embeddings=embeddings)
    data = bytearray(search_pb2.SearchRequest(gallery="g", query=query, k=7).SerializeToString())
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(data) + 1)
        data[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
    return bytes(data)


def main() -> None:
    rng = random.Random(1)
    parse, curves = view.parse_search_request, view.compile_curves({1: ([0, 1, 2], [1, 0.5, 0])})
    snapshot = made(16, "squared_l2", whole=False)
    compiled = snapshot.compiled
    assert parse is not None and curves is not None and compiled is not None
    read = answered = routed = 0
    labels = [*snapshot.base.index.labels.tolist(), *snapshot.delta.index.labels.tolist()]
    known = {
        label: (b"\n\x05ab", b"\n\x00cd", b"rest", 1 + label % 7, b"\n\x07ef") for label in labels
    }
    odd = {
        label: rng.choice([(), (1, 2, 3, 4, 5), (b"", b"", b"", 99, b""), "x", None])
        for label in labels
    }
    for number in range(CASES):
        read += parse(message(rng)) is not None
        values = np.random.default_rng(number).standard_normal(16).astype("<f4").tobytes()
        values = rng.choice([values, values, rng.randbytes(64), rng.randbytes(rng.randrange(200))])
        k = rng.choice([0, 1, 10, 64, 5000])
        farthest = rng.choice([np.inf, 0.0, -1.0, np.nan, 5.0])
        with contextlib.suppress(TypeError, RuntimeError):
            hits = rng.choice([known, known, odd, {}])
            queries = [(values, k, farthest), (values, 7, np.inf)]
            found = compiled.encode_responses(queries, number % 2 > 0, hits, curves, b"end")  # type: ignore[arg-type]
            answered += found[0] is not None
            route = compiled.request_handler(
                "g",
                "sp-1",
                10,
                64,
                number % 2 > 0,
                hits,  # type: ignore[arg-type]
                curves,
                b"end",
            )
            routed += sum(one is not None for one in route([message(rng) for _ in range(3)]))
        with contextlib.suppress(ValueError):
            size = rng.choice([len(snapshot.base.index.labels), 3, 0])
            mask = np.random.default_rng(number).random(size) < rng.choice([0, 0.01, 0.5, 1])
            query = np.random.default_rng(number).standard_normal((1, 16), np.float32)
            compiled.search(query, 10, rng.choice([0, 70, 10**6]), mask, None)
    print(f"{CASES} cases, {read} read, {answered} answered, {routed} routed", file=sys.stderr)
    assert read > CASES / 10 and answered > CASES / 10 and routed > CASES / 20


if __name__ == "__main__":
    main()
