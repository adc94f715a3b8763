"""Upgrading a device's gallery against embedding its images again, as whole commands."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image

from bench import data
from bench.commands import run_edge_client
from bench.harness import Bench, Contender, Measurement, Row, Table, run_interleaved
from bench.published import INNER, NARROW, SIZE, Publication, make_publication
from bench.topics.edge import copy_device, make_device, make_filled_device, sync_copy

# torchvision's name, pixels, images embedded a round.
BACKBONES = (("resnet18", 224, 64), ("resnet50", 224, 32), ("mobilenet_v3_large", 224, 128))
NOTE = (
    "Whole `edge-client` processes on 2 threads: `sync` of a gallery of 128 + 128 dims, `add` of "
    "JPEG photos of 224 x 224 pixels through torchvision networks (random weights: their cost is "
    "the same). Each round runs the command with all its items and with one; `items/s` is what the "
    "other items took, (items - 1) / (seconds - seconds for one), so that the start counts for "
    "neither, however few images are embedded here; `with start` is items / seconds. `x` compares "
    "`items/s`. The images must be at hand for the one, and are not needed for the other."
)


@dataclass(frozen=True)
class Way:
    """`whole` and `one`: seconds of the command with `items` items, and with one."""

    name: str
    items: int
    whole: Callable[[], float]
    one: Callable[[], float]


def run(bench: Bench) -> list[Table]:
    """Items a second of each way, and how many times the upgrade is faster."""
    size = bench.size(300, 100_000, 100_000)
    wide = make_publication(bench.shared, inner=bench.size(64, INNER, INNER))
    narrow = make_publication(bench.shared, inner=bench.size(32, NARROW, NARROW))
    ways = [
        _syncing(bench, "sync, FCT fp32", wide, "fp32", size),
        _syncing(bench, "sync, FCT int8", wide, "int8", size),
        _syncing(bench, "sync, narrow int8", narrow, "int8", size),
    ]
    for name, pixels, count in BACKBONES[2:] if bench.tiny else BACKBONES:
        ways.append(
            _adding(bench, name, bench.size(SIZE, pixels, pixels), bench.size(8, count, count))
        )
    met: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    contenders = [Contender(way.name, partial(_rate, way, met[way.name])) for way in ways]
    measured = run_interleaved(contenders, bench.size(1, 2, 5), warm=False)
    rows = [_row(way, measured, met[way.name]) for way in ways]
    rounds = {name: figures.rounds for name, figures in measured.items()}
    for name, both in met.items():
        whole, one = zip(*both, strict=True)
        rounds |= {f"{name}, seconds": whole, f"{name}, seconds for one": one}
    return [Table("Upgrade against re-embedding", rows, NOTE, rounds)]


def _rate(way: Way, met: list[tuple[float, float]]) -> float:
    whole, one = way.whole(), way.one()
    met.append((whole, one))
    return (way.items - 1) / (whole - one)


def _row(way: Way, measured: dict[str, Measurement], met: list[tuple[float, float]]) -> Row:
    figures = measured[way.name]
    whole, one = map(statistics.median, zip(*met, strict=True))
    row = {
        "way": way.name,
        "items": way.items,
        "seconds": whole,
        "for one": one,
        "with start": way.items / whole,
        "items/s": figures.median,
        "spread": figures.spread_text,
    }
    for other in measured:
        if other.startswith("add") and way.name.startswith("sync"):
            row[f"x {other}"] = figures.ratio(measured[other])
    return row


def _syncing(bench: Bench, name: str, pair: Publication, kind: str, size: int) -> Way:
    many, single = (make_filled_device(bench, pair, count) for count in (size, 1))
    return Way(
        name, size, lambda: sync_copy(many, kind).seconds, lambda: sync_copy(single, kind).seconds
    )


def _adding(bench: Bench, backbone: str, pixels: int, count: int) -> Way:
    inner = bench.size(32, NARROW, NARROW)
    pair = make_publication(bench.shared, inner=inner, backbone=backbone, size=pixels)
    folder = bench.folder / backbone
    make_device(folder, pair)
    images, single = folder / "images", folder / "image"
    _photos(images, count, pixels)
    _photos(single, 1, pixels)

    def seconds(some: Path) -> float:
        done = run_edge_client(copy_device(folder), "add", some)
        assert len(done.answer["added"]) == len(list(some.iterdir()))
        return done.seconds

    return Way(f"add, {backbone}", count, partial(seconds, images), partial(seconds, single))


def _photos(folder: Path, count: int, pixels: int) -> None:
    folder.mkdir()
    for number, image in enumerate(data.draw_images(count, pixels)):
        Image.fromarray(image).save(folder / f"{number}.jpg", quality=90)
