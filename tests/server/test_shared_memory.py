"""What goes through memory that Triton has mapped, where no Triton answers."""

from contextlib import closing

import numpy as np
import pytest

from nobackfill.errors import UnavailableError
from nobackfill.server.triton.client import Inputs, TritonClient


@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": np.ones((64, 64), np.int64)},
        {name: np.ones((64, 64), np.int64) for name in ("input_ids", "attention_mask")},
        {"image": np.ones((64, 512), np.uint8)},
    ],
    ids=["tokens", "more", "pixels"],
)
def test_pixels_alone_go_through_memory(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    with closing(TritonClient("127.0.0.1:1")) as client:
        monkeypatch.setattr(client._shared, "acquire_region", asked.append)
        with pytest.raises(UnavailableError):
            client.infer("model", inputs, "embedding", 1)
    assert asked == ([2**15] if "image" in inputs else [])


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
