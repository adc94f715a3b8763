"""The gateway's Search by image against Triton called directly."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tritonclient.grpc import service_pb2

from bench import data
from bench.harness import Bench, Table
from bench.loaded import table
from bench.published import INNER, SIZE, publication
from bench.record import ROOT
from bench.serving import by_image, copy_filled, serving
from demo.load import SEARCH, write_requests
from nobackfill.images import decode
from nobackfill.release import paths
from nobackfill.server.triton.client import TritonClient
from nobackfill.server.triton.configuration import model_config
from nobackfill.server.triton.process import TritonProcess

INFER = "/inference.GRPCInferenceService/ModelInfer"
QUERIES = 64
LOAD_SECONDS = 120
NOTE = (
    "Queries a second, k = 10, JPEGs of 32 x 32 pixels, an embedder that costs next to nothing (so "
    "that what stands around it shows). Both ask the same Triton; `triton` gets decoded pixels and "
    "gives embeddings: no decoding, no search."
)


def run(bench: Bench) -> list[Table]:
    """Each number of clients."""
    pair = publication(bench.shared, inner=bench.size(64, INNER, INNER))
    size = bench.size(3000, 10_000, 100_000)
    images = data.jpegs(QUERIES, SIZE, seed=1)
    asked, direct = bench.folder / "asked", bench.folder / "direct"
    write_requests(asked, by_image(images))
    write_requests(direct, [_infer(image) for image in images])
    with ExitStack() as stack:
        triton = stack.enter_context(_triton(bench.folder / "triton", pair.repo))
        copy_filled(bench, pair, size, bench.folder)
        gateway = stack.enter_context(serving(bench.folder, pair.repo, triton))
        gateway.settle()
        targets = {"gateway": (gateway.address, SEARCH, asked), "triton": (triton, INFER, direct)}
        title = f"Search by image, {size:,} items"
        processes = {"gateway": gateway.process}
        return [table(bench, title, NOTE, targets, ["triton"], "triton", processes=processes)]


@contextmanager
def _triton(folder: Path, repo: Path) -> Iterator[str]:
    """A tritonserver over a publication, with release 2's embedder; its address."""
    venv = Path(os.environ.get("NOBACKFILL_TRITON_VENV", ROOT / ".venv-triton"))
    process = TritonProcess(venv, repo, folder)
    process.start()
    client = TritonClient(process.address)
    try:
        while not client.live(1.0):
            assert process.alive(), process.log_tail()
        name = paths.embedder_model(2)
        client.load(name, model_config(repo, name), LOAD_SECONDS)
        yield process.address
    finally:
        client.close()
        process.stop()


def _infer(image: bytes) -> bytes:
    pixels = decode(image, SIZE, SIZE)[None]
    request = service_pb2.ModelInferRequest(model_name=paths.embedder_model(2), model_version="1")
    request.inputs.add(name="image", datatype="UINT8", shape=pixels.shape)
    request.outputs.add(name="embedding")
    request.raw_input_contents.append(pixels.tobytes())
    serialised: bytes = request.SerializeToString()
    return serialised
