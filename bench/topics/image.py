"""The gateway's Search by image against Triton called directly."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tritonclient.grpc import service_pb2

from bench import data
from bench.harness import Bench, Table
from bench.loaded import load_table
from bench.published import INNER, SIZE, make_publication
from bench.record import ROOT
from bench.serving import copy_filled, image_requests, run_gateway
from demo.load import SEARCH, write_requests
from nobackfill.images import decode_image
from nobackfill.release import manifest
from nobackfill.server.triton.client import TritonClient
from nobackfill.server.triton.models import model_config
from nobackfill.server.triton.process import TritonProcess

INFER = "/inference.GRPCInferenceService/ModelInfer"
QUERIES = 64
USUAL = 224
LOAD_SECONDS = 120
NOTE = (
    "Queries a second, k = 10, JPEGs of {side} x {side} pixels among pictures like them, an "
    "embedder that costs little (so that what stands around it shows). Both ask the same Triton; "
    "`triton` gets decoded pixels and gives embeddings: no decoding, no search. Decoding one takes "
    "{decoding:.0f} us alone."
)


def run(bench: Bench) -> list[Table]:
    """Each number of clients, of small images and of those that models usually read."""
    return [_table(bench, SIZE), _table(bench, USUAL)]


def _table(bench: Bench, side: int) -> Table:
    pair = make_publication(bench.shared, inner=bench.size(64, INNER, INNER), size=side)
    size = bench.size(3000, 10_000, 100_000)
    images = data.draw_jpegs(QUERIES, side, seed=1)
    folder = bench.folder / str(side)
    folder.mkdir()
    asked, direct = folder / "asked", folder / "direct"
    write_requests(asked, image_requests(images))
    write_requests(direct, [_infer(image, side) for image in images])
    with ExitStack() as stack:
        triton = stack.enter_context(_triton(folder / "triton", pair.repo))
        # Pictures like those that are asked: what is like nothing stored is searched wider.
        copy_filled(bench, pair, size, folder, pictures=side)
        gateway = stack.enter_context(run_gateway(folder, pair.repo, triton))
        gateway.settle()
        targets = {"gateway": (gateway.address, SEARCH, asked), "triton": (triton, INFER, direct)}
        title = f"Search by image of {side} x {side}, {size:,} items"
        note = NOTE.format(side=side, decoding=1e6 * _decoding_s(images, side))
        processes = {"gateway": gateway.process}
        return load_table(bench, title, note, targets, ["triton"], "triton", processes=processes)


def _decoding_s(images: Sequence[bytes], side: int) -> float:
    """Of one image, all of them once again."""
    began = time.process_time()
    for image in [*images, *images]:
        decode_image(image, side, side)
    return (time.process_time() - began) / (2 * len(images))


@contextmanager
def _triton(folder: Path, repo: Path) -> Iterator[str]:
    """A tritonserver over a publication, with release 2's embedder; its address."""
    venv = Path(os.environ.get("NOBACKFILL_TRITON_VENV", ROOT / ".venv-triton"))
    process = TritonProcess(venv, repo, folder)
    process.start()
    client = TritonClient(process.address)
    try:
        while not client.is_live(1.0):
            assert process.alive(), process.log_tail()
        name = manifest.embedder_model_name(2)
        client.load(name, model_config(repo, name), LOAD_SECONDS)
        yield process.address
    finally:
        client.close()
        process.stop()


def _infer(image: bytes, side: int) -> bytes:
    pixels = decode_image(image, side, side)[None]
    request = service_pb2.ModelInferRequest(
        model_name=manifest.embedder_model_name(2), model_version="1"
    )
    request.inputs.add(name="image", datatype="UINT8", shape=pixels.shape)
    request.outputs.add(name="embedding")
    request.raw_input_contents.append(pixels.tobytes())
    serialised: bytes = request.SerializeToString()
    return serialised
