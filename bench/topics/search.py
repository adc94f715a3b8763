"""The gateway's Search by embedding against a bare gRPC echo."""

from contextlib import ExitStack
from typing import Any

from bench import data, echo
from bench.harness import Bench, Table
from bench.loaded import load_table
from bench.published import INNER, Publication, make_publication
from bench.serving import copy_filled, embedding_requests, run_echo, run_gateway
from demo.load import SEARCH, write_requests
from nobackfill.wire.connection import open_channel

QUERIES = 256
NOTE = (
    "Queries a second, k = 10, closed loops of clients in one process beside the server on the "
    "same cores. The echoes answer the same requests with {answer} bytes, as many as the gateway's "
    "answer has, and do nothing else; aio is grpc.aio, sync has 8 threads. `of echo`: of the "
    "better of the two."
)


def run(bench: Bench) -> list[Table]:
    """Each size, each number of clients."""
    pair = make_publication(bench.shared, inner=bench.size(64, INNER, INNER))
    sizes: tuple[int, ...] = bench.size((3000,), (10_000, 100_000), (10_000, 100_000, 1_000_000))
    return [_table(bench, pair, size) for size in sizes]


def _table(bench: Bench, pair: Publication, size: int) -> Table:
    folder = bench.folder / str(size)
    folder.mkdir()
    copy_filled(bench, pair, size, folder)
    queries = embedding_requests(pair.manifests[2].space, data.draw_items(QUERIES, seed=1).new)
    requests = write_requests(folder / "requests", queries)
    with ExitStack() as stack:
        gateway = stack.enter_context(run_gateway(folder, pair.repo))
        gateway.settle()
        answer = _answer_bytes(gateway.address, queries[0])
        targets = {"gateway": (gateway.address, SEARCH, requests)}
        processes = {"gateway": gateway.process}
        for kind in ("aio", "sync"):
            address, processes[f"echo {kind}"] = stack.enter_context(run_echo(kind, answer))
            targets[f"echo {kind}"] = (address, echo.METHOD, requests)
        title = f"Search by embedding, {size:,} items of {data.DIM} dims"
        note = NOTE.format(answer=answer)
        limits = ["echo aio", "echo sync"]
        return load_table(bench, title, note, targets, limits, "echo", processes=processes)


def _answer_bytes(address: str, request: bytes) -> int:
    with open_channel(address) as channel:
        call: Any = channel.unary_unary(SEARCH)
        return len(call(request, timeout=60))
