"""The gateway's Search by embedding against served vector databases at two recalls."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench import data
from bench.harness import Bench, Row, Table
from bench.loaded import load_table
from bench.published import INNER, Publication, make_publication
from bench.rivals import chroma, milvus, pgvector
from bench.rivals.rival import EFS, Rival
from bench.serving import copy_filled, embedding_requests, run_gateway
from bench.topics.index import SPEC, recall
from demo.load import SEARCH, read_requests, write_requests
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.v1 import search_pb2, search_pb2_grpc
from nobackfill.vectors import Vectors
from nobackfill.wire.connection import open_channel

K = 10
QUERIES = 200
RECALLS = (0.95, 0.99)
NOTE = (
    "Queries a second, k = 10, the same vectors and queries, graphs made with the same M and "
    "efConstruction, requests prepared beforehand: {rivals}. Each at the first ef of {efs} that "
    "reaches a recall of 0.95 and of 0.99, from what a bare graph needs on. The gateway chooses "
    "its ef itself: where another finds less, that is to the other's advantage."
)


def run(bench: Bench) -> list[Table]:
    """Each size, each number of clients."""
    pair = make_publication(bench.shared, inner=bench.size(64, INNER, INNER))
    sizes = [bench.size(2500, 10_000, 10_000), bench.size(0, 100_000, 100_000)]
    return [_table(bench, pair, size) for size in filter(None, sizes)]


def _table(bench: Bench, pair: Publication, size: int) -> Table:
    folder = bench.folder / str(size)
    folder.mkdir()
    items, queries = data.draw_items(size), data.draw_items(QUERIES, seed=1).new
    spec = SpaceSpec.of(pair.manifests[2])
    true = ExactIndex(spec, np.arange(size), items.new).search(queries, K).labels
    ours = write_requests(folder / "ours", embedding_requests(spec.space, queries, K))
    enough = _enough(items.new, queries, true)
    with ExitStack() as stack:
        rivals = list(_rivals(stack, folder, items.new, queries, sorted(set(enough.values()))))
        copy_filled(bench, pair, size, folder)
        gateway = stack.enter_context(run_gateway(folder, pair.repo))
        gateway.settle()
        targets = {"gateway": (gateway.address, SEARCH, ours)}
        found = recall(_found(gateway.address, ours), true)
        facts: dict[str, Row] = {"gateway": {"ef": None, "recall@10": found}}
        for rival in rivals:
            for wanted, first in enough.items():
                ef, reached = _first(rival, first, wanted, true)
                name = f"{rival.name} for {wanted}"
                targets[name] = rival.load_target(ef, folder / name)
                facts[name] = {"ef": ef, "recall@10": reached}
        told = ", ".join(f"{rival.name} {rival.version}" for rival in rivals)
        note = NOTE.format(rivals=told, efs=", ".join(map(str, EFS)))
        title = f"Search by embedding, {size:,} items of {data.DIM} dims"
        return load_table(bench, title, note, targets, ["gateway"], "gateway", facts)


def _rivals(
    stack: ExitStack, folder: Path, vectors: Vectors, queries: Vectors, efs: Sequence[int]
) -> Iterator[Rival]:
    """Those that `make bench` has installed."""
    yield stack.enter_context(pgvector.serve_pgvector(vectors, queries, K))
    if importlib.util.find_spec("milvus") is not None:
        yield stack.enter_context(milvus.serve_milvus(vectors, queries, K))
    if chroma.PROGRAM.exists():
        yield stack.enter_context(chroma.serve_chroma(folder, vectors, queries, K, efs))


def _first(rival: Rival, first: int, wanted: float, true: Labels) -> tuple[int, float]:
    """The ef from which on a recall is reached, and the recall there."""
    ef, reached = first, 0.0
    for ef in EFS[EFS.index(first) :]:
        reached = recall(rival.search_all(ef), true)
        if reached >= wanted:
            break
    return ef, reached


def _enough(vectors: Vectors, queries: Vectors, true: Labels) -> dict[float, int]:
    """The smallest of EFS at which a graph of ours reaches each recall.

    A collection of Chroma's has one ef for good and takes long to fill: all are tried from there.
    """
    index = hnsw.build_index(SPEC, np.arange(len(vectors)), vectors, count_threads=lambda: 2)
    found: dict[float, int] = {}
    for ef in EFS:
        index.graph.ef = ef
        answer = index.graph.search(queries, K)
        assert answer is not None, "K of a whole graph are reached"
        reached = recall(answer[0], true)
        found |= {wanted: ef for wanted in RECALLS if reached >= wanted and wanted not in found}
    return dict.fromkeys(RECALLS, EFS[-1]) | found


def _found(address: str, requests: Path) -> Labels:
    """What the gateway finds, as numbers of items [q, k]."""
    with open_channel(address) as channel:
        search = search_pb2_grpc.SearchServiceStub(channel).Search
        answers = [
            search(search_pb2.SearchRequest.FromString(request), timeout=60)
            for request, _ in read_requests(requests)
        ]
    return np.array([[int(hit.id.removeprefix("item-")) for hit in a.hits] for a in answers])
