"""What Triton finds in memory that it has mapped."""

import os

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from nobackfill.errors import UnavailableError
from nobackfill.server.triton.client import TritonClient
from nobackfill.server.triton.shared_memory import Region


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_it_holds_pixels_and_tokens(kind: type[np.generic]) -> None:
    """A text encoder may read one input alone, which comes this way as pixels do."""
    region = Region(f"nobackfill-{os.getpid()}-{os.urandom(8).hex()}-test", 4096)
    try:
        for values in (np.arange(60), np.arange(120).reshape(4, 30)[:, ::2]):
            tensor = service_pb2.ModelInferRequest.InferInputTensor()
            region.hold(values.astype(kind, order="K"), tensor)
            size = tensor.parameters["shared_memory_byte_size"].int64_param
            assert region.path.read_bytes()[:size] == values.astype(kind).tobytes()
    finally:
        region.path.unlink()


def test_a_channel_that_was_closed_for_another_costs_a_call_and_no_memory() -> None:
    client = TritonClient("127.0.0.1:1")
    shared = client._shared
    assert shared is not None
    names = sorted(shared._names)
    client._channel.close()
    for _ in range(3):
        with pytest.raises(UnavailableError):
            client.infer("model", {"image": np.zeros((2, 65536), np.uint8)}, "embedding", 1)
    assert sorted(shared._names) == names
