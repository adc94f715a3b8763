"""Upgrading a device's gallery against embedding its images again, as whole commands."""

from functools import partial
from pathlib import Path

from PIL import Image

from bench import data
from bench.commands import edge
from bench.harness import Bench, Contender, Row, Table, interleave
from bench.models import INNER, NARROW
from bench.published import SIZE, publication
from bench.topics.edge import copied, device, filled, synced

# torchvision's name, pixels, images embedded a round.
BACKBONES = (("resnet18", 224, 96), ("resnet50", 224, 48), ("mobilenet_v3_large", 224, 192))
NOTE = (
    "Items a second on 2 threads, each a whole `edge-client` process with its start: `sync` of "
    "{size:,} items of 128 + 128 dims, `add` of JPEG photos of 224 x 224 pixels through "
    "torchvision networks (random weights: their cost is the same). The images must be at hand for "
    "the one, and are not needed for the other."
)


def run(bench: Bench) -> list[Table]:
    """Items a second of each way, and how many times the upgrade is faster."""
    size = bench.size(300, 100_000, 100_000)
    wide = publication(bench.shared, inner=bench.size(64, INNER, INNER))
    narrow = publication(bench.shared, inner=bench.size(32, NARROW, NARROW))
    fct = filled(bench.folder / "fct", wide, size)
    small = filled(bench.folder / "narrow", narrow, size)
    contenders = [
        Contender("sync, FCT fp32", partial(_rate, fct, "fp32", size)),
        Contender("sync, FCT int8", partial(_rate, fct, "int8", size)),
        Contender("sync, narrow int8", partial(_rate, small, "int8", size)),
    ]
    backbones = BACKBONES[2:] if bench.tiny else BACKBONES
    for name, pixels, count in backbones:
        contenders.append(_adding(bench, name, bench.size(SIZE, pixels, pixels), count))
    measured = interleave(contenders, bench.size(1, 2, 5), warm=False)
    rows: list[Row] = []
    for name, figures in measured.items():
        row: dict[str, str | float] = {
            "way": name,
            "items/s": figures.median,
            "spread": f"±{100 * figures.spread:.0f} %",
        }
        if name.startswith("sync"):
            row |= {
                f"x {other}": figures.ratio(measured[other])
                for other in measured
                if other.startswith("add")
            }
        rows.append(row)
    rounds = {name: figures.rounds for name, figures in measured.items()}
    return [Table("Upgrade against re-embedding", rows, NOTE.format(size=size), rounds)]


def _rate(folder: Path, kind: str, size: int) -> float:
    return size / synced(folder, kind).seconds


def _adding(bench: Bench, backbone: str, pixels: int, count: int) -> Contender:
    inner = bench.size(32, NARROW, NARROW)
    pair = publication(bench.shared, inner=inner, backbone=backbone, size=pixels)
    folder = bench.folder / backbone
    device(folder, pair)
    images = folder / "images"
    _photos(images, bench.size(2, count, count), pixels)

    def once() -> float:
        done = edge(copied(folder), "add", images)
        return len(done.answer["added"]) / done.seconds

    return Contender(f"add, {backbone}", once)


def _photos(folder: Path, count: int, pixels: int) -> None:
    folder.mkdir()
    for number, image in enumerate(data.images(count, pixels)):
        Image.fromarray(image).save(folder / f"{number}.jpg", quality=90)
