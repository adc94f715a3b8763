"""The demo's estimate of its own cost, and how it goes on where a gateway is busy."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from PIL import Image

from demo import gateway, recipes
from demo.recipes import LEAST_EPOCHS, TRAINING_SECONDS, Recipes, choose_affordable
from demo.screen import Screen, format_duration
from nobackfill.errors import UnavailableError
from nobackfill.v1 import gallery_pb2

GIVEN = Recipes(Path("images"), Path("runs"), 64, None, None, 0, compatible=False)


@pytest.mark.parametrize(
    ("images", "seconds_a_pixel", "image_size", "epochs"),
    [
        (1_000, 1e-9, 64, None),  # cheap: as large as the pictures
        (2_000, 1e-6, 24, None),  # dear: the largest input that trains in time
        (200_000, 1e-6, 16, LEAST_EPOCHS),  # dearer than that: the fewest epochs
        (10_000, 1e-6, 16, 26),
    ],
)
def test_trainings_fit_minutes(
    monkeypatch: pytest.MonkeyPatch,
    images: int,
    seconds_a_pixel: float,
    image_size: int,
    epochs: int | None,
) -> None:
    monkeypatch.setattr(
        recipes, "measure_step_seconds", lambda backbone, size: seconds_a_pixel * size * size
    )
    chosen, seconds = choose_affordable(GIVEN, images // 2, images)
    assert (chosen.image_size, chosen.epochs) == (image_size, epochs)
    assert seconds == pytest.approx(chosen.seconds(images // 2, images), rel=0.05)
    assert seconds <= TRAINING_SECONDS or chosen.epochs == LEAST_EPOCHS


def test_small_pictures_are_not_enlarged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "measure_step_seconds", lambda backbone, size: 1e-9)
    assert choose_affordable(replace(GIVEN, image_size=24), 10, 20)[0].image_size == 24


def test_a_step_is_measured() -> None:
    assert (
        0
        < recipes.measure_step_seconds("small", 16)
        < recipes.measure_step_seconds("small_resnet", 64)
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 seconds"), (95, "95 seconds"), (400, "7 minutes"), (7300, "2.0 hours")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_progress_off_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("demo.screen.LINE_EVERY", 0.0)
    with (screen := Screen()).step("Train"):
        screen.bar("train embedder-2", 40)(10)
    assert "train embedder-2: 10 of 40, about" in capsys.readouterr().err


class _Busy:
    """Refuses its first puts, half-way, as a gateway whose model server is away."""

    def __init__(self, refusals: int) -> None:
        self.left = refusals
        self.stored: set[str] = set()

    def put_items(
        self,
        request_iterator: Iterator[gallery_pb2.PutItemsRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[gallery_pb2.PutItemsResponse]:
        count = 0
        for request in request_iterator:
            for item in request.items:
                self.stored.add(item.id)
                count += 1
            if self.left:
                self.left -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "the model server is away")
        yield gallery_pb2.PutItemsResponse(stored=count)


@pytest.mark.parametrize("refusals", [2, 99])
def test_puts_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
    monkeypatch.setattr(gateway, "_PAUSE", 0.01)
    for number in range(3):
        (tmp_path / "a").mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "a" / f"{number}.png")
    server = grpc.server(ThreadPoolExecutor(4))
    busy = _Busy(refusals)
    handler = grpc.stream_stream_rpc_method_handler(
        busy.put_items,
        gallery_pb2.PutItemsRequest.FromString,
        gallery_pb2.PutItemsResponse.SerializeToString,
    )
    service = "nobackfill.v1.GalleryService"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"PutItems": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with gateway.connect(f"127.0.0.1:{port}") as connection:
            if refusals > 10:
                with pytest.raises(UnavailableError):
                    gateway.put_images(connection, "g", tmp_path, lambda stored: None)
            else:
                ids = gateway.put_images(connection, "g", tmp_path, lambda stored: None)
                assert set(ids) == busy.stored == {"a/0.png", "a/1.png", "a/2.png"}
    finally:
        server.stop(None)
