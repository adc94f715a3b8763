"""The gateway's Search by embedding against a bare gRPC echo."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from bench import data, echo
from bench.harness import Bench, Row, Table
from bench.load import write_requests
from bench.models import INNER
from bench.published import publication
from bench.serving import (
    SEARCH,
    Load,
    by_embedding,
    copy_filled,
    echoing,
    latency,
    serving,
    under_load,
)

QUERIES = 256
# Of a Search's answer with ten hits.
ANSWER_BYTES = 600
NOTE = (
    "Queries a second, k = 10, closed loops of clients in one process beside the server on the "
    "same cores. The echoes answer the same requests with 600 bytes and do nothing else; aio is "
    "grpc.aio, sync has 8 threads. `of echo`: of the better of the two."
)


def run(bench: Bench) -> list[Table]:
    """Each size, each number of clients."""
    pair = publication(bench.shared, inner=bench.size(64, INNER, INNER))
    manifest = pair.manifests[2]
    sizes = [bench.size(3000, 10_000, 10_000), bench.size(0, 100_000, 100_000)]
    tables = []
    for size in filter(None, sizes):
        folder = bench.folder / str(size)
        folder.mkdir()
        copy_filled(bench, pair, size, folder)
        with serving(folder, pair.repo) as gateway:
            gateway.settle()
            queries = by_embedding(manifest.space, data.things(QUERIES, seed=1).new)
            requests = folder / "requests"
            write_requests(requests, queries)
            tables.append(_table(bench, gateway.address, requests, size))
    return tables


def _table(bench: Bench, address: str, requests: Path, size: int) -> Table:
    rows: list[Row] = []
    with ExitStack() as stack:
        targets = {
            "gateway": (address, SEARCH, requests),
            "echo aio": (stack.enter_context(echoing("aio", ANSWER_BYTES)), echo.METHOD, requests),
            "echo sync": (
                stack.enter_context(echoing("sync", ANSWER_BYTES)),
                echo.METHOD,
                requests,
            ),
        }
        load = stack.enter_context(Load())
        for clients in bench.clients:
            rows += _rows(bench, load, targets, clients)
    return Table(f"Search by embedding, {size:,} items of 128 dims", rows, NOTE)


def _rows(
    bench: Bench, load: Load, targets: Mapping[str, tuple[str, str, Path]], clients: int
) -> list[Row]:
    """Each server with so many clients."""
    measured, runs = under_load(bench, load, targets, clients)
    best = max((name for name in targets if "echo" in name), key=lambda n: measured[n].median)
    rows: list[Row] = []
    for name, figures in measured.items():
        within = latency(runs[name])
        rows.append(
            {
                "clients": clients,
                "server": name,
                "queries/s": figures.median,
                "spread": f"±{100 * figures.spread:.0f} %",
                "of echo": figures.ratio(measured[best]),
                "p50 ms": within.p50,
                "p99 ms": within.p99,
            }
        )
    return rows
