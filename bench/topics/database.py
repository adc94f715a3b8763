"""The gateway's Search by embedding against a served vector database at two recalls."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import chroma, data, record
from bench.harness import Bench, Row, Table
from bench.loaded import table
from bench.published import INNER, Publication, publication
from bench.serving import by_embedding, copy_filled, serving
from bench.topics.index import SPEC, recall
from demo.load import HTTP, SEARCH, read_requests, write_requests
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.search.exact import ExactIndex
from nobackfill.gallery.search.index import Labels
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.v1 import search_pb2, search_pb2_grpc
from nobackfill.vectors import Vectors
from nobackfill.wire.channel import open_channel

K = 10
QUERIES = 200
RECALLS = (0.95, 0.99)
EFS = (10, 15, 20, 30, 40, 60, 80, 120, 160, 240)
NOTE = (
    "Queries a second, k = 10, the same vectors and queries, graphs made with the same M and "
    "efConstruction; Chroma {version} over HTTP with bodies prepared beforehand, at the first "
    "ef_search of {efs} that reaches a recall of 0.95 and of 0.99, from what a bare graph needs "
    "on. The gateway chooses its ef itself, 64 or more: where Chroma finds less, that is to "
    "its advantage."
)


def run(bench: Bench) -> list[Table]:
    """Each size, each number of clients. Raises RuntimeError without Chroma."""
    if not chroma.PROGRAM.exists():
        raise RuntimeError(f"expected Chroma at {chroma.PROGRAM}; `make bench` installs it")
    pair = publication(bench.shared, inner=bench.size(64, INNER, INNER))
    sizes = [bench.size(2500, 10_000, 10_000), bench.size(0, 100_000, 100_000)]
    return [_table(bench, pair, size) for size in filter(None, sizes)]


def _table(bench: Bench, pair: Publication, size: int) -> Table:
    folder = bench.folder / str(size)
    folder.mkdir()
    items, queries = data.things(size), data.things(QUERIES, seed=1).new
    spec = SpaceSpec.of(pair.manifests[2])
    true = ExactIndex(spec, np.arange(size), items.new).search(queries, K).labels
    ours = write_requests(folder / "ours", by_embedding(spec.space, queries, K))
    bodies = chroma.bodies(queries, K)
    theirs = write_requests(folder / "theirs", bodies)
    with ExitStack() as stack:
        server = stack.enter_context(chroma.running(folder))
        chosen = _collections(server, items.new, queries, true)
        copy_filled(bench, pair, size, folder)
        gateway = stack.enter_context(serving(folder, pair.repo))
        gateway.settle()
        found = recall(_found(gateway.address, ours), true)
        targets = {"gateway": (gateway.address, SEARCH, ours)}
        facts: dict[str, Row] = {"gateway": {"ef": None, "recall@10": found}}
        for wanted, (path, ef, reached) in chosen.items():
            name = f"Chroma for {wanted}"
            targets[name] = (f"{HTTP}{server}", path, theirs)
            facts[name] = {"ef": ef, "recall@10": reached}
        title = f"Search by embedding, {size:,} items of {data.DIM} dims"
        note = NOTE.format(version=record.versions()["chromadb"], efs=", ".join(map(str, EFS)))
        return table(bench, title, note, targets, ["gateway"], "gateway", facts)


def _collections(
    server: str, vectors: Vectors, queries: Vectors, true: Labels
) -> dict[float, tuple[str, int, float]]:
    """For each recall wanted: where to ask, the ef, and the recall reached."""
    bodies, added = chroma.bodies(queries, K), chroma.additions(vectors)
    enough = _enough(vectors, queries, true)
    # Both at a time: a server fills one collection on one core.
    with ThreadPoolExecutor() as pool:
        efs = sorted(set(enough.values()))
        filled = pool.map(partial(chroma.collection, server, added), efs)
        paths = dict(zip(efs, filled, strict=True))
    chosen: dict[float, tuple[str, int, float]] = {}
    for wanted, first in enough.items():
        for ef in EFS[EFS.index(first) :]:
            if ef not in paths:
                paths[ef] = chroma.collection(server, added, ef)
            reached = recall(chroma.answers(server, paths[ef], bodies), true)
            chosen[wanted] = (paths[ef], ef, reached)
            if reached >= wanted:
                break
    return chosen


def _enough(vectors: Vectors, queries: Vectors, true: Labels) -> dict[float, int]:
    """The smallest of EFS at which a graph of ours reaches each recall.

    A collection of Chroma's has one ef for good and takes long to fill, so it is tried from there.
    """
    index = hnsw.build(SPEC, np.arange(len(vectors)), vectors, threads=lambda: 2)
    found: dict[float, int] = {}
    for ef in EFS:
        index.graph.set_ef(ef)
        labels: Any = index.graph.knn_query(queries, K)[0]
        reached = recall(labels.astype(np.int64), true)
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
